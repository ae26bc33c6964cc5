"""Shared parts of figures: palette, light and dark colours, and drawing of time series with bands and legend."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from pcnet.results.downsample import Array, extremes, whole_bins

Style = dict[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Palette of Okabe and Ito, safe for colour-blind readers; black is reserved for the truth, yellow is too pale."""
DASHES = (0, (4, 2))
MAX_DOTS = 20_000  # larger numbers of observations are drawn by their extremes
OUTLIER_MARGIN = 0.5
"""Rare values are left off an axis if they exceed the others by more than this fraction of the others' range."""


class Ink(NamedTuple):
    """Colours of a figure; both themes are safe for colour-blind readers."""

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
    """Convert a finished figure to the dark theme: black becomes light, other colours stay."""
    figure = drawn.figure if isinstance(drawn, Axes) else drawn
    assert figure is not None
    for part in [figure, *getattr(figure, "subfigs", ())]:
        part.set_facecolor(DARK.paper)
    for ax in figure.findobj(Axes):
        ax.set_facecolor(DARK.paper)
        ax.tick_params(which="both", colors=DARK.line)
        for side in ax.spines.values():
            side.set_edgecolor(DARK.line)
    artists: list[Any] = [*figure.findobj(Text), *figure.findobj(Line2D)]
    for artist in artists:
        if to_hex(artist.get_color()) == "#000000":
            artist.set_color(DARK.line)
    bands: list[Any] = figure.findobj(PolyCollection)
    for band in bands:
        if any(to_hex(colour) == "#000000" for colour in band.get_facecolor()):
            band.set_facecolor((*to_rgb(DARK.line), band.get_alpha() or 1.0))


def own_axes(ax: Axes | None, size: tuple[float, float] = (7.0, 3.2)) -> Axes:
    """The given axes, or those of a new figure; size in inches."""
    return Figure(figsize=size, layout="constrained").subplots() if ax is None else ax


class Curve(NamedTuple):
    """Values at times; (T,) each."""

    times: Array
    values: Array


class Series(NamedTuple):
    """One channel of a node over time, (T,): mean, bounds of its interval, observations and truth."""

    node: str
    label: str
    colour: str
    mean: Array
    lower: Array | None = None
    upper: Array | None = None
    observed: Array | None = None
    truth: Curve | None = None

    @property
    def parts(self) -> list[Array]:
        """All arrays but the truth."""
        return [part for part in (self.mean, self.lower, self.upper, self.observed) if part is not None]

    def binned(self, bin_size: int) -> Self:
        """Mean and range of consecutive bins."""
        if bin_size == 1:
            return self
        rows = whole_bins(self.mean, bin_size)
        return self._replace(mean=rows.mean(1), lower=rows.min(1), upper=rows.max(1))


