"""Scalar values as LLVM code: a function for one tick, and one for what only changes between slow ticks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pcnet.engine.compiled import kernels
from pcnet.engine.compiled.ir import COMPARED, Function, Module
from pcnet.engine.compiled.values import BOOL, DOUBLE, Values

PARAMETERS = ("state", "new", "given", "settings", "derived", "record")
"""Memory that a compiled tick works on; see `Layout` in the module `program`."""
FEW = 5000
"""Up to so many numbers it matters more that independent ones are computed side by side than how many are held."""
CHEAP = 200
"""Guards that need fewer values than this are decided first, so that a tick of another variant is left at once."""


class ScalarTick(NamedTuple):
    """A tick as scalar values.

    new, record: values of all elements of the new state, and of what is recorded. guards: conditions for it to hold.
    """

    values: Values
    new: Sequence[int]
    record: Sequence[int]
    guards: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.values.needed([*self.new, *self.record, *self.guards]))


class Written(NamedTuple):
    """What a module contains: the number of derived values, on which elements of the state they depend, and which
    elements of the state the tick changes."""

    derived: int
    depends: frozenset[int]
    changes: frozenset[int]


def write(module: Module, tick: ScalarTick) -> Written:
    """Write the functions `prepare`, `tick` and `finish` into a module."""
    values = tick.values
    order = values.needed([*tick.new, *tick.record, *tick.guards])
    if module.width == 1 and len(order) < FEW:
        order = sorted(order)
    changes = frozenset(p for p, i in enumerate(tick.new) if values.operations[i] != ("input", "state", p))
    kept = {i for place, i in enumerate(tick.new) if place not in changes}
    steady: set[int] = set()
    for i in order:
        operation = values.operations[i]
        if operation[0] == "input":
            if i in kept or operation[1] == "settings":
                steady.add(i)
        elif all(argument in steady for argument in values.arguments(i)):
            steady.add(i)
    used = {argument for i in order if i not in steady for argument in values.arguments(i)}
    used |= {*tick.new, *tick.record, *tick.guards}
    hoisted = [i for i in sorted(used & steady) if values.operations[i][0] not in ("constant", "input")]
    places = {i: place for place, i in enumerate(hoisted)}
    prepared = values.needed(hoisted)
    depends = frozenset(values.operations[i][2] for i in prepared if values.operations[i][:2] == ("input", "state"))
    writer = ValueWriter(module, values, {})
    f = Function(module, "prepare", _signature())
    writer.compute(f, prepared)
    for i, place in places.items():
        f.store(writer.name(i), "%derived", place, values.kinds[i])
    f.do("ret void")
    f.finish(public=True)
    writer = ValueWriter(module, values, places)
    f = Function(module, "tick", _signature(), "i1")
    rest = [i for i in order if i not in steady or i in places or values.operations[i][0] == "input"]
    cheap, costly = _by_cost(values, tick.guards, set(rest), places)
    first, computed = [i for i in rest if i in cheap.needed], set(rest)
    writer.compute(f, first)
    f.do(f"br i1 {writer.all_of(f, cheap.guards)}, label %go, label %leave")
    f.label("leave")
    f.do("ret i1 false")
    f.label("go")
    copies = _copies(values, tick.new, changes, order)
    stores: dict[int, list[tuple[str, int]]] = {}
    for place in sorted(changes - copies.keys()):
        stores.setdefault(tick.new[place], []).append(("%new", place))
    for place, i in enumerate(tick.record):
        stores.setdefault(i, []).append(("%record", place))
    ahead = [i for i in stores if i not in computed or i in cheap.needed]  # constants, and what is known already
    for i in [*ahead, *(i for i in rest if i not in cheap.needed)]:
        writer.compute(f, [i])
        for base, place in stores.get(i, ()):  # at once: it need not be kept any longer
            f.store(writer.name(i), base, place, values.kinds[i])
    f.do(f"ret i1 {writer.all_of(f, costly)}")
    f.finish(public=True)
    write_finish(module, copies)
    return Written(len(hoisted), depends, changes)


def _copies(values: Values, new: Sequence[int], changes: Iterable[int], order: Iterable[int]) -> dict[int, int]:
    """Elements of the new state that equal another one, such as those above a diagonal, and that the tick does not
    read: they are copied from that one when another variant or somebody else is to read them, not at each tick."""
    operations = [values.operations[i] for i in order]
    read = {operation[2] for operation in operations if operation[:2] == ("input", "state")}
    first: dict[int, int] = {}
    copies = {}
    for place in sorted(changes, key=lambda place: (place not in read, place)):
        source = first.setdefault(new[place], place)
        if source != place and place not in read:
            copies[place] = source
    return copies


def write_finish(module: Module, copies: Mapping[int, int]) -> None:
    """Write the function `finish` into a module: elements of the state that are copies of others."""
    f = Function(module, "finish", ["ptr %state"])
    for place, source in copies.items():
        f.store(f.load("%state", source), "%state", place)
    f.do("ret void")
    f.finish(public=True)


def _signature() -> list[str]:
    return [f"ptr noalias %{name}" for name in PARAMETERS]


class _Cheap(NamedTuple):
    guards: Sequence[int]
    needed: set[int]


def _by_cost(
    values: Values, guards: Iterable[int], computed: set[int], places: Mapping[int, int]
) -> tuple[_Cheap, list[int]]:
    cheap: list[int] = []
    costly: list[int] = []
    needed: set[int] = set()
    for guard in dict.fromkeys(guards):
        found: set[int] = set()
        waiting = [guard]
        while waiting and len(found) <= CHEAP:
            i = waiting.pop()
            if i not in found and i not in needed and i in computed:
                found.add(i)
                waiting.extend(() if i in places else values.arguments(i))
        if waiting or any(values.operations[i][0] in ("kernel", "result") for i in found):
            costly.append(guard)
        else:
            cheap.append(guard)
            needed |= found
    return _Cheap(cheap, needed), costly


class ValueWriter:
    """Writes values into functions. places: values that are loaded from the derived ones instead of computed."""

    def __init__(self, module: Module, values: Values, places: Mapping[int, int]) -> None:
        self.module, self.values, self.places = module, values, places
        self._names: dict[int, str] = {}

    def name(self, i: int) -> str:
        known = self.values.known(i)
        if known is None:
            return self._names[i]
        return (
            self.module.truth(known)
            if self.values.kinds[i] == BOOL
            else self.module.number(float(known), self.values.kinds[i])
        )

    def give(self, i: int, name: str) -> None:
        """Let a value be what has this name already."""
        self._names[i] = name

    def all_of(self, f: Function, conditions: Iterable[int]) -> str:
        found = None
        for condition in conditions:
            name = self.name(condition)
            found = name if found is None else f.put(f"and {self.module.vector(BOOL)} {found}, {name}")
        return "true" if found is None else f.all_lanes(found)

    def compute(self, f: Function, order: Iterable[int]) -> None:
        for i in order:
            if self.values.known(i) is None and i not in self._names:
                self._names[i] = self._computed(f, i)

    def _computed(self, f: Function, i: int) -> str:
        values, m = self.values, self.module
        kind, (name, *args) = values.kinds[i], values.operations[i]
        if i in self.places:
            return f.load("%derived", self.places[i], kind)
        if name == "input":
            return f.load(f"%{args[0]}", args[1], kind)
        if name in ("add", "sub", "mul", "div"):
            return f.arithmetic(name, self.name(args[0]), self.name(args[1]), kind)
        if name in ("fma", "fnma"):
            a, b, c = (self.name(arg) for arg in args)
            a = f.put(f"fneg {m.vector(kind)} {a}") if name == "fnma" else a
            return f.intrinsic("fma", a, b, c, kind=kind)
        if name == "neg":
            return f.put(f"fneg {m.vector(kind)} {self.name(args[0])}")
        if name in COMPARED:
            of = values.kinds[args[0]]
            if of == BOOL:
                made = f.put(f"xor {m.vector(BOOL)} {self.name(args[0])}, {self.name(args[1])}")
                return made if name == "ne" else f.put(f"xor {m.vector(BOOL)} {made}, {m.truth(True)}")
            return f.compare(COMPARED[name], self.name(args[0]), self.name(args[1]), of)
        if name in ("and", "or"):
            return f.put(f"{name} {m.vector(BOOL)} {self.name(args[0])}, {self.name(args[1])}")
        if name == "not":
            return f.put(f"xor {m.vector(BOOL)} {self.name(args[0])}, {m.truth(True)}")
        if name == "select":
            return f.select(self.name(args[0]), self.name(args[1]), self.name(args[2]), kind)
        if name == "finite":
            return f.finite(self.name(args[0]), values.kinds[args[0]])
        if name == "cast":
            how = "fptrunc" if kind != DOUBLE else "fpext"
            return f.put(f"{how} {m.vector(values.kinds[args[0]])} {self.name(args[0])} to {m.vector(kind)}")
        if name == "kernel":
            return self._kernel(f, i)
        if name == "result":
            _, kernel, n, _ = values.operations[args[0]]
            return f.load(self._names[args[0]], kernels.SIZES[kernel](n)[0] + args[1], kind)
        return f.function(name, *(self.name(arg) for arg in args), kind=kind)

    def _kernel(self, f: Function, i: int) -> str:
        """A call of a kernel: its arguments go into memory, whose name stands for the call."""
        _, kernel, n, args = self.values.operations[i]
        given, made = kernels.SIZES[kernel](n)
        space = f.room(given + made)
        for place, arg in enumerate(args):
            f.store(self.name(arg), space, place, self.values.kinds[arg])
        f.do(f"call void @{kernels.KERNELS[kernel](self.module, n)}(ptr {space})")
        return space
