"""Smoothing of a Gaussian belief: what later observations say about earlier states (Rauch, Tung and Striebel).

With the filtered belief N(m_k, P_k), the predicted one N(m⁻_{k+1}, P⁻_{k+1}), and their covariance
C_{k+1} = Cov(s⁻_{k+1}, s_k), the smoothed belief follows backwards in time from G_k = C_{k+1}ᵀ (P⁻_{k+1})⁻¹:

    m*_k = m_k + G_k (m*_{k+1} − m⁻_{k+1}),    P*_k = P_k + G_k (P*_{k+1} − P⁻_{k+1}) G_kᵀ.

Missing data, irregular times and parameters in the belief need nothing further. Sensitivities of the mean to parameters
beside the belief move like the mean.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.branching import eager_only, holds

SINGULAR = 1e-7
"""Scaled predicted covariances with smaller pivots are inverted by their eigenvalues, without the smallest."""


class FilteredRows(NamedTuple):
    """What a filter has kept of T observations, the mean with its sensitivities to p parameters as columns."""

    mean: Tensor  # after the observation, (T, B, n, 1 + p)
    covariance: Tensor  # (T, B, n, n)
    predicted_mean: Tensor  # before it, (T, B, n, 1 + p)
    predicted_covariance: Tensor  # (T, B, n, n)
    cross: Tensor  # covariance of the predicted state with that at the row before, (T, B, n, n)
    continues: Tensor  # whether it is predicted from the row before, (T, B)
    repeats: Tensor  # whether it is the row before, because nothing was taken in, (T, B)


class SmoothedRows(NamedTuple):
    """The smoothed belief at T observations."""

    mean: Tensor  # with sensitivities, (T, B, n, 1 + p)
    covariance: Tensor  # (T, B, n, n)


class Steps(NamedTuple):
    """Steps backwards in time, s_k = offset + gain s_{k+1} + N(0, rest); (..., B, n, ·)."""

    offset: Tensor
    gain: Tensor
    rest: Tensor

    def after(self, value: SmoothedRows) -> SmoothedRows:
        """The belief at k from that at k + 1."""
        return SmoothedRows(
            self.offset + self.gain @ value.mean, self.rest + self.gain @ value.covariance @ self.gain.mT
        )

    def joined(self, later: Steps) -> Steps:
        """One step in place of `later` and this one after it."""
        offset, rest = self.after(SmoothedRows(later.offset, later.rest))
        return Steps(offset, self.gain @ later.gain, rest)

    def at(self, j: int) -> Steps:
        return Steps(*(each[:, j] for each in self))

    def at_row(self, k: int) -> Steps:
        return Steps(*(each[k] for each in self))


def smooth(rows: FilteredRows) -> SmoothedRows:
    """The smoothed belief at every row, given all of them.

    Rows are handled in √T blocks of √T rows: all blocks side by side, then from block to block, then within all blocks.
    """
    last = SmoothedRows(rows.mean[-1], rows.covariance[-1])
    count = len(rows.mean) - 1
    if count == 0:
        return SmoothedRows(last.mean[None], last.covariance[None])
    steps = backward_steps(rows)
    size = math.ceil(math.sqrt(count))
    blocks = -(-count // size)
    steps = _padded(steps, blocks * size - count)
    steps = Steps(*(each.reshape(blocks, size, *each.shape[1:]) for each in steps))
    whole = steps.at(size - 1)
    for j in range(size - 2, -1, -1):
        whole = steps.at(j).joined(whole)
    ends, value = [], last
    for i in range(blocks - 1, -1, -1):
        ends.append(value)
        value = Steps(*(each[i] for each in whole)).after(value)
    value = SmoothedRows(*(torch.stack(part[::-1]) for part in zip(*ends, strict=True)))
    found = []
    for j in range(size - 1, -1, -1):
        value = steps.at(j).after(value)
        found.append(value)
    mean, covariance = (torch.stack(part[::-1], 1).flatten(0, 1)[-count:] for part in zip(*found, strict=True))
    covariance = torch.cat([0.5 * (covariance + covariance.mT), last.covariance[None]])
    return SmoothedRows(torch.cat([mean, last.mean[None]]), covariance)


def smooth_first(rows: FilteredRows) -> SmoothedRows:
    """The smoothed belief at the first row alone, (1, B, ...): that of a fixed lag, in constant memory."""
    value = SmoothedRows(rows.mean[-1], rows.covariance[-1])
    if len(rows.mean) > 1:
        steps = backward_steps(rows)
        while (count := len(steps.gain)) > 1:  # join neighbours side by side: as many rounds as the log of the lag
            steps = _padded(steps, count % 2)
            first, then = (Steps(*(each[i::2] for each in steps)) for i in (0, 1))
            steps = first.joined(then)
        value = steps.at_row(0).after(value)
    return SmoothedRows(value.mean[None], 0.5 * (value.covariance + value.covariance.mT)[None])


def backward_steps(rows: FilteredRows) -> Steps:
    """The steps from each row to the one before it, (T − 1, B, ...)."""
    mean, covariance, later = rows.mean[:-1], rows.covariance[:-1], FilteredRows(*(each[1:] for each in rows))
    gain = right_divide(later.cross.mT, later.predicted_covariance)
    eye = torch.eye(gain.shape[-1], dtype=gain.dtype, device=gain.device)
    follows, repeats = later.continues[..., None, None], later.repeats[..., None, None]
    gain = torch.where(follows, gain, torch.where(repeats, eye, 0.0))
    offset = torch.where(repeats, 0.0, mean - torch.where(follows, gain @ later.predicted_mean, 0.0))
    rest = torch.where(repeats, 0.0, covariance - torch.where(follows, gain @ later.cross, 0.0))
    return Steps(offset, gain, 0.5 * (rest + rest.mT))


def _padded(steps: Steps, count: int) -> Steps:
    """The steps with `count` more before them that change nothing."""
    if not count:
        return steps
    offset, gain, rest = (each[:1].expand(count, *each.shape[1:]) for each in steps)
    eye = torch.eye(gain.shape[-1], dtype=gain.dtype, device=gain.device).expand_as(gain)
    before = Steps(torch.zeros_like(offset), eye, torch.zeros_like(rest))
    return Steps(*(torch.cat(pair) for pair in zip(before, steps, strict=True)))


def right_divide(matrix: Tensor, covariance: Tensor) -> Tensor:
    """A P⁻¹ of matrices (..., n, n) and covariances; where P is singular, with its pseudo-inverse."""
    scale = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = covariance / scale[..., :, None] / scale[..., None, :]
    root, info = torch.linalg.cholesky_ex(torch.where(torch.isfinite(scaled), scaled, 0.0))
    right = matrix / scale[..., None, :]
    found = torch.cholesky_solve(right.mT, root).mT
    bad = (info != 0) | ~(root.diagonal(dim1=-2, dim2=-1).amin(-1) > SINGULAR)
    if holds(bad.any()):
        eager_only("smoothing with singular covariances")
        values, vectors = torch.linalg.eigh(torch.where(torch.isfinite(scaled[bad]), scaled[bad], 0.0))
        smallest = values.amax(-1, keepdim=True).clamp_min(0.0) * values.shape[-1] * 1e-14
        inverse = torch.where(values > smallest, 1 / values, 0.0)
        found[bad] = (right[bad] @ vectors * inverse[..., None, :]) @ vectors.mT
    return found / scale[..., None, :]
