"""What a run keeps, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.settings import settings

ENERGY = "energy"
"""The name under which free energy, accuracy and complexity, in all and of every node, are recorded."""
BLOCK, ROOM = 256, 2**20
"""So many values, or the fewer that take so many bytes, are kept as they are before they are put together."""


@settings
class Record:
    """Which quantities to keep, of which nodes (all unless given), at every `every`-th observation.

    quantities: names such as "mean", "sd", "covariance", "observation", "prediction", "error", "weighted_error", and
    "energy". messages: keep what passes along every link as well.
    """

    quantities: tuple[str, ...] = ("mean", "sd", "observation", "prediction", ENERGY)
    nodes: tuple[str, ...] | None = None
    every: int = Field(default=1, ge=1)
    messages: bool = False

    @classmethod
    def of(cls, given: Record | Iterable[str] | None) -> Record:
        """A record from what a run is given: one, names of quantities, or nothing for the usual ones."""
        if given is None or isinstance(given, Record):
            return given or cls()
        if not isinstance(given, Iterable):
            raise SettingError(f"record must be a Record or names such as ['mean', 'sd'], not {given!r}")
        return cls((given,) if isinstance(given, str) else tuple(given))

    @classmethod
    def flow(cls, every: int = 1) -> Record:
        """All that `result.error_flow()` and `result.plot()` show."""
        return cls((*cls.quantities, "error", "weighted_error"), every=every, messages=True)


class TraceBuffer:
    """A growing recording of one quantity, in blocks, so that its length need not be known.

    source: what to keep; it is never changed afterwards, so that it can be kept as it is until a block is full.
    meaning: what that says, if not itself, (N, ...) → (N, *dims); found for a block at once.
    """

    def __init__(
        self, dims: tuple[str, ...], source: Callable[[], Tensor], meaning: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.dims = dims
        self._source = source
        self._meaning = meaning
        self._full: list[Tensor] = []
        self._open: list[Tensor] = []
        self._going: Tensor | None = None  # during the open block
        self._room = BLOCK

    def write(self, going: Tensor | None = None) -> None:
        """Keep the quantity as it is now; batch elements that are not `going` (B,) are kept as NaN."""
        if going is not self._going:
            self._close()
            self._going = going
        kept = self._source()
        if not self._open:
            self._room = _room(kept)
        self._open.append(kept)
        if len(self._open) == self._room:
            self._close()

    def keep(self, last: int) -> None:
        """Forget blocks that lie wholly before the last so many values."""
        spare = len(self) - last
        while self._full and len(self._full[0]) <= spare:
            spare -= len(self._full.pop(0))

    def __len__(self) -> int:
        return sum(map(len, self._full)) + len(self._open)

    def cut(self, length: int) -> None:
        """Forget what was written after the first so many values."""
        while len(self) > length:
            if self._open:
                self._open.pop()
            else:
                self._full[-1:] = [self._full[-1][:-1]]

    @property
    def going(self) -> Tensor | None:
        """Which batch elements went on when it was written last, if not all."""
        return self._going

    def state(self) -> tuple[Tensor | None, Tensor | None]:
        """What blocks that are full say (T, B, ...), and what the open one has kept as it is; None where it is empty.

        A matrix may be inverted to another last digit at another place of its block, so that blocks must not end where
        a run is saved.
        """
        return (torch.cat(self._full) if self._full else None), (torch.stack(self._open) if self._open else None)

    def restore(self, full: Tensor | None, unfinished: Tensor | None, going: Tensor | None) -> None:
        """Go on from a `state`; going: which batch elements went on during the open block."""
        self._full = [] if full is None else [full]
        self._open = [] if unfinished is None else list(unfinished.unbind())
        self._room, self._going = (_room(self._open[0]) if self._open else BLOCK), going

    def tensor(self) -> Tensor | None:
        """(T, B, ...), or None where nothing was written."""
        blocks = [*self._full, self._opened()] if self._open else self._full
        return torch.cat(blocks) if blocks else None

    def _close(self) -> None:
        if self._open:
            self._full, self._open = [*self._full, self._opened()], []

    def _opened(self) -> Tensor:
        """What the open block says."""
        values = torch.stack(self._open)
        if self._meaning is not None:
            ticks = values.shape[:2]
            found = self._meaning(values.flatten(0, 1))
            values = found.view(*ticks, *found.shape[1:])
        if self._going is not None:
            values = torch.where(self._going.view(-1, *(1,) * (values.dim() - 2)), values, torch.nan)
        return values.cpu()


def _room(kept: Tensor) -> int:
    """How many values like this make up a block."""
    return max(1, min(BLOCK, ROOM // max(1, kept.nbytes)))
