"""What each operation of torch does to scalar values: one rule an operation.

A rule reads its arguments as arrays of value numbers (see `values`), and writes the value numbers of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pcnet.engine.compiled.trace import Operation, Ref, Trace, UntraceableError
from pcnet.engine.compiled.values import BOOL, DOUBLE, FUNCTIONS, SINGLE, Values

Ids = NDArray[np.int64]
Rule = Callable[["Lowering", Operation], None]
RULES: dict[str, Rule] = {}
ELEMENTWISE = {
    "add", "sub", "rsub", "mul", "div", "clamp", "addcmul", "addcdiv", "where", "nan_to_num", "clone", "_to_copy",
    "lift_fresh_copy", "alias_copy", "convert_element_type", "copy", "fill", "zero",
}  # fmt: skip
"""Operations that do the same to each element; the rules for functions of numbers add theirs."""
PIVOT = 1e-10
"""The eager engine decides whether a matrix is positive definite if a pivot, relative to the diagonal, is less than
this."""
MAX_VALUES = 30_000
"""A tick with more values than this is not lowered to scalars."""


class TooLargeError(Exception):
    """A tick has too many scalar operations."""


def kind_of(dtype: torch.dtype) -> str:
    return {torch.bool: BOOL, torch.float32: SINGLE}.get(dtype, DOUBLE)


def base_name(name: str) -> str:
    """The name of an operation without overload, and without the mark of one that works in place."""
    base = name.partition(".")[0]
    return base.rstrip("_") if not base.startswith("__") else base


class Lowering:
    """A trace as scalar values: the memory of the trace, with a value number for each element."""

    def __init__(self, trace: Trace, inputs: dict[str, list[int]], values: Values) -> None:
        """inputs: the value numbers of each input by name."""
        self.values, self.trace = values, trace
        self._memory: list[Ids | None] = [None] * len(trace.storages)
        self._inputs = inputs
        for operation in trace.operations:
            base = base_name(operation.name)
            rule = RULES.get(base)
            if rule is None:
                raise UntraceableError(f"the operation {operation.name} has no rule")
            rule(self, operation)
            if len(values.operations) > MAX_VALUES:
                raise TooLargeError
        self.outputs = {name: self.read(ref) for name, ref in trace.outputs.items()}

    def _storage(self, place: int) -> Ids:
        found = self._memory[place]
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
        made = np.frompyfunc(function, len(arrays), 1)(*(array.astype(object) for array in arrays))
        return np.asarray(made).astype(np.int64)

    def full(self, shape: Sequence[int], value: float, kind: str) -> Ids:
        return np.full(tuple(shape), self.values.constant(value, kind), dtype=np.int64)

    def guard(self, condition: int) -> None:
        self.values.guards.append(condition)


def rule(*names: str) -> Callable[[Rule], Rule]:
    def keep(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return keep


def _promoted(args: Sequence[Any]) -> str:
    """The kind in which arguments are compared or combined, by torch's rules."""
    full = [arg.dtype for arg in args if isinstance(arg, Ref) and arg.shape]
    zero = [arg.dtype for arg in args if isinstance(arg, Ref) and not arg.shape]
    plain = [arg for arg in args if isinstance(arg, (bool, int, float))]
    if full and any(dtype.is_floating_point for dtype in full):
        return kind_of(reduce(torch.promote_types, [d for d in full if d.is_floating_point]))
    floating = [d for d in zero if d.is_floating_point]
    if floating:
        return kind_of(reduce(torch.promote_types, floating))
    if any(isinstance(value, float) for value in plain):
        return SINGLE if torch.get_default_dtype() is torch.float32 and (full or zero) else DOUBLE
    if any(dtype is not torch.bool for dtype in full + zero) or any(not isinstance(v, bool) for v in plain):
        return DOUBLE
    return BOOL


def _elementwise(names: Sequence[str], count: int, make: Callable[..., int], *, by_output: bool = True) -> None:
    """Rules for functions of `count` numbers; make(values, *ids). by_output: computed in the kind of the output."""

    def apply(low: Lowering, op: Operation) -> None:
        args = op.args[:count]
        kind = kind_of(op.outputs[0].dtype) if by_output else _promoted(args)
        ids = [low.given(arg, kind) for arg in args]
        low.write(op.outputs[0], low.each(lambda *each: make(low.values, *each), *ids))

    rule(*names)(apply)
    ELEMENTWISE.update(names)


