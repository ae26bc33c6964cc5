"""How series over time are drawn: thinned without losing extremes, with bands, robust limits and a legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

Array = NDArray[Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The palette of Okabe and Ito, told apart with any colour vision; black is kept for the truth, yellow is too pale."""


class Ink(NamedTuple):
    """What a picture is drawn with, on light or on dark paper; the pairs are told apart with any colour vision."""

    paper: str
    line: str
    faint: str
    node: str
    prediction: str
    error: str


LIGHT = Ink("white", "black", "#666666", "#f2f2f2", "#0072B2", "#D55E00")
DARK = Ink("#14171c", "#e8e8e8", "#9a9fa8", "#2a2f38", "#56B4E9", "#E69F00")


def ink(dark: bool) -> Ink:
    return DARK if dark else LIGHT


def darken(drawn: Figure | Axes) -> None:
    """Turn a finished picture on white paper into one on dark paper: what is black becomes light, the rest stays."""
    figure = drawn.figure if isinstance(drawn, Axes) else drawn
    assert figure is not None
    for part in [figure, *getattr(figure, "subfigs", ())]:
        part.set_facecolor(DARK.paper)
    for ax in figure.findobj(Axes):
        ax.set_facecolor(DARK.paper)
        ax.tick_params(which="both", colors=DARK.line)
        for side in ax.spines.values():
            side.set_edgecolor(DARK.line)
    for text in figure.findobj(Text):
        if _black(text.get_color()):
            text.set_color(DARK.line)
    for line in figure.findobj(Line2D):
        if _black(line.get_color()):
            line.set_color(DARK.line)
    for band in figure.findobj(PolyCollection):
        if any(_black(colour) for colour in band.get_facecolor()):
            band.set_facecolor((*to_rgb(DARK.line), band.get_alpha() or 1.0))


def _black(colour: Any) -> bool:
    return to_hex(colour) == "#000000"


BINS = 1000
"""Longer lines are drawn by the extremes of this many stretches of time."""
DOTS = 20_000
"""More dots than this are drawn by the extremes as well."""
DASHES = (0, (4, 2))
FENCE = 0.5
"""Rare values are left off an axis if they lie beyond the others by this share of the others' range."""


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


def own_axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    made: Axes = Figure(figsize=(7.0, 3.2), layout="constrained").subplots()
    return made


def colour_of(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def channel_names(node: str, size: int) -> list[str]:
    """The channels of a node, counted from 1 as in mathematics: x₁, x₂, …"""
    safe = node.replace("$", r"\$")
    return [safe] if size == 1 else [f"{safe}$_{{{i}}}$" for i in range(1, size + 1)]


def prime(order: int) -> str:
    return "" if order == 0 else f", derivative {order}"


def notes(label: str, found: list[Series], chosen: list[Series], dimensions: Sequence[int] | None) -> str:
    left_out = dimensions is None and len(chosen) < len(found)
    return f"{label}\n{len(chosen)} of {len(found)}" if left_out else label


def draw_series(ax: Axes, times: Array, drawn: Sequence[Series]) -> None:
    alpha = 0.25 if len(drawn) <= 3 else 0.12
    for series in drawn:
        if series.lower is not None and series.upper is not None:
            at = np.union1d(extremes(series.lower), extremes(series.upper))
            ax.fill_between(
                times[at], series.lower[at], series.upper[at], color=series.colour, alpha=alpha, linewidth=0, zorder=1
            )
        if series.observed is not None:
            at = extremes(series.observed, DOTS)
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
        at = extremes(series.mean)
        ax.plot(times[at], series.mean[at], color=series.colour, linewidth=1.2, zorder=2)
    for series in drawn:
        if series.truth is not None:
            at = extremes(series.truth.values)
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


def extremes(values: Array, points: int = 2 * BINS) -> Array:
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


def stretches(values: Array, stretch: int) -> Array:
    """(T,) as (stretches, stretch); the last values are left over where T is no multiple."""
    return values[: len(values) // stretch * stretch].reshape(-1, stretch)


def shorten(series: Series, stretch: int) -> Series:
    """The mean and the extremes of every stretch."""
    if stretch == 1:
        return series
    rows = stretches(series.mean, stretch)
    return series._replace(mean=rows.mean(1), lower=rows.min(1), upper=rows.max(1))


def finish(ax: Axes, label: str, times: Array, drawn: Sequence[Series]) -> None:
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


def percent(probability: float) -> str:
    return f"{100 * probability:g} % interval"


def legend(ax: Axes, drawn: Sequence[Series], shade: str | None = None) -> Axes:
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
