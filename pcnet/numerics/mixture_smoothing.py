"""Smoothing of a mixture of Gaussians: what later observations say about earlier states and categories.

A part i of the belief N(m_i, P_i) at one observation is predicted as N(m⁻_ij, P⁻_ij) at the next, in category j, with
the probability w_ij. Given i, j and the belief N(c_ij, S_ij) about the state there that all observations give, the
state before is, with G_ij = C_ijᵀ (P⁻_ij)⁻¹ as by Rauch, Tung and Striebel,

    N(m_i + G_ij (c_ij − m⁻_ij), P_i + G_ij (S_ij − P⁻_ij) G_ijᵀ).

These are reduced to one Gaussian for each part. There are two ways to c, S and the weights of pairs.

- `by_points`, for Gaussian sums, whose parts are those that were sent through the flow, and whose w_ij is the weight of
  i: each point s of the smoothed belief, which is represented by points, belongs to i by w_i N(s; m⁻_i, P⁻_i).
- `by_likelihoods`, for switching states, whose parts are the categories: the ratio of the smoothed belief N*_j of a
  category to its prediction N⁻_j is the likelihood of all later observations, which is combined with N(m⁻_ij, P⁻_ij).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.branching import eager_only, holds
from pcnet.numerics.sigma_points import covariance_root

JITTER = 1e-13  # relative variance that is added to predicted covariances
LEAST = 1e-12  # relative variance below which pivots are taken for rounding


class Parts(NamedTuple):
    """Gaussians about n elements, with sensitivities of the mean to p parameters as further columns."""

    mean: Tensor  # (..., k, n, 1 + p)
    covariance: Tensor  # (..., k, n, n)


class Pairs(NamedTuple):
    """Predictions from each part i in each category j; the dimension of j has size 1 if they do not depend on it."""

    mean: Tensor  # (T, B, i, j, n, 1 + p)
    covariance: Tensor  # (T, B, i, j, n, n)
    cross: Tensor  # covariance of the predicted state with that before, (T, B, i, j, n, n)


class MixtureRows(NamedTuple):
    """What a filter has kept of T observations; s stages of each of k categories."""

    filtered: Parts  # (T, B, k, ...)
    probability: Tensor  # of stages of them, (T, B, k, s)
    before: Parts  # the parts that the time update started from, (T, B, k, ...)
    joint: Tensor  # probability of a stage before (first) and after (second) the time update, (T, B, ks, ks)
    pairs: Pairs
    continues: Tensor  # whether a row is predicted from the row before, (T, B)
    repeats: Tensor  # whether it is the row before, because nothing was taken in, (T, B)


class SmoothedMixture(NamedTuple):
    """The smoothed belief at T observations."""

    parts: Parts  # (T, B, k, ...)
    probability: Tensor  # (T, B, k, s)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means with sensitivities (T, B, n, 1 + p), and covariances (T, B, n, n)."""
        whole = _merged(self.parts, self.probability.sum(-1))
        return whole.mean, whole.covariance


class Conditioned(NamedTuple):
    """What is known at the later row of pairs of parts i before and j after, with stages a and b."""

    weight: Tensor  # (B, i, a, j, b)
    mean: Tensor  # c, (B, i, j, n, 1 + p)
    covariance: Tensor  # S, (B, i, j, n, n)


Condition = Callable[[SmoothedMixture, Pairs, Tensor], Conditioned]
"""Gives what is known of pairs from the belief at the later row (B, ...), its predictions, and w_ij (B, i, a, j, b)."""


def smooth_mixture(rows: MixtureRows, condition: Condition, first_only: bool) -> SmoothedMixture:
    """The smoothed belief at every row given all of them, or at the first row alone."""
    parts, probability = Parts(*(each[-1] for each in rows.filtered)), rows.probability[-1]
    found = [SmoothedMixture(parts, probability)]
    for t in range(len(rows.probability) - 1, 0, -1):
        found.append(step_back(rows, condition, t, found[-1]))
        if first_only:
            del found[0]
    parts = Parts(*(torch.stack(each[::-1]) for each in zip(*(one.parts for one in found), strict=True)))
    return SmoothedMixture(parts, torch.stack([one.probability for one in found[::-1]]))


