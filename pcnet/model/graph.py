"""A model: nodes and the links between them, checked as they are composed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import networkx as nx
import torch

from pcnet.errors import GraphError, ScheduleError, SettingError
from pcnet.functions.base import Function, PlainFunction
from pcnet.functions.traced import as_function
from pcnet.model.node import Kind, Link, Node
from pcnet.model.schedule import Schedule, batch, odem
from pcnet.settings import broadcast

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pcnet.engine.fit import Fit
    from pcnet.engine.session import Session
    from pcnet.numerics.estimators import ParameterEstimator
    from pcnet.results.recorder import Record
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
        self.network: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        """Node names with attribute `node`, edges from parent to child with attribute `link`."""
        self._attached: list[Link] = []

    # --- composing ---------------------------------------------------------------------------------------------
    def predicts(self, parent: Node, child: Node, via: Function | PlainFunction | None = None) -> None:
        """The parent's state predicts the child through a mapping g(x, θ); the identity unless given."""
        _nodes_only(parent, child)
        if any(link.child is child for link in self._links(parent, "predicts")):
            raise GraphError(f"{parent.name!r} already predicts {child.name!r}")
        shape = parent.error_shape
        self._connect(Link("predicts", parent, child, as_function(via, None if shape is None else shape.dim), None))

    def drives(self, parent: Node, child: Node) -> None:
        """The parent, a cause v, is an argument of the child's flow f(x, v, θ), and of its mappings g(x, v, θ).

        Several causes of one state are joined in the order in which they are attached.
        """
        _nodes_only(parent, child)
        if any(link.child is child for link in self._links(parent, "drives")):
            raise GraphError(f"{parent.name!r} already drives {child.name!r}")
        self._connect(Link("drives", parent, child, None, None))

    def parametrises(self, parent: Node, child: Node, of: Node | None = None) -> None:
        """The parent holds the parameters of the child's flow or, with `of`, of the mapping by which it predicts `of`.

        Several parameter nodes of one function are joined in the order in which they are attached.
        """
        _nodes_only(parent, child, *([] if of is None else [of]))
        if of is not None and not any(link.child is of for link in self._links(child, "predicts")):
            raise GraphError(
                f"{child.name!r} does not predict {of.name!r}, so {parent.name!r} cannot parametrise that mapping; "
                f"add graph.predicts({child.name}, {of.name}, via=...) first"
            )
        if any(link.child is child and link.of is of for link in self._links(parent, "parametrises")):
            raise GraphError(f"{parent.name!r} already parametrises {child.name!r}")
        self._connect(Link("parametrises", parent, child, None, of))

    def weighs(self, parent: Node, child: Node) -> None:
        """The parent is the precision of the child's error, or of one of the noises behind it."""
        _nodes_only(parent, child)
        weighers = [link.parent for link in self.links if link.kind == "weighs" and link.child is child]
        if parent in weighers:
            raise GraphError(f"{parent.name!r} already weighs {child.name!r}")
        if weighers and not child.multiple_noises:
            raise GraphError(
                f"{child.name!r} already has the precision {weighers[-1].name!r}; an error has exactly one"
            )
        self._connect(Link("weighs", parent, child, None, None))

    def _connect(self, link: Link) -> None:
        for node in (link.parent, link.child):
            known = self.network.nodes.get(node.name)
            twice = link.parent is not link.child and link.parent.name == link.child.name
            if twice or (known is not None and known["node"] is not node):
                raise GraphError(f"two nodes are called {node.name!r}; names must differ")
        try:
            link.child.as_child(link)
            link.parent.as_parent(link)
        except GraphError as error:
            if _fits(link.child, link.parent, link):
                call = f"graph.{link.kind}({link.child.name}, {link.parent.name})"
                raise GraphError(f"{error}; did you mean {call}?") from None
            raise
        parent, child = link.parent.name, link.child.name
        cyclic = parent == child or (
            parent in self.network and child in self.network and nx.has_path(self.network, child, parent)
        )
        if cyclic:
            raise GraphError(f"{parent!r} {link.kind} {child!r} would close a cycle; predictions must go down only")
        for node in (link.parent, link.child):
            self.network.add_node(node.name, node=node)
        self.network.add_edge(parent, child, link=link)
        self._attached.append(link)

    def with_nodes(self, nodes: Mapping[str, Node]) -> Graph:
        """The same graph of other nodes of the same names: their links are made anew, in the same order."""
        made = Graph()
        for link in self._attached:
            of = nodes[link.of.name] if link.of is not None else None
            made._connect(Link(link.kind, nodes[link.parent.name], nodes[link.child.name], link.function, of))
        return made

    # --- looking -----------------------------------------------------------------------------------------------
    @property
    def nodes(self) -> Mapping[str, Node]:
        """The nodes by name, in the order in which they were added."""
        return {name: data["node"] for name, data in self.network.nodes(data=True)}

    @property
    def topological_order(self) -> Mapping[str, Node]:
        """The nodes by name, parents before their children, and else in the order in which they were added."""
        nodes, place = self.nodes, {name: i for i, name in enumerate(self.network)}
        return {name: nodes[name] for name in nx.lexicographical_topological_sort(self.network, key=place.__getitem__)}

    @property
    def links(self) -> tuple[Link, ...]:
        """All links, in the order in which they were added."""
        return tuple(self._attached)

    def above(self, node: Node) -> tuple[Link, ...]:
        return tuple(data["link"] for _, _, data in self.network.in_edges(node.name, data=True))

    def below(self, node: Node) -> tuple[Link, ...]:
        return tuple(data["link"] for _, _, data in self.network.out_edges(node.name, data=True))

    def __getitem__(self, name: str) -> Node:
        if name not in self.network:
            raise GraphError(f"there is no node {name!r}; nodes: {', '.join(self.network)}")
        node: Node = self.network.nodes[name]["node"]
        return node

    def _links(self, node: Node, kind: Kind) -> list[Link]:
        if node.name not in self.network:
            return []
        return [link for link in self.below(node) if link.kind == kind]

    def check(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> None:
        """Refuse a graph that cannot run, naming the node and the remedy."""
        if not self.network:
            raise GraphError("the graph is empty; add nodes by graph.predicts(state, sensory) and graph.weighs(...)")
        for node in self.nodes.values():
            node.check(self.above(node), self.below(node), torch.empty(0, dtype=dtype, device=device))
        if not any(node.observes for node in self.nodes.values()):
            raise GraphError("nothing in the graph observes; add graph.predicts(state, SensoryNode(...))")
        try:
            _ = self.batch_shape
        except RuntimeError:
            shapes = {node.name: tuple(node.batch_shape) for node in self.nodes.values() if node.batch_shape}
            raise GraphError(f"the batch dimensions of the nodes' settings do not fit together: {shapes}") from None

    @property
    def batch_shape(self) -> torch.Size:
        """The batch dimensions of all settings together."""
        return broadcast(*(node.batch_shape for node in self.nodes.values()))

    def __str__(self) -> str:
        lines = [f"Graph of {len(self.nodes)} nodes"]
        width = max((len(name) for name in self.nodes), default=0)
        for name in reversed(list(nx.topological_sort(self.network))):
            node = self.nodes[name]
            lines.append(f"  {name:<{width}}  {type(node).__name__:<14} {node.describe()}")
            for link in self.below(node):
                of = f"'s prediction of {link.of.name}" if link.of is not None else ""
                via = f" via {link.function!r}" if link.function is not None and link.kind == "predicts" else ""
                lines.append(f"  {'':<{width}}    {link.kind} {link.child.name}{of}{via}")
        return "\n".join(lines)

    __repr__ = __str__

    # --- as text -----------------------------------------------------------------------------------------------
    def to_spec(self, schedule: Schedule | None = None) -> dict[str, Any]:
        """The graph, and its schedule if given, as plain data; see `pcnet.model.specification`."""
        from pcnet.model.specification import to_spec

        return to_spec(self if schedule is None else Model(self, schedule))

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Graph:
        """The graph that plain data specify; with its schedule: `pcnet.load_model`."""
        from pcnet.model.specification import from_spec

        return from_spec(spec).graph

    def draw(self, schedule: Schedule | None = None, *, ax: Axes | None = None, dark: bool = False) -> Axes:
        """A picture in levels from sensory nodes up, kinds by shape, with the clocks of a schedule where given."""
        from pcnet.results.graph_plots import draw
        from pcnet.results.graph_summary import GraphSummary

        if not self.network:
            raise GraphError("the graph is empty, so that there is nothing to draw; add nodes first")
        return draw(GraphSummary.of(self, schedule), ax=ax, dark=dark)

    # --- running -----------------------------------------------------------------------------------------------
    def start(
        self,
        schedule: Schedule | None = None,
        *,
        record: Record | Iterable[str] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        threads: int | None = 1,
        on_divergence: Literal["raise", "stop", "hold", "reset"] = "raise",
    ) -> Session:
        """A run that takes one observation at a time: `live.step(y)`. The options are those of `run`."""
        from pcnet.engine.session import Session

        if isinstance(schedule, Schedule) and schedule.on_end:
            raise ScheduleError(
                f"{schedule.name} is a schedule of passes over recorded data: use graph.fit(observations, schedule)"
            )
        return Session(
            self,
            schedule or odem(),
            record=record,
            dtype=dtype,
            device=_device(device),
            threads=threads,
            on_divergence=on_divergence,
        )

    def run(
        self,
        observations: Any,
        schedule: Schedule | None = None,
        *,
        record: Record | Iterable[str] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        threads: int | None = 1,
        on_divergence: Literal["raise", "stop", "hold", "reset"] = "raise",
        progress: bool | None = None,
        times: Iterable[float] | None = None,
    ) -> Result:
        """Run over all observations and return what was recorded.

        observations: (..., T, dim), or any iterable of (..., dim); a mapping from names to these where there are
        several sensory nodes. NaN is a channel that is missing, None (or no name) a sensory node. times: of each
        observation, where they do not come at regular intervals.
        schedule: `odem()` unless given. record: what to keep; see `pcnet.Record`.
        threads: how many torch may use within an operation meanwhile; one is best for small graphs, None leaves torch's
        own setting. on_divergence: "raise" ends the run with a DivergenceError; "stop" ends the batch elements that
        diverge and no others: `result.diverged` names them, and their traces are NaN from there on. "hold" lets them go
        on as if the observation had been missing, "reset" has them begin anew with the next one: `result.fallbacks`
        counts how often, and their free energy is NaN there.
        progress: a bar on standard error; by default if that is a terminal.
        """
        live = self.start(
            schedule, record=record, dtype=dtype, device=device, threads=threads, on_divergence=on_divergence
        )
        live.run(observations, progress=progress, times=times)
        return live.result()

    def fit(
        self,
        observations: Any,
        schedule: Schedule | None = None,
        *,
        max_iterations: int = 50,
        tolerance: float = 1e-4,
        estimator: ParameterEstimator | None = None,
        slopes: Literal["exact", "messages"] = "exact",
        record: Record | Iterable[str] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        threads: int | None = 1,
        on_divergence: Literal["raise", "stop"] = "raise",
        progress: bool | None = None,
        times: Iterable[float] | None = None,
    ) -> Fit:
        """Run over recorded observations again and again, until the free action settles; see `pcnet.fitting`.

        schedule: `batch()` unless given. passes: at most so many; the result is that of one more with what was found.
        tolerance: a free action that changes by less than this from one pass to the next has settled.
        estimator: how whatever steps after a pass does so, where that should not be its own estimator.
        slopes: "exact" runs 2n + 1 copies side by side, for n numbers that step, and finds the minimum of the free
        action; "messages" runs one, for large n, and finds where the messages agree, which may be beside it.
        record: what to keep of the last pass; nothing is kept of the others. The other options are those of `run`.
        """
        from pcnet.engine.fit import fit

        return fit(
            self,
            observations,
            schedule or batch(),
            max_iterations=max_iterations,
            tolerance=tolerance,
            estimator=estimator,
            slopes=slopes,
            record=record,
            dtype=dtype,
            device=_device(device),
            threads=threads,
            on_divergence=on_divergence,
            progress=progress,
            times=times,
        )


class Model(NamedTuple):
    """A graph and the schedule that goes with it."""

    graph: Graph
    schedule: Schedule


def _device(name: torch.device | str) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise SettingError(f"there is no device {name!r}; use 'cpu', 'cuda' or another of torch's") from None


def _fits(parent: Node, child: Node, link: Link) -> bool:
    """Whether a link the other way round would make sense."""
    turned = Link(link.kind, parent, child, link.function, None)
    try:
        child.as_child(turned)
        parent.as_parent(turned)
    except GraphError:
        return False
    return link.of is None


def _nodes_only(*given: object) -> None:
    for thing in given:
        if isinstance(thing, type) and issubclass(thing, Node):
            raise GraphError(f'{thing.__name__} is a kind of node; make a node of it first: {thing.__name__}("x", ...)')
        if not isinstance(thing, Node):
            raise GraphError(f"{thing!r} is not a node; make it first, and give the node itself")
