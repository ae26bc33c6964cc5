"""One tick: a pure function from the state of a graph and an observation to the next state.

`tick(program, state, inputs)` starts from `state`, lets nodes take the actions that are due, and returns the new state
with the energies. Nothing else changes: the state that was passed in stays as it is, so that rolling back means keeping
it. Messages between nodes are computed when a rule asks for them and kept in a `Workspace` until a state that they
depend on changes. A workspace may be reused from tick to tick; that saves work and changes no result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.engine.program import Program, ScheduledAction
from pcnet.engine.state import GraphState, NodeStates
from pcnet.model.context import NodeContext, Now
from pcnet.model.links import AnyLink
from pcnet.model.node import AnyNode, Energy
from pcnet.numerics.branching import holds
from pcnet.numerics.trees import select


class NumericalError(Exception):
    """A matrix of a node cannot be inverted or factorised, for batch elements that are not known."""

    def __init__(self, node: AnyNode, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


class Failure(NamedTuple):
    """Batch elements (B,) that a node cannot continue with, and why."""

    node: AnyNode
    where: Tensor
    why: str


class Inputs(NamedTuple):
    """What a tick is given.

    observations: (B, observation_size) for each observing node, NaN where it is missing. dt, relative_dt: see
    `pcnet.model.context.Now`. due: for each of the program's acts, whether it is due, for all or some (B,). first:
    whether this is the first tick.
    """

    observations: Mapping[str, Tensor]
    dt: Tensor
    relative_dt: Tensor | None
    due: tuple[bool | Tensor, ...]
    first: bool


class Outputs(NamedTuple):
    """What a tick yields beside the state: energies by node, and failures."""

    energies: Mapping[str, Energy]
    failures: tuple[Failure, ...] = ()


class Workspace:
    """The contexts of all nodes, and the messages between them as long as they are valid."""

    def __init__(self, program: Program, state: GraphState) -> None:
        self.program = program
        self.now = Now(state.time, state.dt, None)
        self.contexts: dict[str, NodeContext[Any, Any]] = {
            name: NodeContext(name, program.links[name], program.bound[name], state.nodes[name], self)
            for name in program.nodes
        }
        self.failures: list[Failure] = []
        self.all_started: Tensor | None = None
        """The mask that was last found to hold for all batch elements."""
        self._mask: Tensor | None = None
        self._predictions: dict[AnyLink, Any] = {}
        self._errors: dict[AnyLink, Any] = {}
        fields = {name: getattr(state.nodes[name], "_fields", ()) for name in program.nodes}
        self._public = {
            name: [i for i, field in enumerate(fields[name]) if field not in node.private_fields]
            for name, node in program.nodes.items()
        }

    def message(self, link: AnyLink) -> Any:
        found = self._predictions.get(link)
        if found is None:
            found = self._predictions[link] = link.parent.prediction(self.contexts[link.parent.name], link)
        return found

    def error(self, link: AnyLink) -> Any:
        found = self._errors.get(link)
        if found is None:
            found = self._errors[link] = link.child.error(self.contexts[link.child.name], link)
        return found

    def adopt(self, name: str, state: Any) -> None:
        """Replace the state of a node, for the batch elements that act, and drop messages that depend on it."""
        context = self.contexts[name]
        old = context.state
        if self._mask is not None:
            state = select(self._mask, state, old)
        context.state = state
        if state is not old and any(state[i] is not old[i] for i in self._public[name]):
            dependent = self.program.dependencies[name]
            for link in dependent.predictions:
                self._predictions.pop(link, None)
            for link in dependent.errors:
                self._errors.pop(link, None)

    def mark_diverged(self, name: str, where: Tensor, why: str) -> None:
        where = where if self._mask is None else where & self._mask
        if holds(where.any()):
            self.failures.append(Failure(self.program.nodes[name], where, why))

    def load(self, nodes: NodeStates, now: Now, observations: Mapping[str, Tensor] | None = None) -> None:
        """Set states, time and observations; messages that are still valid are kept."""
        self._mask = None
        self.now = now
        self.failures.clear()
        for name, state in nodes.items():
            if state is not self.contexts[name].state:
                self.adopt(name, state)
        for name, value in (observations or {}).items():
            self.contexts[name].observation = value

    @property
    def nodes(self) -> NodeStates:
        return {name: context.state for name, context in self.contexts.items()}

    def take(self, action: str, names: Iterable[str], mask: Tensor | None = None, repeats: int = 1) -> None:
        """Let nodes take an action, for the batch elements of a mask (B,)."""
        for _ in range(repeats):
            for name in names:
                node = self.program.nodes[name]
                self._mask = mask
                try:
                    self.adopt(name, getattr(node, action)(self.contexts[name]))
                except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                    raise NumericalError(node, str(error)) from None
                finally:
                    self._mask = None

    def take_all(self, acts: Iterable[ScheduledAction], mask: Tensor | None = None) -> None:
        for act in acts:
            self.take(act.action, act.names, mask, act.repeats)


def tick(
    program: Program, state: GraphState, inputs: Inputs, workspace: Workspace | None = None
) -> tuple[GraphState, Outputs]:
    """Take in one observation: the state after it, with energies and failures, from the state before.

    workspace: reused to save work; a new one unless given. Divergence is dealt with by `pcnet.engine.divergence`; a
    `NumericalError` means that some matrix cannot be factorised.
    """
    space = Workspace(program, state) if workspace is None else workspace
    time = inputs.dt + state.time
    space.load(state.nodes, Now(time, inputs.dt, inputs.relative_dt), inputs.observations)
    started = _start(space, state.started, inputs)
    for act, due in zip(program.acts, inputs.due, strict=True):
        if due is not False:
            space.take(act.action, act.names, None if due is True else due, act.repeats)
    once = () if inputs.first else program.counted_once
    energies = {
        name: Energy() if name in once else node.energy(space.contexts[name]) for name, node in program.nodes.items()
    }
    accuracy = _total(program, [energy.accuracy for energy in energies.values()])
    complexity = _total(program, [energy.complexity for energy in energies.values()])
    new = state._replace(
        nodes=space.nodes, time=time, dt=inputs.dt, started=started, accuracy=accuracy, complexity=complexity
    )
    return new, Outputs(energies, tuple(space.failures))


def _start(space: Workspace, started: Tensor, inputs: Inputs) -> Tensor:
    """Initialise batch elements of which something is observed for the first time; which have started then, (B,)."""
    if started is space.all_started or holds(started.all()):
        space.all_started = started
        return started
    program = space.program
    seen = [torch.isfinite(inputs.observations[name]).any(-1) for name in program.evidence]
    new = torch.stack(seen).any(0) & ~started
    if not holds(new.any()):
        return started
    mask = None if holds(new.all()) else new
    space.take("initialise", program.observers, mask)
    space.take_all(program.on_start, mask)
    return started | new


def _total(program: Program, parts: list[Tensor | None]) -> Tensor:
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else program.zeros
