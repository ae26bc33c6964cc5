"""What a graph looks like from outside: nodes, links, levels and clocks as plain data, kept with every result."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import networkx as nx

from pcnet.errors import ResultError
from pcnet.model.graph import Graph
from pcnet.model.links import AnyLink
from pcnet.model.schedule import Schedule, span


class NodeView(NamedTuple):
    """A node: its kind, role, level (0 is sensory), clock ("every 64"; "" is every observation) and a description."""

    name: str
    kind: str
    role: str
    level: int
    clock: str
    about: str


class LinkView(NamedTuple):
    """A link from parent to child; for parameters of a mapping, `of` is the node that is predicted by it."""

    kind: str
    parent: str
    child: str
    of: str | None

    def channel(self, way: str) -> str:
        """The name of a recording of what passes along it: way is "prediction" (down) or "error" (up)."""
        sender, receiver = (self.parent, self.child) if way == "prediction" else (self.child, self.parent)
        return f"{sender} to {receiver}{f' ({self.of})' if self.of is not None else ''}.{way}"


class Place(NamedTuple):
    """Where a node is drawn: column from left to right around 0, row from the sensory nodes up."""

    column: float
    row: float


@dataclasses.dataclass(frozen=True)
class GraphSummary:
    """Nodes and links as plain data, without their functions and numbers."""

    nodes: tuple[NodeView, ...]
    links: tuple[LinkView, ...]

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule | None = None) -> GraphSummary:
        """What a graph looks like; without a schedule its nodes have no clocks."""
        levels, clocks = _levels(graph), _clocks(graph, schedule)
        nodes = [
            NodeView(name, node.kind, node.role, levels[name], clocks[name], node.describe())
            for name, node in graph.nodes.items()
        ]
        links = [
            LinkView(k.key, k.parent.name, k.child.name, k.of.name if k.of is not None else None) for k in graph.links
        ]
        return cls(tuple(nodes), tuple(links))

    def __getitem__(self, name: str) -> NodeView:
        for node in self.nodes:
            if node.name == name:
                return node
        raise ResultError(f"there is no node {name!r}; nodes: {', '.join(node.name for node in self.nodes)}")

    @property
    def layout(self) -> dict[str, Place]:
        """A place for each node, the same each time: levels as rows, with what drives or weighs a node beside it."""
        return _Layout(self).places

    def to_json(self) -> str:
        return json.dumps({"nodes": [list(n) for n in self.nodes], "links": [list(k) for k in self.links]})

    @classmethod
    def from_json(cls, text: str) -> GraphSummary:
        try:
            held: dict[str, Any] = json.loads(text)
            nodes = tuple(NodeView(*row) for row in held["nodes"])
            links = tuple(LinkView(*row) for row in held["links"])
        except (ValueError, KeyError, TypeError) as error:
            raise ResultError(f"the structure of the graph is damaged: {error}") from None
        return cls(nodes, links)


def _levels(graph: Graph) -> dict[str, int]:
    """Levels from the sensory nodes up: who predicts is above; causes, parameters and precisions are beside."""
    levels: dict[str, int] = {}

    def height(link: AnyLink) -> int:
        return levels[link.child.name] + link.style.above

    for name in reversed(list(nx.topological_sort(graph.network))):
        levels[name] = max((height(link) for link in graph.below(graph.nodes[name])), default=0)
    return levels


def _clocks(graph: Graph, schedule: Schedule | None) -> dict[str, str]:
    """When nodes move, or sense if they observe; "fixed" where they never do."""
    if schedule is None:
        return dict.fromkeys(graph.nodes, "")
    clocks = dict.fromkeys(graph.nodes, "fixed")
    for act in reversed(schedule.acts):
        for name in act.names(graph.nodes):
            if act.action == ("observe" if graph.nodes[name].observes else "update"):
                every = act.clock.every
                clocks[name] = "" if bool((every == 1).all()) else f"every {span(every)}"
    for act in schedule.on_end:
        for name in act.names(graph.nodes):
            clocks[name] = "every pass"
    return clocks


STACKED = 0.65
"""How far apart, in rows, nodes are stacked beside another."""


# --- places ----------------------------------------------------------------------------------------------------------
class _Layout:
    """Rows of groups: a node in the middle, causes (else parameters) to its left, precisions to its right.

    Several on one side are stacked, less than a row apart; those beside one of them go further out.
    """

    def __init__(self, structure: GraphSummary) -> None:
        self.structure = structure
        self.beside: dict[str, dict[str, str]] = {node.name: {} for node in structure.nodes}
        self.hosts = self._hosts()
        for guest, (host, kind) in self.hosts.items():
            self.beside[host][guest] = kind
        self.places: dict[str, Place] = {}
        base = 0.0
        for level in sorted({node.level for node in structure.nodes}):
            heads = [node.name for node in structure.nodes if node.level == level and node.name not in self.hosts]
            self._row(heads, base)
            base += 1.0 + STACKED * max(0, *(max(map(self._height, self._sides(name))) - 1 for name in heads))

    def _hosts(self) -> dict[str, tuple[str, str]]:
        """Beside which node of its own level a node stands, by the first link that says so, and the link's kind."""
        level = {node.name: node.level for node in self.structure.nodes}
        found: dict[str, tuple[str, str]] = {}
        for link in self.structure.links:
            if link.kind != "predicts" and level[link.parent] == level[link.child]:
                found.setdefault(link.parent, (link.child, link.kind))
        return found

    def _row(self, heads: list[str], base: float) -> None:
        """Groups beside each other in the order of what they predict, the row centred; a single group's node at 0."""
        rank = {name: i for i, name in enumerate(heads)}
        heads = sorted(heads, key=lambda name: (self._middle(name), rank[name]))
        edge, middles = 0.0, []
        for name in heads:
            left, right = (max(map(self._reach, side), default=0) for side in self._sides(name))
            middles.append(edge + left)
            edge += left + 1 + right
        shift = middles[0] if len(heads) == 1 else (edge - 1) / 2
        if len(heads) == 1 and not self.beside[heads[0]]:
            shift -= self._middle(heads[0])  # nothing but itself: straight above what it predicts
        for name, middle in zip(heads, middles, strict=True):
            self.places[name] = Place(middle - shift, base)
            for side, way in zip(self._sides(name), (-1, 1), strict=True):
                self._put(side, middle - shift, base, way)

    def _put(self, guests: list[str], column: float, row: float, way: int) -> None:
        for name in guests:
            self.places[name] = Place(column + way, row)
            self._put(list(self.beside[name]), column + way, row, way)
            row += STACKED * self._height([name])

    def _sides(self, name: str) -> tuple[list[str], list[str]]:
        guests = self.beside[name]
        by_kind = {
            kind: [guest for guest in guests if guests[guest] == kind] for kind in ("drives", "parametrises", "weighs")
        }
        causes, parameters, precisions = by_kind.values()
        # states above predict causes: parameters would stand in the way there
        return (causes, precisions + parameters) if causes else (parameters, precisions)

    def _reach(self, name: str) -> int:
        """How many columns a guest and its own guests take."""
        return 1 + max(map(self._reach, self.beside[name]), default=0)

    def _height(self, guests: list[str]) -> int:
        """How many places guests on one side take above each other."""
        return sum(max(1, self._height(list(self.beside[guest]))) for guest in guests)

    def _middle(self, name: str) -> float:
        """The mean column of the nodes below."""
        below = [
            self.places[k.child].column for k in self.structure.links if k.parent == name and k.child in self.places
        ]
        return sum(below) / len(below) if below else 0.0