# --- arithmetic ------------------------------------------------------------------------------------------------------
@rule("add", "sub", "rsub")
def _add(low: Lowering, op: Operation) -> None:
    kind, v = kind_of(op.outputs[0].dtype), low.values
    a, b = (low.given(arg, kind) for arg in op.args[:2])
    base = base_name(op.name)
    if base == "rsub":
        a, b = b, a
    alpha = op.kwargs.get("alpha", op.args[2] if len(op.args) > 2 else 1)
    if alpha != 1:
        b = low.each(lambda i: v.mul(v.constant(alpha, kind), i), b)
    if kind == BOOL:
        low.write(op.outputs[0], low.each(v.either, a, b))
        return
    low.write(op.outputs[0], low.each(v.add if base == "add" else v.sub, a, b))


@rule("mul")
def _mul(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    a, b = (low.given(arg, kind) for arg in op.args[:2])
    low.write(op.outputs[0], low.each(low.values.both if kind == BOOL else low.values.mul, a, b))


@rule("div")
def _div(low: Lowering, op: Operation) -> None:
    kind, v = kind_of(op.outputs[0].dtype), low.values
    a, b = (low.given(arg, kind) for arg in op.args[:2])
    made = low.each(v.div, a, b)
    rounding = op.kwargs.get("rounding_mode")
    if rounding is not None:
        made = low.each(lambda i: v.function({"floor": "floor", "trunc": "trunc"}[rounding], i), made)
    low.write(op.outputs[0], made)


def _sign(v: Values, a: int) -> int:
    one, zero, kind = 1.0, 0.0, v.kinds[a]
    below = v.select(v.compare("lt", a, v.constant(zero, kind)), v.constant(-one, kind), v.constant(zero, kind))
    return v.select(v.compare("gt", a, v.constant(zero, kind)), v.constant(one, kind), below)


def _xlogy(v: Values, a: int, b: int) -> int:
    zero = v.constant(0.0, v.kinds[a])
    made = v.select(v.compare("eq", a, zero), zero, v.mul(a, v.function("log", b)))
    return v.select(v.compare("ne", b, b), b, made)


def _remainder(v: Values, a: int, b: int) -> int:
    return v.sub(a, v.mul(b, v.function("floor", v.div(a, b))))


def _sigmoid(v: Values, a: int) -> int:
    one = v.constant(1.0, v.kinds[a])
    return v.div(one, v.add(one, v.function("exp", v.neg(a))))


for _name in FUNCTIONS:
    _elementwise((_name,), 1, lambda v, a, name=_name: v.function(name, a))
_elementwise(("neg",), 1, Values.neg)
_elementwise(("sign", "sgn"), 1, _sign)
_elementwise(("square",), 1, lambda v, a: v.mul(a, a))
_elementwise(("reciprocal",), 1, lambda v, a: v.div(v.constant(1.0, v.kinds[a]), a))
_elementwise(("rsqrt",), 1, lambda v, a: v.div(v.constant(1.0, v.kinds[a]), v.function("sqrt", a)))
_elementwise(("sigmoid",), 1, _sigmoid)
_elementwise(("pow",), 2, Values.pow)
_elementwise(("xlogy",), 2, _xlogy)
_elementwise(("remainder",), 2, _remainder)
_elementwise(("floor_divide",), 2, lambda v, a, b: v.function("floor", v.div(a, b)))
_elementwise(("maximum",), 2, Values.maximum)
_elementwise(("minimum",), 2, Values.minimum)
_elementwise(("clamp_min",), 2, Values.maximum)
_elementwise(("clamp_max",), 2, Values.minimum)
_elementwise(("lerp",), 3, lambda v, a, b, w: v.add(a, v.mul(w, v.sub(b, a))))
_elementwise(("tanh_backward",), 2, lambda v, g, y: v.mul(g, v.sub(v.constant(1.0, v.kinds[g]), v.mul(y, y))))
_elementwise(("sigmoid_backward",), 2, lambda v, g, y: v.mul(v.mul(g, v.sub(v.constant(1.0, v.kinds[g]), y)), y))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _elementwise((_name,), 2, lambda v, a, b, name=_name: v.compare(name, a, b), by_output=False)
_elementwise(("isnan",), 1, lambda v, a: v.compare("ne", a, a), by_output=False)
_elementwise(("isfinite",), 1, Values.finite, by_output=False)
_elementwise(("isinf",), 1, lambda v, a: v.both(v.negation(v.finite(a)), v.compare("eq", a, a)), by_output=False)
_elementwise(("bitwise_and", "logical_and"), 2, Values.both)
_elementwise(("bitwise_or", "logical_or"), 2, Values.either)
_elementwise(("bitwise_not", "logical_not"), 1, Values.negation)
_elementwise(("bitwise_xor", "logical_xor"), 2, lambda v, a, b: v.both(v.either(a, b), v.negation(v.both(a, b))))


@rule("clamp")
def _clamp(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    low_end, high_end = (*op.args[1:], None, None)[:2]
    low_end, high_end = op.kwargs.get("min", low_end), op.kwargs.get("max", high_end)
    ids = low.given(op.args[0], kind)
    if low_end is not None:
        ids = low.each(low.values.maximum, ids, low.given(low_end, kind))
    if high_end is not None:
        ids = low.each(low.values.minimum, ids, low.given(high_end, kind))
    low.write(op.outputs[0], ids)


@rule("addcmul", "addcdiv")
def _addcmul(low: Lowering, op: Operation) -> None:
    kind, v = kind_of(op.outputs[0].dtype), low.values
    a, b, c = (low.given(arg, kind) for arg in op.args[:3])
    combine = v.mul if base_name(op.name) == "addcmul" else v.div
    scale = v.constant(op.kwargs.get("value", 1), kind)
    low.write(op.outputs[0], low.each(lambda x, y, z: v.add(x, combine(v.mul(scale, y), z)), a, b, c))


@rule("where")
def _where(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    condition = low.given(op.args[0], BOOL)
    low.write(op.outputs[0], low.each(low.values.select, condition, *(low.given(a, kind) for a in op.args[1:3])))


@rule("nan_to_num")
def _nan_to_num(low: Lowering, op: Operation) -> None:
    kind, v, out = kind_of(op.outputs[0].dtype), low.values, op.outputs[0]
    nan, high, small = (*op.args[1:], None, None, None)[:3]
    limits = torch.finfo(out.dtype)
    nan, high = op.kwargs.get("nan", nan) or 0.0, op.kwargs.get("posinf", high)
    small = op.kwargs.get("neginf", small)

    def each(a: int) -> int:
        made = v.select(v.compare("ne", a, a), v.constant(nan, kind), a)
        top = v.constant(limits.max if high is None else high, kind)
        made = v.select(v.compare("eq", a, v.constant(math.inf, kind)), top, made)
        bottom = v.constant(limits.min if small is None else small, kind)
        return v.select(v.compare("eq", a, v.constant(-math.inf, kind)), bottom, made)

    low.write(out, low.each(each, low.given(op.args[0], kind)))


# --- copies and shapes -----------------------------------------------------------------------------------------------
@rule("clone", "_to_copy", "lift_fresh_copy", "alias_copy", "contiguous", "_unsafe_view", "convert_element_type")
def _copy(low: Lowering, op: Operation) -> None:
    source, out = op.args[0], op.outputs[0]
    ids = low.given(source, kind_of(out.dtype))
    if source.dtype.is_floating_point and not out.dtype.is_floating_point and out.dtype is not torch.bool:
        ids = low.each(lambda i: low.values.function("trunc", i), ids)
    low.write(out, ids.reshape(out.shape))


@rule("copy")
def _copy_into(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], low.given(op.args[1], kind_of(op.outputs[0].dtype)))


@rule("fill")
def _fill(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], low.given(op.args[1], kind_of(op.outputs[0].dtype)))


@rule("zero")
def _zero(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], low.values.constant(0.0, kind_of(op.outputs[0].dtype)))


