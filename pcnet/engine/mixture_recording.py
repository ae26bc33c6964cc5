"""What is recorded of a mixture: rows of a run are gathered with their weights, and reduced to those of the mixture."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.mixtures import mix_columns
from pcnet.results.recorder import EVIDENCE, Recorder

MOST_GATHERED = 2**14
"""Rows times observations that are gathered before they are reduced to those of the mixture."""
FILLED_UP = 2**13
"""Most rows times observations that are filled up to reduce parts with different numbers of rows at once."""
OF_MIXTURE = ("accuracy", EVIDENCE)  # quantities that are gathered of the mixture, not of rows


class _Part(NamedTuple):
    """Times, and what rows have recorded then, (T, K·B, ...) by name, with their weights (T, K, B).

    used: numbers of the rows that have weight at any of these times; the others are left out.
    """

    times: list[float]
    values: dict[str, Tensor]
    weight: Tensor
    used: Tensor

    @property
    def work(self) -> int:
        return len(self.times) * len(self.used) * self.weight.shape[2]

    def places(self, count: int) -> Tensor | None:
        """The numbers of so many rows, of which copies of the first one fill up; None for all rows as they are."""
        if count == len(self.used) == self.weight.shape[1]:
            return None
        return torch.cat([self.used, self.used[:1].expand(count - len(self.used))])

    def rows(self, name: str, places: Tensor | None) -> Tensor:
        """A quantity of these rows, (rows, B, ..., T)."""
        value = self.values[name].movedim(0, -1)
        value = value.reshape(self.weight.shape[1], -1, *value.shape[1:])
        return value if places is None else value.index_select(0, places)

    def weights(self, count: int) -> Tensor:
        """The weights of so many rows, (count, B, T); 0 for those that fill up."""
        return torch.constant_pad_nd(self.weight.movedim(0, -1)[self.used], (0, 0, 0, 0, 0, count - len(self.used)))


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
        if len(kept) < len(times):
            times, weight = [times[i] for i in kept], weight[kept]
            values = {name: value[kept] for name, value in values.items()}
        used = (weight > 0).any(0).any(1).nonzero()[:, 0]
        self._gathered.append(_Part(times, values, weight, used if len(used) else used.new_zeros(1)))
        if sum(part.work for part in self._gathered) > MOST_GATHERED:
            self.reduce()

    def reduce(self) -> None:
        """Bring the table up to date."""
        parts, self._gathered = self._gathered, []
        group: list[_Part] = []
        for part in parts:
            if group and not _go_together(group, part):
                self._reduce(group)
                group = []
            group.append(part)
        if group:
            self._reduce(group)

    def _reduce(self, parts: list[_Part]) -> None:
        """Add parts to the table."""
        times, count = [t for part in parts for t in part.times], max(len(part.used) for part in parts)
        weight = torch.cat([part.weights(count) for part in parts], -1).movedim(-1, 0)
        places = [part.places(count) for part in parts]
        values, rows = {}, {}
        for name in parts[0].values:
            if name in OF_MIXTURE:
                values[name] = torch.cat([part.values[name] for part in parts]).to(weight)
            else:  # with times next to each other in memory: sums over rows are fast then
                found = [part.rows(name, place) for part, place in zip(parts, places, strict=True)]
                rows[name] = torch.cat(found, -1).movedim(-1, 0)
        values |= mix_columns(rows, [name for name in self.table.columns if name not in values], weight)
        self.table.add_block(times, {name: values[name] for name in self.table.columns})


def _go_together(group: list[_Part], part: _Part) -> bool:
    """Whether to reduce a part with others at once: rows that only some have cost less than another reduction."""
    counts = [len(each.used) for each in (*group, part)]
    times = sum(len(each.times) for each in (*group, part))
    return min(counts) == max(counts) or times * (max(counts) - min(counts)) <= FILLED_UP
