"""The messages between nodes: predictions go down the links, precision-weighted errors come back up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from pcnet.numerics.coloured_noise import Noise
from pcnet.numerics.kalman import PredictiveDistribution
from pcnet.numerics.kernels import Kernel
from pcnet.numerics.low_rank import LowRankDistribution, LowRankPrecision
from pcnet.numerics.precision import DenseCurvature, DensePrecision, Precision

Curvature = Precision | DenseCurvature | DensePrecision | LowRankPrecision
"""The curvature of an energy with respect to a prediction, with its structure."""
C_co = TypeVar("C_co", covariant=True)


class PointPrediction(NamedTuple):
    """A predicted value without its uncertainty."""

    value: Tensor  # (B, rows, dim)


class GaussianPrediction(NamedTuple):
    """A predictive distribution of d values of one order, from a node that carries a covariance."""

    distribution: PredictiveDistribution | LowRankDistribution
    lagged_covariance: (
        Tensor  # with the values predicted before the last time update, (B, d, d); empty for observations
    )

    @property
    def value(self) -> Tensor:
        """The predicted mean, (B, 1, d)."""
        return self.distribution.mean[:, None]


class CategoryPrediction(NamedTuple):
    """The categories that a state may be in, and how one follows another; s stages for each of k categories."""

    values: Tensor  # of the cause in each category, (B, k, p)
    transition: Tensor  # probabilities, from rows to columns, (B, ks, ks)
    first: Tensor  # probabilities at the first observation, (B, k, s)
    probability: Tensor  # present ones, (B, k, s)

    @property
    def value(self) -> Tensor:
        """Mean of the values, (B, 1, p)."""
        return torch.bmm(self.probability.sum(-1)[:, None], self.values)


class CategoryPosterior(NamedTuple):
    """The block of categories in a joint belief of a state and them."""

    probability: Tensor  # of each stage of each category, (B, k, s)
    before: Tensor  # the same before the last observation, (B, k, s)

    @property
    def value(self) -> Tensor:
        """Probability of each category, (B, k)."""
        return self.probability.sum(-1)

    @property
    def weighted(self) -> Tensor:
        """What the last observation added to the probability of each category, (B, k)."""
        return (self.probability - self.before).sum(-1)


class ParameterTransition(NamedTuple):
    """How a belief about parameters θ became one about θ⁺; for parameters that stand still θ⁺ is θ.

    Given θ⁺, the mean of θ is mean + gain (θ⁺ − η⁺), with covariance residual_covariance.
    """

    number: Tensor  # counts the changes, (B,)
    mean: Tensor  # (B, p)
    gain: Tensor  # (B, p, p)
    residual_covariance: Tensor  # (B, p, p)


@dataclass(frozen=True, eq=False)
class ParameterPrediction:
    """The parameters of a function with their covariance, (B, p, p)."""

    value: Tensor  # (B, p)
    compute_covariance: Callable[[], Tensor]
    transition: ParameterTransition | None = None  # their last change, for parameters that are learned online
    walk: Tensor | float = 0.0  # variance of their random walk per unit of time, (B, p)

    @cached_property
    def covariance(self) -> Tensor:
        return self.compute_covariance()


@dataclass(frozen=True, eq=False)
class NoisePrediction:
    """The precision of an error, what is known of the noise behind it, and the covariance of learned log-variances.

    The precision is computed at its first use: below a Kalman state nobody asks for it.
    """

    compute_value: Callable[[], Precision]
    kernel: Kernel
    noise: Noise | None = None  # variance and kernel of the noise, None if channels are coupled
    compute_covariance: Callable[[], Tensor] | None = None  # (B, levels, levels)

    @cached_property
    def value(self) -> Precision:
        return self.compute_value()

    @cached_property
    def covariance(self) -> Tensor | None:
        return None if self.compute_covariance is None else self.compute_covariance()


@dataclass(frozen=True, eq=False)
class Error(Generic[C_co]):
    """The error of a prediction p, in the units of p.

    With E the energy of the sender: weighted = −∂E/∂p, precision ≈ ∂²E/∂p² (never indefinite), and
    precision + remainder = ∂²E/∂p² exactly. Curvatures are computed at their first use.
    """

    weighted: Tensor
    compute_precision: Callable[[], C_co]
    compute_remainder: Callable[[], Tensor | None] | None = None

    @cached_property
    def precision(self) -> C_co:
        return self.compute_precision()

    @cached_property
    def remainder(self) -> Tensor | None:
        return None if self.compute_remainder is None else self.compute_remainder()


class Alternatives(NamedTuple):
    """Errors of k other predictions of the same observation, and how probable they make it."""

    weighted: Tensor  # (k·B, dim)
    precision: Tensor  # (k·B, dim, dim)
    log_likelihood: Tensor  # of each of them, (k·B,)
    of_sent: Tensor  # of the prediction that was sent, (B,)


@dataclass(frozen=True, eq=False)
class PredictionError(Error[Curvature]):
    """The error of a predicted value, for the state or cause that predicted it.

    eliminated: the error that is left once the sender has answered it by a step of its own, if it does.
    """

    compute_eliminated: Callable[[], PredictionError] | None = None
    noise: Noise | None = None  # that of the sender alone, if `precision` is that of a predictive distribution
    noise_inflation: Tensor | None = None  # factor of its variance at this observation, (B, dim), for outliers
    outliers: Tensor | None = None  # their expected share, (B,)
    sent: Tensor | None = None  # `weighted` as it was taken in last, if the sender has a new prediction since
    compare: Callable[[Tensor, Tensor], Alternatives] | None = None
    """What the error is of other predictions, of means (k·B, dim) and covariances, if it is not linear in them."""

    @cached_property
    def eliminated(self) -> PredictionError:
        return self if self.compute_eliminated is None else self.compute_eliminated()


class RelayedPrediction(NamedTuple):
    """What a cause in the belief of a state passes on to it: the messages from above itself, by link."""

    value: Tensor  # its last known mean, (B, 1, dim)
    messages: Mapping[Any, Any]


@dataclass(frozen=True, eq=False)
class ClusterPosterior:
    """The block of a cause in a joint belief, and the errors for the nodes above it, by link.

    weighted: precision-weighted error, the last change of the mean over the covariance; (B, dim). Observations need not
    depend on the cause itself: it is corrected along with the state that it drives.
    """

    mean: Tensor  # (B, dim)
    change: Tensor  # of the mean by the last observation, (B, dim)
    covariance: Tensor  # (B, dim, dim)
    errors: Mapping[Any, Any]

    @cached_property
    def weighted(self) -> Tensor:
        solved: Tensor = torch.linalg.solve(self.covariance, self.change)
        return solved

    @property
    def value(self) -> Tensor:
        """The mean."""
        return self.mean


@dataclass(frozen=True, eq=False)
class BlockPosterior:
    """The block of parameters in a joint belief of a state and them.

    weighted: precision-weighted error, the last change of the mean over the covariance; (B, p).
    """

    mean: Tensor  # (B, p)
    change: Tensor  # of the mean by the last observation, (B, p)
    compute_covariance: Callable[[], Tensor]

    @cached_property
    def weighted(self) -> Tensor:
        solved: Tensor = torch.linalg.solve(self.covariance, self.change)
        return solved

    @cached_property
    def covariance(self) -> Tensor:
        """(B, p, p)."""
        return self.compute_covariance()


class ScoreError(Error[Tensor]):
    """The error of parameters or log-precisions: weighted (B, n), precision (B, n, n) or its diagonal (B, n)."""
