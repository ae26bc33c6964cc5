"""Semi-Markov categories: dwell-time distributions as chains of stages."""

from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.settings import PositiveVector, Vector, at_least_1d, check_shapes, check_size, not_negative, settings

ROUNDING = 1e-9  # tolerance for rounding of the number of stages and of the bounds of the variance


@settings
class DwellTime:
    """Distribution of how long a category lasts, with given mean and standard deviation.

    A category passes through r stages and leaves each with probability p; with probability q it skips the first. Then
    mean = (r − q)/p and sd² = mean²(r − q²)/(r − q)² − mean. The fewest stages that match both exactly are used: more
    for a smaller sd, one for sd² = mean² − mean, which is the geometric distribution of a Markov chain.

    Args:
        mean: Mean number of steps of the node's clock, one number or (..., categories).
        sd: Standard deviation in steps, one number or (..., categories).
        order: Which category follows: "cycle" for the next one in order, "any" for each other one alike.
    """

    _: KW_ONLY
    mean: PositiveVector
    sd: Annotated[Vector, AfterValidator(not_negative)]
    order: Literal["cycle", "any"] = "any"

    def __post_init__(self) -> None:
        check_shapes("DwellTime", mean=self.mean, sd=self.sd)
        mean, variance = self.mean, self.sd**2
        part = mean - mean.floor()
        least, most = part * (1 - part), mean**2 - mean
        where = (mean < 1) | (variance < least * (1 - ROUNDING)) | (variance > most * (1 + ROUNDING) + ROUNDING)
        if bool(where.any()):
            i = where.nonzero()[0]
            steps, low, high = (value.expand(where.shape)[tuple(i)].item() for value in (mean, least, most))
            if steps < 1:
                raise SettingError(f"DwellTime: the mean must be at least 1 step, not {steps:g}")
            raise SettingError(
                f"DwellTime: with a mean of {steps:g} steps the sd must be from {low**0.5:.3g} to {high**0.5:.3g}; the "
                f"largest is that of a category without memory, CategoricalNode(stay={1 - 1 / steps:.3g})"
            )

    def stages(self, categories: int) -> int:
        """Number of stages of each category."""
        return int(self._stage_counts(categories).max().item())

    def transition(self, categories: int) -> Tensor:
        """Transition matrix between stages, (..., n, n) with n = categories·stages, ordered by category."""
        counts, k, s = self._stage_counts(categories), categories, self.stages(categories)
        mean, variance = self.mean.expand(counts.shape), (self.sd**2).expand(counts.shape)
        # q solves (variance + mean)(r − q)² = mean²(r − q²)
        square, least = variance + mean, mean**2 - (variance + mean) * (counts - 1)
        skip = (counts * square - mean * (counts * least.clamp_min(0)).sqrt()) / (square + mean**2)
        skip = torch.where(counts > 1, skip.clamp(0, 1), 0.0)  # a single stage cannot be skipped
        leave = ((counts - skip) / mean).clamp(max=1.0)
        # a category with fewer stages than others starts at a later one
        stage = torch.arange(s, dtype=mean.dtype, device=mean.device)
        begin = (1 - skip)[..., None] * (stage == (s - counts)[..., None])
        begin = begin + skip[..., None] * (stage == (s - counts + 1)[..., None])
        found = mean.new_zeros(*counts.shape[:-1], k, s, k, s)
        within = torch.diag_embed((1 - leave)[..., None].expand(*leave.shape, s))
        within = within + torch.diag_embed(leave[..., None].expand(*leave.shape, s - 1), offset=1)
        for i in range(k):
            found[..., i, :, i, :] = within[..., i, :, :]
            after = [(i + 1) % k] if self.order == "cycle" else [j for j in range(k) if j != i]
            for j in after:
                found[..., i, -1, j, :] += (leave[..., i, None] / len(after)) * begin[..., j, :]
        return found.reshape(*counts.shape[:-1], k * s, k * s)

    def _stage_counts(self, categories: int) -> Tensor:
        """⌈mean²/(mean + sd²)⌉, (..., categories)."""
        mean, sd = at_least_1d(self.mean), at_least_1d(self.sd)
        for value in (mean, sd):
            check_size("DwellTime", "mean and sd", value, categories)
        counts = (mean**2 / (mean + sd**2) - ROUNDING).ceil()
        return counts.expand(*counts.shape[:-1], categories)
