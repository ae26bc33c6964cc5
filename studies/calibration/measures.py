"""Measures of beliefs: squared errors, coverage of intervals, and binomial intervals of shares."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SDS = 2.0
"""Half-width of intervals in standard deviations."""
NOMINAL_COVERAGE = math.erf(SDS / math.sqrt(2))
"""Coverage of these intervals for calibrated Gaussian beliefs: 95.4 %."""


class Beliefs(NamedTuple):
    """Beliefs of a method at every tenth observation, for all seeds.

    Attributes:
        at: Indices (T,) of the observations; everything else begins with the seeds.
        mean, sd: States, (seeds, T, dim).
        theta, theta_sd: Parameters, (seeds, T, p).
        precision_x, precision_y: Final precision over the true one, of the worst channel, (seeds,); NaN for methods
            that are given the noise.
        diverged: Whether the run diverged, (seeds,).
    """

    at: Array
    mean: Array
    sd: Array
    theta: Array
    theta_sd: Array
    precision_x: Array
    precision_y: Array
    diverged: Array


class Share(NamedTuple):
    """A share with its binomial confidence interval."""

    value: float
    low: float
    high: float


def wilson(share: float, trials: float, z: float = 1.959963984540054) -> Share:
    """Wilson's confidence interval of a share observed in a number of trials; 95 % by default."""
    if trials <= 0 or not math.isfinite(share):
        return Share(math.nan, math.nan, math.nan)
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    centre, scale = share + z * z / (2 * trials), 1 + z * z / trials
    return Share(share, max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))


def mean_squared_error(mean: Array, truth: Array) -> Array:
    """Mean squared error of each seed, (seeds, T, dim) → (seeds,)."""
    error: Array = np.square(mean - truth).mean(axis=(1, 2))
    return error


def coverage(mean: Array, sd: Array, truth: Array) -> Array:
    """Share of true values within two standard deviations of the mean, (seeds, ...) → (seeds,)."""
    with np.errstate(invalid="ignore"):
        inside = np.abs(mean - truth) <= SDS * sd
    share: Array = inside.reshape(len(inside), -1).mean(axis=1)
    return share


def largest_error(mean: Array, truth: Array) -> Array:
    """Largest absolute error of each seed, (seeds, p) → (seeds,)."""
    error: Array = np.abs(mean - truth).max(axis=-1)
    return error
