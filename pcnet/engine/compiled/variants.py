"""Variants: the compiled forms of a tick, one for each way that its branches on values can go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pcnet.engine.compiled import manifest
from pcnet.engine.compiled.cache import ObjectCache
from pcnet.engine.compiled.driver import MAX_VARIANTS
from pcnet.engine.compiled.element import ElementProgram
from pcnet.engine.compiled.errors import DivergesError, UntraceableError
from pcnet.engine.compiled.layout import Layout, TickKind
from pcnet.engine.compiled.native import Library
from pcnet.engine.program import Program
from pcnet.numerics.branching import EagerOnlyError
from pcnet.results.recorder import Record

if TYPE_CHECKING:
    from pcnet.engine.compiled.element_tick import ElementTick
    from pcnet.engine.compiled.trace import Outside

MAX_ATTEMPTS = 4
"""Ticks of a kind that are recorded in vain before the kind is left to the eager engine."""


TOLERANCES = ((1e-6, 1e-10), (1e-2, 1e-4))
"""How far a number of a tick may be from that of the eager engine, relative to the largest of its tensor, and to the
largest of its node, because differences of large numbers may be rounding alone; the second for single precision."""


class Variant(NamedTuple):
    """A compiled tick.

    outcomes: how its branches on values go. derived: number of values that it derives from what slow ticks change.
    depends: elements of the state on which these depend. changes: elements of the state that the tick changes. form:
    "scalars" or "loops". operations: their number. seconds: time to record and to compile it; 0 for one that was
    compiled by another process. text: its LLVM code; empty for one that was compiled by another process. code: the key
    of its code in the cache.
    """

    kind: TickKind
    outcomes: tuple[bool, ...]
    library: Library
    derived: int
    depends: frozenset[int]
    changes: frozenset[int]
    form: str
    operations: int
    seconds: tuple[float, float]
    text: str
    code: str
    outside: Sequence[Outside] = ()


class Variants:
    """All variants of a model for one width, dtype and record. Sessions share them; they are added as they are needed.

    reasons: why ticks of a kind could not be compiled, by kind.
    """

    def __init__(
        self,
        layout: Layout,
        width: int,
        record: Record,
        identity: str | None = None,
        make_tick: Callable[..., ElementTick] | None = None,
    ) -> None:
        """identity: the key of the list of variants that other processes have made; None for none.

        make_tick: makes what is compiled, of one batch element; a tick unless given.
        """
        self.layout, self.width, self.wanted = layout, width, record
        self._make_tick = make_tick
        self.all: list[Variant] = []
        self.version = 0
        """Changes with the variants."""
        self._rejected: list[Variant] = []
        self.reasons: dict[TickKind, list[str]] = {}
        self._outcomes: dict[TickKind, set[tuple[bool, ...]]] = {}
        self._lock = threading.RLock()
        self._cache = ObjectCache.default()
        self._identity = identity
        self._load()

    @property
    def is_valid(self) -> bool:
        """Whether weights of modules are still what they were when ticks were recorded."""
        return all(each.is_unchanged for variant in self.all for each in variant.outside)

    def _load(self) -> None:
        """Take over what other processes have compiled."""
        content = None if self._cache is None or self._identity is None else self._cache.get(self._identity)
        if content is None or self._cache is None:
            return
        self.layout.record, listed = manifest.decode(content)
        for each in listed:
            code = self._cache.get(each["code"])
            if code is not None:
                self.all.append(Variant(library=Library(code), seconds=(0.0, 0.0), text="", **each))
                self._outcomes.setdefault(each["kind"], set()).add(each["outcomes"])

    def _save(self) -> None:
        if self._cache is None or self._identity is None:
            return
        listed = []
        for each in self.all:
            fields = {name: getattr(each, name) for name in ("outcomes", "code", "derived", "form", "operations")}
            sets = {"depends": sorted(each.depends), "changes": sorted(each.changes)}
            listed.append({"kind": list(each.kind)} | fields | sets)
        self._cache.put(self._identity, manifest.encode(self.layout.record, listed))

    def agrees(
        self,
        number: int,
        program: Program,
        element: int,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
    ) -> bool:
        """Whether a variant leads to the same state as the eager engine, up to rounding; if not, it is given up."""
        from pcnet.engine.compiled.element_tick import ElementTick

        variant = self.all[number]
        make = self._make_tick or ElementTick

        def tried(state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
            """Where the eager engine leads; None if its branches go another way: at the edge nothing can be said."""
            tick = make(ElementProgram(program, element), self.layout, variant.kind, self.wanted, state, given)
            try:
                outcomes, found = tick.tried()
            except DivergesError:
                return None
            if outcomes != variant.outcomes:
                return None
            return {slot.name: found[f"state/{slot.name}"] for slot in self.layout.state}

        expected = tried(before)
        wrong = None if expected is None else self._difference(after, expected)
        if expected is None or wrong is None:
            return True
        moved = tried({name: _rounded_otherwise(value) for name, value in before.items()})
        if moved is None or self._difference(moved, expected) is not None:
            return True  # rounding alone makes as large a difference
        with self._lock:
            self._rejected.append(variant)  # its code may still be in use elsewhere
            self.all = [each for each in self.all if each is not variant]
            self.version += 1
            reason = f"compiled code gave another {wrong} than the eager engine: a rule depends on more than its inputs"
            self.reasons.setdefault(variant.kind, []).extend([reason] * MAX_ATTEMPTS)
            self._save()
        return False

    def _difference(self, after: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
        """The name of a tensor of the state that is other than expected, by more than rounding."""
        sizes = {slot.name: _largest(expected[slot.name]) for slot in self.layout.state}
        of_node: dict[str, float] = {}
        for name, size in sizes.items():
            node = name.partition("/")[0]
            of_node[node] = max(size, of_node.get(node, 0.0))
        for slot in self.layout.state:
            found, wanted = after[slot.name].double(), expected[slot.name].double()
            relative, cancelled = TOLERANCES[slot.dtype == torch.float32]
            limit = relative * sizes[slot.name] + cancelled * of_node[slot.name.partition("/")[0]] + cancelled
            same = (found == wanted) | ((found - wanted).abs() <= limit) | (found.isnan() & wanted.isnan())
            if not bool(same.all()):
                return slot.name
        return None

    def add(
        self, program: Program, element: int, kind: TickKind, state: Mapping[str, Tensor], given: Mapping[str, Tensor]
    ) -> bool:
        """Record a tick and compile it; False if that cannot be done.

        Args:
            program: The program of the run.
            element: The batch element whose tick is recorded.
            kind: The kind of tick.
            state: The state before it, (1, ...), by path.
            given: What is given at it, (1, ...), by name.
        """
        from pcnet.engine.compiled.element_tick import ElementTick  # these are needed only to compile a tick
        from pcnet.engine.compiled.tick_compiler import compile_tick

        with self._lock:
            failed = self.reasons.setdefault(kind, [])
            if len(failed) >= MAX_ATTEMPTS:
                return False
            if len(self.all) >= MAX_VARIANTS:
                failed.append(f"there are more than {MAX_VARIANTS} variants")
                return False
            tick = (self._make_tick or ElementTick)(
                ElementProgram(program, element), self.layout, kind, self.wanted, state, given
            )
            try:
                outcomes = tick.outcomes()
                if outcomes in self._outcomes.setdefault(kind, set()):
                    return False  # a matter of rounding, or a number that is too large: for the eager engine
                variant = compile_tick(tick, outcomes, self.width, self._cache)
            except DivergesError:
                return False
            except (UntraceableError, EagerOnlyError) as error:
                failed.append(str(error))
                return False
            except Exception as error:  # the eager engine raises it again, where the user expects it
                failed.append(f"{type(error).__name__}: {error}")
                return False
            self._outcomes[kind].add(outcomes)
            if any(variant.kind == other.kind and variant.code == other.code for other in self.all):
                return False
            self.all.append(variant)
            self.version += 1
            self._save()
            return True


def _largest(values: Tensor) -> float:
    """The largest size of some numbers, apart from those that are not finite."""
    return float(values.double().abs().nan_to_num(0.0, 0.0).max()) if values.numel() else 0.0


def _rounded_otherwise(values: Tensor) -> Tensor:
    """The same numbers, a few units of rounding larger; whole ones may be counts, and stay."""
    if not values.is_floating_point():
        return values
    return torch.where(values == values.round(), values, values * (1 + 4 * torch.finfo(values.dtype).eps))
