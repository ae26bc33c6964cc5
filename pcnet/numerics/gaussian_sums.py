"""Gaussian sums: beliefs of several Gaussians, which are divided where functions bend and reduced to a bounded number.

A belief about n elements has k Gaussians with weights; all tensors are (B, k, ...).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.mixtures import NARROW, SHIFT, WEIGHTS
from pcnet.numerics.sigma_points import covariance_root
from pcnet.numerics.symmetric import mirrored

NODE = math.sqrt(3.0)  # distance of points from the mean, in standard deviations
TIE = 1e-7  # relative difference below which two numbers count as equal: symmetric beliefs have many


class GaussianSum(NamedTuple):
    """A mixture of Gaussians."""

    weight: Tensor  # (B, k)
    parts: GaussianWithSensitivities  # (B, k, ...)


class Probe(NamedTuple):
    """Values (B, q, d) of a function at NODE columns of a root of a covariance from the mean, and at half of that."""

    centre: Tensor  # at the mean, (B, d)
    up: Tensor
    down: Tensor
    half_up: Tensor
    half_down: Tensor


def bending(probe: Probe, floor: Tensor) -> Tensor:
    """How far a function of a Gaussian is from linear, along each column of the root of its covariance; (B, q).

    With f = f₀ + sz + bz² + tz³ along a column, z ~ N(0, 1), this is the variance 2b² + 6t² that a linear function of z
    leaves over, relative to that of the linear terms of all columns and to `floor`, summed over outputs.

    Args:
        probe: Values of f.
        floor: Variance of outputs below which differences do not matter, (B, d).
    """
    regressed = (probe.up - probe.down) / (2 * NODE)  # s + 3t
    bend = (probe.up + probe.down - 2 * probe.centre[:, None]) / 6
    third = (regressed - (probe.half_up - probe.half_down) / NODE) / 2.25  # t
    linear = (regressed**2).sum(1, keepdim=True) + floor[:, None]
    left = 2 * bend**2 + 6 * third**2
    return (left / linear.clamp_min(torch.finfo(left.dtype).tiny)).nan_to_num(0.0, 0.0, 0.0).sum(-1)


def first_largest(values: Tensor) -> Tensor:
    """Ones and zeros (..., m): the first of the largest of positive values (..., m), whatever their rounding."""
    return _first((values >= (1 - TIE) * values.amax(-1, keepdim=True)).to(values))


def first_smallest(values: Tensor) -> Tensor:
    """Ones and zeros (..., m): the first of the smallest of positive values (..., m), whatever their rounding."""
    return _first((values <= (1 + TIE) * values.amin(-1, keepdim=True) + TIE**2).to(values))


def _first(mask: Tensor) -> Tensor:
    """A mask of ones and zeros with its first 1 only."""
    return mask * (mask.cumsum(-1) < 1.5)


class Bends(NamedTuple):
    """How much functions bend over Gaussians: roots of their covariances (B, n, n), and how much along columns (B, q).

    q may be less than n: the functions do not depend on the rest.
    """

    root: Tensor
    along: Tensor

    @property
    def largest(self) -> Tensor:
        """How much along the column where it is most, (B,)."""
        return self.along.amax(-1)


def narrowed(shares: Tensor, root: Tensor, bent: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """Covariances by source of Gaussians that are narrower along the column of the root where they are most bent.

    Args:
        shares: The covariances, (..., 1 + s, n, n).
        root: Lower triangular roots of their sums, (..., n, n).
        bent: How much they are bent along columns, (..., q); q may be less than n.
        cut: 1 for Gaussians that become narrower, 0 for others, (...).

    Returns:
        The covariances, and the columns (..., n).
    """
    n = root.shape[-1]
    axis = torch.constant_pad_nd(first_largest(bent), (0, n - bent.shape[-1]))[..., None]
    column = (root @ axis)[..., 0]
    across = torch.linalg.solve_triangular(root.mT, axis, upper=True)[..., 0]  # P⁻¹c
    narrow = (1 - NARROW) * cut
    eye = torch.eye(n, dtype=root.dtype, device=root.device)
    shrink = (eye - narrow[..., None, None] * column[..., :, None] * across[..., None, :]).unsqueeze(-3)
    return mirrored(shrink @ shares @ shrink.mT), column


def divide(whole: GaussianSum, root: Tensor, bent: Tensor, limit: float, least: float) -> GaussianSum:
    """A sum of 3k Gaussians, in which those that are bent have become three along the column where they are most bent.

    A Gaussian N(m, P) with a column c of the root of P becomes three with means m − SHIFT c, m, m + SHIFT c and the
    covariance P − (1 − NARROW²)ccᵀ = APAᵀ. Those that stay one have two without weight beside them.

    Args:
        whole: A sum of k Gaussians.
        root: Lower triangular roots of their covariances, (B, k, n, n).
        bent: How much they are bent along columns, (B, k, q); q may be less than n.
        limit: How much is too much.
        least: Weight below which a Gaussian is not divided.
    """
    weight, (mean, shares, dtheta, dlogvar) = whole
    cut = ((bent.amax(-1) > limit) & (weight > least)).to(mean)
    shares, column = narrowed(shares, root, bent, cut)
    means, weights = [], []
    for place, share in zip((0.0, -SHIFT, SHIFT), (WEIGHTS[1], WEIGHTS[0], WEIGHTS[2]), strict=True):
        means.append(mean + place * cut[..., None] * column)
        weights.append(weight * (cut * share + (1 - cut) * (1.0 if place == 0.0 else 0.0)))
    thrice = (torch.cat([each] * 3, 1) for each in (shares, dtheta, dlogvar))
    return GaussianSum(torch.cat(weights, 1), GaussianWithSensitivities(torch.cat(means, 1), *thrice))


def reduce(whole: GaussianSum, k: int) -> GaussianSum:
    """A sum of k Gaussians from one of more, with the same mean and covariance.

    Centres are chosen one after the other, each where the weight times the squared distance to the nearest centre is
    largest, in units of the whole sum; each Gaussian is then merged into its nearest centre. The spread of what is
    merged counts as contributed by the same sources as the covariances.
    """
    weight, (mean, shares, dtheta, dlogvar) = whole
    overall = (weight[..., None] * mean).sum(1)
    away = mean - overall[:, None]
    covariance = (weight[..., None, None] * shares.sum(2)).sum(1) + away.mT @ (weight[..., None] * away)
    root = covariance_root(covariance)
    place = torch.linalg.solve_triangular(root, away.mT, upper=False).mT
    nearest, distances = torch.full_like(weight, torch.inf), []
    for i in range(k):
        importance = weight * nearest if i else weight
        centre = (first_largest(importance)[..., None] * place).sum(1, keepdim=True)
        distances.append(((place - centre) ** 2).sum(-1))
        nearest = torch.minimum(nearest, distances[-1])
    joins = first_smallest(torch.stack(distances, -1))  # (B, m, k)
    taken = joins * weight[..., None]
    total = taken.sum(1)
    empty = (total <= 0)[..., None]
    share = taken / torch.where(empty, 1.0, total[..., None]).mT

    def average(values: Tensor) -> Tensor:
        found = (share.mT @ values.flatten(2)).view(*total.shape, *values.shape[2:])
        blank = empty.view(*total.shape, *(1,) * (values.dim() - 2))
        return torch.where(blank, found[:, :1], found)

    merged = average(mean)
    apart = mean[:, :, None] - merged[:, None]  # (B, m, k, n)
    spread = (share[..., None, None] * apart[..., :, None] * apart[..., None, :]).sum(1)
    inside = average(shares)
    known = covariance_root(inside.sum(2))[:, :, None]
    relative = torch.linalg.solve_triangular(known, inside, upper=False)  # L⁻¹P_j, of which L⁻ᵀ is taken in the trace
    relative = torch.linalg.solve_triangular(known.expand_as(inside), relative.mT, upper=False)
    source = relative.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0.0)
    source = source / source.sum(-1, keepdim=True)
    inside = mirrored(inside + source[..., None, None] * spread[:, :, None])
    return GaussianSum(total, GaussianWithSensitivities(merged, inside, average(dtheta), average(dlogvar)))
