"""How good beliefs are: errors, and how often the truth is within two standard deviations of what is believed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SDS = 2.0
"""Intervals reach so many standard deviations to either side."""
EXACT = math.erf(SDS / math.sqrt(2))
"""How often the truth is within them if beliefs are Gaussian and right: 95.4 %."""


class Beliefs(NamedTuple):
    """What a method believed of all seeds, thinned: at (T,) indices of observations, states (seeds, T, dim) and
    parameters (seeds, T, p), and how it ended.

    precision_x, precision_y: as learned, in units of the true one, the worst of the channels; (seeds,), NaN for methods
    that are told. lost: (seeds,), whether the run diverged.
    """

    at: Array
    mean: Array
    sd: Array
    theta: Array
    theta_sd: Array
    precision_x: Array
    precision_y: Array
    lost: Array


class Share(NamedTuple):
    """A share with its binomial interval."""

    value: float
    low: float
    high: float


def wilson(share: float, trials: float, z: float = 1.959963984540054) -> Share:
    """A share that was found in so many trials, with Wilson's interval; 95 % unless z is another."""
    if trials <= 0 or not math.isfinite(share):
        return Share(math.nan, math.nan, math.nan)
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    centre, scale = share + z * z / (2 * trials), 1 + z * z / trials
    return Share(share, max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale))


def squared_error(mean: Array, truth: Array) -> Array:
    """(seeds, T, dim) each → (seeds,)."""
    found: Array = np.square(mean - truth).mean(axis=(1, 2))
    return found


def covered(mean: Array, sd: Array, truth: Array) -> Array:
    """The share of numbers within two standard deviations of what is believed, by seed; (seeds, ...) → (seeds,)."""
    with np.errstate(invalid="ignore"):
        inside = np.abs(mean - truth) <= SDS * sd
    found: Array = inside.reshape(len(inside), -1).mean(axis=1)
    return found


def worst(mean: Array, truth: Array) -> Array:
    """The largest error of a seed's parameters, (seeds, p) → (seeds,)."""
    found: Array = np.abs(mean - truth).max(axis=-1)
    return found
