"""Unscented Kalman filter and interacting multiple models of filterpy, as in its documentation."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import expm

from studies.arena.beliefs import Beliefs, Filter, beliefs_of
from studies.arena.likelihood import fit_on_grid
from studies.arena.model import DiscreteModel, Information, Noise, Record
from studies.arena.simulation import STAY, TURNS
from studies.arena.tasks import VELOCITIES, Task

GATE = 5.0
"""Mahalanobis distance of observations that are left out, in tasks with outliers."""
Found = tuple[Any, Any, float]
"""Means (T, n), covariances (T, n, n) and log-evidence."""


def build(task: Task, information: Information) -> Filter:
    """The unscented filter; noise that it is not told comes from a grid of nine pairs of levels."""
    from filterpy.kalman import MerweScaledSigmaPoints, UnscentedKalmanFilter

    model = DiscreteModel(task, information)

    def filtered(noise: Noise, record: Record) -> Found:
        points = MerweScaledSigmaPoints(model.dim, alpha=0.1, beta=2.0, kappa=3.0 - model.dim)
        ukf = UnscentedKalmanFilter(
            model.dim,
            model.m,
            task.system.dt,
            lambda z: model.observe(np, z),
            lambda z, dt, time, theta: model.step(np, z, dt, time, theta),
            points,
        )
        ukf.x, ukf.P = model.initial(np, noise)
        readings, evidence = model.readings(record)
        means, covariances = [], []
        for interval, time, theta, y in zip(record.intervals, record.times, record.theta, readings, strict=True):
            ukf.Q = model.process_covariance(np, noise, interval)
            ukf.predict(dt=interval, time=time, theta=theta)
            seen = np.isfinite(y)
            if seen.any():
                R = model.observation_covariance(np, noise, ukf.x)[np.ix_(seen, seen)]
                ukf.update(y[seen], R=R, hx=lambda z, seen=seen: model.observe(np, z)[seen])
                evidence += float(ukf.log_likelihood)
                if task.gate and ukf.mahalanobis > GATE:
                    ukf.x, ukf.P = ukf.x_prior.copy(), ukf.P_prior.copy()
            means.append(ukf.x.copy())
            covariances.append(ukf.P.copy())
        return np.array(means), np.array(covariances), evidence

    def apply(record: Record) -> Beliefs:
        noise = fit_on_grid(model, record, lambda *given: filtered(*given)[2])
        return beliefs_of(model, record, noise, *filtered(noise, record), "unscented")

    return apply


def build_switching(task: Task, information: Information) -> Filter:
    """Interacting multiple models: one Kalman filter for each turn rate."""
    from filterpy.kalman import IMMEstimator, KalmanFilter

    model = DiscreteModel(task._replace(switches=False), "everything" if information == "everything" else "parameters")
    turn = np.array([[0.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, -1.0], [0.0, 0.0, 1.0, 0.0]])
    count = len(TURNS)
    chain = np.full((count, count), (1 - STAY) / (count - 1)) + (STAY - (1 - STAY) / (count - 1)) * np.eye(count)

    def filtered(noise: Noise, record: Record) -> Found:
        filters = []
        for rate in TURNS:
            kf = KalmanFilter(model.dim, model.m)
            kf.F, kf.H = expm((np.array(VELOCITIES) + rate * turn) * task.system.dt), np.eye(model.m, model.dim)
            kf.Q = model.process_covariance(np, noise, task.system.dt)
            kf.R = np.diag(noise.y**2)
            mean, kf.P = model.initial(np, noise)
            kf.x = mean[:, None]
            filters.append(kf)
        imm = IMMEstimator(filters, np.full(count, 1 / count), chain)
        means, covariances, evidence = [], [], 0.0
        for k, y in enumerate(record.observations):
            if k:
                imm.predict()
            expected = imm.cbar.copy()  # probabilities of the rates, before the update replaces them by the next ones
            imm.update(y[:, None])
            evidence += float(np.log(max(expected @ imm.likelihood, 1e-300)))
            means.append(imm.x[:, 0].copy())
            covariances.append(imm.P.copy())
        return np.array(means), np.array(covariances), evidence

    def apply(record: Record) -> Beliefs:
        noise = fit_on_grid(model, record, lambda *given: filtered(*given)[2])
        found = beliefs_of(model, record, noise, *filtered(noise, record), "unscented")
        return found._replace(ahead=None)  # the package has no forecast over switches

    return apply
