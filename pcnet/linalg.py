"""Small dense linear algebra of a tick, as pure functions of tensors with one leading batch dimension."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Precision:
    """Π̃ = temporal ⊗ diag(channel): temporal (B, rows, rows), channel (B, dim), log_det (B,).

    It is formed densely only where it is small, since that is quicker there.
    """

    __slots__ = ("_dense", "channel", "log_det", "temporal")

    def __init__(self, temporal: Tensor, channel: Tensor, log_det: Tensor) -> None:
        self.temporal = temporal
        self.channel = channel
        self.log_det = log_det
        self._dense: Tensor | None = None

    def weigh(self, error: Tensor) -> Tensor:
        """ξ = Π̃ε; (B, rows, dim) → (B, rows, dim)."""
        return torch.bmm(self.temporal, error * self.channel[:, None, :])

    def sandwich(self, slope: Tensor) -> Tensor:
        """JᵀΠ̃J; (B, rows·dim, n) → (B, n, n)."""
        if slope.shape[1] <= SMALL:
            return torch.bmm(slope.mT, torch.bmm(self.dense(), slope))
        return self.between(slope, slope)

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """LᵀΠ̃R; (B, rows·dim, m) and (B, rows·dim, n) → (B, m, n)."""
        batch, rows = self.temporal.shape[:2]
        n = right.shape[-1]
        mixed = torch.bmm(self.temporal, right.expand(batch, -1, -1).reshape(batch, rows, -1))
        weighted = mixed.view(batch, rows, -1, n) * self.channel[:, None, :, None]
        return torch.bmm(left.expand(batch, -1, -1).mT, weighted.view(batch, -1, n))

    def dense(self) -> Tensor:
        """Π̃ itself, (B, rows·dim, rows·dim)."""
        if self._dense is None:
            size = self.temporal.shape[1] * self.channel.shape[1]
            blocks = self.temporal[:, :, None, :, None] * self.channel.diag_embed()[:, None, :, None, :]
            self._dense = blocks.reshape(-1, size, size)
        return self._dense


class Dense:
    """A curvature without structure, (B, n, n)."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def sandwich(self, slope: Tensor) -> Tensor:
        """JᵀMJ; (B, n, m) → (B, m, m)."""
        return self.between(slope, slope)

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        """LᵀMR; (B, n, m) and (B, n, k) → (B, m, k)."""
        return torch.bmm(left.mT, torch.bmm(self.matrix, right))


SMALL = 32
"""Up to this many rows a precision is quicker as a dense matrix."""


def quadratic(weighted: Tensor, error: Tensor) -> Tensor:
    """ξ·ε of every channel, summed over the orders; (B, rows, dim) → (B, dim)."""
    return (weighted * error).sum(-2)


class Posterior(NamedTuple):
    """A posterior precision (B, n, n), the log-determinant of its inverse (B,), and where it was mended (B,)."""

    precision: Tensor
    log_det_covariance: Tensor
    mended: Tensor | None


def posterior(curvature: Tensor) -> Posterior:
    """The Laplace posterior of a curvature, mended where it is not positive definite.

    Mending lifts eigenvalues to max(1e-9, 1e-12·|largest|), or to ten rounding errors of a coarser dtype.
    """
    factor, info = torch.linalg.cholesky_ex(curvature)
    log_det = -2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    if not info.any():
        return Posterior(curvature, log_det, None)
    mended = (info != 0) & torch.isfinite(curvature).all(-1).all(-1)
    if not mended.any():  # not finite: left as it is, for the run to report by name
        return Posterior(curvature, log_det, None)
    symmetric = 0.5 * (curvature[mended] + curvature[mended].mT)
    values, vectors = torch.linalg.eigh(symmetric)
    relative = max(1e-12, 10 * torch.finfo(values.dtype).eps)
    floor = (relative * values.abs().amax(-1, keepdim=True)).clamp_min(1e-9)
    lifted = torch.maximum(values, floor)
    curvature, log_det = curvature.clone(), log_det.clone()
    curvature[mended] = (vectors * lifted[:, None, :]) @ vectors.mT
    log_det[mended] = -lifted.log().sum(-1)
    return Posterior(curvature, log_det, mended)


def covariance_of(precision: Tensor) -> Tensor:
    """Σ of a posterior precision (B, n, n)."""
    factor, info = torch.linalg.cholesky_ex(precision)
    if not info.any():
        return torch.cholesky_inverse(factor)
    covariance = torch.full_like(precision, torch.nan)
    good, finite = info == 0, torch.isfinite(precision).all(-1).all(-1)
    covariance[good] = torch.cholesky_inverse(factor[good])
    flat = ~good & finite  # clamped eigenvalues, which rounding may have pushed below zero again
    covariance[flat] = torch.linalg.pinv(precision[flat], hermitian=True)
    return covariance


_SERIES = torch.tensor(
    [[1.0 / math.factorial(3 * row + i + 1) for i in range(3)] for row in (3, 2, 1, 0)], dtype=torch.float64
)
"""1/(i+1)! for i = 0 … 11 in rows of three, the highest first."""


def exponential_step(jacobian: Tensor, flow: Tensor, time: Tensor) -> Tensor:
    """∫₀ᵗ exp(Js) ds · f = t φ₁(Jt) f, exact for a linear flow; J (B, n, n), f (B, n), t (B,) → (B, n).

    It is the last column of exp(M) − I with M = [[tJ, f], [0, 0]], times t: a Taylor series of M/2^s, then s doublings
    X(2t) = 2X + X², which, unlike squaring exp(M) itself, lose no digits however often they are done.
    """
    batch, n = flow.shape
    # the answer is linear in f, so that f need not set the scale
    size = flow.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(flow.dtype).tiny)
    side = max(n + 1, 8)  # torch multiplies batches of smaller matrices by a plain loop, several times slower
    powers = jacobian.new_zeros(3, batch, side, side)  # I, M, M²
    powers[0].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    m = powers[1]
    torch.mul(jacobian, time[:, None, None], out=m[:, :n, :n])
    torch.div(flow, size, out=m[:, :n, n])
    norms = m.abs().sum(-1)
    largest = norms.nan_to_num_(0.0, posinf=0.0).amax().item()  # an element that is lost must not spoil its neighbours
    doublings = min(max(0, math.frexp(largest)[1] + 1), 60)
    m.mul_(0.5**doublings)
    m2 = torch.bmm(m, m, out=powers[2])
    m3 = torch.bmm(m2, m)
    # φ₁(M) = Σ Mⁱ/(i+1)! to twelve terms, by threes: each three are a mix of I, M and M², and M³ links them
    series: Tensor | None = None
    for three in torch.mm(_SERIES.to(m), powers.view(3, -1)).view(4, batch, side, side):
        series = three if series is None else three.baddbmm_(m3, series)
    assert series is not None
    grown, spare = torch.bmm(m, series), m3
    for _ in range(doublings):
        grown, spare = torch.bmm(grown, grown, out=spare).add_(grown, alpha=2.0), grown
    return grown[:, :n, n] * (size * time[:, None])


def log_abs_det(matrix: Tensor) -> Tensor:
    """log|det| by LU; (B, n, n) → (B,)."""
    factor: Tensor = torch.linalg.lu_factor_ex(matrix)[0]
    return factor.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
