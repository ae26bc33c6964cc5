"""Rivals: Gaussian filters of (x, θ) that are told the noise, and a particle filter that is told everything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from studies.systems.design import HORIZONS, Realisation, System, matern_step

STEPS = 2  # integration steps in an interval, and in proportion in gaps
BLIND = 1e8  # factor of the noise variance of an observation that is known to be an outlier
TINY = 1e-12

Step = Callable[[Tensor], Tensor]


class Filtered(NamedTuple):
    """Beliefs of all batch elements."""

    mean: Tensor  # states, (B, T, d)
    sd: Tensor
    theta: Tensor  # parameters, (B, T, p)
    theta_sd: Tensor
    future: Tensor  # means of the states at HORIZONS after the last observation, (B, H, d)
    future_sd: Tensor
    log_evidence: Tensor  # (B,)


def gaussian_filter(
    system: System, data: Realisation, kind: Literal["extended", "cubature"], levels: Tensor | None = None
) -> Filtered:
    """Extended or cubature Kalman filter of state, parameters and coloured noise.

    levels: Factors of the process variances (B, d) for B = k · seeds batch elements, k copies of all seeds.
    """
    d, p, m = system.dim, len(system.parameters), system.channels
    coloured = system.correlation_time is not None
    copies = 1 if levels is None else len(levels) // len(data.observations)
    y, masked = (each.repeat(copies, 1, 1) for each in (data.observations, data.is_outlier))
    mean, covariance = _first_belief(system, len(y))
    noise_variance = torch.tensor(system.observation_sd, dtype=mean.dtype) ** 2
    diffusion = torch.tensor(system.diffusion, dtype=mean.dtype).square().repeat(len(y), 1)
    if levels is not None:
        diffusion = diffusion * levels
    walk = (system.walk * torch.tensor(system.prior_sd, dtype=mean.dtype)) ** 2

    def observe(s: Tensor) -> Tensor:
        seen = system.observe(s[..., :d])
        return seen + s[..., d + p :: 2] if coloured else seen

    def move(mean: Tensor, covariance: Tensor, interval: float) -> tuple[Tensor, Tensor]:
        steps = max(STEPS, round(STEPS * interval / system.dt))
        h = interval / steps
        noise_steps = matern_step(h, system.correlation_time) if system.correlation_time is not None else None

        def step(s: Tensor) -> Tensor:
            x, theta = s[..., :d], s[..., d : d + p]
            first = system.flow(x, theta)
            second = system.flow(x + 0.5 * h * first, theta)
            third = system.flow(x + 0.5 * h * second, theta)
            fourth = system.flow(x + h * third, theta)
            parts = [x + h / 6 * (first + 2 * second + 2 * third + fourth), theta]
            if noise_steps is not None:
                rest = s[..., d + p :].reshape(*s.shape[:-1], m, 2) @ noise_steps[0].T
                parts.append(rest.flatten(-2))
            return torch.cat(parts, -1)

        for _ in range(steps):
            mean, covariance, _ = moments(step, mean, covariance, kind)
            covariance[:, range(d), range(d)] += h * diffusion
            covariance[:, range(d, d + p), range(d, d + p)] += walk * h / system.dt
            if noise_steps is not None:
                for i in range(m):
                    place = slice(d + p + 2 * i, d + p + 2 * i + 2)
                    covariance[:, place, place] += noise_variance[i] * noise_steps[1]
        return mean, covariance

    kept: list[tuple[Tensor, Tensor]] = []
    evidence = torch.zeros(len(y), dtype=mean.dtype)
    for t in range(y.shape[1]):
        if t:
            mean, covariance = move(mean, covariance, float(data.times[t] - data.times[t - 1]))
        expected, spread, across = moments(observe, mean, covariance, kind)
        noise = torch.where(masked[:, t], BLIND, 1.0) * noise_variance * (TINY if coloured else 1.0)
        spread = spread + noise.diag_embed()
        error = y[:, t] - expected
        gain = torch.linalg.solve(spread, across.mT).mT
        mean = mean + torch.bmm(gain, error[..., None])[..., 0]
        covariance = covariance - gain @ spread @ gain.mT
        covariance = 0.5 * (covariance + covariance.mT)
        covariance.diagonal(dim1=-2, dim2=-1).clamp_min_(TINY)
        weighted = torch.linalg.solve(spread, error[..., None])[..., 0]
        evidence = evidence - 0.5 * ((error * weighted).sum(-1) + torch.linalg.slogdet(2 * math.pi * spread)[1])
        kept.append((mean, covariance.diagonal(dim1=-2, dim2=-1).sqrt()))
    later = []
    for _ in range(HORIZONS[-1]):
        mean, covariance = move(mean, covariance, system.dt)
        later.append((mean, covariance.diagonal(dim1=-2, dim2=-1).clamp_min(TINY).sqrt()))
    (means, sds), (ahead, ahead_sds) = (
        [torch.stack(each, 1) for each in zip(*steps, strict=True)] for steps in (kept, later)
    )
    state, theta, horizons = slice(d), slice(d, d + p), [k - 1 for k in HORIZONS]
    return Filtered(
        *(means[..., state], sds[..., state], means[..., theta], sds[..., theta]),
        *(ahead[:, horizons, :d], ahead_sds[:, horizons, :d]),
        evidence,
    )


def _first_belief(system: System, batch: int) -> tuple[Tensor, Tensor]:
    """Mean (B, n) and covariance (B, n, n) of state, parameters, and value and slope of each coloured noise."""
    known = torch.tensor((*system.initial_mean, *system.prior_mean), dtype=torch.float64)
    variances = [*np.square(system.initial_sd), *np.square(system.prior_sd)]
    if system.correlation_time is not None:
        rate = math.sqrt(3) / system.correlation_time
        variances += [each for sd in system.observation_sd for each in (sd**2, (sd * rate) ** 2)]
    mean = torch.constant_pad_nd(known, (0, len(variances) - len(known)))
    return mean.repeat(batch, 1), torch.tensor(variances, dtype=torch.float64).diag().repeat(batch, 1, 1)


def moments(
    function: Step, mean: Tensor, covariance: Tensor, kind: Literal["extended", "cubature"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (B, k), covariance (B, k, k) and cross-covariance (B, n, k) of a function of N(mean, covariance)."""
    n = mean.shape[-1]
    if kind == "extended":
        jacobian = torch.func.vmap(torch.func.jacfwd(function))(mean)
        across = covariance @ jacobian.mT
        return function(mean), jacobian @ across, across
    finite = torch.isfinite(covariance).flatten(1).all(1)[:, None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, covariance, 0.0))  # of runs that diverged there is none
    root = torch.where(finite, vectors * values.clamp_min(0.0).sqrt()[:, None], torch.nan)
    away = math.sqrt(n) * root.mT
    points = torch.cat([mean[:, None] + away, mean[:, None] - away], 1)
    found = function(points)
    centre = found.mean(1)
    residual = found - centre[:, None]
    return centre, residual.mT @ residual / (2 * n), (points - mean[:, None]).mT @ residual / (2 * n)


