"""Scalar values: a program in single-assignment form, in which equal values are one value.

A value is a number that stands for a constant, an input or an operation on earlier values. Operations on constants are
computed at once, and so are those with 0 and 1. These rules assume finite numbers (0·x = 0, x − x = 0, e^log x = x);
compiled code checks that all that it stores is finite, and leaves the tick to the eager engine otherwise.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

DOUBLE, SINGLE, BOOL = "d", "f", "b"
"""Kinds of values. Integers are kept as DOUBLE, which holds them exactly up to 2^53."""
EXACT = (operator.add, operator.sub, operator.mul)
COMMUTATIVE = frozenset({"add", "mul", "and", "or", "eq", "ne"})
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.round,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "exp2": np.exp2,
    "log2": np.log2,
    "log10": np.log10,
    "expm1": np.expm1,
    "log1p": np.log1p,
    "lgamma": np.vectorize(math.lgamma, otypes=[float]),
    "erf": np.vectorize(math.erf, otypes=[float]),
    "erfc": np.vectorize(math.erfc, otypes=[float]),
}
_FUNCTIONS_OF_TWO: dict[str, Callable[..., Any]] = {
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "fmod": np.fmod,
    "fmax": np.fmax,
    "fmin": np.fmin,
    "copysign": np.copysign,
}
FUNCTIONS, FUNCTIONS_OF_TWO = frozenset(_FUNCTIONS), frozenset(_FUNCTIONS_OF_TWO)
"""Functions of one number and of two, by the names that torch and the C library have for them."""
_SIMPLE = frozenset({0.0, 1.0, -1.0})
"""Factors whose product is exact."""


class Values:
    """All values of a program. `operations[i]` is (name, *arguments), `kinds[i]` the kind of value i."""

    def __init__(self, fused: bool = False) -> None:
        """fused: whether the processor has fused multiply-add instructions."""
        self.fused = fused
        self.operations: list[tuple[Any, ...]] = []
        self.kinds: list[str] = []
        self.guards: list[int] = []
        """Conditions that must hold for the program to be valid."""
        self._index: dict[tuple[Any, ...], int] = {}
        self._known: dict[int, Any] = {}

    def new(self, kind: str, name: str, *args: Any) -> int:
        key = (name, *args)
        if name in COMMUTATIVE and args[0] > args[1]:
            key = (name, args[1], args[0])
        found = self._index.get(key)
        if found is None:
            found = self._index[key] = len(self.operations)
            self.operations.append(key)
            self.kinds.append(kind)
        return found

    def constant(self, value: Any, kind: str = DOUBLE) -> int:
        if kind == BOOL:
            made: Any = bool(value)
            key: Any = made
        else:
            made = np.float32(value) if kind == SINGLE else float(value)
            key = float(made).hex()
        found = self.new(kind, "constant", kind, key)
        self._known[found] = made
        return found

    def known(self, a: int) -> Any:
        """The value of a constant; None if it is not one."""
        return self._known.get(a)

    # --- arithmetic ----------------------------------------------------------------------------------------------
    def _folded(self, kind: str, function: Callable[..., Any], *values: Any) -> int:
        if kind == DOUBLE and function in EXACT:  # plain numbers, which warn of nothing
            return self.constant(function(*values), kind)
        with np.errstate(all="ignore"):
            return self.constant(function(*values), kind)

    def add(self, a: int, b: int) -> int:
        x, y, kind = self.known(a), self.known(b), self.kinds[a]
        if x is not None and y is not None:
            return self._folded(kind, operator.add, x, y)
        if x == 0:
            return b
        if y == 0:
            return a
        if self.operations[b][0] == "neg":
            return self.sub(a, self.operations[b][1])
        if self.operations[a][0] == "neg":
            return self.sub(b, self.operations[a][1])
        return self.new(kind, "add", a, b)

    def sub(self, a: int, b: int) -> int:
        x, y, kind = self.known(a), self.known(b), self.kinds[a]
        if x is not None and y is not None:
            return self._folded(kind, operator.sub, x, y)
        if y == 0:
            return a
        if x == 0:
            return self.neg(b)
        if a == b:
            return self.constant(0.0, kind)
        if self.operations[b][0] == "neg":
            return self.add(a, self.operations[b][1])
        return self.new(kind, "sub", a, b)

    def neg(self, a: int) -> int:
        x = self.known(a)
        if x is not None:
            return self.constant(-x, self.kinds[a])
        operation = self.operations[a]
        if operation[0] == "neg":
            return int(operation[1])
        if operation[0] == "sub":
            return self.new(self.kinds[a], "sub", operation[2], operation[1])
        return self.new(self.kinds[a], "neg", a)

    def mul(self, a: int, b: int) -> int:
        x, y, kind = self.known(a), self.known(b), self.kinds[a]
        if x is not None and y is not None:
            return self._folded(kind, operator.mul, x, y)
        for value, other in ((x, b), (y, a)):
            if value == 0:
                return self.constant(0.0, kind)
            if value == 1:
                return other
            if value == -1:
                return self.neg(other)
        first, second = self.operations[a], self.operations[b]
        if first[0] == "neg" and second[0] == "neg":
            return self.mul(first[1], second[1])
        if first[0] == "neg":
            return self.neg(self.mul(first[1], b))
        if second[0] == "neg":
            return self.neg(self.mul(a, second[1]))
        return self.new(kind, "mul", a, b)

    def multiply_add(self, a: int, b: int, c: int) -> int:
        """a·b + c, rounded once if the processor can.

        Where this is done depends on the rule alone, not on what is constant: an element of a batch, some of whose
        settings are inputs, has the digits of the same element alone.
        """
        known = self._known.get
        x, y = known(a), known(b)
        if x == 0 or y == 0:
            return c
        if not self.fused or known(c) == 0 or x in _SIMPLE or y in _SIMPLE:
            return self.add(self.mul(a, b), c)  # exactly the same, but for the first case
        first, second = self.operations[a], self.operations[b]
        if first[0] == "neg":
            return self.multiply_subtract(first[1], b, c)
        if second[0] == "neg":
            return self.multiply_subtract(a, second[1], c)
        return self.new(self.kinds[a], "fma", *sorted((a, b)), c)

    def multiply_subtract(self, a: int, b: int, c: int) -> int:
        """c − a·b, rounded once if the processor can."""
        known = self._known.get
        x, y = known(a), known(b)
        if x == 0 or y == 0:
            return c
        if not self.fused or known(c) == 0 or x in _SIMPLE or y in _SIMPLE:
            return self.sub(c, self.mul(a, b))
        first, second = self.operations[a], self.operations[b]
        if first[0] == "neg":
            return self.multiply_add(first[1], b, c)
        if second[0] == "neg":
            return self.multiply_add(a, second[1], c)
        return self.new(self.kinds[a], "fnma", *sorted((a, b)), c)

    def div(self, a: int, b: int) -> int:
        x, y, kind = self.known(a), self.known(b), self.kinds[a]
        if x is not None and y is not None:
            scale = np.float32 if kind == SINGLE else np.float64
            return self._folded(kind, lambda p, q: scale(p) / scale(q), x, y)
        if x == 0:
            return self.constant(0.0, kind)
        if y == 1:
            return a
        if y is not None and math.frexp(float(y))[0] in (0.5, -0.5) and 1e-300 < abs(float(y)) < 1e300:
            return self.mul(a, self.constant(1.0 / float(y), kind))  # exact for a power of two
        return self.new(kind, "div", a, b)

    def function(self, name: str, *args: int) -> int:
        """A function of numbers of one kind: exp, log, sqrt, abs, …; see FUNCTIONS and FUNCTIONS_OF_TWO."""
        known, kind = [self.known(a) for a in args], self.kinds[args[0]]
        if all(x is not None for x in known):
            scale, made = np.float32 if kind == SINGLE else np.float64, _FUNCTIONS | _FUNCTIONS_OF_TWO
            return self._folded(kind, made[name], *(scale(x) for x in known))
        operation = self.operations[args[0]]
        if name == "exp" and operation[0] == "log":
            return int(operation[1])
        return self.new(kind, name, *args)

    def pow(self, a: int, b: int) -> int:
        x, y, kind = self.known(a), self.known(b), self.kinds[a]
        if x is not None and y is not None:
            scale = np.float32 if kind == SINGLE else np.float64
            return self._folded(kind, lambda p, q: scale(p) ** scale(q), x, y)
        if y == 0:
            return self.constant(1.0, kind)
        if y == 1:
            return a
        if y == 2:
            return self.mul(a, a)
        if y == 3:
            return self.mul(self.mul(a, a), a)
        if y == 0.5:
            return self.function("sqrt", a)
        if y in (-1, -2):
            return self.div(self.constant(1.0, kind), a if y == -1 else self.mul(a, a))
        return self.new(kind, "pow", a, b)

    def maximum(self, a: int, b: int) -> int:
        return self._extreme("gt", a, b)

    def minimum(self, a: int, b: int) -> int:
        return self._extreme("lt", a, b)

    def _extreme(self, name: str, a: int, b: int) -> int:
        """The larger or smaller; NaN if one is NaN."""
        if a == b:
            return a
        if self.known(b) is not None:
            a, b = b, a
        x = self.known(a)
        if x is not None and math.isnan(x):
            return a
        chosen = self.select(self.compare(name, a, b), a, b)  # b if b is NaN
        return chosen if x is not None else self.select(self.compare("ne", a, a), a, chosen)

    # --- conditions ----------------------------------------------------------------------------------------------
    def compare(self, name: str, a: int, b: int) -> int:
        x, y = self.known(a), self.known(b)
        if x is not None and y is not None:
            return self.constant(COMPARISONS[name](x, y), BOOL)
        return self.new(BOOL, name, a, b)

    def both(self, a: int, b: int) -> int:
        for one, other in ((a, b), (b, a)):
            value = self.known(one)
            if value is not None:
                return other if value else one
        return a if a == b else self.new(BOOL, "and", a, b)

    def either(self, a: int, b: int) -> int:
        for one, other in ((a, b), (b, a)):
            value = self.known(one)
            if value is not None:
                return one if value else other
        return a if a == b else self.new(BOOL, "or", a, b)

    def negation(self, a: int) -> int:
        value = self.known(a)
        if value is not None:
            return self.constant(not value, BOOL)
        operation = self.operations[a]
        return int(operation[1]) if operation[0] == "not" else self.new(BOOL, "not", a)

    def select(self, condition: int, a: int, b: int) -> int:
        value = self.known(condition)
        if value is not None:
            return a if value else b
        if a == b:
            return a
        if self.operations[condition][0] == "not":
            condition, a, b = self.operations[condition][1], b, a
        return self.new(self.kinds[a], "select", condition, a, b)

    def finite(self, a: int) -> int:
        x = self.known(a)
        if x is not None:
            return self.constant(math.isfinite(x), BOOL)
        if self.kinds[a] == BOOL:
            return self.constant(True, BOOL)
        return self.new(BOOL, "finite", a)

    def cast(self, a: int, kind: str) -> int:
        """The same number as another kind."""
        if self.kinds[a] == kind:
            return a
        x = self.known(a)
        if x is not None:
            return self.constant(x != 0 if kind == BOOL else float(x), kind)
        if kind == BOOL:
            return self.compare("ne", a, self.constant(0.0, self.kinds[a]))
        if self.kinds[a] == BOOL:
            return self.select(a, self.constant(1.0, kind), self.constant(0.0, kind))
        return self.new(kind, "cast", a)

    # --- sums ----------------------------------------------------------------------------------------------------
    def sum(self, terms: Sequence[int], kind: str) -> int:
        """A sum, by halves."""
        if not terms:
            return self.constant(0.0, kind)
        if len(terms) > 8:
            half = len(terms) // 2
            return self.add(self.sum(terms[:half], kind), self.sum(terms[half:], kind))
        total = terms[0]
        for term in terms[1:]:
            total = self.add(total, term)
        return total

    def dot(self, a: Iterable[int], b: Iterable[int], total: int) -> int:
        """A scalar product, added to a total."""
        for x, y in zip(a, b, strict=True):
            total = self.multiply_add(x, y, total)
        return total

    # --- order ---------------------------------------------------------------------------------------------------
    def arguments(self, a: int) -> Sequence[int]:
        """The values that a value is computed from."""
        operation = self.operations[a]
        if operation[0] in ("constant", "input"):
            return ()
        if operation[0] == "kernel":
            return operation[3]  # type: ignore[no-any-return]
        return operation[1:2] if operation[0] == "result" else operation[1:]

    def needed(self, roots: Iterable[int]) -> list[int]:
        """All values that some values depend on, each as late as its first use allows, so that few are held at once."""
        found: dict[int, None] = {}
        for root in roots:
            waiting = [root]
            while waiting:
                value = waiting[-1]
                missing = [] if value in found else [each for each in self.arguments(value) if each not in found]
                if missing:
                    waiting += reversed(missing)
                else:
                    found[waiting.pop()] = None
        return list(found)
