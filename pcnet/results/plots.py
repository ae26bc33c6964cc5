"""Figures of a result: states, causes, observations, parameters, precisions and free energy over time.

Each function draws into the given axes or into a new figure and returns the axes; `overview` draws all panels on one
page. Nothing here uses pyplot or changes its settings.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pcnet.errors import ResultError
from pcnet.results.downsample import Array, line_bins, means
from pcnet.results.drawing import (
    COLOURS,
    Curve,
    Series,
    channel_names,
    colour_of,
    darken,
    draw_series,
    finish,
    legend,
    own_axes,
    time_axis,
)
from pcnet.results.result import Interval, Result

Element = int | tuple[int, ...]  # a batch element: its index, or its flat index
Labels = Sequence[str] | Mapping[str, Sequence[str]] | None

MAX_FORECAST_PANELS = 8  # channels that a figure of a forecast shows
MAX_STATE_PANELS = 6  # up to this many state channels get a panel each in the overview
PARTS = {
    "states": "state",
    "causes": "cause",
    "observations": "sensory",
    "parameters": "parameter",
    "precisions": "precision",
    "free energy": "free energy",
}
"""Names of the panels of `overview`, and the kinds of nodes that they show."""
DRAWN_AS = {"categorical": "state"}  # kinds of nodes that are drawn in the panel of another kind


# --- panels ----------------------------------------------------------------------------------------------------------
def panel(
    result: Result,
    node: str | None = None,
    truth: Any = None,
    *,
    kind: str,
    ax: Axes | None = None,
    element: Element = 0,
    probability: float = 0.95,
    order: int = 0,
    dimensions: Sequence[int] | None = None,
    labels: Labels = None,
) -> Axes:
    """Draw the nodes of one kind: means with credible intervals, and the truth where given.

    Observations (kind "sensory") are drawn as dots and their predictions as lines.

    Args:
        node: Name of one node of that kind; all of them by default.
        truth: True values; (..., T, dim) for every observation or every recorded one, or (..., dim) for parameters and
            log-precisions. A mapping from node names to these for several nodes.
        kind: "state", "cause", "sensory", "parameter" or "precision".
        element: Batch element.
        probability: Probability of the credible interval.
        order: 0 is the value, 1 the velocity, and so on.
        dimensions: Channels to draw; at most six by default.
        labels: One label per drawn channel, or lists of labels by node.
    """
    names, single, series = _nodes(result, node, kind), result.single(element), list[Series]()
    for name in names:
        if kind == "sensory":
            quantities = {"observed": single.observation(name), "mean": single.prediction(name)}
        else:
            quantities = {"mean": single.mean(name), **single.interval(name, probability)._asdict()}
        values = {key: _order(each, order, name) for key, each in quantities.items()}
        dim, true = values["mean"].shape[-1], _truth_of(truth, name, names)
        find = _true_constants if quantities["mean"].ndim == 2 else _true_values
        curve = None if true is None else find(result, true, element, dim, name)
        given = labels.get(name) if isinstance(labels, Mapping) else None
        if given and len(given) != dim:
            raise ResultError(f"{len(given)} labels are given for {dim} lines of {name!r}; give one label per line")
        for i, label in enumerate(given or channel_names(name, dim)):
            own = None if curve is None else Curve(curve.times, curve.values[:, i])
            channels = {key: each[:, i] for key, each in values.items()}
            series.append(Series(name, label, colour_of(len(series)), **channels, truth=own))
    chosen = _choose(series, dimensions, None if isinstance(labels, Mapping) else labels)
    label = {"sensory": "observation", "precision": "log-precision"}.get(kind, kind)
    label += f", derivative {order}" if order else ""
    label += f"\n{len(chosen)} of {len(series)}" if dimensions is None and len(chosen) < len(series) else ""
    ax = own_axes(ax)
    draw_series(ax, result.times, chosen)
    finish(ax, label, result.times, chosen)
    return legend(ax, chosen, None if kind == "sensory" else f"{100 * probability:g} % interval")


states = partial(panel, kind="state")  # draw state estimates; see `panel`
causes = partial(panel, kind="cause")  # draw estimates of causes
sensations = partial(panel, kind="sensory")  # draw observations and their predictions
parameters = partial(panel, kind="parameter")  # draw parameter estimates
precisions = partial(panel, kind="precision")  # draw log-precisions


def free_energy(result: Result, *, ax: Axes | None = None, element: Element = 0) -> Axes:
    """Draw F = complexity − accuracy and its two terms; long runs by the mean and range of short bins."""
    single, times = result.single(element), result.times
    terms = {
        "free energy": ("black", single.free_energy),
        "complexity": (COLOURS[1], single.complexity),
        "−accuracy": (COLOURS[0], -single.accuracy),
    }
    drawn = [Series("", label, colour, values) for label, (colour, values) in terms.items()]
    bin_size = line_bins(len(times))
    ax = own_axes(ax)
    draw_series(ax, means(times, bin_size), [series.binned(bin_size) for series in drawn[::-1]])
    finish(ax, "free energy (nats)", times, drawn)
    return legend(ax, drawn, band=f"range of {bin_size} observations" if bin_size > 1 else None)


# --- overview --------------------------------------------------------------------------------------------------------
def overview(
    result: Result,
    truth: Any = None,
    true_parameters: Any = None,
    *,
    true_precisions: Any = None,
    parts: Sequence[str] | None = None,
    element: Element = 0,
    title: str | None = None,
    probability: float = 0.95,
    labels: Mapping[str, Sequence[str]] | None = None,
    dark: bool = False,
) -> Figure:
    """Draw all panels on one page: states and causes on the left, the others on the right.

    Args:
        truth: True states as for `states`; a mapping may also name causes.
        true_parameters, true_precisions: As for `parameters` and `precisions`.
        parts: Names of the panels, see `PARTS`; all that there are unless given.
        element: Batch element.
        title: The number of observations and the free action by default.
        probability: Probability of the credible intervals.
        labels: Labels of the channels by node, for example {"theta": ["a₁₂", "a₁₃", "a₂₃"]}.
        dark: Use the dark theme.
    """
    kinds, wanted = _kinds(result), _wanted(parts)
    kinds = {name: kind for name, kind in kinds.items() if kind in wanted}
    by_name = dict(truth) if isinstance(truth, Mapping) else {}
    true_causes = {name: values for name, values in by_name.items() if kinds.get(name) == "cause"}
    true_states = {k: v for k, v in by_name.items() if k not in true_causes} if isinstance(truth, Mapping) else truth
    options: dict[str, Any] = {"element": element, "probability": probability, "labels": labels or {}}
    truths = {"cause": true_causes or None, "sensory": None, "parameter": true_parameters, "precision": true_precisions}
    drawn = {k: partial(panel, result, kind=k, truth=t, **options) for k, t in truths.items() if k in kinds.values()}
    left = _state_panels(result, true_states, options) if "state" in kinds.values() else []
    left += [drawn.pop("cause")] if "cause" in drawn else []
    right: list[Callable[..., Axes]] = list(drawn.values())
    if "free energy" in wanted and (parts is not None or "accuracy" in result.traces):
        right.append(partial(free_energy, result, element=element))
    columns: list[Sequence[Callable[..., Axes]]] = [column for column in (left, right) if column]
    if not columns:
        raise ResultError(f"there is nothing to draw of {', '.join(parts or PARTS)}; nodes: {', '.join(result.roles)}")
    height = max(1.9 * max(map(len, columns)) + 0.8, 4.0)
    figure = Figure(figsize=(6.0 * len(columns), height), layout="constrained")
    for sub, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        for ax, draw in zip(sub.subplots(len(column), 1, sharex=True, squeeze=False)[:, 0], column, strict=True):
            draw(ax=ax)
            ax.label_outer()
        sub.align_ylabels()
    if title is None:
        action = result.free_action.reshape(-1)[result.flat_index(element)]
        which = f", batch element {element}" if result.batch_shape else ""
        title = f"{result.observations:,} observations{which}: free action {action:,.0f} nats".replace("-", "−")
    figure.suptitle(title)
    if dark:
        darken(figure)
    return figure


def _wanted(parts: Sequence[str] | None) -> list[str]:
    """Kinds of nodes of the panels with these names, and "free energy"."""
    given = list(PARTS) if parts is None else [parts] if isinstance(parts, str) else list(parts)
    for part in given:
        if part not in PARTS:
            raise ResultError(f"there is no part {part!r} of the figure; parts: {', '.join(PARTS)}")
    return [PARTS[part] for part in given]


def _state_panels(result: Result, truth: Any, options: Mapping[str, Any]) -> list[Callable[..., Axes]]:
    """One panel per state channel if there are few, else one per node."""
    names = _nodes(result, None, "state")
    sizes = {name: result.mean(name).shape[-1] for name in names}
    truths = {name: _truth_of(truth, name, names) for name in names}
    if sum(sizes.values()) > MAX_STATE_PANELS:
        return [partial(states, result, name, truths[name], **options) for name in names]

    def channel(name: str, dimension: int, ax: Axes) -> Axes:
        states(result, name, truths[name], ax=ax, dimensions=[dimension], **options)
        legend = ax.get_legend()
        assert legend is not None
        ax.set_ylabel(ax.get_ylabel().replace("state", legend.get_texts()[0].get_text(), 1))
        if (name, dimension) != (names[0], 0):
            legend.remove()
        return ax

    return [partial(channel, name, i) for name in names for i in range(sizes[name])]


def forecast(
    times: Array,
    given: Mapping[str, tuple[Array, Interval]],
    after: Result | None,
    truth: Mapping[str, Any] | None,
    probability: float,
    element: Element,
    dark: bool,
) -> Figure:
    """Draw a forecast: mean and interval (..., T, dim) of each node, a panel for each channel; see `Forecast.plot`."""
    channels = [(name, i) for name, (mean, _) in given.items() for i in range(mean.shape[-1])][:MAX_FORECAST_PANELS]
    unknown = [name for name in truth or () if name not in given]
    if unknown:
        raise ResultError(f"truth is given for {unknown[0]!r}; nodes drawn: {', '.join(given)}")
    figure = Figure(figsize=(7.0, 1.7 * len(channels) + 0.9), layout="constrained")
    for ax, (name, i) in zip(
        figure.subplots(len(channels), 1, sharex=True, squeeze=False)[:, 0], channels, strict=True
    ):
        mean, interval = given[name]
        parts = [
            np.asarray(part).reshape(-1, *part.shape[-2:])[_flat(mean, element), :, i] for part in (mean, *interval)
        ]
        label = channel_names(name, mean.shape[-1])[i]
        true = None
        if truth is not None and name in truth:
            values = np.asarray(truth[name], dtype=np.float64).reshape(len(times), -1)
            true = Curve(times, values[:, i])
        drawn = [Series(name, "forecast", COLOURS[1], parts[0], parts[1], parts[2], truth=true)]
        if after is not None:
            drawn = [*_before(after, name, i, len(times), probability, element), *drawn]
        for series in drawn:
            at = times if series.label == "forecast" else after.times[-len(series.mean) :]  # type: ignore[union-attr]
            draw_series(ax, at, [series])
        first = times if after is None else after.times[-len(drawn[0].mean) :]
        if after is not None:
            ax.axvline(after.times[-1], color="grey", linewidth=0.8, linestyle=":")
        ax.set_ylabel(label)
        time_axis(ax, np.concatenate([first[:1], times]))
        if i == 0 and name == channels[0][0]:
            legend(ax, drawn, f"{100 * probability:g} % interval")
        ax.label_outer()
    figure.align_ylabels()
    if dark:
        darken(figure)
    return figure


def _flat(mean: Array, element: Element) -> int:
    shape = mean.shape[:-2]
    try:
        return (
            int(np.ravel_multi_index(element, shape))
            if isinstance(element, tuple)
            else range(max(1, int(np.prod(shape))))[element]
        )
    except (IndexError, ValueError, TypeError):
        raise ResultError(f"there is no batch element {element!r}; the batch has shape {shape}") from None


def _before(after: Result, name: str, channel: int, ahead: int, probability: float, element: Element) -> list[Series]:
    """What was believed or observed before a forecast, over about three times its length."""
    single = after.single(element)
    last = slice(-min(len(single.times), max(3 * ahead, 50)), None)
    if f"{name}.observation" in single.traces and f"{name}.prediction" in single.traces:
        observed, mean = (_order(single.get(name, q), 0, name)[last, channel] for q in ("observation", "prediction"))
        return [Series(name, "predicted", COLOURS[0], mean, observed=observed)]
    if f"{name}.mean" not in single.traces or f"{name}.sd" not in single.traces:
        return []
    band = single.interval(name, probability)
    parts = [_order(each, 0, name)[last, channel] for each in (single.mean(name), band.lower, band.upper)]
    return [Series(name, "inferred", COLOURS[0], parts[0], parts[1], parts[2])]


# --- parts -----------------------------------------------------------------------------------------------------------
def _kinds(result: Result) -> dict[str, str]:
    """Kind of each node; its role in files without a graph summary, where states and causes have the same role."""
    kinds = result.roles if result.structure is None else {node.name: node.kind for node in result.structure.nodes}
    return {name: DRAWN_AS.get(kind, kind) for name, kind in kinds.items()}


def _nodes(result: Result, node: str | None, kind: str) -> list[str]:
    """Names of the nodes of a kind, or the given name if it is one of them."""
    known = [name for name, each in _kinds(result).items() if each == kind]
    if node is None and not known:
        raise ResultError(f"there is no {kind} node to draw; nodes: {', '.join(result.roles)}")
    if node is not None and node not in known:
        raise ResultError(f"there is no {kind} node {node!r}; {kind} nodes: {', '.join(known) or 'none'}")
    return known if node is None else [node]


def _choose(drawn: list[Series], dimensions: Sequence[int] | None, labels: Sequence[str] | None) -> list[Series]:
    """Series at the given indices, relabelled; by default as many as there are colours, spread over the nodes."""
    if dimensions is not None:
        if not all(0 <= i < len(drawn) for i in dimensions):
            raise ResultError(f"dimensions must be from 0 to {len(drawn) - 1}, not {list(dimensions)}")
        drawn = [drawn[i] for i in dimensions]
    if labels is not None:
        if len(labels) != len(drawn):
            raise ResultError(f"{len(labels)} labels are given for {len(drawn)} lines; give one label per line")
        drawn = [series._replace(label=label) for series, label in zip(drawn, labels, strict=True)]
    if dimensions is not None or len(drawn) <= len(COLOURS):
        return drawn
    by_node: dict[str, list[int]] = {}
    for i, series in enumerate(drawn):
        by_node.setdefault(series.node, []).append(i)
    in_turn = [own[k] for k in range(len(drawn)) for own in by_node.values() if k < len(own)]
    return [drawn[i]._replace(colour=colour_of(n)) for n, i in enumerate(sorted(in_turn[: len(COLOURS)]))]


def _order(values: Array, order: int, name: str) -> Array:
    """Channels (T, dim) of one order of motion; quantities without orders are returned as they are."""
    if values.ndim == 2:
        return values
    if not 0 <= order < values.shape[1]:
        raise ResultError(f"{name!r} has orders 0 to {values.shape[1] - 1}, not {order}")
    return values[:, order]


def _truth_of(truth: Any, name: str, names: Sequence[str]) -> Any:
    """Truth of one node."""
    if truth is None:
        return None
    if isinstance(truth, Mapping):
        unknown = [key for key in truth if key not in names]
        if unknown:
            raise ResultError(f"truth is given for {unknown[0]!r}; nodes drawn: {', '.join(names)}")
        return truth.get(name)
    if len(names) > 1:
        raise ResultError(f"there are several nodes; give truth as a mapping from their names: {', '.join(names)}")
    return truth


def _true_values(result: Result, truth: Any, element: Element, dim: int, name: str) -> Curve:
    """Truth (T, dim) of a batch element with its times: of every observation or of every recorded one."""
    values = _of_element(result, truth, element, 2)
    fits = values.ndim == 2 and values.shape[1] == dim
    if fits and len(values) == len(result.times):
        return Curve(result.times, values)
    if fits and len(values) == result.observations and len(result.times) > 1:
        # every N-th observation is recorded, the first at (N − 1)·dt and the next N·dt later
        dt = result.times[1] - 2 * result.times[0]
        return Curve(dt * np.arange(len(values)), values)
    raise ResultError(
        f"the truth of {name!r} has shape {np.shape(truth)}; it must be (time, {dim}) with one row for each of the "
        f"{result.observations} observations or of the {len(result.times)} recorded ones"
    )


def _true_constants(result: Result, truth: Any, element: Element, dim: int, name: str) -> Curve:
    """Truth (dim,) of a batch element as lines from the first to the last time."""
    values = _of_element(result, truth, element, 1)
    if values.ndim > 1 or values.size not in (1, dim):
        raise ResultError(f"the truth of {name!r} has shape {np.shape(truth)}; it must be ({dim},)")
    return Curve(result.times[[0, -1]], np.broadcast_to(values, (2, dim)))


def _of_element(result: Result, truth: Any, element: Element, own: int) -> Array:
    """Truth of one batch element, if it has the batch dimensions of the result; own: its other dimensions."""
    try:
        values = np.asarray(truth, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ResultError("a truth must be real numbers in a rectangular array") from None
    if result.batch_shape and values.ndim > own and values.shape[:-own] == result.batch_shape:
        values = values.reshape(-1, *values.shape[-own:])[result.flat_index(element)]
    return values
