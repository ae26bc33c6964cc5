"""Kalman filtering of a Gaussian belief with its sensitivities, as pure functions of tensors.

The belief about a variable s with n elements is N(m, P), given parameters θ and log-variances l of the noises. Two
sensitivities are carried along: W = ∂m/∂θ and ∂m/∂l. The covariance is kept by source, P = Σ_k P_k with P_k the part
that noise k contributed. Because the gain minimises P, ∂P/∂l_k = P_k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.branching import holds


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


class PredictiveDistribution(NamedTuple):
    """The distribution of an observation before it is made, N(mean, covariance), observation noise included."""

    mean: Tensor  # (B, d)
    covariance: Tensor  # (B, d, d)
    dmean_dlogvar: Tensor  # (B, d, s)
    covariance_by_source: Tensor  # derivatives of the covariance with respect to the log-variances, (B, s, d, d)
    parameter_covariance: Tensor  # what uncertain parameters add to the covariance, (B, d, d)


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
        noise: Variance of the added noise by source, (B, 1 + s, d).
    """
    d = change.shape[-1]
    mean, parts, dtheta, dlogvar = belief
    parts = parts.clone()
    parts[:, :, :d] += jacobian[:, None] @ belief.covariance_by_source
    parts[..., :d] += parts @ jacobian.mT[:, None]
    parts[..., :d, :d].diagonal(dim1=-2, dim2=-1).add_(noise)
    return GaussianWithSensitivities(
        _add_to_first_rows(mean, change, d),
        parts,
        _add_to_first_rows(dtheta, torch.bmm(jacobian, dtheta) + dchange_dtheta, d) if dtheta.shape[-1] else dtheta,
        _add_to_first_rows(dlogvar, torch.bmm(jacobian, dlogvar), d) if dlogvar.shape[-1] else dlogvar,
    )


def _add_to_first_rows(whole: Tensor, part: Tensor, d: int) -> Tensor:
    return torch.cat([whole[:, :d] + part, whole[:, d:]], 1) if whole.shape[1] > d else whole + part


def decay(belief: GaussianWithSensitivities, place: slice, factor: Tensor, noise: Tensor) -> GaussianWithSensitivities:
    """Ornstein–Uhlenbeck step of the elements at `place`: s ← factor · s plus noise.

    Args:
        belief: The belief before the step.
        place: Elements that decay, one per channel.
        factor: (B,).
        noise: Variance of the added noise by source, (B, 1 + s, channels).
    """
    scale = torch.ones_like(belief.mean)
    scale[:, place] = factor[:, None]
    parts = belief.covariance_by_source * (scale[:, :, None] * scale[:, None, :])[:, None]
    parts[..., place, place].diagonal(dim1=-2, dim2=-1).add_(noise)
    return GaussianWithSensitivities(
        belief.mean * scale, parts, belief.dmean_dtheta * scale[..., None], belief.dmean_dlogvar * scale[..., None]
    )


def shift_in(
    belief: GaussianWithSensitivities, order: Tensor, fresh: Tensor, noise: Tensor, due: Tensor
) -> GaussianWithSensitivities:
    """Where due: move elements, s ← s[order], and restart some of them at zero mean.

    Args:
        belief: The belief before the step.
        order: Permutation of the elements, (n,).
        fresh: Indices of the elements that restart, (f,).
        noise: Variance by source that they restart with, (B, 1 + s, f).
        due: Batch elements for which this happens, (B,).
    """
    mean, parts, dtheta, dlogvar = belief
    moved = [mean[:, order], dtheta[:, order], dlogvar[:, order]]
    for part in moved:
        part[:, fresh] = 0.0
    spread = parts[:, :, order][..., order]
    spread[:, :, fresh] = 0.0
    spread[..., fresh] = 0.0
    spread[:, :, fresh, fresh] = noise
    shifted = GaussianWithSensitivities(moved[0], spread, moved[1], moved[2])
    if holds(due.all()):
        return shifted
    pairs = zip(shifted, belief, strict=True)
    return GaussianWithSensitivities(
        *(torch.where(due.view(-1, *(1,) * (new.dim() - 1)), new, old) for new, old in pairs)
    )


def predict_observation(
    belief: GaussianWithSensitivities, mean: Tensor, jacobian: Tensor, noise: Tensor, parameter_covariance: Tensor
) -> PredictiveDistribution:
    """Predictive distribution of an observation g(s) plus noise.

    Args:
        belief: The belief about s.
        mean: g at the mean, (B, d).
        jacobian: ∂g/∂s, (B, d, n).
        noise: Variance of the observation noise by source, (B, 1 + s, d).
        parameter_covariance: What uncertain parameters add to the covariance, (B, d, d).
    """
    parts = jacobian[:, None] @ belief.covariance_by_source @ jacobian.mT[:, None]
    parts.diagonal(dim1=-2, dim2=-1).add_(noise)
    dlogvar = torch.bmm(jacobian, belief.dmean_dlogvar)
    return PredictiveDistribution(mean, parts.sum(1), dlogvar, parts[:, 1:], parameter_covariance)


