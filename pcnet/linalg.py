"""Small dense linear algebra of a tick, as pure functions of tensors with one leading batch dimension."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Precision:
    """Π̃ = temporal ⊗ diag(channel), channel = e^λ: temporal (B, rows, rows), channel (B, dim), log_det (B,).

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
        weighted = self.across(mixed.view(batch, rows, -1, n))
        return torch.bmm(left.expand(batch, -1, -1).mT, weighted.view(batch, -1, n))

    def across(self, values: Tensor) -> Tensor:
        """The channels of (B, …, dim, n), weighed as at one order."""
        return values * self.channel.view(len(self.channel), *(1,) * (values.dim() - 3), -1, 1)

    def dense(self) -> Tensor:
        """Π̃ itself, (B, rows·dim, rows·dim)."""
        if self._dense is None:
            size = self.temporal.shape[1] * self.channel.shape[1]
            blocks = self.temporal[:, :, None, :, None] * self._matrix()[:, None, :, None, :]
            self._dense = blocks.reshape(-1, size, size)
        return self._dense

    def _matrix(self) -> Tensor:
        """The precision of the channels at one order, (B, dim, dim)."""
        return self.channel.diag_embed()

    # --- what an error says of the precision's own parameters, here λ (B, dim), through E = ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| -----------
    def slope(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂E/∂λ = ½(ξ·ε − rows)."""
        return 0.5 * (quadratic(weighted, error) - error.shape[1])

    def information(self) -> Tensor:
        """The expected curvature of E, rows/2; those of diagonals are given as such."""
        return torch.full_like(self.channel, 0.5 * self.temporal.shape[1])

    def curvature(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂²E/∂λ² = ½ξ·ε."""
        return 0.5 * quadratic(weighted, error)


class CoupledPrecision(Precision):
    """Π̃ = temporal ⊗ Π with Π = TᵀΛT: T (B, dim, dim) is one on its diagonal and zero above, Λ = diag(e^λ), λ (B, dim).

    This is Cholesky's factorisation, so that Π is positive definite whatever λ and T are, and log|Π| = Σλ. e^λ_i is the
    precision of channel i once the channels before it are known, and −T_ij is how much j < i then says about i.
    `channel` is Π itself. The parameters are λ and then T below its diagonal, row by row.

    With the second moment M = Σ S⁻¹_ij ε_i ε_jᵀ (dim, dim) over the orders, 2E = Σ_i e^λ_i (TMTᵀ)_ii − rows Σλ + …;
    M is rows · Π⁻¹ on average. Different rows of T do not interact.
    """

    __slots__ = ("factor", "log_channel")

    def __init__(self, temporal: Tensor, log_channel: Tensor, factor: Tensor, log_det: Tensor) -> None:
        super().__init__(temporal, factor.mT @ (log_channel.exp()[..., None] * factor), log_det)
        self.log_channel = log_channel
        self.factor = factor

    def weigh(self, error: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(self.temporal, error), self.channel)

    def across(self, values: Tensor) -> Tensor:
        return self.channel.view(len(self.channel), *(1,) * (values.dim() - 3), *self.channel.shape[1:]) @ values

    def _matrix(self) -> Tensor:
        return self.channel

    def slope(self, error: Tensor, weighted: Tensor) -> Tensor:
        """∂E/∂λ_i = ½(e^λ_i (TMTᵀ)_ii − rows), ∂E/∂T_ij = e^λ_i (TM)_ij."""
        pull = self._pull(self._moment(error))
        own = 0.5 * ((pull * self.factor).sum(-1) - error.shape[1])
        i, j = self._below
        return torch.cat([own, pull[:, i, j]], -1)

    def information(self) -> Tensor:
        """rows/2 along λ, and rows e^λ_i (Π⁻¹)_jk between T_ij and T_ik; none between λ and T; (B, n, n)."""
        rows = self.temporal.shape[1]
        eye = torch.eye(self.factor.shape[-1]).to(self.factor)
        inverse = torch.linalg.solve_triangular(self.factor, eye, upper=False, unitriangular=True)
        covariance = (inverse * (-self.log_channel).exp()[:, None, :]) @ inverse.mT
        return self._assemble(torch.full_like(self.log_channel, 0.5 * rows), None, rows * covariance)

    def curvature(self, error: Tensor, weighted: Tensor) -> Tensor:
        """½e^λ_i (TMTᵀ)_ii along λ, e^λ_i (TM)_ij between λ_i and T_ij, e^λ_i M_jk between T_ij and T_ik; (B, n, n)."""
        moment = self._moment(error)
        pull = self._pull(moment)
        return self._assemble(0.5 * (pull * self.factor).sum(-1), pull, moment)

    @property
    def _below(self) -> Tensor:
        dim = self.factor.shape[-1]
        return torch.tril_indices(dim, dim, -1, device=self.factor.device)

    def _moment(self, error: Tensor) -> Tensor:
        return torch.bmm(error.mT, torch.bmm(self.temporal, error))

    def _pull(self, moment: Tensor) -> Tensor:
        """e^λ_i (TM)_ij."""
        return self.log_channel.exp()[..., None] * (self.factor @ moment)

    def _assemble(self, own: Tensor, mixed: Tensor | None, moment: Tensor) -> Tensor:
        """A curvature from its parts along λ (B, dim), between λ and T, and of T, which is e^λ_i times a moment."""
        (i, j), dim = self._below, own.shape[-1]
        n = dim + len(i)
        curvature = own.new_zeros(own.shape[0], n, n)
        curvature[:, :dim, :dim].diagonal(dim1=-2, dim2=-1).copy_(own)
        within = self.log_channel.exp()[:, i, None] * moment[:, j[:, None], j]
        curvature[:, dim:, dim:] = within * (i[:, None] == i)
        if mixed is not None:
            place = torch.arange(dim, n, device=own.device)
            curvature[:, place, i] = curvature[:, i, place] = mixed[:, i, j]
        return curvature


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
