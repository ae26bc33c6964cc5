"""What is recorded of a mixture: rows of a run are gathered with their weights, and reduced to those of the mixture."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.mixtures import mean_of, mix
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
        """Bring the table up to date; to be done before there are other rows."""
        parts, self._gathered = self._gathered, []
        if not parts:
            return
        times = [t for part in parts for t in part.times]
        found = {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values}
        weight, values = found["weight"], {}
        for name in self.table.columns:
            if name in ("accuracy", EVIDENCE):
                values[name] = found[name].to(weight)
            else:
                node, dot, quantity = name.rpartition(".")
                beside = {
                    q: found[f"{node}{dot}{q}"]
                    for q in ("mean", "sd", quantity, quantity.removesuffix("_sd"))
                    if f"{node}{dot}{q}" in found
                }
                rows = {q: value.reshape(*weight.shape, *value.shape[2:]) for q, value in beside.items()}
                values[name] = mix(quantity, rows.__getitem__, weight, "sd" in rows, mean_of(quantity, rows))
        self.table.add_block(times, values)
