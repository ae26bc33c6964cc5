"""What is recorded of a mixture: rows of a run are gathered with their weights, and reduced to those of the mixture."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.mixtures import mix_columns
from pcnet.results.recorder import EVIDENCE, Recorder

MOST_GATHERED = 2**16
"""Rows times observations that are gathered before they are reduced to those of the mixture."""


class _Part(NamedTuple):
    """Times, and what rows have recorded then, (T, K·B, ...) by name, with their weights (T, K, B)."""

    times: list[float]
    values: dict[str, Tensor]


class MixtureRecording:
    """The table of what was recorded of a mixture, up to what was gathered of its rows since.

    Args:
        table: The recorder of the mixture.
        every: Record at every n-th observation.
    """

    def __init__(self, table: Recorder, every: int) -> None:
        self.table = table
        self._every = every
        self._gathered: list[_Part] = []

    def add(self, first: int, times: list[float], values: dict[str, Tensor], weight: Tensor) -> None:
        """Add what rows have recorded.

        Args:
            first: Number of observations before them.
            times: Their times.
            values: (T, K·B, ...) by name; accuracy and evidence are those of the mixture, (T, B).
            weight: Weights of the rows, (T, K, B).
        """
        kept = [i for i in range(len(times)) if (first + i + 1) % self._every == 0]
        if not kept or not self.table.columns:
            return
        found = values | {"weight": weight}
        if len(kept) < len(times):
            times, found = [times[i] for i in kept], {name: value[kept] for name, value in found.items()}
        self._gathered.append(_Part(times, found))
        if sum(part.values["weight"].numel() for part in self._gathered) > MOST_GATHERED:
            self.reduce()

    def reduce(self) -> None:
        """Bring the table up to date."""
        parts, self._gathered = self._gathered, []
        for _, group in itertools.groupby(parts, lambda part: part.values["weight"].shape[1]):
            self._reduce(list(group))

    def _reduce(self, parts: list[_Part]) -> None:
        """Add parts with the same number of rows to the table."""
        times = [t for part in parts for t in part.times]
        found = dict(parts[0].values)
        if len(parts) > 1:
            found = {name: torch.cat([part.values[name] for part in parts]) for name in found}
        weight = found.pop("weight")
        values = {name: found.pop(name).to(weight) for name in ("accuracy", EVIDENCE)}
        rows = {name: value.reshape(*weight.shape, *value.shape[2:]) for name, value in found.items()}
        values |= mix_columns(rows, [name for name in self.table.columns if name not in values], weight)
        self.table.add_block(times, {name: values[name] for name in self.table.columns})
