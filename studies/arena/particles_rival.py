"""Bootstrap particle filter of the package `particles`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from studies.arena.beliefs import Ahead, Array, Beliefs, Filter, Forecasts, origins
from studies.arena.likelihood import fit_on_grid
from studies.arena.model import DiscreteModel, Information, Noise, Record
from studies.arena.simulation import STAY, TURNS
from studies.arena.tasks import Task

PARTICLES = 1000
Mover = Callable[..., Array]
"""Particles one observation later, from particles, record, place of the observation, randomness and noise."""


def log_density(task: Task, x: Array, y: Array, sd: Array | None = None, xp: Any = np) -> Array:
    """log p(y | x) of particles (d, N), (N,); what is NaN counts nothing. Outliers are part of the noise.

    Args:
        task: The task.
        x: Particles.
        y: Observation, (m,).
        sd: Standard deviations of the observation noise, (m,), where it is Gaussian; the true ones by default.
        xp: numpy or jax.numpy.
    """
    predicted, y, seen = task.observe(xp, x), y[:, None], xp.isfinite(y)[:, None]
    if task.family == "poisson":
        found = y * predicted - xp.exp(predicted) - _log_gamma(xp, y + 1)
    elif task.family == "volatility":
        found = -0.5 * (predicted + y**2 * xp.exp(-predicted) + math.log(2 * math.pi))
    else:
        sd, share = xp.asarray(task.system.observation_sd if sd is None else sd)[:, None], task.system.outliers
        found = _normal(xp, y - predicted, sd)
        if share:
            wide = math.log(share) + _normal(xp, y - predicted, 20 * sd)
            found = xp.logaddexp(math.log(1 - share) + found, wide)
    total: Array = xp.where(seen, found, 0.0).sum(0)
    return total


def _normal(xp: Any, error: Array, sd: Array) -> Array:
    density: Array = -0.5 * (error / sd) ** 2 - xp.log(sd) - 0.5 * math.log(2 * math.pi)
    return density


def _log_gamma(xp: Any, x: Array) -> Array:
    if xp is np:
        from scipy.special import gammaln
    else:
        from jax.scipy.special import gammaln
    found: Array = gammaln(x)
    return found


def mover(task: Task, model: DiscreteModel) -> Mover:
    """Moves particles (N, d), with the place of the turn rate among all as a last column where it switches."""

    def move(x: Array, record: Record, t: int, rng: np.random.Generator, noise: Noise = model.told) -> Array:
        state, theta = x.T[: model.d], record.theta[t][:, None]
        if task.switches:
            place = x[:, -1].astype(int)
            other = (place + rng.integers(1, len(TURNS), len(x))) % len(TURNS)
            place = np.where(rng.random(len(x)) < STAY, place, other)
            theta = np.array(TURNS)[place][None]
        covariance = model.process_covariance(np, noise, record.intervals[t])
        values, vectors = np.linalg.eigh(covariance)
        random = (vectors * np.sqrt(np.maximum(values, 0.0))) @ rng.standard_normal(state.shape)
        moved = model.step(np, state, record.intervals[t], record.times[t], theta) + random
        return np.column_stack([moved.T, place]) if task.switches else moved.T

    return move


def forecasts(
    kept: Mapping[int, Array], move: Mover, record: Record, d: int, rng: np.random.Generator, *noise: Noise
) -> Forecasts:
    """Forecasts by moving on the particles that were kept at each origin, (N, ≥ d)."""

    def ahead(places: Sequence[int], steps: int) -> Ahead:
        mean, sd = [], []
        for place in places:
            x = kept[place]
            for k in range(1, steps + 1):
                x = move(x, record, place + k, rng, *noise)
            mean.append(x[:, :d].mean(0))
            sd.append(x[:, :d].std(0))
        return Ahead(np.array(mean), np.array(sd))

    return ahead


def build(task: Task, information: Information) -> Filter:
    """The bootstrap filter with systematic resampling; noise that it is not told comes from a grid of nine pairs."""
    import particles
    from particles.collectors import Moments

    learns = information in ("parameters", "neither")
    model = DiscreteModel(task._replace(switches=False), "parameters" if learns else "everything")
    move = mover(task, model)

    def filtered(noise: Noise, record: Record) -> tuple[Any, np.random.Generator, dict[int, Array]]:
        """The filter at the end, its source of randomness, and particles at origins."""
        rng, kept = np.random.default_rng(0), {}
        places = origins(len(record.times))
        first_mean, first_covariance = model.initial(np, noise)

        class Model(particles.FeynmanKac):  # type: ignore[misc]
            def M0(self, N: int) -> Array:  # noqa: N802
                x = first_mean + rng.standard_normal((N, model.d)) @ np.sqrt(first_covariance)
                return np.column_stack([x, rng.integers(len(TURNS), size=N)]) if task.switches else x

            def M(self, t: int, xp: Array) -> Array:  # noqa: N802
                return move(xp, record, t, rng, noise)

            def logG(self, t: int, xp: Array, x: Array) -> Array:  # noqa: N802
                return log_density(task, x.T[: model.d], record.observations[t], noise.y)

        np.random.seed(0)  # the package draws from numpy's global generator when it resamples
        smc = particles.SMC(fk=Model(T=len(record.times)), N=PARTICLES, resampling="systematic", collect=[Moments()])
        for t, _ in enumerate(smc):
            if t in places:
                kept[t] = smc.X[rng.choice(PARTICLES, PARTICLES, p=smc.W)]
        return smc, rng, kept

    def apply(record: Record) -> Beliefs:
        noise = fit_on_grid(model, record, lambda *given: float(filtered(*given)[0].logLt))
        smc, rng, kept = filtered(noise, record)
        found = smc.summaries.moments
        means, variances = (np.array([each[key] for each in found])[:, : model.d] for key in ("mean", "var"))
        seen = int(np.isfinite(record.observations).any(1).sum())
        nothing, levels = np.zeros(0), noise if model.learns_noise else None
        ahead = forecasts(kept, move, record, model.d, rng, noise)
        return Beliefs(means, np.sqrt(variances), nothing, nothing, float(smc.logLt) / seen, levels, ahead)

    return apply
