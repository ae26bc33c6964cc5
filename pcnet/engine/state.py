"""The course of a run: all that changes from one observation to the next, to be kept, restored or taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.engine.clock import Clock
from pcnet.engine.divergence import Beliefs, DivergenceEvent, Failures
from pcnet.model.node import NodeContext

NUMBERS = ("accuracy", "complexity", "sum_accuracy", "sum_complexity")
"""What is known of the free energy, now and in all; (B,) each."""


class Mark(NamedTuple):
    """How things were: what to go back to."""

    tick: int
    beliefs: Beliefs
    observations: list[Tensor | None]
    clock: tuple[Any, ...]
    failures: tuple[Any, ...]
    unopened: Tensor | None
    numbers: list[Tensor]


class Course:
    """Where a run is: beliefs, memories and observations of its nodes, its clock, and what went wrong on the way."""

    def __init__(self, locals_: Mapping[str, NodeContext], failures: Failures) -> None:
        self.tick = 0
        """How many observations have been taken in."""
        self.failures = failures
        self.clock: Clock
        self.unopened: Tensor | None = None
        """The batch elements of which nothing was seen yet, (B,)."""
        self.accuracy: Tensor
        self.complexity: Tensor
        self.sum_accuracy: Tensor
        self.sum_complexity: Tensor
        self._locals = locals_

    def begin(self, clock: Clock, nothing: Tensor) -> None:
        """Before the first observation; nothing: zeros (B,)."""
        self.clock = clock
        self.unopened = torch.ones_like(nothing, dtype=torch.bool)
        self.accuracy = self.complexity = self.sum_accuracy = self.sum_complexity = nothing

    # --- taking back -------------------------------------------------------------------------------------------------
    def mark(self) -> Mark:
        return Mark(
            self.tick,
            self.failures.beliefs(),
            [local.observation for local in self._locals.values()],
            self.clock.mark(),
            self.failures.mark(),
            self.unopened,
            [getattr(self, name) for name in NUMBERS],
        )

    def go_back(self, mark: Mark) -> None:
        """Let everything be as it was: an observation is taken in whole or not at all."""
        self.tick, self.unopened = mark.tick, mark.unopened
        parts = zip(self._locals.values(), mark.beliefs, mark.observations, strict=True)
        for local, (belief, memory), observation in parts:
            local.mask = local.trouble = None
            local.belief, local.memory, local.observation = belief, memory, observation
        self.clock.go_back(mark.clock)
        self.failures.go_back(mark.failures)
        for name, value in zip(NUMBERS, mark.numbers, strict=True):
            setattr(self, name, value)

    # --- keeping -----------------------------------------------------------------------------------------------------
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and facts fit for JSON."""
        failures, clock = self.failures, self.clock
        tensors: dict[str, Tensor] = {name.replace("_", " of "): getattr(self, name) for name in NUMBERS}
        tensors |= {"missed": failures.missed, "now": clock.now, "elapsed": clock.elapsed}
        masks = {"going": failures.going, "unopened": self.unopened}
        tensors |= {name: mask for name, mask in masks.items() if mask is not None}
        for name, local in self._locals.items():
            if local.observation is not None:
                tensors[f"{name}/observation"] = local.observation
            for part, value in (("belief", local.belief), ("memory", local.memory)):
                if value is not None:
                    tensors |= {f"{name}/{part}/{field}": each for field, each in value._asdict().items()}
        facts = {
            "tick": self.tick,
            "time": clock.time,
            "timed": clock.timed,
            "irregular": clock.pace is not None,
            "stopped": [[i, tick, name] for i, (tick, name) in failures.stopped.items()],
            "incidents": [list(incident) for incident in failures.divergence_events],
        }
        return tensors, facts

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a `state`, once begun. A part that the nodes do not have, or lack, is a KeyError."""
        left = dict(tensors)
        for name, local in self._locals.items():
            left.pop(f"{name}/observation", None)
            for part in ("belief", "memory"):
                value = getattr(local, part)
                if value is None:
                    continue
                found = {field: left.pop(f"{name}/{part}/{field}") for field in value._fields}
                for field, each in found.items():
                    if each.dim() != getattr(value, field).dim():
                        raise KeyError(f"{name}/{part}/{field}")
                setattr(local, part, type(value)(**found))
        for name in NUMBERS:
            setattr(self, name, left.pop(name.replace("_", " of ")))
        failures, clock = self.failures, self.clock
        failures.missed, clock.now = left.pop("missed"), left.pop("now")
        failures.going, self.unopened = left.pop("going", None), left.pop("unopened", None)
        self.tick, clock.time, clock.timed = facts["tick"], facts["time"], facts["timed"]
        elapsed = left.pop("elapsed")
        clock.wait(elapsed if facts["irregular"] else None)
        failures.stopped = {i: (tick, name) for i, tick, name in facts["stopped"]}
        failures.divergence_events.extend(DivergenceEvent(*incident) for incident in facts["incidents"])
        if left:
            raise KeyError(min(left))
