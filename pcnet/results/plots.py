"""Pictures of a result: states, causes, sensations, parameters, precisions and free energy over time.

Every function draws into the axes it is given, or into a figure of its own, and returns the axes; `overview` puts all
of them on one page. Nothing here touches pyplot or its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pcnet.errors import ResultError
from pcnet.results.drawing import (
    COLOURS,
    Array,
    Curve,
    Series,
    channel_names,
    colour_of,
    darken,
    draw_series,
    finish,
    legend,
    notes,
    own_axes,
    percent,
    prime,
    shorten,
    stretches,
)
from pcnet.results.result import Result

Element = int | tuple[int, ...]
"""Which batch element: its index, or its number counting all of them."""

STRETCHES = 250
"""Free energies of longer runs are drawn by the means and extremes of about this many stretches."""
PANELS = 6
"""Up to this many states get a panel each in the overview."""


# --- one panel each --------------------------------------------------------------------------------------------------
def states(
    result: Result,
    node: str | None = None,
    truth: Any = None,
    *,
    ax: Axes | None = None,
    element: Element = 0,
    probability: float = 0.95,
    order: int = 0,
    dimensions: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Axes:
    """Believed states with their credible intervals, and the true ones where given.

    node: one, or all state nodes. order: 0 is the value, 1 the velocity, and so on. truth: of that order, (..., T, dim)
    at every observation or at every recorded one; a mapping from names to these for several nodes. dimensions: which
    to draw; six at most unless given. labels: one for each dimension.
    """
    options = {"ax": ax, "element": element, "probability": probability, "order": order}
    return _latent(result, node, truth, "state", dimensions=dimensions, labels=labels, **options)


def causes(
    result: Result,
    node: str | None = None,
    truth: Any = None,
    *,
    ax: Axes | None = None,
    element: Element = 0,
    probability: float = 0.95,
    order: int = 0,
    dimensions: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Axes:
    """Believed causes with their credible intervals, and the true ones where given; arguments as in `states`."""
    options = {"ax": ax, "element": element, "probability": probability, "order": order}
    return _latent(result, node, truth, "cause", dimensions=dimensions, labels=labels, **options)


def sensations(
    result: Result,
    node: str | None = None,
    *,
    ax: Axes | None = None,
    element: Element = 0,
    order: int = 0,
    dimensions: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Axes:
    """Observations as dots and what was predicted of them as lines; arguments as in `states`."""
    found: list[Series] = []
    for name in _nodes(result, node, "sensory"):
        observed = _order(_pick(result, result.observation(name), element), order, name)
        predicted = _order(_pick(result, result.prediction(name), element), order, name)
        for i, label in enumerate(channel_names(name, observed.shape[-1])):
            found.append(Series(name, label, colour_of(len(found)), predicted[:, i], observed=observed[:, i]))
    ax = own_axes(ax)
    chosen = _choose(found, dimensions, labels)
    draw_series(ax, result.times, chosen)
    finish(ax, notes("sensation" + prime(order), found, chosen, dimensions), result.times, chosen)
    return legend(ax, chosen)


def parameters(
    result: Result,
    node: str | None = None,
    truth: Any = None,
    *,
    ax: Axes | None = None,
    element: Element = 0,
    probability: float = 0.95,
    labels: Sequence[str] | None = None,
) -> Axes:
    """Believed parameters with their credible intervals, and the true ones (..., p) where given."""
    found = _slow(result, node, truth, "parameter", element=element, probability=probability)
    return _draw_slow(ax, result.times, found, "parameter", labels=labels, probability=probability)


def precisions(
    result: Result,
    node: str | None = None,
    truth: Any = None,
    *,
    ax: Axes | None = None,
    element: Element = 0,
    probability: float = 0.95,
    labels: Sequence[str] | None = None,
) -> Axes:
    """Believed log-precisions with their credible intervals, and the true ones (..., channels) where given."""
    found = _slow(result, node, truth, "precision", element=element, probability=probability)
    return _draw_slow(ax, result.times, found, "log-precision", labels=labels, probability=probability)


def free_energy(result: Result, *, ax: Axes | None = None, element: Element = 0) -> Axes:
    """F = complexity − accuracy at every recorded observation, with its two parts.

    Long runs are drawn by the means and the extremes of short stretches of time.
    """
    parts = {
        "free energy": ("black", result.free_energy),
        "complexity": (COLOURS[1], result.complexity),
        "−accuracy": (COLOURS[0], -result.accuracy),
    }
    ax = own_axes(ax)
    found = [Series("", label, colour, _pick(result, v, element)) for label, (colour, v) in parts.items()]
    stretch = len(result.times) // STRETCHES if len(result.times) > 4 * STRETCHES else 1
    draw_series(ax, stretches(result.times, stretch).mean(1), [shorten(series, stretch) for series in found[::-1]])
    finish(ax, "free energy (nats)", result.times, found)
    return legend(ax, found, shade=f"range of {stretch}, line: mean" if stretch > 1 else None)


# --- one page --------------------------------------------------------------------------------------------------------
def overview(
    result: Result,
    truth: Any = None,
    true_parameters: Any = None,
    *,
    true_precisions: Any = None,
    element: Element = 0,
    title: str | None = None,
    probability: float = 0.95,
    labels: Mapping[str, Sequence[str]] | None = None,
    dark: bool = False,
) -> Figure:
    """States and causes on the left; sensations, parameters, precisions and free energy on the right.

    truth: of the states, and by name also of causes; true_parameters, true_precisions: as in `parameters` and
    `precisions`. labels: for the channels of named nodes, for example {"theta": ["a₁₂", "a₁₃", "a₂₃"]}. dark: light on
    dark paper.
    """
    named = dict(labels or {})
    common: dict[str, Any] = {"element": element}
    banded = common | {"probability": probability}
    known = set(_kinds(result).values())
    of_causes = _truth_of_causes(result, truth)
    of_states = {k: v for k, v in truth.items() if k not in of_causes} if isinstance(truth, Mapping) else truth
    left = _state_panels(result, of_states, named, banded) if "state" in known else []
    if "cause" in known:
        causing = _flat(result, "cause", named, lambda name: result.mean(name).shape[-1])
        left.append(lambda ax: causes(result, truth=of_causes or None, ax=ax, labels=causing, **banded))
    right: list[Callable[[Axes], Axes]] = []
    if "sensory" in known:
        wanted = _flat(result, "sensory", named, lambda name: result.observation(name).shape[-1])
        right.append(lambda ax: sensations(result, ax=ax, labels=wanted, **common))
    if "parameter" in known:
        thetas = _flat(result, "parameter", named, lambda name: result.mean(name).shape[-1])
        right.append(lambda ax: parameters(result, truth=true_parameters, ax=ax, labels=thetas, **banded))
    if "precision" in known:
        lambdas = _flat(result, "precision", named, lambda name: result.mean(name).shape[-1])
        right.append(lambda ax: precisions(result, truth=true_precisions, ax=ax, labels=lambdas, **banded))
    right.append(lambda ax: free_energy(result, ax=ax, **common))

    columns = [column for column in (left, right) if column]
    height = max(1.9 * max(len(column) for column in columns) + 0.8, 4.0)
    figure = Figure(figsize=(6.0 * len(columns), height), layout="constrained")
    for sub, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        for ax, draw in zip(sub.subplots(len(column), 1, sharex=True, squeeze=False)[:, 0], column, strict=True):
            draw(ax)
            ax.label_outer()
        sub.align_ylabels()
    figure.suptitle(title if title is not None else _caption(result, element))
    if dark:
        darken(figure)
    return figure


def _truth_of_causes(result: Result, truth: Any) -> dict[str, Any]:
    if not isinstance(truth, Mapping):
        return {}
    kinds = _kinds(result)
    return {name: values for name, values in truth.items() if kinds.get(name) == "cause"}


def _state_panels(
    result: Result, truth: Any, named: Mapping[str, Sequence[str]], options: Mapping[str, Any]
) -> list[Callable[[Axes], Axes]]:
    """A panel for each state if they are few, else one for each node."""
    names = _nodes(result, None, "state")
    sizes = {name: result.mean(name).shape[-1] for name in names}
    few = sum(sizes.values()) <= PANELS
    truths = {name: _truth_of(truth, name, names) for name in names}

    def panel(name: str, dimension: int, first: bool) -> Callable[[Axes], Axes]:
        label = named.get(name, channel_names(name, sizes[name]))[dimension]

        def draw(ax: Axes) -> Axes:
            states(result, name, truths[name], ax=ax, dimensions=[dimension], labels=[label], **options)
            ax.set_ylabel(ax.get_ylabel().replace("state", label, 1))
            legend = ax.get_legend()
            if not first and legend is not None:
                legend.remove()
            return ax

        return draw

    def together(name: str) -> Callable[[Axes], Axes]:
        return lambda ax: states(result, name, truths[name], ax=ax, labels=named.get(name), **options)

    if few:
        return [panel(name, i, (name, i) == (names[0], 0)) for name in names for i in range(sizes[name])]
    return [together(name) for name in names]


def _flat(
    result: Result, role: str, named: Mapping[str, Sequence[str]], size: Callable[[str], int]
) -> list[str] | None:
    """The labels of all channels of a role's nodes, or None if none was given."""
    names = _nodes(result, None, role)
    if not any(name in named for name in names):
        return None
    return [label for name in names for label in named.get(name, channel_names(name, size(name)))]


