"""Rivals: Gaussian filters of (x, θ) told the noise, their average over noise levels, and a told particle filter."""

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
SPAN, GRID, BEHIND, LOST, WILD = 64.0, 4096, 14.0, 1e6, 100.0
"""Of `averaged_filter`: the largest factor of a variance, the largest number of combinations, how many nats behind the
best one they are dropped, what one that diverges loses, and how uncertain it may be beside the surest one."""

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


class GaussianFilter:
    """Steps of an extended or cubature Kalman filter of state, parameters and coloured noise."""

    def __init__(self, system: System, kind: Literal["extended", "cubature"]) -> None:
        self.system, self.kind = system, kind
        self.noise_variance = torch.tensor(system.observation_sd, dtype=torch.float64) ** 2
        self.diffusion = torch.tensor(system.diffusion, dtype=torch.float64) ** 2
        self.walk = (system.walk * torch.tensor(system.prior_sd, dtype=torch.float64)) ** 2
        self.dim, self.parameters = system.dim, len(system.parameters)
        self.coloured = system.correlation_time is not None

    def observe(self, s: Tensor) -> Tensor:
        seen = self.system.observe(s[..., : self.dim])
        return seen + s[..., self.dim + self.parameters :: 2] if self.coloured else seen

    def move(self, mean: Tensor, covariance: Tensor, interval: float, levels: Tensor | None) -> tuple[Tensor, Tensor]:
        """The belief after an interval. levels: factors of the process variances, (B, d)."""
        system, d, p = self.system, self.dim, self.parameters
        steps = max(STEPS, round(STEPS * interval / system.dt))
        h = interval / steps
        diffusion = self.diffusion if levels is None else self.diffusion * levels
        noise_steps = matern_step(h, system.correlation_time) if system.correlation_time is not None else None

        def step(s: Tensor) -> Tensor:
            x, theta = s[..., :d], s[..., d : d + p]
            first = system.flow(x, theta)
            second = system.flow(x + 0.5 * h * first, theta)
            third = system.flow(x + 0.5 * h * second, theta)
            fourth = system.flow(x + h * third, theta)
            parts = [x + h / 6 * (first + 2 * second + 2 * third + fourth), theta]
            if noise_steps is not None:
                rest = s[..., d + p :].reshape(*s.shape[:-1], -1, 2) @ noise_steps[0].T
                parts.append(rest.flatten(-2))
            return torch.cat(parts, -1)

        for _ in range(steps):
            mean, covariance, _ = moments(step, mean, covariance, self.kind)
            covariance[:, range(d), range(d)] += h * diffusion
            covariance[:, range(d, d + p), range(d, d + p)] += self.walk * h / system.dt
            if noise_steps is not None:
                for i, variance in enumerate(self.noise_variance):
                    place = slice(d + p + 2 * i, d + p + 2 * i + 2)
                    covariance[:, place, place] += variance * noise_steps[1]
        return mean, covariance

    def update(self, mean: Tensor, covariance: Tensor, y: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The belief after an observation (B, m), and its log-likelihood (B,). factors: of the noise variances."""
        expected, spread, across = moments(self.observe, mean, covariance, self.kind)
        noise = factors * self.noise_variance * (TINY if self.coloured else 1.0)
        spread = spread + noise.diag_embed()
        error = y - expected
        gain = torch.linalg.solve(spread, across.mT).mT
        mean = mean + torch.bmm(gain, error[..., None])[..., 0]
        covariance = covariance - gain @ spread @ gain.mT
        covariance = 0.5 * (covariance + covariance.mT)
        covariance.diagonal(dim1=-2, dim2=-1).clamp_min_(TINY)
        weighted = torch.linalg.solve(spread, error[..., None])[..., 0]
        likelihood = -0.5 * ((error * weighted).sum(-1) + torch.linalg.slogdet(2 * math.pi * spread)[1])
        return mean, covariance, likelihood


def gaussian_filter(
    system: System, data: Realisation, kind: Literal["extended", "cubature"], levels: Tensor | None = None
) -> Filtered:
    """Extended or cubature Kalman filter that is told the noise.

    levels: Factors of the process variances (B, d) for B = k · seeds batch elements, k copies of all seeds.
    """
    rules = GaussianFilter(system, kind)
    copies = 1 if levels is None else len(levels) // len(data.observations)
    y, masked = (each.repeat(copies, 1, 1) for each in (data.observations, data.is_outlier))
    mean, covariance = _first_belief(system, len(y))
    kept: list[tuple[Tensor, Tensor]] = []
    evidence = torch.zeros(len(y), dtype=mean.dtype)
    for t in range(y.shape[1]):
        if t:
            mean, covariance = rules.move(mean, covariance, float(data.times[t] - data.times[t - 1]), levels)
        blind = torch.where(masked[:, t], BLIND, 1.0)
        mean, covariance, likelihood = rules.update(mean, covariance, y[:, t], blind)
        evidence = evidence + likelihood
        kept.append((mean, covariance.diagonal(dim1=-2, dim2=-1).sqrt()))
    later = []
    for _ in range(HORIZONS[-1]):
        mean, covariance = rules.move(mean, covariance, system.dt, levels)
        later.append((mean, covariance.diagonal(dim1=-2, dim2=-1).clamp_min(TINY).sqrt()))
    return _filtered(system, kept, later, evidence)


def averaged_filter(system: System, data: Realisation) -> Filtered:
    """Cubature filters with all combinations of noise levels, weighed by their evidence.

    Variances of each noise are from 1/SPAN to SPAN times the true ones, evenly spaced in their logs, with equal prior
    weights. This is what can be expected of a filter that is not told the noise. Combinations that fall behind the
    best one by BEHIND nats are dropped, and those that are WILD times as uncertain as the surest one do not count.
    """
    d, seeds = system.dim, len(data.observations)
    axis = torch.logspace(-1, 1, grid_size(system), SPAN, dtype=torch.float64)
    grid = torch.cartesian_prod(*[axis] * (d + system.channels))
    levels, seed = grid.repeat_interleave(seeds, 0), torch.arange(seeds).repeat(len(grid))
    rules = GaussianFilter(system, "cubature")
    mean, covariance = _first_belief(system, len(seed))
    log_weight = torch.zeros(len(seed), dtype=mean.dtype)
    kept: list[tuple[Tensor, Tensor]] = []
    later: list[tuple[Tensor, Tensor]] = []
    evidence = torch.full((seeds,), math.nan, dtype=mean.dtype)

    def mixed() -> tuple[Tensor, Tensor]:
        weight = (log_weight - _largest(log_weight, seed, seeds)[seed]).exp()
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        widest = torch.where(torch.isfinite(variance), variance, math.inf).amax(1)
        narrow = -_largest(-widest, seed, seeds)
        valid = torch.isfinite(mean).all(1) & (widest <= WILD**2 * narrow[seed])
        weight = torch.where(valid, weight, 0.0)[:, None]

        def average(values: Tensor) -> Tensor:
            total = torch.zeros(seeds, 1 + values.shape[1], dtype=values.dtype)
            total.index_add_(0, seed, torch.cat([weight, torch.where(weight > 0, weight * values, 0.0)], 1))
            return total[:, 1:] / total[:, :1]

        centre = average(mean)
        return centre, average(variance + (mean - centre[seed]) ** 2).sqrt()

    for t in range(data.observations.shape[1]):
        if t:
            mean, covariance = rules.move(mean, covariance, float(data.times[t] - data.times[t - 1]), levels[:, :d])
        factors = levels[:, d:] * torch.where(data.is_outlier[seed, t], BLIND, 1.0)
        mean, covariance, likelihood = rules.update(mean, covariance, data.observations[seed, t], factors)
        log_weight = log_weight + torch.where(torch.isfinite(likelihood), likelihood, -LOST)
        kept.append(mixed())
        keep = log_weight > _largest(log_weight, seed, seeds)[seed] - BEHIND
        if t % 4 == 3 and float(keep.double().mean()) < 0.95:
            mean, covariance, levels, seed, log_weight = (
                each[keep] for each in (mean, covariance, levels, seed, log_weight)
            )
    for _ in range(HORIZONS[-1]):
        mean, covariance = rules.move(mean, covariance, system.dt, levels[:, :d])
        later.append(mixed())
    return _filtered(system, kept, later, evidence)


def grid_size(system: System) -> int:
    """Levels of each noise in the grid of `averaged_filter`, at most 7; below 4 there is none."""
    return min(7, int(GRID ** (1 / (system.dim + system.channels)) + 1e-9))


def _largest(values: Tensor, seed: Tensor, seeds: int) -> Tensor:
    """The largest value of each seed, (S,)."""
    return torch.full((seeds,), -math.inf, dtype=values.dtype).scatter_reduce(0, seed, values, "amax")


def _filtered(
    system: System, kept: list[tuple[Tensor, Tensor]], later: list[tuple[Tensor, Tensor]], evidence: Tensor
) -> Filtered:
    (means, sds), (ahead, ahead_sds) = (
        [torch.stack(each, 1) for each in zip(*steps, strict=True)] for steps in (kept, later)
    )
    d, p = system.dim, len(system.parameters)
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
    root, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed.any()):  # singular, or of a run that diverged
        bad = failed > 0
        finite = torch.isfinite(covariance[bad]).flatten(1).all(1)[:, None, None]
        values, vectors = torch.linalg.eigh(torch.where(finite, covariance[bad], 0.0))
        root[bad] = torch.where(finite, vectors * values.clamp_min(0.0).sqrt()[:, None], torch.nan)
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