def update(
    belief: GaussianWithSensitivities,
    jacobian: Tensor,
    dg_dtheta: Tensor | None,
    weighted_error: Tensor,
    precision: Tensor,
    noise: Tensor | None,
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
    """
    mean, parts, dtheta, dlogvar = belief
    seen = jacobian[:, None] @ parts  # CP_k
    total = seen[:, 0] if parts.shape[1] == 1 else seen.sum(1)
    gain = torch.bmm(total.mT, precision)
    inner = seen @ jacobian.mT[:, None]  # CP_kCᵀ
    # (I − KC)P(I − KC)ᵀ = P − U − Uᵀ with U = K(CP − ½CPCᵀKᵀ): as symmetric as P is
    half = gain[:, None] @ (seen - 0.5 * inner @ gain.mT[:, None])
    if noise is not None:
        spread = (gain[:, None] * noise[:, :, None]) @ gain.mT[:, None]
    else:
        left = precision - precision @ inner.sum(1) @ precision
        spread = torch.zeros_like(parts)
        spread[:, 0] = total.mT @ left @ total
    new = parts - half - half.mT + spread
    new = 0.5 * (new + new.mT)  # otherwise rounding makes it less symmetric at every step
    if dtheta.shape[-1]:
        dtheta = dtheta - torch.bmm(gain, total_derivative(jacobian, dtheta, dg_dtheta))
    if dlogvar.shape[-1]:
        dlogvar = dlogvar + torch.einsum("bkdn,bd->bnk", seen[:, 1:], weighted_error)
        dlogvar = dlogvar - torch.bmm(gain, torch.bmm(jacobian, dlogvar))
        if noise is not None:
            dlogvar = dlogvar - torch.einsum("bnd,bkd,bd->bnk", gain, noise[:, 1:], weighted_error)
    return GaussianWithSensitivities(
        mean + torch.bmm(total.mT, weighted_error[..., None])[..., 0], new, dtheta, dlogvar
    )


def total_derivative(jacobian: Tensor, dmean_dtheta: Tensor, dg_dtheta: Tensor | None) -> Tensor:
    """dg/dθ = C ∂m/∂θ + ∂g/∂θ, (B, d, p)."""
    through_state = torch.bmm(jacobian, dmean_dtheta)
    return through_state if dg_dtheta is None else through_state + dg_dtheta


def parameter_score(
    jacobian: Tensor, dmean_dtheta: Tensor, dg_dtheta: Tensor | None, weighted_error: Tensor, precision: Tensor
) -> ScoreAndInformation:
    """Score and information of θ in an error: (dg/dθ)ᵀξ and (dg/dθ)ᵀΩ dg/dθ."""
    derivative = total_derivative(jacobian, dmean_dtheta, dg_dtheta)
    score = torch.bmm(derivative.mT, weighted_error[..., None])[..., 0]
    return ScoreAndInformation(score, derivative.mT @ precision @ derivative)


def noise_score(predicted: PredictiveDistribution, error: Tensor, precision: Tensor) -> ScoreAndInformation:
    """Score and information of the log-variances l in an error e.

    The score is ½(ξᵀS_kξ − tr ΩS_k) + (∂y/∂l_k)ᵀξ with S_k = ∂Ω⁻¹/∂l_k and ξ = Ωe, the information
    ½tr(ΩS_jΩS_k) + (∂y/∂l_j)ᵀΩ∂y/∂l_k. Three details:

    - Ω is reduced by the uncertainty of the parameters, so that parameter error is not mistaken for noise.
    - The second part of the information grows with the square of errors that are larger than predicted. It is divided
      by that ratio, because otherwise it would slow down learning while l is still wrong.
    - Missing channels, where Ω is 0, do not count.

    Args:
        predicted: The predictive distribution of the observation.
        error: e, (B, d).
        precision: Ω, (B, d, d).
    """
    if predicted.parameter_covariance.shape[-1]:
        eye = torch.eye(error.shape[-1], dtype=error.dtype, device=error.device)
        precision = torch.linalg.solve(eye + precision @ predicted.parameter_covariance, precision)
    weighted = torch.bmm(precision, error[..., None])[..., 0]
    relative = torch.einsum("bde,bkef->bkdf", precision, predicted.covariance_by_source)
    fit = torch.einsum("bd,bkde,be->bk", weighted, predicted.covariance_by_source, weighted)
    score = 0.5 * (fit - relative.diagonal(dim1=-2, dim2=-1).sum(-1))
    score = score + torch.bmm(predicted.dmean_dlogvar.mT, weighted[..., None])[..., 0]
    information = 0.5 * torch.einsum("bjde,bked->bjk", relative, relative)
    seen = (precision.diagonal(dim1=-2, dim2=-1) > 0).sum(-1).clamp_min(1)
    size = (error * weighted).sum(-1) / seen
    through_mean = predicted.dmean_dlogvar.mT @ precision @ predicted.dmean_dlogvar
    return ScoreAndInformation(score, information + through_mean / size.clamp_min(1.0)[:, None, None])
