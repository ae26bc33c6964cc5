"""Many observations of few states: predictive distributions whose covariance is low-rank plus diagonal.

The covariance of d observations y = C s + noise is S = CPCᵀ + R with P (n, n) and R diagonal. With W = R⁻¹ and the
information Γ = CᵀWC that the observations have about s, the covariance after them is P⁺ = P(I + ΓP)⁻¹, the gain
K = P⁺CᵀW, and the precision Ω = S⁻¹ = W − WCP⁺CᵀW. So the cost is linear in d, and equal to that of the dense form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.kalman import GaussianWithSensitivities, ScoreAndInformation
from pcnet.numerics.symmetric import mirrored

WIDE, PER_STATE = 8, 4
"""Observations are wide if they have more channels than this, and at least so many for each dimension of the state."""


def is_wide(channels: int, dim: int) -> bool:
    """Whether observations have so many channels that the low-rank form is used.

    Levels of single channels are then scored one by one: most of what channels say is about their noise, not about the
    state, so that little is lost.
    """
    return channels > WIDE and channels >= PER_STATE * dim


class LowRankDistribution(NamedTuple):
    """The distribution of many observations before they are made, N(mean, CPCᵀ + R)."""

    mean: Tensor  # (B, d)
    jacobian: Tensor  # C, (B, d, n)
    belief_by_source: Tensor  # P by source, (B, 1 + s, n, n)
    noise: Tensor  # diagonal of R, (B, d)
    noise_levels: Tensor  # whether R belongs to a log-variance, one or zero, (B, s)
    dbelief_dlogvar: Tensor  # derivatives of the mean of s with respect to the log-variances, (B, n, s)

    @property
    def covariance(self) -> Tensor:
        """CPCᵀ + R as a dense matrix, (B, d, d)."""
        return self.jacobian @ self.belief_by_source.sum(1) @ self.jacobian.mT + self.noise.diag_embed()

    @property
    def variance(self) -> Tensor:
        """Diagonal of the covariance, (B, d)."""
        total = self.belief_by_source.sum(1)
        return self.noise + (torch.bmm(self.jacobian, total) * self.jacobian).sum(-1)

    def of_levels(self, levels: slice) -> LowRankDistribution:
        """The same distribution, with its derivatives with respect to some log-variances only."""
        parts = self.belief_by_source
        chosen = parts[:, 1:][:, levels]
        rest = (parts.sum(1) - chosen.sum(1))[:, None]
        return self._replace(
            belief_by_source=torch.cat([rest, chosen], 1),
            noise_levels=self.noise_levels[:, levels],
            dbelief_dlogvar=self.dbelief_dlogvar[..., levels],
        )

    def with_noise(self, extra: Tensor) -> LowRankDistribution:
        """The same distribution with more noise, of variance (B, d)."""
        return self._replace(noise=self.noise + extra)


@dataclass(eq=False)
class LowRankPrecision:
    """Ω = W − WCP⁺CᵀW of the channels that are observed; others have no weight."""

    weight: Tensor  # diagonal of W, (B, d)
    jacobian: Tensor  # C, (B, d, n)
    covariance: Tensor  # P⁺, (B, n, n)
    information: Tensor  # Γ, (B, n, n)
    log_det: Tensor  # log|Ω| of the observed channels, (B,)
    there: Tensor | None  # which channels are observed, (B, d); None for all
    separable: ClassVar[bool] = False

    @classmethod
    def of(cls, distribution: LowRankDistribution, there: Tensor | None) -> LowRankPrecision:
        """The precision of the channels that are `there` (B, d), None for all."""
        _, jacobian, parts, noise, _, _ = distribution
        weight, log_weight = 1 / noise, -noise.log()
        if there is not None:
            weight, log_weight = torch.where(there, weight, 0.0), torch.where(there, log_weight, 0.0)
        prior = parts.sum(1)
        information = mirrored(torch.bmm(jacobian.mT, weight[..., None] * jacobian))
        ratio = torch.bmm(prior, information)
        ratio.diagonal(dim1=-2, dim2=-1).add_(1.0)
        covariance = mirrored(torch.linalg.solve(ratio, prior))
        log_det = log_weight.sum(-1) - torch.linalg.slogdet(ratio)[1]
        return cls(weight, jacobian, covariance, information, log_det, there)

    @property
    def gain(self) -> Tensor:
        """K = P⁺CᵀW, (B, n, d)."""
        return torch.bmm(self.covariance, self.jacobian.mT) * self.weight[:, None]

    def dense(self) -> Tensor:
        """Ω itself, (B, d, d)."""
        return self.weight.diag_embed() - (self.weight[..., None] * self.jacobian) @ self.gain

    def times(self, columns: Tensor) -> Tensor:
        """Ω times columns (B, d, k)."""
        weighted = self.weight[..., None] * columns
        through = torch.bmm(self.covariance, torch.bmm(self.jacobian.mT, weighted))
        return weighted - self.weight[..., None] * torch.bmm(self.jacobian, through)

    def weigh(self, error: Tensor) -> Tensor:
        """ξ = Ωε; (B, 1, d) → (B, 1, d)."""
        return self.times(error.mT).mT

    def quadratic_form(self, slope: Tensor) -> Tensor:
        """JᵀΩJ; (B, d, m) → (B, m, m)."""
        return self.bilinear_form(slope, slope)

    def bilinear_form(self, left: Tensor, right: Tensor) -> Tensor:
        """LᵀΩR; (B, d, m) and (B, d, k) → (B, m, k)."""
        return torch.bmm(left.mT, self.times(right))

    @property
    def kept(self) -> Tensor:
        """B = I − P⁺Γ = I − KC, the part of the state that an observation leaves as it was; (B, n, n)."""
        found = -torch.bmm(self.covariance, self.information)
        found.diagonal(dim1=-2, dim2=-1).add_(1.0)
        return found

    @property
    def seen_information(self) -> Tensor:
        """G = CᵀΩC, (B, n, n)."""
        return mirrored(torch.bmm(self.information, self.kept))

    @property
    def surprise(self) -> Tensor:
        """R_jΩ_jj of each channel, 1 minus its leverage; (B, d), 0 where nothing is observed."""
        columns = self.jacobian.mT
        leverage = (torch.bmm(self.covariance, columns) * columns).sum(1) * self.weight
        return 1 - leverage if self.there is None else torch.where(self.there, 1 - leverage, 0.0)


def update(
    belief: GaussianWithSensitivities,
    precision: LowRankPrecision,
    pull: Tensor,
    dg_dtheta: Tensor | None,
    noise_levels: Tensor,
) -> GaussianWithSensitivities:
    """`kalman.update` with many observations of known noise.

    With B = I − KC: m ← m + P Cᵀξ, P_k ← BP_kBᵀ + KR_kKᵀ, where KRKᵀ = P⁺ΓP⁺ and KRξ = P⁺Cᵀξ.

    Args:
        belief: The belief before the update.
        precision: Ω, of the predictive distribution.
        pull: Cᵀξ, (B, n).
        dg_dtheta: Direct derivative ∂g/∂θ, (B, d, p); None without parameters of g.
        noise_levels: Whether the noise belongs to a log-variance, one or zero, (B, s).
    """
    mean, parts, dtheta, dlogvar = belief
    kept, after = precision.kept, precision.covariance
    column = pull[..., None]
    source = torch.cat([1 - noise_levels.sum(1, keepdim=True), noise_levels], 1)[..., None, None]
    taken_in = mirrored(after @ precision.information @ after)
    new = mirrored(kept[:, None] @ parts @ kept.mT[:, None] + source * taken_in[:, None])
    if dtheta.shape[-1]:
        dtheta = torch.bmm(kept, dtheta)
        dtheta = dtheta if dg_dtheta is None else dtheta - torch.bmm(precision.gain, dg_dtheta)
    if dlogvar.shape[-1]:
        through = (parts[:, 1:] @ column[:, None])[..., 0].mT
        dlogvar = torch.bmm(kept, dlogvar + through) - torch.bmm(after, column) * noise_levels[:, None]
    return GaussianWithSensitivities(mean + torch.bmm(parts.sum(1), column)[..., 0], new, dtheta, dlogvar)


def noise_score(
    predicted: LowRankDistribution, precision: LowRankPrecision, weighted_error: Tensor
) -> ScoreAndInformation:
    """`kalman.noise_score` of a low-rank distribution, in terms of Cᵀξ, Γ and P⁺."""
    _, jacobian, parts, noise, levels, slope = predicted
    chosen, total = parts[:, 1:], parts.sum(1)
    pull = torch.bmm(jacobian.mT, weighted_error[..., None])
    information, kept = precision.seen_information, precision.kept
    squares = (noise * weighted_error**2).sum(-1)
    relative = torch.bmm(precision.covariance, precision.information)  # P⁺Γ
    there, all_channels = precision.there, torch.full_like(noise[:, 0], noise.shape[-1])
    seen = all_channels if there is None else there.sum(-1).to(noise)
    trace = relative.diagonal(dim1=-2, dim2=-1).sum(-1)
    fit = (pull.mT[:, None] @ chosen @ pull[:, None])[..., 0, 0] + levels * squares[:, None]
    by_belief = information[:, None] @ chosen  # G P_k, whose trace is that of ΩCP_kCᵀ
    expected = by_belief.diagonal(dim1=-2, dim2=-1).sum(-1) + levels * (seen - trace)[:, None]
    score = 0.5 * (fit - expected) + torch.bmm(slope.mT, pull)[..., 0]
    both = torch.bmm(by_belief.flatten(2), by_belief.mT.flatten(2).mT)
    weighed = kept.mT @ precision.information @ kept  # CᵀΩRΩC
    crossed = levels[:, None] * torch.bmm(chosen.flatten(2), weighed.mT.reshape(len(weighed), -1, 1))
    twice = seen - 2 * trace + (relative * relative.mT).sum((1, 2))  # tr ΩRΩR
    own = levels[:, :, None] * levels[:, None] * twice[:, None, None]
    fisher = 0.5 * (both + crossed + crossed.mT + own)
    fits = squares + (pull.mT @ total @ pull)[:, 0, 0]
    share = (fits / seen.clamp_min(1)).clamp_min(1.0).reciprocal()[:, None, None]
    return ScoreAndInformation(score, mirrored(torch.addcmul(fisher, share, slope.mT @ information @ slope)))


def channel_scores(
    predicted: LowRankDistribution, precision: LowRankPrecision, weighted_error: Tensor
) -> tuple[Tensor, Tensor]:
    """Score and information of the log-variance of each channel, (B, d) each, given the levels of all others.

    ½(R_jξ_j² − R_jΩ_jj) and ½(R_jΩ_jj)²: what a channel contributes to the uncertainty of the state, of the order of
    n/d, is left out. The score still has the mean 0 at the true levels.
    """
    expected = precision.surprise
    return 0.5 * (predicted.noise * weighted_error**2 - expected), 0.5 * expected**2