@rule("cat", "stack")
def _cat(low: Lowering, op: Operation) -> None:
    axis = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    kind = kind_of(op.outputs[0].dtype)
    parts = [low.given(part, kind) for part in op.args[0]]
    if base_name(op.name) == "stack":
        low.write(op.outputs[0], np.stack(parts, axis))
    else:
        low.write(op.outputs[0], np.concatenate([part for part in parts if part.ndim > 1 or part.size], axis))


@rule("constant_pad_nd")
def _pad(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    made = low.full(op.outputs[0].shape, op.args[2] if len(op.args) > 2 else 0.0, kind)
    ids, pads = low.given(op.args[0], kind), op.args[1]
    target, source = [slice(None)] * ids.ndim, [slice(None)] * ids.ndim
    for i, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        axis = ids.ndim - 1 - i
        length = ids.shape[axis]
        source[axis] = slice(max(0, -before), length - max(0, -after))
        target[axis] = slice(max(0, before), max(0, before) + length - max(0, -before) - max(0, -after))
    made[tuple(target)] = ids[tuple(source)]
    low.write(op.outputs[0], made)


@rule("roll")
def _roll(low: Lowering, op: Operation) -> None:
    ids = low.read(op.args[0])
    dims = op.args[2] if len(op.args) > 2 else ()
    low.write(op.outputs[0], np.roll(ids, op.args[1], tuple(dims)) if dims else np.roll(ids, op.args[1][0]))


@rule("flip")
def _flip(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], np.flip(low.read(op.args[0]), tuple(op.args[1])))


