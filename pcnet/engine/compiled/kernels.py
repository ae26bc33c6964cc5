"""Kernels: functions that compiled ticks call, written once for every width.

They round in the same way for one batch element as for several side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pcnet.engine.compiled.ir import Function, Module, literal
from pcnet.engine.compiled.values import BOOL, DOUBLE

LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 as a sum, the first part with few digits, so that its products with small integers are exact."""
LOG_SERIES = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
"""Minimax coefficients of (log((1+s)/(1−s)) − 2s)/s in s², for |s| < 0.1716."""
TERMS = 12
"""Terms of the series of φ₁."""
SWEEPS = 12
"""Sweeps of Jacobi's method; it converges quadratically, and a pair that is done is left alone."""
SIZES: dict[str, Callable[[int], tuple[int, int]]] = {
    "exponential_step": lambda n: (n * n + n + 1, n),
    "eigh": lambda n: (n * n, n + n * n),
}
"""Numbers that a kernel takes, and that it gives, for size n."""


def elementary(module: Module, name: str) -> None:
    """Write exp or log into a module, as @exp_ or @log_, unless it is there."""
    if module.once(name):
        {"exp": _exp, "log": _log}[name](module)


def _exp(m: Module) -> None:
    """exp(x) = 2^n exp(r) with |r| < 0.35; the power of two is applied in two halves, so that denormals come out."""
    t, i = m.vector(DOUBLE), m.vector("i")
    f = Function(m, "exp_", [f"{t} %x"], t)
    unknown = f.compare("uno", "%x", "%x")
    x = f.select(unknown, m.number(0.0), "%x")
    x = f.select(f.compare("ogt", x, m.number(710.0)), m.number(710.0), x)
    x = f.select(f.compare("olt", x, m.number(-746.0)), m.number(-746.0), x)
    shift = m.number(6755399441055744.0)  # 1.5 · 2^52: adding it rounds to an integer
    n = f.sub(f.add(f.mul(x, m.number(1 / math.log(2))), shift), shift)
    minus = f.put(f"fneg {t} {n}")
    r = f.multiply_add(minus, m.number(LN2_LOW), f.multiply_add(minus, m.number(LN2_HIGH), x))
    y = m.number(1 / math.factorial(13))
    for k in range(12, -1, -1):
        y = f.multiply_add(y, r, m.number(1 / math.factorial(k)))
    whole = f.put(f"fptosi {t} {n} to {i}")
    half = f.put(f"ashr {i} {whole}, {m.integer(1)}")
    for power in (half, f.put(f"sub {i} {whole}, {half}")):
        bits = f.put(f"shl {i} {f.put(f'add {i} {power}, {m.integer(1023)}')}, {m.integer(52)}")
        y = f.mul(y, f.put(f"bitcast {i} {bits} to {t}"))
    f.do(f"ret {t} {f.select(unknown, '%x', y)}")
    f.finish()


def _log(m: Module) -> None:
    """log(x) = e ln 2 + log(1 + f) with 1 + f between √½ and √2, by a series in s = f/(2 + f)."""
    t, i = m.vector(DOUBLE), m.vector("i")
    f = Function(m, "log_", [f"{t} %x"], t)
    small = f.compare("olt", "%x", m.number(2.0**-1022))
    x = f.select(small, f.mul("%x", m.number(2.0**54)), "%x")
    root = 0x3FE6A09E667F3BCD  # √½
    bits = f.put(f"add {i} {f.put(f'bitcast {t} {x} to {i}')}, {m.integer(0x3FF0000000000000 - root)}")
    exponent = f.put(f"sub {i} {f.put(f'ashr {i} {bits}, {m.integer(52)}')}, {m.integer(1023)}")
    mantissa = f.put(f"add {i} {f.put(f'and {i} {bits}, {m.integer(0xFFFFFFFFFFFFF)}')}, {m.integer(root)}")
    e = f.put(f"sitofp {i} {exponent} to {t}")
    e = f.select(small, f.sub(e, m.number(54.0)), e)
    part = f.sub(f.put(f"bitcast {i} {mantissa} to {t}"), m.number(1.0))
    s = f.arithmetic("div", part, f.add(part, m.number(2.0)))
    z = f.mul(s, s)
    series = m.number(LOG_SERIES[-1])
    for coefficient in reversed(LOG_SERIES[:-1]):
        series = f.multiply_add(series, z, m.number(coefficient))
    half_square = f.mul(f.mul(part, part), m.number(0.5))
    rest = f.mul(s, f.add(half_square, f.mul(series, z)))
    low = f.add(f.mul(e, m.number(LN2_LOW)), rest)
    y = f.sub(f.mul(e, m.number(LN2_HIGH)), f.sub(f.sub(half_square, low), part))
    y = f.select(f.compare("oeq", "%x", m.number(math.inf)), "%x", y)
    y = f.select(f.compare("oeq", "%x", m.number(0.0)), m.number(-math.inf), y)
    y = f.select(f.compare("ult", "%x", m.number(0.0)), m.number(math.nan), y)
    f.do(f"ret {t} {y}")
    f.finish()


