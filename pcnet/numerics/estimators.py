"""Estimators: how parameters and log-precisions are learned from accumulated gradients."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.numerics.integrators import column
from pcnet.numerics.laplace import laplace_posterior
from pcnet.numerics.symmetric import known_symmetric
from pcnet.settings import Fraction, NotNegative, Numbers, Positive, number, settings

FORGETTING_OFFSET = 10  # offset t₀ of decaying forgetting, φ_j = decaying_forgetting/(j + t₀)


class GradientAccumulator(NamedTuple):
    """What an estimator has accumulated. All but the first four are empty in estimators without curvature."""

    gradient: Tensor  # since the last step, (B, n)
    observations: Tensor  # since the last step, (B,)
    steps: Tensor  # since the start, (B,)
    regularised: Tensor  # number of regularised posteriors since the start, (B,)
    curvature: Tensor  # since the last step, (B, n, n) or its diagonal (B, n)
    precision: Tensor  # of the belief, likewise
    prior_precision: Tensor  # of the initial prior, likewise
    moved: Tensor  # change of the mean since the start, (B, n)

    @classmethod
    def zeros(cls, like: Tensor) -> Self:
        """An empty accumulator without curvatures, for a mean like (B, n)."""
        zero, none = like.new_zeros(len(like)), like.new_zeros(len(like), 0, 0)
        return cls(torch.zeros_like(like), zero, zero, zero, none, none, none, like.new_zeros(len(like), 0))


class Averaging(ABC):
    """How the gradients between two steps are combined."""

    @abstractmethod
    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        """The running total with the gradient of one more observation, (B, n)."""

    @abstractmethod
    def read(self, accumulated: GradientAccumulator) -> Tensor:
        """The combined gradient, (B, n)."""


@settings
class Exponential(Averaging):
    """Exponential moving average, acc ← β acc + (1 − β)∇F. β = 0 uses the last observation alone."""

    beta: Fraction = number(0.0)

    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        return torch.lerp(gradient, total, column(self.beta, 1))

    def read(self, accumulated: GradientAccumulator) -> Tensor:
        return accumulated.gradient


@settings
class WindowMean(Averaging):
    """Mean gradient of all observations since the last step."""

    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        return total + gradient

    def read(self, accumulated: GradientAccumulator) -> Tensor:
        return accumulated.gradient / accumulated.observations.clamp_min(1)[:, None]


class ParameterEstimator(ABC):
    """Update rule of parameters or log-precisions."""

    needs_curvature: bool = False
    """Whether it accumulates gradient and curvature of the errors and tracks the precision of the belief itself.

    Otherwise it accumulates the gradient of the whole free energy, prior included.
    """

    def init(self, mean: Tensor, precision: Tensor) -> GradientAccumulator:
        """The empty accumulator for a prior with this mean (B, n) and precision (B, n, n)."""
        empty = GradientAccumulator.zeros(mean)
        if not self.needs_curvature:
            return empty
        return GradientAccumulator(
            *empty[:4], torch.zeros_like(precision), precision, precision, torch.zeros_like(mean)
        )

    def warm_start(self, accumulated: GradientAccumulator, prior_gradient: Tensor) -> GradientAccumulator:
        """The accumulator of another pass over recorded data: empty but for the gradient of the prior (B, n)."""
        return accumulated._replace(gradient=prior_gradient)

    def accumulate(
        self, accumulated: GradientAccumulator, gradient: Tensor, curvature: Tensor | None = None
    ) -> GradientAccumulator:
        """Add the gradient (B, n) and curvature (B, n, n) of one observation."""
        return accumulated._replace(
            gradient=self._add(accumulated.gradient, gradient),
            observations=accumulated.observations + 1,
            curvature=accumulated.curvature if curvature is None else accumulated.curvature + curvature,
        )

    def _add(self, total: Tensor, gradient: Tensor) -> Tensor:
        return total + gradient

    @abstractmethod
    def step(self, accumulated: GradientAccumulator) -> tuple[Tensor, GradientAccumulator]:
        """The change of the mean (B, n), and the accumulator with gradient and curvature cleared."""

    def forget(self, accumulated: GradientAccumulator) -> GradientAccumulator:
        """The accumulator after the posterior has become the prior."""
        return accumulated

    def check_batch(self, owner: str) -> None:
        """Raise SettingError if the estimator cannot take one large step after each pass over recorded data."""
        if not self.needs_curvature:
            raise SettingError(
                f"{owner} steps by {type(self).__name__}, small steps that are made for online use; for recorded data "
                "give it estimator=pcnet.estimators.Newton(), or give fit(..., estimator=pcnet.estimators.Newton())"
            )


@settings
class RobbinsMonro(ParameterEstimator):
    """Stochastic gradient descent, μ ← μ − α_j · accumulated ∇F with α_j = rate/(j + t0)^gamma at step j = 1, 2, …

    `averaging` combines the gradients between two steps; by default the last one counts alone.
    """

    rate: Positive = number(1e-4)
    t0: NotNegative = number(10.0)
    gamma: Numbers = number(0.3)
    averaging: Averaging = Exponential()

    def _add(self, total: Tensor, gradient: Tensor) -> Tensor:
        return self.averaging.add(total, gradient)

    def step(self, accumulated: GradientAccumulator) -> tuple[Tensor, GradientAccumulator]:
        steps = accumulated.steps + 1
        change = -(self.rate / (steps + self.t0) ** self.gamma)[:, None] * self.averaging.read(accumulated)
        return change, accumulated._replace(
            gradient=torch.zeros_like(accumulated.gradient),
            observations=torch.zeros_like(accumulated.observations),
            steps=steps,
        )


@settings
class Newton(ParameterEstimator):
    """Recursive Newton steps: μ ← μ − L⁻¹g, and when the posterior becomes the prior L ← (1 − φ)L + φP.

    g is the accumulated gradient of the errors since the last step. L is the prior precision P plus the curvatures of
    all errors so far, discounted by forgetting: the precision of the belief. With Gauss–Newton curvature and errors
    that are linear in the parameters this is recursive least squares, or a Kalman filter of constant parameters. The
    errors of a `GeneralisedStateNode` take its states as given, which makes the belief overconfident; those of a
    `KalmanStateNode` include their uncertainty.

    In `fit` each pass starts from L = P and g = P(μ − η), so that its step is a Gauss–Newton step on prior and data;
    forgetting has no effect there.

    Args:
        forgetting_factor: Constant part of φ, the share of the precision that is forgotten after each step.
        decaying_forgetting: Decaying part of φ, decaying_forgetting/(j + 10) after step j.
    """

    forgetting_factor: Fraction = number(0.0)
    decaying_forgetting: NotNegative = number(0.0)
    needs_curvature = True

    def step(self, accumulated: GradientAccumulator) -> tuple[Tensor, GradientAccumulator]:
        precision = accumulated.precision + accumulated.curvature
        factor = torch.linalg.cholesky_ex(laplace_posterior(precision).precision)[0]
        change = -torch.cholesky_solve(accumulated.gradient[..., None], factor)[..., 0]
        return change, accumulated._replace(
            gradient=torch.zeros_like(change),
            observations=torch.zeros_like(accumulated.observations),
            steps=accumulated.steps + 1,
            curvature=torch.zeros_like(precision),
            precision=precision,
        )

    def forget(self, accumulated: GradientAccumulator) -> GradientAccumulator:
        phi = (self.forgetting_factor + self.decaying_forgetting / (accumulated.steps + FORGETTING_OFFSET)).clamp_max(1)
        precision = torch.lerp(accumulated.precision, accumulated.prior_precision, phi[:, None, None])
        return accumulated._replace(precision=precision)


@settings
class NoiseScoring(Newton):
    """Recursive Fisher scoring of log-precisions: μ ← μ − clip(L⁻¹(g + φP(μ − η))), L ← P + (1 − φ)(L − P) + C.

    g and C are the score and its information since the last step j, N(η, P⁻¹) the prior, and φ = 1/(j + 1) the share of
    all information that is forgotten. It gives the last steps more weight, because far from the true level information
    is not what it will be. Where information is forgotten, the prior comes back: levels that the data no longer reveal
    return to it. Steps without information, while nothing is observed, do not count.

    Args:
        max_step: Largest change of a log-precision in one step.
        first: Number of observations before the first change.
        independent: Whether levels are learned one by one, as those of many channels: C is then a diagonal.
    """

    max_step: Positive = number(1.0)
    first: int = Field(default=2, ge=0)
    independent: bool = False

    def step(self, accumulated: GradientAccumulator) -> tuple[Tensor, GradientAccumulator]:
        curvature, gradient = accumulated.curvature, accumulated.gradient
        single = curvature.dim() == 2  # the diagonal of levels that are scored one by one
        informed = ((curvature if single else curvature.diagonal(dim1=-2, dim2=-1)).sum(-1) > 0).to(gradient)
        steps, prior = accumulated.steps + informed, accumulated.prior_precision
        forgotten = informed / (steps + 1)
        share = forgotten[:, None] if single else forgotten[:, None, None]
        before = accumulated.precision if single else known_symmetric(accumulated.precision)
        curvature = curvature if single else known_symmetric(curvature)
        precision = torch.addcmul(before + curvature, share, prior - before)
        limit = column(self.max_step, 1)
        if single:
            change = -(gradient + share * prior * accumulated.moved) / precision
        else:
            pull = torch.addcmul(gradient[..., None], share, prior @ accumulated.moved[..., None])
            change = -torch.cholesky_solve(pull, torch.linalg.cholesky_ex(precision)[0])[..., 0]
        change = torch.maximum(torch.minimum(change, limit), -limit)
        enough = accumulated.steps + accumulated.observations > self.first
        change = torch.where(enough[:, None], change, 0.0)
        return change, accumulated._replace(
            gradient=torch.zeros_like(gradient),
            observations=torch.zeros_like(accumulated.observations),
            steps=steps,
            curvature=torch.zeros_like(curvature),
            precision=precision,
            moved=accumulated.moved + change,
        )
