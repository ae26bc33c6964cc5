"""Filter and smoother of cuthbert that linearise conditional moments: extended ones in square-root form."""

from __future__ import annotations

from typing import Any

import numpy as np

from studies.arena.beliefs import Beliefs, Filter, beliefs_of
from studies.arena.dynamax_rival import BLIND
from studies.arena.model import DiscreteModel, Information, Record
from studies.arena.tasks import Task


def build(task: Task, information: Information, smooth: bool = False) -> Filter:
    """A filter or smoother under jit; it is told the noise."""
    import cuthbert
    import jax
    import jax.numpy as jnp
    from cuthbert.gaussian import moments

    jax.config.update("jax_enable_x64", True)
    model = DiscreteModel(task, information)
    noise = model.told
    mean, covariance = model.initial(jnp, noise)

    def dynamics(state: Any, inputs: Any) -> Any:
        interval, time, theta, _, root = inputs
        return (lambda z: (model.step(jnp, z, interval, time, theta), root)), state.mean

    def observation(state: Any, inputs: Any) -> Any:
        y = inputs[3]
        seen = jnp.isfinite(y)

        def expected(z: Any) -> Any:
            variance = jnp.diagonal(model.observation_covariance(jnp, noise, z))
            return model.observe(jnp, z), jnp.diag(jnp.sqrt(jnp.where(seen, variance, BLIND)))

        return expected, state.mean, jnp.where(seen, y, 0.0)

    built = moments.build_filter(mean, jnp.sqrt(covariance), dynamics, observation)  # the covariance is diagonal
    smoother = moments.build_smoother(dynamics)

    def root_of(interval: Any) -> Any:
        """A root of Q, which is singular at the first observation and for parameters that stand still."""
        values, vectors = jnp.linalg.eigh(model.process_covariance(jnp, noise, interval))
        return vectors * jnp.sqrt(jnp.maximum(values, 0.0))

    def beliefs(intervals: Any, times: Any, theta: Any, y: Any) -> Any:
        inputs = intervals, times, theta, y, jax.vmap(root_of)(intervals)
        states = cuthbert.filter(built, inputs, built.init_prepare())
        evidence = states.log_normalizing_constant[-1]
        if smooth:
            states = cuthbert.smoother(smoother, states, inputs)
        return states.mean[1:], (states.chol_cov @ states.chol_cov.mT)[1:], evidence

    applied = jax.jit(beliefs)

    def apply(record: Record) -> Beliefs:
        y, correction = model.readings(record)
        means, covariances, evidence = applied(record.intervals, record.times, record.theta, y)
        evidence = float(evidence) + correction + 0.5 * np.isnan(y).sum() * np.log(2 * np.pi * BLIND)
        found = beliefs_of(model, record, noise, means, covariances, evidence, "extended")
        return found._replace(ahead=None) if smooth else found

    return apply
