"""Estimators: how parameters and log-precisions are learned from accumulated gradients."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.numerics.integrators import column
from pcnet.numerics.laplace import laplace_posterior
from pcnet.settings import Fraction, NotNegative, Numbers, Positive, number, settings

FORGETTING_OFFSET = 10  # offset t₀ of decaying forgetting, φ_j = decaying_forgetting/(j + t₀)
CARRY_OVER = 0.75  # share of the excess of a clipped step that carries over to the next step
RECENT = 8  # memory, in steps, of the recent gradient and curvature that a covariance reset looks at
ONE_PERCENT_QUANTILE, FIVE_PERCENT_QUANTILE = 2.326, 1.645  # upper quantiles of the standard normal distribution


class GradientAccumulator(NamedTuple):
    """What an estimator has accumulated. All but the first four are empty in estimators without curvature."""

    gradient: Tensor  # since the last step, (B, n)
    observations: Tensor  # since the last step, (B,)
    steps: Tensor  # since the start, (B,)
    regularised: Tensor  # number of regularised posteriors since the start, (B,)
    curvature: Tensor  # since the last step, (B, n, n)
    precision: Tensor  # of the belief, (B, n, n)
    prior_precision: Tensor  # of the initial prior, (B, n, n)
    residual: Tensor  # gradient that carries over from clipped steps, (B, n)
    recent_gradient: Tensor  # discounted sum over the last steps, (B, n)
    recent_curvature: Tensor  # discounted sum over the last steps, (B, n, n)

    @classmethod
    def zeros(cls, like: Tensor) -> Self:
        """An empty accumulator without curvatures, for a mean like (B, n)."""
        zero = like.new_zeros(like.shape[0])
        return cls(torch.zeros_like(like), zero, zero, zero, *([like.new_zeros(len(like), 0, 0)] * 6))


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
        zero, none = torch.zeros_like(precision), empty.gradient
        return GradientAccumulator(*empty[:4], zero, precision, precision, none, none, zero)

    def initial_mean(self, mean: Tensor, sd: Tensor) -> Tensor:
        """The initial estimate (B, n) for a prior with this mean and standard deviation."""
        return mean

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
    forgetting and resets have no effect there.

    Args:
        forgetting_factor: Constant part of φ, the share of the precision that is forgotten after each step.
        decaying_forgetting: Decaying part of φ, decaying_forgetting/(j + 10) after step j.
        covariance_reset: Forget more if recent gradients contradict the belief. If χ² = gᵀ(C + CL⁻¹C)⁻¹g, with g and C
            the gradient and curvature of the last steps, exceeds its 1 % limit, the precision is scaled towards the
            prior by limit/χ² before the step. This recovers parameters that jump.
    """

    forgetting_factor: Fraction = number(0.0)
    decaying_forgetting: NotNegative = number(0.0)
    covariance_reset: bool = False
    needs_curvature = True

    def step(self, accumulated: GradientAccumulator) -> tuple[Tensor, GradientAccumulator]:
        accumulated = accumulated._replace(
            recent_gradient=(1 - 1 / RECENT) * accumulated.recent_gradient + accumulated.gradient,
            recent_curvature=(1 - 1 / RECENT) * accumulated.recent_curvature + accumulated.curvature,
        )
        precision = self._previous_precision(accumulated) + accumulated.curvature
        factor = torch.linalg.cholesky_ex(laplace_posterior(precision).precision)[0]
        gradient = (accumulated.gradient + accumulated.residual)[..., None]
        change, excess = self._limit(-torch.cholesky_solve(gradient, factor)[..., 0], precision, accumulated)
        return change, accumulated._replace(
            gradient=torch.zeros_like(change),
            residual=-torch.bmm(precision, excess[..., None])[..., 0],
            observations=torch.zeros_like(accumulated.observations),
            steps=accumulated.steps + 1,
            curvature=torch.zeros_like(precision),
            precision=precision,
        )

    def forget(self, accumulated: GradientAccumulator) -> GradientAccumulator:
        phi = (self.forgetting_factor + self.decaying_forgetting / (accumulated.steps + FORGETTING_OFFSET)).clamp_max(1)
        precision = torch.lerp(accumulated.precision, accumulated.prior_precision, phi[:, None, None])
        return accumulated._replace(precision=precision)

    def _previous_precision(self, accumulated: GradientAccumulator) -> Tensor:
        """The precision before this step, after a possible reset, (B, n, n)."""
        if not self.covariance_reset:
            return accumulated.precision
        return reset_covariance(accumulated, accumulated.recent_gradient, ONE_PERCENT_QUANTILE)

    def _limit(self, step: Tensor, precision: Tensor, accumulated: GradientAccumulator) -> tuple[Tensor, Tensor]:
        """A step (B, n) within the limits, and the excess that carries over."""
        return step, torch.zeros_like(step)


