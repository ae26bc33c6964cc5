"""Filters and smoothers of dynamax, as its documentation shows them; noise by its own likelihood."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from studies.arena.beliefs import Beliefs, Filter, beliefs_of
from studies.arena.likelihood import fit
from studies.arena.model import DiscreteModel, Information, Noise, Record
from studies.arena.tasks import Task

BLIND = 1e8
"""Variance of an observation that is missing; these filters have no other way to leave one out."""


def build(task: Task, information: Information, kind: Literal["extended", "unscented"], smooth: bool = False) -> Filter:
    """A filter or smoother under jit. Times and told parameters are inputs; counts by their conditional moments."""
    import jax
    import jax.numpy as jnp
    from dynamax import generalized_gaussian_ssm as general
    from dynamax import nonlinear_gaussian_ssm as nonlinear

    jax.config.update("jax_enable_x64", True)
    model = DiscreteModel(task, information)

    def run(smooth: bool, noise: Noise, intervals: Any, times: Any, theta: Any, y: Any) -> Any:
        mean, covariance = model.initial(jnp, noise)
        inputs = jnp.concatenate([intervals[:, None], times[:, None], theta], 1)
        known: dict[str, Any] = {
            "initial_mean": mean,
            "initial_covariance": covariance,
            "dynamics_function": lambda z, u: model.step(jnp, z, u[0], u[1], u[2:]),
            "dynamics_covariance": jax.vmap(lambda each: model.process_covariance(jnp, noise, each))(intervals),
        }
        if task.family == "poisson":
            counts = general.ParamsGGSSM(
                **known,
                emission_mean_function=lambda z, _: model.observe(jnp, z),
                emission_cov_function=lambda z, _: model.observation_covariance(jnp, noise, z),
            )
            integrals = general.EKFIntegrals() if kind == "extended" else general.UKFIntegrals()
            return general.conditional_moments_gaussian_filter(counts, integrals, y, inputs)
        seen = jnp.isfinite(y)
        common = model.observation_covariance(jnp, noise, mean)
        parameters = nonlinear.ParamsNLGSSM(
            **known,
            emission_function=lambda z, _: model.observe(jnp, z),
            emission_covariance=jax.vmap(lambda each: jnp.where(jnp.diag(~each), BLIND, common))(seen),
        )
        y = jnp.where(seen, y, 0.0)
        if kind == "extended":
            filtered = nonlinear.extended_kalman_filter(parameters, y, inputs)
            return nonlinear.extended_kalman_smoother(parameters, y, filtered, inputs) if smooth else filtered
        wanted = nonlinear.unscented_kalman_smoother if smooth else nonlinear.unscented_kalman_filter
        return wanted(parameters, y, nonlinear.UKFHyperParams(), inputs)

    def log_evidence(logs: Any, *data: Any) -> Any:
        return run(False, model.noise_of(jnp, logs), *data).marginal_loglik

    def beliefs(noise: Noise, *data: Any) -> Any:
        found = run(smooth, noise, *data)
        means, covariances = found.filtered_means, found.filtered_covariances
        if smooth:
            means, covariances = found.smoothed_means, found.smoothed_covariances
        return means, covariances, found.marginal_loglik

    applied, likelihood = jax.jit(beliefs), jax.jit(jax.value_and_grad(log_evidence))

    def apply(record: Record) -> Beliefs:
        noise, before = fit(model, record, f"dynamax {kind}", likelihood)
        y, correction = model.readings(record)
        means, covariances, evidence = applied(noise, record.intervals, record.times, record.theta, y)
        evidence = float(evidence) + correction + 0.5 * np.isnan(y).sum() * math.log(2 * math.pi * BLIND)
        found = beliefs_of(model, record, noise, means, covariances, evidence, kind)
        found = found._replace(further_seconds=before)
        return found._replace(ahead=None) if smooth else found

    return apply
