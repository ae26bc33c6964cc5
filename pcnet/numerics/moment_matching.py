"""Moments of a Gaussian times a likelihood, by quadrature; for many channels, by expectation propagation.

For one channel, p ~ N(m, v) with a likelihood L(p) has the posterior L(p) N(p; m, v)/Z, whose mean and variance are
found by Gauss–Hermite quadrature around its mode. For channels with a joint Gaussian N(m, V), each likelihood is
replaced by a Gaussian factor exp(νp − ½τp²) that gives the moments of the product with the rest (Minka, 2001). For one
channel that is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

NODES = 24  # of the quadrature
NEWTON_STEPS = 12  # to the mode
FARTHEST = 2.0  # longest Newton step, in standard deviations before the observation
NEGLIGIBLE = 1e-7  # of v times the curvature of log L: below it, factors are those of a Taylor expansion
SWEEPS, DAMPING = 6, 0.7
"""Updates of all factors side by side, and the share of an update that is taken; one whole one for a single channel."""


class TiltedMoments(NamedTuple):
    """Log of the normaliser Z, mean and variance of each channel, (B, d) each."""

    log_z: Tensor
    mean: Tensor
    variance: Tensor


class MatchedMoments(NamedTuple):
    """The posterior of p as an error for its parent: mean m + Vξ, covariance V − VΩV."""

    mean: Tensor  # (B, d)
    weighted: Tensor  # ξ, (B, d)
    precision: Tensor  # Ω, (B, d, d)
    log_evidence: Tensor  # log ∫ Π L(p) N(p; m, V) dp, (B,)


LogLikelihood = Callable[[Tensor], Tensor]
"""log L of points (B, k, d), elementwise."""
Derivatives = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""log L at (B, d), its slope, and minus its second derivative, for each channel."""


