"""Which numbers of a recorded tick are zero whatever its inputs are, so that products can leave them out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pcnet.engine.compiled.errors import UntraceableError
from pcnet.engine.compiled.lowering import Lowering, base_name, kind_of, refs_of
from pcnet.engine.compiled.scalar_rules import RULES
from pcnet.engine.compiled.trace import Operation, Ref, Trace
from pcnet.engine.compiled.values import Values
from pcnet.numerics.branching import EagerOnlyError

Mask = NDArray[np.bool_]
PRODUCTS = frozenset(("bmm", "mm", "baddbmm", "addmm"))
MOST = 4096
"""Numbers of an operation up to which its zeros are looked for, because each of them is followed alone."""


class KnownZeros:
    """Follows zeros through the operations of a tick, which are given one after the other."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._masks: dict[int, Mask] = {}  # what may be other than zero, by storage

    def follow(self, operation: Operation) -> None:
        """Take in what an operation does."""
        if operation.name == "guard":
            return
        made = self._product(operation) if base_name(operation.name) in PRODUCTS else self._by_rule(operation)
        for number, out in enumerate(operation.outputs):
            self._view(out)[...] = True if made is None or number else made

    def inner_indices(self, product: Operation) -> list[int]:
        """The k of a matrix product A B for which some A_ik B_kj may be other than zero."""
        a, b = (self._view(ref) for ref in product.args[-2:])
        some = a.any(tuple(range(a.ndim - 1))) & b.any((*range(b.ndim - 2), b.ndim - 1))
        return [int(k) for k in np.flatnonzero(some)]

    def _view(self, ref: Ref) -> Mask:
        mask = self._masks.get(ref.storage)
        if mask is None:
            storage = self._trace.storages[ref.storage]
            mask = np.ones(storage.size, dtype=bool)
            if storage.source == "constant" and storage.values is not None:
                mask[:] = (storage.values != 0).reshape(-1).numpy()
            self._masks[ref.storage] = mask
        if not ref.size:
            return np.ones(ref.shape, dtype=bool)
        return np.ndarray(ref.shape, np.bool_, mask.data, ref.offset, ref.strides)

    def _product(self, operation: Operation) -> Mask:
        a, b = (self._view(ref).astype(np.float32) for ref in operation.args[-2:])
        made: Mask = a @ b > 0
        if base_name(operation.name) in ("baddbmm", "addmm"):
            made = made | self._view(operation.args[0])
        return made

    def _by_rule(self, operation: Operation) -> Mask | None:
        """What may be other than zero in the first output, as the rule of the operation says; None for all of it."""
        refs, rule = refs_of(operation), RULES.get(base_name(operation.name))
        storages = dict.fromkeys(ref.storage for ref in (*refs, *operation.outputs))
        size = sum(self._trace.storages[storage].size for storage in storages)
        if rule is None or size > MOST or all(self._view(ref).all() for ref in refs):
            return None
        values = Values()
        low = Lowering(self._trace, values, memory={each: self._numbers(each, values) for each in storages})
        try:
            rule(low, operation)
        except (UntraceableError, EagerOnlyError):
            return None
        numbers = low.read(operation.outputs[0])
        some = [values.known(int(i)) != 0 for i in numbers.flat]
        return np.array(some, dtype=np.bool_).reshape(numbers.shape)

    def _numbers(self, place: int, values: Values) -> list[int]:
        """A storage as numbers of which only zeros and indices are known."""
        storage = self._trace.storages[place]
        kind = kind_of(storage.dtype)
        if storage.source == "constant" and not storage.dtype.is_floating_point:
            assert storage.values is not None
            return [values.constant(value, kind) for value in storage.values.tolist()]
        whole = Ref(place, 0, (storage.size,), (1,), storage.dtype)
        zero = values.constant(0.0, kind)
        return [
            values.new(kind, "input", place, at) if some else zero for at, some in enumerate(self._view(whole).tolist())
        ]
