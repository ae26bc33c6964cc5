"""Which quantities a run records, and the buffers that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.settings import settings

ENERGY = "energy"
"""Quantity that stands for free energy, accuracy and complexity, in total and per node."""
BLOCK, BLOCK_BYTES = 256, 2**20
"""A block holds at most this many ticks and at most this many bytes of raw values (but at least one tick)."""


@settings
class Record:
    """What a run records.

    Args:
        quantities: Names such as "mean", "sd", "covariance", "observation", "prediction", "error", "weighted_error",
            "energy".
        nodes: Names of the nodes to record; all by default.
        every: Record every `every`-th observation.
        messages: Also record the messages on every link.
    """

    quantities: tuple[str, ...] = ("mean", "sd", "observation", "prediction", ENERGY)
    nodes: tuple[str, ...] | None = None
    every: int = Field(default=1, ge=1)
    messages: bool = False

    @classmethod
    def of(cls, given: Record | Iterable[str] | None) -> Record:
        """Convert the `record` argument of a run: a Record, names of quantities, or None for the defaults."""
        if given is None or isinstance(given, Record):
            return given or cls()
        if not isinstance(given, Iterable):
            raise SettingError(f"record must be a Record or names such as ['mean', 'sd'], not {given!r}")
        return cls((given,) if isinstance(given, str) else tuple(given))

    @classmethod
    def flow(cls, every: int = 1) -> Record:
        """Everything that `result.error_flow()` and `result.plot()` need."""
        return cls((*cls.quantities, "error", "weighted_error"), every=every, messages=True)


class TraceBuffer:
    """Growing recording of one quantity. Raw values are collected in blocks and transformed block by block.

    Args:
        dims: Names of the dimensions of the quantity.
        raw: Returns the raw value (B, ...) of the current tick; the tensor must not be modified afterwards.
        transform: Maps raw values (N, ...) to the quantity (N, *dims); the identity by default.
    """

    def __init__(
        self, dims: tuple[str, ...], raw: Callable[[], Tensor], transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.dims = dims
        self.running: Tensor | None = None
        """Mask (B,) of the batch elements that were running during the open block; None if all were."""
        self._raw, self._transform = raw, transform
        self._blocks: list[Tensor] = []
        self._open: list[Tensor] = []
        self._capacity = BLOCK

    def append(self, running: Tensor | None = None) -> None:
        """Record the current value; batch elements outside the mask `running` (B,) are recorded as NaN."""
        if running is not self.running:
            self._close_block()
            self.running = running
        value = self._raw()
        if not self._open:
            self._capacity = _capacity(value)
        self._open.append(value)
        if len(self._open) == self._capacity:
            self._close_block()

    def __len__(self) -> int:
        return sum(map(len, self._blocks)) + len(self._open)

    def keep_last(self, count: int) -> None:
        """Drop the blocks that lie entirely before the last `count` values."""
        excess = len(self) - count
        while self._blocks and len(self._blocks[0]) <= excess:
            excess -= len(self._blocks.pop(0))

    def truncate(self, length: int) -> None:
        """Drop all values after the first `length`."""
        while len(self) > length:
            if self._open:
                self._open.pop()
            else:
                self._blocks[-1:] = [self._blocks[-1][:-1]]

    def state(self) -> tuple[Tensor | None, Tensor | None]:
        """Values of the closed blocks (T, B, ...) and raw values of the open block; None where there are none.

        The open block is saved raw: the last digit of a batched matrix inverse depends on its place in the batch, so
        saving a run must not close a block.
        """
        return (torch.cat(self._blocks) if self._blocks else None), (torch.stack(self._open) if self._open else None)

    def restore(self, closed: Tensor | None, unfinished: Tensor | None, running: Tensor | None) -> None:
        """Continue from a `state`; running: the mask of the open block."""
        self._blocks = [] if closed is None else [closed]
        self._open = [] if unfinished is None else list(unfinished.unbind())
        self._capacity, self.running = (_capacity(self._open[0]) if self._open else BLOCK), running

    def tensor(self) -> Tensor | None:
        """All values (T, B, ...), or None if there are none."""
        blocks = [*self._blocks, self._transformed()] if self._open else self._blocks
        return torch.cat(blocks) if blocks else None

    def _close_block(self) -> None:
        if self._open:
            self._blocks, self._open = [*self._blocks, self._transformed()], []

    def _transformed(self) -> Tensor:
        """Values of the open block."""
        values = torch.stack(self._open)
        if self._transform is not None:
            flat = self._transform(values.flatten(0, 1))
            values = flat.view(*values.shape[:2], *flat.shape[1:])
        if self.running is not None:
            values = torch.where(self.running.view(-1, *(1,) * (values.dim() - 2)), values, torch.nan)
        return values.cpu()


def _capacity(value: Tensor) -> int:
    """Number of such values in a block."""
    return max(1, min(BLOCK, BLOCK_BYTES // max(1, value.nbytes)))