@rule("repeat")
def _repeat(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], np.tile(low.read(op.args[0]), op.args[1]))


@rule("diag_embed")
def _diag_embed(low: Lowering, op: Operation) -> None:
    if op.args[1:] not in ((), (0,), (0, -2, -1)) or op.kwargs:
        raise UntraceableError("diag_embed off the main diagonal")
    ids = low.read(op.args[0])
    made = low.full(op.outputs[0].shape, 0.0, kind_of(op.outputs[0].dtype))
    index = np.arange(ids.shape[-1])
    made[..., index, index] = ids
    low.write(op.outputs[0], made)


@rule("tril", "triu")
def _triangle(low: Lowering, op: Operation) -> None:
    ids = low.read(op.args[0])
    make = np.tril if base_name(op.name) == "tril" else np.triu
    kept = make(np.ones(ids.shape[-2:], dtype=bool), op.args[1] if len(op.args) > 1 else 0)
    low.write(op.outputs[0], np.where(kept, ids, low.values.constant(0.0, kind_of(op.outputs[0].dtype))))


@rule("slice_backward", "select_backward")
def _slice_backward(low: Lowering, op: Operation) -> None:
    made = low.full(op.outputs[0].shape, 0.0, kind_of(op.outputs[0].dtype))
    if base_name(op.name) == "slice_backward":
        _, _, axis, start, end, step = op.args
        made[(slice(None),) * axis + (slice(start, min(end, made.shape[axis]), step),)] = low.read(op.args[0])
    else:
        made[(slice(None),) * op.args[2] + (op.args[3],)] = low.read(op.args[0])
    low.write(op.outputs[0], made)


def _constant_index(low: Lowering, ref: Any) -> Any:
    if ref is None:
        return slice(None)
    known = [low.values.known(int(i)) for i in low.read(ref).flat]
    if any(value is None for value in known):
        raise UntraceableError("an index that depends on values")
    made = np.array(known).reshape(ref.shape)
    return made.astype(bool) if ref.dtype is torch.bool else made.astype(np.int64)


@rule("index")
def _index(low: Lowering, op: Operation) -> None:
    ids = low.read(op.args[0])
    try:
        low.write(op.outputs[0], ids[tuple(_constant_index(low, ref) for ref in op.args[1])])
    except UntraceableError:
        low.write(op.outputs[0], _gathered(low, ids, op.args[1]))


def _gathered(low: Lowering, ids: Ids, refs: Sequence[Any]) -> Ids:
    """Indexing by leading indices that depend on values: a chain of choices."""
    if any(ref is None for ref in refs):
        raise UntraceableError("an index that depends on values, beside whole dimensions")
    indices = np.broadcast_arrays(*(low.given(ref, DOUBLE) for ref in refs))
    made = np.empty((*indices[0].shape, *ids.shape[len(indices) :]), dtype=np.int64)
    for place in np.ndindex(*indices[0].shape):
        made[place] = _chosen(low, ids, [int(index[place]) for index in indices])
    return made


def _chosen(low: Lowering, ids: Ids, chosen: Sequence[int]) -> Ids:
    if not chosen:
        return ids
    v = low.values
    known = v.known(chosen[0])
    if known is not None:
        return _chosen(low, ids[int(known)], chosen[1:])
    made = _chosen(low, ids[0], chosen[1:])
    for j in range(1, len(ids)):
        here = v.compare("eq", chosen[0], v.constant(float(j)))
        made = low.each(lambda x, y, here=here: v.select(here, x, y), _chosen(low, ids[j], chosen[1:]), made)
    return made


