"""The memory of a tick of one batch element: where each tensor is in it, and what kind of tick it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcnet.engine.program import Program

Array = NDArray[np.float64]


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

    def of_node(self, name: str) -> tuple[list[Slot], slice]:
        """The slots of the state of a node, and where they are; they follow each other."""
        part = [slot for slot in self.state if slot.name.startswith(f"{name}/")]
        return part, slice(part[0].start, part[-1].places.stop) if part else slice(0)

    @staticmethod
    def size(part: Sequence[Slot]) -> int:
        return part[-1].start + part[-1].size if part else 0

    @cached_property
    def given_at(self) -> dict[str, slice]:
        return {slot.name: slot.places for slot in self.given}


def pack(part: Sequence[Slot], tensors: Mapping[str, Tensor]) -> Array:
    """Tensors (B, ...) as memory (B, size)."""
    batch = len(next(iter(tensors.values())))
    flat = [tensors[slot.name].reshape(batch, -1) if slot.shape != () else tensors[slot.name][:, None] for slot in part]
    made = torch.cat([value if value.dtype == torch.float64 else value.double() for value in flat], 1)
    memory: Array = made.detach().cpu().numpy()
    return memory


def unpack(part: Sequence[Slot], memory: Array) -> dict[str, Tensor]:
    """Memory (B, size) as tensors (B, ...), with memory of their own."""
    whole, batch = torch.from_numpy(memory), len(memory)
    pieces: Any = torch.split_with_sizes_copy(whole, [slot.size for slot in part], 1)  # type: ignore[func-returns-value]
    made = {}
    for slot, piece in zip(part, pieces, strict=True):
        value = piece if slot.dtype == torch.float64 else piece.to(slot.dtype)
        made[slot.name] = value if len(slot.shape) == 1 else value.view(batch, *slot.shape)
    return made
