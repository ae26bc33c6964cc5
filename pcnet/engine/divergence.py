"""Batch elements that diverge: which, when and why, and what a run does with them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pcnet.errors import DivergenceError, SettingError
from pcnet.model.node import BatchSpec, Energy, Node, NodeContext, merge

OnDivergence = Literal["raise", "stop", "hold", "reset"]
"""What to do with batch elements that diverge: end the run, or them alone; go on as if the observation were missing, or
begin anew with the next one."""


class DivergenceEvent(NamedTuple):
    """A batch element that diverged: at which observation, at which node, and what was wrong there."""

    observation: int
    node: str
    element: int
    why: str


Beliefs = list[tuple[Any, Any]]
"""Belief and memory of each node."""


class Failures:
    """The batch elements of a run that have failed, for a tick or for good."""

    def __init__(self, nodes: Mapping[str, Node], locals_: Mapping[str, NodeContext], policy: OnDivergence) -> None:
        if policy not in get_args(OnDivergence):
            raise SettingError(f"on_divergence must be 'raise', 'stop', 'hold' or 'reset', not {policy!r}")
        if policy in nodes:
            raise SettingError(f"a node is called {policy!r}, as what is done on divergence is; rename it")
        self.policy = policy
        self.divergence_events: deque[DivergenceEvent] = deque(maxlen=1000)
        """The last of them: when, at which node, and why."""
        self.stopped: dict[int, tuple[int, str]] = {}
        """When and at which node batch elements failed for good."""
        self.going: Tensor | None = None
        """Which batch elements go on (B,), once some have stopped."""
        self.missed: Tensor
        """How many ticks each batch element lost (B,)."""
        self._nodes, self._locals = nodes, locals_
        self._now: dict[int, tuple[Node, str]] = {}  # who fails at this tick
        self._start: BatchSpec

    def begin(self, start: BatchSpec) -> None:
        self._start = start
        self.missed = torch.zeros(start.batch, dtype=start.dtype, device=start.device)

    def beliefs(self) -> Beliefs:
        """How things are, to go back to."""
        return [(local.belief, local.memory) for local in self._locals.values()]

    def mark(self) -> tuple[Any, ...]:
        """What went wrong so far, to go back to."""
        return self.going, self.missed, dict(self.stopped), self.divergence_events.copy()

    def go_back(self, mark: tuple[Any, ...]) -> None:
        self.going, self.missed, self.stopped, self.divergence_events = mark
        self._now.clear()

    def note(self, node: Node, where: Tensor | None, why: str, tick: int) -> None:
        """A node cannot go on with batch elements (B,), or with any: end the run, or remember it for the tick's end."""
        if where is None:
            where = torch.ones_like(self.missed, dtype=torch.bool) if self.going is None else self.going
        indices = where.nonzero()[:, 0].tolist()
        if self.policy == "raise":
            raise DivergenceError(f"{node.title} at observation {tick}{_elements(indices, len(where))}: {why}")
        for i in indices:
            self._now.setdefault(i, (node, why))

    def deal_with(self, energies: Sequence[Energy], free_energy: Tensor, before: Beliefs, tick: int) -> Tensor | None:
        """After a tick: end the run if need be, or do as the policy says; which go on (B,), but without this tick.

        Back where they were they are finite, so that whatever is computed of them does not spoil their neighbours.
        """
        counted = free_energy if self.going is None else free_energy[self.going]
        if not self._now and math.isfinite(counted.sum().item()):
            return None
        lost = ~torch.isfinite(free_energy)
        if self.going is not None:
            lost = lost & self.going
        for i in lost.nonzero()[:, 0].tolist():
            self._now.setdefault(i, self._culprit(i, energies))
        if not self._now:  # finite each, but not their sum over the batch
            return None
        if self.policy == "raise":
            node, why = next(iter(self._now.values()))
            raise DivergenceError(
                f"{node.title} is no longer finite at observation {tick}"
                f"{_elements(list(self._now), len(lost))}: {why}; smaller steps (lower kappa or rate), lower "
                "precisions, a longer correlation_time or an initial_mean help"
            )
        failed = self.put_down(tick)
        for local, (belief, memory) in zip(self._locals.values(), before, strict=True):
            local.belief = merge(~failed, local.belief, belief)
            local.memory = local.memory if memory is None else merge(~failed, local.memory, memory)
        if self.policy == "stop":
            return None
        self.missed = self.missed + failed
        self._go_on_without(failed)
        return failed

    def put_down(self, tick: int) -> Tensor:
        """Enter those who fail now, and let them stop if they are to; which they are, (B,)."""
        failed = torch.zeros_like(self.missed, dtype=torch.bool)
        for i, (node, why) in self._now.items():
            failed[i] = True
            self.divergence_events.append(DivergenceEvent(tick, node.name, i, why))
        if self.policy == "stop" and self._now:
            self.stopped |= {i: (tick, node.name) for i, (node, _) in self._now.items()}
            self.going = ~failed if self.going is None else self.going & ~failed
        self._now.clear()
        return failed

    def _go_on_without(self, failed: Tensor) -> None:
        """Let batch elements go on as if this observation had been missing, or begin anew."""
        reset = self.policy == "reset"
        for name, node in self._nodes.items():
            if not (reset or node.observes):
                continue
            local = self._locals[name]
            if local.observation is not None:
                local.observation = torch.where(failed[:, None], torch.nan, local.observation)
            local.mask = failed
            try:
                if reset:
                    node.begin(local, self._start)
                else:
                    node.observe(local)
            finally:
                local.mask = None

    def _culprit(self, i: int, energies: Sequence[Energy]) -> tuple[Node, str]:
        """The first node whose belief or share of the free energy is not finite in a batch element, and what of it."""
        for (name, node), energy in zip(self._nodes.items(), energies, strict=True):
            parts = self._locals[name].belief._asdict() | {"free energy": energy.free}
            for what, part in parts.items():
                if part is not None and not bool(torch.isfinite(part[i]).all()):
                    return node, f"its {what.replace('_', ' ')} is no longer finite"
        return next(iter(self._nodes.values())), "the sum of all free energies is not finite"


def _elements(indices: list[int], batch: int) -> str:
    """Which batch elements, in words, where there are several."""
    if batch == 1:
        return ""
    more = ", …" if len(indices) > 8 else ""
    return f" (batch elements {', '.join(map(str, indices[:8]))}{more})"
