"""Moments of mixtures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def mix(quantity: str, get: Callable[[str], Tensor], weight: Tensor) -> Tensor:
    """A quantity of a mixture (T, B, ...), from those of its K rows (T, K, B, ...) and their weights (T, K, B).

    Standard deviations and covariances include the spread of the means; all else is averaged.

    Args:
        quantity: Its name.
        get: Gives a quantity of the rows by name: the quantity itself, and "mean" beside "sd" and "covariance".
        weight: The weights, which sum to 1; rows without weight may hold anything. The result is NaN if none has.
    """
    known = weight.sum(1) > 0

    def average(value: Tensor) -> Tensor:
        w = weight.reshape(*weight.shape, *(1,) * (value.dim() - 3))
        total = torch.where(w > 0, w * value, 0.0).sum(1)
        return torch.where(known.reshape(*known.shape, *(1,) * (total.dim() - 2)), total, torch.nan)

    if quantity == "sd":
        mean, variance = get("mean"), get("sd") ** 2
        away = mean - average(mean)[:, None]
        return average(variance + away**2).sqrt()
    if quantity == "covariance":
        covariance = get("covariance")
        mean = get("mean").reshape(*covariance.shape[:-1])
        away = mean - average(mean)[:, None]
        return average(covariance + away[..., :, None] * away[..., None, :])
    return average(get(quantity))