@settings
class NoiseScoring(Newton):
    """Fisher scoring of log-precisions: `Newton` with steps made for noise levels.

    A step |Δ| > 1 is compressed to log(1 + |Δ|) + 1 − log 2: noise with 50 times the expected variance has a gradient
    like a step of 49, where log 50 is right. Steps are clipped to `max_step`; 75 % of the excess carries over. Clipping
    alone would bias the estimate towards low noise. Far from the true level single observations seem more informative
    than they are, so the precision is bounded by that of as many observations like the last ones.

    Args:
        max_step: Largest change of a log-precision in one step.
        step_limit_sd: For process noise, which is weakly observed and easily confused with a jump of parameters. Steps
            after the first are also clipped to this many standard deviations 1/√(jL) of step j, and only gradients
            towards less noise reset the covariance, at the 5 % limit. None by default.
        initial_noise_inflation: How many prior standard deviations the initial noise level is above its prior mean, in
            schedules that initialise precision nodes. Too much observation noise is corrected within few observations;
            too little makes other beliefs overconfident. Keep it small for process noise: with too much of it the
            states follow the observations and neither noise can be learned.
    """

    covariance_reset: bool = True
    max_step: Positive = number(1.0)
    step_limit_sd: Positive | None = None
    initial_noise_inflation: NotNegative = number(0.0)

    def initial_mean(self, mean: Tensor, sd: Tensor) -> Tensor:
        return mean - column(self.initial_noise_inflation, 1) * sd

    def _previous_precision(self, accumulated: GradientAccumulator) -> Tensor:
        before = accumulated.precision
        if self.covariance_reset and self.step_limit_sd is None:
            before = reset_covariance(accumulated, accumulated.recent_gradient, ONE_PERCENT_QUANTILE)
        elif self.covariance_reset:
            before = reset_covariance(accumulated, accumulated.recent_gradient.clamp_max(0.0), FIVE_PERCENT_QUANTILE)
        weight = RECENT * (1 - (1 - 1 / RECENT) ** (accumulated.steps + 1))  # of all steps in the recent sums
        like_recent = ((accumulated.steps + 1) / weight)[:, None, None] * accumulated.recent_curvature
        bound = (accumulated.prior_precision + like_recent).diagonal(dim1=-2, dim2=-1)
        scale = (bound / (before + accumulated.curvature).diagonal(dim1=-2, dim2=-1)).clamp_max(1.0).sqrt()
        return scale[:, :, None] * before * scale[:, None]

    def _limit(self, step: Tensor, precision: Tensor, accumulated: GradientAccumulator) -> tuple[Tensor, Tensor]:
        compressed = step.sign() * ((1 + step.abs()).log() + (1 - math.log(2)))
        step = torch.where(step.abs() > 1, compressed, step)
        limit = column(self.max_step, 1)
        if self.step_limit_sd is not None:
            steps = accumulated.steps[:, None]
            expected = 1 / ((steps + 1) * precision.diagonal(dim1=-2, dim2=-1)).sqrt()
            limit = torch.where(steps > 0, torch.minimum(limit, column(self.step_limit_sd, 1) * expected), limit)
        change = torch.maximum(torch.minimum(step, limit), -limit)
        return change, CARRY_OVER * (step - change)


def reset_covariance(accumulated: GradientAccumulator, gradient: Tensor, quantile: float) -> Tensor:
    """The precision (B, n, n), scaled towards the prior where a recent gradient (B, n) contradicts it.

    The limit of χ² is that of a normal quantile, by the Wilson–Hilferty approximation.
    """
    precision, curvature = accumulated.precision, accumulated.recent_curvature
    n = (curvature.diagonal(dim1=-2, dim2=-1) > 0).to(precision).sum(-1).clamp_min(1)  # informed dimensions
    expected = curvature + curvature @ torch.linalg.solve(precision, curvature)
    ridge = precision.diagonal(dim1=-2, dim2=-1) * torch.finfo(precision.dtype).eps ** 0.5  # for the others
    chi_squared = (gradient * torch.linalg.solve(expected + ridge.diag_embed(), gradient)).sum(-1)
    limit = n * (1 - 2 / (9 * n) + quantile * (2 / (9 * n)) ** 0.5) ** 3
    return torch.lerp(accumulated.prior_precision, precision, (limit / chi_squared).clamp_max(1.0)[:, None, None])
