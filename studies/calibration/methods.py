"""Methods by name; each runs on all seeds of a case at once and returns its beliefs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.graphs import adaptive_filter, odem
from pcnet.model.model import Model
from pcnet.results.recorder import Record
from pcnet.results.result import Result
from studies.calibration import baselines, unscented
from studies.calibration.baselines import EVERY, Filtered
from studies.calibration.design import DT, MODEL_ERROR_TIME, RANDOM_WALK, Case, Prior, first_state
from studies.calibration.measures import Beliefs

Method = Callable[[Case, Prior, Tensor], Beliefs]

SEEDS_AT_ONCE = 25
"""Number of seeds that pcnet runs at once: with all of them, its hypotheses take gigabytes, which also costs time."""


def _adaptive_filter(case: Case, prior: Prior, observations: Tensor) -> Beliefs:
    """pcnet's recommended graph, given the smoothness of the noise and a prior of its variance that may be wrong."""
    process, model = case.process, case.model
    partial = len(process.observed) < process.dim
    several = len(set(process.state_sd)) > 1
    filter_model = adaptive_filter(
        model.flow,
        process.dim,
        DT,
        parameter_mean=list(model.mean),
        parameter_sd=list(model.sd),
        mapping=process.observe if partial else None,
        channels=len(process.observed),
        process_noise_sd=[sd * math.sqrt(prior.x) for sd in (process.state_sd if several else process.state_sd[:1])],
        observation_noise_sd=process.observation_sd * math.sqrt(prior.y),
        correlation_time=process.width * DT * math.sqrt(2) if process.width else None,
        noise_per_channel=several,
        initial_mean=first_state(case, observations) if partial else None,
        initial_sd=model.initial_sd,
        model_error_time=None if model.right else MODEL_ERROR_TIME,
        integrator="euler",  # as the process is simulated, with noise that is held constant over each step
        process_noise="held",
    )
    return _run(case, filter_model, observations, "noise_x", "noise_y")


def _in_parts(method: Method) -> Method:
    """The same method for some seeds after the other."""

    def run(case: Case, prior: Prior, observations: Tensor) -> Beliefs:
        parts = [method(case, prior, part) for part in torch.split(observations, SEEDS_AT_ONCE)]
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Beliefs._fields[1:]}
        return Beliefs(parts[0].at, **joined)

    return run


def _paper(case: Case, prior: Prior, observations: Tensor) -> Beliefs:
    """The rules of *Online Generalised Predictive Coding* with the settings of its study."""
    model = odem(
        "glv" if case.model.right else "lorenz",
        expected_precision_x=1 / (case.process.state_sd[0] ** 2 * prior.x),
        expected_precision_y=1 / (case.process.observation_sd**2 * prior.y),
    )
    return _run(case, model, observations, "lambda_x", "lambda_y")


def _run(case: Case, model: Model, observations: Tensor, *precisions: str) -> Beliefs:
    record = Record(("mean", "sd"), nodes=("x", "theta", *precisions), every=EVERY)
    result = model.run(observations, record=record, on_divergence="stop", screen=False, progress=False)
    true = (1 / np.square(case.process.state_sd), 1 / np.square([case.process.observation_sd]))
    ratios = [_ratio(result, name, value) for name, value in zip(precisions, true, strict=True)]
    values = {key: trace.values for key, trace in result.traces.items()}
    return Beliefs(
        at=_indices(observations),
        mean=values["x.mean"][:, :, 0],
        sd=values["x.sd"][:, :, 0],
        theta=values["theta.mean"],
        theta_sd=values["theta.sd"],
        precision_x=ratios[0],
        precision_y=ratios[1],
        diverged=result.diverged.at >= 0,
    )


def _ratio(result: Result, node: str, true: Any) -> Any:
    """Final precision over the true one, of the channel where the ratio is farthest from 1; (seeds,)."""
    log = result.traces[f"{node}.mean"].values[:, -1] - np.log(true)
    log = log.reshape(len(log), -1)
    return np.exp(log[np.arange(len(log)), np.abs(log).argmax(1)])


def _baseline(run: Callable[..., Filtered], **options: Any) -> Method:
    """Method of a filter over (x, θ, …) that is given the true noise."""

    def method(case: Case, _: Prior, observations: Tensor) -> Beliefs:
        dim, end = case.process.dim, case.process.dim + len(case.model.mean)
        mean, sd = (values.numpy() for values in run(case, observations, **options))
        unknown = np.full(len(mean), np.nan)
        return Beliefs(
            at=_indices(observations),
            mean=mean[..., :dim],
            sd=sd[..., :dim],
            theta=mean[..., dim:end],
            theta_sd=sd[..., dim:end],
            precision_x=unknown,
            precision_y=unknown,
            diverged=~np.isfinite(mean).all(axis=(1, 2)),
        )

    return method


def _indices(observations: Tensor) -> Any:
    return np.arange(EVERY - 1, observations.shape[1], EVERY)


METHODS: Mapping[str, Method] = {
    "pcnet": _in_parts(_adaptive_filter),
    "paper": _paper,
    "ekf": _baseline(baselines.run_filter),
    "ekf marginal": _baseline(baselines.run_filter),
    "ekf matched": _baseline(baselines.run_filter, matched=True),
    "ekf noise as states": _baseline(baselines.run_filter_with_noise_states),
    "ekf random walk": _baseline(baselines.run_filter, matched=True, walk=RANDOM_WALK),
    "ukf": _baseline(unscented.run_filter, matched=False),
    "ukf matched": _baseline(unscented.run_filter, matched=True),
}

NAMES = {
    "pcnet": "pcnet",
    "paper": "ODEM as in the paper",
    "ekf": "extended Kalman filter",
    "ekf marginal": "extended Kalman filter, marginal noise",
    "ekf matched": "extended Kalman filter, matched noise",
    "ekf noise as states": "extended Kalman filter, noise as states",
    "ekf random walk": "extended Kalman filter, random-walk parameters",
    "ukf": "unscented Kalman filter (dynamax)",
    "ukf matched": "unscented Kalman filter (dynamax), matched noise",
}

LEARN_NOISE = ("pcnet", "paper")
"""Methods that learn the noise and start from a prior of it; the others are given the true noise."""
