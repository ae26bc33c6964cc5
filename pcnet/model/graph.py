"""Graphs: nodes and the links between them, checked as they are composed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pcnet.errors import GraphError, ScheduleError
from pcnet.functions.base import Function, PlainFunction
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Drives, Parametrises, Predicts, Weighs
from pcnet.model.node import AnyNode, Node
from pcnet.settings import broadcast

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes

    from pcnet.engine.fit import Fit
    from pcnet.engine.session import Session
    from pcnet.model.schedule import Schedule
    from pcnet.results.result import Result


class Graph:
    """Nodes that exchange predictions and errors.

    >>> graph = Graph()
    >>> graph.predicts(x, y)             # the state x predicts the sensory node y, by the identity unless given
    >>> graph.drives(v, x)               # the cause v is an argument of x's flow f(x, v, θ)
    >>> graph.parametrises(a, x)         # a holds the parameters of x's flow
    >>> graph.weighs(noise_x, x)         # noise_x is the precision of x's error
    """

    def __init__(self) -> None:
        self._nodes: dict[str, AnyNode] = {}
        self._links: list[AnyLink] = []
        self._checked: set[tuple[torch.dtype, str]] = set()  # dtypes and devices with which it can run

    @property
    def network(self) -> nx.MultiDiGraph[str]:
        """A networkx graph: names with attribute `node`, edges from parent to child with attribute `link`."""
        import networkx as nx  # takes longer to import than all of pcnet

        made: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        for name, node in self._nodes.items():
            made.add_node(name, node=node)
        for link in self._links:
            made.add_edge(link.parent.name, link.child.name, link=link)
        return made

    def predicts(self, parent: AnyNode, child: AnyNode, via: Function | PlainFunction | None = None) -> None:
        """Let a state predict a node below it through a mapping g(x, θ); the identity unless given."""
        self._add(Predicts, parent, child, via=via)

    def drives(self, parent: AnyNode, child: AnyNode) -> None:
        """Let a cause v be an argument of a state's flow f(x, v, θ) and mappings g(x, v, θ).

        Several causes of one state are concatenated in the order in which they are attached.
        """
        self._add(Drives, parent, child)

    def parametrises(self, parent: AnyNode, child: AnyNode, of: AnyNode | None = None) -> None:
        """Let a node hold the parameters of a state's flow or, with `of`, of its mapping to `of`.

        Several parameter nodes of one function are concatenated in the order in which they are attached.
        """
        self._add(Parametrises, parent, child, of=of)

    def weighs(self, parent: AnyNode, child: AnyNode) -> None:
        """Let a node be the precision of another node's error, or of one of the noises behind it."""
        self._add(Weighs, parent, child)

    def _add(self, kind: type[AnyLink], parent: AnyNode, child: AnyNode, **options: Any) -> None:
        of = options.get("of")
        for given in (parent, child) if of is None else (parent, child, of):
            if isinstance(given, type) and issubclass(given, Node):
                raise GraphError(f'{given.__name__} is a kind of node; make a node of it: {given.__name__}("x", ...)')
            if not isinstance(given, Node):
                raise GraphError(f"{given!r} is not a node; make one first, and pass it itself")
        self.connect(kind(parent, child, **options))

    def connect(self, link: AnyLink) -> None:
        """Add a link of any kind, and its nodes."""
        link.check(self._links)
        for node in (link.parent, link.child):
            same = self._nodes.get(node.name, node) is node
            twice = link.parent is not link.child and link.parent.name == link.child.name
            if twice or not same:
                raise GraphError(f"two nodes are called {node.name!r}; names must differ")
        try:
            link.check_ends()
        except GraphError as error:
            if _fits(link.reversed()):
                call = f"graph.{link.key}({link.child.name}, {link.parent.name})"
                raise GraphError(f"{error}; did you mean {call}?") from None
            raise
        parent, child = link.parent.name, link.child.name
        if parent == child or parent in self._descendants(child):
            raise GraphError(f"{parent!r} {link.key} {child!r} would close a cycle; predictions must go down only")
        self._nodes |= {parent: link.parent, child: link.child}
        self._links.append(link)
        self._checked.clear()

    def _descendants(self, name: str) -> set[str]:
        """Names of all nodes below a node."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            here = waiting.pop()
            below = {link.child.name for link in self._links if link.parent.name == here} - found
            found |= below
            waiting.extend(below)
        return found

    def with_nodes(self, nodes: Mapping[str, AnyNode]) -> Graph:
        """The same graph with other nodes of the same names."""
        made = Graph()
        for link in self._links:
            made.connect(link.between(nodes))
        return made

    @property
    def nodes(self) -> Mapping[str, AnyNode]:
        """The nodes by name, in the order in which they were added."""
        return dict(self._nodes)

    @property
    def topological_order(self) -> Mapping[str, AnyNode]:
        """The nodes by name, parents before children, otherwise in the order in which they were added."""
        found: dict[str, AnyNode] = {}
        while len(found) < len(self._nodes):
            blocked = {link.child.name for link in self._links if link.parent.name not in found}
            name = next(name for name in self._nodes if name not in found and name not in blocked)
            found[name] = self._nodes[name]
        return found

    @property
    def belief_holders(self) -> list[AnyNode]:
        """States that hold a belief themselves, and not as a part of that of a state which they drive."""
        drives = [link for link in self._links if isinstance(link, Drives)]
        joined = {link.parent.name for link in drives if link.child.switches or link.parent.joins_child}
        return [node for node in self._nodes.values() if node.role == "state" and node.name not in joined]

    @property
    def generations(self) -> list[str]:
        """All names: nodes without parents, then those whose parents are all among these, and so on."""
        found: list[str] = []
        while len(found) < len(self._nodes):
            blocked = {link.child.name for link in self._links if link.parent.name not in found}
            found += [name for name in self._nodes if name not in found and name not in blocked]
        return found

    @property
    def links(self) -> tuple[AnyLink, ...]:
        """All links, in the order in which they were added."""
        return tuple(self._links)

    def above(self, node: AnyNode) -> tuple[AnyLink, ...]:
        """The links from parents of a node."""
        return tuple(link for link in self._links if link.child.name == node.name)

    def below(self, node: AnyNode) -> tuple[AnyLink, ...]:
        """The links to children of a node."""
        return tuple(link for link in self._links if link.parent.name == node.name)

    def neighbours(self, node: AnyNode) -> Neighbours:
        """The links of a node, with the estimators that its children suggest for it."""
        below = self.below(node)
        defaults = {link: link.child.default_estimator(link, self.above(link.child)) for link in below}
        return Neighbours(self.above(node), below, default_estimators=defaults)

    def __getitem__(self, name: str) -> AnyNode:
        if not isinstance(name, str) or name not in self._nodes:
            raise GraphError(f"there is no node {str(name)[:60]!r}; nodes: {', '.join(self._nodes)}")
        return self._nodes[name]

    def check(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> None:
        """Raise `GraphError`, with the node and the remedy, if the graph cannot run."""
        if not self._nodes:
            raise GraphError("the graph is empty; add nodes by graph.predicts(state, sensory) and graph.weighs(...)")
        if (dtype, str(device)) in self._checked:  # nodes and links are never changed
            return
        like = torch.empty(0, dtype=dtype, device=device)
        for node in self.nodes.values():
            node.check(self.neighbours(node), like)
        if not any(node.observes for node in self.nodes.values()):
            raise GraphError("no node in the graph observes; add graph.predicts(state, SensoryNode(...))")
        try:
            _ = self.batch_shape
        except RuntimeError:
            shapes = {node.name: tuple(node.batch_shape) for node in self.nodes.values() if node.batch_shape}
            raise GraphError(f"the batch dimensions of the nodes' settings do not fit together: {shapes}") from None
        self._checked.add((dtype, str(device)))

    @property
    def batch_shape(self) -> torch.Size:
        """The batch dimensions of all settings together."""
        return broadcast(*(node.batch_shape for node in self.nodes.values()))

    def __str__(self) -> str:
        lines = [f"Graph of {len(self.nodes)} nodes"]
        width = max((len(name) for name in self.nodes), default=0)
        for name in reversed(self.generations):
            node = self.nodes[name]
            lines.append(f"  {name:<{width}}  {type(node).__name__:<20} {node.describe()}")
            lines += [f"  {'':<{width}}    {link.describe()}" for link in self.below(node)]
        return "\n".join(lines)

    __repr__ = __str__

    def run(self, observations: Any, schedule: Schedule | None = None, **options: Any) -> Result:
        """`Model(graph, schedule).run(observations, **options)`."""
        from pcnet.model.model import Model

        return Model(self, schedule).run(observations, **options)

    def start(self, schedule: Schedule | None = None, **options: Any) -> Session:
        """`Model(graph, schedule).start(**options)`."""
        from pcnet.model.model import Model

        return Model(self, schedule).start(**options)

    def fit(self, observations: Any, schedule: Schedule | None = None, **options: Any) -> Fit:
        """`Model(graph, schedule).fit(observations, **options)`, with the schedule `batch()` unless given."""
        from pcnet.model.model import Model
        from pcnet.model.schedule import batch

        model = Model(self, batch() if schedule is None else schedule)
        if not model.schedule.on_end:
            name = model.schedule.name
            raise ScheduleError(f"{name}: nothing is updated after a pass; use pcnet.batch(), or add on_end")
        return model.fit(observations, **options)

    def draw(self, schedule: Schedule | None = None, *, ax: Axes | None = None, dark: bool = False) -> Axes:
        """A drawing of the graph in levels, with the clocks of a schedule where given."""
        from pcnet.results.graph_plots import draw
        from pcnet.results.graph_summary import GraphSummary

        if not self._nodes:
            raise GraphError("the graph is empty; add nodes before drawing it")
        return draw(GraphSummary.of(self, schedule), ax=ax, dark=dark)


def _fits(link: AnyLink | None) -> bool:
    """Whether the nodes of a link accept it."""
    try:
        return link is not None and link.check_ends()
    except GraphError:
        return False