@rule("index_put", "_index_put_impl")
def _index_put(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    ids = low.given(op.args[0], kind)
    index = tuple(_constant_index(low, ref) for ref in op.args[1])
    new = low.given(op.args[2], kind)
    if (len(op.args) > 3 and op.args[3]) or op.kwargs.get("accumulate"):
        raise UntraceableError("index_put that accumulates")
    ids[index] = np.broadcast_to(new, ids[index].shape)
    low.write(op.outputs[0], ids)


@rule("index_select")
def _index_select(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], np.take(low.read(op.args[0]), _constant_index(low, op.args[2]), op.args[1]))


# --- reductions ------------------------------------------------------------------------------------------------------
def _reduction(names: Sequence[str], make: Callable[[Values, list[int], str], int]) -> None:
    def apply(low: Lowering, op: Operation) -> None:
        out = op.outputs[0]
        kind = kind_of(out.dtype)
        ids = low.given(op.args[0], kind)
        dims = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
        axes = range(ids.ndim) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
        axes = sorted({axis % max(1, ids.ndim) for axis in axes}) if ids.ndim else []
        rest = [axis for axis in range(ids.ndim) if axis not in axes]
        last = ids.transpose([*rest, *axes]).reshape([ids.shape[axis] for axis in rest] + [-1])
        made = np.empty(last.shape[:-1], dtype=np.int64)
        for place in np.ndindex(*made.shape):
            made[place] = make(low.values, [int(i) for i in last[place]], kind)
        low.write(out, made.reshape(out.shape))

    rule(*names)(apply)


def _mean(v: Values, terms: list[int], kind: str) -> int:
    return v.div(v.sum(terms, kind), v.constant(len(terms), kind))


_reduction(("sum",), Values.sum)
_reduction(("mean",), _mean)
_reduction(("prod",), lambda v, terms, kind: reduce(v.mul, terms, v.constant(1.0, kind)))
_reduction(("amax", "max"), lambda v, terms, _: reduce(v.maximum, terms))
_reduction(("amin", "min"), lambda v, terms, _: reduce(v.minimum, terms))
_reduction(("all",), lambda v, terms, _: reduce(v.both, terms, v.constant(True, BOOL)))
_reduction(("any",), lambda v, terms, _: reduce(v.either, terms, v.constant(False, BOOL)))


@rule("cumsum")
def _cumsum(low: Lowering, op: Operation) -> None:
    ids = low.given(op.args[0], kind_of(op.outputs[0].dtype))
    along = np.moveaxis(ids, op.args[1], 0)
    for i in range(1, len(along)):
        along[i] = low.each(low.values.add, along[i - 1], along[i])
    low.write(op.outputs[0], ids)


@rule("_softmax")
def _softmax(low: Lowering, op: Operation) -> None:
    kind, v = kind_of(op.outputs[0].dtype), low.values
    ids = np.moveaxis(low.given(op.args[0], kind), op.args[1], -1).copy()
    for place in np.ndindex(*ids.shape[:-1]):
        top = reduce(v.maximum, map(int, ids[place]))
        grown = [v.function("exp", v.sub(int(i), top)) for i in ids[place]]
        total = v.sum(grown, kind)
        ids[place] = [v.div(i, total) for i in grown]
    low.write(op.outputs[0], np.moveaxis(ids, -1, op.args[1]))


# --- linear algebra --------------------------------------------------------------------------------------------------
def _product(low: Lowering, a: Ids, b: Ids, kind: str) -> Ids:
    """Matrix product of (n, k) and (k, m)."""
    made = np.empty((a.shape[0], b.shape[1]), dtype=np.int64)
    rows, columns = a.tolist(), b.T.tolist()
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            made[i, j] = low.values.dot(row, column, kind)
    return made


def _products(low: Lowering, a: Ids, b: Ids, kind: str) -> Ids:
    if not len(a):
        return np.empty((0, a.shape[-2], b.shape[-1]), dtype=np.int64)
    return np.stack([_product(low, x, y, kind) for x, y in zip(a, b, strict=True)])


