"""Figures of an error flow: surprise map, free energy by node, message sizes on the graph, and an animation.

Each function draws into the given axes or into a new figure and returns the axes. Nothing here uses pyplot or changes
its settings.
"""

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

from pcnet.errors import ResultError
from pcnet.files import atomic_write, check_target
from pcnet.results import graph_plots
from pcnet.results.downsample import Array, line_bins, means, ranges
from pcnet.results.drawing import COLOURS, Style, darken, ink, legend_above, own_axes, time_axis
from pcnet.results.error_flow import MAX_SURPRISE, ErrorFlow, full_width, mean_step, regular

MAP_COLUMNS = 800  # longer runs are mapped by the largest surprise of at most this many bins
MAX_LINES = 6  # this many nodes get a line of their own; the others are summed

Window = Sequence[float] | None


def surprise_map(flow: ErrorFlow, *, ax: Axes | None = None, window: Window = None, dark: bool = False) -> Axes:
    """Draw a node × time map of the surprise √(ε̃ᵀΠ̃ε̃/n); 1 is as large as expected.

    In long runs each column shows the maximum of a bin of observations.
    """
    new_figure, names, part = ax is None, flow.surprised, flow.within(window=window)
    ax = own_axes(ax)
    bin_size = -(-(part.stop - part.start) // MAP_COLUMNS)
    rows = np.stack([ranges(flow.surprise(name)[part], bin_size).high for name in names])
    times = flow.times[part]
    step, norm, colours = mean_step(times), surprise_scale(flow), surprise_colours(dark)
    if regular(times):
        extent = (times[0] - step / 2, times[0] - step / 2 + step * bin_size * rows.shape[1], len(names) - 0.5, -0.5)
        image: Any = ax.imshow(rows, aspect="auto", interpolation="nearest", cmap=colours, norm=norm, extent=extent)
    else:  # each record extends to the next one
        edges = np.append(times[::bin_size], times[-1] + step)
        image = ax.pcolormesh(edges, np.arange(len(names) + 1) - 0.5, rows, cmap=colours, norm=norm, rasterized=True)
        ax.invert_yaxis()
    ax.set_xlim(times[0] - step / 2, times[-1] + step / 2)
    ax.set_yticks(range(len(names)), names, parse_math=False)
    if len(names) > 25:
        ax.tick_params(axis="y", labelsize=6)
    ax.set_xlabel("time" if bin_size == 1 else f"time (each column: maximum of {bin_size} observations)")
    assert ax.figure is not None
    bar = ax.figure.colorbar(image, ax=ax, pad=0.01, extend="max" if np.nanmax(rows) > norm.vmax else "neither")
    bar.set_label("precision-weighted error\n(1: as expected)")
    if new_figure and dark:
        darken(ax)
    return ax


def shares(flow: ErrorFlow, *, ax: Axes | None = None, window: Window = None, dark: bool = False) -> Axes:
    """Draw the free energy of each node over time; of many nodes, the most variable ones and the sum of the others."""
    new_figure, ax, part = ax is None, own_axes(ax), flow.within(window=window)
    times = flow.times[part]
    bin_size = line_bins(len(times))
    energies = {node.name: flow.share(node.name)[part] for node in flow.structure.nodes}
    separate = sorted(energies, key=lambda name: -float(np.nanstd(energies[name])))[:MAX_LINES]
    lines = [(n, c, energies[n]) for n, c in zip([n for n in energies if n in separate], COLOURS, strict=False)]
    others = [values for name, values in energies.items() if name not in separate]
    if others:
        lines.append((f"{len(others)} others", "grey", np.sum(others, 0)))
    lines.append(("all", "black", np.sum(list(energies.values()), 0)))
    for _, colour, values in lines:
        style: Style = {"linewidth": 1.4, "zorder": 3} if colour == "black" else {"linewidth": 1.2}
        ax.plot(means(times, bin_size), means(values, bin_size), color=colour, **style)
    legend_above(ax, [Line2D([], [], color=colour, label=name) for name, colour, _ in lines], parse_math=False)
    ax.set_ylabel("free energy (nats)" if bin_size == 1 else f"free energy (nats)\nmeans of {bin_size}")
    time_axis(ax, times)
    if new_figure and dark:
        darken(ax)
    return ax


def message_graph(
    flow: ErrorFlow,
    at: float | None = None,
    window: Window = None,
    *,
    ax: Axes | None = None,
    dark: bool = False,
    bar: bool = True,
) -> Axes:
    """Draw the graph with arrows as wide as the messages, at one time or on average over a window (default: all).

    Widths are relative to the 99.5 % quantile of each link, because units differ between links. Nodes are coloured by
    surprise, of which `bar` draws a colour bar.
    """
    part, norm, colours = flow.within(at, window), surprise_scale(flow), surprise_colours(dark)
    fills = {name: colours(norm(_mean(flow.surprise(name)[part]))) for name in flow.surprised}
    widths = {(link, way): _mean(size[part]) / full_width(size) for link, way, size in flow.passages()}
    ax = graph_plots.draw(flow.structure, ax=ax, dark=dark, fills=fills, widths=widths)
    first, last = flow.times[part][[0, -1]]
    when = f"at {first:g}" if part.stop - part.start == 1 else f"mean from {first:g} to {last:g}"
    line = ink(dark).line
    ax.set_xlabel(f"time: {when}; widths relative to the maximum of each link", color=line, fontsize="small")
    if bar:
        assert ax.figure is not None
        scale = ax.figure.colorbar(ScalarMappable(norm, colours), ax=ax, pad=0.02, shrink=0.8, aspect=25)
        scale.set_label("precision-weighted error (1: as expected)", color=line, fontsize="small")
        scale.ax.tick_params(colors=line, labelsize="small")
        scale.outline.set_edgecolor(line)
    return ax


def overview(
    flow: ErrorFlow, *, at: float | None = None, window: Window = None, title: str | None = None, dark: bool = False
) -> Figure:
    """Draw the graph with its messages on the left, the surprise map and the free energy by node on the right.

    Args:
        at: Time of the messages on the graph.
        window: Times (from, to) of all three panels.
        dark: Use the dark theme.
    """
    height = max(4.8, 0.6 * (1 + max(position.row for position in flow.structure.layout.values())))
    figure = Figure(figsize=(13.5, height), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False)[0]
    top, bottom = right.subplots(2, 1)
    surprise_map(flow, ax=top, window=window, dark=dark)
    shares(flow, ax=bottom, window=window)
    if at is not None:
        for ax in (top, bottom):
            ax.axvline(at, color="black", linewidth=0.8, linestyle=(0, (2, 2)))
    message_graph(flow, at, None if at is not None else window, ax=left.subplots(), dark=dark, bar=False)
    figure.suptitle(title or f"Error flow of {flow.result.observations:,} observations")
    if dark:
        darken(figure)
    return figure


def animate(
    flow: ErrorFlow, path: Path, *, window: Window = None, frames: int = 100, rate: int = 15, dark: bool = False
) -> Path:
    """Write an animation of the graph and its messages as GIF or MP4 (MP4 needs ffmpeg), atomically.

    Args:
        frames: Largest number of frames; each shows the largest surprise and messages of its bin of observations.
        rate: Frames per second.
    """
    from matplotlib.animation import AbstractMovieWriter, FFMpegWriter, PillowWriter

    suffix = path.suffix.lower()
    if suffix not in (".gif", ".mp4"):
        raise ResultError(f"an animation is a .gif or .mp4 file, not {path.name!r}")
    check_target(path)
    if suffix == ".mp4" and shutil.which("ffmpeg") is None:
        raise ResultError("an MP4 needs the program ffmpeg, which is not installed; install it, or write a .gif")
    if frames < 1 or rate < 1:
        raise ResultError(f"an animation needs one frame or more at a rate of one or more, not {frames} at {rate}")
    part = flow.within(window=window)
    bin_size = -(-(part.stop - part.start) // frames)
    surprises = {name: ranges(flow.surprise(name)[part], bin_size).high for name in flow.surprised}
    sizes = {(link, way): ranges(size[part], bin_size).high / full_width(size) for link, way, size in flow.passages()}
    norm, colours, theme = surprise_scale(flow), surprise_colours(dark), ink(dark)
    figure = Figure(figsize=graph_plots.figure_size(flow.structure), layout="constrained")
    ax = figure.subplots()
    writer: AbstractMovieWriter = (PillowWriter if suffix == ".gif" else FFMpegWriter)(fps=rate)
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"animation{suffix}"  # writers choose the format by the suffix
        with writer.saving(figure, str(file), dpi=100):
            for i, time in enumerate(flow.times[part][::bin_size]):
                ax.clear()
                fills = {name: colours(norm(values[i])) for name, values in surprises.items()}
                widths = {arrow: float(share[i]) for arrow, share in sizes.items()}
                graph_plots.draw(flow.structure, ax=ax, dark=dark, fills=fills, widths=widths)
                last = flow.times[min(part.start + (i + 1) * bin_size, part.stop) - 1]
                ax.set_xlabel(f"time {time:g}" + (f" to {last:g}" if bin_size > 1 else ""), color=theme.line)
                if i == 0:  # the same layout for all frames, and faster
                    figure.draw_without_rendering()
                    figure.set_layout_engine("none")
                writer.grab_frame(facecolor=theme.paper)
        with atomic_write(path) as made, file.open("rb") as drawn:
            shutil.copyfileobj(drawn, made)
    return path


def surprise_scale(flow: ErrorFlow) -> Normalize:
    """Colour scale from 0 to MAX_SURPRISE, or to the maximum of the run (at least 1) if that is lower."""
    highest = max(float(np.nanmax(flow.surprise(name), initial=0.0)) for name in flow.surprised)
    return Normalize(0.0, min(MAX_SURPRISE, max(highest, 1.0)))


def surprise_colours(dark: bool) -> Colormap:
    """Colour map from the background to a strong colour, monotonic in lightness for colour-blind readers."""
    steps = ["#7a4100", "#E69F00", "#fff3c4"] if dark else ["#fbb877", "#D55E00", "#4a1500"]
    return LinearSegmentedColormap.from_list("surprise", [ink(dark).paper, *steps])


def _mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else 0.0
