"""Moments of mixtures, and Gaussians as mixtures of narrower ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SHIFT, NARROW, WEIGHTS = 1.0575, 0.6716, (0.2252, 0.5496, 0.2252)
"""A standard normal density is nearly the mixture of three with these weights, at −SHIFT, 0 and SHIFT, of sd NARROW."""


class Peaks(NamedTuple):
    """A Gaussian with independent elements as a mixture of k narrower ones."""

    offsets: Tensor  # of their means, in standard deviations, (k, d)
    narrowing: Tensor  # of the standard deviations, (d,)
    weights: Tensor  # (k,)


def split_axes(axes: list[int], like: Tensor) -> Peaks:
    """Peaks that divide some of the d elements of a Gaussian into three; like: any tensor (d,)."""
    offsets, weights = [], []
    for places in itertools.product(range(3), repeat=len(axes)):
        offset, weight = torch.zeros_like(like), 1.0
        for axis, place in zip(axes, places, strict=True):
            offset[axis], weight = (place - 1) * SHIFT, weight * WEIGHTS[place]
        offsets.append(offset)
        weights.append(weight)
    narrowing = torch.ones_like(like)
    narrowing[axes] = NARROW
    return Peaks(torch.stack(offsets), narrowing, like.new_tensor(weights))


def bending(function: Callable[[Tensor], Tensor], mean: Tensor, sd: Tensor) -> Tensor:
    """How far a function is from linear over N(m, diag sd²), along each element; (B, d).

    The variance of its second-order term along an element over that of its linear terms along all, for the output
    where this is largest.

    Args:
        function: From points (B, k, d) to values (B, k, c).
        mean: m, (B, d).
        sd: (B, d).
    """
    away = 3**0.5 * sd.diag_embed()
    values = function(torch.cat([mean[:, None], mean[:, None] + away, mean[:, None] - away], 1))
    d = mean.shape[-1]
    centre, up, down = values[:, :1], values[:, 1 : d + 1], values[:, d + 1 :]
    slope, bend = (up - down) / (2 * 3**0.5), (up + down - 2 * centre) / 6
    linear = (slope**2).sum(1, keepdim=True)
    return (2 * bend**2 / (linear + torch.finfo(mean.dtype).tiny)).nan_to_num(0.0, 0.0).amax(-1)


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
