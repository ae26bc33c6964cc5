"""Rules of operations that move elements, by shape or by index, and of those that reduce dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from pcnet.engine.compiled.errors import UntraceableError
from pcnet.engine.compiled.lowering import Ids, Lowering, RuleTable, base_name, kind_of
from pcnet.engine.compiled.trace import Operation
from pcnet.engine.compiled.values import BOOL, DOUBLE, Values

RULES = RuleTable()


@RULES.add("contiguous", "_unsafe_view")
def _reshape(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], low.read(op.args[0]).reshape(op.outputs[0].shape))


@RULES.add("cat", "stack")
def _cat(low: Lowering, op: Operation) -> None:
    axis = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
    kind = kind_of(op.outputs[0].dtype)
    parts = [low.given(part, kind) for part in op.args[0]]
    if base_name(op.name) == "stack":
        low.write(op.outputs[0], np.stack(parts, axis))
    else:
        low.write(op.outputs[0], np.concatenate([part for part in parts if part.ndim > 1 or part.size], axis))


@RULES.add("constant_pad_nd")
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


@RULES.add("roll")
def _roll(low: Lowering, op: Operation) -> None:
    ids = low.read(op.args[0])
    dims = op.args[2] if len(op.args) > 2 else ()
    low.write(op.outputs[0], np.roll(ids, op.args[1], tuple(dims)) if dims else np.roll(ids, op.args[1][0]))


@RULES.add("flip")
def _flip(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], np.flip(low.read(op.args[0]), tuple(op.args[1])))


@RULES.add("repeat")
def _repeat(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], np.tile(low.read(op.args[0]), op.args[1]))


@RULES.add("diag_embed")
def _diag_embed(low: Lowering, op: Operation) -> None:
    if op.args[1:] not in ((), (0,), (0, -2, -1)) or op.kwargs:
        raise UntraceableError("diag_embed off the main diagonal")
    ids = low.read(op.args[0])
    made = low.full(op.outputs[0].shape, 0.0, kind_of(op.outputs[0].dtype))
    index = np.arange(ids.shape[-1])
    made[..., index, index] = ids
    low.write(op.outputs[0], made)


@RULES.add("mirrored")
def _mirrored(low: Lowering, op: Operation) -> None:
    ids = low.read(op.args[0])
    rows, columns = np.indices(ids.shape[-2:])
    low.write(op.outputs[0], ids[..., np.maximum(rows, columns), np.minimum(rows, columns)])


@RULES.add("tril", "triu")
def _triangle(low: Lowering, op: Operation) -> None:
    ids = low.read(op.args[0])
    make = np.tril if base_name(op.name) == "tril" else np.triu
    kept = make(np.ones(ids.shape[-2:], dtype=bool), op.args[1] if len(op.args) > 1 else 0)
    low.write(op.outputs[0], np.where(kept, ids, low.values.constant(0.0, kind_of(op.outputs[0].dtype))))


@RULES.add("slice_backward", "select_backward")
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


@RULES.add("index")
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


@RULES.add("index_put", "_index_put_impl")
def _index_put(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    ids = low.given(op.args[0], kind)
    index = tuple(_constant_index(low, ref) for ref in op.args[1])
    new = low.given(op.args[2], kind)
    if (len(op.args) > 3 and op.args[3]) or op.kwargs.get("accumulate"):
        raise UntraceableError("index_put that accumulates")
    ids[index] = np.broadcast_to(new, ids[index].shape)
    low.write(op.outputs[0], ids)


@RULES.add("index_select")
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
        terms = math.prod(ids.shape[axis] for axis in axes)
        last = ids.transpose([*rest, *axes]).reshape([*(ids.shape[axis] for axis in rest), terms])
        made = np.empty(last.shape[:-1], dtype=np.int64)
        for place in np.ndindex(*made.shape):
            made[place] = make(low.values, [int(i) for i in last[place]], kind)
        low.write(out, made.reshape(out.shape))

    RULES.add(*names)(apply)


def _mean(v: Values, terms: list[int], kind: str) -> int:
    return v.div(v.sum(terms, kind), v.constant(len(terms), kind))


_reduction(("sum",), Values.sum)
_reduction(("mean",), _mean)
_reduction(("prod",), lambda v, terms, kind: reduce(v.mul, terms, v.constant(1.0, kind)))
_reduction(("amax", "max"), lambda v, terms, _: reduce(v.maximum, terms))
_reduction(("amin", "min"), lambda v, terms, _: reduce(v.minimum, terms))
_reduction(("all",), lambda v, terms, _: reduce(v.both, terms, v.constant(True, BOOL)))
_reduction(("any",), lambda v, terms, _: reduce(v.either, terms, v.constant(False, BOOL)))


@RULES.add("cumsum")
def _cumsum(low: Lowering, op: Operation) -> None:
    ids = low.given(op.args[0], kind_of(op.outputs[0].dtype))
    along = np.moveaxis(ids, op.args[1], 0)
    for i in range(1, len(along)):
        along[i] = low.each(low.values.add, along[i - 1], along[i])
    low.write(op.outputs[0], ids)


@RULES.add("_softmax")
def _softmax(low: Lowering, op: Operation) -> None:
    kind, v = kind_of(op.outputs[0].dtype), low.values
    ids = np.moveaxis(low.given(op.args[0], kind), op.args[1], -1).copy()
    for place in np.ndindex(*ids.shape[:-1]):
        top = reduce(v.maximum, map(int, ids[place]))
        grown = [v.function("exp", v.sub(int(i), top)) for i in ids[place]]
        total = v.sum(grown, kind)
        ids[place] = [v.div(i, total) for i in grown]
    low.write(op.outputs[0], np.moveaxis(ids, -1, op.args[1]))
