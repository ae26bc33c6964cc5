"""Pictures of an error flow: a map of surprise, shares of the free energy, the graph at work, and a film of it.

Every function draws into the axes it is given, or into a figure of its own, and returns the axes. Nothing here touches
pyplot or its settings.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from pcnet.errors import ResultError
from pcnet.files import atomic_write
from pcnet.results import graph_plots
from pcnet.results.downsample import ranges
from pcnet.results.drawing import COLOURS, darken, ink, own_axes
from pcnet.results.error_flow import ErrorFlow, full_width, typical_step
from pcnet.results.graph_plots import Passing
from pcnet.results.graph_summary import LinkView

Array = NDArray[Any]

COLUMNS = 800
"""Longer runs are mapped by the greatest surprise of this many stretches of time."""
STRETCHES = 250
"""Shares of longer runs are drawn by the means of about this many stretches."""
SHARES = 6
"""So many nodes get a line of their own; the others are added up."""
LOUD = 4.0
"""From this surprise on, four times what was expected, all look alike unless the run has less."""


def surprise_map(
    flow: ErrorFlow, *, ax: Axes | None = None, window: Sequence[float] | None = None, dark: bool = False
) -> Axes:
    """Node × time: how large each node's precision-weighted error is, 1 being as large as it expects.

    In long runs a column shows the greatest surprise of its stretch of time, so that none disappears.
    """
    made = ax is None
    names, part = flow.surprised, flow.within(window=window)
    ax = own_axes(ax)
    stretch = -(-(part.stop - part.start) // COLUMNS)
    rows = np.stack([ranges(flow.surprise(name)[part], stretch).high for name in names])
    times = flow.times[part]
    step = typical_step(times)
    norm, shades = loudness(flow), shading(dark)
    if np.allclose(np.diff(times), step, rtol=1e-6, atol=0.0):
        extent = (times[0] - step / 2, times[0] - step / 2 + step * stretch * rows.shape[1], len(names) - 0.5, -0.5)
        image: Any = ax.imshow(rows, aspect="auto", interpolation="nearest", cmap=shades, norm=norm, extent=extent)
    else:  # each record until the next one
        edges = np.append(times[::stretch], times[-1] + step)
        image = ax.pcolormesh(edges, np.arange(len(names) + 1) - 0.5, rows, cmap=shades, norm=norm, rasterized=True)
        ax.invert_yaxis()
    ax.set_xlim(times[0] - step / 2, times[-1] + step / 2)
    ax.set_yticks(range(len(names)), names, parse_math=False)
    if len(names) > 25:
        ax.tick_params(axis="y", labelsize=6)
    ax.set_xlabel("time" if stretch == 1 else f"time (columns show the greatest of {stretch} observations)")
    assert ax.figure is not None
    bar = ax.figure.colorbar(image, ax=ax, pad=0.01, extend="max" if np.nanmax(rows) > norm.vmax else "neither")
    bar.set_label("precision-weighted error\n(1: as expected)")
    if made and dark:
        darken(ax)
    return ax


def shares(
    flow: ErrorFlow, *, ax: Axes | None = None, window: Sequence[float] | None = None, dark: bool = False
) -> Axes:
    """Each node's share of the free energy over time; of many nodes those whose shares vary most, and the rest."""
    made = ax is None
    ax, part = own_axes(ax), flow.within(window=window)
    times = flow.times[part]
    stretch = len(times) // STRETCHES if len(times) > 4 * STRETCHES else 1
    found = {node.name: flow.share(node.name)[part] for node in flow.structure.nodes}
    loudest = sorted(found, key=lambda name: -float(np.nanstd(found[name])))[:SHARES]
    lines = {name: found[name] for name in found if name in loudest}
    others = [values for name, values in found.items() if name not in loudest]
    if others:
        lines[f"{len(others)} others"] = np.sum(others, 0)
    for i, values in enumerate(lines.values()):
        colour = COLOURS[i] if i < len(COLOURS) else "grey"
        ax.plot(_means(times, stretch), _means(values, stretch), color=colour, linewidth=1.2)
    total = np.sum(list(found.values()), 0)
    ax.plot(_means(times, stretch), _means(total, stretch), color="black", linewidth=1.4, zorder=3)
    handles = [
        Line2D([], [], color=COLOURS[i] if i < len(COLOURS) else "grey", label=name) for i, name in enumerate(lines)
    ]
    handles.append(Line2D([], [], color="black", label="all"))
    key = ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=5,
        frameon=False,
        fontsize="small",
        handlelength=1.3,
    )
    for text in key.get_texts():
        text.set_parse_math(False)
    ax.set_ylabel("free energy (nats)" if stretch == 1 else f"free energy (nats)\nmeans of {stretch}")
    ax.set_xlabel("time")
    ax.spines[["top", "right"]].set_visible(False)
    if len(times) > 1:
        ax.set_xlim(times[0], times[-1])
    if made and dark:
        darken(ax)
    return ax


