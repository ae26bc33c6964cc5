"""A recorded tick as LLVM code with one loop nest for each operation, for ticks that are too large as scalars.

What an operation does to one element comes from its rule in `scalar_rules`: element by element for arithmetic, as a
map of places for operations that only move elements. Sums, products and factorisations are written here as loops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from pcnet.engine.compiled import kernels
from pcnet.engine.compiled.ir import Function, Module, literal
from pcnet.engine.compiled.scalar_code import PARAMETERS, ValueWriter, Written
from pcnet.engine.compiled.scalar_rules import PIVOT, RULES, Lowering, base_name, kind_of
from pcnet.engine.compiled.trace import Operation, Ref, Storage, Trace, UntraceableError
from pcnet.engine.compiled.values import BOOL, DOUBLE, Values

MOVES = frozenset(
    ("cat", "stack", "constant_pad_nd", "roll", "flip", "repeat", "diag_embed", "tril", "triu", "slice_backward")
) | {"select_backward", "index", "index_put", "_index_put_impl", "index_select"}
"""Operations that only move elements."""
FOLDS: Mapping[str, tuple[float, str]] = {
    "sum": (0.0, "add"),
    "mean": (0.0, "add"),
    "prod": (1.0, "mul"),
    "all": (1.0, "both"),
    "any": (0.0, "either"),
    "amax": (-math.inf, "maximum"),
    "amin": (math.inf, "minimum"),
    "max": (-math.inf, "maximum"),
    "min": (math.inf, "minimum"),
}
"""Reductions: where they start, and the function of `Values` that takes in one element."""
MAY_FAIL = frozenset(
    ("linalg_cholesky_ex", "_linalg_solve_ex", "linalg_inv_ex", "linalg_lu_factor_ex", "_linalg_slogdet", "_linalg_det")
)
"""Operations that end the tick for some values."""


class Place(NamedTuple):
    """Where a storage is: memory, from an element on; numbers: whether it holds single numbers for all lanes."""

    base: str
    start: int
    numbers: bool = False


def write(module: Module, trace: Trace, parts: Mapping[str, Mapping[str, int]], largest: float) -> Written:
    """Write the functions `prepare` and `tick` into a module.

    Args:
        module: The module.
        trace: The recorded tick.
        parts: For "state", "given", "settings" and "record": by name, the first place of each tensor.
        largest: Numbers of the state that are larger than this end the tick.
    """
    return _Program(module, trace, parts, largest).write()


class _Program:
    def __init__(self, module: Module, trace: Trace, parts: Mapping[str, Mapping[str, int]], largest: float) -> None:
        self.module, self.trace, self.parts, self.largest = module, trace, parts, largest
        self.operations = self._needed()
        self.kept = {
            name for name in parts["state"] if trace.outputs[f"state/{name}"] == trace.inputs.get(f"state/{name}")
        }
        self.steady = self._steady()
        self.places, self.derived = self._placed()
        self._tables: dict[bytes, str] = {}

    # --- analysis ------------------------------------------------------------------------------------------------
    def _needed(self) -> list[Operation]:
        """The operations that outputs or guards depend on, in order."""
        wanted = {ref.storage for ref in self.trace.outputs.values()}
        found = []
        for operation in reversed(self.trace.operations):
            if operation.name == "guard" or any(ref.storage in wanted for ref in operation.outputs):
                found.append(operation)
                wanted |= {ref.storage for ref in _refs(operation)}
        return found[::-1]

    def _steady(self) -> set[int]:
        """Storages that only slow ticks change."""
        storages = self.trace.storages
        changing = {
            place
            for place, storage in enumerate(storages)
            if storage.source == "input"
            and not storage.name.startswith("settings/")
            and storage.name.removeprefix("state/") not in self.kept
        }
        grown = True
        while grown:
            grown = False
            for operation in self.operations:
                if any(ref.storage in changing for ref in _refs(operation)):
                    new = {ref.storage for ref in operation.outputs} - changing
                    grown = grown or bool(new)
                    changing |= new
        return set(range(len(storages))) - changing

    def _placed(self) -> tuple[dict[int, Place], int]:
        """Memory for all storages: steady ones first, then others, which share memory when they are no longer used."""
        places: dict[int, Place] = {}
        written = {ref.storage for operation in self.operations for ref in operation.outputs}
        last: dict[int, int] = {}
        first: dict[int, int] = {}
        for number, operation in enumerate(self.operations):
            for ref in (*_refs(operation), *operation.outputs):
                last[ref.storage] = number
                first.setdefault(ref.storage, number)
        for ref in self.trace.outputs.values():
            last[ref.storage] = len(self.operations)
            first.setdefault(ref.storage, 0)
        end = 0
        ending: dict[int, list[int]] = {}
        for place in first:
            storage = self.trace.storages[place]
            if storage.source == "input" and place not in written and not self._is_view(storage):
                part, _, name = storage.name.partition("/")
                places[place] = Place(f"%{part}", self.parts[part][name])
            elif storage.source == "constant" and place not in written:
                places[place] = Place(self._constant(storage), 0, numbers=True)
            elif place in self.steady:
                places[place] = Place("%derived", end)
                end += storage.size
        free: list[tuple[int, int]] = []
        for place in sorted(set(first) - set(places), key=first.__getitem__):
            now, size = first[place], self.trace.storages[place].size
            for done in [number for number in ending if number < now]:
                free += [(places[old].start, self.trace.storages[old].size) for old in ending.pop(done)]
            fitting = [block for block in free if size <= block[1] <= 4 * size + 16]
            if fitting and self.trace.storages[place].source == "computed":
                block = min(fitting, key=lambda each: each[1])
                free.remove(block)
                places[place] = Place("%derived", block[0])
            else:
                places[place] = Place("%derived", end)
                end += size
            if self.trace.storages[place].source == "computed":
                ending.setdefault(last[place], []).append(place)
        return places, end

    def _is_view(self, storage: Storage) -> bool:
        ref = self.trace.inputs[storage.name]
        return ref.offset != 0 or ref.size != storage.size or not _is_contiguous(ref)

    def _constant(self, storage: Storage) -> str:
        assert storage.values is not None
        values = storage.values.to(torch.float64).tolist()
        return self._global("double", [literal(value) for value in values])

    def _global(self, type_: str, items: Sequence[str]) -> str:
        text = ", ".join(f"{type_} {item}" for item in items)
        return self.module.array(type_, len(items), text)

    # --- writing -------------------------------------------------------------------------------------------------
    def write(self) -> Written:
        signature = [f"ptr noalias %{name}" for name in PARAMETERS]
        f = Function(self.module, "prepare", signature)
        self._initialise(f, steady=True)
        for operation in self.operations:
            if operation.name != "guard" and all(ref.storage in self.steady for ref in operation.outputs):
                self._operation(f, operation)
        f.store(self.module.number(1.0), "%derived", self.derived)
        f.do("ret void")
        f.label("leave")
        f.store(self.module.number(0.0), "%derived", self.derived)
        f.do("ret void")
        f.finish(public=True)
        f = Function(self.module, "tick", signature, "i1")
        prepared = f.compare("oeq", f.load("%derived", self.derived), self.module.number(1.0))
        f.leave_unless_condition(f.all_lanes(prepared))
        self._initialise(f, steady=False)
        for operation in self.operations:
            if operation.name == "guard" or not all(ref.storage in self.steady for ref in operation.outputs):
                self._operation(f, operation)
        self._outputs(f)
        f.do("ret i1 true")
        f.label("leave")
        f.do("ret i1 false")
        f.finish(public=True)
        changes, depends = set(), set()
        for name, start in self.parts["state"].items():
            size = self.trace.outputs[f"state/{name}"].size
            if name not in self.kept:
                changes |= set(range(start, start + size))
            elif size:
                depends |= set(range(start, start + size))
        return Written(self.derived + 1, frozenset(depends), frozenset(changes))

    def _initialise(self, f: Function, *, steady: bool) -> None:
        """Fill memory that is written to later with the values that it has at first."""
        for place, where in self.places.items():
            storage = self.trace.storages[place]
            if where.base != "%derived" or storage.source == "computed" or (place in self.steady) != steady:
                continue
            if storage.values is not None and storage.size:
                table = Place(self._constant(storage), 0, numbers=True)
                with f.loop(storage.size) as k:
                    f.store(self._element(f, table, k, DOUBLE), where.base, _plus(f, k, where.start))
            if storage.source == "input":
                part, _, name = storage.name.partition("/")
                ref = self.trace.inputs[storage.name]
                source = _contiguous(ref)
                with _nest(f, ref.shape) as index:
                    value = f.load(f"%{part}", _plus(f, _at(f, source, index), self.parts[part][name]))
                    f.store(value, where.base, _plus(f, _at(f, ref, index), where.start))

    def _outputs(self, f: Function) -> None:
        for key, ref in self.trace.outputs.items():
            part, _, name = key.partition("/")
            target, start = (
                ("%new", self.parts["state"][name]) if part == "state" else ("%record", self.parts[part][name])
            )
            dense = _contiguous(ref)
            with _nest(f, ref.shape) as index:
                value = self._load(f, ref, index)
                f.store(value, target, _plus(f, _at(f, dense, index), start), kind_of(ref.dtype))
            if part == "state" and name not in self.kept and ref.dtype.is_floating_point and ref.size:
                self._check_size(f, start, torch.isfinite(self.trace.results[key]).flatten())

    def _check_size(self, f: Function, start: int, finite: torch.Tensor) -> None:
        m, wrong = self.module, f.flag()
        limit = m.number(self.largest)
        places = finite.nonzero()[:, 0].tolist()
        if not places:
            return
        for first, step, count in _runs(places):
            with f.loop(count) as k:
                at = _plus(f, f.put(f"mul i64 {k}, {step}"), first + start)
                size = f.function("abs", f.load("%new", at))
                f.lower(wrong, f.all_lanes(f.compare("olt", size, limit)))
        f.leave_unless(wrong)

    def _element(self, f: Function, where: Place, index: str | int, kind: str) -> str:
        """Load one element of a storage."""
        at = _plus(f, index, where.start)
        if not where.numbers:
            return f.load(where.base, at, kind)
        return f.load_number(where.base, at, kind)

    def _load(self, f: Function, ref: Ref, index: Sequence[str]) -> str:
        return self._element(f, self.places[ref.storage], _at(f, ref, index), kind_of(ref.dtype))

    def _store(self, f: Function, value: str, ref: Ref, index: Sequence[str]) -> None:
        where = self.places[ref.storage]
        f.store(value, where.base, _plus(f, _at(f, ref, index), where.start), kind_of(ref.dtype))

    def _operation(self, f: Function, op: Operation) -> None:
        """Call a function for an operation; operations of one form share it."""
        if op.name == "guard":
            condition = self._load(f, op.args[0], ["0"] * len(op.args[0].shape))
            if not op.kwargs["outcome"]:
                condition = f.put(f"xor {self.module.vector(BOOL)} {condition}, {self.module.truth(True)}")
            f.leave_unless_condition(f.all_lanes(condition))
            return
        base, places = base_name(op.name), self.places
        used = list(dict.fromkeys(ref.storage for ref in (*_refs(op), *op.outputs)))
        given = [f.pointer(places[storage].base, places[storage].start, places[storage].numbers) for storage in used]
        self.places = {storage: Place(f"%p{number}", 0, places[storage].numbers) for number, storage in enumerate(used)}
        inner = Function(self.module, base, [f"ptr noalias %p{number}" for number in range(len(used))], "i1")
        try:
            self._write_operation(inner, op)
        finally:
            self.places = places
        inner.do("ret i1 true")
        inner.label("leave")
        inner.do("ret i1 false")
        name = inner.finish_once()
        done = f.put(f"call i1 @{name}({', '.join(f'ptr {each}' for each in given)})")
        if base in MAY_FAIL:
            f.leave_unless_condition(done)

    def _write_operation(self, f: Function, op: Operation) -> None:
        base = base_name(op.name)
        if base in MOVES:
            self._move(f, op)
        elif base in FOLDS:
            self._fold(f, op, *FOLDS[base])
        elif base in _WRITERS:
            _WRITERS[base](self, f, op)
        elif base in RULES:
            self._elementwise(f, op)
        else:
            raise UntraceableError(f"the operation {op.name} has no loop")

    # --- elements ------------------------------------------------------------------------------------------------
    def _elementwise(self, f: Function, op: Operation) -> None:
        """An operation that does the same to each element."""
        out = op.outputs[0]
        args = [arg for arg in op.args if isinstance(arg, Ref)]
        args += [arg for name, arg in op.kwargs.items() if isinstance(arg, Ref) and name != "out"]
        if len(op.outputs) != 1 or any(len(arg.shape) > len(out.shape) for arg in args):
            raise UntraceableError(f"the operation {op.name} has no loop")
        values, ids, result = _one_element(op, args)
        shape, strides = _merged(out, args)
        with _nest(f, shape) as index:
            writer = ValueWriter(self.module, values, {})
            for arg, i, steps in zip(args, ids, strides[1:], strict=True):
                at = _sum(f, index, steps, arg.offset)
                writer.give(i, self._element(f, self.places[arg.storage], at, kind_of(arg.dtype)))
            writer.compute(f, values.needed([result]))
            where = self.places[out.storage]
            at = _plus(f, _sum(f, index, strides[0], out.offset), where.start)
            f.store(writer.name(result), where.base, at, kind_of(out.dtype))

    def _move(self, f: Function, op: Operation) -> None:
        """An operation that moves elements: for each element of the output, where it comes from."""
        out = op.outputs[0]
        values = Values()
        refs = _refs(op)
        low = _PlaceLowering(self.trace, refs, values)
        RULES[base_name(op.name)](low, op)
        ids = low.read(out).reshape(-1)
        targets = _positions(out)
        where = self.places[out.storage]
        grouped: dict[Any, list[tuple[int, int]]] = {}
        for target, i in zip(targets, ids.tolist(), strict=True):
            operation = values.operations[i]
            if operation[0] == "input":
                if (operation[1], operation[2]) != (out.storage, target):
                    grouped.setdefault(operation[1], []).append((target, operation[2]))
            elif operation[0] == "constant":
                grouped.setdefault(("constant", i), []).append((target, 0))
            else:
                raise UntraceableError(f"{op.name} by an index that depends on values")
        kind = kind_of(out.dtype)
        buffered = out.storage in grouped  # moves within one storage must not overwrite what is still to be read
        if buffered:
            raise UntraceableError(f"{op.name} within one piece of memory")
        for source, pairs in grouped.items():
            with self._pairs(f, pairs) as (to, origin):
                if isinstance(source, tuple):
                    known = values.known(source[1])
                    number = self.module.truth(known) if kind == BOOL else self.module.number(float(known), kind)
                    f.store(number, where.base, _plus(f, to, where.start), kind)
                else:
                    value = self._element(f, self.places[source], origin, kind)
                    f.store(value, where.base, _plus(f, to, where.start), kind)

    @contextmanager
    def _pairs(self, f: Function, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[str | int, str | int]]:
        """A loop over pairs of places."""
        targets, origins = [a for a, _ in pairs], [b for _, b in pairs]
        with f.loop(len(pairs)) as k:
            found: list[str | int] = []
            for items in (targets, origins):
                runs = _runs(items)
                if len(runs) == 1:
                    found.append(_plus(f, f.put(f"mul i64 {k}, {runs[0][1]}"), runs[0][0]))
                else:
                    table = self._global("i64", list(map(str, items)))
                    found.append(f.put(f"load i64, ptr {f.address(table, k, 'i64')}, align 8"))
            yield found[0], found[1]

    def _fold(self, f: Function, op: Operation, start: float, combine: str) -> None:
        """A reduction, element after element."""
        out, source = op.outputs[0], op.args[0]
        dims = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
        n = len(source.shape)
        axes = range(n) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
        reduced = sorted({axis % max(1, n) for axis in axes}) if n else []
        rest = [axis for axis in range(n) if axis not in reduced]
        kind = kind_of(out.dtype)
        values = Values()
        total, item = values.new(kind, "input", "total", 0), values.new(kind_of(source.dtype), "input", "item", 0)
        made = getattr(values, combine)(total, values.cast(item, kind))
        space = f.room(1)
        keep = len(out.shape) == n
        m = self.module
        with _nest(f, [source.shape[axis] for axis in rest]) as outer:
            f.store(m.truth(start != 0) if kind == BOOL else m.number(start, kind), space, 0, kind)
            with _nest(f, [source.shape[axis] for axis in reduced]) as inner:
                index = dict(zip(rest, outer, strict=True)) | dict(zip(reduced, inner, strict=True))
                writer = ValueWriter(m, values, {})
                writer.give(total, f.load(space, 0, kind))
                writer.give(item, self._load(f, source, [index[axis] for axis in range(n)]))
                writer.compute(f, values.needed([made]))
                f.store(writer.name(made), space, 0, kind)
            place = dict(zip(rest, outer, strict=True))
            at = [place.get(axis, "0") for axis in range(n)] if keep else [place[axis] for axis in rest]
            found = f.load(space, 0, kind)
            if base_name(op.name) == "mean":
                count = math.prod(source.shape[axis] for axis in reduced)
                found = f.arithmetic("div", found, m.number(float(count), kind), kind)
            self._store(f, found, out, at)

    # --- linear algebra ------------------------------------------------------------------------------------------
    def copied(self, f: Function, ref: Ref, batch: Sequence[str]) -> str:
        """A matrix of a batch in memory of its own, row after row."""
        rows, columns = ref.shape[-2:]
        space = f.room(rows * columns)
        with _nest(f, (rows, columns)) as (i, j):
            value = self._load(f, ref, [*batch, i, j])
            f.store(value, space, _at2(f, i, columns, j), kind_of(ref.dtype))
        return space

    def put_back(self, f: Function, space: str, ref: Ref, batch: Sequence[str], *, turned: bool = False) -> None:
        """Copy a matrix from memory of its own."""
        rows, columns = ref.shape[-2:]
        with _nest(f, (rows, columns)) as (i, j):
            at = _at2(f, j, rows, i) if turned else _at2(f, i, columns, j)
            self._store(f, f.load(space, at, kind_of(ref.dtype)), ref, [*batch, i, j])


class _PlaceLowering(Lowering):
    """The memory of a trace in which each element is known by its place."""

    def __init__(self, trace: Trace, refs: Iterable[Ref], values: Values) -> None:
        self.values, self.trace = values, trace
        self._memory = [None] * len(trace.storages)
        for ref in refs:
            storage = trace.storages[ref.storage]
            if self._memory[ref.storage] is None:
                kind = kind_of(storage.dtype)
                if storage.source == "constant" and not ref.dtype.is_floating_point:  # an index
                    assert storage.values is not None
                    ids = [values.constant(value, kind) for value in storage.values.tolist()]
                else:
                    ids = [values.new(kind, "input", ref.storage, place) for place in range(storage.size)]
                self._memory[ref.storage] = np.array(ids, dtype=np.int64)


def _one_element(op: Operation, args: Sequence[Ref]) -> tuple[Values, list[int], int]:
    """What an operation does to one element: values, those of its arguments, and that of its result."""
    values, ids = Values(), []
    storages, replaced = [], {}
    for number, arg in enumerate(args):
        shape: tuple[int, ...] = (1,) if arg.shape else ()
        storages.append(Storage(1, arg.dtype, "computed"))
        replaced[arg] = Ref(number, 0, shape, (1,) * len(shape), arg.dtype)
        ids.append(values.new(kind_of(arg.dtype), "input", "argument", number))
    out = op.outputs[0]
    shape = (1,) if out.shape else ()
    storages.append(Storage(1, out.dtype, "computed"))
    single = Ref(len(args), 0, shape, (1,) * len(shape), out.dtype)
    renumbered = {arg: replaced[arg] for arg in args}
    one = Operation(
        op.name,
        tuple(renumbered.get(arg, arg) if isinstance(arg, Ref) else arg for arg in op.args),
        {
            name: renumbered.get(arg, arg) if isinstance(arg, Ref) else arg
            for name, arg in op.kwargs.items()
            if name != "out"
        },
        (single,),
    )
    low = _ElementLowering(storages, ids, values)
    RULES[base_name(op.name)](low, one)
    unique = dict(zip(args, ids, strict=True))
    return values, [unique[arg] for arg in args], int(low.read(single).reshape(()))


class _ElementLowering(Lowering):
    def __init__(self, storages: Sequence[Storage], ids: Sequence[int], values: Values) -> None:
        self.values = values
        self.trace = Trace(storages, (), {}, {}, {})
        self._memory = [np.array([i], dtype=np.int64) for i in (*ids, 0)]


# --- places ----------------------------------------------------------------------------------------------------------
def _refs(op: Operation) -> list[Ref]:
    found: list[Ref] = []
    waiting: list[Any] = [*op.args, *(value for name, value in op.kwargs.items() if name != "out")]
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, Ref):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            waiting = [*item, *waiting]
    if base_name(op.name) != op.name.partition(".")[0] and base_name(op.name) in ("copy", "fill", "zero"):
        return found[1:]  # what is overwritten is not read
    return found


def _contiguous(ref: Ref) -> Ref:
    """The same shape, row after row from 0 on."""
    strides = tuple(itertools.accumulate((1, *ref.shape[:0:-1]), lambda a, b: a * b))[::-1] if ref.shape else ()
    return ref._replace(offset=0, strides=strides)


def _is_contiguous(ref: Ref) -> bool:
    return all(a == b or n == 1 for a, b, n in zip(ref.strides, _contiguous(ref).strides, ref.shape, strict=True))


def _positions(ref: Ref) -> list[int]:
    """The places of all elements in the storage."""
    found = np.full(ref.shape, ref.offset, dtype=np.int64)
    for axis, (length, stride) in enumerate(zip(ref.shape, ref.strides, strict=True)):
        found += (np.arange(length) * stride).reshape([-1 if k == axis else 1 for k in range(len(ref.shape))])
    return [int(place) for place in found.flat]


def _runs(items: Sequence[int]) -> list[tuple[int, int, int]]:
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


def _merged(out: Ref, args: Sequence[Ref]) -> tuple[list[int], list[list[int]]]:
    """Shape and strides of a loop nest over an output and its arguments, with as few dimensions as possible."""
    n = len(out.shape)
    strides = [list(out.strides)]
    for arg in args:
        lead = n - len(arg.shape)
        strides.append([0] * lead + [0 if k == 1 else s for k, s in zip(arg.shape, arg.strides, strict=True)])
    shape = list(out.shape)
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


def _plus(f: Function, index: str | int, number: int) -> str | int:
    if isinstance(index, int):
        return index + number
    return index if not number else f.put(f"add i64 {index}, {number}")


def _sum(f: Function, index: Sequence[str], strides: Sequence[int], offset: int) -> str | int:
    """offset + Σ index · stride."""
    total: str | int = offset
    for at, stride in zip(index, strides, strict=True):
        if stride == 0 or at == "0":
            continue
        term = at if stride == 1 else f.put(f"mul i64 {at}, {stride}")
        total = _plus(f, term, total) if isinstance(total, int) else f.put(f"add i64 {total}, {term}")
    return total


def _at(f: Function, ref: Ref, index: Sequence[str]) -> str | int:
    return _sum(f, index, ref.strides, ref.offset)


def _at2(f: Function, row: str, columns: int, column: str) -> str:
    return f.put(f"add i64 {f.put(f'mul i64 {row}, {columns}')}, {column}")


@contextmanager
def _nest(f: Function, shape: Sequence[int]) -> Iterator[list[str]]:
    """Nested loops over a shape; yields the counters."""
    with ExitStack() as stack:
        yield [stack.enter_context(f.loop(length)) if length != 1 else "0" for length in shape]


# --- loops of linear algebra -----------------------------------------------------------------------------------------
_WRITERS: dict[str, Callable[[_Program, Function, Operation], None]] = {}


def _writes(*names: str) -> Callable[[Any], Any]:
    def keep(function: Any) -> Any:
        _WRITERS.update(dict.fromkeys(names, function))
        return function

    return keep


def _only_double(op: Operation) -> None:
    if any(kind_of(ref.dtype) != DOUBLE for ref in op.outputs[:1]):
        raise UntraceableError(f"{op.name} in single precision has no loop")


def _widened(ref: Ref) -> Ref:
    """A matrix as a batch of one."""
    return ref._replace(shape=(1, *ref.shape), strides=(0, *ref.strides)) if len(ref.shape) == 2 else ref


@_writes("bmm", "mm", "baddbmm", "addmm")
def _product(p: _Program, f: Function, op: Operation) -> None:
    _only_double(op)
    if op.kwargs.get("beta", 1) != 1 or op.kwargs.get("alpha", 1) != 1:
        raise UntraceableError(f"{op.name} with factors")
    added = op.args[0] if base_name(op.name) in ("baddbmm", "addmm") else None
    a, b = (_widened(ref) for ref in op.args[-2:])
    out = _widened(op.outputs[0])
    count, rows, columns = out.shape
    m = p.module
    if added is not None:
        lead = 3 - len(added.shape)
        steps = [0] * lead + [0 if n == 1 else s for n, s in zip(added.shape, added.strides, strict=True)]
        added = added._replace(shape=out.shape, strides=tuple(steps))
    row = f.room(columns)
    with _nest(f, (count,)) as (batch,):
        dense = p.copied(f, b, [batch])
        with f.loop(rows) as i:
            with f.loop(columns) as j:
                f.store(m.number(0.0) if added is None else p._load(f, added, [batch, i, j]), row, j)
            with f.loop(a.shape[2]) as k:
                factor = p._load(f, a, [batch, i, k])
                with f.loop(columns) as j:
                    other = f.load(dense, _at2(f, k, columns, j))
                    f.store(f.add(f.load(row, j), f.mul(factor, other)), row, j)
            with f.loop(columns) as j:
                p._store(f, f.load(row, j), out, [batch, i, j])


def _subtract_row(
    f: Function, space: str, columns: int, target: str, source: str, factor: str, first: str | int
) -> None:
    """Row `target` −= factor · row `source`, from column `first` on."""
    with f.loop(columns, first) as j:
        at = _at2(f, target, columns, j)
        f.store(f.sub(f.load(space, at), f.mul(factor, f.load(space, _at2(f, source, columns, j)))), space, at)


@_writes("linalg_cholesky_ex")
def _cholesky(p: _Program, f: Function, op: Operation) -> None:
    """The transposed factor U row by row, in place of the upper triangle."""
    _only_double(op)
    m, source, out = p.module, op.args[0], op.outputs[0]
    n = source.shape[-1]
    upper = op.kwargs.get("upper", op.args[1] if len(op.args) > 1 else False)
    failed = f.room(1)
    with _nest(f, source.shape[:-2]) as batch:
        turned = source._replace(
            strides=(*source.strides[:-2], source.strides[-1], source.strides[-2])
        )  # the lower triangle is read
        space = p.copied(f, turned, batch)
        diagonal = f.room(n)
        f.store(m.number(0.0), failed, 0)
        with f.loop(n) as k:
            f.store(f.load(space, _at2(f, k, n, k)), diagonal, k)
        with f.loop(n) as k:
            at = _at2(f, k, n, k)
            pivot = f.load(space, at)
            edge = f.mul(f.function("abs", f.load(diagonal, k)), m.number(PIVOT))
            f.leave_unless_condition(f.all_lanes(f.compare("uge", f.function("abs", pivot), edge)))
            negative = f.compare("ole", pivot, m.number(0.0))
            f.store(f.select(negative, m.number(1.0), f.load(failed, 0)), failed, 0)
            root = f.function("sqrt", pivot)
            f.store(root, space, at)
            inverse = f.arithmetic("div", m.number(1.0), root)
            following = f.put(f"add i64 {k}, 1")
            with f.loop(n, following) as j:
                place = _at2(f, k, n, j)
                f.store(f.mul(f.load(space, place), inverse), space, place)
            with f.loop(n, following) as i:
                _subtract_row(f, space, n, i, k, f.load(space, _at2(f, k, n, i)), i)
        with f.loop(n) as i, f.loop(i) as j:
            f.store(m.number(0.0), space, _at2(f, i, n, j))
        p.put_back(f, space, out, batch, turned=not upper)
        p._store(f, f.load(failed, 0), op.outputs[1], batch)


def _solve_lower(f: Function, factor: str, n: int, right: str, columns: int, *, unit: bool = False) -> None:
    """right ← L⁻¹ right, for L row after row."""
    m = f.module
    with f.loop(n) as i:
        with f.loop(i) as k:
            weight = f.load(factor, _at2(f, i, n, k))
            _subtract_row(f, right, columns, i, k, weight, 0)
        if not unit:
            _scale_row(f, right, columns, i, f.arithmetic("div", m.number(1.0), f.load(factor, _at2(f, i, n, i))))


def _solve_upper(f: Function, factor: str, n: int, right: str, columns: int, *, turned: bool) -> None:
    """right ← U⁻¹ right, for U row after row, or for the transpose of a lower factor."""
    m = f.module
    with f.loop(n) as back:
        i = f.put(f"sub i64 {n - 1}, {back}")
        with f.loop(n, f.put(f"add i64 {i}, 1")) as k:
            weight = f.load(factor, _at2(f, k, n, i) if turned else _at2(f, i, n, k))
            _subtract_row(f, right, columns, i, k, weight, 0)
        _scale_row(f, right, columns, i, f.arithmetic("div", m.number(1.0), f.load(factor, _at2(f, i, n, i))))


def _scale_row(f: Function, space: str, columns: int, row: str, factor: str) -> None:
    with f.loop(columns) as j:
        at = _at2(f, row, columns, j)
        f.store(f.mul(f.load(space, at), factor), space, at)


def _eye(f: Function, n: int) -> str:
    space = f.room(n * n)
    with f.loop(n * n) as k:
        f.store(f.module.number(0.0), space, k)
    with f.loop(n) as k:
        f.store(f.module.number(1.0), space, _at2(f, k, n, k))
    return space


@_writes("cholesky_inverse", "cholesky_solve")
def _cholesky_solve(p: _Program, f: Function, op: Operation) -> None:
    _only_double(op)
    inverse = base_name(op.name) == "cholesky_inverse"
    factor, out = op.args[0 if inverse else 1], op.outputs[0]
    n, columns = out.shape[-2:]
    upper = op.kwargs.get("upper", op.args[1 if inverse else 2] if len(op.args) > (1 if inverse else 2) else False)
    if upper:
        factor = factor._replace(strides=(*factor.strides[:-2], factor.strides[-1], factor.strides[-2]))
    with _nest(f, out.shape[:-2]) as batch:
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
def _solve_triangular(p: _Program, f: Function, op: Operation) -> None:
    _only_double(op)
    if not op.kwargs.get("left", True) or op.kwargs.get("unitriangular", False):
        raise UntraceableError(f"{op.name} of this form has no loop")
    factor, right, out = op.args[0], op.args[1], op.outputs[0]
    n, columns = out.shape[-2:]
    with _nest(f, out.shape[:-2]) as batch:
        matrix = p.copied(f, factor, _batch_of(factor, batch))
        space = p.copied(f, right, _batch_of(right, batch))
        if op.kwargs["upper"]:
            _solve_upper(f, matrix, n, space, columns, turned=False)
        else:
            _solve_lower(f, matrix, n, space, columns)
        p.put_back(f, space, out, batch)


def _lu(p: _Program, f: Function, matrix: str, n: int, right: str | None, columns: int, sign: str | None) -> None:
    """LU factors in place, with partial pivoting; rows of the right-hand side are exchanged along."""
    m = p.module
    with f.loop(n) as k:
        diagonal = _at2(f, k, n, k)
        following = f.put(f"add i64 {k}, 1")
        with f.loop(n, following) as i:
            one, other = f.load(matrix, diagonal), f.load(matrix, _at2(f, i, n, k))
            swap = f.compare("ogt", f.function("abs", other), f.function("abs", one))
            if sign is not None:
                now = f.load(sign, 0)
                f.store(f.select(swap, f.put(f"fneg {m.vector(DOUBLE)} {now}"), now), sign, 0)
            for space, width in ((matrix, n), (right, columns)):
                if space is None:
                    continue
                with f.loop(width) as j:
                    first, second = _at2(f, k, width, j), _at2(f, i, width, j)
                    x, y = f.load(space, first), f.load(space, second)
                    f.store(f.select(swap, y, x), space, first)
                    f.store(f.select(swap, x, y), space, second)
        pivot = f.load(matrix, diagonal)
        f.leave_unless_condition(f.all_lanes(f.compare("une", pivot, m.number(0.0))))
        inverse = f.arithmetic("div", m.number(1.0), pivot)
        with f.loop(n, following) as i:
            at = _at2(f, i, n, k)
            factor = f.mul(f.load(matrix, at), inverse)
            f.store(factor, matrix, at)
            _subtract_row(f, matrix, n, i, k, factor, following)


@_writes("_linalg_solve_ex", "linalg_inv_ex")
def _solve(p: _Program, f: Function, op: Operation) -> None:
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
    with _nest(f, out.shape[:-2]) as batch:
        factors = p.copied(f, matrix, _batch_of(matrix, batch))
        space = _eye(f, n) if right is None else p.copied(f, right, _batch_of(right, batch))
        _lu(p, f, factors, n, space, columns, None)
        _solve_lower(f, factors, n, space, columns, unit=True)
        _solve_upper(f, factors, n, space, columns, turned=False)
        p.put_back(f, space, out, batch)
        info = op.outputs[-1]
        p._store(f, p.module.number(0.0), info, _batch_index(info, batch))


def _batch_index(ref: Ref, batch: Sequence[str]) -> list[str]:
    return list(batch[len(batch) - len(ref.shape) :])


@_writes("linalg_lu_factor_ex")
def _lu_factor(p: _Program, f: Function, op: Operation) -> None:
    _only_double(op)
    out = op.outputs[0]
    with _nest(f, out.shape[:-2]) as batch:
        space = p.copied(f, op.args[0], batch)
        _lu(p, f, space, out.shape[-1], None, 0, None)
        p.put_back(f, space, out, batch)
        p._store(f, p.module.number(0.0), op.outputs[2], batch)


@_writes("_linalg_slogdet", "_linalg_det")
def _slogdet(p: _Program, f: Function, op: Operation) -> None:
    _only_double(op)
    m, source = p.module, op.args[0]
    n, det = source.shape[-1], base_name(op.name) == "_linalg_det"
    sign, total = f.room(1), f.room(1)
    with _nest(f, source.shape[:-2]) as batch:
        space = p.copied(f, source, batch)
        f.store(m.number(1.0), sign, 0)
        f.store(m.number(0.0), total, 0)
        _lu(p, f, space, n, None, 0, sign)
        with f.loop(n) as k:
            value = f.load(space, _at2(f, k, n, k))
            if det:
                f.store(f.mul(f.load(sign, 0), value), sign, 0)
            else:
                now = f.load(sign, 0)
                turned = f.put(f"fneg {m.vector(DOUBLE)} {now}")
                f.store(f.select(f.compare("olt", value, m.number(0.0)), turned, now), sign, 0)
                f.store(f.add(f.load(total, 0), f.function("log", f.function("abs", value))), total, 0)
        p._store(f, f.load(sign, 0), op.outputs[0], batch)
        if not det:
            p._store(f, f.load(total, 0), op.outputs[1], batch)


@_writes("exponential_step")
def _exponential_step(p: _Program, f: Function, op: Operation) -> None:
    jacobian, flow, time = op.args
    n = flow.shape[-1]
    _call(p, f, "exponential_step", n, [jacobian, flow, time], [op.outputs[0]])


@_writes("_linalg_eigh")
def _eigh(p: _Program, f: Function, op: Operation) -> None:
    _call(p, f, "eigh", op.args[0].shape[-1], [op.args[0]], [ref for ref in op.outputs if ref.size])


def _call(p: _Program, f: Function, kernel: str, n: int, args: Sequence[Ref], outs: Sequence[Ref]) -> None:
    """Call a kernel for each element of the leading dimension."""
    given, made = kernels.SIZES[kernel](n)
    space = f.room(given + made)
    with f.loop(args[0].shape[0]) as batch:
        start = 0
        for refs, store in ((args, True), (outs, False)):
            for ref in refs:
                inner = _contiguous(ref._replace(shape=ref.shape[1:], strides=ref.strides[1:]))
                with _nest(f, ref.shape[1:]) as index:
                    at = _plus(f, _at(f, inner, index), start)
                    first = "0" if ref.shape[0] == 1 else batch
                    if store:
                        f.store(p._load(f, ref, [first, *index]), space, at, kind_of(ref.dtype))
                    else:
                        p._store(f, f.load(space, at, kind_of(ref.dtype)), ref, [first, *index])
                start += inner.size
            if store:
                f.do(f"call void @{kernels.KERNELS[kernel](p.module, n)}(ptr {space})")


@_writes("cumsum")
def _cumsum(p: _Program, f: Function, op: Operation) -> None:
    _only_double(op)
    source, out = op.args[0], op.outputs[0]
    axis = op.args[1] % len(out.shape)
    space = f.room(1)
    rest = [k for k in range(len(out.shape)) if k != axis]
    with _nest(f, [out.shape[k] for k in rest]) as outer:
        f.store(p.module.number(0.0), space, 0)
        with f.loop(out.shape[axis]) as at:
            index = dict(zip(rest, outer, strict=True)) | {axis: at}
            place = [index[k] for k in range(len(out.shape))]
            total = f.add(f.load(space, 0), p._load(f, source, place))
            f.store(total, space, 0)
            p._store(f, total, out, place)
