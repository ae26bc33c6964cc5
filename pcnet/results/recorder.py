"""Recording: which quantities a run keeps, and the table that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.settings import settings

ENERGY = "energy"  # quantity that stands for free energy, accuracy and complexity, in total and per node
SMOOTHING = "smoothing"  # quantity that stands for what a smoother needs of each state
EVIDENCE = "evidence"  # quantity that stands for the sum of the accuracy so far, and the number of lost observations
BLOCK, BLOCK_BYTES = 256, 2**20
"""Raw values are transformed in blocks of at most this many rows and bytes (but at least one row)."""


@settings
class Record:
    """What a run records.

    Args:
        quantities: Names such as "mean", "sd", "covariance", "observation", "prediction", "error", "weighted_error",
            and "energy".
        nodes: Names of the nodes; all unless given.
        every: Record at every n-th observation.
        messages: Whether to record the messages on every link as well.
    """

    quantities: tuple[str, ...] = ("mean", "sd", "observation", "prediction", ENERGY)
    nodes: tuple[str, ...] | None = None
    every: int = Field(default=1, ge=1, le=2**53)
    messages: bool = False

    @classmethod
    def of(cls, given: Record | Iterable[str] | None) -> Record:
        """A record from a record, from names of quantities, or the default for None."""
        if given is None or isinstance(given, Record):
            return given or cls()
        if not isinstance(given, Iterable):
            raise SettingError(f"record must be a Record or names such as ['mean', 'sd'], not {given!r}")
        if isinstance(given, str) and given == "flow":
            raise SettingError("record='flow' is not a quantity; for the error flow use record=pcnet.Record.flow()")
        return cls((given,) if isinstance(given, str) else tuple(given))

    @classmethod
    def flow(cls, every: int = 1) -> Record:
        """Everything that `result.error_flow()` and `result.plot()` show."""
        return cls((*cls.quantities, "error", "weighted_error"), every=every, messages=True)


class Column(NamedTuple):
    """One recorded quantity: names of its dimensions, how to read its raw value, and how to transform raw values."""

    dims: tuple[str, ...]
    read: Callable[[], Tensor]
    transform: Callable[[Tensor], Tensor] | None = None


class Row(NamedTuple):
    """The raw values of all columns at one time; running: batch elements that have not stopped, None for all."""

    time: float
    values: tuple[Tensor, ...]
    running: Tensor | None


class _Held(NamedTuple):
    """Blocks that are transformed, each with its times, and the rows of the open block."""

    full: list[tuple[list[float], dict[str, Tensor]]]
    open: list[Row]


class RecorderState(NamedTuple):
    """Rows of a recorder: times, transformed values and raw values of the open block by name, (T, B, ...) each.

    running: batch elements that ran during the open block, None for all.
    """

    times: list[float]
    full: dict[str, Tensor]
    raw: dict[str, Tensor]
    running: Tensor | None


class Recorder:
    """A growing table of recorded quantities.

    Rows are appended as they are and transformed block by block. A matrix may be inverted to another last digit at
    another place of its block, so blocks do not depend on when a run is saved.
    """

    def __init__(self, columns: dict[str, Column]) -> None:
        self.columns = columns
        self._held = _Held([], [])
        self.dropped = 0
        """Rows that were there before those that are held."""

    def read(self, time: float, running: Tensor | None) -> Row:
        """The present values of all columns."""
        return Row(time, tuple(column.read() for column in self.columns.values()), running)

    def append(self, row: Row) -> None:
        """Add a row."""
        first = self._held.open[0] if self._held.open else row
        if not _same(row.running, first.running) or len(self._held.open) >= _block_size(first):
            self.close()
        self._held.open.append(row)

    def add_block(self, times: list[float], values: dict[str, Tensor]) -> None:
        """Add rows that are transformed already, (T, B, ...) by name."""
        if self._held.open:
            self.close()
        self._held.full.append((times, values))

    def truncate(self, length: int) -> None:
        """Drop a row that was appended beyond this length by a tick that was interrupted."""
        while len(self) > length and self._held.open:
            self._held.open.pop()

    def take(self) -> dict[str, Tensor]:
        """All that was recorded, (T, B, ...) by name; the recorder is empty afterwards."""
        if len(self._held.full) == 1 and not self._held.open:
            found = dict(self._held.full[0][1])
        else:
            found = {name: value for name in self.columns if (value := self.tensor(name)) is not None}
        self.dropped += len(self)
        self._held = _Held([], [])
        return found

    def keep_last(self, count: int) -> None:
        """Drop the blocks that lie entirely before the last `count` rows."""
        spare = len(self) - count
        while self._held.full and len(self._held.full[0][0]) <= spare:
            first = len(self._held.full.pop(0)[0])
            self.dropped += first
            spare -= first

    def __len__(self) -> int:
        return sum(len(times) for times, _ in self._held.full) + len(self._held.open)

    @property
    def times(self) -> list[float]:
        """The time of each row."""
        return [t for times, _ in self._held.full for t in times] + [row.time for row in self._held.open]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are not transformed yet."""
        return sum(value.numel() * value.element_size() for row in self._held.open for value in row.values)

    def tensor(self, name: str) -> Tensor | None:
        """A quantity at all times, (T, B, ...), or None if nothing was recorded."""
        blocks = self._blocks(name)
        return torch.cat(blocks) if blocks else None

    def by_element(self, name: str, count: int) -> Tensor | None:
        """A quantity at the last so many times, (B, T, ...), or None if nothing was recorded."""
        blocks = self._blocks(name)
        if not blocks:
            return None
        shape = (blocks[0].shape[1], count, *blocks[0].shape[2:])
        made = torch.from_numpy(np.empty(shape, blocks[0][:0].numpy().dtype))  # numpy asks for large pages
        for block in reversed(blocks):
            part = block[max(0, len(block) - count) :]
            made[:, count - len(part) : count] = part.transpose(0, 1)
            count -= len(part)
        return made

    def _blocks(self, name: str) -> list[Tensor]:
        """A quantity at all times, in blocks (T, B, ...)."""
        blocks = [values[name] for _, values in self._held.full]
        return [*blocks, self._transformed(name)] if self._held.open else blocks

    def last(self, name: str, count: int) -> Tensor | None:
        """The last values of a quantity, at most so many, (T, B, ...), or None if nothing was recorded."""
        found = [self._transformed(name)] if self._held.open else []
        have = sum(map(len, found))
        for _, values in reversed(self._held.full):
            if have >= count:
                break
            found.append(values[name])
            have += len(values[name])
        return torch.cat(found[::-1])[-count:] if found else None

    # --- saving --------------------------------------------------------------------------------------------------
    def state(self, since: int = 0) -> RecorderState:
        """All rows from number `since` on, counted from the first that was ever recorded; a block begins there."""
        blocks, row = list[tuple[list[float], dict[str, Tensor]]](), self.full_rows
        for block in reversed(self._held.full):
            row -= len(block[0])
            if row < since:
                break
            blocks.insert(0, block)
        full = {name: torch.cat([values[name] for _, values in blocks]) for name in self.columns if blocks}
        times = [t for part, _ in blocks for t in part] + [row.time for row in self._held.open]
        raw = {}
        if self._held.open:
            for i, name in enumerate(self.columns):
                raw[name] = torch.stack([row.values[i] for row in self._held.open])
        return RecorderState(times, full, raw, self._held.open[0].running if self._held.open else None)

    @property
    def full_rows(self) -> int:
        """Number of rows that are transformed, with those that were dropped."""
        return self.dropped + len(self) - len(self._held.open)

    def restore(
        self, times: Sequence[float], full: dict[str, Tensor], raw: dict[str, Tensor], running: Tensor | None
    ) -> None:
        """Continue from a `state`."""
        count = len(next(iter(raw.values()))) if raw else 0
        done = len(times) - count
        blocks = [(list(times[:done]), full)] if done else []
        rows = zip(*(raw[name].unbind() for name in self.columns), strict=True) if raw else ()
        self._held = _Held(blocks, [Row(t, values, running) for t, values in zip(times[done:], rows, strict=True)])

    # --- blocks --------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Transform the rows of the open block, so that the next row begins another one."""
        block = [row.time for row in self._held.open], {name: self._transformed(name) for name in self.columns}
        self._held = _Held([*self._held.full, block], [])  # in one assignment, for the sake of interrupts

    def _transformed(self, name: str) -> Tensor:
        """Values of a quantity in the open block, (T, B, ...)."""
        i, transform = list(self.columns).index(name), self.columns[name].transform
        values = torch.stack([row.values[i] for row in self._held.open])
        if transform is not None:
            found = transform(values.flatten(0, 1))
            values = found.view(*values.shape[:2], *found.shape[1:])
        running = self._held.open[0].running
        if running is not None:
            values = torch.where(running.view(-1, *(1,) * (values.dim() - 2)), values, torch.nan)
        return values.cpu()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _block_size(row: Row) -> int:
    largest = max((value.nbytes for value in row.values), default=1)
    return max(1, min(BLOCK, BLOCK_BYTES // max(1, largest)))