def step_back(rows: MixtureRows, condition: Condition, t: int, after: SmoothedMixture) -> SmoothedMixture:
    """The smoothed belief at row t − 1 from that at row t."""
    before, pairs = Parts(*(each[t] for each in rows.before)), Pairs(*(each[t] for each in rows.pairs))
    batch, k, s = after.probability.shape
    weight, centre, spread = condition(after, pairs, rows.joint[t].view(batch, k, s, k, s))
    root, scale = _scaled_root(pairs.covariance)
    gain = torch.cholesky_solve(pairs.cross / scale[..., None], root).mT / scale[..., None, :]
    mean = before.mean[:, :, None] + gain @ (centre - pairs.mean)
    left = before.covariance[:, :, None] + gain @ (spread - pairs.covariance) @ gain.mT
    merged = _merged(Parts(mean, left), weight.sum((2, 4)))
    following, same = rows.continues[t], rows.repeats[t]

    def select(new: Tensor, filtered: Tensor, old: Tensor) -> Tensor:
        last = (1,) * (new.dim() - 1)
        return torch.where(following.view(-1, *last), new, torch.where(same.view(-1, *last), old, filtered))

    rest = Parts(*(each[t - 1] for each in rows.filtered))
    chosen = Parts(*(select(*each) for each in zip(merged, rest, after.parts, strict=True)))
    return SmoothedMixture(chosen, select(weight.sum((3, 4)), rows.probability[t - 1], after.probability))


def by_points(after: SmoothedMixture, pairs: Pairs, joint: Tensor) -> Conditioned:
    """Each point of the smoothed belief belongs to parts by how probable they make it."""
    points, share = _points(after.parts)  # (B, j, S, n, 1 + p), (S,)
    root, scale = _scaled_root(pairs.covariance)
    away = (points[:, None, ..., 0] - pairs.mean[..., None, :, 0]) / scale[..., None, :]  # (B, i, j, S, n)
    solved = torch.linalg.solve_triangular(root.expand(*away.shape[:3], -1, -1), away.mT, upper=False)
    size = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + scale.log().sum(-1)
    fit = -0.5 * (solved**2).sum(-2) - size[..., None]  # log-density, (B, i, j, S)
    weight = _weights(after, joint[..., None], fit[:, :, None, :, None]) * share
    of_points = weight.sum((2, 4))  # (B, i, j, S)
    total = of_points.sum(-1, keepdim=True)
    of_points = of_points / torch.where(total > 0, total, 1.0)
    centre = torch.einsum("bijs,bjsnp->bijnp", of_points, points)
    apart = points[:, None, ..., 0] - centre[..., None, :, 0]
    return Conditioned(weight.sum(-1), centre, (of_points[..., None] * apart).mT @ apart)


