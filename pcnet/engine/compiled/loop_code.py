"""A recorded tick as LLVM code with one loop nest for each operation, for ticks that are too large as scalars.

What an operation does to one element comes from its rule in `scalar_rules`: element by element for arithmetic, as a
map of places for operations that only move elements. Sums, products and factorisations are written here as loops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pcnet.engine.compiled import elementwise_rules
from pcnet.engine.compiled.errors import UntraceableError
from pcnet.engine.compiled.ir import Function, Module, literal
from pcnet.engine.compiled.known_zeros import PRODUCTS, KnownZeros
from pcnet.engine.compiled.loop_algebra import WRITERS
from pcnet.engine.compiled.loop_places import (
    address,
    cell,
    contiguous,
    is_contiguous,
    lower_triangles,
    merged,
    nest,
    offset_of,
    plus,
    positions,
    runs,
    unmerged,
)
from pcnet.engine.compiled.lowering import Lowering, base_name, kind_of, refs_of
from pcnet.engine.compiled.scalar_code import PARAMETERS, ValueWriter, Written, write_finish
from pcnet.engine.compiled.scalar_rules import RULES
from pcnet.engine.compiled.trace import Operation, Ref, Storage, Trace
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
IN_PLACE = frozenset(("clone", "mirrored"))
"""Operations on whole tensors that may write their output where their input is."""
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
        self._do_once()
        self._leave_out_copies(self._steady())
        self.steady = self._steady()
        self.lower_only = self._lower_triangles()
        self.inner = self._inner_indices()
        self.symmetric = self._symmetric()
        self.places, self.derived = self._placed()

    # --- analysis ------------------------------------------------------------------------------------------------
    def _needed(self) -> list[Operation]:
        """The operations that outputs or guards depend on, in order."""
        wanted = _storages(self.trace.outputs.values())
        found = []
        for operation in reversed(self.trace.operations):
            if operation.name == "guard" or any(ref.storage in wanted for ref in operation.outputs):
                found.append(operation)
                wanted |= {ref.storage for ref in refs_of(operation)}
        return found[::-1]

    def _do_once(self) -> None:
        """Leave out operations that are done before with the same numbers."""
        written = Counter(storage for operation in self.operations for storage in _storages(operation.outputs))
        version = Counter[int]()
        done: dict[str, Sequence[Ref]] = {}
        same: dict[int, int] = {}
        operations = []
        for each in self.operations:
            operation = Operation(*_renamed(each, same))
            read, made = _storages(refs_of(operation)), _storages(operation.outputs)
            if made and not made & read and all(written[place] == 1 for place in made):
                versions = sorted((place, version[place]) for place in read)
                shapes = [ref[1:] for ref in operation.outputs]
                before = done.setdefault(repr((*operation[:3], versions, shapes)), operation.outputs)
                if before is not operation.outputs:
                    same |= {new.storage: old.storage for new, old in zip(operation.outputs, before, strict=True)}
                    continue
            version.update(made)
            operations.append(operation)
        self._continue_with(operations, same)

    def _leave_out_copies(self, steady: set[int]) -> None:
        """Let whole tensors that are not used any more be changed in place, where they would be copied first."""
        last: dict[int, int] = {}
        for number, operation in enumerate(self.operations):
            last |= dict.fromkeys(_storages((*refs_of(operation), *operation.outputs)), number)
        last |= dict.fromkeys(_storages(self.trace.outputs.values()), len(self.operations))
        same: dict[int, int] = {}
        operations = []
        for number, operation in enumerate(self.operations):
            name, args, _, outputs = operation
            if base_name(name) in IN_PLACE:
                source, out = args[0], outputs[0]
                whole = all(_is_whole(ref, self.trace.storages[ref.storage]) for ref in (source, out))
                computed = all(self.trace.storages[ref.storage].source == "computed" for ref in (source, out))
                alike = source.shape == out.shape and (source.storage in steady) == (out.storage in steady)
                if whole and computed and alike and last[source.storage] == number:
                    same[out.storage] = same.get(source.storage, source.storage)
            operations.append(Operation(*_renamed(operation, same)))
        self._continue_with(operations, same)

    def _continue_with(self, operations: list[Operation], same: Mapping[int, int]) -> None:
        """Replace the operations by others, in which some storages have become the same as others."""
        self.operations = operations
        outputs = {name: _renamed(ref, same) for name, ref in self.trace.outputs.items()}
        self.trace = self.trace._replace(outputs=outputs)

    def _lower_triangles(self) -> set[int]:
        """The products, by the identity of their operation, whose upper triangle is overwritten before it is read."""
        found, made = set(), dict[int, Operation]()
        for operation in self.operations:
            for storage in _storages((*refs_of(operation), *operation.outputs)):
                product = made.pop(storage, None)
                if product is not None and operation.name == "mirrored" and operation.args == operation.outputs:
                    found.add(id(product))
            if base_name(operation.name) in ("bmm", "baddbmm") and operation.outputs[0].storage not in _storages(
                refs_of(operation)
            ):
                made[operation.outputs[0].storage] = operation
        return found

    def _symmetric(self) -> set[int]:
        """The operations, by identity, that do the same to each element of a matrix that is mirrored for them alone.

        They read its lower triangle and write both of theirs, and the matrix is not mirrored.
        """
        touching: dict[int, list[int]] = {}
        for number, operation in enumerate(self.operations):
            for storage in _storages((*refs_of(operation), *operation.outputs)):
                touching.setdefault(storage, []).append(number)
        for storage in _storages(self.trace.outputs.values()):
            touching.setdefault(storage, []).append(len(self.operations))
        found, left_out = set(), set()
        for number, operation in enumerate(self.operations):
            if operation.name == "mirrored" and operation.args == operation.outputs:
                matrix = operation.outputs[0]
                after = [each for each in touching[matrix.storage] if each > number]
                if len(after) == 1 and after[0] < len(self.operations):
                    user = self.operations[after[0]]
                    if _is_whole(matrix, self.trace.storages[matrix.storage]) and _keeps_symmetry(user, matrix):
                        found.add(id(user))
                        left_out.add(number)
        self.operations = [each for number, each in enumerate(self.operations) if number not in left_out]
        return found

    def _inner_indices(self) -> dict[int, list[int]]:
        """For each matrix product A B, by the identity of its operation, the k for which A_ik B_kj is not always 0."""
        zeros, found = KnownZeros(self.trace), {}
        for operation in self.operations:
            if base_name(operation.name) in PRODUCTS:
                found[id(operation)] = zeros.inner_indices(operation)
            zeros.follow(operation)
        return found

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
                if any(ref.storage in changing for ref in refs_of(operation)):
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
            for ref in (*refs_of(operation), *operation.outputs):
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
        places |= self._made_in_place(set(first) - set(places))
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

    def _made_in_place(self, free: set[int]) -> dict[int, Place]:
        """Storages that are computed in the memory of the new state, as one whole part of it."""
        uses, found = Counter(ref.storage for ref in self.trace.outputs.values()), {}
        for key, ref in self.trace.outputs.items():
            part, _, name = key.partition("/")
            storage = self.trace.storages[ref.storage]
            alone = uses[ref.storage] == 1 and ref.storage in free and storage.source == "computed"
            if part == "state" and alone and _is_whole(ref, storage):
                found[ref.storage] = Place("%new", self.parts["state"][name])
        return found

    def _is_view(self, storage: Storage) -> bool:
        ref = self.trace.inputs[storage.name]
        return ref.offset != 0 or ref.size != storage.size or not is_contiguous(ref)

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
        write_finish(self.module, {})
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
                    f.store(self._element(f, table, k, DOUBLE), where.base, plus(f, k, where.start))
            if storage.source == "input":
                part, _, name = storage.name.partition("/")
                ref = self.trace.inputs[storage.name]
                source = contiguous(ref)
                with nest(f, ref.shape) as index:
                    value = f.load(f"%{part}", plus(f, address(f, source, index), self.parts[part][name]))
                    f.store(value, where.base, plus(f, address(f, ref, index), where.start))

    def _outputs(self, f: Function) -> None:
        for key, ref in self.trace.outputs.items():
            part, _, name = key.partition("/")
            target, start = (
                ("%new", self.parts["state"][name]) if part == "state" else ("%record", self.parts[part][name])
            )
            dense = contiguous(ref)
            if self.places[ref.storage].base != "%new":
                with nest(f, ref.shape) as index:
                    value = self.load(f, ref, index)
                    f.store(value, target, plus(f, address(f, dense, index), start), kind_of(ref.dtype))
            if part == "state" and name not in self.kept and ref.dtype.is_floating_point and ref.size:
                self._check_size(f, start, torch.isfinite(self.trace.results[key]).flatten())

    def _check_size(self, f: Function, start: int, finite: torch.Tensor) -> None:
        m, wrong = self.module, f.flag()
        limit = m.number(self.largest)
        places = finite.nonzero()[:, 0].tolist()
        if not places:
            return
        for first, step, count in runs(places):
            with f.loop(count) as k:
                at = plus(f, f.put(f"mul i64 {k}, {step}"), first + start)
                size = f.function("abs", f.load("%new", at))
                f.lower(wrong, f.all_lanes(f.compare("olt", size, limit)))
        f.leave_unless(wrong)

    def _element(self, f: Function, where: Place, index: str | int, kind: str) -> str:
        """Load one element of a storage."""
        at = plus(f, index, where.start)
        if not where.numbers:
            return f.load(where.base, at, kind)
        return f.load_number(where.base, at, kind)

    def load(self, f: Function, ref: Ref, index: Sequence[str]) -> str:
        return self._element(f, self.places[ref.storage], address(f, ref, index), kind_of(ref.dtype))

    def store(self, f: Function, value: str, ref: Ref, index: Sequence[str]) -> None:
        where = self.places[ref.storage]
        f.store(value, where.base, plus(f, address(f, ref, index), where.start), kind_of(ref.dtype))

    def load_vector(self, f: Function, ref: Ref, index: Sequence[str], lanes: int) -> str:
        where = self.places[ref.storage]
        at = f.address(where.base, plus(f, address(f, ref, index), where.start))
        return f.put(f"load <{lanes} x double>, ptr {at}, align 8")

    def store_vector(self, f: Function, value: str, ref: Ref, index: Sequence[str], lanes: int) -> None:
        where = self.places[ref.storage]
        at = f.address(where.base, plus(f, address(f, ref, index), where.start))
        f.do(f"store <{lanes} x double> {value}, ptr {at}, align 8")

    def is_lower_only(self, op: Operation) -> bool:
        return id(op) in self.lower_only

    def inner_indices(self, op: Operation) -> Sequence[int]:
        return self.inner[id(op)]

    def _operation(self, f: Function, op: Operation) -> None:
        """Call a function for an operation; operations of one form share it."""
        if op.name == "guard":
            condition = self.load(f, op.args[0], ["0"] * len(op.args[0].shape))
            if not op.kwargs["outcome"]:
                condition = f.put(f"xor {self.module.vector(BOOL)} {condition}, {self.module.truth(True)}")
            f.leave_unless_condition(f.all_lanes(condition))
            return
        base, places = base_name(op.name), self.places
        if base in ("clone", "copy") and op.outputs[0] == refs_of(op)[-1]:
            return  # a copy onto itself
        used = list(dict.fromkeys(ref.storage for ref in (*refs_of(op), *op.outputs)))
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
        elif base in WRITERS:
            WRITERS[base](self, f, op)
        elif base in elementwise_rules.RULES:
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
        symmetric = id(op) in self.symmetric
        shape, strides = unmerged(out, args) if symmetric else merged(out, args)
        with lower_triangles(f, shape) if symmetric else nest(f, shape) as index:
            writer = ValueWriter(self.module, values, {})
            for arg, i, steps in zip(args, ids, strides[1:], strict=True):
                at = offset_of(f, index, steps, arg.offset)
                writer.give(i, self._element(f, self.places[arg.storage], at, kind_of(arg.dtype)))
            writer.compute(f, values.needed([result]))
            where = self.places[out.storage]
            for each in (index, [*index[:-2], *index[:-3:-1]]) if symmetric else (index,):
                at = plus(f, offset_of(f, each, strides[0], out.offset), where.start)
                f.store(writer.name(result), where.base, at, kind_of(out.dtype))

    def _move(self, f: Function, op: Operation) -> None:
        """An operation that moves elements: for each element of the output, where it comes from."""
        out = op.outputs[0]
        values = Values()
        refs = refs_of(op)
        low = Lowering(self.trace, values, memory=_places(self.trace, refs, values))
        RULES[base_name(op.name)](low, op)
        ids = low.read(out).reshape(-1)
        targets = positions(out)
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
        if out.storage in grouped:  # what is still to be read would be overwritten
            raise UntraceableError(f"{op.name} within one piece of memory")
        for source, pairs in grouped.items():
            with self._pairs(f, pairs) as (to, origin):
                if isinstance(source, tuple):
                    known = values.known(source[1])
                    number = self.module.truth(known) if kind == BOOL else self.module.number(float(known), kind)
                    f.store(number, where.base, plus(f, to, where.start), kind)
                else:
                    value = self._element(f, self.places[source], origin, kind)
                    f.store(value, where.base, plus(f, to, where.start), kind)

    @contextmanager
    def _pairs(self, f: Function, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[str | int, str | int]]:
        """A loop over pairs of places."""
        targets, origins = [a for a, _ in pairs], [b for _, b in pairs]
        with f.loop(len(pairs)) as k:
            yield self._item(f, targets, k), self._item(f, origins, k)

    def _item(self, f: Function, items: Sequence[int], k: str) -> str | int:
        """The k-th of some integers."""
        steps = runs(items)
        if len(steps) == 1:
            return plus(f, f.put(f"mul i64 {k}, {steps[0][1]}"), steps[0][0])
        table = self._global("i64", list(map(str, items)))
        return f.put(f"load i64, ptr {f.address(table, k, 'i64')}, align 8")

    @contextmanager
    def each(self, f: Function, items: Sequence[int]) -> Iterator[str]:
        """A loop over some integers."""
        with f.loop(len(items)) as k:
            yield str(k if items == range(len(items)) else self._item(f, items, k))

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
        with nest(f, [source.shape[axis] for axis in rest]) as outer:
            f.store(m.truth(start != 0) if kind == BOOL else m.number(start, kind), space, 0, kind)
            with nest(f, [source.shape[axis] for axis in reduced]) as inner:
                index = dict(zip(rest, outer, strict=True)) | dict(zip(reduced, inner, strict=True))
                writer = ValueWriter(m, values, {})
                writer.give(total, f.load(space, 0, kind))
                writer.give(item, self.load(f, source, [index[axis] for axis in range(n)]))
                writer.compute(f, values.needed([made]))
                f.store(writer.name(made), space, 0, kind)
            place = dict(zip(rest, outer, strict=True))
            at = [place.get(axis, "0") for axis in range(n)] if keep else [place[axis] for axis in rest]
            found = f.load(space, 0, kind)
            if base_name(op.name) == "mean":
                count = math.prod(source.shape[axis] for axis in reduced)
                found = f.arithmetic("div", found, m.number(float(count), kind), kind)
            self.store(f, found, out, at)

    # --- linear algebra ------------------------------------------------------------------------------------------
    def copied(self, f: Function, ref: Ref, batch: Sequence[str]) -> str:
        """A matrix of a batch in memory of its own, row after row."""
        rows, columns = ref.shape[-2:]
        space = f.room(rows * columns)
        with nest(f, (rows, columns)) as (i, j):
            value = self.load(f, ref, [*batch, i, j])
            f.store(value, space, cell(f, i, columns, j), kind_of(ref.dtype))
        return space

    def put_back(self, f: Function, space: str, ref: Ref, batch: Sequence[str], *, turned: bool = False) -> None:
        """Copy a matrix from memory of its own."""
        rows, columns = ref.shape[-2:]
        with nest(f, (rows, columns)) as (i, j):
            at = cell(f, j, rows, i) if turned else cell(f, i, columns, j)
            self.store(f, f.load(space, at, kind_of(ref.dtype)), ref, [*batch, i, j])


def _renamed(item: Any, same: Mapping[int, int]) -> Any:
    """Arguments with storages replaced by those that they are the same as."""
    if isinstance(item, Ref):
        return item._replace(storage=same.get(item.storage, item.storage))
    if isinstance(item, (tuple, list)):
        return tuple(_renamed(each, same) for each in item)
    return {key: _renamed(value, same) for key, value in item.items()} if isinstance(item, dict) else item


def _is_whole(ref: Ref, storage: Storage) -> bool:
    """Whether a tensor is all of its storage, in order."""
    return ref.offset == 0 and ref.size == storage.size and is_contiguous(ref)


def _keeps_symmetry(op: Operation, matrix: Ref) -> bool:
    """Whether an operation does the same to each element of a matrix, and to nothing else that has several."""
    if base_name(op.name) not in elementwise_rules.RULES or len(op.outputs) != 1:
        return False
    others = [ref for ref in refs_of(op) if ref != matrix]
    small = all(math.prod(ref.shape[-2:]) == 1 for ref in others)
    return small and op.outputs[0].shape == matrix.shape and op.outputs[0].storage != matrix.storage


def _storages(args: Iterable[Any]) -> set[int]:
    return {arg.storage for arg in args if isinstance(arg, Ref)}


def _places(trace: Trace, refs: Iterable[Ref], values: Values) -> dict[int, list[int]]:
    """The memory of a trace in which each element is known by its place."""
    memory: dict[int, list[int]] = {}
    for ref in refs:
        storage = trace.storages[ref.storage]
        if ref.storage not in memory:
            kind = kind_of(storage.dtype)
            if storage.source == "constant" and not ref.dtype.is_floating_point:  # an index
                assert storage.values is not None
                memory[ref.storage] = [values.constant(value, kind) for value in storage.values.tolist()]
            else:
                places = range(storage.size)
                memory[ref.storage] = [values.new(kind, "input", ref.storage, place) for place in places]
    return memory


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
    low = Lowering(Trace(storages, (), {}, {}, {}), values, memory={place: [i] for place, i in enumerate(ids)})
    RULES[base_name(op.name)](low, one)
    unique = dict(zip(args, ids, strict=True))
    return values, [unique[arg] for arg in args], int(low.read(single).reshape(()))
