"""Plain-data summary of a graph (nodes, links, levels, clocks and positions), saved with every result."""

import dataclasses
import json
import math
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


def _parts(names: list[str], links: tuple[LinkSummary, ...]) -> list[list[str]]:
    """The parts of a graph that no link connects, in the order of their first nodes."""
    part = {name: name for name in names}  # a name for all nodes of a part
    for link in links:
        old, new = part[link.child], part[link.parent]
        part = {name: new if mine == old else mine for name, mine in part.items()}
    return [[name for name in names if part[name] == each] for each in dict.fromkeys(part.values())]


STACK_SPACING = 0.65  # distance, in rows, between nodes that are stacked beside another node
WIDEST = 12  # columns of a drawing, beyond which a level is broken into several rows
GAP = 0.5  # columns and rows between parts of a graph that no link connects


class _Layout:
    """Rows of groups: a head node, causes (else parameters) to its left, precisions to its right.

    Several nodes on one side are stacked less than a row apart; nodes attached to one of them go further out. A graph
    that would be too wide is drawn part by part, if links do not connect them, and a level in several rows.
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
        self.level, self.hosts = level, hosts
        self.positions: dict[str, Position] = {}
        self._place(list(level), math.inf)
        if self._extent(list(level))[0] > WIDEST:
            self._tile(_parts(list(level), summary.links))

    def _place(self, names: list[str], widest: float) -> None:
        """Place some of the nodes around column 0, from row 0 upwards."""
        base = 0.0
        for row in sorted({self.level[name] for name in names}):
            heads = [name for name in names if self.level[name] == row and name not in self.hosts]
            for part in self._broken(sorted(heads, key=self._mean_column_below), widest):
                self._place_row(part, base)
                base += 1.0 + STACK_SPACING * max(0, *(max(map(self._height, self._sides(name))) - 1 for name in part))

    def _broken(self, heads: list[str], widest: float) -> list[list[str]]:
        """A row of heads, broken into several that are not too wide."""
        rows: list[list[str]] = [[]]
        width = 0
        for name in heads:
            mine = sum(self._beside(name)) + 1
            if rows[-1] and width + mine > widest:
                rows.append([])
                width = 0
            rows[-1].append(name)
            width += mine
        return rows

    def _tile(self, parts: list[list[str]]) -> None:
        """Place parts of the graph beside each other, and above each other where they would be too wide."""
        self.positions = {}
        tiers: list[tuple[float, float]] = []  # width and height of each row of parts
        tier: list[list[str]] = []
        for part in parts:
            self._place(part, WIDEST)
            width, height = self._extent(part)
            if tier and tiers[-1][0] + GAP + width > WIDEST:
                tier = []
            if not tier:
                tiers.append((-GAP, 0.0))
            left, base = tiers[-1][0] + GAP, sum(high + GAP for _, high in tiers[:-1])
            first = min(self.positions[name].column for name in part)
            for name in part:
                column, row = self.positions[name]
                self.positions[name] = Position(column - first + left, row + base)
            tiers[-1] = left + width, max(tiers[-1][1], height)
            tier.append(part)
        middle = (max(width for width, _ in tiers) - 1) / 2
        self.positions = {name: Position(c - middle, r) for name, (c, r) in self.positions.items()}

    def _extent(self, names: list[str]) -> tuple[float, float]:
        """Columns and rows that nodes take."""
        columns, rows = zip(*(self.positions[name] for name in names), strict=True)
        return max(columns) - min(columns) + 1, max(rows) + 1

    def _beside(self, name: str) -> tuple[int, int]:
        """Columns to the left and to the right of a head."""
        left, right = (max(map(self._reach, side), default=0) for side in self._sides(name))
        return left, right

    def _place_row(self, heads: list[str], base: float) -> None:
        """Place groups in the order of what they predict and centre the row; a single head goes to column 0."""
        edge, columns = 0.0, []
        for name in heads:
            left, right = self._beside(name)
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
