"""Kalman filtering of a Gaussian belief with its sensitivities, as pure functions of tensors.

The belief about a variable s with n elements is N(m, P), given log-variances l of the noises, and parameters θ that are
not elements of s. The covariance is kept by source, P = Σ_k P_k with P_k the part that noise k contributed: because the
gain minimises P, ∂P/∂l_k = P_k. Two sensitivities are carried along: ∂m/∂θ and ∂m/∂l.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pcnet.numerics.symmetric import known_symmetric, mirrored, plus_product


class GaussianWithSensitivities(NamedTuple):
    """A Gaussian belief and its derivatives with respect to parameters and log-variances."""

    mean: Tensor  # (B, n)
    covariance_by_source: Tensor  # (B, 1 + s, n, n), of which the first is the part of no learned noise
    dmean_dtheta: Tensor  # (B, n, p)
    dmean_dlogvar: Tensor  # (B, n, s)

    @property
    def covariance(self) -> Tensor:
        """P = Σ_k P_k, (B, n, n)."""
        parts = self.covariance_by_source
        return parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)

    def covariance_of(self, elements: slice) -> Tensor:
        """The covariance of some elements, (B, m, m)."""
        return self._replace(covariance_by_source=self.covariance_by_source[..., elements, elements]).covariance


class PredictiveDistribution(NamedTuple):
    """The distribution of an observation before it is made, N(mean, covariance), observation noise included."""

    mean: Tensor  # (B, d)
    covariance: Tensor  # (B, d, d)
    dmean_dlogvar: Tensor  # (B, d, s)
    covariance_by_source: Tensor  # derivatives of the covariance with respect to the log-variances, (B, s, d, d)
    noise: Tensor  # variance of the white observation noise in it, (B, d)

    @property
    def variance(self) -> Tensor:
        """Diagonal of the covariance, (B, d)."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    def of_levels(self, levels: slice) -> PredictiveDistribution:
        """The same distribution, with its derivatives with respect to some log-variances only."""
        slope, parts = self.dmean_dlogvar[..., levels], self.covariance_by_source[:, levels]
        return self._replace(dmean_dlogvar=slope, covariance_by_source=parts)


class QuadraticForm(Protocol):
    """A precision Ω in any form."""

    def quadratic_form(self, slope: Tensor) -> Tensor:
        """JᵀΩJ; (B, d, m) → (B, m, m)."""


class ScoreAndInformation(NamedTuple):
    """The gradient of a log-likelihood and its Fisher information."""

    score: Tensor  # (B, n)
    information: Tensor  # (B, n, n)

    def part(self, of: slice) -> ScoreAndInformation:
        return ScoreAndInformation(self.score[:, of], self.information[:, of, of])

    def plus(self, other: ScoreAndInformation) -> ScoreAndInformation:
        return ScoreAndInformation(self.score + other.score, self.information + other.information)


def predict(
    belief: GaussianWithSensitivities, change: Tensor, jacobian: Tensor, dchange_dtheta: Tensor, noise: Tensor
) -> GaussianWithSensitivities:
    """Time update of the first d elements: s ← s + (c(s, θ), 0).

    Args:
        belief: The belief before the step.
        change: c, (B, d).
        jacobian: ∂c/∂s, (B, d, n).
        dchange_dtheta: ∂c/∂θ, (B, d, p).
        noise: Covariance of the added noise by source, (B, 1 + s, d, d).
    """
    d = change.shape[-1]
    mean, parts, dtheta, dlogvar = belief
    transition = jacobian.clone()
    transition[..., :d].diagonal(dim1=-2, dim2=-1).add_(1.0)
    parts = known_symmetric(parts)
    moved = transition[:, None] @ parts  # the rows of the elements that move
    parts = parts.clone()
    parts[..., :d, d:] = moved[..., d:]
    parts[..., d:, :d] = moved[..., d:].mT
    parts[..., :d, :d] = mirrored(plus_product(noise, moved, transition.mT))
    if dtheta.shape[-1]:
        dtheta = _with_first_rows(dtheta, torch.baddbmm(dtheta[:, :d] + dchange_dtheta, jacobian, dtheta))
    if dlogvar.shape[-1]:
        dlogvar = _with_first_rows(dlogvar, torch.baddbmm(dlogvar[:, :d], jacobian, dlogvar))
    return GaussianWithSensitivities(_with_first_rows(mean, mean[:, :d] + change), parts, dtheta, dlogvar)


def _with_first_rows(whole: Tensor, first: Tensor) -> Tensor:
    """A tensor (B, n, ...) with other first rows."""
    d = first.shape[1]
    return torch.cat([first, whole[:, d:]], 1) if whole.shape[1] > d else first


