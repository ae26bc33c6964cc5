"""Maximum likelihood of noise levels on the first third of a record, for filters that are not told them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[Any]
WIDTH = 3.0  # standard deviation of a weak prior of the logs around the first guess, where a likelihood is flat
STEPS = 30
GRID = (-2.0, 0.0, 1.5)  # added to logs of the first guess, for filters without derivatives


def fit(value_and_gradient: Callable[[Array], tuple[float, Array]], start: Array) -> Array:
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
