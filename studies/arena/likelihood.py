"""Maximum likelihood of noise levels on the first third of a record, for filters that are not told them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from studies.arena.model import DiscreteModel, Noise, Record

Array = NDArray[Any]
WIDTH = 3.0  # standard deviation of a weak prior of the logs around the first guess, where a likelihood is flat
STEPS = 30
GRID = (-2.0, 0.0, 1.5)  # added to logs of the first guess, for filters without derivatives


FITTED: dict[tuple[str, str], tuple[Noise, float]] = {}
"""Levels by filter and record, with the CPU time of their fit: a smoother has the levels of the filter before it."""


def fit(model: DiscreteModel, record: Record, name: str, likelihood: Callable[..., Any]) -> tuple[Noise, float]:
    """Levels with the highest likelihood on the first third, for filters with derivatives.

    Args:
        model: The discrete model.
        record: All observations.
        name: Of the filter.
        likelihood: Value and gradient from logs of standard deviations, intervals, times, told θ and readings.

    Returns:
        The levels, and CPU time of their fit that was spent before this call.
    """
    if not model.learns_noise:
        return model.told, 0.0
    seen = hashlib.sha256(record.observations.tobytes() + record.theta.tobytes()).hexdigest()
    key = f"{name}, θ {'unknown' if model.learns_theta else 'told'}", seen
    if key in FITTED:
        return FITTED[key]
    started = time.process_time()
    noise = _fit(model, record, likelihood)
    FITTED[key] = noise, time.process_time() - started
    return noise, 0.0


def _fit(model: DiscreteModel, record: Record, likelihood: Callable[..., Any]) -> Noise:
    third = record.first(len(record.times) // 3)
    data = third.intervals, third.times, third.theta, model.readings(third)[0]

    def value_and_gradient(logs: Array) -> tuple[float, Array]:
        value, gradient = likelihood(logs, *data)
        return float(value), np.asarray(gradient)

    return model.noise_of(np, maximise(value_and_gradient, model.first_guess(third)))


def fit_on_grid(model: DiscreteModel, record: Record, log_evidence: Callable[[Noise, Record], float]) -> Noise:
    """Levels that are told, or the best of a grid on the first third, for filters without derivatives."""
    if not model.learns_noise:
        return model.told
    third = record.first(len(record.times) // 3)

    def value(logs: Array) -> float:
        try:
            return log_evidence(model.noise_of(np, logs), third)
        except (np.linalg.LinAlgError, ValueError):  # the filter has diverged
            return -np.inf

    return model.noise_of(np, search(value, model.first_guess(third), model.fitted_x))


def maximise(value_and_gradient: Callable[[Array], tuple[float, Array]], start: Array) -> Array:
    """Logs of standard deviations with the highest likelihood, by L-BFGS; the best point with a finite likelihood."""
    best, lowest = start, np.inf

    def objective(logs: Array) -> tuple[float, Array]:
        nonlocal best, lowest
        value, gradient = value_and_gradient(logs)
        away = (logs - start) / WIDTH
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return 1e12, np.zeros_like(logs)
        found = 0.5 * float(away @ away) - value
        if found < lowest:
            best, lowest = logs.copy(), found
        return found, away / WIDTH - gradient

    minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
    return best


def search(value: Callable[[Array], float], start: Array, states: int) -> Array:
    """The best of a grid of two factors, one of all process and one of all observation levels."""
    best, highest = start, -np.inf
    for x in GRID:
        for y in GRID:
            logs = start + np.concatenate([np.full(states, x), np.full(len(start) - states, y)])
            found = value(logs)
            if found > highest:
                best, highest = logs, found
    return best
