"""A run in compiled code: the memory of all batch elements, and the loop over blocks of observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pcnet.engine.compiled.driver import ENTRY, FIELDS, KIND, MAX_VARIANTS, run_function
from pcnet.engine.compiled.layout import Array, Layout, TickKind, pack, unpack
from pcnet.engine.compiled.native import processor
from pcnet.engine.compiled.variants import Variants
from pcnet.engine.program import Program

LANES, WIDE_LANES = 4, 8
"""Batch elements side by side in a vector; the second for 8, and for many on processors with wide vectors."""
PATIENCE = 16
"""Ticks that are taken one by one, to see the second use of a new variant."""
LONG = 8
"""Ticks from which groups share the memory of derived values, which may be megabytes: it stays in the cache then."""
EVERYTHING = -1
"""All bits: the derived values of all variants are invalid."""
WORD = {name: place for place, name in enumerate(FIELDS)}


def address(array: NDArray[Any]) -> int:
    """Where an array is in memory."""
    return int(array.__array_interface__["data"][0])


def width_for(batch: int) -> int:
    """Number of lanes for a batch: as many as vectors of the processor have, if the batch fills them.

    Eight rows of a bank are one vector in any case, so that single ticks are one call.
    """
    if batch == 1:
        return 1
    return WIDE_LANES if batch == WIDE_LANES or (batch > WIDE_LANES and processor().wide) else LANES


class Block(NamedTuple):
    """Observations to take in, one after the other.

    kinds: number of the kind of each tick, (T,). given: (T, n) for all batch elements, or (T, B, n). recorded: whether
    each is recorded, (T,).
    """

    kinds: NDArray[np.uint8]
    given: Array
    recorded: NDArray[np.uint8]


class _Work(NamedTuple):
    """A block for one group of lanes, or one of its ticks for one lane.

    slot: the number of the group, whose hints and settings are used; that of all groups for a lane alone. derived: the
    slot of the derived values. state: (size, lanes), which the loop changes. given: (T, n, lanes). record: (rows, n,
    lanes), which it fills. kinds, recorded: as in `Block`.
    """

    slot: int
    derived: int
    state: Array
    given: Array
    record: Array
    kinds: NDArray[np.uint8]
    recorded: NDArray[np.uint8]

    def row(self, tick: int) -> int:
        """The number of rows that are recorded before a tick."""
        return int(self.recorded[:tick].sum()) if tick else 0


class _Refused(NamedTuple):
    """A tick that compiled code could not do: the state before it, its kind and what was given, (n,) or (B, n)."""

    state: Array
    kind: int
    given: Array

    def begins(self, block: Block, state: Array) -> bool:
        """Whether a block begins with it."""
        same = self.kind == block.kinds[0] and np.array_equal(self.given, block.given[0], equal_nan=True)
        return same and np.array_equal(self.state, state, equal_nan=True)


class _DisagreesError(Exception):
    """A variant gives other numbers than the eager engine."""


class CompiledRun:
    """The state of batch elements in memory, (groups, elements of the state, lanes).

    elements: the batch elements that are run; those that have stopped, and copies of others, are left out.
    """

    def __init__(self, program: Program, variants: Variants) -> None:
        self.program, self.variants, self.layout = program, variants, variants.layout
        self.width = variants.width
        self.size = Layout.size(self.layout.state)
        self.n_given = Layout.size(self.layout.given)
        self.kinds: list[TickKind] = []
        self._unchecked: dict[int, int] = {}  # new variants, and how many more ticks to wait for their second use
        self._kind_numbers: dict[TickKind, int] = {}
        self._refused: _Refused | None = None
        self._other = np.zeros((self.size, self.width))
        self._scratch = np.zeros((2, self.size, self.width))
        self._words = np.zeros(len(FIELDS), dtype=np.int64)
        self._run = run_function()
        self.version = 0
        """Changes whenever memory is laid out anew."""
        self._resize(np.arange(program.spec.batch))

    def _resize(self, elements: NDArray[np.int64]) -> None:
        self.elements, self.batch = elements, len(elements)
        self.groups = -(-self.batch // self.width)
        self._state = np.zeros((self.groups, self.size, self.width))
        self._settings = np.zeros((self.groups, max(1, Layout.size(self.layout.settings)), self.width))
        self._stale = np.full(self.groups + 1, EVERYTHING, dtype=np.int64)
        self._known = -1
        self.version += 1

    # --- memory --------------------------------------------------------------------------------------------------
    def load(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Tensor], elements: NDArray[np.int64]) -> None:
        """Take over a state, (B, ...) by path, of some batch elements, and settings that differ over the batch."""
        if len(elements) < self.program.spec.batch:
            tensors = {name: value[elements] for name, value in tensors.items()}
        self.load_copies(tensors, settings, elements)

    def load_copies(
        self, tensors: Mapping[str, Tensor], settings: Mapping[str, Tensor], elements: NDArray[np.int64]
    ) -> None:
        """Take over states of their own, (len(elements), ...) by path, of batch elements that may occur repeatedly."""
        if not np.array_equal(elements, self.elements):
            self._resize(elements)
        self._state[...] = self.grouped(pack(self.layout.state, tensors))
        self._stale[:] = EVERYTHING
        self.load_settings(settings)

    def load_memory(self, memory: Array) -> None:
        """Take over a state as memory, (B, size)."""
        self._state[...] = self.grouped(memory)
        self._stale[:] = EVERYTHING

    def change_elements(self, memory: Array, settings: Mapping[str, Tensor], elements: NDArray[np.int64]) -> None:
        """Go on with these batch elements and their state as memory, (len(elements), size)."""
        if not np.array_equal(elements, self.elements):
            self._resize(elements)
            self.load_settings(settings)
        self.load_memory(memory)

    def memory(self) -> Array:
        """The state as memory, (B, size)."""
        return self._ungrouped(self._state)

    def load_settings(self, settings: Mapping[str, Tensor]) -> None:
        """Take over settings that differ over the batch, (B, ...) by path."""
        if settings:
            self._settings[...] = self.grouped(pack(self.layout.settings, settings)[self.elements])

    def tensors(self) -> dict[str, Tensor]:
        """The state of these batch elements by path."""
        return unpack(self.layout.state, self._ungrouped(self._state))

    def node_tensors(self, node: str) -> dict[str, Tensor]:
        """The state of a node by path."""
        part, places = self.layout.of_node(node)
        return unpack(part, self._ungrouped(self._state[:, places]))

    def set_node_tensors(self, node: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state of a node, (B, ...) by path."""
        part, places = self.layout.of_node(node)
        self._state[:, places] = self.grouped(pack(part, tensors))
        self._stale[:] = EVERYTHING

    def grouped(self, rows: Array) -> Array:
        """(B, n) → (groups, n, lanes); the last group is filled up with the last batch element."""
        spare = self.groups * self.width - len(rows)
        if spare:
            rows = np.concatenate([rows, np.repeat(rows[-1:], spare, 0)])
        return np.ascontiguousarray(rows.reshape(self.groups, self.width, -1).swapaxes(1, 2))

    def _ungrouped(self, memory: Array) -> Array:
        """(groups, n, lanes) → (B, n)."""
        return memory.swapaxes(1, 2).reshape(self.groups * self.width, memory.shape[1])[: self.batch]

    def number_of(self, kind: TickKind) -> int:
        """The number of a kind of tick."""
        found = self._kind_numbers.get(kind)
        if found is None:
            found = self._kind_numbers[kind] = len(self.kinds)
            self.kinds.append(kind)
            self._known = -1
        return found

    def _sync(self) -> None:
        """Lay out the table of variants anew, if there are new ones."""
        version, variants = self.variants.version, self.variants.all[:MAX_VARIANTS]
        if self._known == version:
            return
        self._table = np.zeros((len(self.kinds), KIND), dtype=np.int64)
        offset = 0
        for bit, variant in enumerate(variants):
            touched = sum(1 << i for i, other in enumerate(variants) if other.depends & variant.changes)
            number = self._kind_numbers.get(variant.kind)
            if number is not None:
                row = self._table[number]
                start = 1 + ENTRY * int(row[0])
                tick, prepare, finish = map(variant.library.address, ("tick", "prepare", "finish"))
                row[start : start + ENTRY] = tick, prepare, offset, 1 << bit, touched, finish
                row[0] += 1
            offset += variant.derived * self.width * 8
        self._hints = np.zeros((self.groups + 1, max(1, len(self.kinds))), dtype=np.int64)
        self._derived = np.zeros((self.groups + 1, max(1, offset // 8)))
        self._stale[:] = EVERYTHING
        self._known = version
        self.version += 1

    # --- ticks ---------------------------------------------------------------------------------------------------
    def advance(self, block: Block) -> tuple[int, Array]:
        """Take in observations, as many as compiled code can.

        Returns:
            Their number, and what was recorded, (rows, B, n). The state is that after them.
        """
        if self._refused is not None and self._refused.begins(block, self._state):  # it would fail again
            return 0, np.zeros((0, self.batch, 0))
        before = self._state.copy()
        try:
            done, record = self._attempt(block)
        except _DisagreesError:
            done, record = 0, np.zeros((0, self.batch, 0))
        if done < len(block.kinds):
            self._state[...] = before
            self._stale[:] = EVERYTHING
            if done:
                cut = Block(block.kinds[:done], block.given[:done], block.recorded[:done])
                again, record = self._attempt(cut)
                assert again == done
            else:
                record = record[:0]
            self._refused = _Refused(self._state.copy(), int(block.kinds[done]), block.given[done].copy())
        return done, record

    def _attempt(self, block: Block) -> tuple[int, Array]:
        """Run all groups; the number of ticks that all of them could do, and what they recorded, (rows, B, n)."""
        ticks = len(block.kinds)
        rows, n_record = int(block.recorded.sum()), self._n_record(block)
        if n_record is None:
            return 0, np.zeros((0, self.batch, 0))
        self._sync()
        record = np.empty((rows + 1, n_record, self.width))  # of one group, so that it stays in the cache
        found = record[:rows].transpose(2, 1, 0)
        whole = found if self.groups == 1 else np.empty((self.groups * self.width, n_record, rows))
        shared = block.given.ndim == 2
        if shared:
            given = np.repeat(block.given[:, :, None], self.width, 2)
        for group in range(self.groups):
            if not shared:
                lanes = np.minimum(np.arange(group * self.width, (group + 1) * self.width), self.batch - 1)
                given = np.ascontiguousarray(block.given[:, lanes].swapaxes(1, 2))
            long = ticks >= LONG or (ticks > 0 and self.kinds[int(block.kinds[0])].first)
            derived = self.groups if long and self.groups > 1 else group
            work = _Work(group, derived, self._state[group], given, record, block.kinds, block.recorded)
            ticks = self._attempt_group(work, ticks)
            if not ticks:
                break
            if self.groups > 1:
                whole[group * self.width : (group + 1) * self.width] = found
        return ticks, whole[: self.batch].transpose(2, 0, 1)

    def _n_record(self, block: Block) -> int | None:
        """Number of recorded values a tick; known once a tick was recorded."""
        if not self.variants.all:
            kind = self.kinds[int(block.kinds[0])]
            given = block.given[0] if block.given.ndim == 2 else block.given[0, 0]
            added = self._add(int(self.elements[0]), kind, self._state[0, :, 0], given)
            if not added and not self.variants.all:  # nor by another thread
                return None
        return Layout.size(self.layout.record)

    def _attempt_group(self, work: _Work, ticks: int) -> int:
        """Run one group; the number of ticks that it could do, at most `ticks`."""
        done = 0
        while done < ticks:
            done += self._checked_tick(work, done) if self._unchecked else self._call(work, done, ticks)
            if done < ticks and not self._single_tick(work, done):
                break
            done += done < ticks
        return done

    def _call(self, work: _Work, first: int, ticks: int) -> int:
        """Run the loop from tick `first` to `ticks`; the number of ticks that it did."""
        words, (slot, kept, state, given, record, kinds, recorded) = self._words, work
        if kept != slot:  # others have used them: they are derived anew
            self._stale[[slot, kept]] = EVERYTHING
        other = self._other if slot < self.groups else self._scratch[1]
        start = address(state)
        words[:] = (
            ticks - first, start, address(other), address(given) + first * given.strides[0], given.strides[0],
            address(self._settings_of(slot)), address(record) + work.row(first) * record.strides[0], record.strides[0],
            address(kinds) + first, address(recorded) + first, address(self._table),
            address(self._hints[slot]), self._stale[kept], address(self._derived[kept]), state.nbytes,
        )  # fmt: skip
        done = int(self._run(address(words)))
        self._stale[kept] = words[WORD["stale"]]
        if words[WORD["state"]] != start:
            state[...] = other
        return done

    # --- single ticks --------------------------------------------------------------------------------------------
    @property
    def function(self) -> Any:
        """The loop in machine code."""
        return self._run

    def words_for(
        self, given: Array, kinds: NDArray[np.uint8], recorded: NDArray[np.uint8], record: Array, group: int = 0
    ) -> NDArray[np.int64]:
        """Words of the loop for one tick of a group, between its own state and another buffer."""
        self._sync()
        words = np.zeros(len(FIELDS), dtype=np.int64)
        words[:] = (
            1, address(self._state[group]), address(self._other), address(given), given.strides[0],
            address(self._settings[group]), address(record), record.strides[0], address(kinds),
            address(recorded), address(self._table), address(self._hints[group]), EVERYTHING,
            address(self._derived[group]), self._other.nbytes,
        )  # fmt: skip
        return words

    def settle(self, flipped: bool) -> None:
        """Take over from single ticks; flipped: whether they have left the state in the other buffer."""
        if flipped:
            self._state[0] = self._other
        self._stale[:] = EVERYTHING

    def _settings_of(self, slot: int) -> Array:
        return self._settings[slot] if slot < self.groups else self._lane_settings

    def _single_tick(self, work: _Work, at: int) -> bool:
        """One tick for each lane by itself, because they take different branches; False if one cannot be compiled."""
        group, state, row, slot = work.slot, work.state, work.row(at), self.groups
        made, scratch = np.empty_like(state), self._scratch[0]
        kind, recorded = work.kinds[at : at + 1], work.recorded[at : at + 1]
        for lane in range(self.width):
            element = int(self.elements[min(group * self.width + lane, self.batch - 1)])
            scratch[...] = state[:, lane : lane + 1]
            self._lane_settings = np.repeat(self._settings[group][:, lane : lane + 1], self.width, 1)
            given = np.repeat(work.given[at : at + 1, :, lane : lane + 1], self.width, 2)
            alone = _Work(slot, slot, scratch, given, np.zeros((2, *work.record.shape[1:])), kind, recorded)
            self._stale[slot] = EVERYTHING
            done = self._call(alone, 0, 1)
            if not done and self._known != self.variants.version:  # another thread has added some
                self._sync()
                done = self._call(alone, 0, 1)
            if not done:
                added = self._add(element, self.kinds[int(kind[0])], state[:, lane], work.given[at, :, lane])
                if not added and self._known == self.variants.version:  # nor by another thread
                    return False
                self._sync()
                scratch[...] = state[:, lane : lane + 1]
                if not self._call(alone, 0, 1):
                    return False
            made[:, lane] = scratch[:, 0]
            work.record[row, :, lane] = alone.record[0, :, 0]
        state[...] = made
        self._stale[group] = EVERYTHING
        return True

    def _add(self, element: int, kind: TickKind, state: Array, given: Array) -> bool:
        """Record and compile the tick of a batch element, from its state and what is given, (n,) each."""
        before = unpack(self.layout.state, state[None])
        added = self.variants.add(self.program, element, kind, before, unpack(self.layout.given, given[None]))
        if added and not kind.first:
            self._unchecked[len(self.variants.all) - 1] = PATIENCE
        return added

    # --- a safety net --------------------------------------------------------------------------------------------
    def _checked_tick(self, work: _Work, at: int) -> int:
        """One tick; if it is the second use of a new variant, it is compared with that of the eager engine.

        A number that was taken for a constant when the tick was recorded shows at another tick.
        """
        group, state = work.slot, work.state
        before = state.copy()
        if not self._call(work, at, at + 1):
            return 0
        number = int(work.kinds[at])
        kind = self.kinds[number]
        places = [i for i, variant in enumerate(self.variants.all[:MAX_VARIANTS]) if variant.kind == kind]
        used = places[int(self._hints[group, number])]
        is_new = self._unchecked.pop(used, None) is not None
        self._unchecked = {other: left - 1 for other, left in self._unchecked.items() if left > 1}
        if not is_new:
            return 1
        element = int(self.elements[min(group * self.width, self.batch - 1)])
        start, end = (unpack(self.layout.state, each[None, :, 0]) for each in (before, state))
        seen = unpack(self.layout.given, work.given[None, at, :, 0])
        if not self.variants.agrees(used, self.program, element, start, end, seen):
            self._unchecked.clear()
            raise _DisagreesError
        return 1


def report(variants: Variants) -> str:
    """The variants of a model as text."""
    lines = []
    for number, variant in enumerate(variants.all):
        kind = variant.kind
        due = (
            "all"
            if all(due is not False for due in kind.due)
            else f"{sum(d is not False for d in kind.due)} of {len(kind.due)}"
        )
        lines.append(
            f"variant {number}: {'first tick, ' if kind.first else ''}{due} acts, "
            f"{'regular' if kind.regular else 'irregular'} time; {variant.operations} operations as {variant.form}; "
            f"recorded in {variant.seconds[0]:.2f} s, compiled in {variant.seconds[1]:.2f} s"
        )
    for reasons in variants.reasons.values():
        for reason in dict.fromkeys(reasons):
            lines.append(f"eager: {reason}")
    return "\n".join(lines)
