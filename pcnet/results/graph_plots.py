"""Drawing of a graph: levels as rows, kinds of nodes by shape, one arrow for predictions and one for errors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Polygon
from matplotlib.path import Path

from pcnet.results.downsample import Array
from pcnet.results.drawing import Ink, Style, ink, legend_above, own_axes
from pcnet.results.graph_summary import GraphSummary, LinkSummary, NodeSummary, Position

WIDTH, HEIGHT = 0.62, 0.40  # size of a node; columns and rows are one apart
THIN, WIDE = 0.5, 7.0
"""Line widths in points of a link with the smallest and the largest messages; WIDE is reduced where space is short."""
PLAIN = 1.4  # line width in points where no message sizes are given


def _superellipse(power: float) -> Array:
    angle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    return np.stack([np.sign(f) * np.abs(f) ** power for f in (np.cos(angle), np.sin(angle))], 1)


SHAPES: Mapping[str, Array] = {
    "state": _superellipse(1.0),
    "cause": np.array([[-1, 0], [-0.72, 1], [0.72, 1], [1, 0], [0.72, -1], [-0.72, -1]]),
    "sensory": np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]]),
    "input": np.array([[-1, -1], [-0.75, 1], [1, 1], [0.75, -1]]),
    "parameter": _superellipse(0.35),
    "precision": np.array([[-1, -0.5], [-1, 0.5], [-0.82, 1], [0.82, 1], [1, 0.5], [1, -0.5], [0.82, -1], [-0.82, -1]]),
}
"""Outline of each kind of node in the box [−1, 1]²; other kinds look like a state."""


def draw(
    summary: GraphSummary,
    *,
    ax: Axes | None = None,
    dark: bool = False,
    fills: Mapping[str, Any] | None = None,
    widths: Mapping[tuple[LinkSummary, str], float] | None = None,
) -> Axes:
    """Draw a graph with its kinds of nodes, links and clocks.

    Args:
        dark: Use the dark theme.
        fills: Fill colours (r, g, b, …) by node.
        widths: Relative width, 0 to 1, of each arrow by (link, "prediction" or "error"); equal widths by default.
    """
    positions, colours = summary.layout, ink(dark)
    columns, rows = (np.array(axis) for axis in zip(*positions.values(), strict=True))
    ax = own_axes(ax, figure_size(summary))
    assert ax.figure is not None
    box = ax.figure.bbox
    cells = np.array([np.ptp(columns) + 1.1, rows.max() + 1.0])
    spacing = np.array([box.width, box.height]) / cells * 72 * 0.85 / ax.figure.dpi  # points between columns and rows
    wide = min(WIDE, 0.1 * float(spacing.min()))
    for link in summary.links:
        start, end = positions[link.parent], positions[link.child]
        for a, b, colour, way in ((start, end, colours.prediction, "prediction"), (end, start, colours.error, "error")):
            share = None if widths is None else float(np.clip(np.nan_to_num(widths[link, way]), 0, 1))
            width = PLAIN if share is None else THIN + (wide - THIN) * share
            _draw_arrow(ax, a, b, colour, width, max(wide / 2 + 1.5, 3.0) / spacing)
    for node in summary.nodes:
        fill = (fills or {}).get(node.name, colours.node)
        _draw_node(ax, node, positions[node.name], colours, fill, bool(spacing[1] < 45))
    ax.set_xlim(columns.min() - 0.55, columns.max() + 0.55)
    ax.set_ylim(-0.5, rows.max() + 0.5)
    ax.spines[:].set_visible(False)
    ax.set_xticks([])
    bases: dict[int, float] = {}
    for node in summary.nodes:
        bases[node.level] = min(bases.get(node.level, np.inf), positions[node.name].row)
    ax.set_yticks(list(bases.values()), [f"level {level}" for level in bases], color=colours.faint)
    ax.tick_params(length=0, labelsize="small")
    ax.set_facecolor(colours.paper)
    ax.figure.set_facecolor(colours.paper)
    return _draw_legend(ax, summary, colours)


def figure_size(summary: GraphSummary) -> tuple[float, float]:
    """Size of a separate figure in inches."""
    columns, rows = zip(*summary.layout.values(), strict=True)
    return max(1.75 * (max(columns) - min(columns) + 1) + 0.8, 4.5), max(1.05 * (max(rows) + 1) + 0.9, 2.6)


def _draw_node(ax: Axes, node: NodeSummary, position: Position, colours: Ink, fill: Any, one_line: bool) -> None:
    outline = SHAPES.get(node.kind, SHAPES["state"]) * (WIDTH / 2, HEIGHT / 2) + position
    ax.add_patch(Polygon(outline, facecolor=fill, edgecolor=colours.line, linewidth=1.1, zorder=3))
    colour = colours.line if isinstance(fill, str) else contrast(fill)
    name = node.name if len(node.name) <= 18 else node.name[:17] + "…"
    style: Style = {"ha": "center", "va": "center", "color": colour, "zorder": 4, "parse_math": False}
    if one_line:
        text = f"{name} · {node.clock}" if node.clock else name
        ax.text(*position, text, fontsize=8 if len(text) <= 10 else 6, **style)
        return
    lift = 0.06 if node.clock else 0.0
    ax.text(position.column, position.row + lift, name, fontsize=10 if len(name) <= 10 else 7, **style)
    ax.text(position.column, position.row - 0.1, node.clock, fontsize=6.5, **style)


def contrast(fill: Any) -> str:
    """Black or white, whichever is readable on a colour (r, g, b, …)."""
    red, green, blue = fill[:3]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _draw_arrow(ax: Axes, start: Position, end: Position, colour: str, width: float, offset: Array) -> None:
    """Draw an arrow from border to border, shifted by `offset` to the right of its direction."""
    a, b = np.array(start), np.array(end)
    distance = float(np.linalg.norm(b - a))
    direction = (b - a) / distance
    a, b = (point + offset * (direction[1], -direction[0]) for point in (a, b))
    border = direction * (1 / max(abs(direction) / (WIDTH / 2, HEIGHT / 2)) + 0.02)
    style: Style = {
        "arrowstyle": f"-|>,head_width={0.14 + 0.055 * width},head_length={0.28 + 0.07 * width}",
        "connectionstyle": "arc3,rad=0.12" if distance > 1.5 else "arc3,rad=0",  # bent: other nodes may lie between
        "joinstyle": "miter",
        "capstyle": "butt",
    }
    size: Style = {"mutation_scale": 10, "linewidth": width, "shrinkA": 1, "shrinkB": 1}
    ax.add_patch(FancyArrowPatch(a + border, b - border, color=colour, zorder=2, **size, **style))


def _draw_legend(ax: Axes, summary: GraphSummary, colours: Ink) -> Axes:
    arrow: Style = {"linewidth": 2, "markersize": 5}
    handles = [
        Line2D([], [], color=colours.prediction, marker="v", label="predictions", **arrow),
        Line2D([], [], color=colours.error, marker="^", label="errors", **arrow),
    ]
    shape: Style = {"markersize": 13, "markerfacecolor": colours.node, "markeredgecolor": colours.line}
    for kind in dict.fromkeys(node.kind for node in summary.nodes):
        outline = SHAPES.get(kind, SHAPES["state"]) * (1.0, 0.62)
        marker = Path(np.concatenate([outline, outline[:1]]), closed=True)
        handles.append(Line2D([], [], linestyle="none", marker=marker, label=kind, **shape))
    columns = min(len(handles), 4)
    spacing: Style = {"handlelength": 1.6, "handletextpad": 0.8, "labelspacing": 0.5, "columnspacing": 1.2}
    return legend_above(ax, handles, columns, x=0.5, labelcolor=colours.line, borderaxespad=0.5, **spacing)