def mode(derivatives: Derivatives, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The mode of L(p) N(p; m, v) of each channel and the variance of Laplace's approximation there, (B, d) each."""
    p, farthest = mean, FARTHEST * variance.sqrt()
    for _ in range(NEWTON_STEPS):
        _, first, second = derivatives(p)
        a = second.clamp_min(0.0)
        step = (variance * first - (p - mean)) / (1 + variance * a)
        p = p + torch.maximum(torch.minimum(step, farthest), -farthest)
    a = derivatives(p)[2].clamp_min(0.0)
    return p, variance / (1 + variance * a)


@functools.cache
def normal_quadrature() -> tuple[Array, Array]:
    """Points and weights of Gauss–Hermite quadrature over a standard normal variable."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes, weights / weights.sum()


def hermite_moments(
    log_likelihood: LogLikelihood, mean: Tensor, variance: Tensor, centre: Tensor, spread: Tensor
) -> TiltedMoments:
    """Moments by Gauss–Hermite quadrature around `centre` with variance `spread`, (B, d) each."""
    nodes, weights = normal_quadrature()
    x = mean.new_tensor(nodes)[:, None]
    log_weight = mean.new_tensor(np.log(weights) + 0.5 * nodes**2)[:, None]
    points = centre[:, None] + spread.sqrt()[:, None] * x  # (B, k, d)
    density = -0.5 * (points - mean[:, None]) ** 2 / variance[:, None] + 0.5 * (spread / variance).log()[:, None]
    return weighed_moments(points, log_likelihood(points) + density + log_weight)


def weighed_moments(points: Tensor, log_weight: Tensor, variance: Tensor | None = None) -> TiltedMoments:
    """Moments of points (B, k, d) with these log-weights, which may have a variance each."""
    top = log_weight.amax(1, keepdim=True)
    weight = (log_weight - top).exp()
    total = weight.sum(1)
    weight = weight / total[:, None]
    mean = (weight * points).sum(1)
    squares = (points - mean[:, None]) ** 2
    squares = squares if variance is None else squares + variance
    return TiltedMoments(top[:, 0] + total.log(), mean, (weight * squares).sum(1))


def match_moments(
    tilted: Callable[[Tensor, Tensor], TiltedMoments],
    derivatives: Derivatives,
    mean: Tensor,
    covariance: Tensor,
    there: Tensor,
) -> MatchedMoments:
    """The posterior of channels with a joint Gaussian and likelihoods of their own.

    Args:
        tilted: The moments of each channel, given a mean and a variance (B, d) before its observation.
        derivatives: The log-likelihoods and their derivatives, for channels that are known nearly exactly.
        mean: m, (B, d).
        covariance: V, (B, d, d).
        there: Channels that are observed, (B, d).
    """
    d = mean.shape[-1]
    eye = torch.eye(d, dtype=mean.dtype, device=mean.device)
    tau, nu = torch.zeros_like(mean), torch.zeros_like(mean)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    value, first, second = derivatives(mean)
    known = ~(variance * second.abs() > NEGLIGIBLE)
    m_rest, v_rest = mean, torch.where(known, 1.0, variance)
    found = tilted(m_rest, v_rest)
    for sweep in range(1 if d == 1 else SWEEPS):
        if sweep:
            joint = eye + covariance * tau[:, None]  # I + VT
            both = torch.cat([covariance, (mean + torch.bmm(covariance, nu[..., None])[..., 0])[..., None]], -1)
            both = torch.linalg.solve(joint, both)
            spread, centre = both[..., :d].diagonal(dim1=-2, dim2=-1), both[..., d]
            rest = 1 / spread - tau
            good = (rest > 0) & ~known
            v_rest = torch.where(good, 1 / torch.where(good, rest, 1.0), v_rest)
            m_rest = torch.where(good, v_rest * (centre / spread - nu), m_rest)
            found = tilted(m_rest, v_rest)
        share = 1.0 if sweep == 0 and d == 1 else DAMPING
        tau_new = torch.where(known, second, 1 / found.variance - 1 / v_rest)
        nu_new = torch.where(known, first + second * mean, found.mean / found.variance - m_rest / v_rest)
        tau = torch.where(there, tau + share * (tau_new - tau), 0.0)
        nu = torch.where(there, nu + share * (nu_new - nu), 0.0)
    one = 1 + v_rest * tau
    log_each = -0.5 * one.log() + (nu * m_rest + 0.5 * v_rest * nu**2 - 0.5 * tau * m_rest**2) / one
    log_each = torch.where(known, nu * mean - 0.5 * tau * mean**2 - value, log_each - found.log_z)
    return _matched(tau, nu, torch.where(there, log_each, 0.0).sum(-1), mean, covariance)


def _matched(tau: Tensor, nu: Tensor, log_scale: Tensor, mean: Tensor, covariance: Tensor) -> MatchedMoments:
    """The posterior from the factors of all channels; log_scale: by how much the factors are too large, (B,).

    With r = ν − Tm: ξ = (I + TV)⁻¹ r, Ω = (I + TV)⁻¹ T, and ∫ N(p; m, V) Π exp(ν_i p_i − ½τ_i p_i²) dp is
    |I + TV|^(−½) exp(νᵀm − ½mᵀTm + ½rᵀVξ).
    """
    d = mean.shape[-1]
    eye = torch.eye(d, dtype=mean.dtype, device=mean.device)
    joint = eye + tau[..., None] * covariance  # I + TV
    r = nu - tau * mean
    both = torch.linalg.solve(joint, torch.cat([r[..., None], tau.diag_embed()], -1))
    weighted, precision = both[..., 0], both[..., 1:]
    moved = torch.bmm(covariance, weighted[..., None])[..., 0]
    log_all = -0.5 * torch.linalg.slogdet(joint)[1] + (nu * mean - 0.5 * tau * mean**2 + 0.5 * r * moved).sum(-1)
    return MatchedMoments(mean + moved, weighted, 0.5 * (precision + precision.mT), log_all - log_scale)
