"""The methods by name: each inverts all seeds of a case at once and says what it believed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from pcnet.graphs import adaptive_filter, odem
from pcnet.model.model import Model
from pcnet.results.recorder import Record
from pcnet.results.result import Result
from studies.calibration import rivals
from studies.calibration.design import DRIFT, DT, RANDOM_WALK, Case, Prior, first_state
from studies.calibration.measures import Beliefs
from studies.calibration.rivals import THINNING, Filtered

Method = Callable[[Case, Prior, Tensor], Beliefs]


def _ours(case: Case, prior: Prior, observations: Tensor) -> Beliefs:
    """pcnet's recommended graph; of the noise it is told the smoothness, and a prior that may be wrong."""
    process, model = case.process, case.model
    partial = len(process.seen) < process.dim
    several = len(set(process.state_sd)) > 1
    built = adaptive_filter(
        model.flow,
        process.dim,
        DT,
        parameter_mean=list(model.mean),
        parameter_sd=list(model.sd),
        mapping=process.look if partial else None,
        channels=len(process.seen),
        expected_precision_x=[1 / (sd**2 * prior.x) for sd in (process.state_sd if several else process.state_sd[:1])],
        expected_precision_y=1 / (process.observation_sd**2 * prior.y),
        correlation_time=process.width * DT * math.sqrt(2) if process.width else None,
        noise_per_channel="each" if several else "shared",
        initial_mean=first_state(case, observations) if partial else None,
        initial_sd=model.initial_sd,
        model_error_time=None if model.right else DRIFT,
    )
    return _run(case, built, observations, "noise_x", "noise_y")


def _papers(case: Case, prior: Prior, observations: Tensor) -> Beliefs:
    """The rules of *Online Generalised Predictive Coding* with the settings of its study."""
    built = odem(
        "glv" if case.model.right else "lorenz",
        expected_precision_x=1 / (case.process.state_sd[0] ** 2 * prior.x),
        expected_precision_y=1 / (case.process.observation_sd**2 * prior.y),
    )
    return _run(case, built, observations, "lambda_x", "lambda_y")


def _run(case: Case, model: Model, observations: Tensor, *precisions: str) -> Beliefs:
    record = Record(("mean", "sd"), nodes=("x", "theta", *precisions), every=THINNING)
    result = model.graph.run(observations, model.schedule, record=record, on_divergence="stop", progress=False)
    true = (1 / np.square(case.process.state_sd), 1 / np.square([case.process.observation_sd]))
    ratios = [_ratio(result, name, value) for name, value in zip(precisions, true, strict=True)]
    values = {key: trace.values for key, trace in result.traces.items()}
    return Beliefs(
        at=_kept(observations),
        mean=values["x.mean"][:, :, 0],
        sd=values["x.sd"][:, :, 0],
        theta=values["theta.mean"],
        theta_sd=values["theta.sd"],
        precision_x=ratios[0],
        precision_y=ratios[1],
        lost=result.diverged.at >= 0,
    )


def _ratio(result: Result, node: str, true: Any) -> Any:
    """The last precision over the true one, of the channel where it is furthest from 1; (seeds,)."""
    log = result.traces[f"{node}.mean"].values[:, -1] - np.log(true)
    log = log.reshape(len(log), -1)
    return np.exp(log[np.arange(len(log)), np.abs(log).argmax(1)])


def _filter(**options: Any) -> Method:
    return lambda case, _, observations: _told(case, observations, rivals.follow(case, observations, **options))


def _with_noise(case: Case, _: Prior, observations: Tensor) -> Beliefs:
    return _told(case, observations, rivals.follow_with_noise(case, observations))


def _unscented(*, matched: bool) -> Method:
    def method(case: Case, _: Prior, observations: Tensor) -> Beliefs:
        from studies.calibration.unscented import follow

        return _told(case, observations, follow(case, observations, matched=matched))

    return method


def _told(case: Case, observations: Tensor, filtered: Filtered) -> Beliefs:
    """The beliefs of a filter over (x, θ, …)."""
    dim, end = case.process.dim, case.process.dim + len(case.model.mean)
    mean, sd = filtered.mean.numpy(), filtered.sd.numpy()
    nothing = np.full(len(mean), np.nan)
    return Beliefs(
        at=_kept(observations),
        mean=mean[..., :dim],
        sd=sd[..., :dim],
        theta=mean[..., dim:end],
        theta_sd=sd[..., dim:end],
        precision_x=nothing,
        precision_y=nothing,
        lost=~np.isfinite(mean).all(axis=(1, 2)),
    )


def _kept(observations: Tensor) -> Any:
    return np.arange(THINNING - 1, observations.shape[1], THINNING)


METHODS: Mapping[str, Method] = {
    "pcnet": _ours,
    "paper": _papers,
    "ekf": _filter(),
    "ekf marginal": _filter(),
    "ekf matched": _filter(matched=True),
    "ekf noise as states": _with_noise,
    "ekf random walk": _filter(matched=True, walk=RANDOM_WALK),
    "ukf": _unscented(matched=False),
    "ukf matched": _unscented(matched=True),
}

NAMES = {
    "pcnet": "pcnet",
    "paper": "the paper's rules",
    "ekf": "extended Kalman filter",
    "ekf marginal": "extended Kalman filter, marginal noise",
    "ekf matched": "extended Kalman filter, matched noise",
    "ekf noise as states": "extended Kalman filter, noise as states",
    "ekf random walk": "extended Kalman filter, parameters walk",
    "ukf": "unscented Kalman filter (dynamax)",
    "ukf matched": "unscented Kalman filter (dynamax), matched noise",
}

GUESSING = ("pcnet", "paper")
"""The methods that are not told the noise, and so begin from priors."""