def passing(
    flow: ErrorFlow,
    at: float | None = None,
    window: Sequence[float] | None = None,
    *,
    ax: Axes | None = None,
    dark: bool = False,
    bar: bool = True,
) -> Axes:
    """The graph, its links as wide as what passed along them at a time, or on average over a window (the whole run).

    Widths are relative to each link's own fullest (its 99.5 % quantile), since units differ between links; nodes are
    filled by their surprise. bar: whether to explain that colour beside it.
    """
    part = flow.within(at, window)
    norm, shades = loudness(flow), shading(dark)
    fills = {name: shades(norm(_mean(flow.surprise(name)[part]))) for name in flow.surprised}
    widths: dict[LinkView, Passing] = {}
    for link, way, size in flow.passages():
        share = _mean(size[part]) / full_width(size)
        widths[link] = widths.get(link, Passing(0.0, 0.0))._replace(**{way: share})
    ax = graph_plots.picture(flow.structure, ax=ax, dark=dark, fills=fills, widths=widths)
    first, last = flow.times[part][[0, -1]]
    when = f"at {first:g}" if part.stop - part.start == 1 else f"mean from {first:g} to {last:g}"
    ax.set_xlabel(f"time: {when}; widths relative to each link's own fullest", color=ink(dark).line, fontsize="small")
    if bar:
        assert ax.figure is not None
        scale = ax.figure.colorbar(ScalarMappable(norm, shades), ax=ax, pad=0.02, shrink=0.8, aspect=25)
        scale.set_label("precision-weighted error (1: as expected)", color=ink(dark).line, fontsize="small")
        scale.ax.tick_params(colors=ink(dark).line, labelsize="small")
        scale.outline.set_edgecolor(ink(dark).line)
    return ax


def overview(
    flow: ErrorFlow,
    *,
    at: float | None = None,
    window: Sequence[float] | None = None,
    title: str | None = None,
    dark: bool = False,
) -> Figure:
    """The graph at work on the left; the map of surprise and the shares of the free energy on the right.

    window: of all three. at: a time for the graph alone.
    """
    tall = max(4.8, 0.6 * (1 + max(place.row for place in flow.structure.layout.values())))
    figure = Figure(figsize=(13.5, tall), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False)[0]
    top, bottom = right.subplots(2, 1)
    surprise_map(flow, ax=top, window=window, dark=dark)
    shares(flow, ax=bottom, window=window)
    if at is not None:
        for ax in (top, bottom):
            ax.axvline(at, color="black", linewidth=0.8, linestyle=(0, (2, 2)))
    passing(flow, at, None if at is not None else window, ax=left.subplots(), dark=dark, bar=False)
    figure.suptitle(title or f"Error flow of {flow.result.observations:,} observations")
    if dark:
        darken(figure)
    return figure