def colour_of(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def channel_names(node: str, size: int) -> list[str]:
    """Labels of a node's channels, counted from 1: x₁, x₂, …"""
    safe = node.replace("$", r"\$")
    return [safe] if size == 1 else [f"{safe}$_{{{i}}}$" for i in range(1, size + 1)]


def draw_series(ax: Axes, times: Array, drawn: Sequence[Series]) -> None:
    """Draw bands, observations (dots), means (lines) and truths (dashed lines)."""
    alpha = 0.25 if len(drawn) <= 3 else 0.12
    for series in drawn:
        colour = series.colour
        if series.lower is not None and series.upper is not None:
            at = np.union1d(extremes(series.lower), extremes(series.upper))
            band = (times[at], series.lower[at], series.upper[at])
            ax.fill_between(*band, color=colour, alpha=alpha, linewidth=0, zorder=1)
        if series.observed is not None:
            at = extremes(series.observed, MAX_DOTS)
            size = 2.0 if len(at) > 1000 else 4.0
            dots: Style = {
                "linestyle": "none",
                "marker": ".",
                "markersize": size,
                "markeredgewidth": 0,
                "rasterized": True,
            }
            ax.plot(times[at], series.observed[at], color=colour, alpha=0.4, zorder=1.5, **dots)
        at = extremes(series.mean)
        ax.plot(times[at], series.mean[at], color=colour, linewidth=1.2, zorder=2)
    for series in drawn:
        if series.truth is not None:
            at = extremes(series.truth.values)
            constant = len(series.truth.values) == 2 and len(times) != 2
            coloured = constant or len(drawn) > 3  # else black: a good estimate would hide a line of its own colour
            style: Style = (
                {"color": series.colour, "linewidth": 1.2} if coloured else {"color": "black", "linewidth": 0.8}
            )
            ax.plot(series.truth.times[at], series.truth.values[at], linestyle=DASHES, zorder=3, **style)


def finish(ax: Axes, label: str, times: Array, drawn: Sequence[Series]) -> None:
    """Set limits and labels; the y label states the share of times at which a value is off the axis."""
    low, high = _limits(drawn)
    hidden = np.zeros(len(times), dtype=bool)
    for series in drawn:
        for values in series.parts:
            hidden |= (values < low) | (values > high)
    ax.set_ylim(low, high)
    percentage = 100 * hidden.mean()
    if percentage > 0:
        label += f"\n{percentage:.2g} % off the axis" if percentage >= 0.01 else "\n<0.01 % off the axis"
    if max(abs(low), abs(high)) >= 1e5:  # matplotlib would print a common exponent across the legend
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    ax.set_ylabel(label)
    time_axis(ax, times)


def time_axis(ax: Axes, times: Array) -> None:
    ax.set_xlabel("time")
    if len(times) > 1:
        ax.set_xlim(times[0], times[-1])
    ax.spines[["top", "right"]].set_visible(False)


def _limits(drawn: Sequence[Series]) -> tuple[float, float]:
    """Limits that include the truth and all values but far outliers in the outer 1 % of each end."""
    arrays = [values[np.isfinite(values)] for series in drawn for values in series.parts]
    truths = [series.truth.values[np.isfinite(series.truth.values)] for series in drawn if series.truth is not None]
    arrays, ends = [a for a in arrays if a.size], [(t.min(), t.max()) for t in truths if t.size]
    if not arrays:
        return 0.0, 1.0
    tails = [(np.quantile(a, 0.01, method="lower"), np.quantile(a, 0.99, method="higher")) for a in arrays]
    low, high = _span(ends + tails)
    reach = OUTLIER_MARGIN * (high - low)
    near = [a[(a >= low - reach) & (a <= high + reach)] for a in arrays]
    low, high = _span(ends + [(a.min(), a.max()) for a in near])
    margin = 0.05 * (high - low) or 0.05 * abs(low) or 0.5
    return low - margin, high + margin


def _span(ends: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return float(min(low for low, _ in ends)), float(max(high for _, high in ends))


def legend(ax: Axes, drawn: Sequence[Series], band: str | None = None) -> Axes:
    """Add a legend of the series; band: what the shaded bands show."""
    handles: list[Any] = [Line2D([], [], color=s.colour, linewidth=1.5, label=s.label) for s in drawn]
    if any(s.observed is not None for s in drawn):
        handles.append(Line2D([], [], color="grey", linestyle="none", marker=".", markersize=4, label="observed"))
    if band is not None:
        handles.append(Patch(color="grey", alpha=0.35, linewidth=0, label=band))
    if any(s.truth is not None for s in drawn):
        handles.append(Line2D([], [], color="black", linestyle=DASHES, linewidth=1.0, label="truth"))
    columns = -(-len(handles) // -(-len(handles) // 5))
    return legend_above(ax, [handle for first in range(columns) for handle in handles[first::columns]], columns)


def legend_above(
    ax: Axes, handles: Sequence[Any], columns: int = 5, x: float = 0.0, parse_math: bool = True, **style: Any
) -> Axes:
    """Place a legend above the axes, where it hides nothing; matplotlib fills it column by column."""
    place: Style = {"loc": "lower left" if x == 0 else "lower center", "bbox_to_anchor": (x, 1.0), "ncols": columns}
    spacing: Style = {"borderaxespad": 0.1, "labelspacing": 0.2, "handlelength": 1.3, "handletextpad": 0.4}
    style = place | spacing | {"columnspacing": 0.9, "fontsize": "small", "frameon": False} | style
    for text in ax.legend(handles=list(handles), **style).get_texts():
        text.set_parse_math(parse_math)
    return ax
