"""A Gaussian belief that is carried through time with all that it depends on, as pure functions of tensors.

A variable s (n numbers) is believed to be N(m, P) at parameters θ and log-variances l of its noises. What other
values of these would have made of the belief is carried along: W = ∂m/∂θ, ∂m/∂l, and P in shares P = Σ_k P_k, the part
that each noise has brought in. Since a gain minimises P, ∂P/∂l_k is that share and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GaussianWithSensitivities(NamedTuple):
    """Mean m (B, n), shares of its covariance (B, 1 + s, n, n), ∂m/∂θ (B, n, p) and ∂m/∂l (B, n, s).

    The first share is what no noise of the s has brought in: the beginning, and noises that are taken as given.
    """

    mean: Tensor
    shares: Tensor
    dmean_dtheta: Tensor
    dmean_dlogvar: Tensor

    @property
    def covariance(self) -> Tensor:
        """P, (B, n, n)."""
        return self.shares[:, 0] if self.shares.shape[1] == 1 else self.shares.sum(1)


class PredictiveDistribution(NamedTuple):
    """An observation before it is made: N(mean (B, d), covariance (B, d, d)), the noise of observing it included.

    And by what it would be another with other log-variances l: by_noise (B, d, s) and covariance_by_noise (B, s, d, d).
    doubt: what parameters that are not known for sure add to the covariance (B, d, d), if there are any.
    """

    mean: Tensor
    covariance: Tensor
    dmean_dlogvar: Tensor
    covariance_by_source: Tensor
    doubt: Tensor | None = None


class ScoreAndInformation(NamedTuple):
    """What an observation says of θ or l: the gradient of its log-likelihood (B, n), and its information (B, n, n)."""

    gradient: Tensor
    information: Tensor


def transport(
    carried: GaussianWithSensitivities, change: Tensor, slope: Tensor, dmean_dtheta: Tensor, noise: Tensor
) -> GaussianWithSensitivities:
    """One step in time of the first d numbers of s: s ← s + (c(s, θ), 0), with noise of so much variance.

    change: c (B, d). slope: ∂c/∂s (B, d, n). by_parameters: ∂c/∂θ (B, d, p). noise: (B, 1 + s, d), by its source.
    """
    d = change.shape[-1]
    mean, shares, theta, log_variance = carried
    shares = shares.clone()
    shares[:, :, :d] += slope[:, None] @ carried.shares
    shares[..., :d] += shares @ slope.mT[:, None]
    shares[..., :d, :d].diagonal(dim1=-2, dim2=-1).add_(noise)
    return GaussianWithSensitivities(
        _add(mean, change, d),
        shares,
        _add(theta, torch.bmm(slope, theta) + dmean_dtheta, d) if theta.shape[-1] else theta,
        _add(log_variance, torch.bmm(slope, log_variance), d) if log_variance.shape[-1] else log_variance,
    )


def _add(whole: Tensor, part: Tensor, d: int) -> Tensor:
    """A tensor with something added to its first d rows."""
    return torch.cat([whole[:, :d] + part, whole[:, d:]], 1) if whole.shape[1] > d else whole + part


def relax(carried: GaussianWithSensitivities, place: slice, keep: Tensor, noise: Tensor) -> GaussianWithSensitivities:
    """Numbers of s at a `place` shrink to `keep` (B,) of themselves, with noise of so much variance.

    noise: (B, 1 + s, channels); a number a channel.
    """
    scale = torch.ones_like(carried.mean)
    scale[:, place] = keep[:, None]
    shares = carried.shares * (scale[:, :, None] * scale[:, None, :])[:, None]
    shares[..., place, place].diagonal(dim1=-2, dim2=-1).add_(noise)
    return GaussianWithSensitivities(
        carried.mean * scale, shares, carried.dmean_dtheta * scale[..., None], carried.dmean_dlogvar * scale[..., None]
    )


def renew(
    carried: GaussianWithSensitivities, forward: Tensor, fresh: Tensor, noise: Tensor, due: Tensor
) -> GaussianWithSensitivities:
    """Where it is due (B,): numbers of s move to other places (s ← s[forward]), and some begin anew at 0.

    forward: (n,). fresh: which places begin anew, (f,). noise: the variance they begin with, (B, 1 + s, f).
    """
    mean, shares, theta, log_variance = carried
    moved = [mean[:, forward], theta[:, forward], log_variance[:, forward]]
    for part in moved:
        part[:, fresh] = 0.0
    spread = shares[:, :, forward][..., forward]
    spread[:, :, fresh] = 0.0
    spread[..., fresh] = 0.0
    spread[:, :, fresh, fresh] = noise
    whole = GaussianWithSensitivities(moved[0], spread, moved[1], moved[2])
    if bool(due.all()):
        return whole
    kept = zip(whole, carried, strict=True)
    return GaussianWithSensitivities(
        *(torch.where(due.view(-1, *(1,) * (new.dim() - 1)), new, old) for new, old in kept)
    )


def expect(carried: GaussianWithSensitivities, mean: Tensor, slope: Tensor, noise: Tensor) -> PredictiveDistribution:
    """What is expected of g(s), whose value is `mean` (B, d) and whose slope is ∂g/∂s (B, d, n).

    noise: the variance of observing it (B, 1 + s, d), by its source.
    """
    by_source = slope[:, None] @ carried.shares @ slope.mT[:, None]
    by_source.diagonal(dim1=-2, dim2=-1).add_(noise)
    return PredictiveDistribution(mean, by_source.sum(1), torch.bmm(slope, carried.dmean_dlogvar), by_source[:, 1:])


def absorb(
    carried: GaussianWithSensitivities,
    slope: Tensor,
    direct: Tensor | None,
    weighted: Tensor,
    precision: Tensor,
    noise: Tensor | None,
) -> GaussianWithSensitivities:
    """The belief once an error e = y − g(s) was heard as ξ = Ωe (B, d), with Ω (B, d, d) the precision expected of it.

    direct: ∂g/∂θ (B, d, p), if there are parameters of g. With C = ∂g/∂s (B, d, n) and K = PCᵀΩ: m ← m + Ke, P_k ← (I
    − KC)P_k(I − KC)ᵀ + KR_kKᵀ, ∂m/∂θ ← ∂m/∂θ − K dg/dθ and ∂m/∂l_k ← (I − KC)(∂m/∂l_k + P_kCᵀξ) − KR_kξ. noise: the
    diagonals of R_k (B, 1 + s, d); None if R is Ω⁻¹ − CPCᵀ, of no source that is known, and then Ω may be singular.
    """
    mean, shares, theta, log_variance = carried
    seen = slope[:, None] @ shares  # CP_k
    total = seen[:, 0] if shares.shape[1] == 1 else seen.sum(1)
    gain = torch.bmm(total.mT, precision)
    inner = seen @ slope.mT[:, None]  # CP_kCᵀ
    # (I − KC)P(I − KC)ᵀ = P − U − Uᵀ with U = K(CP − ½CPCᵀKᵀ): as symmetric as P is
    half = gain[:, None] @ (seen - 0.5 * inner @ gain.mT[:, None])
    if noise is not None:
        spread = (gain[:, None] * noise[:, :, None]) @ gain.mT[:, None]
    else:
        left = precision - precision @ inner.sum(1) @ precision
        spread = torch.zeros_like(shares)
        spread[:, 0] = total.mT @ left @ total
    new = shares - half - half.mT + spread
    new = 0.5 * (new + new.mT)  # else rounding makes it less symmetric with every step
    if theta.shape[-1]:
        theta = theta - torch.bmm(gain, through(slope, theta, direct))
    if log_variance.shape[-1]:
        pulled = torch.einsum("bkdn,bd->bnk", seen[:, 1:], weighted)
        log_variance = log_variance + pulled
        log_variance = log_variance - torch.bmm(gain, torch.bmm(slope, log_variance))
        if noise is not None:
            log_variance = log_variance - torch.einsum("bnd,bkd,bd->bnk", gain, noise[:, 1:], weighted)
    return GaussianWithSensitivities(mean + torch.bmm(total.mT, weighted[..., None])[..., 0], new, theta, log_variance)


def through(slope: Tensor, dmean_dtheta: Tensor, direct: Tensor | None) -> Tensor:
    """dg/dθ = C ∂m/∂θ + ∂g/∂θ, (B, d, p)."""
    by_state = torch.bmm(slope, dmean_dtheta)
    return by_state if direct is None else by_state + direct


def of_parameters(
    slope: Tensor, dmean_dtheta: Tensor, direct: Tensor | None, weighted: Tensor, precision: Tensor
) -> ScoreAndInformation:
    """What an error says of θ: (dg/dθ)ᵀξ and (dg/dθ)ᵀΩ dg/dθ."""
    along = through(slope, dmean_dtheta, direct)
    return ScoreAndInformation(torch.bmm(along.mT, weighted[..., None])[..., 0], along.mT @ precision @ along)


def of_noise(expected: PredictiveDistribution, error: Tensor, precision: Tensor) -> ScoreAndInformation:
    """What an error e (B, d) says of l: ½(ξᵀS_kξ − tr ΩS_k) + (∂y/∂l_k)ᵀξ with S_k = ∂Ω⁻¹/∂l_k, ξ = Ωe.

    Here Ω is what is left of the precision expected of the error if parameters are doubted: what may be wrong with them
    is not taken for noise. Its information is ½tr(ΩS_jΩS_k) + (∂y/∂l_j)ᵀΩ∂y/∂l_k. The second part grows with the square
    of errors that were larger than expected, as they are until l is right; it is scaled down by as much, or it would
    keep l from getting there. Channels that are not seen, of which Ω is 0, do not count.
    """
    if expected.doubt is not None:
        eye = torch.eye(error.shape[-1], dtype=error.dtype, device=error.device)
        precision = torch.linalg.solve(eye + precision @ expected.doubt, precision)
    weighted = torch.bmm(precision, error[..., None])[..., 0]
    share = torch.einsum("bde,bkef->bkdf", precision, expected.covariance_by_source)
    fit = torch.einsum("bd,bkde,be->bk", weighted, expected.covariance_by_source, weighted)
    gradient = 0.5 * (fit - share.diagonal(dim1=-2, dim2=-1).sum(-1))
    gradient = gradient + torch.bmm(expected.dmean_dlogvar.mT, weighted[..., None])[..., 0]
    information = 0.5 * torch.einsum("bjde,bked->bjk", share, share)
    seen = (precision.diagonal(dim1=-2, dim2=-1) > 0).sum(-1).clamp_min(1)
    size = (error * weighted).sum(-1) / seen
    by_mean = expected.dmean_dlogvar.mT @ precision @ expected.dmean_dlogvar
    return ScoreAndInformation(gradient, information + by_mean / size.clamp_min(1.0)[:, None, None])
