"""The filter of cuthbert that linearises conditional moments: an extended Kalman filter in square-root form."""

from __future__ import annotations

from typing import Any

from studies.arena.beliefs import Beliefs, Filter, beliefs_of
from studies.arena.model import DiscreteModel, Information, Record
from studies.arena.tasks import Task


def build(task: Task, information: Information) -> Filter:
    """A filter under jit; it is told the noise."""
    import cuthbert
    import jax
    import jax.numpy as jnp
    from cuthbert.gaussian import moments

    jax.config.update("jax_enable_x64", True)
    model = DiscreteModel(task, information)
    noise = model.told
    mean, covariance = model.initial(jnp, noise)
    root_y = jnp.linalg.cholesky(model.observation_covariance(jnp, noise))

    def dynamics(state: Any, inputs: Any) -> Any:
        interval, theta, _, root = inputs
        return (lambda z: (model.step(jnp, z, interval, theta), root)), state.mean

    def observation(state: Any, inputs: Any) -> Any:
        return (lambda z: (model.observe(jnp, z), root_y)), state.mean, inputs[2]

    built = moments.build_filter(mean, jnp.sqrt(covariance), dynamics, observation)  # the covariance is diagonal

    def root_of(interval: Any) -> Any:
        """A root of Q, which is singular at the first observation and for parameters that stand still."""
        values, vectors = jnp.linalg.eigh(model.process_covariance(jnp, noise, interval))
        return vectors * jnp.sqrt(jnp.maximum(values, 0.0))

    def beliefs(intervals: Any, theta: Any, y: Any) -> Any:
        inputs = intervals, theta, y, jax.vmap(root_of)(intervals)
        states = cuthbert.filter(built, inputs, built.init_prepare())
        variances = (states.chol_cov**2).sum(-1)
        return states.mean[1:], variances[1:], states.log_normalizing_constant[-1]

    filtered = jax.jit(beliefs)

    def apply(record: Record) -> Beliefs:
        means, variances, evidence = filtered(record.intervals, record.theta, record.observations)
        return beliefs_of(model, means, variances, float(evidence))

    return apply
