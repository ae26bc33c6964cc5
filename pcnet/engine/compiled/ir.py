"""Writing LLVM's intermediate representation as text: functions of numbers, one batch element or several side by side.

With a width of 1 a number is a `double`. With a width of W it is a vector of W doubles, one for each of W batch
elements. All memory holds doubles; single precision exists only between loading and storing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pcnet.engine.compiled.values import BOOL, DOUBLE, FUNCTIONS, FUNCTIONS_OF_TWO, SINGLE

COMPARED = {"lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "eq": "oeq", "ne": "une"}
INTRINSICS = {"sqrt": "sqrt", "abs": "fabs", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"} | {
    "copysign": "copysign"
}
LIBRARY = (FUNCTIONS | FUNCTIONS_OF_TWO | {"pow"}) - INTRINSICS.keys() - {"exp", "log"}
"""Functions of the C library, which are called for one number at a time."""


def literal(value: float) -> str:
    """A number as LLVM writes it, exactly."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


class Module:
    """A module of functions for one width. `fused`: whether the processor has fused multiply-add instructions."""

    def __init__(self, width: int, fused: bool) -> None:
        self.width, self.fused = width, fused
        self.functions: list[str] = []
        self._declared: dict[str, None] = {}
        self.shared: dict[str, str] = {}
        """Names of functions by what they consist of."""
        self._kernels: set[str] = set()
        self._arrays: dict[tuple[str, str], str] = {}

    def declare(self, text: str) -> None:
        self._declared[f"declare {text}"] = None

    def text(self) -> str:
        return "\n".join([*sorted(self._declared), *self.functions])

    def array(self, type_: str, count: int, items: str) -> str:
        """The name of a constant array in memory."""
        found = self._arrays.get((type_, items))
        if found is None:
            found = self._arrays[type_, items] = f"@array{len(self._arrays)}"
            made = f"[{items}]" if count else "zeroinitializer"
            self.functions.insert(0, f"{found} = internal constant [{max(1, count)} x {type_}] {made}, align 64")
        return found

    def once(self, name: str) -> bool:
        """Whether a kernel of this name is asked for the first time."""
        new = name not in self._kernels
        self._kernels.add(name)
        return new

    def vector(self, kind: str) -> str:
        element = {DOUBLE: "double", SINGLE: "float", BOOL: "i1", "i": "i64"}[kind]
        return element if self.width == 1 else f"<{self.width} x {element}>"

    def splat(self, element: str, value: str) -> str:
        """A constant, once for each batch element."""
        return value if self.width == 1 else "<" + ", ".join([f"{element} {value}"] * self.width) + ">"

    def number(self, value: float, kind: str = DOUBLE) -> str:
        return self.splat("float" if kind == SINGLE else "double", literal(value))

    def truth(self, value: bool) -> str:
        return self.splat("i1", "true" if value else "false")

    def integer(self, value: int) -> str:
        return self.splat("i64", str(value))


