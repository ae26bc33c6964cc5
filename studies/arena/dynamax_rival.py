"""Extended and unscented Kalman filter of dynamax, as its documentation shows them; noise by its own likelihood."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from studies.arena.beliefs import Beliefs, Filter, beliefs_of
from studies.arena.likelihood import fit
from studies.arena.model import DiscreteModel, Information, Noise, Record
from studies.arena.tasks import Task


def build(task: Task, information: Information, kind: Literal["extended", "unscented"]) -> Filter:
    """A filter under jit. Times and told parameters are inputs."""
    import jax
    import jax.numpy as jnp
    from dynamax.nonlinear_gaussian_ssm import (
        ParamsNLGSSM,
        UKFHyperParams,
        extended_kalman_filter,
        unscented_kalman_filter,
    )

    jax.config.update("jax_enable_x64", True)
    model = DiscreteModel(task, information)

    def run(noise: Noise, intervals: Any, theta: Any, y: Any) -> Any:
        mean, covariance = model.initial(jnp, noise)
        parameters = ParamsNLGSSM(
            initial_mean=mean,
            initial_covariance=covariance,
            dynamics_function=lambda z, u: model.step(jnp, z, u[0], u[1:]),
            dynamics_covariance=jax.vmap(lambda each: model.process_covariance(jnp, noise, each))(intervals),
            emission_function=lambda z, _: model.observe(jnp, z),
            emission_covariance=model.observation_covariance(jnp, noise),
        )
        inputs = jnp.concatenate([intervals[:, None], theta], 1)
        if kind == "extended":
            return extended_kalman_filter(parameters, y, inputs)
        return unscented_kalman_filter(parameters, y, UKFHyperParams(), inputs)

    def beliefs(noise: Noise, intervals: Any, theta: Any, y: Any) -> Any:
        found = run(noise, intervals, theta, y)
        variances = jnp.diagonal(found.filtered_covariances, axis1=-2, axis2=-1)
        return found.filtered_means, variances, found.marginal_loglik

    def log_evidence(logs: Any, intervals: Any, theta: Any, y: Any) -> Any:
        return run(model.noise_of(jnp, logs), intervals, theta, y).marginal_loglik

    filtered, likelihood = jax.jit(beliefs), jax.jit(jax.value_and_grad(log_evidence))

    def apply(record: Record) -> Beliefs:
        noise = model.told
        if model.learns_noise:
            third = record.first(len(record.times) // 3)
            data = third.intervals, third.theta, third.observations

            def value_and_gradient(logs: Any) -> Any:
                value, gradient = likelihood(logs, *data)
                return float(value), np.asarray(gradient)

            noise = model.noise_of(np, fit(value_and_gradient, model.first_guess(third)))
        means, variances, evidence = filtered(noise, record.intervals, record.theta, record.observations)
        return beliefs_of(model, means, variances, float(evidence))

    return apply
