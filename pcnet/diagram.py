"""A picture of a graph: nodes in layers from above, links with what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx

from pcnet.errors import GraphError
from pcnet.files import whole
from pcnet.graph import Graph

COLOURS = {"state": "#56B4E9", "sensory": "#E69F00", "parameter": "#009E73", "precision": "#CC79A7"}
"""Of nodes by role; others are grey."""
STYLES: dict[str, Any] = {"predicts": "solid", "drives": "dashdot", "parametrises": "dashed", "weighs": "dotted"}
PICTURES = (".png", ".svg", ".pdf")


def save(graph: Graph, path: Path) -> Path:
    """Write a picture, or a text for Graphviz, by the ending of the path; whole or not at all."""
    if path.suffix not in (*PICTURES, ".dot"):
        raise GraphError(f"{str(path)!r}: a diagram ends in {', '.join((*PICTURES, '.dot'))}")
    if not path.parent.is_dir():
        raise GraphError(f"there is no folder {str(path.parent)!r} to save into")
    with whole(path) as scratch:
        if path.suffix == ".dot":
            scratch.write_text(dot(graph), encoding="utf-8")
        else:
            _draw(graph, scratch, path.suffix[1:])
    return path


def dot(graph: Graph) -> str:
    """The graph in the language of Graphviz."""
    lines = ["digraph pcnet {", "  node [shape=box, style=filled];"]
    for name, node in graph.nodes.items():
        colour = COLOURS.get(node.role, "#BBBBBB")
        lines.append(f'  {_quoted(name)} [label={_quoted(f"{name}: {node.describe()}")}, fillcolor="{colour}"];')
    for link in graph.links:
        of = f" of {link.of.name}" if link.of is not None else ""
        ends = f"{_quoted(link.parent.name)} -> {_quoted(link.child.name)}"
        style = STYLES[link.kind].replace("dashdot", "dashed")
        lines.append(f"  {ends} [label={_quoted(link.kind + of)}, style={style}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _places(graph: Graph) -> dict[str, tuple[float, float]]:
    """Each node as far above the lowest as the longest way down from it is, and near those it speaks to."""
    place: dict[str, tuple[float, float]] = {}
    for height, layer in enumerate(nx.topological_generations(graph.network.reverse())):
        wish = {}
        for i, name in enumerate(layer):
            children = [place[child][0] for child in graph.network.successors(name)]
            wish[name] = sum(children) / len(children) if children else (i + 0.5) / len(layer)
        for i, name in enumerate(sorted(layer, key=wish.__getitem__)):
            place[name] = ((i + 0.5) / len(layer), float(height))
    return place


def _draw(graph: Graph, path: Path, form: str) -> None:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    place = _places(graph)
    heights = [height for _, height in place.values()]
    widest = max(heights.count(height) for height in set(heights))
    figure = Figure(figsize=(max(4.0, 1.8 * widest), 1.2 + 1.2 * (max(heights) + 1)), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, max(heights) + 0.5)
    for link in graph.links:
        (x0, y0), (x1, y1) = place[link.parent.name], place[link.child.name]
        arrow = {
            "arrowstyle": "->",
            "linestyle": STYLES[link.kind],
            "shrinkA": 14,
            "shrinkB": 14,
            "connectionstyle": f"arc3,rad={0.2 if y0 - y1 > 1 else 0.0}",  # past the layers between
        }
        axes.annotate("", (x1, y1), (x0, y0), arrowprops=arrow)
    for name, node in graph.nodes.items():
        colour = COLOURS.get(node.role, "#BBBBBB")
        box = {"boxstyle": "round", "facecolor": colour, "edgecolor": "none", "alpha": 0.9}
        axes.text(*place[name], name.replace("$", r"\$"), ha="center", va="center", bbox=box)
    used = {link.kind for link in graph.links}
    lines = [Line2D([], [], color="black", linestyle=STYLES[kind], label=kind) for kind in STYLES if kind in used]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False, fontsize="small")
    figure.savefig(path, format=form, dpi=150)
