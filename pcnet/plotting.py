"""Pictures of a result: states, sensations, parameters, precisions and free energy over time.

Every function draws into the axes it is given, or into a figure of its own, and returns the axes; `overview` puts all
of them on one page. Nothing here touches pyplot or its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from pcnet.errors import ResultError
from pcnet.result import Result

Array = NDArray[Any]
Element = int | tuple[int, ...]
"""Which batch element: its index, or its number counting all of them."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The palette of Okabe and Ito, told apart with any colour vision; black is kept for the truth, yellow is too pale."""

BINS = 1000
"""Longer lines are drawn by the extremes of this many stretches of time."""
DOTS = 20_000
"""More dots than this are drawn by the extremes as well."""
DASHES = (0, (4, 2))
FENCE = 0.5
"""Rare values are left off an axis if they lie beyond the others by this share of the others' range."""
STRETCHES = 250
"""Free energies of longer runs are drawn by the means and extremes of about this many stretches."""
PANELS = 6
"""Up to this many states get a panel each in the overview."""


class Series(NamedTuple):
    """One channel of one node over time, and what is believed or known of it; (T,) each."""

    node: str
    label: str
    colour: str
    mean: Array
    lower: Array | None = None
    upper: Array | None = None
    observed: Array | None = None
    truth: Curve | None = None


class Curve(NamedTuple):
    """Values at times; (T,) each."""

    times: Array
    values: Array


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
    found = _states(result, node, truth, element=element, probability=probability, order=order)
    chosen = _choose(found, dimensions, labels)
    ax = _axes(ax)
    _draw(ax, result.times, chosen)
    _finish(ax, _notes("state" + _prime(order), found, chosen, dimensions), result.times, chosen)
    return _legend(ax, chosen, shade=_percent(probability))


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
        for i, label in enumerate(_names(name, observed.shape[-1])):
            found.append(Series(name, label, _colour(len(found)), predicted[:, i], observed=observed[:, i]))
    ax = _axes(ax)
    chosen = _choose(found, dimensions, labels)
    _draw(ax, result.times, chosen)
    _finish(ax, _notes("sensation" + _prime(order), found, chosen, dimensions), result.times, chosen)
    return _legend(ax, chosen)


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
    ax = _axes(ax)
    found = [Series("", label, colour, _pick(result, v, element)) for label, (colour, v) in parts.items()]
    stretch = len(result.times) // STRETCHES if len(result.times) > 4 * STRETCHES else 1
    _draw(ax, _stretches(result.times, stretch).mean(1), [_shorten(series, stretch) for series in found[::-1]])
    _finish(ax, "free energy (nats)", result.times, found)
    return _legend(ax, found, shade=f"range of {stretch}, line: mean" if stretch > 1 else None)


# --- one page --------------------------------------------------------------------------------------------------------
def overview(
    result: Result,
    truth: Any = None,
    true_parameters: Any = None,
    *,
    element: Element = 0,
    title: str | None = None,
    probability: float = 0.95,
    labels: Mapping[str, Sequence[str]] | None = None,
) -> Figure:
    """States on the left; sensations, parameters, precisions and free energy on the right.

    truth: of the states, true_parameters: of the parameters; both as in `states` and `parameters`. labels: for the
    channels of named nodes, for example {"theta": ["a₁₂", "a₁₃", "a₂₃"]}.
    """
    named = dict(labels or {})
    common: dict[str, Any] = {"element": element}
    banded = common | {"probability": probability}
    known = set(result.roles.values())
    left = _state_panels(result, truth, named, banded) if "state" in known else []
    right: list[Callable[[Axes], Axes]] = []
    if "sensory" in known:
        wanted = _flat(result, "sensory", named, lambda name: result.observation(name).shape[-1])
        right.append(lambda ax: sensations(result, ax=ax, labels=wanted, **common))
    if "parameter" in known:
        thetas = _flat(result, "parameter", named, lambda name: result.mean(name).shape[-1])
        right.append(lambda ax: parameters(result, truth=true_parameters, ax=ax, labels=thetas, **banded))
    if "precision" in known:
        lambdas = _flat(result, "precision", named, lambda name: result.mean(name).shape[-1])
        right.append(lambda ax: precisions(result, ax=ax, labels=lambdas, **banded))
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
    return figure


def _state_panels(
    result: Result, truth: Any, named: Mapping[str, Sequence[str]], options: Mapping[str, Any]
) -> list[Callable[[Axes], Axes]]:
    """A panel for each state if they are few, else one for each node."""
    names = _nodes(result, None, "state")
    sizes = {name: result.mean(name).shape[-1] for name in names}
    few = sum(sizes.values()) <= PANELS
    truths = {name: _truth_of(truth, name, names) for name in names}

    def panel(name: str, dimension: int, first: bool) -> Callable[[Axes], Axes]:
        label = named.get(name, _names(name, sizes[name]))[dimension]

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
    return [label for name in names for label in named.get(name, _names(name, size(name)))]


