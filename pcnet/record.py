"""What a run keeps, and how often."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

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


class Tape:
    """A growing recording of one quantity, in blocks, so that its length need not be known."""

    def __init__(self, dims: tuple[str, ...], read: Callable[[], Tensor], block: int = 256) -> None:
        self.dims = dims
        self._read = read
        self._block = block
        self._full: list[Tensor] = []
        self._open: Tensor | None = None
        self._used = 0

    def write(self) -> None:
        value = self._read()
        if self._open is None or self._used == self._block:
            if self._open is not None:
                self._full.append(self._open)
            self._open = torch.empty(self._block, *value.shape, dtype=value.dtype)
            self._used = 0
        self._open[self._used].copy_(value)
        self._used += 1

    def tensor(self) -> Tensor | None:
        """(T, B, ...), or None where nothing was written."""
        if self._open is None:
            return None
        return torch.cat([*self._full, self._open[: self._used]])