def transform(
    belief: GaussianWithSensitivities, place: slice, matrix: Tensor, noise: Tensor
) -> GaussianWithSensitivities:
    """A linear step of the elements at `place`, s ← As plus noise.

    Args:
        belief: The belief before the step.
        place: The elements that move: k for each of c channels, all channels of the first, then of the second, ….
        matrix: A of one channel, (B, k, k).
        noise: Covariance of the added noise by source, (B, 1 + s, kc, kc).
    """
    mean, parts = belief.mean.clone(), belief.covariance_by_source.clone()
    dtheta, dlogvar = belief.dmean_dtheta.clone(), belief.dmean_dlogvar.clone()
    k = matrix.shape[-1]

    def move(rows: Tensor, by: Tensor) -> Tensor:
        """Rows (..., kc, n) of all channels, each channel moved by A."""
        return (by @ rows.reshape(*rows.shape[:-2], k, -1)).reshape(rows.shape)

    mean[:, place] = move(mean[:, place, None], matrix)[..., 0]
    rows = move(parts[:, :, place], matrix[:, None])
    parts[:, :, place] = rows
    parts[..., place] = rows.mT
    parts[..., place, place] = mirrored(move(rows[..., place].mT, matrix[:, None]) + noise)
    if dtheta.shape[-1]:
        dtheta[:, place] = move(dtheta[:, place], matrix)
    if dlogvar.shape[-1]:
        dlogvar[:, place] = move(dlogvar[:, place], matrix)
    return GaussianWithSensitivities(mean, parts, dtheta, dlogvar)


def couple(
    belief: GaussianWithSensitivities, place: slice, source: slice, noise: Tensor, gain: Tensor
) -> GaussianWithSensitivities:
    """The belief after noise ε that the elements at `source` have received acts on those at `place` too, by gain · ε.

    Args:
        belief: The belief, with the noise at `source` already.
        place: m elements.
        source: k elements, m ≤ k.
        noise: Covariance by source of the first m elements of ε with all of them, (B, 1 + s, m, k).
        gain: (B,).
    """
    parts = belief.covariance_by_source.clone()
    cross = gain[:, None, None, None] * noise
    parts[..., place, source] += cross
    parts[..., source, place] += cross.mT
    parts[..., place, place] += gain[:, None, None, None] * cross[..., : cross.shape[-2]]
    return belief._replace(covariance_by_source=parts)


def add_variance(belief: GaussianWithSensitivities, place: slice, variance: Tensor) -> GaussianWithSensitivities:
    """The belief with a variance (B, m) of no learned noise added to the m elements at `place`."""
    parts = belief.covariance_by_source.clone()
    parts[:, 0, place, place].diagonal(dim1=-2, dim2=-1).add_(variance)
    return belief._replace(covariance_by_source=parts)


def predict_observation(
    belief: GaussianWithSensitivities, mean: Tensor, jacobian: Tensor, noise: Tensor, residual: Tensor | None = None
) -> PredictiveDistribution:
    """Predictive distribution of an observation g(s) plus noise.

    Args:
        belief: The belief about s.
        mean: g at the mean, (B, d).
        jacobian: ∂g/∂s, (B, d, n).
        noise: Variance of the observation noise by source, (B, 1 + s, d).
        residual: Covariance of what the linearisation leaves out, (B, d, d).
    """
    parts = mirrored(jacobian[:, None] @ known_symmetric(belief.covariance_by_source) @ jacobian.mT[:, None])
    total, white = parts.sum(1), noise.sum(1)
    parts.diagonal(dim1=-2, dim2=-1).add_(noise)
    total.diagonal(dim1=-2, dim2=-1).add_(white)
    total = total if residual is None else total + residual
    slope = torch.bmm(jacobian, belief.dmean_dlogvar)
    return PredictiveDistribution(mean, total, slope, parts[:, 1:], white)


