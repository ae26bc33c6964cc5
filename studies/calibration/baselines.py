"""Baselines: batched extended Kalman filters with the parameters in their state, given the true noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.functions.tracing import trace
from studies.calibration.design import DT, Case, first_state

EVERY = 10
"""Beliefs of all methods are kept at every EVERY-th observation."""
MARKOV_ORDER = 4
"""Order of the Markov process that approximates smooth noise in the state."""
WHITE_SHARE = 1e-4
"""Variance of the white observation noise that remains if the smooth noise is in the state, relative to the latter."""

Step = Callable[[Tensor], Tensor]


class Filtered(NamedTuple):
    """Means and standard deviations of the state at every EVERY-th observation, (B, T, n) each."""

    mean: Tensor
    sd: Tensor


def extended_kalman(
    step: Step,
    observations: Tensor,
    mean: Tensor,
    covariance: Tensor,
    process_noise: Tensor,
    emission: Tensor,
    observation_noise: Tensor,
) -> Filtered:
    """Extended Kalman filter of s ← step(s) + N(0, Q), y = Cs + N(0, R).

    Args:
        step: Function of one state (n,).
        observations: (B, T, d).
        mean, covariance: Posterior at the first observation, (B, n) and (B, n, n).
        process_noise: Q, (n, n).
        emission: C, (d, n).
        observation_noise: R, (d, d).
    """
    linearise = trace(torch.func.vmap(torch.func.jacfwd(lambda s: (step(s),) * 2, has_aux=True)), [mean])
    eye = torch.eye(mean.shape[-1], dtype=mean.dtype)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for t in range(observations.shape[1]):
            if t:
                jacobian, mean = linearise(mean)
                covariance = jacobian @ covariance @ jacobian.mT + process_noise
                innovation_covariance = emission @ covariance @ emission.mT + observation_noise
                gain = torch.linalg.solve(innovation_covariance, emission @ covariance).mT
                mean = mean + torch.bmm(gain, (observations[:, t] - mean @ emission.mT)[..., None])[..., 0]
                reduction = eye - gain @ emission  # Joseph form
                covariance = reduction @ covariance @ reduction.mT + gain @ observation_noise @ gain.mT
            if (t + 1) % EVERY == 0:
                kept.append((mean, covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()))
    return Filtered(torch.stack([m for m, _ in kept], 1), torch.stack([s for _, s in kept], 1))


def run_filter(case: Case, observations: Tensor, *, matched: bool = False, walk: float = 0.0) -> Filtered:
    """Filter of a case with state (x, θ).

    Args:
        matched: Assume white noise with the spectral density of the true noise, instead of its variance.
        walk: Standard deviation of the parameters' random walk per observation.
    """
    factor = case.process.spectral_factor if matched else 1.0
    mean, covariance = initial_belief(case, observations)
    dim, parameters = case.process.dim, len(case.model.mean)
    state_sd = torch.tensor(case.process.state_sd, dtype=mean.dtype)
    variances = torch.cat([factor * (DT * state_sd) ** 2, torch.full((parameters,), walk**2, dtype=mean.dtype)])
    emission = torch.eye(dim + parameters, dtype=mean.dtype)[list(case.process.observed)]
    observation_noise = factor * case.process.observation_sd**2 * torch.eye(len(emission), dtype=mean.dtype)

    def step(s: Tensor) -> Tensor:
        x, theta = s[:dim], s[dim:]
        return torch.cat([x + DT * _flow(case, x, theta), theta])

    return extended_kalman(step, observations, mean, covariance, variances.diag(), emission, observation_noise)


def run_filter_with_noise_states(case: Case, observations: Tensor) -> Filtered:
    """Filter with the smooth noises z and w as Markov processes in its state (x, θ, z, ż, …, w, ẇ, …)."""
    transition, fresh, stationary = markov(case.process.width)
    order = len(transition)
    mean, covariance = initial_belief(case, observations)
    dim, observed = case.process.dim, case.process.observed
    known = dim + len(case.model.mean)
    variances = torch.tensor(case.process.state_sd, dtype=mean.dtype) ** 2
    variances = torch.cat([variances, torch.full((len(observed),), case.process.observation_sd**2, dtype=mean.dtype)])
    mean = torch.constant_pad_nd(mean, (0, len(variances) * order))
    joint = torch.block_diag(covariance[0], *(v * stationary for v in variances))  # type: ignore[no-untyped-call]
    process_noise = torch.block_diag(  # type: ignore[no-untyped-call]
        torch.zeros(known, known, dtype=mean.dtype), *(variance * fresh for variance in variances)
    )
    emission = torch.zeros(len(observed), len(joint), dtype=mean.dtype)
    for i, state in enumerate(observed):
        w = known + (dim + i) * order
        joint[state, w : w + order] = joint[w : w + order, state] = -variances[dim + i] * stationary[0]  # x₀ = y₀ − w₀
        emission[i, state] = emission[i, w] = 1.0

    def step(s: Tensor) -> Tensor:
        x, theta = s[:dim], s[dim:known]
        noises = s[known:].view(-1, order)
        return torch.cat([x + DT * (_flow(case, x, theta) + noises[:dim, 0]), theta, (noises @ transition.T).flatten()])

    covariance = joint.repeat(len(mean), 1, 1)
    observation_noise = WHITE_SHARE * variances[dim:].diag()
    return extended_kalman(step, observations, mean, covariance, process_noise, emission, observation_noise)


def markov(width: float, order: int = MARKOV_ORDER) -> tuple[Tensor, Tensor, Tensor]:
    """Markov approximation s ← As + N(0, Q) of noise s₀ with unit variance and autocorrelation exp(−h²/4width²).

    The spectral density exp(−ω²w²) is approximated by one over the series Σ (ωw)²ᵏ/k! up to `order`; the stable roots
    give a linear process of value, velocity, …

    Returns:
        A, Q and the stationary covariance, for steps of one sample.
    """
    series = np.zeros(2 * order + 1)
    for k in range(order + 1):  # in powers of s = iωw: (ωw)² = −s²
        series[2 * (order - k)] = (-1) ** k / math.factorial(k)
    stable = [root for root in np.roots(series) if root.real < 0]
    polynomial = np.real(np.poly(stable))
    drift = np.diag(np.ones(order - 1), 1)
    drift[-1] = -polynomial[:0:-1]
    diffusion = np.zeros((order, order))
    diffusion[-1, -1] = 1.0
    eye = np.eye(order)
    lyapunov = np.kron(drift, eye) + np.kron(eye, drift)
    covariance = np.linalg.solve(lyapunov, -diffusion.flatten()).reshape(order, order)
    stationary = torch.from_numpy(covariance / covariance[0, 0])
    transition = torch.linalg.matrix_exp(torch.from_numpy(drift) / width)
    noise = stationary - transition @ stationary @ transition.T
    return transition, 0.5 * (noise + noise.T), stationary


def _flow(case: Case, x: Tensor, theta: Tensor) -> Tensor:
    velocity: Tensor = (case.model.plain_flow or case.model.flow)(x, theta)
    return velocity


def initial_belief(case: Case, observations: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior of (x, θ) at the first observation: mean (B, n) and covariance (B, n, n)."""
    prior = torch.tensor(case.model.mean, dtype=torch.float64).expand(len(observations), -1)
    mean = torch.cat([first_state(case, observations), prior], -1)
    state_sd = torch.full((case.process.dim,), case.model.initial_sd, dtype=torch.float64)
    state_sd[list(case.process.observed)] = case.process.observation_sd
    sd = torch.cat([state_sd, torch.tensor(case.model.sd, dtype=torch.float64)])
    return mean, (sd**2).diag().repeat(len(mean), 1, 1)