def exponential_step(m: Module, n: int) -> str:
    """Write the exponential step of n states into a module, unless it is there; returns its name.

    The function takes memory with J (n·n), f (n), the time t, and room for the result (n). With A = tJ/2^s it
    computes P = φ₁(A) by its series, G = AP = exp(A) − I and g = P f t/2^s, and doubles s times: G ← 2G + G²,
    g ← 2g + Gg. Each batch element has its own s.
    """
    name = f"exponential_step_{n}"
    if not m.once(name):
        return name
    panel = _Panel(m, n)
    t, i, b = m.vector(DOUBLE), m.vector("i"), m.vector(BOOL)
    f = Function(m, name, ["ptr %a"])
    time = f.load("%a", n * n + n)
    largest_f = m.number(2.0**-1022)
    for k in range(n):
        size = f.function("abs", f.load("%a", n * n + k))
        largest_f = f.select(f.compare("ogt", size, largest_f), size, largest_f)
    spaces = {key: f.room(panel.size) for key in ("A", "A2", "A3", "D", "P", "Q", "G", "H")}
    norm = m.number(0.0)
    for row in range(n):
        total = f.arithmetic("div", f.function("abs", f.load("%a", n * n + row)), largest_f)
        for column in range(n):
            total = f.add(total, f.function("abs", f.mul(f.load("%a", row * n + column), time)))
        norm = f.select(f.compare("ogt", total, norm), total, norm)
    bits = f.put(f"bitcast {t} {norm} to {i}")
    exponent = f.put(f"sub {i} {f.put(f'lshr {i} {bits}, {m.integer(52)}')}, {m.integer(1021)}")
    below = f.put(f"icmp slt {i} {exponent}, {m.integer(0)}")
    doublings = f.put(f"select {b} {below}, {i} {m.integer(0)}, {i} {exponent}")
    above = f.put(f"icmp sgt {i} {doublings}, {m.integer(60)}")
    doublings = f.put(f"select {b} {above}, {i} {m.integer(60)}, {i} {doublings}")
    scale_bits = f.put(f"shl {i} {f.put(f'sub {i} {m.integer(1023)}, {doublings}')}, {m.integer(52)}")
    scale = f.put(f"bitcast {i} {scale_bits} to {t}")
    step = f.mul(time, scale)
    panel.clear(f, spaces["A"])
    for row in range(n):
        for column in range(n):
            panel.set(f, spaces["A"], row, column, f.mul(f.load("%a", row * n + column), step))
    coefficients = [1 / math.factorial(k + 1) for k in range(TERMS)]
    panel.product(f, spaces["A2"], spaces["A"], spaces["A"])
    panel.product(f, spaces["A3"], spaces["A2"], spaces["A"])
    panel.combine(f, spaces["P"], spaces["A"], spaces["A2"], coefficients[9:12])
    now, other = "P", "Q"
    for k in (6, 3, 0):
        panel.combine(f, spaces["D"], spaces["A"], spaces["A2"], coefficients[k : k + 3])
        panel.product(f, spaces[other], spaces["A3"], spaces[now], spaces["D"])
        now, other = other, now
    panel.product(f, spaces["G"], spaces["A"], spaces[now])
    for row in range(n):
        total = m.number(0.0)
        for column in range(n):
            weight = f.mul(f.load("%a", n * n + column), step)
            total = f.multiply_add(panel.get(f, spaces[now], row, column), weight, total)
        panel.set(f, spaces["G"], row, n, total)
    most = doublings
    if m.width > 1:
        m.declare(f"i64 @llvm.vector.reduce.smax.v{m.width}i64({i})")
        most = f.put(f"call i64 @llvm.vector.reduce.smax.v{m.width}i64({i} {doublings})")
    with f.loop(most) as count:
        panel.product(f, spaces["H"], spaces["G"], spaces["G"], spaces["G"], twice=True)
        panel.move(f, spaces["G"], spaces["H"], count, doublings)
    for row in range(n):
        f.store(panel.get(f, spaces["G"], row, n), "%a", n * n + n + 1 + row)
    f.do("ret void")
    f.finish()
    return name