def _caption(result: Result, element: Element) -> str:
    action = result.free_action.reshape(-1)[_flat_index(result, element)]
    which = f", batch element {element}" if result.batch_shape else ""
    return f"{result.observations:,} observations{which}: free action {action:,.0f} nats".replace("-", "−")


# --- what to draw ----------------------------------------------------------------------------------------------------
def _states(
    result: Result, node: str | None, truth: Any, *, element: Element, probability: float, order: int
) -> list[Series]:
    found: list[Series] = []
    names = _nodes(result, node, "state")
    for name in names:
        band = result.interval(name, probability)
        mean, lower, upper = (
            _order(_pick(result, values, element), order, name) for values in (result.mean(name), *band)
        )
        known = _truth_of(truth, name, names)
        curve = None if known is None else _over_time(result, known, element, mean.shape[-1], name)
        for i, label in enumerate(_names(name, mean.shape[-1])):
            own = None if curve is None else Curve(curve.times, curve.values[:, i])
            colour = _colour(len(found))
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
        for i, label in enumerate(_names(name, mean.shape[-1])):
            ends = result.times[[0, -1]]
            own = None if levels is None else Curve(ends, np.repeat(levels[i], 2))
            found.append(Series(name, label, _colour(len(found)), mean[:, i], lower[:, i], upper[:, i], truth=own))
    return found


def _nodes(result: Result, node: str | None, role: str) -> list[str]:
    if node is None:
        found = [name for name, its in result.roles.items() if its == role]
        if not found:
            raise ResultError(f"there is no {role} node to draw; nodes: {', '.join(result.roles)}")
        return found
    if result.roles.get(node) != role:
        fitting = [name for name, its in result.roles.items() if its == role]
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
    return [found[i]._replace(colour=_colour(n)) for n, i in enumerate(kept)]


def _pick(result: Result, values: Array, element: Element) -> Array:
    """One batch element of an array (..., time, *own)."""
    batch = len(result.batch_shape)
    chosen: Array = values.reshape(-1, *values.shape[batch:])[_flat_index(result, element)]
    return chosen


def _flat_index(result: Result, element: Element) -> int:
    shape = result.batch_shape
    try:
        if isinstance(element, tuple):
            return int(np.ravel_multi_index(element, shape))
        return range(int(np.prod(shape, dtype=int)))[element]
    except (IndexError, ValueError, TypeError):
        batch = f"the batch has shape {shape}" if shape else "there is no batch, so use element=0"
        raise ResultError(f"there is no batch element {element!r}: {batch}") from None


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


# --- how to draw it --------------------------------------------------------------------------------------------------
def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    made: Axes = Figure(figsize=(7.0, 3.2), layout="constrained").subplots()
    return made


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _names(node: str, size: int) -> list[str]:
    """The channels of a node, counted from 1 as in mathematics: x₁, x₂, …"""
    safe = node.replace("$", r"\$")
    return [safe] if size == 1 else [f"{safe}$_{{{i}}}$" for i in range(1, size + 1)]


def _prime(order: int) -> str:
    return "" if order == 0 else f", derivative {order}"


def _notes(label: str, found: list[Series], chosen: list[Series], dimensions: Sequence[int] | None) -> str:
    left_out = dimensions is None and len(chosen) < len(found)
    return f"{label}\n{len(chosen)} of {len(found)}" if left_out else label


def _draw(ax: Axes, times: Array, drawn: Sequence[Series]) -> None:
    alpha = 0.25 if len(drawn) <= 3 else 0.12
    for series in drawn:
        if series.lower is not None and series.upper is not None:
            at = np.union1d(_extremes(series.lower), _extremes(series.upper))
            ax.fill_between(
                times[at], series.lower[at], series.upper[at], color=series.colour, alpha=alpha, linewidth=0, zorder=1
            )
        if series.observed is not None:
            at = _extremes(series.observed, DOTS)
            ax.plot(
                times[at],
                series.observed[at],
                linestyle="none",
                marker=".",
                markersize=2.0 if len(at) > 1000 else 4.0,
                markeredgewidth=0,
                alpha=0.4,
                color=series.colour,
                rasterized=True,
                zorder=1.5,
            )
        at = _extremes(series.mean)
        ax.plot(times[at], series.mean[at], color=series.colour, linewidth=1.2, zorder=2)
    for series in drawn:
        if series.truth is not None:
            at = _extremes(series.truth.values)
            level = len(series.truth.values) == 2 and len(times) != 2
            own = level or len(drawn) > 3  # else black: a line that is followed well would hide its own colour
            ax.plot(
                series.truth.times[at],
                series.truth.values[at],
                color=series.colour if own else "black",
                linestyle=DASHES,
                linewidth=1.2 if own else 0.8,
                zorder=3,
            )