def update(
    belief: GaussianWithSensitivities,
    jacobian: Tensor,
    dg_dtheta: Tensor | None,
    weighted_error: Tensor,
    precision: Tensor,
    noise: Tensor | None,
    residual: Tensor | None = None,
) -> GaussianWithSensitivities:
    """Measurement update with an error e = y − g(s), given as ξ = Ωe.

    With C = ∂g/∂s and K = PCᵀΩ: m ← m + Ke, P_k ← (I − KC)P_k(I − KC)ᵀ + KR_kKᵀ, ∂m/∂θ ← ∂m/∂θ − K dg/dθ, and
    ∂m/∂l_k ← (I − KC)(∂m/∂l_k + P_kCᵀξ) − KR_kξ.

    Args:
        belief: The belief before the update.
        jacobian: C, (B, d, n).
        dg_dtheta: Direct derivative ∂g/∂θ, (B, d, p); None without parameters of g.
        weighted_error: ξ, (B, d).
        precision: Ω, the precision of the predictive distribution, (B, d, d).
        noise: Diagonals of R_k, (B, 1 + s, d). None if R = Ω⁻¹ − CPCᵀ has no known source; then Ω may be singular.
        residual: A further covariance in R_0, (B, d, d).
    """
    mean, parts, dtheta, dlogvar = belief
    parts = known_symmetric(parts)
    seen = jacobian[:, None] @ parts  # CP_k
    total = seen[:, 0] if parts.shape[1] == 1 else seen.sum(1)
    gain = torch.bmm(total.mT, precision)
    left = plus_product(parts, -gain, seen)  # (I − KC)P_k
    across = left @ jacobian.mT[:, None]
    if noise is not None:
        across = torch.addcmul(across, gain[:, None], noise[:, :, None], value=-1)
        if residual is not None:
            across[:, 0] -= gain @ residual
    new = plus_product(left, across, -gain.mT)
    if noise is None:
        new[:, 0] += total.mT @ (precision - precision @ (total @ jacobian.mT) @ precision) @ total
    new = mirrored(new)
    if dtheta.shape[-1]:
        dtheta = torch.baddbmm(dtheta, -gain, total_derivative(jacobian, dtheta, dg_dtheta))
    if dlogvar.shape[-1]:
        dlogvar = dlogvar + (seen[:, 1:].mT @ weighted_error[:, None, :, None])[..., 0].mT
        known = torch.bmm(jacobian, dlogvar)
        if noise is not None:
            known = known + noise[:, 1:].mT * weighted_error[..., None]
        dlogvar = torch.baddbmm(dlogvar, -gain, known)
    mean = torch.baddbmm(mean[..., None], total.mT, weighted_error[..., None])[..., 0]
    return GaussianWithSensitivities(mean, new, dtheta, dlogvar)


def total_derivative(jacobian: Tensor, dmean_dtheta: Tensor, dg_dtheta: Tensor | None) -> Tensor:
    """dg/dθ = C ∂m/∂θ + ∂g/∂θ, (B, d, p)."""
    through_state = torch.bmm(jacobian, dmean_dtheta)
    return through_state if dg_dtheta is None else through_state + dg_dtheta


def parameter_score(
    jacobian: Tensor, dmean_dtheta: Tensor, dg_dtheta: Tensor | None, weighted_error: Tensor, precision: QuadraticForm
) -> ScoreAndInformation:
    """Score and information of θ in an error: (dg/dθ)ᵀξ and (dg/dθ)ᵀΩ dg/dθ."""
    derivative = total_derivative(jacobian, dmean_dtheta, dg_dtheta)
    score = torch.bmm(derivative.mT, weighted_error[..., None])[..., 0]
    return ScoreAndInformation(score, precision.quadratic_form(derivative))


def noise_score(
    predicted: PredictiveDistribution, error: Tensor, weighted_error: Tensor, precision: Tensor
) -> ScoreAndInformation:
    """Score and information of the log-variances l in an error e.

    The score is ½(ξᵀS_kξ − tr ΩS_k) + (∂y/∂l_k)ᵀξ with S_k = ∂Ω⁻¹/∂l_k and ξ = Ωe, the information
    ½tr(ΩS_jΩS_k) + (∂y/∂l_j)ᵀΩ∂y/∂l_k. Its second part grows with the square of errors that are larger than predicted,
    and is divided by that ratio, because otherwise it would slow down learning while l is still wrong. Missing
    channels, where Ω is 0, do not count.

    Args:
        predicted: The predictive distribution of the observation.
        error: e, (B, d).
        weighted_error: ξ, (B, d).
        precision: Ω, (B, d, d).
    """
    parts, column = predicted.covariance_by_source, weighted_error[..., None]
    relative = precision[:, None] @ parts
    fit = ((parts @ column[:, None])[..., 0] @ column)[..., 0]
    score = 0.5 * (fit - relative.diagonal(dim1=-2, dim2=-1).sum(-1))
    information = 0.5 * torch.bmm(relative.flatten(2), relative.mT.flatten(2).mT)
    slope = predicted.dmean_dlogvar
    score = score + torch.bmm(slope.mT, column)[..., 0]
    seen = (precision.diagonal(dim1=-2, dim2=-1) > 0).sum(-1).clamp_min(1)
    share = ((error * weighted_error).sum(-1) / seen).clamp_min(1.0).reciprocal()[:, None, None]
    return ScoreAndInformation(score, mirrored(torch.addcmul(information, share, slope.mT @ precision @ slope)))
