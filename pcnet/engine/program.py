"""Binding: a model laid out for a run, with everything that does not change from one tick to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.engine.state import GraphState
from pcnet.model.context import Neighbours
from pcnet.model.graph import Graph
from pcnet.model.links import AnyLink, Predicts
from pcnet.model.model import Model
from pcnet.model.node import AnyNode, BatchSpec
from pcnet.model.schedule import Act, Action


class ScheduledAction(NamedTuple):
    """One act of a schedule, with the names of its nodes in order.

    periods: all periods that occur. by_element: the period of each batch element (B,), if they differ.
    """

    action: Action
    names: tuple[str, ...]
    repeats: int
    periods: tuple[int, ...]
    by_element: Tensor | None

    def due(self, tick: int) -> bool | Tensor:
        """Whether it is due at a tick (from 0): for all batch elements, or for which of them (B,)."""
        count = tick + 1
        due = [count % period == 0 for period in self.periods]
        if self.by_element is None or not any(due):
            return due[0]
        mask = count % self.by_element == 0
        return True if bool(mask.all()) else mask


class Dependencies(NamedTuple):
    """Which messages depend on the state of a node: predictions on its links, and errors."""

    predictions: tuple[AnyLink, ...]
    errors: tuple[AnyLink, ...]


class Program:
    """A model bound to a batch, dtype and device.

    links: of each node, with what it knows of its neighbours. bound: what each node's `bind` returned. interval:
    shortest sampling interval, (B,). on_start, acts, on_end: actions at the first observation, at each, and after the
    last. dependencies: which messages depend on each node. initial: the state before the first observation.
    """

    def __init__(self, model: Model, spec: BatchSpec, smooth: bool = False) -> None:
        """smooth: whether states keep what a smoother needs."""
        graph, schedule = model.graph, model.schedule
        self.model, self.spec, self.smooth = model, spec, smooth
        self.nodes: Mapping[str, AnyNode] = graph.nodes
        self.observers = tuple(name for name, node in self.nodes.items() if node.observes)
        self.evidence = tuple(name for name in self.observers if not self.nodes[name].is_input)
        """Observers of which an observation starts a run; inputs alone do not."""
        after = {name for act in schedule.on_end for name in act.names(self.nodes)}
        during = {name for act in schedule.acts if act.action == "update" for name in act.names(self.nodes)}
        joint = frozenset(
            link
            for name in during - after
            if self.nodes[name].joins_belief(graph.below(self.nodes[name]))
            for link in graph.below(self.nodes[name])
        )
        self.links = {
            name: _neighbours(graph, node, spec)._replace(joint=joint, online=name not in after, smooth=smooth)
            for name, node in self.nodes.items()
        }
        self.depends_on_time = any(node.depends_on_time(self.links[name]) for name, node in self.nodes.items())
        self.bound = {name: node.bind(self.links[name], spec) for name, node in self.nodes.items()}
        order = graph.topological_order
        self.on_start = _laid_out(schedule.on_start, order, spec)
        self.acts = _laid_out(schedule.acts, order, spec)
        self.on_end = _laid_out(schedule.on_end, order, spec)
        self.counted_once = frozenset(after)
        """Nodes that stay the same during a pass, and whose energy counts once in it."""
        self.dependencies = _dependencies(graph)
        self.zeros = spec.zeros()
        given = [each for name in self.observers if (each := self.nodes[name].sampling_interval) is not None]
        ones = torch.ones_like(self.zeros)
        self.interval = torch.stack([spec.expand(each, 0) for each in given]).amin(0) if given else ones
        self.shortest_dt = min((float(each.min()) for each in given), default=1.0)
        """The shortest sampling interval as it was given, before rounding to the run's dtype."""
        no = torch.zeros_like(self.zeros, dtype=torch.bool)
        nodes = {name: node.init(self.bound[name], spec) for name, node in self.nodes.items()}
        self.initial = GraphState(nodes, -self.interval.double(), self.interval, no, ~no, *[self.zeros] * 5)

    def due(self, tick: int) -> tuple[bool | Tensor, ...]:
        """For each of `acts`, whether it is due at a tick."""
        return tuple(act.due(tick) for act in self.acts)

    def period(self, name: str, action: Action) -> Tensor:
        """Number of ticks from one time that a node takes an action to the next, (B,); 1 if it never does."""
        for act in self.acts:
            if act.action == action and name in act.names:
                period = act.periods[0] if act.by_element is None else act.by_element
                return torch.ones_like(self.zeros) * period
        return torch.ones_like(self.zeros)


def _neighbours(graph: Graph, node: AnyNode, spec: BatchSpec) -> Neighbours:
    links = graph.neighbours(node)
    links = links._replace(relayed=_relayed(graph, node))
    below: tuple[AnyLink, ...] = links.below_of(Predicts)
    noise = {link: link.child.noise_spec(graph.above(link.child), spec) for link in below}
    return links._replace(noise=noise)


def _relayed(graph: Graph, node: AnyNode) -> dict[AnyLink, AnyLink]:
    """The links above causes in the belief of a node, and the link of its own by which their messages come."""
    found: dict[AnyLink, AnyLink] = {}
    for link in graph.above(node) if node.joins_causes else ():
        if link.parent.joins_child:
            found |= dict.fromkeys((*graph.above(link.parent), *_relayed(graph, link.parent)), link)
    return found


def _laid_out(acts: Iterable[Act], nodes: Mapping[str, AnyNode], spec: BatchSpec) -> tuple[ScheduledAction, ...]:
    found = []
    for act in acts:
        every = act.clock.every
        periods = tuple(sorted({int(period) for period in every.reshape(-1)}))
        by_element = spec.expand(every, 0).to(torch.int64) if len(periods) > 1 else None
        found.append(ScheduledAction(act.action, tuple(act.names(nodes)), act.repeats, periods, by_element))
    return tuple(found)


def _dependencies(graph: Graph) -> dict[str, Dependencies]:
    """A prediction depends on its sender and all above it; an error on its sender, all above it, and all below it."""
    order = list(graph.topological_order)
    down: dict[AnyLink, frozenset[str]] = {}
    up: dict[AnyLink, frozenset[str]] = {}
    for name in order:
        node = graph[name]
        sources = frozenset({name}).union(*(down[link] for link in graph.above(node)))
        down |= dict.fromkeys(graph.below(node), sources)
    for name in reversed(order):
        node = graph[name]
        above, below = graph.above(node), graph.below(node)
        sources = frozenset({name}).union(*(down[link] for link in above), *(up[link] for link in below))
        up |= dict.fromkeys(above, sources)
    return {
        name: Dependencies(
            tuple(link for link, sources in down.items() if name in sources),
            tuple(link for link, sources in up.items() if name in sources),
        )
        for name in order
    }
