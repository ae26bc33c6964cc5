"""Extended Kalman filters that are told the true noise, with the parameters in their state; many at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.functions.tracing import trace
from studies.calibration.design import DT, Case, first_state

THINNING = 10
"""One in so many beliefs is kept, of all methods."""
SERIES = 4
"""The order of the Markov process that stands for smooth noise where it is part of the state."""
TINY = 1e-4
"""What is left as white noise of observations whose noise is part of the state, as a share of its variance."""

Step = Callable[[Tensor], Tensor]


class Filtered(NamedTuple):
    """Means and standard deviations of the state at every THINNING-th observation; (B, T, n)."""

    mean: Tensor
    sd: Tensor


def extended_kalman(
    step: Step, observations: Tensor, mean: Tensor, covariance: Tensor, process: Tensor, seeing: Tensor, noise: Tensor
) -> Filtered:
    """s ← step(s) + N(0, Q), y = Cs + N(0, R), from a belief that has the first observation (B, T, d) in it already.

    step: of one state (n,). mean (B, n) and covariance (B, n, n): at the first observation. process: Q (n, n). seeing:
    C (d, n). noise: R (d, d).
    """
    slope = trace(torch.func.vmap(torch.func.jacfwd(lambda s: (step(s),) * 2, has_aux=True)), [mean])
    eye = torch.eye(mean.shape[-1], dtype=mean.dtype)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for t in range(observations.shape[1]):
            if t:
                jacobian, mean = slope(mean)
                covariance = jacobian @ covariance @ jacobian.mT + process
                gain = torch.linalg.solve(seeing @ covariance @ seeing.mT + noise, seeing @ covariance).mT
                mean = mean + torch.bmm(gain, (observations[:, t] - mean @ seeing.mT)[..., None])[..., 0]
                left = eye - gain @ seeing
                covariance = left @ covariance @ left.mT + gain @ noise @ gain.mT
            if (t + 1) % THINNING == 0:
                kept.append((mean, covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()))
    return Filtered(torch.stack([m for m, _ in kept], 1), torch.stack([s for _, s in kept], 1))


def follow(case: Case, observations: Tensor, *, matched: bool = False, walk: float = 0.0) -> Filtered:
    """The filter of a case, with its state (x, θ), told the noise: its own, or white noise of its spectral density."""
    strength = case.process.matching if matched else 1.0
    mean, covariance = begin(case, observations)
    dim, width = case.process.dim, len(case.model.mean)
    drift = torch.tensor(case.process.state_sd, dtype=mean.dtype)
    process = torch.cat([strength * (DT * drift) ** 2, torch.full((width,), walk**2, dtype=mean.dtype)]).diag()
    seeing = torch.eye(dim + width, dtype=mean.dtype)[list(case.process.seen)]
    noise = strength * case.process.observation_sd**2 * torch.eye(len(seeing), dtype=mean.dtype)

    def step(s: Tensor) -> Tensor:
        x, theta = s[:dim], s[dim:]
        return torch.cat([x + DT * _flow(case, x, theta), theta])

    return extended_kalman(step, observations, mean, covariance, process, seeing, noise)


def follow_with_noise(case: Case, observations: Tensor) -> Filtered:
    """The filter with the smooth noises as Markov processes in its state: (x, θ, z and its past, w and its past)."""
    forward, fresh, stationary = markov(case.process.width)
    order = len(forward)
    mean, covariance = begin(case, observations)
    dim, width, seen = case.process.dim, len(case.model.mean), len(case.process.seen)
    variances = torch.tensor(case.process.state_sd, dtype=mean.dtype) ** 2
    variances = torch.cat([variances, torch.full((seen,), case.process.observation_sd**2, dtype=mean.dtype)])
    blocks = [variance * stationary for variance in variances]
    known = dim + width
    mean = torch.constant_pad_nd(mean, (0, len(variances) * order))
    whole = torch.block_diag(covariance[0], *blocks)  # type: ignore[no-untyped-call]
    for i, at in enumerate(case.process.seen):  # x(0) = y(0) − w(0)
        w = known + (dim + i) * order
        whole[at, w : w + order] = whole[w : w + order, at] = -variances[dim + i] * stationary[0]
    process = torch.block_diag(  # type: ignore[no-untyped-call]
        torch.zeros(known, known, dtype=mean.dtype), *(variance * fresh for variance in variances)
    )
    firsts = known + order * torch.arange(len(variances))
    seeing = torch.zeros(seen, len(whole), dtype=mean.dtype)
    for i, at in enumerate(case.process.seen):
        seeing[i, at] = seeing[i, int(firsts[dim + i])] = 1.0

    def step(s: Tensor) -> Tensor:
        x, theta = s[:dim], s[dim:known]
        noises = s[known:].view(-1, order)
        return torch.cat([x + DT * (_flow(case, x, theta) + noises[:dim, 0]), theta, (noises @ forward.T).flatten()])

    return extended_kalman(
        step,
        observations,
        mean,
        whole.repeat(len(mean), 1, 1),
        process,
        seeing,
        TINY * variances[dim:].diag(),
    )


def markov(width: float, order: int = SERIES) -> tuple[Tensor, Tensor, Tensor]:
    """Noise of unit variance and autocorrelation exp(−h²/4width²), nearly, as s ← As + N(0, Q) with value s₀.

    Its spectral density exp(−ω²w²) is one over the series Σ (ωw)²ᵏ/k! up to `order`, whose stable roots make a linear
    process of value, velocity, …; A, Q and the stationary covariance are for steps of one sample.
    """
    series = np.zeros(2 * order + 1)
    for k in range(order + 1):  # in powers of s = iωw: (ωw)² = −s²
        series[2 * (order - k)] = (-1) ** k / math.factorial(k)
    stable = [root for root in np.roots(series) if root.real < 0]
    polynomial = np.real(np.poly(stable))
    drift = np.diag(np.ones(order - 1), 1)
    drift[-1] = -polynomial[:0:-1]
    push = np.zeros((order, order))
    push[-1, -1] = 1.0
    eye = np.eye(order)
    stationary = np.linalg.solve(np.kron(drift, eye) + np.kron(eye, drift), -push.flatten()).reshape(order, order)
    stationary /= stationary[0, 0]
    forward = torch.linalg.matrix_exp(torch.from_numpy(drift) / width)
    settled = torch.from_numpy(stationary)
    fresh = settled - forward @ settled @ forward.T
    return forward, 0.5 * (fresh + fresh.T), settled


def _flow(case: Case, x: Tensor, theta: Tensor) -> Tensor:
    flow = case.model.written_out or case.model.flow
    found: Tensor = flow(x, theta)
    return found


def begin(case: Case, observations: Tensor) -> tuple[Tensor, Tensor]:
    """The belief about (x, θ) at the first observation, with it taken in: (B, n) and (B, n, n)."""
    prior = torch.tensor(case.model.mean, dtype=torch.float64).expand(len(observations), -1)
    mean = torch.cat([first_state(case, observations), prior], -1)
    spread = torch.full((case.process.dim,), case.model.initial_sd, dtype=torch.float64)
    spread[list(case.process.seen)] = case.process.observation_sd
    sd = torch.cat([spread, torch.tensor(case.model.sd, dtype=torch.float64)])
    return mean, (sd**2).diag().repeat(len(mean), 1, 1)