def animate(
    flow: ErrorFlow,
    path: Path,
    *,
    window: Sequence[float] | None = None,
    frames: int = 100,
    rate: int = 15,
    dark: bool = False,
) -> Path:
    """A film of the graph at work, as GIF or MP4 (which needs ffmpeg), whole or not at all.

    frames: at most so many; each then shows the greatest surprise and the fullest links of its stretch of time.
    rate: frames a second.
    """
    from matplotlib.animation import AbstractMovieWriter, FFMpegWriter, PillowWriter

    ending = path.suffix.lower()
    if ending not in (".gif", ".mp4"):
        raise ResultError(f"a film is a .gif or .mp4 file, not {path.name!r}")
    if not path.parent.is_dir():
        raise ResultError(f"there is no folder {str(path.parent)!r} to save into")
    if ending == ".mp4" and shutil.which("ffmpeg") is None:
        raise ResultError("an MP4 needs the program ffmpeg, which is not installed; install it, or write a .gif")
    if frames < 1 or rate < 1:
        raise ResultError(f"a film has one frame or more, at a rate of one or more, not {frames} at {rate}")
    part = flow.within(window=window)
    stretch = -(-(part.stop - part.start) // frames)
    loud = {name: ranges(flow.surprise(name)[part], stretch).high for name in flow.surprised}
    full = [(link, way, ranges(size[part], stretch).high / full_width(size)) for link, way, size in flow.passages()]
    times, (norm, shades, pen) = flow.times[part][::stretch], (loudness(flow), shading(dark), ink(dark))
    figure = Figure(figsize=graph_plots.size_of(flow.structure), layout="constrained")
    ax = figure.subplots()
    writer: AbstractMovieWriter = (PillowWriter if ending == ".gif" else FFMpegWriter)(fps=rate)
    with TemporaryDirectory() as folder:
        film = Path(folder) / f"film{ending}"  # writers tell the format by the ending, which a scratch file has not
        with writer.saving(figure, str(film), dpi=100):
            for i, time in enumerate(times):
                ax.clear()
                widths: dict[LinkView, Passing] = {}
                for link, way, share in full:
                    widths[link] = widths.get(link, Passing(0.0, 0.0))._replace(**{way: float(share[i])})
                fills = {name: shades(norm(values[i])) for name, values in loud.items()}
                graph_plots.picture(flow.structure, ax=ax, dark=dark, fills=fills, widths=widths)
                until = f" to {flow.times[min(part.start + (i + 1) * stretch, part.stop) - 1]:g}" if stretch > 1 else ""
                ax.set_xlabel(f"time {time:g}{until}", color=pen.line)
                if i == 0:  # the same room for all frames, and quicker
                    figure.draw_without_rendering()
                    figure.set_layout_engine("none")
                writer.grab_frame(facecolor=pen.paper)
        with atomic_write(path) as scratch:
            shutil.copyfile(film, scratch)
    return path


def loudness(flow: ErrorFlow) -> Normalize:
    """From no surprise to four times what was expected, or to the greatest there is if that is less."""
    greatest = max(float(np.nanmax(flow.surprise(name), initial=0.0)) for name in flow.surprised)
    return Normalize(0.0, min(LOUD, max(greatest, 1.0)))


def shading(dark: bool) -> Colormap:
    """From the colour of the paper to a strong one by lightness, so that it is told apart with any colour vision."""
    pen = ink(dark)
    steps = [pen.paper, "#7a4100", "#E69F00", "#fff3c4"] if dark else [pen.paper, "#fbb877", "#D55E00", "#4a1500"]
    return LinearSegmentedColormap.from_list("surprise", steps)


def _mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else 0.0


def _means(values: Array, stretch: int) -> Array:
    """(T,) by the means of stretches; the last values are left over where T is no multiple."""
    means: Array = values[: len(values) // stretch * stretch].reshape(-1, stretch).mean(1)
    return means