class Function:
    """The body of one function, written line by line. Loop counters live in memory until LLVM finds registers."""

    def __init__(self, module: Module, name: str, parameters: Sequence[str], returns: str = "void") -> None:
        self.module, self.name, self.parameters, self.returns = module, name, parameters, returns
        self.lines: list[str] = []
        self._head: list[str] = []
        self._count = 0

    def finish(self, *, public: bool = False) -> None:
        """Add the function to its module."""
        linkage = "" if public else "internal "
        signature = f"define {linkage}{self.returns} @{self.name}({', '.join(self.parameters)}) noinline {{"
        self.module.functions.append("\n".join([signature, *self._body()]))

    def finish_once(self) -> str:
        """Add the function to its module unless one like it is there; the name of that one."""
        key = "\n".join([*self.parameters, *self._body()])
        found = self.module.shared.get(key)
        if found is None:
            self.name = found = self.module.shared[key] = f"{self.name}_{len(self.module.shared)}"
            self.finish()
        return found

    def _body(self) -> list[str]:
        return ["entry:", *self._head, *self.lines, "}"]

    def fresh(self, prefix: str = "t") -> str:
        self._count += 1
        return f"%{prefix}{self._count}"

    def put(self, text: str) -> str:
        """A line whose result gets a new name."""
        name = self.fresh()
        self.lines.append(f"{name} = {text}")
        return name

    def do(self, text: str) -> None:
        self.lines.append(text)

    def room(self, count: int) -> str:
        """Memory for so many numbers, for the time of the call."""
        name = self.fresh("m")
        self._head.append(f"{name} = alloca [{max(1, count)} x {self.module.vector(DOUBLE)}], align 64")
        return name

    # --- memory --------------------------------------------------------------------------------------------------
    def address(self, base: str, index: int | str, type_: str | None = None) -> str:
        return self.put(f"getelementptr {type_ or self.module.vector(DOUBLE)}, ptr {base}, i64 {index}")

    def pointer(self, base: str, start: int, numbers: bool = False) -> str:
        """The address of an element; numbers: of an array of single numbers."""
        return self.address(base, start, "double" if numbers else None)

    def load(self, base: str, index: int | str, kind: str = DOUBLE) -> str:
        m = self.module
        found = self.put(f"load {m.vector(DOUBLE)}, ptr {self.address(base, index)}, align 8")
        if kind == BOOL:
            return self.put(f"fcmp une {m.vector(DOUBLE)} {found}, {m.number(0.0)}")
        return self.put(f"fptrunc {m.vector(DOUBLE)} {found} to {m.vector(SINGLE)}") if kind == SINGLE else found

    def store(self, value: str, base: str, index: int | str, kind: str = DOUBLE) -> None:
        m = self.module
        if kind == BOOL:
            one, zero, t = m.number(1.0), m.number(0.0), m.vector(DOUBLE)
            value = self.put(f"select {m.vector(BOOL)} {value}, {t} {one}, {t} {zero}")
        elif kind == SINGLE:
            value = self.put(f"fpext {m.vector(SINGLE)} {value} to {m.vector(DOUBLE)}")
        self.do(f"store {m.vector(DOUBLE)} {value}, ptr {self.address(base, index)}, align 8")

    # --- numbers -------------------------------------------------------------------------------------------------
    def arithmetic(self, name: str, a: str, b: str, kind: str = DOUBLE) -> str:
        return self.put(f"f{name} {self.module.vector(kind)} {a}, {b}")

    def add(self, a: str, b: str) -> str:
        return self.arithmetic("add", a, b)

    def sub(self, a: str, b: str) -> str:
        return self.arithmetic("sub", a, b)

    def mul(self, a: str, b: str) -> str:
        return self.arithmetic("mul", a, b)

    def multiply_add(self, a: str, b: str, c: str) -> str:
        """a·b + c, rounded once where the processor can."""
        m = self.module
        if not m.fused:
            return self.add(self.mul(a, b), c)
        return self.intrinsic("fma", a, b, c)

    def fused(self, type_: str, a: str, b: str, c: str) -> str:
        """a·b + c of vectors of any length, rounded once where the processor can."""
        if not self.module.fused:
            return self.put(f"fadd {type_} {self.put(f'fmul {type_} {a}, {b}')}, {c}")
        lanes = type_[1:].partition(" ")[0] if type_.startswith("<") else ""
        name = f"llvm.fma.v{lanes}f64" if lanes else "llvm.fma.f64"
        self.module.declare(f"{type_} @{name}({type_}, {type_}, {type_})")
        return self.put(f"call {type_} @{name}({type_} {a}, {type_} {b}, {type_} {c})")

    def broadcast(self, value: str, lanes: int) -> str:
        """A number as a vector."""
        t = f"<{lanes} x double>"
        first = self.put(f"insertelement {t} poison, double {value}, i32 0")
        return self.put(f"shufflevector {t} {first}, {t} poison, <{lanes} x i32> zeroinitializer")

    def place(self, type_: str) -> str:
        """Memory for one value of a type, which LLVM turns into a register."""
        name = self.fresh("m")
        self._head.append(f"{name} = alloca {type_}, align 64")
        return name

    def keep(self, type_: str, value: str, place: str) -> None:
        self.do(f"store {type_} {value}, ptr {place}, align 64")

    def kept(self, type_: str, place: str) -> str:
        return self.put(f"load {type_}, ptr {place}, align 64")

    def intrinsic(self, name: str, *args: str, kind: str = DOUBLE) -> str:
        m = self.module
        t = m.vector(kind)
        suffix = ("f32" if kind == SINGLE else "f64") if m.width == 1 else f"v{m.width}f{32 if kind == SINGLE else 64}"
        m.declare(f"{t} @llvm.{name}.{suffix}({', '.join([t] * len(args))})")
        return self.put(f"call {t} @llvm.{name}.{suffix}({', '.join(f'{t} {arg}' for arg in args)})")

    def compare(self, name: str, a: str, b: str, kind: str = DOUBLE) -> str:
        return self.put(f"fcmp {name} {self.module.vector(kind)} {a}, {b}")

    def select(self, condition: str, a: str, b: str, kind: str = DOUBLE) -> str:
        t = self.module.vector(kind)
        return self.put(f"select {self.module.vector(BOOL)} {condition}, {t} {a}, {t} {b}")

    def function(self, name: str, *args: str, kind: str = DOUBLE) -> str:
        """exp, log, or another function of numbers."""
        m = self.module
        if name in INTRINSICS:
            return self.intrinsic(INTRINSICS[name], *args, kind=kind)
        if kind == SINGLE:
            wide = [self.put(f"fpext {m.vector(SINGLE)} {arg} to {m.vector(DOUBLE)}") for arg in args]
            found = self.function(name, *wide)
            return self.put(f"fptrunc {m.vector(DOUBLE)} {found} to {m.vector(SINGLE)}")
        t = m.vector(DOUBLE)
        if name in LIBRARY:
            return self._library(name, args)
        from pcnet.engine.compiled.kernels import elementary

        elementary(m, name)
        return self.put(f"call {t} @{name}_({', '.join(f'{t} {arg}' for arg in args)})")

    def _library(self, name: str, args: Sequence[str]) -> str:
        m = self.module
        m.declare(f"double @{name}({', '.join(['double'] * len(args))})")
        if m.width == 1:
            return self.put(f"call double @{name}({', '.join(f'double {arg}' for arg in args)})")
        t, made = m.vector(DOUBLE), "poison"
        for lane in range(m.width):
            parts = [self.put(f"extractelement {t} {arg}, i32 {lane}") for arg in args]
            one = self.put(f"call double @{name}({', '.join(f'double {part}' for part in parts)})")
            made = self.put(f"insertelement {t} {made}, double {one}, i32 {lane}")
        return made

    def finite(self, a: str, kind: str = DOUBLE) -> str:
        size = self.function("abs", a, kind=kind)
        return self.compare("olt", size, self.module.number(math.inf, kind), kind)

    def all_lanes(self, condition: str) -> str:
        """Whether a condition holds for all batch elements, as i1."""
        m = self.module
        if m.width == 1:
            return condition
        m.declare(f"i1 @llvm.vector.reduce.and.v{m.width}i1({m.vector(BOOL)})")
        return self.put(f"call i1 @llvm.vector.reduce.and.v{m.width}i1({m.vector(BOOL)} {condition})")

    def load_number(self, base: str, index: int | str, kind: str = DOUBLE) -> str:
        """A number of a constant array, for all lanes."""
        m = self.module
        place = self.put(f"getelementptr double, ptr {base}, i64 {index}")
        one = self.put(f"load double, ptr {place}, align 8")
        if m.width > 1:
            t = m.vector(DOUBLE)
            first = self.put(f"insertelement {t} poison, double {one}, i32 0")
            one = self.put(f"shufflevector {t} {first}, {t} poison, <{m.width} x i32> zeroinitializer")
        if kind == BOOL:
            return self.compare("une", one, m.number(0.0))
        return self.put(f"fptrunc {m.vector(DOUBLE)} {one} to {m.vector(SINGLE)}") if kind == SINGLE else one

    def flag(self) -> str:
        """A truth in memory, true at first."""
        name = self.fresh("g")
        self._head.append(f"{name} = alloca i1, align 1")
        self.do(f"store i1 true, ptr {name}, align 1")
        return name

    def lower(self, flag: str, condition: str) -> None:
        """Make a flag false unless a condition (i1) holds."""
        now = self.put(f"load i1, ptr {flag}, align 1")
        self.do(f"store i1 {self.put(f'and i1 {now}, {condition}')}, ptr {flag}, align 1")

    def leave_unless(self, flag: str) -> None:
        self.leave_unless_condition(self.put(f"load i1, ptr {flag}, align 1"))

    def leave_unless_condition(self, condition: str) -> None:
        """Go to the label `leave` unless a condition (i1) holds."""
        self._count += 1
        self.do(f"br i1 {condition}, label %s{self._count}, label %leave")
        self.label(f"s{self._count}")

    # --- control -------------------------------------------------------------------------------------------------
    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")

    @contextmanager
    def loop(self, count: int | str, first: int | str = 0) -> Iterator[str]:
        """The lines written inside are repeated; yields the counter."""
        self._count += 1
        mark, counter = f"l{self._count}", self.fresh("c")
        self._head.append(f"{counter} = alloca i64, align 8")
        self.do(f"store i64 {first}, ptr {counter}, align 8")
        self.do(f"br label %{mark}h")
        self.label(f"{mark}h")
        here = self.put(f"load i64, ptr {counter}, align 8")
        more = self.put(f"icmp slt i64 {here}, {count}")
        self.do(f"br i1 {more}, label %{mark}b, label %{mark}e")
        self.label(f"{mark}b")
        yield here
        following = self.put(f"add i64 {here}, 1")
        self.do(f"store i64 {following}, ptr {counter}, align 8")
        self.do(f"br label %{mark}h")
        self.label(f"{mark}e")
