"""What a filter found in the record of one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from studies.arena.model import DiscreteModel, Record

Array = NDArray[Any]


class Beliefs(NamedTuple):
    """Filtered means and standard deviations of states (T, d), parameters at the end (p,), and the log-score."""

    mean: Array
    sd: Array
    theta: Array
    theta_sd: Array
    log_score: float  # mean log-density of one-step forecasts of y


Filter = Callable[[Record], Beliefs]
"""A filter that is ready; only its first call compiles."""


def beliefs_of(model: DiscreteModel, means: Any, variances: Any, log_evidence: float) -> Beliefs:
    """Beliefs from means and variances of the whole vector, (T, n)."""
    means, sds = np.asarray(means, float), np.sqrt(np.maximum(np.asarray(variances, float), 0.0))
    state, theta = slice(model.d), slice(model.d, model.d + model.p)
    return Beliefs(means[:, state], sds[:, state], means[-1, theta], sds[-1, theta], log_evidence / len(means))