def eigh(m: Module, n: int) -> str:
    """Write the eigenvalues and eigenvectors of a symmetric matrix of size n into a module; returns the name.

    The function takes memory with the matrix (n·n) and room for values (n), ascending, and vectors (n·n), in columns.
    It rotates pairs of rows and columns until nothing is left off the diagonal (Jacobi's method).
    """
    name = f"eigh_{n}"
    if not m.once(name):
        return name
    t = m.vector(DOUBLE)
    f = Function(m, name, ["ptr %a"])
    values, vectors = n * n, n * n + n
    work = f.room(n * n)
    with f.loop(n * n) as k:
        f.store(f.load("%a", k), work, k)
        f.store(m.number(0.0), "%a", f.put(f"add i64 {k}, {vectors}"))
    for row in range(n):
        f.store(m.number(1.0), "%a", vectors + row * n + row)

    def place(row: str, column: str, first: int = 0) -> str:
        at = f.put(f"add i64 {f.put(f'mul i64 {row}, {n}')}, {column}")
        return f.put(f"add i64 {at}, {first}") if first else at

    def rotate(base: str, one: str, other: str, c: str, s: str) -> None:
        x, y = f.load(base, one), f.load(base, other)
        f.store(f.sub(f.mul(c, x), f.mul(s, y)), base, one)
        f.store(f.add(f.mul(s, x), f.mul(c, y)), base, other)

    with f.loop(SWEEPS), f.loop(n) as p, f.loop(n, f.put(f"add i64 {p}, 1")) as q:
        off, first, second = (f.load(work, place(*at)) for at in ((p, q), (p, p), (q, q)))
        size = f.add(f.function("abs", first), f.function("abs", second))
        nothing = f.compare("ule", f.function("abs", off), f.mul(size, m.number(2.0**-60)))
        safe = f.select(nothing, m.number(1.0), off)
        theta = f.arithmetic("div", f.sub(second, first), f.mul(safe, m.number(2.0)))
        root = f.function("sqrt", f.add(f.mul(theta, theta), m.number(1.0)))
        tangent = f.arithmetic("div", m.number(1.0), f.add(f.function("abs", theta), root))
        below = f.compare("olt", theta, m.number(0.0))
        tangent = f.select(below, f.put(f"fneg {t} {tangent}"), tangent)
        tangent = f.select(nothing, m.number(0.0), tangent)
        c = f.arithmetic("div", m.number(1.0), f.function("sqrt", f.add(f.mul(tangent, tangent), m.number(1.0))))
        s = f.mul(tangent, c)
        with f.loop(n) as k:
            rotate(work, place(k, p), place(k, q), c, s)
        with f.loop(n) as k:
            rotate(work, place(p, k), place(q, k), c, s)
        with f.loop(n) as k:
            rotate("%a", place(k, p, vectors), place(k, q, vectors), c, s)
    with f.loop(n) as k:
        f.store(f.load(work, place(k, k)), "%a", f.put(f"add i64 {k}, {values}"))

    def order(one: str, other: str, swap: str) -> None:
        x, y = f.load("%a", one), f.load("%a", other)
        f.store(f.select(swap, y, x), "%a", one)
        f.store(f.select(swap, x, y), "%a", other)

    with f.loop(n) as p, f.loop(n, f.put(f"add i64 {p}, 1")) as q:
        one, other = (f.put(f"add i64 {index}, {values}") for index in (p, q))
        swap = f.compare("ogt", f.load("%a", one), f.load("%a", other))
        order(one, other, swap)
        with f.loop(n) as k:
            order(place(k, p, vectors), place(k, q, vectors), swap)
    f.do("ret void")
    f.finish()
    return name


