"""Unscented Kalman filter of filterpy, with the sigma points of its documentation."""

from __future__ import annotations

from typing import Any

import numpy as np

from studies.arena.beliefs import Beliefs, Filter, beliefs_of
from studies.arena.likelihood import search
from studies.arena.model import DiscreteModel, Information, Noise, Record
from studies.arena.tasks import Task

GATE = 5.0
"""Mahalanobis distance of observations that are left out, in tasks with outliers."""


def build(task: Task, information: Information) -> Filter:
    """A filter; noise that it is not told comes from a grid of nine pairs of levels."""
    from filterpy.kalman import MerweScaledSigmaPoints, UnscentedKalmanFilter

    model = DiscreteModel(task, information)

    def filtered(noise: Noise, record: Record) -> tuple[Any, Any, float]:
        points = MerweScaledSigmaPoints(model.dim, alpha=0.1, beta=2.0, kappa=3.0 - model.dim)
        ukf = UnscentedKalmanFilter(
            model.dim,
            model.m,
            task.system.dt,
            lambda z: model.observe(np, z),
            lambda z, dt, theta: model.step(np, z, dt, theta),
            points,
        )
        ukf.x, ukf.P = model.initial(np, noise)
        ukf.R = model.observation_covariance(np, noise)
        means, variances, evidence = [], [], 0.0
        for interval, theta, y in zip(record.intervals, record.theta, record.observations, strict=True):
            ukf.Q = model.process_covariance(np, noise, interval)
            ukf.predict(dt=interval, theta=theta)
            ukf.update(y)
            evidence += float(ukf.log_likelihood)
            if task.gate and ukf.mahalanobis > GATE:
                ukf.x, ukf.P = ukf.x_prior.copy(), ukf.P_prior.copy()
            means.append(ukf.x.copy())
            variances.append(np.diag(ukf.P).copy())
        return np.array(means), np.array(variances), evidence

    def apply(record: Record) -> Beliefs:
        noise = model.told
        if model.learns_noise:
            third = record.first(len(record.times) // 3)

            def value(logs: Any) -> float:
                try:
                    return filtered(model.noise_of(np, logs), third)[2]
                except np.linalg.LinAlgError:
                    return -np.inf

            noise = model.noise_of(np, search(value, model.first_guess(third), model.fitted_x))
        means, variances, evidence = filtered(noise, record)
        return beliefs_of(model, means, variances, evidence)

    return apply
