"""Filters and smoothers of cuthbert, put together as its documentation shows: Gaussian, of ensembles, of particles."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from studies.arena.beliefs import Beliefs, Filter, beliefs_of, origins
from studies.arena.model import DiscreteModel, Information, Record
from studies.arena.particles_rival import PARTICLES, forecasts, log_density, mover
from studies.arena.simulation import STAY, TURNS
from studies.arena.tasks import Task

MEMBERS = 100
"""Members of an ensemble."""
INFLATION = 0.0
"""Of the deviations of an ensemble, at each prediction."""
SMALLEST = 1e-6
"""Standard deviation of process noise where there is none, relative to the one at the start: roots need a little."""


def build(task: Task, information: Information, kind: Literal["extended", "unscented"], smooth: bool = False) -> Filter:
    """A filter or smoother in square-root form under jit, linearised at the mean or by sigma points; told the noise."""
    import cuthbert
    import jax
    import jax.numpy as jnp
    from cuthbert.gaussian import moments
    from cuthbertlib import quadrature

    jax.config.update("jax_enable_x64", True)
    model = DiscreteModel(task, information)
    noise = model.told
    mean, first = model.initial(jnp, noise)
    points = quadrature.unscented.weights(model.dim)

    def linear(expected: Any, covariance: Any, state: Any) -> Any:
        """Conditional moments, which are linearised at the mean; with sigma points they are linear already."""
        if kind == "extended":
            return (lambda z: (expected(z), jnp.linalg.cholesky(covariance(z)))), state.mean
        spread, added = state.chol_cov @ state.chol_cov.mT, covariance(state.mean)
        # noise is added here: the package's weights of covariances sum to 1 + (1 − α² + β)
        slope, shift, rest = quadrature.conditional_moments(
            expected, lambda _: jnp.zeros_like(added), state.mean, spread, points
        )
        least = SMALLEST**2 * jnp.diag(jnp.abs(jnp.diagonal(slope @ spread @ slope.T + rest)))
        root = jnp.linalg.cholesky(rest + added + least)
        return (lambda z: (slope @ z + shift, root)), state.mean

    def dynamics(state: Any, inputs: Any) -> Any:
        interval, time, theta, _ = inputs
        process = model.process_covariance(jnp, noise, interval) + SMALLEST**2 * first
        return linear(lambda z: model.step(jnp, z, interval, time, theta), lambda _: process, state)

    def observation(state: Any, inputs: Any) -> Any:
        spread = lambda z: model.observation_covariance(jnp, noise, z)  # noqa: E731
        return *linear(lambda z: model.observe(jnp, z), spread, state), inputs[3]

    built = moments.build_filter(mean, jnp.sqrt(first), dynamics, observation)  # the covariance is diagonal

    def beliefs(*inputs: Any) -> Any:
        filtered = cuthbert.filter(built, inputs, built.init_prepare())
        found = cuthbert.smoother(moments.build_smoother(dynamics), filtered, inputs) if smooth else filtered
        return found.mean[1:], (found.chol_cov @ found.chol_cov.mT)[1:], filtered.log_normalizing_constant[-1]

    applied = jax.jit(beliefs)

    def apply(record: Record) -> Beliefs:
        y, correction = model.readings(record)
        means, covariances, evidence = applied(record.intervals, record.times, record.theta, y)
        found = beliefs_of(model, record, noise, means, covariances, float(evidence) + correction, kind)
        return found._replace(ahead=None) if smooth else found

    return apply


def build_ensemble(task: Task, information: Information, smooth: bool = False) -> Filter:
    """The ensemble Kalman filter with perturbed observations, or the smoother on top of it; it is told the noise."""
    import cuthbert
    import jax
    import jax.numpy as jnp
    from cuthbert.ensemble_kalman import ensemble_kalman_filter, ensemble_rts_smoother

    jax.config.update("jax_enable_x64", True)
    model = DiscreteModel(task, information)
    noise = model.told
    mean, first = model.initial(jnp, noise)
    observing = jnp.sqrt(model.observation_covariance(jnp, noise, mean))  # it is diagonal

    def dynamics(inputs: Any) -> Any:
        interval, time, theta, root, _ = inputs
        return lambda z, key: model.step(jnp, z, interval, time, theta) + root @ jax.random.normal(key, z.shape)

    built = ensemble_kalman_filter.build_filter(
        lambda key: mean + jnp.sqrt(first) @ jax.random.normal(key, mean.shape),
        dynamics,
        lambda inputs: ((lambda z: model.observe(jnp, z)), observing, inputs[4]),
        MEMBERS,
        inflation=INFLATION,
        store_predicted_ensemble=smooth,
    )

    def beliefs(intervals: Any, times: Any, theta: Any, y: Any) -> Any:
        key, start = jax.random.split(jax.random.key(0))
        inputs = intervals, times, theta, jax.vmap(lambda each: root_of(jnp, model, each))(intervals), y
        filtered = cuthbert.filter(built, inputs, built.init_prepare(key=start), key=key)
        found = cuthbert.smoother(ensemble_rts_smoother.build_smoother(), filtered, inputs) if smooth else filtered
        return found.mean[1:], (found.chol_cov @ found.chol_cov.mT)[1:], filtered.log_normalizing_constant[-1]

    applied = jax.jit(beliefs)

    def apply(record: Record) -> Beliefs:
        y, correction = model.readings(record)
        means, covariances, evidence = applied(record.intervals, record.times, record.theta, y)
        found = beliefs_of(model, record, noise, means, covariances, float(evidence) + correction, "unscented")
        return found._replace(ahead=None) if smooth else found

    return apply


def build_particles(task: Task, _: Information) -> Filter:
    """The bootstrap particle filter, resampled systematically where fewer than half are effective; told everything."""
    import cuthbert
    import jax
    import jax.numpy as jnp
    from cuthbert.smc import particle_filter
    from cuthbertlib.resampling import adaptive, systematic

    jax.config.update("jax_enable_x64", True)
    model = DiscreteModel(task._replace(switches=False), "everything")
    mean, first = model.initial(jnp, model.told)

    def start(key: Any) -> Any:
        keys = jax.random.split(key)
        x = mean + jnp.sqrt(first) @ jax.random.normal(keys[0], mean.shape)
        return jnp.append(x, jax.random.randint(keys[1], (), 0, len(TURNS))) if task.switches else x

    def propagate(key: Any, x: Any, inputs: Any) -> Any:
        """A particle; with the place of the turn rate among all as a last element where it switches."""
        interval, time, theta, root, _ = inputs
        keys, state = jax.random.split(key, 3), x[: model.d]
        if task.switches:
            other = (x[-1] + jax.random.randint(keys[1], (), 1, len(TURNS))) % len(TURNS)
            place = jnp.where(jax.random.uniform(keys[2]) < STAY, x[-1], other)
            theta = jnp.array(TURNS)[place.astype(int)][None]
        moved = model.step(jnp, state, interval, time, theta) + root @ jax.random.normal(keys[0], state.shape)
        return jnp.append(moved, place) if task.switches else moved

    def potential(_: Any, x: Any, inputs: Any) -> Any:
        return log_density(task, x[: model.d, None], inputs[4], xp=jnp)[0]

    resampling = adaptive.ess_decorator(systematic.resampling, 0.5)
    built = particle_filter.build_filter(start, propagate, potential, PARTICLES, resampling)

    def beliefs(places: Any, intervals: Any, times: Any, theta: Any, y: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), 3)
        inputs = intervals, times, theta, jax.vmap(lambda each: root_of(jnp, model, each))(intervals), y
        found = cuthbert.filter(built, inputs, built.init_prepare(key=keys[0]), key=keys[1])
        weights = jax.nn.softmax(found.log_weights[1:], axis=-1)
        states = found.particles[1:, :, : model.d]
        means = jnp.einsum("tn,tnd->td", weights, states)
        variances = jnp.einsum("tn,tnd->td", weights, (states - means[:, None]) ** 2)
        return means, variances, found.particles[1:][places], weights[places], found.log_normalizing_constant[-1]

    applied, move = jax.jit(beliefs), mover(task, model)

    def apply(record: Record) -> Beliefs:
        rng, places = np.random.default_rng(0), origins(len(record.times))
        found = applied(np.array(places), record.intervals, record.times, record.theta, record.observations)
        means, variances, particles, weights, evidence = (np.asarray(each) for each in found)
        kept = {
            place: each[rng.choice(len(each), len(each), p=weight)]
            for place, each, weight in zip(places, particles, weights, strict=True)
        }
        seen = int(np.isfinite(record.observations).any(1).sum())
        ahead, nothing = forecasts(kept, move, record, model.d, rng), np.zeros(0)
        return Beliefs(means, np.sqrt(variances), nothing, nothing, float(evidence) / seen, None, ahead)

    return apply


def root_of(xp: Any, model: DiscreteModel, interval: Any) -> Any:
    """A root of Q, which is singular at the first observation and for parameters that stand still."""
    values, vectors = xp.linalg.eigh(model.process_covariance(xp, model.told, interval))
    return vectors * xp.sqrt(xp.maximum(values, 0.0))