def _caption(result: Result, element: Element) -> str:
    action = result.free_action.reshape(-1)[result.flat_index(element)]
    which = f", batch element {element}" if result.batch_shape else ""
    return f"{result.observations:,} observations{which}: free action {action:,.0f} nats".replace("-", "−")


# --- what to draw ----------------------------------------------------------------------------------------------------
def _latent(
    result: Result,
    node: str | None,
    truth: Any,
    kind: str,
    *,
    ax: Any,
    element: Any,
    probability: Any,
    order: Any,
    dimensions: Sequence[int] | None,
    labels: Sequence[str] | None,
) -> Axes:
    found = _states(result, node, truth, kind, element=element, probability=probability, order=order)
    chosen = _choose(found, dimensions, labels)
    ax = own_axes(ax)
    draw_series(ax, result.times, chosen)
    finish(ax, notes(kind + prime(order), found, chosen, dimensions), result.times, chosen)
    return legend(ax, chosen, shade=percent(probability))


def _states(
    result: Result, node: str | None, truth: Any, kind: str, *, element: Element, probability: float, order: int
) -> list[Series]:
    found: list[Series] = []
    names = _nodes(result, node, kind)
    for name in names:
        band = result.interval(name, probability)
        mean, lower, upper = (
            _order(_pick(result, values, element), order, name) for values in (result.mean(name), *band)
        )
        known = _truth_of(truth, name, names)
        curve = None if known is None else _over_time(result, known, element, mean.shape[-1], name)
        for i, label in enumerate(channel_names(name, mean.shape[-1])):
            own = None if curve is None else Curve(curve.times, curve.values[:, i])
            colour = colour_of(len(found))
            found.append(Series(name, label, colour, mean[:, i], lower[:, i], upper[:, i], truth=own))
    return found


