"""The scalar values of a recorded tick while its operations are lowered: the memory that rules read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pcnet.engine.compiled.trace import Operation, Ref, Trace
from pcnet.engine.compiled.values import BOOL, DOUBLE, SINGLE, Values

Ids = NDArray[np.int64]
Rule = Callable[["Lowering", Operation], None]


def kind_of(dtype: torch.dtype) -> str:
    return {torch.bool: BOOL, torch.float32: SINGLE}.get(dtype, DOUBLE)


def base_name(name: str) -> str:
    """The name of an operation without overload, and without the mark of one that works in place."""
    base = name.partition(".")[0]
    return base.rstrip("_") if not base.startswith("__") else base


def refs_of(operation: Operation) -> list[Ref]:
    """The tensors that an operation reads; what it overwrites is not read."""
    found: list[Ref] = []
    waiting: list[Any] = [*operation.args, *(value for name, value in operation.kwargs.items() if name != "out")]
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, Ref):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            waiting = [*item, *waiting]
    base = base_name(operation.name)
    if base != operation.name.partition(".")[0] and base in ("copy", "fill", "zero"):
        return found[1:]
    return found


class RuleTable(dict[str, Rule]):
    """Rules by the name of their operation, without overload."""

    def add(self, *names: str) -> Callable[[Rule], Rule]:
        """A decorator that adds a rule under some names."""

        def keep(function: Rule) -> Rule:
            self.update(dict.fromkeys(names, function))
            return function

        return keep


class Lowering:
    """The memory of a trace, with a value number for each element."""

    def __init__(
        self,
        trace: Trace,
        values: Values,
        inputs: Mapping[str, Sequence[int]] | None = None,
        memory: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """inputs: the value numbers of each input by name. memory: those of storages that are known otherwise."""
        self.trace, self.values = trace, values
        self._inputs = inputs or {}
        self._memory = {place: np.array(ids, dtype=np.int64) for place, ids in (memory or {}).items()}

    def _storage(self, place: int) -> Ids:
        found = self._memory.get(place)
        if found is None:
            storage = self.trace.storages[place]
            found = self._memory[place] = np.zeros(storage.size, dtype=np.int64)
            if storage.values is not None:
                kind = kind_of(storage.dtype)
                found[:] = [self.values.constant(value, kind) for value in storage.values.tolist()]
            if storage.source == "input":
                ref = self.trace.inputs[storage.name]
                self.write(ref, np.array(self._inputs[storage.name], dtype=np.int64).reshape(ref.shape))
        return found

    def _view(self, ref: Ref) -> Ids:
        memory = self._storage(ref.storage)
        if not ref.size:
            return np.zeros(ref.shape, dtype=np.int64)
        return np.ndarray(ref.shape, np.int64, memory.data, 8 * ref.offset, [8 * stride for stride in ref.strides])

    def read(self, ref: Ref) -> Ids:
        return self._view(ref).copy()

    def write(self, ref: Ref, ids: Ids | int) -> None:
        self._view(ref)[...] = ids

    def given(self, value: Any, kind: str) -> Ids:
        """An argument as value numbers of a kind."""
        if isinstance(value, Ref):
            return self.cast(self.read(value), kind)
        return np.array(self.values.constant(value, kind), dtype=np.int64)

    def cast(self, ids: Ids, kind: str) -> Ids:
        if all(self.values.kinds[i] == kind for i in ids.flat):
            return ids
        return self.each(lambda i: self.values.cast(i, kind), ids)

    def each(self, function: Callable[..., int], *arrays: Ids) -> Ids:
        """A function of value numbers, element by element."""
        if any(array.size == 0 for array in arrays):
            return np.zeros(np.broadcast_shapes(*(array.shape for array in arrays)), dtype=np.int64)
        with np.errstate(all="ignore"):  # constants may be folded to infinity or NaN, as torch computes them
            made = np.frompyfunc(function, len(arrays), 1)(*(array.astype(object) for array in arrays))
        return np.asarray(made).astype(np.int64)

    def full(self, shape: Sequence[int], value: float, kind: str) -> Ids:
        return np.full(tuple(shape), self.values.constant(value, kind), dtype=np.int64)

    def guard(self, condition: int) -> None:
        self.values.guards.append(condition)