def by_likelihoods(after: SmoothedMixture, pairs: Pairs, joint: Tensor) -> Conditioned:
    """The likelihood of later observations in each category, N*_j/N⁻_j, times the prediction of each part.

    In coordinates u in which N⁻_j is standard normal and N*_j has the mean a and uncorrelated elements of variance e,
    the ratio is exp(−½ λu² + au/e) with λ = 1/e − 1. Where e > 1, since Gaussians were merged, λ is 0.
    """
    share = joint.sum((2, 4))
    share = share / share.sum(1, keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)
    whole = _merged(Parts(pairs.mean.transpose(1, 2), pairs.covariance.transpose(1, 2)), share.mT)  # N⁻_j
    root = covariance_root(whole.covariance)
    later = torch.linalg.solve_triangular(root, after.parts.covariance, upper=False)
    later = torch.linalg.solve_triangular(root, later.mT, upper=False)
    size, vectors = torch.linalg.eigh(0.5 * (later + later.mT))
    size = size.clamp_min(LEAST)
    back = (root @ vectors)[:, None]  # from u
    to = torch.linalg.solve_triangular(root.mT, vectors, upper=True).mT  # to u
    pull = (to @ (after.parts.mean - whole.mean)[..., :1])[:, None, ..., 0] / size[:, None]
    known = (1 / size - 1).clamp_min(0.0)[:, None]  # λ
    mean = (to[:, None] @ (pairs.mean - whole.mean[:, None])[..., :1])[..., 0]  # (B, i, j, n)
    covariance = to[:, None] @ pairs.covariance @ to[:, None].mT
    scaled = covariance * known.sqrt()[..., None, :]
    eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    chol = torch.linalg.cholesky(eye + known.sqrt()[..., :, None] * scaled)
    left = covariance - scaled @ torch.cholesky_solve(scaled.mT, chol)
    force = pull - known * mean
    step = (left @ force[..., None])[..., 0]
    fit = (pull * mean - 0.5 * known * mean**2 + 0.5 * force * step).sum(-1)
    fit = fit - chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    centre = torch.cat([whole.mean[:, None, ..., :1] + back @ (mean + step)[..., None], pairs.mean[..., 1:]], -1)
    further = (after.parts.mean - whole.mean)[:, None, ..., 1:]  # sensitivities move by as much as those of all parts
    centre[..., 1:] += further
    return Conditioned(_weights(after, joint, fit[:, :, None, :, None]), centre, back @ left @ back.mT)


def _weights(after: SmoothedMixture, joint: Tensor, fit: Tensor) -> Tensor:
    """Probabilities of pairs (B, i, a, j, b, ...), given those of the later row, w_ij and the log of what fits."""
    log = joint.log() + fit
    given = log.flatten(1, 2).softmax(1).view_as(log).nan_to_num(0.0)
    later = after.probability
    return given * later.view(len(later), 1, 1, *later.shape[1:], *(1,) * (log.dim() - 5))


def _points(parts: Parts) -> tuple[Tensor, Tensor]:
    """Points (B, j, S, n, 1 + p) that represent Gaussians, and their weights (S,)."""
    n = parts.mean.shape[-2]
    spread = max(n, 3)
    away = math.sqrt(spread) * covariance_root(parts.covariance).mT  # the columns of a root as rows
    away = torch.cat([torch.zeros_like(away[..., :1, :]), away, -away], -2)
    points = parts.mean[:, :, None].repeat(1, 1, 2 * n + 1, 1, 1)
    points[..., 0] += away
    share = points.new_full((2 * n + 1,), 0.5 / spread)
    share[0] = 1 - n / spread
    return points, share


def _scaled_root(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The lower triangular root of covariances (..., n, n) of elements in units of their sds, and these units."""
    scale = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = (covariance / scale[..., :, None] / scale[..., None, :]).nan_to_num(0.0)
    eye = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
    root, info = torch.linalg.cholesky_ex(scaled + JITTER * eye)
    bad = (info != 0) | ~(root.diagonal(dim1=-2, dim2=-1).amin(-1) > LEAST**0.5)
    if holds(bad.any()):
        eager_only("smoothing with singular covariances")
        values, vectors = torch.linalg.eigh(scaled[bad])
        mended = vectors * values.clamp_min(LEAST)[..., None, :] @ vectors.mT
        root = root.clone()
        root[bad] = torch.linalg.cholesky_ex(mended + LEAST * eye)[0]
    return root, scale


def _merged(parts: Parts, weight: Tensor) -> Parts:
    """One Gaussian (..., n, ·) of the same moments as several (..., k, n, ·), with weights (..., k)."""
    total = weight.sum(-1, keepdim=True)
    share = torch.where(total > 0, weight / torch.where(total > 0, total, 1.0), 1 / weight.shape[-1])[..., None, None]
    mean = (share * parts.mean).sum(-3)
    away = parts.mean[..., 0] - mean[..., None, :, 0]
    covariance = (share * (parts.covariance + away[..., :, None] * away[..., None, :])).sum(-3)
    return Parts(mean, 0.5 * (covariance + covariance.mT))