def _slow(
    result: Result,
    node: str | None,
    truth: Any,
    role: str,
    *,
    element: Element,
    probability: float,
) -> list[Series]:
    """Parameters or log-precisions over time, with true values that stay the same."""
    found: list[Series] = []
    names = _nodes(result, node, role)
    for name in names:
        band = result.interval(name, probability)
        mean, lower, upper = (_pick(result, values, element) for values in (result.mean(name), *band))
        known = _truth_of(truth, name, names)
        levels = None if known is None else _levels(result, known, element, mean.shape[-1], name)
        for i, label in enumerate(channel_names(name, mean.shape[-1])):
            ends = result.times[[0, -1]]
            own = None if levels is None else Curve(ends, np.repeat(levels[i], 2))
            found.append(Series(name, label, colour_of(len(found)), mean[:, i], lower[:, i], upper[:, i], truth=own))
    return found


def _kinds(result: Result) -> dict[str, str]:
    """The kinds of the nodes; their roles where no more is known, which are the same for states and causes."""
    if result.structure is None:
        return result.roles
    return {node.name: node.kind for node in result.structure.nodes}


def _nodes(result: Result, node: str | None, role: str) -> list[str]:
    kinds = _kinds(result)
    if node is None:
        found = [name for name, its in kinds.items() if its == role]
        if not found:
            raise ResultError(f"there is no {role} node to draw; nodes: {', '.join(result.roles)}")
        return found
    if kinds.get(node) != role:
        fitting = [name for name, its in kinds.items() if its == role]
        raise ResultError(f"there is no {role} node {node!r}; {role} nodes: {', '.join(fitting) or 'none'}")
    return [node]