@rule("bmm")
def _bmm(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    low.write(op.outputs[0], _products(low, low.read(op.args[0]), low.read(op.args[1]), kind))


@rule("mm", "mv", "dot")
def _mm(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    a, b = low.read(op.args[0]), low.read(op.args[1])
    a, b = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    low.write(op.outputs[0], _product(low, a, b, kind).reshape(op.outputs[0].shape))


@rule("addmm", "baddbmm", "addmv", "addbmm")
def _addmm(low: Lowering, op: Operation) -> None:
    kind, v, out = kind_of(op.outputs[0].dtype), low.values, op.outputs[0]
    if base_name(op.name) == "addbmm" or op.kwargs.get("beta", 1) != 1 or op.kwargs.get("alpha", 1) != 1:
        raise UntraceableError(f"{op.name} with factors")
    a, b = low.read(op.args[1]), low.read(op.args[2])
    if base_name(op.name) == "baddbmm":
        made = _products(low, a, b, kind)
    else:
        made = _product(low, a, b[:, None] if b.ndim == 1 else b, kind).reshape(out.shape)
    low.write(out, low.each(v.add, np.broadcast_to(low.given(op.args[0], kind), out.shape), made))


def _over_batch(low: Lowering, ref: Ref, function: Callable[[Ids], Ids]) -> Ids:
    ids = low.read(ref)
    made = [function(each) for each in ids.reshape(-1, *ids.shape[-2:])]
    return np.stack(made).reshape(*ids.shape[:-2], *made[0].shape)


def _cholesky(low: Lowering, matrix: Ids) -> tuple[Ids, int]:
    """The factor, and whether the matrix is not positive definite; a guard that this is not a matter of rounding."""
    v, n = low.values, len(matrix)
    kind = v.kinds[int(matrix[0, 0])] if n else DOUBLE
    made, failed = low.full((n, n), 0.0, kind), v.constant(False, BOOL)
    margin = v.constant(PIVOT if kind == DOUBLE else 1e-5, kind)
    for j in range(n):
        pivot = int(matrix[j, j])
        for k in range(j):
            pivot = v.sub(pivot, v.mul(int(made[j, k]), int(made[j, k])))
        edge = v.mul(margin, v.function("abs", int(matrix[j, j])))
        # a zero on the diagonal is no matter of rounding; after a negative pivot all is NaN
        low.guard(v.negation(v.compare("lt", v.function("abs", pivot), edge)))
        failed = v.either(failed, v.compare("le", pivot, v.constant(0.0, kind)))
        made[j, j] = v.function("sqrt", pivot)
        inverse = v.div(v.constant(1.0, kind), int(made[j, j]))
        for i in range(j + 1, n):
            value = int(matrix[i, j])
            for k in range(j):
                value = v.sub(value, v.mul(int(made[i, k]), int(made[j, k])))
            made[i, j] = v.mul(value, inverse)
    return made, failed


def _triangular(low: Lowering, factor: Ids, right: Ids, *, upper: bool, unit: bool = False) -> Ids:
    """The solution of a triangular system, (n, n) and (n, m)."""
    v, n, x = low.values, len(factor), right.copy()
    order = range(n - 1, -1, -1) if upper else range(n)
    for i in order:
        before = range(i + 1, n) if upper else range(i)
        diagonal = int(factor[i, i])
        inverse = None if unit else v.div(v.constant(1.0, v.kinds[diagonal]), diagonal)
        for c in range(x.shape[1]):
            value = int(x[i, c])
            for k in before:
                value = v.sub(value, v.mul(int(factor[i, k]), int(x[k, c])))
            x[i, c] = value if inverse is None else v.mul(value, inverse)
    return x


@rule("linalg_cholesky_ex")
def _cholesky_ex(low: Lowering, op: Operation) -> None:
    ids = low.read(op.args[0])
    found = [_cholesky(low, matrix) for matrix in ids.reshape(-1, *ids.shape[-2:])]
    made = np.stack([factor for factor, _ in found]).reshape(ids.shape)
    upper = op.kwargs.get("upper", op.args[1] if len(op.args) > 1 else False)
    low.write(op.outputs[0], made.swapaxes(-1, -2) if upper else made)
    failed = np.array([low.values.cast(failed, DOUBLE) for _, failed in found], dtype=np.int64)
    low.write(op.outputs[1], failed.reshape(op.outputs[1].shape))


@rule("_linalg_eigh")
def _eigh(low: Lowering, op: Operation) -> None:
    v, ids, kind = low.values, low.read(op.args[0]), kind_of(op.outputs[0].dtype)
    n = ids.shape[-1]
    flat = ids.reshape(-1, n, n)
    numbers, vectors = np.empty((len(flat), n), dtype=np.int64), np.empty(flat.shape, dtype=np.int64)
    for i, matrix in enumerate(flat):
        lower = np.where(np.tri(n, dtype=bool), matrix, matrix.T)
        call = v.new(kind, "kernel", "eigh", n, tuple(map(int, lower.flat)))
        numbers[i] = [v.new(kind, "result", call, k) for k in range(n)]
        vectors[i] = np.array([v.new(kind, "result", call, n + k) for k in range(n * n)]).reshape(n, n)
    low.write(op.outputs[0], numbers.reshape(op.outputs[0].shape))
    if op.outputs[1].size:
        low.write(op.outputs[1], vectors.reshape(op.outputs[1].shape))


def _is_upper(op: Operation, place: int) -> bool:
    return bool(op.kwargs.get("upper", op.args[place] if len(op.args) > place else False))


def _cholesky_solution(low: Lowering, factor: Ids, right: Ids, upper: bool) -> Ids:
    lower = factor.T if upper else factor
    return _triangular(low, lower.T, _triangular(low, lower, right, upper=False), upper=True)


@rule("cholesky_inverse")
def _cholesky_inverse(low: Lowering, op: Operation) -> None:
    kind, upper = kind_of(op.outputs[0].dtype), _is_upper(op, 1)

    def inverse(factor: Ids) -> Ids:
        return _cholesky_solution(low, factor, _eye(low, len(factor), kind), upper)

    low.write(op.outputs[0], _over_batch(low, op.args[0], inverse))


def _eye(low: Lowering, n: int, kind: str) -> Ids:
    return np.where(np.eye(n, dtype=bool), low.values.constant(1.0, kind), low.values.constant(0.0, kind))


def _paired(low: Lowering, left: Ref, right: Ref, function: Callable[[Ids, Ids], Ids], out: Ref) -> Ids:
    """A function of matrices and right-hand sides, over their batch dimensions."""
    a, b = low.read(left), low.read(right)
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = np.broadcast_to(a, (*batch, *a.shape[-2:])).reshape(-1, *a.shape[-2:])
    b = np.broadcast_to(b, (*batch, *b.shape[-2:])).reshape(-1, *b.shape[-2:])
    return np.stack([function(x, y) for x, y in zip(a, b, strict=True)]).reshape(out.shape)


@rule("cholesky_solve")
def _cholesky_solve(low: Lowering, op: Operation) -> None:
    upper = _is_upper(op, 2)
    made = _paired(
        low, op.args[1], op.args[0], lambda factor, right: _cholesky_solution(low, factor, right, upper), op.outputs[0]
    )
    low.write(op.outputs[0], made)


@rule("linalg_solve_triangular")
def _solve_triangular(low: Lowering, op: Operation) -> None:
    upper, unit = op.kwargs["upper"], op.kwargs.get("unitriangular", False)
    if not op.kwargs.get("left", True):
        raise UntraceableError("linalg_solve_triangular from the right")
    made = _paired(
        low, op.args[0], op.args[1], lambda a, b: _triangular(low, a, b, upper=upper, unit=unit), op.outputs[0]
    )
    low.write(op.outputs[0], made)


def _lu(low: Lowering, matrix: Ids, right: Ids | None = None) -> tuple[Ids, Ids | None, int]:
    """LU factors with partial pivoting, the right-hand side in the same order of rows, and the sign of that order.

    Rows are exchanged by choices, not by branches, so that elements of a batch may differ in their pivots.
    """
    v, n = low.values, len(matrix)
    kind = v.kinds[int(matrix[0, 0])] if n else DOUBLE
    made, x = matrix.copy(), None if right is None else right.copy()
    sign = v.constant(1.0, kind)
    for k in range(n):
        for i in range(k + 1, n):
            if v.known(int(made[i, k])) == 0:
                continue
            swap = v.compare("gt", v.function("abs", int(made[i, k])), v.function("abs", int(made[k, k])))
            sign = v.select(swap, v.neg(sign), sign)
            for rows in (made,) if x is None else (made, x):
                for j in range(rows.shape[1]):
                    a, b = int(rows[k, j]), int(rows[i, j])
                    rows[k, j], rows[i, j] = v.select(swap, b, a), v.select(swap, a, b)
        pivot = int(made[k, k])
        low.guard(v.compare("ne", pivot, v.constant(0.0, kind)))
        inverse = v.div(v.constant(1.0, kind), pivot)
        for i in range(k + 1, n):
            factor = v.mul(int(made[i, k]), inverse)
            made[i, k] = factor
            for j in range(k + 1, n):
                made[i, j] = v.sub(int(made[i, j]), v.mul(factor, int(made[k, j])))
    return made, x, sign


def _solved(low: Lowering, matrix: Ids, right: Ids) -> Ids:
    factors, ordered, _ = _lu(low, matrix, right)
    assert ordered is not None
    return _triangular(low, factors, _triangular(low, factors, ordered, upper=False, unit=True), upper=True)


@rule("_linalg_solve_ex")
def _solve_ex(low: Lowering, op: Operation) -> None:
    matrix, right, out = op.args[0], op.args[1], op.outputs[0]
    if not op.kwargs.get("left", True):
        raise UntraceableError("linalg.solve from the right")
    if len(right.shape) == len(matrix.shape) - 1:
        right = right._replace(shape=(*right.shape, 1), strides=(*right.strides, 1))
        wide = out._replace(shape=(*out.shape, 1), strides=(*out.strides, 1))
    else:
        wide = out
    low.write(wide, _paired(low, matrix, right, lambda a, b: _solved(low, a, b), wide))
    low.write(op.outputs[-1], low.values.constant(0.0))


@rule("linalg_inv_ex")
def _inv_ex(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    made = _over_batch(low, op.args[0], lambda a: _solved(low, a, _eye(low, len(a), kind)))
    low.write(op.outputs[0], made)
    low.write(op.outputs[1], low.values.constant(0.0))


@rule("linalg_lu_factor_ex")
def _lu_factor_ex(low: Lowering, op: Operation) -> None:
    """The factors alone: what reads the pivots cannot be lowered."""
    low.write(op.outputs[0], _over_batch(low, op.args[0], lambda a: _lu(low, a)[0]))
    low.write(op.outputs[1], low.values.new(DOUBLE, "unknown"))
    low.write(op.outputs[2], low.values.constant(0.0))


@rule("_linalg_slogdet", "_linalg_det")
def _slogdet(low: Lowering, op: Operation) -> None:
    v, kind, ids = low.values, kind_of(op.outputs[0].dtype), low.read(op.args[0])
    signs, logs = [], []
    for matrix in ids.reshape(-1, *ids.shape[-2:]):
        factors, _, sign = _lu(low, matrix)
        diagonal = [int(factors[i, i]) for i in range(len(factors))]
        if op.name.startswith("_linalg_det"):
            signs.append(reduce(v.mul, diagonal, sign))
        else:
            signs.append(reduce(v.mul, [_sign(v, d) for d in diagonal], sign))
            logs.append(v.sum([v.function("log", v.function("abs", d)) for d in diagonal], kind))
    low.write(op.outputs[0], np.array(signs).reshape(op.outputs[0].shape))
    if logs:
        low.write(op.outputs[1], np.array(logs).reshape(op.outputs[1].shape))


@rule("exponential_step")
def _exponential_step(low: Lowering, op: Operation) -> None:
    v, n = low.values, op.args[1].shape[-1]
    kind = kind_of(op.outputs[0].dtype)
    jacobian, flow, time = (low.given(arg, kind) for arg in op.args)
    rows = []
    for j, f, t in zip(jacobian, flow, np.broadcast_to(time, (len(flow),)), strict=True):
        args = (*map(int, j.flat), *map(int, f.flat), int(t))
        call = v.new(kind, "kernel", "exponential_step", n, args)
        rows.append([v.new(kind, "result", call, i) for i in range(n)])
    low.write(op.outputs[0], np.array(rows))


@rule("guard")
def _guard(low: Lowering, op: Operation) -> None:
    condition = int(low.given(op.args[0], BOOL).reshape(()))
    low.guard(condition if op.kwargs["outcome"] else low.values.negation(condition))
