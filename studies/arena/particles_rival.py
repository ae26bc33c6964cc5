"""Bootstrap particle filter of the package `particles`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln

from studies.arena.beliefs import Ahead, Array, Beliefs, Filter, origins
from studies.arena.model import DiscreteModel, Information, Record
from studies.arena.simulation import STAY, TURNS
from studies.arena.tasks import Task

PARTICLES = 1000


def log_density(task: Task, x: Array, y: Array) -> Array:
    """log p(y | x) of particles (d, N), (N,); what is NaN counts nothing. Outliers are part of the noise."""
    predicted, y, seen = task.observe(np, x), y[:, None], np.isfinite(y)[:, None]
    if task.family == "poisson":
        found = y * predicted - np.exp(predicted) - gammaln(y + 1)
    elif task.family == "volatility":
        found = -0.5 * (predicted + y**2 * np.exp(-predicted) + math.log(2 * math.pi))
    else:
        sd, share = np.array(task.system.observation_sd)[:, None], task.system.outliers
        found = _normal(y - predicted, sd)
        if share:
            found = np.logaddexp(math.log(1 - share) + found, math.log(share) + _normal(y - predicted, 20 * sd))
    total: Array = np.where(seen, found, 0.0).sum(0)
    return total


def _normal(error: Array, sd: Array) -> Array:
    return -0.5 * (error / sd) ** 2 - np.log(sd) - 0.5 * math.log(2 * math.pi)


def build(task: Task, _: Information) -> Filter:
    """The bootstrap filter with systematic resampling; it is told everything."""
    import particles
    from particles.collectors import Moments

    model = DiscreteModel(task._replace(switches=False), "everything")
    first_mean, first_covariance = model.initial(np, model.told)

    def move(x: Array, record: Record, t: int, rng: np.random.Generator) -> Array:
        """Particles (N, d), with the place of the turn rate among all as a last column where it switches."""
        state, theta = x.T[: model.d], record.theta[t][:, None]
        if task.switches:
            place = x[:, -1].astype(int)
            other = (place + rng.integers(1, len(TURNS), len(x))) % len(TURNS)
            place = np.where(rng.random(len(x)) < STAY, place, other)
            theta = np.array(TURNS)[place][None]
        covariance = model.process_covariance(np, model.told, record.intervals[t])
        values, vectors = np.linalg.eigh(covariance)
        noise = (vectors * np.sqrt(np.maximum(values, 0.0))) @ rng.standard_normal(state.shape)
        moved = model.step(np, state, record.intervals[t], record.times[t], theta) + noise
        return np.column_stack([moved.T, place]) if task.switches else moved.T

    def apply(record: Record) -> Beliefs:
        rng, kept = np.random.default_rng(0), {}
        places = origins(len(record.times))

        class Model(particles.FeynmanKac):  # type: ignore[misc]
            def M0(self, N: int) -> Array:  # noqa: N802
                x = first_mean + rng.standard_normal((N, model.d)) @ np.sqrt(first_covariance)
                return np.column_stack([x, rng.integers(len(TURNS), size=N)]) if task.switches else x

            def M(self, t: int, xp: Array) -> Array:  # noqa: N802
                return move(xp, record, t, rng)

            def logG(self, t: int, xp: Array, x: Array) -> Array:  # noqa: N802
                return log_density(task, x.T[: model.d], record.observations[t])

        np.random.seed(0)  # the package draws from numpy's global generator when it resamples
        smc = particles.SMC(fk=Model(T=len(record.times)), N=PARTICLES, resampling="systematic", collect=[Moments()])
        for t, _ in enumerate(smc):
            if t in places:
                kept[t] = smc.X[rng.choice(PARTICLES, PARTICLES, p=smc.W)]

        def ahead(places: Sequence[int], steps: int) -> Ahead:
            mean, sd = [], []
            for place in places:
                x = kept[place]
                for k in range(1, steps + 1):
                    x = move(x, record, place + k, rng)
                mean.append(x[:, : model.d].mean(0))
                sd.append(x[:, : model.d].std(0))
            return Ahead(np.array(mean), np.array(sd))

        found = smc.summaries.moments
        means, variances = (np.array([each[key] for each in found])[:, : model.d] for key in ("mean", "var"))
        seen = int(np.isfinite(record.observations).any(1).sum())
        nothing = np.zeros(0)
        return Beliefs(means, np.sqrt(variances), nothing, nothing, float(smc.logLt) / seen, None, ahead)

    return apply
