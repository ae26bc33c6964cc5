"""Plain-data summary of a graph (nodes, links, levels, clocks and positions), saved with every result."""

import dataclasses
import json
from typing import Any, NamedTuple, Self

from pcnet.errors import ResultError
from pcnet.model.graph import Graph
from pcnet.model.links import Link, LinkStyle
from pcnet.model.schedule import Schedule, span


class NodeSummary(NamedTuple):
    """Summary of one node; level 0 is sensory, and an empty clock means every observation."""

    name: str
    kind: str
    role: str
    level: int
    clock: str
    about: str


class LinkSummary(NamedTuple):
    """Summary of one link; `of` is the predicted node if the link carries parameters of a mapping."""

    kind: str
    parent: str
    child: str
    of: str | None

    def channel(self, way: str) -> str:
        """Name of the recorded messages; way: "prediction" (parent to child) or "error" (child to parent)."""
        sender, receiver = (self.parent, self.child) if way == "prediction" else (self.child, self.parent)
        return f"{sender} to {receiver}{f' ({self.of})' if self.of is not None else ''}.{way}"


class Position(NamedTuple):
    """Position of a node in a drawing; columns are centred on 0, rows count up from the sensory nodes."""

    column: float
    row: float


@dataclasses.dataclass(frozen=True)
class GraphSummary:
    """Nodes and links of a graph without functions and values."""

    nodes: tuple[NodeSummary, ...]
    links: tuple[LinkSummary, ...]

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule | None = None) -> Self:
        """Summarise a graph; without a schedule the clocks are empty."""
        levels, clocks = _levels(graph), _clocks(graph, schedule)
        nodes = [
            NodeSummary(name, node.kind, node.role, levels[name], clocks[name], node.describe())
            for name, node in graph.nodes.items()
        ]
        links = [
            LinkSummary(k.key, k.parent.name, k.child.name, None if k.of is None else k.of.name) for k in graph.links
        ]
        return cls(tuple(nodes), tuple(links))

    def __getitem__(self, name: str) -> NodeSummary:
        for node in self.nodes:
            if node.name == name:
                return node
        raise ResultError(f"there is no node {name!r}; nodes: {', '.join(node.name for node in self.nodes)}")

    @property
    def layout(self) -> dict[str, Position]:
        """Deterministic position of each node: levels are rows, causes, parameters and precisions stand beside."""
        return _Layout(self).positions

    def to_json(self) -> str:
        return json.dumps({"nodes": [list(n) for n in self.nodes], "links": [list(k) for k in self.links]})

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            data: dict[str, Any] = json.loads(text)
            nodes = tuple(NodeSummary(*row) for row in data["nodes"])
            links = tuple(LinkSummary(*row) for row in data["links"])
        except (ValueError, KeyError, TypeError) as error:
            raise ResultError(f"the graph summary is damaged: {error}") from None
        return cls(nodes, links)


def _style(link_kind: str) -> LinkStyle:
    """Style of a kind of link; that of an unknown kind stands beside its child."""
    known = Link.kinds.get(link_kind)
    return LinkStyle(above=False, side="right", dash="-", label=link_kind) if known is None else known.style


def _levels(graph: Graph) -> dict[str, int]:
    """Level of each node: the greatest number of predictions on a path down to a node without children."""
    levels: dict[str, int] = {}
    for name in reversed(graph.generations):
        links = graph.below(graph.nodes[name])
        levels[name] = max((levels[link.child.name] + link.style.above for link in links), default=0)
    return levels


def _clocks(graph: Graph, schedule: Schedule | None) -> dict[str, str]:
    """How often each node is updated (observing nodes: observes); "fixed" for never."""
    if schedule is None:
        return dict.fromkeys(graph.nodes, "")
    clocks = dict.fromkeys(graph.nodes, "fixed")
    for act in reversed(schedule.acts):
        for name in act.names(graph.nodes):
            if act.action == ("observe" if graph.nodes[name].observes else "update"):
                every = act.clock.every
                clocks[name] = "" if bool((every == 1).all()) else f"every {span(every)}"
    for act in schedule.on_end:
        clocks |= dict.fromkeys(act.names(graph.nodes), "every pass")
    return clocks


STACK_SPACING = 0.65  # distance, in rows, between nodes that are stacked beside another node


class _Layout:
    """Rows of groups: a head node, causes (else parameters) to its left, precisions to its right.

    Several nodes on one side are stacked less than a row apart; nodes attached to one of them go further out.
    """

    def __init__(self, summary: GraphSummary) -> None:
        self.links = summary.links
        level = {node.name: node.level for node in summary.nodes}
        self.attached: dict[str, dict[str, str]] = {name: {} for name in level}  # link kinds by head and attached node
        hosts: dict[str, tuple[str, str]] = {}
        for link in summary.links:
            if not _style(link.kind).above and level[link.parent] == level[link.child]:
                hosts.setdefault(link.parent, (link.child, link.kind))
        for name, (host, kind) in hosts.items():
            self.attached[host][name] = kind
        self.positions: dict[str, Position] = {}
        base = 0.0
        for row in sorted(set(level.values())):
            heads = [name for name in level if level[name] == row and name not in hosts]
            self._place_row(heads, base)
            base += 1.0 + STACK_SPACING * max(0, *(max(map(self._height, self._sides(name))) - 1 for name in heads))

    def _place_row(self, heads: list[str], base: float) -> None:
        """Place groups in the order of what they predict and centre the row; a single head goes to column 0."""
        heads = sorted(heads, key=self._mean_column_below)
        edge, columns = 0.0, []
        for name in heads:
            left, right = (max(map(self._reach, side), default=0) for side in self._sides(name))
            columns.append(edge + left)
            edge += left + 1 + right
        shift = columns[0] if len(heads) == 1 else (edge - 1) / 2
        if len(heads) == 1 and not self.attached[heads[0]]:
            shift -= self._mean_column_below(heads[0])  # nothing attached: straight above what it predicts
        for name, column in zip(heads, columns, strict=True):
            self.positions[name] = Position(column - shift, base)
            for side, direction in zip(self._sides(name), (-1, 1), strict=True):
                self._place_side(side, column - shift, base, direction)

    def _place_side(self, names: list[str], column: float, row: float, direction: int) -> None:
        for name in names:
            self.positions[name] = Position(column + direction, row)
            self._place_side(list(self.attached[name]), column + direction, row, direction)
            row += STACK_SPACING * self._height([name])

    def _sides(self, name: str) -> tuple[list[str], list[str]]:
        """Names on the left and on the right of a node."""
        by_kind: dict[str, list[str]] = {kind: [] for kind in Link.kinds}
        for each, kind in self.attached[name].items():
            by_kind.setdefault(kind, []).append(each)
        left = [names for kind, names in by_kind.items() if names and _style(kind).side == "left"]
        right = [each for kind, names in by_kind.items() if _style(kind).side == "right" for each in names]
        # one kind on the left: parameters beside causes would be in the way of predictions from above
        return left[0] if left else [], right + [each for names in left[1:] for each in names]

    def _reach(self, name: str) -> int:
        """Number of columns that an attached node and those attached to it take."""
        return 1 + max(map(self._reach, self.attached[name]), default=0)

    def _height(self, names: list[str]) -> int:
        """Number of stacked places that the nodes on one side take."""
        return sum(max(1, self._height(list(self.attached[name]))) for name in names)

    def _mean_column_below(self, name: str) -> float:
        below = [self.positions[k.child].column for k in self.links if k.parent == name and k.child in self.positions]
        return sum(below) / len(below) if below else 0.0
