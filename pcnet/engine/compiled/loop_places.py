"""Places of elements in memory, and loops over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from pcnet.engine.compiled.ir import Function
from pcnet.engine.compiled.trace import Ref


def contiguous(ref: Ref) -> Ref:
    """The same shape, row after row from 0 on."""
    strides = tuple(itertools.accumulate((1, *ref.shape[:0:-1]), lambda a, b: a * b))[::-1] if ref.shape else ()
    return ref._replace(offset=0, strides=strides)


def is_contiguous(ref: Ref) -> bool:
    return all(a == b or n == 1 for a, b, n in zip(ref.strides, contiguous(ref).strides, ref.shape, strict=True))


def positions(ref: Ref) -> list[int]:
    """The places of all elements in the storage."""
    found = np.full(ref.shape, ref.offset, dtype=np.int64)
    for axis, (length, stride) in enumerate(zip(ref.shape, ref.strides, strict=True)):
        found += (np.arange(length) * stride).reshape([-1 if k == axis else 1 for k in range(len(ref.shape))])
    return [int(place) for place in found.flat]


def runs(items: Sequence[int]) -> list[tuple[int, int, int]]:
    """Integers as evenly spaced runs: first, step, count."""
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < len(items):
        step = items[at + 1] - items[at] if at + 1 < len(items) else 1
        end = at + 1
        while end < len(items) and items[end] - items[end - 1] == step:
            end += 1
        found.append((items[at], step, end - at))
        at = end
    return found


def unmerged(out: Ref, args: Sequence[Ref]) -> tuple[list[int], list[list[int]]]:
    """Shape and strides of a loop nest over an output and its arguments."""
    strides = [list(out.strides)]
    for arg in args:
        lead = len(out.shape) - len(arg.shape)
        strides.append([0] * lead + [0 if k == 1 else s for k, s in zip(arg.shape, arg.strides, strict=True)])
    return list(out.shape), strides


def merged(out: Ref, args: Sequence[Ref]) -> tuple[list[int], list[list[int]]]:
    """The same with as few dimensions as possible."""
    shape, strides = unmerged(out, args)
    axis = len(shape) - 2
    while axis >= 0:
        if shape[axis + 1] == 1 or all(each[axis] == each[axis + 1] * shape[axis + 1] for each in strides):
            for each in strides:
                each[axis] = each[axis + 1] if shape[axis + 1] != 1 else each[axis]
                del each[axis + 1]
            shape[axis] *= shape[axis + 1]
            del shape[axis + 1]
        axis -= 1
    return shape, strides


def plus(f: Function, index: str | int, number: int) -> str | int:
    if isinstance(index, int):
        return index + number
    return index if not number else f.put(f"add i64 {index}, {number}")


def offset_of(f: Function, index: Sequence[str], strides: Sequence[int], offset: int) -> str | int:
    """offset + Σ index · stride."""
    total: str | int = offset
    for at, stride in zip(index, strides, strict=True):
        if stride == 0 or at == "0":
            continue
        term = at if stride == 1 else f.put(f"mul i64 {at}, {stride}")
        total = plus(f, term, total) if isinstance(total, int) else f.put(f"add i64 {total}, {term}")
    return total


def address(f: Function, ref: Ref, index: Sequence[str]) -> str | int:
    return offset_of(f, index, ref.strides, ref.offset)


def cell(f: Function, row: str, columns: int, column: str) -> str:
    return f.put(f"add i64 {f.put(f'mul i64 {row}, {columns}')}, {column}")


@contextmanager
def nest(f: Function, shape: Sequence[int]) -> Iterator[list[str]]:
    """Nested loops over a shape; yields the counters."""
    with ExitStack() as stack:
        yield [stack.enter_context(f.loop(length)) if length != 1 else "0" for length in shape]


@contextmanager
def lower_triangles(f: Function, shape: Sequence[int]) -> Iterator[list[str]]:
    """Nested loops over the lower triangles of matrices (..., n, n); yields the counters."""
    with nest(f, shape[:-2]) as batch, f.loop(shape[-1]) as row, f.loop(f.put(f"add i64 {row}, 1")) as column:
        yield [*batch, row, column]
