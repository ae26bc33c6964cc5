"""Baseline: unscented Kalman filter of dynamax, an optional dependency, with the state of the extended filters."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.functions.systems import LotkaVolterra
from studies.calibration.baselines import EVERY, Filtered, initial_belief
from studies.calibration.design import DT, Case

PACKAGES = ("dynamax", "jax")
SEEDS_AT_ONCE = 10
"""Number of seeds per call, because dynamax returns every covariance."""


def why_unavailable() -> str | None:
    """Why the filter cannot be used, or None."""
    if importlib.util.find_spec("dynamax") is None:
        return 'dynamax is not installed; install it with: pip install "pcnet[calibration]"'
    return None


def run_filter(case: Case, observations: Tensor, *, matched: bool) -> Filtered:
    """Filter of a case whose flow is Lotka–Volterra with three species; matched: as in `baselines.run_filter`."""
    if not isinstance(case.model.flow, LotkaVolterra):
        raise SettingError(f"the unscented filter supports the Lotka–Volterra flow only, not {case.model.flow!r}")
    import jax
    import jax.numpy as jnp
    from dynamax.nonlinear_gaussian_ssm import ParamsNLGSSM, UKFHyperParams, unscented_kalman_filter
    from jax.experimental import enable_x64

    factor = case.process.spectral_factor if matched else 1.0
    mean, covariance = initial_belief(case, observations)
    process_noise = np.concatenate([np.square(case.process.state_sd) * DT**2 * factor, np.zeros(3)])

    def step(s: Any) -> Any:
        x, (a, b, c) = s[:3], s[3:]
        rates = jnp.stack([a * x[1] + b * x[2], -a * x[0] + c * x[2], -b * x[0] - c * x[1]])
        return jnp.concatenate([x + DT * x * rates, s[3:]])

    def filter_seed(mean: Any, covariance: Any, observed: Any) -> tuple[Any, Any]:
        model = ParamsNLGSSM(
            initial_mean=mean,
            initial_covariance=covariance,
            dynamics_function=step,
            dynamics_covariance=jnp.diag(process_noise),
            emission_function=lambda s: s[:3],
            emission_covariance=factor * case.process.observation_sd**2 * jnp.eye(3),
        )
        posterior = unscented_kalman_filter(model, observed, UKFHyperParams())
        variances = jnp.diagonal(posterior.filtered_covariances, axis1=-2, axis2=-1)
        return posterior.filtered_means[EVERY - 2 :: EVERY], variances[EVERY - 2 :: EVERY]

    with enable_x64():
        run = jax.jit(jax.vmap(filter_seed))
        # dynamax starts before the first observation, which our initial belief already contains: predict the second one
        start = jnp.asarray(mean.numpy())
        jacobian = jax.vmap(jax.jacfwd(step))(start)
        predicted = jax.vmap(step)(start)
        predicted_covariance = jacobian @ jnp.asarray(covariance.numpy()) @ jacobian.swapaxes(-1, -2)
        predicted_covariance = predicted_covariance + jnp.diag(process_noise)
        means, variances = [], []
        for first in range(0, len(mean), SEEDS_AT_ONCE):
            part = slice(first, first + SEEDS_AT_ONCE)
            filtered = run(predicted[part], predicted_covariance[part], jnp.asarray(observations[part, 1:].numpy()))
            means.append(np.array(filtered[0]))
            variances.append(np.array(filtered[1]))
    tensor = partial(torch.as_tensor, dtype=torch.float64)
    return Filtered(tensor(np.concatenate(means)), tensor(np.concatenate(variances)).clamp_min(0).sqrt())
