"""Linear algebra as loops: products, factorisations and solutions, and calls of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from pcnet.engine.compiled import kernels
from pcnet.engine.compiled.algebra_rules import PIVOT
from pcnet.engine.compiled.errors import UntraceableError
from pcnet.engine.compiled.ir import Function, Module
from pcnet.engine.compiled.loop_places import address, cell, contiguous, nest, plus
from pcnet.engine.compiled.lowering import base_name, kind_of
from pcnet.engine.compiled.trace import Operation, Ref
from pcnet.engine.compiled.values import DOUBLE


class Memory(Protocol):
    """The memory of a program that is being written."""

    module: Module

    def load(self, f: Function, ref: Ref, index: Sequence[str]) -> str:
        """Load an element of a tensor."""

    def store(self, f: Function, value: str, ref: Ref, index: Sequence[str]) -> None:
        """Store an element of a tensor."""

    def load_vector(self, f: Function, ref: Ref, index: Sequence[str], lanes: int) -> str:
        """Load elements that lie side by side, from one on."""

    def store_vector(self, f: Function, value: str, ref: Ref, index: Sequence[str], lanes: int) -> None:
        """Store elements that lie side by side, from one on."""

    def is_lower_only(self, op: Operation) -> bool:
        """Whether of a product only the lower triangle is needed."""

    def inner_indices(self, op: Operation) -> Sequence[int]:
        """The k for which A_ik B_kj of a product is not always zero."""

    def each(self, f: Function, items: Sequence[int]) -> AbstractContextManager[str]:
        """A loop over some integers."""

    def copied(self, f: Function, ref: Ref, batch: Sequence[str]) -> str:
        """A matrix of a batch in memory of its own, row after row."""

    def put_back(self, f: Function, space: str, ref: Ref, batch: Sequence[str], *, turned: bool = False) -> None:
        """Copy a matrix from memory of its own."""


WRITERS: dict[str, Callable[[Memory, Function, Operation], None]] = {}


def _writes(*names: str) -> Callable[[Any], Any]:
    def keep(function: Any) -> Any:
        WRITERS.update(dict.fromkeys(names, function))
        return function

    return keep


def _only_double(op: Operation) -> None:
    if any(kind_of(ref.dtype) != DOUBLE for ref in op.outputs[:1]):
        raise UntraceableError(f"{op.name} in single precision has no loop")


def _widened(ref: Ref) -> Ref:
    """A matrix as a batch of one."""
    return ref._replace(shape=(1, *ref.shape), strides=(0, *ref.strides)) if len(ref.shape) == 2 else ref


class _Product(NamedTuple):
    """A B + C as a batch of matrices; C may be None.

    lower: whether only the lower triangle is needed. inner: the k for which A_ik B_kj is not always zero.
    """

    a: Ref
    b: Ref
    added: Ref | None
    out: Ref
    lower: bool
    inner: Sequence[int]


@_writes("bmm", "mm", "baddbmm", "addmm")
def _product(p: Memory, f: Function, op: Operation) -> None:
    """A matrix product by tiles of rows and columns whose sums stay in registers."""
    _only_double(op)
    if op.kwargs.get("beta", 1) != 1 or op.kwargs.get("alpha", 1) != 1:
        raise UntraceableError(f"{op.name} with factors")
    added = op.args[0] if base_name(op.name) in ("baddbmm", "addmm") else None
    a, b = (_widened(ref) for ref in op.args[-2:])
    out = _widened(op.outputs[0])
    count, rows, _ = out.shape
    if added is not None:
        lead = 3 - len(added.shape)
        steps = [0] * lead + [0 if n == 1 else s for n, s in zip(added.shape, added.strides, strict=True)]
        added = added._replace(shape=out.shape, strides=tuple(steps))
    inner = p.inner_indices(op)
    every = range(a.shape[2])
    product = _Product(a, b, added, out, p.is_lower_only(op), every if len(inner) == len(every) else inner)
    with nest(f, (count,)) as (batch,):
        whole, rest = divmod(rows, TILE)
        if whole:
            with f.loop(whole) as i:
                first = f.put(f"mul i64 {i}, {TILE}")
                _rows_of_product(p, f, product, batch, first, TILE)
        if rest:
            _rows_of_product(p, f, product, batch, whole * TILE, rest)


TILE = 4
"""Rows of a product whose sums are in registers at the same time."""


def _rows_of_product(
    p: Memory,
    f: Function,
    product: _Product,
    batch: str,
    first: str | int,
    rows: int,
) -> None:
    """Some rows of A B + C."""
    _, b, added, out, lower, _ = product
    columns, start = out.shape[-1], 0
    together = all(ref is None or ref.strides[-1] == 1 or columns == 1 for ref in (b, added, out))
    if f.module.width == 1 and together:
        for lanes, vectors in ((8, 2), (8, 1), (4, 1)):
            width = lanes * vectors
            tiles = (columns - start) // width
            if tiles:
                needed: str | int = tiles
                if lower:  # tiles that begin before the last of the rows
                    end = plus(f, first, rows - start + width - 1)
                    end = f.put(f"sdiv i64 {end}, {width}")
                    needed = f.put(f"call i64 @llvm.smin.i64(i64 {end}, i64 {tiles})")
                    f.module.declare("i64 @llvm.smin.i64(i64, i64)")
                with f.loop(needed) as tile:
                    at = plus(f, f.put(f"mul i64 {tile}, {width}"), start)
                    _tile(p, f, product, batch, (first, rows), (at, vectors), lanes)
                start += tiles * width
    while start < columns:
        width = min(TILE, columns - start)
        tiles = (columns - start) // width
        with f.loop(tiles) as tile:
            at = plus(f, f.put(f"mul i64 {tile}, {width}"), start)
            _tile(p, f, product, batch, (first, rows), (at, width), 1)
        start += tiles * width


def _tile(
    p: Memory,
    f: Function,
    product: _Product,
    batch: str,
    rows: tuple[str | int, int],
    columns: tuple[str | int, int],
    lanes: int,
) -> None:
    """Some rows and columns of A B + C.

    Args:
        rows: The first and their number.
        columns: The first and the number of vectors.
        lanes: Columns in a vector; 1 if it holds batch elements, or a single number.
    """
    a, b, added, out = product[:4]
    m = f.module
    vector = m.vector(DOUBLE) if lanes == 1 else f"<{lanes} x double>"
    row_places = [str(plus(f, rows[0], k)) for k in range(rows[1])]
    column_places = [str(plus(f, columns[0], k * lanes)) for k in range(columns[1])]

    def load(ref: Ref, row: str, column: str) -> str:
        return (
            p.load(f, ref, [batch, row, column]) if lanes == 1 else p.load_vector(f, ref, [batch, row, column], lanes)
        )

    sums = {(i, j): f.place(vector) for i in row_places for j in column_places}
    zero = m.number(0.0) if lanes == 1 else "zeroinitializer"
    for (i, j), total in sums.items():
        f.keep(vector, zero if added is None else load(added, i, j), total)
    with p.each(f, product.inner) as k:
        others = {j: load(b, k, j) for j in column_places}
        for i in row_places:
            factor = p.load(f, a, [batch, i, k])
            factor = factor if lanes == 1 else f.broadcast(factor, lanes)
            for j in column_places:
                total = sums[i, j]
                f.keep(vector, f.fused(vector, factor, others[j], f.kept(vector, total)), total)
    for (i, j), total in sums.items():
        value = f.kept(vector, total)
        if lanes == 1:
            p.store(f, value, out, [batch, i, j])
        else:
            p.store_vector(f, value, out, [batch, i, j], lanes)


@_writes("mirrored")
def _mirrored(p: Memory, f: Function, op: Operation) -> None:
    source, out = op.args[0], op.outputs[0]
    with nest(f, out.shape[:-2]) as batch, f.loop(out.shape[-1]) as i:
        if source != out:
            p.store(f, p.load(f, source, [*batch, i, i]), out, [*batch, i, i])
        with f.loop(i) as j:
            value = p.load(f, source, [*batch, i, j])
            if source != out:
                p.store(f, value, out, [*batch, i, j])
            p.store(f, value, out, [*batch, j, i])


def _subtract_row(
    f: Function, space: str, columns: int, target: str, source: str, factor: str, first: str | int
) -> None:
    """Row `target` −= factor · row `source`, from column `first` on."""
    with f.loop(columns, first) as j:
        at = cell(f, target, columns, j)
        f.store(f.sub(f.load(space, at), f.mul(factor, f.load(space, cell(f, source, columns, j)))), space, at)


@_writes("linalg_cholesky_ex")
def _cholesky(p: Memory, f: Function, op: Operation) -> None:
    """The transposed factor U row by row, in place of the upper triangle."""
    _only_double(op)
    m, source, out = p.module, op.args[0], op.outputs[0]
    n = source.shape[-1]
    upper = op.kwargs.get("upper", op.args[1] if len(op.args) > 1 else False)
    failed = f.room(1)
    with nest(f, source.shape[:-2]) as batch:
        turned = source._replace(
            strides=(*source.strides[:-2], source.strides[-1], source.strides[-2])
        )  # the lower triangle is read
        space = p.copied(f, turned, batch)
        diagonal = f.room(n)
        f.store(m.number(0.0), failed, 0)
        with f.loop(n) as k:
            f.store(f.load(space, cell(f, k, n, k)), diagonal, k)
        with f.loop(n) as k:
            at = cell(f, k, n, k)
            pivot = f.load(space, at)
            edge = f.mul(f.function("abs", f.load(diagonal, k)), m.number(PIVOT))
            f.leave_unless_condition(f.all_lanes(f.compare("uge", f.function("abs", pivot), edge)))
            negative = f.compare("ule", pivot, m.number(0.0))
            f.store(f.select(negative, m.number(1.0), f.load(failed, 0)), failed, 0)
            root = f.function("sqrt", pivot)
            f.store(root, space, at)
            inverse = f.arithmetic("div", m.number(1.0), root)
            following = f.put(f"add i64 {k}, 1")
            with f.loop(n, following) as j:
                place = cell(f, k, n, j)
                f.store(f.mul(f.load(space, place), inverse), space, place)
            with f.loop(n, following) as i:
                _subtract_row(f, space, n, i, k, f.load(space, cell(f, k, n, i)), i)
        with f.loop(n) as i, f.loop(i) as j:
            f.store(m.number(0.0), space, cell(f, i, n, j))
        p.put_back(f, space, out, batch, turned=not upper)
        p.store(f, f.load(failed, 0), op.outputs[1], batch)


def _solve_lower(f: Function, factor: str, n: int, right: str, columns: int, *, unit: bool = False) -> None:
    """right ← L⁻¹ right, for L row after row."""
    m = f.module
    with f.loop(n) as i:
        with f.loop(i) as k:
            weight = f.load(factor, cell(f, i, n, k))
            _subtract_row(f, right, columns, i, k, weight, 0)
        if not unit:
            _scale_row(f, right, columns, i, f.arithmetic("div", m.number(1.0), f.load(factor, cell(f, i, n, i))))


def _solve_upper(f: Function, factor: str, n: int, right: str, columns: int, *, turned: bool) -> None:
    """right ← U⁻¹ right, for U row after row, or for the transpose of a lower factor."""
    m = f.module
    with f.loop(n) as back:
        i = f.put(f"sub i64 {n - 1}, {back}")
        with f.loop(n, f.put(f"add i64 {i}, 1")) as k:
            weight = f.load(factor, cell(f, k, n, i) if turned else cell(f, i, n, k))
            _subtract_row(f, right, columns, i, k, weight, 0)
        _scale_row(f, right, columns, i, f.arithmetic("div", m.number(1.0), f.load(factor, cell(f, i, n, i))))


def _scale_row(f: Function, space: str, columns: int, row: str, factor: str) -> None:
    with f.loop(columns) as j:
        at = cell(f, row, columns, j)
        f.store(f.mul(f.load(space, at), factor), space, at)


def _eye(f: Function, n: int) -> str:
    space = f.room(n * n)
    with f.loop(n * n) as k:
        f.store(f.module.number(0.0), space, k)
    with f.loop(n) as k:
        f.store(f.module.number(1.0), space, cell(f, k, n, k))
    return space


@_writes("cholesky_inverse", "cholesky_solve")
def _cholesky_solve(p: Memory, f: Function, op: Operation) -> None:
    _only_double(op)
    inverse = base_name(op.name) == "cholesky_inverse"
    factor, out = op.args[0 if inverse else 1], op.outputs[0]
    n, columns = out.shape[-2:]
    upper = op.kwargs.get("upper", op.args[1 if inverse else 2] if len(op.args) > (1 if inverse else 2) else False)
    if upper:
        factor = factor._replace(strides=(*factor.strides[:-2], factor.strides[-1], factor.strides[-2]))
    with nest(f, out.shape[:-2]) as batch:
        lower = p.copied(f, factor, _batch_of(factor, batch))
        right = _eye(f, n) if inverse else p.copied(f, op.args[0], _batch_of(op.args[0], batch))
        _solve_lower(f, lower, n, right, columns)
        _solve_upper(f, lower, n, right, columns, turned=True)
        p.put_back(f, right, out, batch)


def _batch_of(ref: Ref, batch: Sequence[str]) -> list[str]:
    """The batch index of a matrix that is broadcast over a batch."""
    lead = len(ref.shape) - 2
    return ["0" if n == 1 else i for n, i in zip(ref.shape[:-2], batch[len(batch) - lead :], strict=True)]


@_writes("linalg_solve_triangular")
def _solve_triangular(p: Memory, f: Function, op: Operation) -> None:
    _only_double(op)
    if not op.kwargs.get("left", True) or op.kwargs.get("unitriangular", False):
        raise UntraceableError(f"{op.name} of this form has no loop")
    factor, right, out = op.args[0], op.args[1], op.outputs[0]
    n, columns = out.shape[-2:]
    with nest(f, out.shape[:-2]) as batch:
        matrix = p.copied(f, factor, _batch_of(factor, batch))
        space = p.copied(f, right, _batch_of(right, batch))
        if op.kwargs["upper"]:
            _solve_upper(f, matrix, n, space, columns, turned=False)
        else:
            _solve_lower(f, matrix, n, space, columns)
        p.put_back(f, space, out, batch)


def _lu(p: Memory, f: Function, matrix: str, n: int, right: str | None, columns: int, sign: str | None) -> None:
    """LU factors in place, with partial pivoting; rows of the right-hand side are exchanged along."""
    m = p.module
    with f.loop(n) as k:
        diagonal = cell(f, k, n, k)
        following = f.put(f"add i64 {k}, 1")
        with f.loop(n, following) as i:
            one, other = f.load(matrix, diagonal), f.load(matrix, cell(f, i, n, k))
            swap = f.compare("ogt", f.function("abs", other), f.function("abs", one))
            if sign is not None:
                now = f.load(sign, 0)
                f.store(f.select(swap, f.put(f"fneg {m.vector(DOUBLE)} {now}"), now), sign, 0)
            for space, width in ((matrix, n), (right, columns)):
                if space is None:
                    continue
                with f.loop(width) as j:
                    first, second = cell(f, k, width, j), cell(f, i, width, j)
                    x, y = f.load(space, first), f.load(space, second)
                    f.store(f.select(swap, y, x), space, first)
                    f.store(f.select(swap, x, y), space, second)
        pivot = f.load(matrix, diagonal)
        f.leave_unless_condition(f.all_lanes(f.compare("une", pivot, m.number(0.0))))
        inverse = f.arithmetic("div", m.number(1.0), pivot)
        with f.loop(n, following) as i:
            at = cell(f, i, n, k)
            factor = f.mul(f.load(matrix, at), inverse)
            f.store(factor, matrix, at)
            _subtract_row(f, matrix, n, i, k, factor, following)


@_writes("_linalg_solve_ex", "linalg_inv_ex")
def _solve(p: Memory, f: Function, op: Operation) -> None:
    _only_double(op)
    out, matrix = op.outputs[0], op.args[0]
    inverse = base_name(op.name) == "linalg_inv_ex"
    if not op.kwargs.get("left", True):
        raise UntraceableError("linalg.solve from the right")
    right = None if inverse else op.args[1]
    if right is not None and len(right.shape) == len(matrix.shape) - 1:
        right = right._replace(shape=(*right.shape, 1), strides=(*right.strides, 1))
        out = out._replace(shape=(*out.shape, 1), strides=(*out.strides, 1))
    n, columns = out.shape[-2:]
    with nest(f, out.shape[:-2]) as batch:
        factors = p.copied(f, matrix, _batch_of(matrix, batch))
        space = _eye(f, n) if right is None else p.copied(f, right, _batch_of(right, batch))
        _lu(p, f, factors, n, space, columns, None)
        _solve_lower(f, factors, n, space, columns, unit=True)
        _solve_upper(f, factors, n, space, columns, turned=False)
        p.put_back(f, space, out, batch)
        info = op.outputs[-1]
        p.store(f, p.module.number(0.0), info, _batch_index(info, batch))


def _batch_index(ref: Ref, batch: Sequence[str]) -> list[str]:
    return list(batch[len(batch) - len(ref.shape) :])


@_writes("linalg_lu_factor_ex")
def _lu_factor(p: Memory, f: Function, op: Operation) -> None:
    _only_double(op)
    out = op.outputs[0]
    with nest(f, out.shape[:-2]) as batch:
        space = p.copied(f, op.args[0], batch)
        _lu(p, f, space, out.shape[-1], None, 0, None)
        p.put_back(f, space, out, batch)
        p.store(f, p.module.number(0.0), op.outputs[2], batch)


@_writes("_linalg_slogdet", "_linalg_det")
def _slogdet(p: Memory, f: Function, op: Operation) -> None:
    _only_double(op)
    m, source = p.module, op.args[0]
    n, det = source.shape[-1], base_name(op.name) == "_linalg_det"
    sign, total = f.room(1), f.room(1)
    with nest(f, source.shape[:-2]) as batch:
        space = p.copied(f, source, batch)
        f.store(m.number(1.0), sign, 0)
        f.store(m.number(0.0), total, 0)
        _lu(p, f, space, n, None, 0, sign)
        with f.loop(n) as k:
            value = f.load(space, cell(f, k, n, k))
            if det:
                f.store(f.mul(f.load(sign, 0), value), sign, 0)
            else:
                now = f.load(sign, 0)
                turned = f.put(f"fneg {m.vector(DOUBLE)} {now}")
                f.store(f.select(f.compare("olt", value, m.number(0.0)), turned, now), sign, 0)
                f.store(f.add(f.load(total, 0), f.function("log", f.function("abs", value))), total, 0)
        p.store(f, f.load(sign, 0), op.outputs[0], batch)
        if not det:
            p.store(f, f.load(total, 0), op.outputs[1], batch)


@_writes("exponential_step")
def _exponential_step(p: Memory, f: Function, op: Operation) -> None:
    jacobian, flow, time = op.args
    n = flow.shape[-1]
    _call(p, f, "exponential_step", n, [jacobian, flow, time], [op.outputs[0]])


@_writes("_linalg_eigh")
def _eigh(p: Memory, f: Function, op: Operation) -> None:
    _call(p, f, "eigh", op.args[0].shape[-1], [op.args[0]], [ref for ref in op.outputs if ref.size])


def _call(p: Memory, f: Function, kernel: str, n: int, args: Sequence[Ref], outs: Sequence[Ref]) -> None:
    """Call a kernel for each element of the leading dimension."""
    given, made = kernels.SIZES[kernel](n)
    space = f.room(given + made)
    with f.loop(args[0].shape[0]) as batch:
        start = 0
        for refs, store in ((args, True), (outs, False)):
            for ref in refs:
                inner = contiguous(ref._replace(shape=ref.shape[1:], strides=ref.strides[1:]))
                with nest(f, ref.shape[1:]) as index:
                    at = plus(f, address(f, inner, index), start)
                    first = "0" if ref.shape[0] == 1 else batch
                    if store:
                        f.store(p.load(f, ref, [first, *index]), space, at, kind_of(ref.dtype))
                    else:
                        p.store(f, f.load(space, at, kind_of(ref.dtype)), ref, [first, *index])
                start += inner.size
            if store:
                f.do(f"call void @{kernels.KERNELS[kernel](p.module, n)}(ptr {space})")


@_writes("cumsum")
def _cumsum(p: Memory, f: Function, op: Operation) -> None:
    _only_double(op)
    source, out = op.args[0], op.outputs[0]
    axis = op.args[1] % len(out.shape)
    space = f.room(1)
    rest = [k for k in range(len(out.shape)) if k != axis]
    with nest(f, [out.shape[k] for k in rest]) as outer:
        f.store(p.module.number(0.0), space, 0)
        with f.loop(out.shape[axis]) as at:
            index = dict(zip(rest, outer, strict=True)) | {axis: at}
            place = [index[k] for k in range(len(out.shape))]
            value = p.load(f, source, place)
            if source.dtype == torch.bool:  # a sum of truths is a number
                value = f.select(value, p.module.number(1.0), p.module.number(0.0))
            total = f.add(f.load(space, 0), value)
            f.store(total, space, 0)
            p.store(f, total, out, place)


@_writes("_softmax")
def _softmax(p: Memory, f: Function, op: Operation) -> None:
    _only_double(op)
    m, source, out = p.module, op.args[0], op.outputs[0]
    axis = op.args[1] % len(out.shape)
    rest = [k for k in range(len(out.shape)) if k != axis]
    largest, total = f.room(1), f.room(1)
    with nest(f, [out.shape[k] for k in rest]) as outer:

        def index(at: str) -> list[str]:
            found = dict(zip(rest, outer, strict=True)) | {axis: at}
            return [found[k] for k in range(len(out.shape))]

        f.store(p.load(f, source, index("0")), largest, 0)
        f.store(m.number(0.0), total, 0)
        with f.loop(out.shape[axis]) as at:
            value, most = p.load(f, source, index(at)), f.load(largest, 0)
            f.store(f.select(f.compare("ugt", value, most), value, most), largest, 0)
        with f.loop(out.shape[axis]) as at:
            grown = f.function("exp", f.sub(p.load(f, source, index(at)), f.load(largest, 0)))
            f.store(f.add(f.load(total, 0), grown), total, 0)
            p.store(f, grown, out, index(at))
        with f.loop(out.shape[axis]) as at:
            p.store(f, f.arithmetic("div", p.load(f, out, index(at)), f.load(total, 0)), out, index(at))
