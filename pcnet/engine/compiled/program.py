"""A tick of one batch element as a recorded program: the layout of its memory, and its lowering to scalar values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcnet.engine.compiled.lowering import kind_of
from pcnet.engine.compiled.scalar_code import ScalarTick
from pcnet.engine.compiled.scalar_rules import lower
from pcnet.engine.compiled.trace import Trace, UntraceableError, record
from pcnet.engine.compiled.values import Values
from pcnet.engine.divergence import sum_energies
from pcnet.engine.program import Program
from pcnet.engine.recording import columns
from pcnet.engine.tick import Inputs, NumericalError, Workspace, tick
from pcnet.model.context import Now
from pcnet.numerics.branching import branch_outcomes, holds
from pcnet.results.recorder import Record

Array = NDArray[np.float64]
LARGEST = 1e30
"""A tick that makes a larger number is left to the eager engine, which finds out what has diverged."""


class TickKind(NamedTuple):
    """What is known of a tick before it is run.

    due: for each act of the schedule, whether it is due; None if only for some batch elements. regular: whether it
    comes one sampling interval after the one before. first: whether it is the first.
    """

    due: tuple[bool | None, ...]
    regular: bool
    first: bool


class Slot(NamedTuple):
    """Where a tensor of one batch element is in memory: elements start … start + size."""

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + self.size)


def slots(tensors: Mapping[str, Tensor]) -> list[Slot]:
    """Slots for one batch element of tensors (B, ...), one after the other."""
    found, start = [], 0
    for name, tensor in tensors.items():
        slot = Slot(name, start, tuple(tensor.shape[1:]), tensor.dtype)
        found.append(slot)
        start += slot.size
    return found


class Layout:
    """The memory of a tick: the state, what is given at each tick, settings that differ over the batch, the record."""

    def __init__(self, program: Program, settings: Mapping[str, Tensor]) -> None:
        """settings: constants of the nodes that differ over the batch, (B, ...)."""
        self.state = slots(program.initial.tensors())
        zeros = program.zeros
        given = {name: zeros.new_empty(1, program.nodes[name].observation_size) for name in program.observers}
        given["/dt"] = zeros.new_empty(1)
        masks = [i for i, act in enumerate(program.acts) if act.by_element is not None]
        self.given = slots(given | {f"/due {i}": zeros.new_empty(1, dtype=torch.bool) for i in masks})
        self.settings = slots(settings)
        self.record: list[Slot] = []
        """Known after the first recording."""

    def starts(self, record: Sequence[Slot]) -> dict[str, dict[str, int]]:
        """The first place of each tensor, by part and name."""
        parts = {"state": self.state, "given": self.given, "settings": self.settings, "record": record}
        return {name: {slot.name: slot.start for slot in part} for name, part in parts.items()}

    @staticmethod
    def size(part: Sequence[Slot]) -> int:
        return part[-1].start + part[-1].size if part else 0

    @cached_property
    def given_at(self) -> dict[str, slice]:
        return {slot.name: slot.places for slot in self.given}


def pack(part: Sequence[Slot], tensors: Mapping[str, Tensor]) -> Array:
    """Tensors (B, ...) as memory (B, size)."""
    batch = len(next(iter(tensors.values())))
    made = np.empty((batch, Layout.size(part)))
    for slot in part:
        made[:, slot.places] = tensors[slot.name].detach().cpu().reshape(batch, -1).to(torch.float64).numpy()
    return made


def unpack(part: Sequence[Slot], memory: Array) -> dict[str, Tensor]:
    """Memory (B, size) as tensors (B, ...), with memory of their own."""
    whole = torch.from_numpy(memory.copy())
    return {
        slot.name: whole[:, slot.places].to(slot.dtype).reshape(len(memory), *slot.shape).contiguous() for slot in part
    }


class ElementProgram:
    """The program of one batch element, and those of its constants that differ over the batch."""

    def __init__(self, program: Program, element: int) -> None:
        with torch.inference_mode(False):
            one = program.spec.batch == 1
            self.program = program if one else Program(program.model, program.spec.of_element(element))

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        return _constants(self.program)


def varying_settings(program: Program) -> dict[str, Tensor]:
    """The constants of the nodes that differ over the batch, (B, ...), by their path.

    Raises:
        UntraceableError: If batch elements differ in more than numbers.
    """
    if program.spec.batch == 1:
        return {}
    whole, one = _constants(program), ElementProgram(program, 0).leaves
    if whole.keys() != one.keys():
        raise UntraceableError(f"batch elements differ in form: {min(whole.keys() ^ one.keys())}")
    found = {}
    batch = program.spec.batch
    for path, value in whole.items():
        single = one[path]
        if value.shape == single.shape and torch.equal(value, single):
            continue
        if value.shape != (batch, *single.shape[1:]) or single.shape[:1] != (1,):
            raise UntraceableError(f"a constant that depends on the batch: {path}")
        if not bool(((value == value[:1]) | (value.isnan() & value[:1].isnan())).all()):
            found[path] = value
    return found


def _constants(program: Program) -> dict[str, Tensor]:
    """All tensors that a program was bound to, by path."""
    noises = {name: links.noise for name, links in program.links.items()}
    return dict(_tensors((program.interval, program.bound, noises), ""))


def _tensors(part: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """All tensors within an object, with their paths."""
    seen = set() if seen is None else seen
    if isinstance(part, Tensor):
        yield path, part
        return
    if isinstance(part, (str, int, float, bool, type(None), type, slice, torch.dtype, torch.nn.Module)):
        return
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Mapping):
        items: Any = ((str(i), value) for i, value in enumerate(part.values()))
    elif isinstance(part, tuple) and hasattr(part, "_fields"):
        items = zip(part._fields, part, strict=True)
    elif isinstance(part, (tuple, list)):
        items = ((str(i), value) for i, value in enumerate(part))
    elif dataclasses.is_dataclass(part):
        items = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
    else:
        items = vars(part).items() if hasattr(part, "__dict__") and not callable(part) else ()
    for name, value in items:
        yield from _tensors(value, f"{path}/{name}", seen)


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
        with torch.inference_mode(False), torch.no_grad(), branch_outcomes() as outcomes:
            self._run()
        return tuple(outcomes)

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


class DivergesError(UntraceableError):
    """A tick diverges, which is for the eager engine to handle."""


def lowered(recording: Recording, layout: Layout) -> ScalarTick:
    """The scalar values of a recorded tick."""
    trace, values = recording.trace, Values()
    inputs: dict[str, list[int]] = {}
    for base, part in (("state", layout.state), ("given", layout.given), ("settings", layout.settings)):
        for slot in part:
            kind = kind_of(slot.dtype)
            inputs[f"{base}/{slot.name}"] = [
                values.new(kind, "input", base, place) for place in range(slot.start, slot.start + slot.size)
            ]
    outputs = lower(trace, inputs, values)
    new: list[int] = []
    for slot in layout.state:
        ids, result = outputs[f"state/{slot.name}"], trace.results[f"state/{slot.name}"]
        new += map(int, ids.flat)
        if slot.dtype.is_floating_point:
            for i, finite in zip(ids.flat, torch.isfinite(result).flatten().tolist(), strict=True):
                if finite and values.operations[int(i)][0] not in ("input", "constant"):
                    size = values.function("abs", int(i))
                    values.guards.append(values.compare("lt", size, values.constant(LARGEST, values.kinds[int(i)])))
    rows = [int(i) for slot in recording.record for i in outputs[f"record/{slot.name}"].flat]
    guards = [guard for guard in dict.fromkeys(values.guards) if values.known(guard) is not True]
    if any(values.known(guard) is False for guard in guards):
        raise UntraceableError("a condition that never holds")
    return ScalarTick(values, new, rows, guards)