def _draw_slow(
    ax: Axes | None, times: Array, found: list[Series], name: str, *, labels: Sequence[str] | None, probability: float
) -> Axes:
    chosen = _choose(found, None, labels)
    ax = _axes(ax)
    _draw(ax, times, chosen)
    _finish(ax, _notes(name, found, chosen, None), times, chosen)
    return _legend(ax, chosen, shade=_percent(probability))


def _extremes(values: Array, points: int = 2 * BINS) -> Array:
    """Indices of both ends and of the least and greatest value of each of points/2 stretches; all if they are few."""
    count = len(values)
    if count <= 2 * points:
        return np.arange(count)
    stretch = -(-count // (points // 2))
    padded = np.full(stretch * -(-count // stretch), np.nan)
    padded[:count] = values
    rows = padded.reshape(-1, stretch)
    starts = np.arange(len(rows)) * stretch
    low = starts + np.where(np.isnan(rows), np.inf, rows).argmin(1)
    high = starts + np.where(np.isnan(rows), -np.inf, rows).argmax(1)
    kept: Array = np.unique(np.concatenate([[0, count - 1], low, high]))
    return kept[kept < count]


def _stretches(values: Array, stretch: int) -> Array:
    """(T,) as (stretches, stretch); the last values are left over where T is no multiple."""
    return values[: len(values) // stretch * stretch].reshape(-1, stretch)


def _shorten(series: Series, stretch: int) -> Series:
    """The mean and the extremes of every stretch."""
    if stretch == 1:
        return series
    rows = _stretches(series.mean, stretch)
    return series._replace(mean=rows.mean(1), lower=rows.min(1), upper=rows.max(1))


def _finish(ax: Axes, label: str, times: Array, drawn: Sequence[Series]) -> None:
    low, high = _limits(drawn)
    lost = np.zeros(len(times), dtype=bool)
    for values in _values(drawn):
        lost |= (values < low) | (values > high)
    ax.set_ylim(low, high)
    share = 100 * lost.mean()
    if share > 0:
        label += f"\n{share:.2g} % off the axis" if share >= 0.01 else "\n<0.01 % off the axis"
    if max(abs(low), abs(high)) >= 1e5:  # a common exponent would be printed across the legend
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    ax.set_ylabel(label)
    ax.set_xlabel("time")
    if len(times) > 1:
        ax.set_xlim(times[0], times[-1])
    ax.spines[["top", "right"]].set_visible(False)


def _values(drawn: Sequence[Series]) -> list[Array]:
    parts = [part for series in drawn for part in (series.mean, series.lower, series.upper, series.observed)]
    return [part for part in parts if part is not None]


def _limits(drawn: Sequence[Series]) -> tuple[float, float]:
    """Limits that show everything but the far ones among the hundredth at either end; the truth is always in."""
    arrays = [values[np.isfinite(values)] for values in _values(drawn)]
    truths = [series.truth.values[np.isfinite(series.truth.values)] for series in drawn if series.truth is not None]
    arrays, ends = [a for a in arrays if a.size], [(t.min(), t.max()) for t in truths if t.size]
    if not arrays:
        return 0.0, 1.0
    tails = [(np.quantile(a, 0.01, method="lower"), np.quantile(a, 0.99, method="higher")) for a in arrays]
    low, high = _span(ends + tails)
    reach = FENCE * (high - low)
    near = [a[(a >= low - reach) & (a <= high + reach)] for a in arrays]
    low, high = _span(ends + [(a.min(), a.max()) for a in near])
    margin = 0.05 * (high - low) or 0.05 * abs(low) or 0.5
    return low - margin, high + margin


def _span(ends: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return float(min(low for low, _ in ends)), float(max(high for _, high in ends))


def _percent(probability: float) -> str:
    return f"{100 * probability:g} % interval"


def _legend(ax: Axes, drawn: Sequence[Series], shade: str | None = None) -> Axes:
    """In rows above the axes, where it hides nothing."""
    handles: list[Any] = [Line2D([], [], color=s.colour, linewidth=1.5, label=s.label) for s in drawn]
    if any(s.observed is not None for s in drawn):
        handles.append(Line2D([], [], color="grey", linestyle="none", marker=".", markersize=4, label="observed"))
    if shade is not None:
        handles.append(Patch(color="grey", alpha=0.35, linewidth=0, label=shade))
    if any(s.truth is not None for s in drawn):
        handles.append(Line2D([], [], color="black", linestyle=DASHES, linewidth=1.0, label="truth"))
    columns = -(-len(handles) // -(-len(handles) // 5))
    ax.legend(
        handles=[handle for first in range(columns) for handle in handles[first::columns]],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        fontsize="small",
        frameon=False,
        borderaxespad=0.1,
        labelspacing=0.2,
        handlelength=1.3,
        handletextpad=0.4,
        columnspacing=0.9,
    )
    return ax