def _choose(found: list[Series], dimensions: Sequence[int] | None, labels: Sequence[str] | None) -> list[Series]:
    """The series at these indices, with these labels; without indices as many as there are colours, of every node."""
    if dimensions is not None:
        if not all(0 <= i < len(found) for i in dimensions):
            raise ResultError(f"dimensions must be from 0 to {len(found) - 1}, not {list(dimensions)}")
        found = [found[i] for i in dimensions]
    if labels is not None:
        if len(labels) != len(found):
            raise ResultError(f"{len(labels)} labels are given for {len(found)} lines")
        found = [series._replace(label=label) for series, label in zip(found, labels, strict=True)]
    if dimensions is not None or len(found) <= len(COLOURS):
        return found
    by_node: dict[str, list[int]] = {}
    for i, series in enumerate(found):
        by_node.setdefault(series.node, []).append(i)
    in_turn = [own[k] for k in range(len(found)) for own in by_node.values() if k < len(own)]
    kept = sorted(in_turn[: len(COLOURS)])
    return [found[i]._replace(colour=colour_of(n)) for n, i in enumerate(kept)]


def _pick(result: Result, values: Array, element: Element) -> Array:
    """One batch element of an array (..., time, *own)."""
    batch = len(result.batch_shape)
    chosen: Array = values.reshape(-1, *values.shape[batch:])[result.flat_index(element)]
    return chosen


def _order(values: Array, order: int, name: str) -> Array:
    if not 0 <= order < values.shape[1]:
        raise ResultError(f"{name!r} has orders 0 to {values.shape[1] - 1}, not {order}")
    return values[:, order]


def _truth_of(truth: Any, name: str, names: Sequence[str]) -> Any:
    if truth is None:
        return None
    if isinstance(truth, Mapping):
        strange = [key for key in truth if key not in names]
        if strange:
            raise ResultError(f"truth is given for {strange[0]!r}; nodes drawn: {', '.join(names)}")
        return truth.get(name)
    if len(names) > 1:
        raise ResultError(f"there are several nodes; give truth as a mapping from their names: {', '.join(names)}")
    return truth


def _over_time(result: Result, truth: Any, element: Element, dim: int, name: str) -> Curve:
    """A truth (..., T, dim) and its times, whether it has a row for each observation or for each recorded one."""
    values = np.asarray(truth, dtype=np.float64)
    if values.ndim > 2 and values.shape[:-2] == result.batch_shape:
        values = _pick(result, values, element)
    fits = values.ndim == 2 and values.shape[1] == dim
    if fits and len(values) == len(result.times):
        return Curve(result.times, values)
    if fits and len(values) == result.observations and len(result.times) > 1:
        # every N-th observation is recorded, the first at (N − 1)·dt and the next N·dt later
        dt = result.times[1] - 2 * result.times[0]
        return Curve(dt * np.arange(len(values)), values)
    raise ResultError(
        f"the truth of {name!r} has shape {np.shape(truth)}; it must be (time, {dim}) with a row for each of the "
        f"{result.observations} observations or of the {len(result.times)} recorded ones"
    )


def _levels(result: Result, truth: Any, element: Element, dim: int, name: str) -> Array:
    values = np.asarray(truth, dtype=np.float64)
    if values.ndim > 1 and values.shape[:-1] == result.batch_shape:
        values = _pick(result, values, element)
    if values.ndim > 1 or values.size not in (1, dim):
        raise ResultError(f"the truth of {name!r} has shape {np.shape(truth)}; it must be ({dim},)")
    return np.broadcast_to(values, (dim,))


def _draw_slow(
    ax: Axes | None, times: Array, found: list[Series], name: str, *, labels: Sequence[str] | None, probability: float
) -> Axes:
    chosen = _choose(found, None, labels)
    ax = own_axes(ax)
    draw_series(ax, times, chosen)
    finish(ax, notes(name, found, chosen, None), times, chosen)
    return legend(ax, chosen, shade=percent(probability))
