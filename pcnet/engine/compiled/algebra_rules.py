"""Rules of linear algebra: products, factors, solutions, determinants, eigenvalues and matrix exponentials."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from pcnet.engine.compiled.elementwise_rules import sign_of
from pcnet.engine.compiled.errors import UntraceableError
from pcnet.engine.compiled.lowering import Ids, Lowering, RuleTable, base_name, kind_of
from pcnet.engine.compiled.trace import Operation, Ref
from pcnet.engine.compiled.values import BOOL, DOUBLE

RULES = RuleTable()
PIVOT = 1e-10
"""The eager engine decides whether a matrix is positive definite if a pivot, relative to the diagonal, is less than
this."""


def _product(low: Lowering, a: Ids, b: Ids, kind: str, start: Ids | None = None) -> Ids:
    """Matrix product of (n, k) and (k, m), added to `start` (n, m) if that is given."""
    made = low.full((a.shape[0], b.shape[1]), 0.0, kind) if start is None else start.copy()
    rows, columns = a.tolist(), b.T.tolist()
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            made[i, j] = low.values.dot(row, column, int(made[i, j]))
    return made


def _products(low: Lowering, a: Ids, b: Ids, kind: str, start: Ids | None = None) -> Ids:
    if not len(a):
        return np.empty((0, a.shape[-2], b.shape[-1]), dtype=np.int64)
    first = [None] * len(a) if start is None else list(start)
    return np.stack([_product(low, x, y, kind, z) for x, y, z in zip(a, b, first, strict=True)])


@RULES.add("bmm")
def _bmm(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    low.write(op.outputs[0], _products(low, low.read(op.args[0]), low.read(op.args[1]), kind))


@RULES.add("mm", "mv", "dot")
def _mm(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    a, b = low.read(op.args[0]), low.read(op.args[1])
    a, b = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    low.write(op.outputs[0], _product(low, a, b, kind).reshape(op.outputs[0].shape))


@RULES.add("addmm", "baddbmm", "addmv", "addbmm")
def _addmm(low: Lowering, op: Operation) -> None:
    kind, out = kind_of(op.outputs[0].dtype), op.outputs[0]
    if base_name(op.name) == "addbmm" or op.kwargs.get("beta", 1) != 1 or op.kwargs.get("alpha", 1) != 1:
        raise UntraceableError(f"{op.name} with factors")
    a, b = low.read(op.args[1]), low.read(op.args[2])
    start = np.broadcast_to(low.given(op.args[0], kind), out.shape)
    if base_name(op.name) == "baddbmm":
        low.write(out, _products(low, a, b, kind, start))
    else:
        b, start = (b[:, None], start[:, None]) if b.ndim == 1 else (b, start)
        low.write(out, _product(low, a, b, kind, start).reshape(out.shape))


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
            pivot = v.multiply_subtract(int(made[j, k]), int(made[j, k]), pivot)
        edge = v.mul(margin, int(matrix[j, j]))
        # what is not positive on the diagonal is no matter of rounding; after a negative pivot all is NaN
        low.guard(v.negation(v.compare("lt", v.function("abs", pivot), edge)))
        failed = v.either(failed, v.negation(v.compare("gt", pivot, v.constant(0.0, kind))))  # also if it is NaN
        made[j, j] = v.function("sqrt", pivot)
        inverse = v.div(v.constant(1.0, kind), int(made[j, j]))
        for i in range(j + 1, n):
            value = int(matrix[i, j])
            for k in range(j):
                value = v.multiply_subtract(int(made[i, k]), int(made[j, k]), value)
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
                value = v.multiply_subtract(int(factor[i, k]), int(x[k, c]), value)
            x[i, c] = value if inverse is None else v.mul(value, inverse)
    return x


@RULES.add("linalg_cholesky_ex")
def _cholesky_ex(low: Lowering, op: Operation) -> None:
    ids = low.read(op.args[0])
    found = [_cholesky(low, matrix) for matrix in ids.reshape(-1, *ids.shape[-2:])]
    made = np.stack([factor for factor, _ in found]).reshape(ids.shape)
    upper = op.kwargs.get("upper", op.args[1] if len(op.args) > 1 else False)
    low.write(op.outputs[0], made.swapaxes(-1, -2) if upper else made)
    failed = np.array([low.values.cast(failed, DOUBLE) for _, failed in found], dtype=np.int64)
    low.write(op.outputs[1], failed.reshape(op.outputs[1].shape))


@RULES.add("_linalg_eigh")
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


@RULES.add("cholesky_inverse")
def _cholesky_inverse(low: Lowering, op: Operation) -> None:
    kind, upper = kind_of(op.outputs[0].dtype), _is_upper(op, 1)

    def inverse(factor: Ids) -> Ids:
        """L⁻ᵀL⁻¹, of which one triangle is computed."""
        root = _triangular(low, factor.T if upper else factor, _eye(low, len(factor), kind), upper=False)
        made = _product(low, root.T, root, kind)
        rows, columns = np.indices(made.shape)
        return made[np.maximum(rows, columns), np.minimum(rows, columns)]

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


@RULES.add("cholesky_solve")
def _cholesky_solve(low: Lowering, op: Operation) -> None:
    upper = _is_upper(op, 2)
    made = _paired(
        low, op.args[1], op.args[0], lambda factor, right: _cholesky_solution(low, factor, right, upper), op.outputs[0]
    )
    low.write(op.outputs[0], made)


@RULES.add("linalg_solve_triangular")
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
                made[i, j] = v.multiply_subtract(factor, int(made[k, j]), int(made[i, j]))
    return made, x, sign


def _solved(low: Lowering, matrix: Ids, right: Ids) -> Ids:
    factors, ordered, _ = _lu(low, matrix, right)
    assert ordered is not None
    return _triangular(low, factors, _triangular(low, factors, ordered, upper=False, unit=True), upper=True)


@RULES.add("_linalg_solve_ex")
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


@RULES.add("linalg_inv_ex")
def _inv_ex(low: Lowering, op: Operation) -> None:
    kind = kind_of(op.outputs[0].dtype)
    made = _over_batch(low, op.args[0], lambda a: _solved(low, a, _eye(low, len(a), kind)))
    low.write(op.outputs[0], made)
    low.write(op.outputs[1], low.values.constant(0.0))


@RULES.add("linalg_lu_factor_ex")
def _lu_factor_ex(low: Lowering, op: Operation) -> None:
    """The factors alone: what reads the pivots cannot be lowered."""
    low.write(op.outputs[0], _over_batch(low, op.args[0], lambda a: _lu(low, a)[0]))
    low.write(op.outputs[1], low.values.new(DOUBLE, "unknown"))
    low.write(op.outputs[2], low.values.constant(0.0))


@RULES.add("_linalg_slogdet", "_linalg_det")
def _slogdet(low: Lowering, op: Operation) -> None:
    v, kind, ids = low.values, kind_of(op.outputs[0].dtype), low.read(op.args[0])
    signs, logs = [], []
    for matrix in ids.reshape(-1, *ids.shape[-2:]):
        factors, _, sign = _lu(low, matrix)
        diagonal = [int(factors[i, i]) for i in range(len(factors))]
        if op.name.startswith("_linalg_det"):
            signs.append(reduce(v.mul, diagonal, sign))
        else:
            signs.append(reduce(v.mul, [sign_of(v, d) for d in diagonal], sign))
            logs.append(v.sum([v.function("log", v.function("abs", d)) for d in diagonal], kind))
    low.write(op.outputs[0], np.array(signs).reshape(op.outputs[0].shape))
    if logs:
        low.write(op.outputs[1], np.array(logs).reshape(op.outputs[1].shape))


@RULES.add("exponential_step")
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
