"""Moments of mixtures, and Gaussians as mixtures of narrower ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NARROW, WEIGHTS = 0.6716, (0.2144, 0.5712, 0.2144)
SHIFT = ((1 - NARROW**2) / (2 * WEIGHTS[0])) ** 0.5
"""A standard normal density is nearly the mixture of three with these weights, at −SHIFT, 0 and SHIFT, of sd NARROW.

Both have the same variance.
"""

BOUNDED = ("mean", "sd", "covariance")
WIDEST = 4.0
"""Rows whose standard deviation is more than so many times the median count less in these moments of a mixture."""

OF_ONE = "peak_"
"""Quantities with such names are those of the row with the largest weight: they have no mean over rows."""


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


def bounded_weights(weight: Tensor, *sds: Tensor) -> list[Tensor]:
    """For each of several beliefs, weights (T, K, B) with a bound on the influence of rows that know next to nothing.

    A mean is moved without bound by a row with little weight whose belief is thousands of times as wide as the others,
    as those of far too much noise are under a nonlinear flow. With r the standard deviation of a row relative to the
    weighted median of all rows, in the element where it is largest, weights are multiplied by min(1, (WIDEST / r)²).

    Args:
        weight: The weights, (T, K, B).
        sds: Standard deviations of the rows, (T, K, B, ...), of each belief.
    """
    spread = _side_by_side([sd.reshape(*weight.shape, -1) for sd in sds])
    counts = (weight > 0)[..., None]
    narrowest, widest = (torch.where(counts, spread, other).unbind(1) for other in (torch.inf, 0.0))
    wide = reduce(torch.maximum, widest) > WIDEST * reduce(torch.minimum, narrowest)  # where there may be such rows
    if not bool(wide.any()):
        return [weight] * len(sds)
    sd = torch.where(counts, spread, torch.nan).movedim(1, -1)[wide]  # (elements, K)
    shares = weight.mT[:, :, None].expand(*wide.shape, -1)[wide]
    excess = torch.full((*wide.shape, weight.shape[1]), 1.0, dtype=weight.dtype, device=weight.device)
    excess[wide] = (sd / _weighted_median(sd, shares)).nan_to_num(1.0, torch.inf)
    found, sizes, total = [], [math.prod(sd.shape[3:]) for sd in sds], _sum(weight)
    for ratio, where in zip(excess.split_with_sizes(sizes, 2), wide.split_with_sizes(sizes, 2), strict=True):
        if not bool(where.any()):
            found.append(weight)
            continue
        bounded = weight * (WIDEST / ratio.amax(2).mT).clamp_max(1.0) ** 2
        bounded = bounded * (total / _sum(bounded).clamp_min(torch.finfo(weight.dtype).tiny))
        concerned = (ratio > WIDEST).flatten(2).any(2)[:, None]  # digits must not depend on other times
        found.append(torch.where(concerned, bounded, weight))
    return found


def _weighted_median(values: Tensor, weight: Tensor) -> Tensor:
    """The median (M, 1) of values (M, K) with weights (M, K); NaN values come last."""
    ordered, order = values.nan_to_num(torch.inf).sort(-1)
    share = weight.gather(-1, order).cumsum(-1)
    half = (share < 0.5 * share[:, -1:]).sum(-1, keepdim=True).clamp_max(values.shape[-1] - 1)
    return ordered.gather(-1, half)


def mean_of(quantity: str, names: Collection[str]) -> str | None:
    """The name among others of the mean that a quantity is the standard deviation of: x of x_sd, "mean" of "sd"."""
    name = "mean" if quantity == "sd" else quantity.removesuffix("_sd")
    return name if name != quantity and name in names else None


def mix(
    quantity: str, get: Callable[[str], Tensor], weight: Tensor, has_sd: bool = False, of: str | None = None
) -> Tensor:
    """A quantity of a mixture (T, B, ...), from those of its K rows (T, K, B, ...) and their weights (T, K, B).

    Standard deviations and covariances include the spread of the means; peaks are those of the row with the largest
    weight; all else is averaged. Means of beliefs, their standard deviations and covariances have bounded weights.

    Args:
        quantity: Its name.
        get: Gives a quantity of the rows by name: the quantity itself, "mean" and "sd" beside "mean", "sd" and
            "covariance" of nodes that have an sd.
        has_sd: Whether the node has an sd.
        of: The name of the mean that the quantity is the standard deviation of; None for other quantities.
        weight: The weights, which sum to 1; rows without weight may hold anything. The result is NaN if none has.
    """
    of = "mean" if quantity == "sd" else of
    if quantity.startswith(OF_ONE):
        return _of_best(get(quantity), weight)
    if has_sd and quantity in BOUNDED:
        (weight,) = bounded_weights(weight, get("sd"))
    value = get(quantity)
    if of is not None:
        mean = get(of)
        return _average(value, weight, (mean, _average(mean, weight))).sqrt()
    if quantity == "covariance":
        mean = get("mean").reshape(*value.shape[:-1])
        away = mean - _average(mean, weight)[:, None]
        return _average(value + away[..., :, None] * away[..., None, :], weight)
    return _average(value, weight)


def mix_columns(rows: Mapping[str, Tensor], names: Sequence[str], weight: Tensor) -> dict[str, Tensor]:
    """Several quantities of a mixture, as `mix` gives each of them; those with the same weights are averaged at once.

    Args:
        rows: Quantities of the rows (T, K, B, ...) by node and name, such as "x.mean", with all that `mix` needs.
        names: The quantities.
        weight: The weights, (T, K, B).
    """
    sds = {name.removesuffix(".sd"): value for name, value in rows.items() if name.endswith(".sd")}
    own = dict(zip(sds, bounded_weights(weight, *sds.values()), strict=True)) if sds else {}
    averaged, spread, made = {}, {}, {}
    for name in names:
        node, dot, quantity = name.rpartition(".")
        if quantity == "covariance" or quantity.startswith(OF_ONE):
            made[name] = mix(quantity, lambda q, at=node + dot: rows[at + q], weight, node in own)  # type: ignore[misc]
            continue
        mean = node + dot + ("mean" if quantity == "sd" else quantity.removesuffix("_sd"))
        own_weight = own.get(node, weight) if quantity in BOUNDED else weight
        averaged[name] = rows[mean if mean in rows else name], own_weight
        if mean != name and mean in rows:
            spread[name] = rows[name], own_weight
    found = _averages(averaged)
    around = {name: (averaged[name][0], found[name]) for name in spread}
    return made | found | {name: variance.sqrt() for name, variance in _averages(spread, around).items()}


def _averages(
    values: Mapping[str, tuple[Tensor, Tensor]], around: Mapping[str, tuple[Tensor, Tensor]] | None = None
) -> dict[str, Tensor]:
    """Averages (T, B, ...) of values (T, K, B, ...), each with its weights (T, K, B).

    around: if given, means of the rows and of the mixture by name; values are then standard deviations, and the result
    is the variance of the mixture.
    """
    groups: dict[int, list[str]] = {}
    for name, (_, weight) in values.items():
        groups.setdefault(id(weight), []).append(name)
    found = {}
    for names in groups.values():
        weight = values[names[0]][1]
        flat = [values[name][0].reshape(*weight.shape, -1) for name in names]
        means = None
        if around is not None:
            own, centres = zip(*(around[name] for name in names), strict=True)
            centre = _side_by_side([each.reshape(*each.shape[:2], -1) for each in centres])
            means = _side_by_side([each.reshape(*weight.shape, -1) for each in own]), centre
        parts = _average(_side_by_side(flat), weight, means).split_with_sizes([each.shape[-1] for each in flat], -1)
        for name, part in zip(names, parts, strict=True):
            found[name] = part.reshape(*part.shape[:2], *values[name][0].shape[3:])
    return found


def _side_by_side(values: Sequence[Tensor]) -> Tensor:
    """Values (T, ..., n) joined along their last dimension, with times next to each other in memory."""
    return torch.cat([value.movedim(0, -1) for value in values], -2).movedim(-1, 0)


def _of_best(value: Tensor, weight: Tensor) -> Tensor:
    """The values (T, B, ...) of the row with the largest weight."""
    best = weight.argmax(1).reshape(len(weight), 1, -1, *(1,) * (value.dim() - 3))
    return value.gather(1, best.expand(-1, -1, *value.shape[2:]))[:, 0]


def _average(value: Tensor, weight: Tensor, around: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The average (T, B, ...) of values (T, K, B, ...) by weights (T, K, B); NaN where none has weight.

    around: if given, means of the rows (T, K, B, ...) and of the mixture (T, B, ...); values are then standard
    deviations, and the result is the variance of the mixture.
    """
    if around is not None:
        value = value**2 + (around[0] - around[1][:, None]) ** 2
    values, w = (_times_last(each.reshape(*weight.shape, -1)) for each in (value, weight))
    found = _weighted_sum(values, w)
    if not np.isfinite(found).all():  # rows without weight may hold anything
        found = _weighted_sum(np.where(w > 0, values, 0.0), w)
        found = np.where((w > 0).any(0), found, np.nan)
    return torch.from_numpy(found).movedim(-1, 0).reshape(*value.shape[:1], *value.shape[2:]).to(value.device)


def _times_last(value: Tensor) -> NDArray[Any]:
    """(T, K, B, n) as (K, B, n, T), in this order in memory."""
    return np.ascontiguousarray(value.movedim(0, -1).cpu().numpy())


def _weighted_sum(values: NDArray[Any], weight: NDArray[Any]) -> NDArray[Any]:
    """Σ_k w_k v_k of values (K, B, n, T), one row after the other: digits do not depend on rows without weight."""
    if math.prod(values.shape[1:]) == 1:  # einsum would add them in another order
        found: NDArray[Any] = (weight * values).cumsum(0)[-1]
        return found
    summed: NDArray[Any] = np.einsum("kbnt,kbot->bnt", values, weight)
    return summed


def _sum(rows: Tensor) -> Tensor:
    """The sum over the rows of weights (T, K, B), one after the other; (T, 1, B)."""
    return torch.from_numpy(rows.cpu().numpy().cumsum(1)[:, -1:]).to(rows.device)
