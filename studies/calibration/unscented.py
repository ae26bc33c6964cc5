"""An unscented Kalman filter from dynamax, an optional dependency, on the same states as the extended ones."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.functions.systems import LotkaVolterra
from studies.calibration.design import DT, Case
from studies.calibration.rivals import THINNING, Filtered, begin

GROUP = 10
"""So many seeds are filtered at a time, for dynamax returns every covariance."""


def missing() -> str | None:
    """Why there is no such filter here, if there is none."""
    if importlib.util.find_spec("dynamax") is None:
        return 'dynamax is not installed; pip install "pcnet[calibration]" brings it'
    return None


def follow(case: Case, observations: Tensor, *, matched: bool) -> Filtered:
    """The filter of a case whose flow is of Lotka and Volterra with three species."""
    if not isinstance(case.model.flow, LotkaVolterra):
        raise SettingError(f"the unscented filter knows the Lotka–Volterra flow only, not {case.model.flow!r}")
    import jax
    import jax.numpy as jnp
    from dynamax.nonlinear_gaussian_ssm import ParamsNLGSSM, UKFHyperParams, unscented_kalman_filter

    strength = case.process.matching if matched else 1.0
    mean, covariance = begin(case, observations)
    drift = np.concatenate([np.square(case.process.state_sd) * DT**2 * strength, np.zeros(3)])

    def step(s: Any) -> Any:
        x, (a, b, c) = s[:3], s[3:]
        pull = jnp.stack([a * x[1] + b * x[2], -a * x[0] + c * x[2], -b * x[0] - c * x[1]])
        return jnp.concatenate([x + DT * x * pull, s[3:]])

    def one(first: Any, spread: Any, seen: Any) -> tuple[Any, Any]:
        model = ParamsNLGSSM(
            initial_mean=first,
            initial_covariance=spread,
            dynamics_function=step,
            dynamics_covariance=jnp.diag(drift),
            emission_function=lambda s: s[:3],
            emission_covariance=strength * case.process.observation_sd**2 * jnp.eye(3),
        )
        found = unscented_kalman_filter(model, seen, UKFHyperParams())
        mean, covariance = found.filtered_means, found.filtered_covariances
        return mean[THINNING - 2 :: THINNING], jnp.diagonal(covariance, axis1=-2, axis2=-1)[THINNING - 2 :: THINNING]

    with jax.enable_x64(True):
        run = jax.jit(jax.vmap(one))
        ahead = jax.vmap(step)(jnp.asarray(mean.numpy()))
        slope = jax.vmap(jax.jacfwd(step))(jnp.asarray(mean.numpy()))
        spread = slope @ jnp.asarray(covariance.numpy()) @ slope.swapaxes(-1, -2) + jnp.diag(drift)
        means, variances = [], []
        for part in range(0, len(mean), GROUP):  # dynamax begins before the first observation; ours is taken in already
            group = slice(part, part + GROUP)
            found = run(ahead[group], spread[group], jnp.asarray(observations[group, 1:].numpy()))
            means.append(np.array(found[0]))
            variances.append(np.array(found[1]))
    tensor = partial(torch.as_tensor, dtype=torch.float64)
    return Filtered(tensor(np.concatenate(means)), tensor(np.concatenate(variances)).clamp_min(0).sqrt())
