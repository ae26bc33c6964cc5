"""A graph in a file: as a picture, or as text for Graphviz."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pcnet.errors import GraphError
from pcnet.files import atomic_write
from pcnet.model.graph import Graph
from pcnet.model.schedule import Schedule

COLOURS = {"state": "#56B4E9", "sensory": "#E69F00", "parameter": "#009E73", "precision": "#CC79A7"}
"""Of nodes by role; others are grey."""
STYLES: dict[str, Any] = {"predicts": "solid", "drives": "dashdot", "parametrises": "dashed", "weighs": "dotted"}
PICTURES = (".png", ".svg", ".pdf")


def save(graph: Graph, path: Path, schedule: Schedule | None = None) -> Path:
    """Write a picture, or a text for Graphviz, by the ending of the path; whole or not at all."""
    if path.suffix not in (*PICTURES, ".dot"):
        raise GraphError(f"{str(path)!r}: a diagram ends in {', '.join((*PICTURES, '.dot'))}")
    if not path.parent.is_dir():
        raise GraphError(f"there is no folder {str(path.parent)!r} to save into")
    with atomic_write(path) as scratch:
        if path.suffix == ".dot":
            scratch.write_text(dot(graph), encoding="utf-8")
        else:
            figure = graph.draw(schedule).get_figure()
            assert isinstance(figure, Figure)
            figure.savefig(scratch, format=path.suffix[1:], dpi=200, bbox_inches="tight")
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
        style = STYLES[link.key].replace("dashdot", "dashed")
        lines.append(f"  {ends} [label={_quoted(link.key + of)}, style={style}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
