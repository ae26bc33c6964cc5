"""How long a category lasts and what comes after it, as a chain of stages."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.settings import PositiveVector, Vector, broadcast, listed, not_negative, settings

NEARLY = 1e-9
"""How far a number of stages may be above a whole number and be taken for it, since it was rounded."""


@settings
class DwellTime:
    """A category lasts for `mean` steps, give or take `sd`, and then another one comes.

    It passes through r stages and leaves each with probability p; with probability q it begins with the second. So
    mean = (r − q)/p and sd² = mean²(r − q²)/(r − q)² − mean, which are met exactly by the fewest stages that can. The
    smaller sd, the more stages there are; sd² = mean² − mean is a single one, and what has lasted says nothing of how
    long it will last.

    mean, sd: in steps of the node's own clock; one number for all categories, or (..., categories).
    order: "cycle" for the next of the categories in their order, after the last the first; "any" for any other one.
    """

    _: KW_ONLY
    mean: PositiveVector
    sd: Annotated[Vector, AfterValidator(not_negative)]
    order: Literal["cycle", "any"] = "any"

    def __post_init__(self) -> None:
        try:
            _ = broadcast(self.mean.shape, self.sd.shape)
        except RuntimeError:
            shapes = f"mean {tuple(self.mean.shape)} and sd {tuple(self.sd.shape)}"
            raise SettingError(f"Dwelling: the shapes of {shapes} do not fit together") from None
        mean, variance = self.mean, self.sd**2
        odd = mean - mean.floor()
        least, most = odd * (1 - odd), mean**2 - mean
        where = (mean < 1) | (variance < least * (1 - NEARLY)) | (variance > most * (1 + NEARLY) + NEARLY)
        if bool(where.any()):
            i = where.nonzero()[0]
            steps, low, high = (part.expand(where.shape)[tuple(i)].item() for part in (mean, least, most))
            if steps < 1:
                raise SettingError(f"Dwelling: a category lasts for one step at least, not for {steps:g} of them")
            raise SettingError(
                f"Dwelling: what lasts for {steps:g} whole steps in the mean has an sd of {low**0.5:.3g} to "
                f"{high**0.5:.3g}; the most is that of a category without memory, "
                f"CategoricalNode(stay={1 - 1 / steps:.3g})"
            )

    def stages(self, categories: int) -> int:
        """How many of them each category has."""
        return int(self._needed(categories).max().item())

    def transition(self, categories: int) -> Tensor:
        """The probabilities of passing from one stage to another, (..., n, n), those of the first category first."""
        needed, k, s = self._needed(categories), categories, self.stages(categories)
        mean, variance = self.mean.expand(needed.shape), (self.sd**2).expand(needed.shape)
        # (variance + mean)(r − q)² = mean²(r − q²), a quadratic equation of q
        square, least = variance + mean, mean**2 - (variance + mean) * (needed - 1)
        skipped = (needed * square - mean * (needed * least.clamp_min(0)).sqrt()) / (square + mean**2)
        skipped = torch.where(needed > 1, skipped.clamp(0, 1), 0.0)  # of a single stage none can be left out
        leave = ((needed - skipped) / mean).clamp(max=1.0)
        # where a category needs less stages than another, it begins with a later one
        stage = torch.arange(s, dtype=mean.dtype, device=mean.device)
        begin = (1 - skipped)[..., None] * (stage == (s - needed)[..., None])
        begin = begin + skipped[..., None] * (stage == (s - needed + 1)[..., None])
        found = mean.new_zeros(*needed.shape[:-1], k, s, k, s)
        within = torch.diag_embed((1 - leave)[..., None].expand(*leave.shape, s))
        within = within + torch.diag_embed(leave[..., None].expand(*leave.shape, s - 1), offset=1)
        for i in range(k):
            found[..., i, :, i, :] = within[..., i, :, :]
            after = [(i + 1) % k] if self.order == "cycle" else [j for j in range(k) if j != i]
            for j in after:
                found[..., i, -1, j, :] += (leave[..., i, None] / len(after)) * begin[..., j, :]
        return found.reshape(*needed.shape[:-1], k * s, k * s)

    def _needed(self, categories: int) -> Tensor:
        """mean²/(mean + sd²) or the next whole number, (..., categories)."""
        mean, sd = listed(self.mean), listed(self.sd)
        for value in (mean, sd):
            if value.shape[-1] not in (1, categories):
                raise SettingError(
                    f"Dwelling: mean and sd must be one number or end in {categories}, one for each category, not in "
                    f"{value.shape[-1]} (for a batch of single values add a dimension: mean[:, None])"
                )
        needed = (mean**2 / (mean + sd**2) - NEARLY).ceil()
        return needed.expand(*needed.shape[:-1], categories)