class _Panel:
    """Matrices of n rows and n + 1 columns in memory.

    For one batch element, four columns at a time are a vector and rows are filled up to a multiple of four.
    """

    def __init__(self, module: Module, n: int) -> None:
        self.module, self.n = module, n
        self.lanes = 4 if module.width == 1 else module.width
        self.columns = -(-(n + 1) // 4) if module.width == 1 else n + 1
        self.row = self.columns * 4 if module.width == 1 else self.columns
        self.size = n * self.row
        self.vector = f"<{self.lanes} x double>"

    def get(self, f: Function, base: str, row: int, column: int) -> str:
        return f.load(base, row * self.row + column)

    def set(self, f: Function, base: str, row: int, column: int, value: str) -> None:
        f.store(value, base, row * self.row + column)

    def clear(self, f: Function, base: str) -> None:
        with f.loop(self.size) as k:
            f.store(self.module.number(0.0), base, k)

    def _load(self, f: Function, base: str, index: str | int) -> str:
        return f.put(f"load {self.vector}, ptr {f.address(base, index, self.vector)}, align 8")

    def _store(self, f: Function, value: str, base: str, index: str | int) -> None:
        f.do(f"store {self.vector} {value}, ptr {f.address(base, index, self.vector)}, align 8")

    def _splat(self, value: float) -> str:
        return "<" + ", ".join([f"double {literal(value)}"] * self.lanes) + ">"

    def _spread(self, f: Function, number: str) -> str:
        """A number of the module as a vector of this panel."""
        if self.module.width > 1:
            return number
        one = f.put(f"insertelement {self.vector} poison, double {number}, i32 0")
        return f.put(f"shufflevector {self.vector} {one}, {self.vector} poison, <4 x i32> zeroinitializer")

    def _multiply_add(self, f: Function, a: str, b: str, c: str) -> str:
        if not self.module.fused:
            product = f.put(f"fmul {self.vector} {a}, {b}")
            return f.put(f"fadd {self.vector} {product}, {c}")
        suffix = f"v{self.lanes}f64"
        self.module.declare(f"{self.vector} @llvm.fma.{suffix}({self.vector}, {self.vector}, {self.vector})")
        return f.put(f"call {self.vector} @llvm.fma.{suffix}({self.vector} {a}, {self.vector} {b}, {self.vector} {c})")

    def product(self, f: Function, out: str, a: str, b: str, base: str | None = None, *, twice: bool = False) -> None:
        """out = a b, + base, or + 2 base."""
        factor = literal(0.0 if base is None else 2.0 if twice else 1.0)
        f.do(f"call void @{self._product()}(ptr {out}, ptr {a}, ptr {b}, ptr {base or a}, double {factor})")

    def _product(self) -> str:
        name = f"product_{self.n}"
        if not self.module.once(name):
            return name
        f = Function(self.module, name, ["ptr noalias %out", "ptr %a", "ptr %b", "ptr %base", "double %factor"])
        one = f.put(f"insertelement {self.vector} poison, double %factor, i32 0")
        zeros = f"<{self.lanes} x i32> zeroinitializer"
        factor = f.put(f"shufflevector {self.vector} {one}, {self.vector} poison, {zeros}")
        with f.loop(self.n) as row:
            start = f.put(f"mul i64 {row}, {self.columns}")
            sums = []
            for column in range(self.columns):
                index = f.put(f"add i64 {start}, {column}")
                sums.append(f.put(f"fmul {self.vector} {factor}, {self._load(f, '%base', index)}"))
            at = f.put(f"mul i64 {row}, {self.row}")
            for k in range(self.n):
                weight = self._spread(f, f.load("%a", f.put(f"add i64 {at}, {k}")))
                for column in range(self.columns):
                    other = self._load(f, "%b", k * self.columns + column)
                    sums[column] = self._multiply_add(f, weight, other, sums[column])
            for column in range(self.columns):
                self._store(f, sums[column], "%out", f.put(f"add i64 {start}, {column}"))
        f.do("ret void")
        f.finish()
        return name

    def combine(self, f: Function, out: str, a: str, a2: str, coefficients: list[float]) -> None:
        """out = c₀ I + c₁ a + c₂ a²."""
        first, second, third = coefficients
        with f.loop(self.n * self.columns) as k:
            value = f.put(f"fmul {self.vector} {self._splat(second)}, {self._load(f, a, k)}")
            self._store(f, self._multiply_add(f, self._splat(third), self._load(f, a2, k), value), out, k)
        for row in range(self.n):
            self.set(f, out, row, row, f.add(self.get(f, out, row, row), self.module.number(first)))

    def move(self, f: Function, out: str, source: str, count: str, doublings: str) -> None:
        """Copy a panel, for batch elements that still double."""
        m = self.module
        condition = None
        if m.width > 1:
            i = m.vector("i")
            one = f.put(f"insertelement {i} poison, i64 {count}, i32 0")
            spread = f.put(f"shufflevector {i} {one}, {i} poison, <{m.width} x i32> zeroinitializer")
            condition = f.put(f"icmp slt {i} {spread}, {doublings}")
        with f.loop(self.n * self.columns) as k:
            value = self._load(f, source, k)
            if condition is not None:
                value = f.select(condition, value, self._load(f, out, k))
            self._store(f, value, out, k)


KERNELS: dict[str, Callable[[Module, int], str]] = {"exponential_step": exponential_step, "eigh": eigh}
"""Write a kernel into a module, and return the name of its function."""
