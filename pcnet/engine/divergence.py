"""Batch elements that diverge: which, when and why, and what becomes of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from pcnet.engine.program import Program
from pcnet.engine.state import GraphState, select_nodes
from pcnet.engine.tick import Failure, Inputs, Outputs, Workspace
from pcnet.errors import DivergenceError, SettingError
from pcnet.model.context import Now
from pcnet.model.model import OnDivergence
from pcnet.model.node import AnyNode, Energy
from pcnet.numerics.trees import changes, flatten
from pcnet.results.result import Divergence

FEW = 1000  # size up to which tensors are summed up together
MAX_EVENTS = 1000


class DivergenceEvent(NamedTuple):
    """A batch element that diverged: at which observation, at which node, and why."""

    observation: int
    node: str
    element: int
    why: str


class DivergenceLog(NamedTuple):
    """What has diverged so far. It is never changed, only replaced.

    events: the last of them. stopped: by batch element, the observation and the node at which it stopped.
    """

    events: tuple[DivergenceEvent, ...] = ()
    stopped: Mapping[int, tuple[int, str]] = {}

    def with_events(self, events: list[DivergenceEvent], stop: bool) -> DivergenceLog:
        kept = tuple(deque((*self.events, *events), maxlen=MAX_EVENTS))
        stopped = {event.element: (event.observation, event.node) for event in events} if stop else {}
        return DivergenceLog(kept, {**self.stopped, **stopped})

    def summary(self, batch_shape: Sequence[int]) -> Divergence:
        """Which batch elements have stopped, when and at which node."""
        batch = math.prod(batch_shape)
        at, node = np.full(batch, -1), np.full(batch, "", dtype=object)
        for i, (when, name) in self.stopped.items():
            at[i], node[i] = when, name
        return Divergence(at.reshape(batch_shape), node.astype(str).reshape(batch_shape))


def check_policy(policy: OnDivergence, nodes: Mapping[str, AnyNode]) -> None:
    """Raise `SettingError` for an unknown policy, or one that is also the name of a node."""
    if not isinstance(policy, str) or policy not in get_args(OnDivergence):
        raise SettingError(f"on_divergence must be 'raise', 'stop', 'hold' or 'reset', not {policy!r}")
    if policy in nodes:
        raise SettingError(f"the node name {policy!r} is also a policy on divergence; rename the node")


def everything_failed(program: Program, state: GraphState, node: AnyNode, why: str) -> Outputs:
    """Outputs of a tick that ended with a numerical error: all batch elements that run have failed."""
    return Outputs(dict.fromkeys(program.nodes, Energy()), (Failure(node, state.running, why),))


def resolve(
    policy: OnDivergence,
    space: Workspace,
    before: GraphState,
    after: GraphState,
    outputs: Outputs,
    inputs: Inputs,
    tick: int,
    first: GraphState,
) -> tuple[GraphState, list[DivergenceEvent]]:
    """Apply the policy to batch elements that have diverged in a tick.

    Elements that stopped, now or earlier, keep the state before. Held elements keep it too, and their sensory nodes
    observe a missing value. Reset elements get the state at the start, `first`. The energies of the returned state are
    summed up.
    """
    program, running = space.program, before.running
    failed_by = _failures(program, before, after, outputs, policy, tick)
    all_running = bool(running.all())
    if not failed_by and all_running:
        return sum_energies(after, None, None), []
    failed = torch.zeros_like(running)
    failed[list(failed_by)] = True
    events = [DivergenceEvent(tick, node.name, i, why) for i, (node, why) in failed_by.items()]
    nodes = select_nodes(running & ~failed, after.nodes, before.nodes)
    state = after._replace(nodes=nodes, started=torch.where(failed, before.started, after.started))
    if policy == "stop":
        running = running & ~failed
        state = sum_energies(state._replace(running=running), None, running)
    else:
        if events:
            given = inputs.observations.items()
            missing = {name: torch.where(failed[:, None], torch.nan, value) for name, value in given}
            space.load(state.nodes, Now(state.time, inputs.dt, inputs.relative_dt), missing)
            if policy == "hold":
                space.take("observe", program.observers, failed)
                state = state._replace(nodes=space.nodes)
            else:
                initial = select_nodes(failed, first.nodes, state.nodes)
                state = state._replace(nodes=initial, started=state.started & ~failed)
            state = state._replace(missed=state.missed + failed)
        state = sum_energies(state, failed if events else None, None if all_running else running)
    return state, events


def _failures(
    program: Program, before: GraphState, after: GraphState, outputs: Outputs, policy: OnDivergence, tick: int
) -> dict[int, tuple[AnyNode, str]]:
    """The node and the reason for each batch element that failed; with the policy "raise", an error."""
    found: dict[int, tuple[AnyNode, str]] = {}
    running = before.running
    for failure in outputs.failures:
        indices = (failure.where & running).nonzero()[:, 0].tolist()
        if indices and policy == "raise":
            where = _elements(indices, len(running))
            raise DivergenceError(f"{failure.node.title} at observation {tick}{where}: {failure.why}")
        for i in indices:
            found.setdefault(i, (failure.node, failure.why))
    free = after.complexity - after.accuracy
    unsound = _unsound(program, before, after)
    if not found and unsound is None and math.isfinite(free.sum().item()):
        return found
    lost = ~torch.isfinite(free) & running
    if unsound is not None:
        lost = lost | (unsound & running)
    for i in lost.nonzero()[:, 0].tolist():
        found.setdefault(i, _culprit(i, program, after, outputs))
    if found and policy == "raise":
        node, why = next(iter(found.values()))
        raise DivergenceError(
            f"{node.title} is no longer finite at observation {tick}{_elements(list(found), len(running))}: {why}; "
            "use smaller steps (lower kappa or rate), lower precisions, a longer correlation time, or an initial_mean"
        )
    return found


def _unsound(program: Program, before: GraphState, state: GraphState) -> Tensor | None:
    """Batch elements (B,) with a number in a belief that is no longer finite after a tick; None for none.

    An observation that is missing adds nothing to the free energy, so that this alone would not tell.
    """
    legal = _LEGAL.get(program)
    if legal is None:
        parts = (part for name, each in program.initial.nodes.items() for part in flatten(each, name).items())
        legal = _LEGAL[program] = frozenset(path for path, part in parts if not bool(torch.isfinite(part).all()))
    floats = [
        part
        for name, each in state.nodes.items()
        for path, part in changes(each, before.nodes[name], name)
        if path not in legal and part.is_floating_point()
    ]
    numbers = [part.sum()[None] if part.numel() > FEW else part.reshape(-1) for part in floats]
    if not floats or math.isfinite(torch.cat(numbers).sum().item()):
        return None
    found = torch.zeros_like(state.running)
    for part in floats:
        found |= ~torch.isfinite(part.flatten(1) if part.dim() > 1 else part[:, None]).all(1)
    return found if bool(found.any()) else None


_LEGAL: WeakKeyDictionary[Program, frozenset[str]] = WeakKeyDictionary()
"""Tensors of a program that may hold NaN or infinity, as histories do before they are filled."""


def _culprit(i: int, program: Program, state: GraphState, outputs: Outputs) -> tuple[AnyNode, str]:
    """The first node whose belief or energy is not finite in a batch element, and which part of it."""
    nodes = program.nodes
    for name, energy in outputs.energies.items():
        parts: dict[str, Tensor | None] = {**flatten(state.nodes[name], name), "free energy": energy.free}
        for path, part in parts.items():
            was = flatten(program.initial.nodes[name], name).get(path)
            legal = was is not None and not bool(torch.isfinite(was[i]).all())  # histories start with NaN or infinity
            if part is not None and not legal and not bool(torch.isfinite(part[i]).all()):
                return nodes[name], f"its {path.rpartition('/')[2].replace('_', ' ')} is no longer finite"
    return next(iter(nodes.values())), "the sum of all free energies is not finite"


def sum_energies(state: GraphState, failed: Tensor | None, running: Tensor | None) -> GraphState:
    """Add the energies of the tick to the sums: NaN for elements that have stopped, nothing for a lost tick."""
    energies = state.accuracy, state.complexity
    if running is not None:
        energies = torch.where(running, energies[0], torch.nan), torch.where(running, energies[1], torch.nan)
    sums = state.sum_accuracy, state.sum_complexity
    if failed is None:
        sums = sums[0] + energies[0], sums[1] + energies[1]
    else:
        sums = sums[0] + torch.where(failed, 0.0, energies[0]), sums[1] + torch.where(failed, 0.0, energies[1])
        energies = torch.where(failed, torch.nan, energies[0]), torch.where(failed, torch.nan, energies[1])
    return state._replace(accuracy=energies[0], complexity=energies[1], sum_accuracy=sums[0], sum_complexity=sums[1])


def _elements(indices: list[int], batch: int) -> str:
    """Batch elements as text, if there are several."""
    if batch == 1:
        return ""
    more = ", …" if len(indices) > 8 else ""
    return f" (batch elements {', '.join(map(str, indices[:8]))}{more})"
