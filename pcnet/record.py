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


class Tape:
    """A growing recording of one quantity, in blocks, so that its length need not be known.

    What is read is never changed afterwards, so that it can be kept as it is until a block is full.
    """

    def __init__(self, dims: tuple[str, ...], read: Callable[[], Tensor], block: int = 256) -> None:
        self.dims = dims
        self._read = read
        self._block = block
        self._full: list[Tensor] = []
        self._open: list[Tensor] = []

    def write(self, going: Tensor | None = None) -> None:
        """Keep the quantity as it is now; batch elements that are not `going` (B,) are kept as NaN."""
        value = self._read()
        if going is not None:
            value = torch.where(going.view(-1, *(1,) * (value.dim() - 1)), value, torch.nan)
        self._open.append(value)
        if len(self._open) == self._block:
            self._full.append(torch.stack(self._open).cpu())
            self._open = []

    def keep(self, last: int) -> None:
        """Forget blocks that lie wholly before the last so many values."""
        spare = (len(self._full) * self._block + len(self._open) - last) // self._block
        if spare > 0:
            del self._full[:spare]

    def rewind(self, values: Tensor) -> None:
        """Go on after what another tape has kept, (T, B, ...)."""
        self._full, self._open = [values], []

    def tensor(self) -> Tensor | None:
        """(T, B, ...), or None where nothing was written."""
        blocks = [*self._full, torch.stack(self._open).cpu()] if self._open else self._full
        return torch.cat(blocks) if blocks else None
