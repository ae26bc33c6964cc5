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
from pcnet.numerics.coloured_noise import NoiseSpec


class ScheduledAction(NamedTuple):
    """One act of a schedule, with the names of its nodes in order.

    periods: all periods that occur. by_element: the period of each batch element (B,), if they differ.
    """

    action: Action
    names: tuple[str, ...]
    repeats: int
    periods: tuple[int, ...]
    by_element: Tensor | None
    doubling: bool

    def due(self, tick: int) -> bool | Tensor:
        """Whether it is due at a tick (from 0): for all batch elements, or for which of them (B,)."""
        count = tick + 1
        early = self.doubling and count & tick == 0  # a power of two
        if self.by_element is None:
            return count % self.periods[0] == 0 or (early and count < self.periods[0])
        if not any(count % period == 0 or (early and count < period) for period in self.periods):
            return False
        mask = count % self.by_element == 0
        if early:
            mask = mask | (count < self.by_element)
        return True if bool(mask.all()) else mask


class Dependencies(NamedTuple):
    """Which messages depend on the state of a node: predictions on its links, and errors."""

    predictions: tuple[AnyLink, ...]
    errors: tuple[AnyLink, ...]


class Program:
    """A model bound to a batch, dtype and device.

    Attributes:
        model: The model.
        spec: Batch, dtype and device.
        nodes: The nodes by name, in the order in which they were added.
        links: The links of each node, with what it knows of its neighbours.
        bound: What each node's `bind` returned.
        interval: Shortest sampling interval, (B,).
        on_start: Actions at the first observation.
        acts: Actions at each observation.
        on_end: Actions after the last observation.
        dependencies: Which messages depend on each node.
        initial: The state before the first observation.
    """

    def __init__(self, model: Model, spec: BatchSpec) -> None:
        graph, schedule = model
        self.model, self.spec = model, spec
        self.nodes: Mapping[str, AnyNode] = graph.nodes
        self.observers = tuple(name for name, node in self.nodes.items() if node.observes)
        after = {name for act in schedule.on_end for name in act.names(self.nodes)}
        self.links = {name: _neighbours(graph, node, spec, name not in after) for name, node in self.nodes.items()}
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
        self.initial = self._initial()

    def _initial(self) -> GraphState:
        zeros, no = self.zeros, torch.zeros_like(self.zeros, dtype=torch.bool)
        nodes = {name: node.init(self.bound[name], self.spec) for name, node in self.nodes.items()}
        return GraphState(nodes, zeros.double(), self.interval, no, ~no, zeros, zeros, zeros, zeros, zeros)

    def due(self, tick: int) -> tuple[bool | Tensor, ...]:
        """For each of `acts`, whether it is due at a tick."""
        return tuple(act.due(tick) for act in self.acts)

    def period(self, name: str, action: Action) -> Tensor:
        """Number of ticks from one time that a node takes an action to the next, (B,); 1 if it never does."""
        for act in self.acts:
            if act.action == action and name in act.names:
                if act.by_element is None:
                    return torch.full_like(self.zeros, act.periods[0])
                return act.by_element.to(self.zeros)
        return torch.ones_like(self.zeros)


def _neighbours(graph: Graph, node: AnyNode, spec: BatchSpec, online: bool) -> Neighbours:
    links = graph.neighbours(node)
    predicted = [link for link in links.below if isinstance(link, Predicts)]
    noise: dict[AnyLink, NoiseSpec | None] = {
        link: link.child.noise_spec(graph.above(link.child), spec) for link in predicted
    }
    return links._replace(noise=noise, online=online)


def _laid_out(acts: Iterable[Act], nodes: Mapping[str, AnyNode], spec: BatchSpec) -> tuple[ScheduledAction, ...]:
    found = []
    for act in acts:
        every = act.clock.every
        periods = tuple(sorted({int(period) for period in every.reshape(-1)}))
        by_element = spec.expand(every, 0).to(torch.int64) if len(periods) > 1 else None
        doubling = act.clock.warmup == "doubling"
        names = tuple(act.names(nodes))
        found.append(ScheduledAction(act.action, names, act.repeats, periods, by_element, doubling))
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
