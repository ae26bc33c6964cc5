"""Moments of mixtures, and Gaussians as mixtures of narrower ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

SHIFT, NARROW, WEIGHTS = 1.0575, 0.6716, (0.2252, 0.5496, 0.2252)
"""A standard normal density is nearly the mixture of three with these weights, at −SHIFT, 0 and SHIFT, of sd NARROW."""

WIDEST = 4.0
"""Rows whose standard deviation is more than so many times the median count less in the moments of a mixture."""


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


def bounded_weights(weight: Tensor, sd: Tensor) -> Tensor:
    """Weights (T, K, B) with a bound on the influence of rows that know next to nothing.

    A mean is moved without bound by a row with little weight whose belief is thousands of times as wide as the others,
    as those of far too much noise are under a nonlinear flow. With r the standard deviation of a row relative to the
    weighted median of all rows, in the element where it is largest, weights are multiplied by min(1, (WIDEST / r)²).

    Args:
        weight: The weights, (T, K, B).
        sd: Standard deviations of the rows, (T, K, B, ...).
    """
    flat = torch.where(weight[..., None] > 0, sd.reshape(*weight.shape, -1), torch.nan)
    low, high = flat.nan_to_num(torch.inf).amin(1), flat.nan_to_num(0.0).amax(1)
    if not bool((high > WIDEST * low).any()):
        return weight
    ordered, order = flat.nan_to_num(torch.inf).sort(1)
    share = weight[..., None].expand(flat.shape).gather(1, order).cumsum(1)
    half = (share < 0.5 * share[:, -1:]).sum(1, keepdim=True).clamp_max(weight.shape[1] - 1)
    median = ordered.gather(1, half)
    ratio = (flat / median).nan_to_num(1.0, torch.inf).amax(-1)
    bounded = weight * (WIDEST / ratio).clamp_max(1.0) ** 2
    return bounded * (weight.sum(1, keepdim=True) / bounded.sum(1, keepdim=True).clamp_min(torch.finfo(sd.dtype).tiny))


def mean_of(quantity: str, names: Collection[str]) -> str | None:
    """The name among others of the mean that a quantity is the standard deviation of: x of x_sd, "mean" of "sd"."""
    name = "mean" if quantity == "sd" else quantity.removesuffix("_sd")
    return name if name != quantity and name in names else None


def mix(
    quantity: str, get: Callable[[str], Tensor], weight: Tensor, has_sd: bool = False, of: str | None = None
) -> Tensor:
    """A quantity of a mixture (T, B, ...), from those of its K rows (T, K, B, ...) and their weights (T, K, B).

    Standard deviations and covariances include the spread of the means; all else is averaged. Means of beliefs, their
    standard deviations and covariances have bounded weights.

    Args:
        quantity: Its name.
        get: Gives a quantity of the rows by name: the quantity itself, "mean" and "sd" beside "mean", "sd" and
            "covariance" of nodes that have an sd.
        has_sd: Whether the node has an sd.
        of: The name of the mean that the quantity is the standard deviation of; None for other quantities.
        weight: The weights, which sum to 1; rows without weight may hold anything. The result is NaN if none has.
    """
    of = "mean" if quantity == "sd" else of
    if has_sd and quantity in ("mean", "sd", "covariance"):
        weight = bounded_weights(weight, get("sd"))
    known = weight.sum(1) > 0

    def average(value: Tensor) -> Tensor:
        w = weight.reshape(*weight.shape, *(1,) * (value.dim() - 3))
        total = torch.where(w > 0, w * value, 0.0).sum(1)
        return torch.where(known.reshape(*known.shape, *(1,) * (total.dim() - 2)), total, torch.nan)

    if of is not None:
        mean, variance = get(of), get(quantity) ** 2
        away = mean - average(mean)[:, None]
        return average(variance + away**2).sqrt()
    if quantity == "covariance":
        covariance = get("covariance")
        mean = get("mean").reshape(*covariance.shape[:-1])
        away = mean - average(mean)[:, None]
        return average(covariance + away[..., :, None] * away[..., None, :])
    return average(get(quantity))
