"""What a filter found in the record of one seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from studies.arena.model import DiscreteModel, Noise, Record, without_gaps

Array = NDArray[Any]
AHEAD = 10
"""Observations from the origin of a forecast to what it is of."""
ORIGINS = 10
"""Number of forecasts of a record, from its second half."""


class Ahead(NamedTuple):
    """Means and standard deviations of states some observations after each origin, (origins, d)."""

    mean: Array
    sd: Array
    sd_y: Array | None = None  # of observations, where a package gives it, (origins, m)


Forecasts = Callable[[Sequence[int], int], Ahead]
"""Makes forecasts from origins, so many observations ahead, when they are asked for."""


class Beliefs(NamedTuple):
    """Means and standard deviations of states (T, d), parameters at the end (p,), and the log-score."""

    mean: Array
    sd: Array
    theta: Array
    theta_sd: Array
    log_score: float  # mean log-density of one-step forecasts of y
    noise: Noise | None = None  # levels that were learned
    ahead: Forecasts | None = None
    further_seconds: float = 0.0  # CPU time in other processes, or before


Filter = Callable[[Record], Beliefs]
"""A filter that is ready; only its first call compiles."""


def origins(count: int) -> list[int]:
    """Observations that forecasts start from, in a record of so many."""
    return [int(place) for place in np.linspace(count // 2, count - 1 - AHEAD, ORIGINS)]


def beliefs_of(
    model: DiscreteModel, record: Record, noise: Noise, means: Any, covariances: Any, log_evidence: float, kind: str
) -> Beliefs:
    """Beliefs of a Gaussian filter from means (T, n) and covariances (T, n, n) of the whole vector.

    kind: How its forecasts are made, "extended" or "unscented".
    """
    means, covariances = np.asarray(means, float), np.asarray(covariances, float)
    sds = np.sqrt(np.maximum(np.diagonal(covariances, axis1=1, axis2=2), 0.0))
    state, theta = slice(model.d), slice(model.d, model.d + model.p)

    def ahead(places: Sequence[int], steps: int) -> Ahead:
        start = means[list(places)], covariances[list(places)]
        return forecast(model, record, noise, *start, places, steps, kind)

    count = int(np.isfinite(record.observations).any(1).sum())
    return Beliefs(
        *(means[:, state], sds[:, state], means[-1, theta], sds[-1, theta]),
        log_evidence / count,
        noise if model.learns_noise else None,
        ahead,
    )


def filled(apply: Filter, dt: float) -> Filter:
    """A filter that gets missing observations in gaps of more than two intervals, so that its steps are not longer."""

    def application(record: Record) -> Beliefs:
        whole, places = without_gaps(record, dt)
        found = apply(whole)
        return found._replace(mean=found.mean[places], sd=found.sd[places], ahead=None)

    return application


def forecast(
    model: DiscreteModel,
    record: Record,
    noise: Noise,
    mean: Array,
    covariance: Array,
    places: Sequence[int],
    steps: int,
    kind: str,
) -> Ahead:
    """Moments of the states some observations after origins by linearisation at the mean, or by cubature points.

    Args:
        model: The discrete model.
        record: For the times, and parameters that are told.
        noise: Levels.
        mean: At each origin, (O, n).
        covariance: At each origin, (O, n, n).
        places: Observations that are origins.
        steps: Observations ahead.
        kind: "extended" or "unscented".
    """
    n, mean = model.dim, mean.T
    offsets = np.concatenate([np.eye(n), -np.eye(n)], 1)  # (n, 2n)
    for k in range(1, steps + 1):
        now = [place + k for place in places]
        interval, time, theta = record.intervals[now], record.times[now], record.theta[now].T
        if kind == "extended":
            away = 1e-5 * offsets[:, :, None]
            moved = model.step(np, mean[:, None] + away, interval, time, theta[:, None])
            slope = (moved[:, :n] - moved[:, n:]).transpose(2, 0, 1) / 2e-5
            mean, covariance = model.step(np, mean, interval, time, theta), slope @ covariance @ slope.mT
        else:
            values, vectors = np.linalg.eigh(covariance)
            root = vectors * np.sqrt(n * np.maximum(values, 0.0))[:, None]
            away = (root @ offsets).transpose(1, 2, 0)
            moved = model.step(np, mean[:, None] + away, interval, time, theta[:, None])
            mean = moved.mean(1)
            rest = (moved - mean[:, None]).transpose(2, 0, 1)
            covariance = rest @ rest.mT / (2 * n)
        covariance = covariance + np.stack([model.process_covariance(np, noise, each) for each in interval])
    sd = np.sqrt(np.maximum(np.diagonal(covariance, axis1=1, axis2=2), 0.0))
    return Ahead(mean.T[:, : model.d], sd[:, : model.d])