def particle_filter(system: System, data: Realisation, particles: int = 1000, seed: int = 0) -> Filtered:
    """Bootstrap particle filter that is told parameters and noise, resampled at every observation."""
    d, batch = system.dim, len(data.observations)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensor = torch.float64
    mean, sd = (torch.tensor(each, dtype=tensor) for each in (system.initial_mean, system.initial_sd))
    diffusion = torch.tensor(system.diffusion, dtype=tensor)
    noise_sd = torch.tensor(system.observation_sd, dtype=tensor)
    x = mean + sd * normal(batch, particles, d)
    count, last = data.observations.shape[1], float(data.times[-1])
    kept, evidence = [], torch.zeros(batch, dtype=tensor)

    def move(x: Tensor, interval: float, now: float) -> Tensor:
        theta = torch.tensor(system.parameters_at(now / last), dtype=tensor)
        steps = max(STEPS, round(STEPS * interval / system.dt))
        h = interval / steps
        for _ in range(steps):
            first = system.flow(x, theta)
            second = system.flow(x + 0.5 * h * first, theta)
            third = system.flow(x + 0.5 * h * second, theta)
            fourth = system.flow(x + h * third, theta)
            x = x + h / 6 * (first + 2 * second + 2 * third + fourth) + math.sqrt(h) * diffusion * normal(*x.shape)
        return x

    for t in range(count):
        now = float(data.times[t])
        if t:
            x = move(x, now - float(data.times[t - 1]), now)
        error = (data.observations[:, t, None] - system.observe(x)) / noise_sd
        error = torch.where(data.is_outlier[:, t, None], 0.0, error)
        log_weight = (-0.5 * error**2 - noise_sd.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        evidence = evidence + log_weight.logsumexp(1) - math.log(particles)
        weight = log_weight.softmax(1)
        centre = (weight[..., None] * x).sum(1)
        spread = (weight[..., None] * (x - centre[:, None]) ** 2).sum(1).sqrt()
        kept.append((centre, spread))
        offset = torch.rand(batch, 1, generator=generator, dtype=tensor)
        places = (torch.arange(particles, dtype=tensor) + offset) / particles
        index = torch.searchsorted(weight.cumsum(1).contiguous(), places.contiguous()).clamp_max(particles - 1)
        x = x.gather(1, index[..., None].expand(-1, -1, d))
    ahead = []
    for k in range(1, HORIZONS[-1] + 1):
        x = move(x, system.dt, last)
        if k in HORIZONS:
            ahead.append((x.mean(1), x.std(1)))
    means, deviations = (torch.stack(each, 1) for each in zip(*kept, strict=True))
    future, future_sd = (torch.stack(each, 1) for each in zip(*ahead, strict=True))
    nothing = torch.zeros(batch, count, 0, dtype=tensor)
    return Filtered(means, deviations, nothing, nothing, future, future_sd, evidence)
