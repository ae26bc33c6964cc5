"""Rules of operations that do the same to each element: arithmetic, comparisons, choices and copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from pcnet.engine.compiled.lowering import Lowering, RuleTable, base_name, kind_of
from pcnet.engine.compiled.trace import Operation, Ref
from pcnet.engine.compiled.values import BOOL, DOUBLE, FUNCTIONS, FUNCTIONS_OF_TWO, SINGLE, Values

RULES = RuleTable()


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

    RULES.add(*names)(apply)


@RULES.add("add", "sub", "rsub")
def _add(low: Lowering, op: Operation) -> None:
    kind, v = kind_of(op.outputs[0].dtype), low.values
    a, b = (low.given(arg, kind) for arg in op.args[:2])
    base = base_name(op.name)
    if base == "rsub":
        a, b = b, a
    alpha = op.kwargs.get("alpha", op.args[2] if len(op.args) > 2 else 1)
    if kind == BOOL:
        low.write(op.outputs[0], low.each(v.either, a, b))
        return
    if alpha != 1:
        combine, factor = v.multiply_add if base == "add" else v.multiply_subtract, v.constant(alpha, kind)
        low.write(op.outputs[0], low.each(lambda x, y: combine(factor, y, x), a, b))
        return
    low.write(op.outputs[0], low.each(v.add if base == "add" else v.sub, a, b))


@RULES.add("mul")
def _mul(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    a, b = (low.given(arg, kind) for arg in op.args[:2])
    low.write(op.outputs[0], low.each(low.values.both if kind == BOOL else low.values.mul, a, b))


@RULES.add("div")
def _div(low: Lowering, op: Operation) -> None:
    kind, v = kind_of(op.outputs[0].dtype), low.values
    a, b = (low.given(arg, kind) for arg in op.args[:2])
    made = low.each(v.div, a, b)
    rounding = op.kwargs.get("rounding_mode")
    if rounding is not None:
        made = low.each(lambda i: v.function({"floor": "floor", "trunc": "trunc"}[rounding], i), made)
    low.write(op.outputs[0], made)


def sign_of(v: Values, a: int) -> int:
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


def _signbit(v: Values, a: int) -> int:
    zero = v.constant(0.0, v.kinds[a])
    return v.compare("lt", v.function("copysign", v.constant(1.0, v.kinds[a]), a), zero)


for _names, _count in ((FUNCTIONS, 1), (FUNCTIONS_OF_TWO, 2)):
    for _name in _names:
        _elementwise((_name,), _count, lambda v, *args, name=_name: v.function(name, *args))
_elementwise(("neg",), 1, Values.neg)
_elementwise(("sign", "sgn"), 1, sign_of)
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
_elementwise(("signbit",), 1, _signbit, by_output=False)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _elementwise((_name,), 2, lambda v, a, b, name=_name: v.compare(name, a, b), by_output=False)
_elementwise(("isnan",), 1, lambda v, a: v.compare("ne", a, a), by_output=False)
_elementwise(("isfinite",), 1, Values.finite, by_output=False)
_elementwise(("isinf",), 1, lambda v, a: v.both(v.negation(v.finite(a)), v.compare("eq", a, a)), by_output=False)
_elementwise(("bitwise_and", "logical_and"), 2, Values.both)
_elementwise(("bitwise_or", "logical_or"), 2, Values.either)
_elementwise(("bitwise_not", "logical_not"), 1, Values.negation)
_elementwise(("bitwise_xor", "logical_xor"), 2, lambda v, a, b: v.both(v.either(a, b), v.negation(v.both(a, b))))


@RULES.add("clamp")
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


@RULES.add("addcmul", "addcdiv")
def _addcmul(low: Lowering, op: Operation) -> None:
    kind, v = kind_of(op.outputs[0].dtype), low.values
    a, b, c = (low.given(arg, kind) for arg in op.args[:3])
    scale = v.constant(op.kwargs.get("value", 1), kind)
    if base_name(op.name) == "addcmul":
        low.write(op.outputs[0], low.each(lambda x, y, z: v.multiply_add(v.mul(scale, y), z, x), a, b, c))
    else:
        low.write(op.outputs[0], low.each(lambda x, y, z: v.add(x, v.div(v.mul(scale, y), z)), a, b, c))


@RULES.add("where")
def _where(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    condition = low.given(op.args[0], BOOL)
    low.write(op.outputs[0], low.each(low.values.select, condition, *(low.given(a, kind) for a in op.args[1:3])))


@RULES.add("nan_to_num")
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


@RULES.add("clone", "_to_copy", "lift_fresh_copy", "alias_copy", "convert_element_type")
def _copy(low: Lowering, op: Operation) -> None:
    source, out = op.args[0], op.outputs[0]
    ids = low.given(source, kind_of(out.dtype))
    if source.dtype.is_floating_point and not out.dtype.is_floating_point and out.dtype is not torch.bool:
        ids = low.each(lambda i: low.values.function("trunc", i), ids)
    low.write(out, ids.reshape(out.shape))


@RULES.add("copy")
def _copy_into(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], low.given(op.args[1], kind_of(op.outputs[0].dtype)))


@RULES.add("fill")
def _fill(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], low.given(op.args[1], kind_of(op.outputs[0].dtype)))


@RULES.add("zero")
def _zero(low: Lowering, op: Operation) -> None:
    low.write(op.outputs[0], low.values.constant(0.0, kind_of(op.outputs[0].dtype)))
