"""A tick of one batch element: tried, recorded, and lowered to scalar values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.engine.compiled.element import ElementProgram
from pcnet.engine.compiled.errors import DivergesError, UntraceableError
from pcnet.engine.compiled.layout import Layout, Slot, TickKind, slots
from pcnet.engine.compiled.lowering import kind_of
from pcnet.engine.compiled.native import processor
from pcnet.engine.compiled.scalar_code import ScalarTick
from pcnet.engine.compiled.scalar_rules import lower
from pcnet.engine.compiled.trace import Trace, record
from pcnet.engine.compiled.values import DOUBLE, Values
from pcnet.engine.divergence import sum_energies
from pcnet.engine.recording import columns
from pcnet.engine.tick import Inputs, NumericalError, Workspace, tick
from pcnet.model.context import Now
from pcnet.numerics.branching import branch_outcomes, holds
from pcnet.results.recorder import Record

LARGEST = 1e30
"""A tick that makes a larger number is left to the eager engine, which finds out what has diverged."""
LASTING = frozenset({"add", "sub", "mul", "fma", "fnma", "neg", "abs", "sqrt"})
"""Operations whose result is not finite if one of their arguments is not."""
CHAINS = 8
"""Sums that are formed side by side, because each addition waits for the one before."""


class Recording(NamedTuple):
    """A recorded tick: its trace, and the slots of what it records."""

    trace: Trace
    record: list[Slot]


class ElementTick:
    """One tick of one batch element, to be tried and then recorded.

    Args:
        one: The program of that element.
        layout: The layout of the run.
        kind: The kind of tick.
        wanted: What is recorded.
        state: All tensors of the state before, (1, ...), by path.
        given: What is given at this tick, (1, ...), by name.
    """

    def __init__(
        self,
        one: ElementProgram,
        layout: Layout,
        kind: TickKind,
        wanted: Record,
        state: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
    ) -> None:
        self.one, self.layout, self.kind, self.wanted = one, layout, kind, wanted
        with torch.inference_mode(False):  # torch does not show all operations on tensors of inference mode
            self.state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
            self.given = {name: value.clone(memory_format=torch.contiguous_format) for name, value in given.items()}

    def outcomes(self) -> tuple[bool, ...]:
        """How the branches on values go; `DivergesError` if the tick diverges."""
        return self.tried()[0]

    def tried(self) -> tuple[tuple[bool, ...], dict[str, Tensor]]:
        """How the branches on values go, and what it leads to: the new state and the record, by name."""
        with torch.inference_mode(False), torch.no_grad(), branch_outcomes() as outcomes:
            found = self._run()
        return tuple(outcomes), found

    def record(self) -> Recording:
        """Record it; `UntraceableError` if it cannot be compiled."""
        inputs = {f"state/{name}": value for name, value in self.state.items()}
        inputs |= {f"given/{name}": value for name, value in self.given.items()}
        inputs |= {f"settings/{slot.name}": self.one.leaves[slot.name] for slot in self.layout.settings}
        trace = record(self._run, inputs)
        found = {name.removeprefix("record/"): v for name, v in trace.results.items() if name.startswith("record/")}
        return Recording(trace, slots(found))

    def _run(self) -> dict[str, Tensor]:
        program, kind, given = self.one.program, self.kind, self.given
        before = program.initial.with_tensors(self.state)
        dt = program.interval if kind.regular else given["/dt"].to(program.zeros.dtype)
        relative = None if kind.regular else dt / program.interval
        due = tuple(given[f"/due {i}"] if each is None else each for i, each in enumerate(kind.due))
        observations = {name: given[name] for name in program.observers}
        inputs = Inputs(observations, dt, relative, due, kind.first)
        space = Workspace(program, before)
        try:
            after, outputs = tick(program, before, inputs, space)
        except NumericalError as error:
            raise DivergesError(error.why) from None
        if outputs.failures:
            raise DivergesError("the tick diverges")
        if not holds(torch.isfinite(after.complexity - after.accuracy).all()):
            raise DivergesError("the free energy is not finite")
        new = sum_energies(after, None, None)
        space.load(new.nodes, Now(new.time, dt, relative))
        found = {f"state/{name}": value for name, value in new.tensors().items()}
        for name, column in columns(program, space, self.wanted, lambda: (new, outputs)).items():
            value = column.read()
            found[f"record/{name}"] = value if column.transform is None else column.transform(value)
        return found


def lowered(recording: Recording, layout: Layout) -> ScalarTick:
    """The scalar values of a recorded tick."""
    trace, values = recording.trace, Values(processor().fused)
    inputs: dict[str, list[int]] = {}
    for base, part in (("state", layout.state), ("given", layout.given), ("settings", layout.settings)):
        for slot in part:
            kind = kind_of(slot.dtype)
            inputs[f"{base}/{slot.name}"] = [
                values.new(kind, "input", base, place) for place in range(slot.start, slot.start + slot.size)
            ]
    outputs = lower(trace, inputs, values)
    new: list[int] = []
    stored: dict[int, None] = {}
    for slot in layout.state:
        ids, result = outputs[f"state/{slot.name}"], trace.results[f"state/{slot.name}"]
        new += map(int, ids.flat)
        if slot.dtype.is_floating_point:
            for i, finite in zip(ids.flat, torch.isfinite(result).flatten().tolist(), strict=True):
                if finite and values.operations[int(i)][0] not in ("input", "constant"):
                    stored[int(i)] = None
    rows = [int(i) for slot in recording.record for i in outputs[f"record/{slot.name}"].flat]
    values.guards += _small(values, stored)
    guards = [guard for guard in dict.fromkeys(values.guards) if values.known(guard) is not True]
    if any(values.known(guard) is False for guard in guards):
        raise UntraceableError("a condition that never holds")
    return ScalarTick(values, new, rows, guards)


def _small(values: Values, stored: Collection[int]) -> Iterator[int]:
    """Conditions that these numbers are finite and not too large: one for all doubles, by the sum of their squares."""
    sums: dict[str, list[int]] = {}
    shown: set[int] = set()  # numbers that others would show not to be finite
    for i in sorted(values.needed(stored), reverse=True):
        if (i in stored or i in shown) and values.operations[i][0] in LASTING:
            shown.update(values.arguments(i))
    for place, i in enumerate(i for i in stored if i not in shown):
        kind = values.kinds[i]
        zero = values.constant(0.0, kind)
        some, here = sums.setdefault(kind, [zero] * CHAINS), place % CHAINS
        if kind == DOUBLE:
            some[here] = values.multiply_add(i, i, some[here])
        else:
            some[here] = values.add(values.function("abs", i), some[here])
    for kind, some in sums.items():
        limit = LARGEST**2 if kind == DOUBLE else LARGEST
        yield values.compare("lt", values.sum(some, kind), values.constant(limit, kind))
