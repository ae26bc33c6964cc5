"""The weights of a bank of hypotheses, and the noise levels that its rows start from.

Arrays are (K, B): K rows for each of B batch elements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcnet.model.hypotheses import GIVEN, Hypotheses

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
LOST = 1e4  # what a row loses in nats with an observation that it cannot take in, while others can
NEAR = 25.0 * (1 + 1e-9)  # rows with a contrast start from process factors up to this, and its inverse


class Bank(NamedTuple):
    """What is known of each row, as of the last review."""

    log_weight: Array  # −∞ for rows that are not in use
    evidence: Array  # sum of the log-evidence then
    walk: Indices  # 0 for parameters that stand still, else the number of the walk
    robust: Indices  # whether outliers are expected
    age: Indices  # observations since the row was started or restarted

    @property
    def rows(self) -> int:
        return len(self.log_weight)

    def check(self, rows: int, batch: int, walks: int) -> None:
        """Raise `ValueError` unless all arrays are (rows, batch), and there are walks of all numbers."""
        for name, value in self._asdict().items():
            if value.shape != (rows, batch):
                raise ValueError(f"bank/{name} has shape {value.shape}")
        if not ((self.walk >= 0) & (self.walk <= walks)).all():
            raise ValueError("bank/walk")

    def assumes_like(self, other: Bank, source: Indices) -> bool:
        """Whether all rows have the walk and the outliers of those rows (K, B) of another bank."""
        columns = np.arange(source.shape[1])
        pairs = ((self.walk, other.walk), (self.robust, other.robust))
        return all(np.array_equal(mine, others[source, columns]) for mine, others in pairs)

    def has_rows(self, evidence: Array) -> bool:
        """Whether rows are left in each batch element, given the sums of log-evidence (K, B)."""
        return bool(np.isfinite(self._grown(evidence)).any(0).all())

    def _grown(self, evidence: Array) -> Array:
        """Log-weights with the evidence since the last review; −∞ for rows that have stopped."""
        grown = self.log_weight + (evidence - self.evidence)
        return np.where(np.isfinite(grown), grown, -np.inf)

    def now(self, evidence: Array) -> Array:
        """Log-weights, normalised, given the sums of log-evidence (..., K, B) at some times since the last review."""
        return normalise(self._grown(evidence))

    def weights(self, evidence: Array, limit: float) -> Array:
        """Weights (..., K, B) then; 0 for rows that are more than `limit` nats behind the best one."""
        now = self.now(evidence)
        weight = np.where(now > now.max(-2, keepdims=True) - limit, np.exp(now), 0.0)
        normalised: Array = weight / weight.sum(-2, keepdims=True).clip(np.finfo(np.float64).tiny)
        return normalised

    def total(self, evidence: Array) -> Array:
        """Log-evidence of the mixture since the last review, (..., B); NaN where no row is left."""
        total: Array = log_sum_exp(self._grown(evidence))[..., 0, :]
        return np.where(np.isfinite(total), total, np.nan)


def evidence(sums: Array, missed: Array) -> Array:
    """Sums of log-evidence of rows, less LOST for each observation that a row has lost and another one has not.

    Args:
        sums: Sums of the log-evidence of what rows took in, (..., K, B).
        missed: Number of observations that they have lost, (..., K, B); NaN for rows that have stopped.
    """
    return sums - LOST * (missed - np.fmin.reduce(missed, -2, keepdims=True))


def log_sum_exp(values: Array) -> Array:
    """log Σ exp over the rows (..., K, B); (..., 1, B). −∞ where there are none."""
    top = values.max(-2, keepdims=True)
    some = top > -np.inf
    safe = np.where(some, top, 0.0)
    total: Array = np.where(some, safe + np.log(np.exp(values - safe).sum(-2, keepdims=True) + ~some), -np.inf)
    return total


def normalise(log_weight: Array) -> Array:
    """Log-weights (..., K, B) whose weights sum to 1, or are all 0."""
    total = log_sum_exp(log_weight)
    normalised: Array = log_weight - np.where(np.isfinite(total), total, 0.0)
    return normalised


class Levels(NamedTuple):
    """Logs of the factors of variances that rows start from: one for all process noise and one for all observation
    noise, (K,), and further ones of single elements of the process noise, (K, e)."""

    process: Array
    observation: Array
    contrast: Array


def start(hypotheses: Hypotheses, batch: int, peaks: Array, elements: int = 0) -> tuple[Bank, Levels]:
    """The first bank, and the levels of its rows.

    peaks: Weights of the peaks (k,) that the first belief is divided into; those of one noise level are neighbours.
    elements: Number of elements of the process noise whose levels are contrasted.
    """
    robust = (0, 1) if hypotheses.outliers else (0,)
    contrast = math.log(hypotheses.contrast) * (2 * np.eye(elements) - 1)
    alike = np.zeros(elements)
    of_process, of_observations = hypotheses.process_factors or GIVEN, hypotheses.observation_factors or GIVEN
    near = [factor for factor in of_process if 1 / NEAR <= factor <= NEAR]
    grid = [(a, b, alike, r) for a in of_process for b in of_observations for r in robust]
    grid += [(a, 1.0, element, r) for element in contrast for a in near for r in robust]
    columns = [np.repeat(np.array(column), len(peaks), 0) for column in zip(*grid, strict=True)]
    process, observation, kinds = np.log(columns[0]), np.log(columns[1]), columns[3]
    tilt = hypotheses.process_tilt * process + hypotheses.observation_tilt * observation
    weight = np.repeat((tilt + np.tile(np.log(peaks), len(grid)))[:, None], batch, 1)
    zero = np.zeros(weight.shape, dtype=np.int64)
    bank = Bank(normalise(weight), np.zeros_like(weight), zero, np.repeat(kinds[:, None], batch, 1), zero)
    return bank, Levels(process, observation, columns[2])
