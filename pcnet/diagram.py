"""A picture of a graph: nodes in layers from above, links with what they do."""

from __future__ import annotations

from pathlib import Path

import networkx as nx

from pcnet.errors import GraphError
from pcnet.files import whole
from pcnet.graph import Graph

COLOURS = {"state": "#56B4E9", "sensory": "#E69F00", "parameter": "#009E73", "precision": "#CC79A7"}
"""Of nodes by role; others are grey."""
STYLES = {"predicts": "solid", "drives": "dashdot", "parametrises": "dashed", "weighs": "dotted"}
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


def _draw(graph: Graph, path: Path, form: str) -> None:
    from matplotlib.figure import Figure

    layers = list(nx.topological_generations(graph.network))
    place = {}
    for depth, layer in enumerate(layers):
        for i, name in enumerate(layer):
            place[name] = ((i + 0.5) / len(layer), -depth)
    widest = max(len(layer) for layer in layers)
    figure = Figure(figsize=(max(4.0, 2.2 * widest), 1.0 + 1.4 * len(layers)), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(-len(layers) + 0.5, 0.5)
    for link in graph.links:
        (x0, y0), (x1, y1) = place[link.parent.name], place[link.child.name]
        bend = 0.15 if y0 - y1 > 1 else 0.0  # past the layers between
        axes.annotate(
            "",
            (x1, y1),
            (x0, y0),
            arrowprops={
                "arrowstyle": "->",
                "linestyle": STYLES[link.kind],
                "shrinkA": 14,
                "shrinkB": 14,
                "connectionstyle": f"arc3,rad={bend}",
            },
        )
        axes.text((x0 + x1) / 2 + 0.3 * bend, (y0 + y1) / 2, link.kind, fontsize=7, color="0.35", ha="center")
    for name, node in graph.nodes.items():
        colour = COLOURS.get(node.role, "#BBBBBB")
        box = {"boxstyle": "round", "facecolor": colour, "edgecolor": "none", "alpha": 0.9}
        axes.text(*place[name], name.replace("$", r"\$"), ha="center", va="center", bbox=box)
    figure.savefig(path, format=form, dpi=150)
