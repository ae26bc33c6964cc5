"""Pictures of a graph: levels as rows from sensory nodes up, kinds by shape, predictions down and errors up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Polygon
from matplotlib.path import Path
from numpy.typing import NDArray

from pcnet.results.drawing import Ink, ink
from pcnet.results.graph_summary import GraphSummary, LinkView, NodeView, Place

Array = NDArray[Any]

WIDTH, HEIGHT = 0.62, 0.40
"""The size of a node, with columns and rows one apart."""
THIN, WIDE = 0.5, 7.0
"""Line widths of links along which nothing and most passes, in points; less where there is no room."""
PLAIN = 1.4
"""The width of a link, in points, where nothing is known of what passes."""


def _ellipse() -> Array:
    angle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def _rounded() -> Array:
    angle = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    power = 0.35
    return np.stack([np.sign(f) * np.abs(f) ** power for f in (np.cos(angle), np.sin(angle))], 1)


SHAPES: Mapping[str, Array] = {
    "state": _ellipse(),
    "cause": np.array([[-1, 0], [-0.72, 1], [0.72, 1], [1, 0], [0.72, -1], [-0.72, -1]]),
    "sensory": np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]]),
    "input": np.array([[-1, -1], [-0.75, 1], [1, 1], [0.75, -1]]),
    "parameter": _rounded(),
    "precision": np.array([[-1, -0.5], [-1, 0.5], [-0.82, 1], [0.82, 1], [1, 0.5], [1, -0.5], [0.82, -1], [-0.82, -1]]),
}
"""The outline of each kind of node in a box from −1 to 1; other kinds look like a state."""


class Passing(NamedTuple):
    """How wide the two arrows of a link are drawn, from 0 to 1."""

    prediction: float
    error: float


def draw(structure: GraphSummary, *, ax: Axes | None = None, dark: bool = False) -> Axes:
    """The network with its kinds, links and clocks."""
    return picture(structure, ax=ax, dark=dark)


def picture(
    structure: GraphSummary,
    *,
    ax: Axes | None = None,
    dark: bool = False,
    fills: Mapping[str, Any] | None = None,
    widths: Mapping[LinkView, Passing] | None = None,
) -> Axes:
    """The network, with nodes filled by colours and links as wide as given; plain arrows and paper without."""
    places = structure.layout
    columns = [place.column for place in places.values()]
    rows = [place.row for place in places.values()]
    ax = own(ax, size_of(structure))
    pen = ink(dark)
    room = _room(ax, max(columns) - min(columns) + 1.1, max(rows) + 1.0)
    wide = min(WIDE, 0.1 * float(room.min()))
    for link in structure.links:
        start, end = places[link.parent], places[link.child]
        for a, b, colour, way in ((start, end, pen.prediction, "prediction"), (end, start, pen.error, "error")):
            share = 0.0 if widths is None else float(np.clip(np.nan_to_num(getattr(widths[link], way)), 0, 1))
            width = PLAIN if widths is None else THIN + (wide - THIN) * share
            _arrow(ax, a, b, colour, width, max(wide / 2 + 1.5, 3.0) / room)
    for node in structure.nodes:
        _node(ax, node, places[node.name], pen, (fills or {}).get(node.name, pen.node), room[1] < 45)
    ax.set_xlim(min(columns) - 0.55, max(columns) + 0.55)
    ax.set_ylim(-0.5, max(rows) + 0.5)
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_xticks([])
    bases = {
        node.level: min(places[n.name].row for n in structure.nodes if n.level == node.level)
        for node in structure.nodes
    }
    ax.set_yticks(list(bases.values()), [f"level {level}" for level in bases], color=pen.faint)
    ax.tick_params(length=0, labelsize="small")
    ax.set_facecolor(pen.paper)
    ax.figure.set_facecolor(pen.paper)
    return _legend(ax, structure, pen)


def size_of(structure: GraphSummary) -> tuple[float, float]:
    """The size of a picture of its own, in inches."""
    columns, rows = zip(*structure.layout.values(), strict=True)
    return max(1.75 * (max(columns) - min(columns) + 1) + 0.8, 4.5), max(1.05 * (max(rows) + 1) + 0.9, 2.6)


def own(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    made: Axes = Figure(figsize=size, layout="constrained").subplots()
    return made


def _room(ax: Axes, columns: float, rows: float) -> Array:
    """About how many points there are between columns and between rows."""
    assert ax.figure is not None
    box = ax.figure.bbox
    return np.array([box.width / columns, box.height / rows]) * 72 * 0.85 / ax.figure.dpi


def _node(ax: Axes, node: NodeView, place: Place, pen: Ink, fill: Any, tight: bool) -> None:
    outline = SHAPES.get(node.kind, SHAPES["state"]) * (WIDTH / 2, HEIGHT / 2) + (place.column, place.row)
    ax.add_patch(Polygon(outline, facecolor=fill, edgecolor=pen.line, linewidth=1.1, zorder=3))
    colour = pen.line if isinstance(fill, str) else contrast(fill)
    name = node.name if len(node.name) <= 18 else node.name[:17] + "…"
    middle: dict[str, Any] = {"ha": "center", "va": "center", "color": colour, "zorder": 4, "parse_math": False}
    if tight:  # no room for two lines
        words = f"{name} · {node.clock}" if node.clock else name
        ax.text(*place, words, fontsize=8 if len(words) <= 10 else 6, **middle)
        return
    lift = 0.06 if node.clock else 0.0
    ax.text(place.column, place.row + lift, name, fontsize=10 if len(name) <= 10 else 7, **middle)
    ax.text(place.column, place.row - 0.1, node.clock, fontsize=6.5, **middle)


def contrast(fill: Any) -> str:
    """Black or white, whichever can be read on a colour (r, g, b, …)."""
    red, green, blue = fill[:3]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _arrow(ax: Axes, start: Place, end: Place, colour: str, width: float, aside: Array) -> None:
    """From the border of one node to that of another, to the right of the straight line by `aside`."""
    a, b = np.array(start), np.array(end)
    along = (b - a) / np.linalg.norm(b - a)
    shift = aside * (along[1], -along[0])
    far = float(np.linalg.norm(b - a)) > 1.5  # others may stand between
    ax.add_patch(
        FancyArrowPatch(
            a + shift + along * _reach(along),
            b + shift - along * _reach(along),
            arrowstyle=f"-|>,head_width={0.14 + 0.055 * width},head_length={0.28 + 0.07 * width}",
            connectionstyle="arc3,rad=0.12" if far else "arc3,rad=0",
            mutation_scale=10,
            color=colour,
            linewidth=width,
            shrinkA=1,
            shrinkB=1,
            joinstyle="miter",
            capstyle="butt",
            zorder=2,
        )
    )


def _reach(along: Array) -> float:
    """How far it is from the middle of a node to its border."""
    return float(1 / max(abs(along[0]) / (WIDTH / 2), abs(along[1]) / (HEIGHT / 2))) + 0.02


def _legend(ax: Axes, structure: GraphSummary, pen: Ink) -> Axes:
    handles: list[Any] = [
        Line2D([], [], color=pen.prediction, linewidth=2, marker="v", markersize=5, label="predictions"),
        Line2D([], [], color=pen.error, linewidth=2, marker="^", markersize=5, label="errors"),
    ]
    kinds = dict.fromkeys(node.kind for node in structure.nodes)
    for kind in kinds:
        shape = SHAPES.get(kind, SHAPES["state"]) * (1.0, 0.62)
        outline = np.concatenate([shape, shape[:1]])
        handles.append(
            Line2D(
                [],
                [],
                linestyle="none",
                marker=Path(outline, closed=True),
                markersize=13,
                markerfacecolor=pen.node,
                markeredgecolor=pen.line,
                label=kind,
            )
        )
    ax.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=min(len(handles), 4),
        frameon=False,
        fontsize="small",
        labelcolor=pen.line,
        handlelength=1.6,
        columnspacing=1.2,
    )
    return ax
