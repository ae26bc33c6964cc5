"""Observations of other families than the Gaussian: counts, successes, choices, heavy tails."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import ObservationError, SettingError
from pcnet.model.links import Weighs
from pcnet.model.node import Recordable
from pcnet.model.protocols import ForecastsObservations
from pcnet.nodes.likelihood import LikelihoodNode
from pcnet.nodes.sensory import Context, SensoryState
from pcnet.numerics.branching import holds
from pcnet.numerics.moment_matching import TiltedMoments, normal_quadrature, weighed_moments
from pcnet.settings import Positive, PositiveVector, at_least_1d, check_size, number, settings

SCORING_STEPS, FARTHEST = 5, 2.0  # to the mode of a posterior, and the longest of them
SCALES = 64  # of the quadrature over the scale of a Student-t
SMALLEST = 1e-300  # probability whose logarithm is taken


@settings
class FamilyNode(LikelihoodNode, ForecastsObservations):
    """Observations whose mean is a function of a linear predictor p, the inverse of a link function.

    The mapping from a state gives p, such as a log-rate. Forecasts, draws and errors are those of the observations.
    """

    @abstractmethod
    def response(self, p: Tensor, log_precision: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the observation, given the linear predictor; all (..., dim)."""

    @abstractmethod
    def draw(self, p: Tensor, log_precision: Tensor, generator: torch.Generator) -> Tensor:
        """An observation, given the linear predictor (..., dim)."""

    @abstractmethod
    def guess(self, y: Tensor) -> Tensor:
        """The linear predictor that an observation alone asks for, about."""

    @abstractmethod
    def score(self, y: Tensor, p: Tensor, log_precision: Tensor) -> tuple[Tensor, Tensor]:
        """∂ℓ/∂p, and the Fisher information −E[∂²ℓ/∂p²]."""

    def mode(self, given: Tensor, there: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """By Fisher scoring, from the average of what is predicted and what is observed."""
        y, level = given.chunk(2, -1)
        guess = self.guess(torch.where(there, y, 0.0))
        information = torch.where(there, self.score(y, guess, level)[1], 0.0)
        p = (mean + variance * information * guess) / (1 + variance * information)
        for _ in range(SCORING_STEPS):
            slope, information = (torch.where(there, each, 0.0) for each in self.score(y, p, level))
            step = (variance * slope - (p - mean)) / (1 + variance * information)
            p = p + step.clamp(-FARTHEST, FARTHEST)
        information = torch.where(there, self.score(y, p, level)[1], 0.0)
        return p, variance / (1 + variance * information)

    def check_values(self, y: Tensor) -> Tensor:
        """Whether values are possible, elementwise."""
        return torch.ones_like(y, dtype=torch.bool)

    possible: ClassVar[str] = "any"  # what values are possible, in errors

    def observe(self, ctx: Context) -> SensoryState:
        assert ctx.observation is not None
        y = ctx.observation
        if not holds((self.check_values(y) | torch.isnan(y)).all()):
            wrong = y[~(self.check_values(y) | torch.isnan(y))][0].item()
            raise ObservationError(
                f"{self.title} has an observation, {wrong:g}, that is not one of {self.possible}; NaN if missing"
            )
        return super().observe(ctx)

    def forecast_observation(self, ctx: Context, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = (mean.new_tensor(each) for each in normal_quadrature())
        p = mean[..., None] + variance.clamp_min(0.0).sqrt()[..., None] * x
        expected, spread = self.response(p.movedim(-1, 0), self._log_precision(ctx))
        weight = weight.view(-1, *(1,) * (expected.dim() - 1))
        total = (weight * expected).sum(0)
        return total, (weight * (spread + (expected - total) ** 2)).sum(0)

    def draw_observation(self, ctx: Context, p: Tensor, generator: torch.Generator) -> Tensor:
        level = self._log_precision(ctx)
        return self.draw(p, level.repeat(p.shape[-2] // len(level), 1), generator)

    def _log_precision(self, ctx: Context) -> Tensor:
        """Present log-precisions, (B, dim); 0 without a precision node."""
        links = ctx.above_of(Weighs)
        return ctx.message(links[0]).value.channel.log() if links else torch.zeros_like(ctx.state.observation[:, 0])

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        def prediction(ctx: Context) -> Tensor:
            return self.response(self._prediction(ctx), self._log_precision(ctx))[0][:, None]

        def error(ctx: Context) -> Tensor:
            return self.where_seen(ctx, ctx.state.observation - prediction(ctx), torch.nan)

        shape = ("order", "dimension")
        own = {"prediction": Recordable(shape, prediction), "error": Recordable(shape, error)}
        return {**super().quantities, **own}


@settings
class PoissonNode(FamilyNode):
    """Counts y ~ Poisson(exposure · rate(p)).

    Args:
        link: rate = exp(p) for "log", log(1 + exp(p)) for "softplus".
        exposure: Time or number of trials that a count is of, such as the width of a bin; one number or (..., dim).
    """

    _: KW_ONLY
    link: Literal["log", "softplus"] = "log"
    exposure: PositiveVector = number(1.0)
    possible: ClassVar[str] = "0, 1, 2, …"

    def __post_init__(self) -> None:
        LikelihoodNode.__post_init__(self)
        check_size(self.title, "exposure", self.exposure, self.dim)
        if self.exposure.dim() > 1:
            raise SettingError(f"{self.title}: exposure must be the same for all batch elements")

    def check_values(self, y: Tensor) -> Tensor:
        return (y >= 0) & (y == y.round())

    def _log_rate(self, p: Tensor) -> Tensor:
        log_rate = p if self.link == "log" else _softplus(p).clamp_min(SMALLEST).log()
        return log_rate + at_least_1d(self.exposure).to(p).log()

    def log_likelihood(self, y: Tensor, prediction: Tensor, log_precision: Tensor) -> Tensor:
        log_rate = self._log_rate(prediction)
        return y * log_rate - log_rate.exp() - torch.lgamma(y + 1)

    def guess(self, y: Tensor) -> Tensor:
        rate = (y + 0.5) / at_least_1d(self.exposure).to(y)
        return rate.log() if self.link == "log" else rate + (-(-rate).exp()).log1p()

    def score(self, y: Tensor, p: Tensor, log_precision: Tensor) -> tuple[Tensor, Tensor]:
        rate = self._log_rate(p).exp()
        if self.link == "log":
            return y - rate, rate
        slope = torch.sigmoid(p) / _softplus(p).clamp_min(SMALLEST)  # of the log of the rate
        return (y - rate) * slope, rate * slope**2

    def response(self, p: Tensor, log_precision: Tensor) -> tuple[Tensor, Tensor]:
        rate = self._log_rate(p).exp()
        return rate, rate

    def draw(self, p: Tensor, log_precision: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(self._log_rate(p).exp(), generator=generator)


@settings
class BinomialNode(FamilyNode):
    """Successes y ~ Binomial(trials, probability(p)); with one trial, a Bernoulli variable, 0 or 1.

    Args:
        link: probability = 1/(1 + exp(−p)) for "logit", the normal distribution function for "probit".
        trials: Number of trials.
    """

    _: KW_ONLY
    link: Literal["logit", "probit"] = "logit"
    trials: int = Field(default=1, ge=1)
    possible: ClassVar[str] = "0, 1, … up to the number of trials"

    def check_values(self, y: Tensor) -> Tensor:
        return (y >= 0) & (y <= self.trials) & (y == y.round())

    def log_likelihood(self, y: Tensor, prediction: Tensor, log_precision: Tensor) -> Tensor:
        log_yes, log_no = self._log_probability(prediction), self._log_probability(-prediction)
        found = y * log_yes + (self.trials - y) * log_no
        if self.trials == 1:
            return found
        ways = math.lgamma(self.trials + 1) - torch.lgamma(y + 1) - torch.lgamma(self.trials - y + 1)
        return found + ways

    def _log_probability(self, p: Tensor) -> Tensor:
        if self.link == "logit":
            return -_softplus(-p)
        return (0.5 * torch.erfc(-p / math.sqrt(2))).clamp_min(SMALLEST).log()

    def guess(self, y: Tensor) -> Tensor:
        odds = ((y + 0.5) / (self.trials - y + 0.5)).log()
        return odds if self.link == "logit" else 0.6 * odds

    def score(self, y: Tensor, p: Tensor, log_precision: Tensor) -> tuple[Tensor, Tensor]:
        log_yes, log_no = self._log_probability(p), self._log_probability(-p)
        yes, no = log_yes.exp(), log_no.exp()
        if self.link == "logit":
            return y * no - (self.trials - y) * yes, self.trials * yes * no
        density = (-0.5 * p**2).exp() / math.sqrt(2 * math.pi)
        up, down = density / yes.clamp_min(SMALLEST), density / no.clamp_min(SMALLEST)
        return y * up - (self.trials - y) * down, self.trials * up * down

    def response(self, p: Tensor, log_precision: Tensor) -> tuple[Tensor, Tensor]:
        probability = self._log_probability(p).exp()
        return self.trials * probability, self.trials * probability * (1 - probability)

    def draw(self, p: Tensor, log_precision: Tensor, generator: torch.Generator) -> Tensor:
        probability = self._log_probability(p).exp()
        each = torch.rand(self.trials, *p.shape, generator=generator, dtype=p.dtype)
        return (each < probability).sum(0).to(p)


@settings
class ChoiceNode(BinomialNode):
    """A choice y among categories 0 … dim, as binary choices one after the other: this one, or one of the rest.

    P(y = k) = π_k Π_{j<k} (1 − π_j) with the probability π_j of the linear predictor p_j (stick-breaking). There is one
    predictor fewer than categories. An observation is the number of the category.

    Args:
        dim: Number of categories minus 1.
    """

    possible: ClassVar[str] = "the numbers of the categories, from 0 to dim"

    def __post_init__(self) -> None:
        LikelihoodNode.__post_init__(self)
        if self.trials != 1:
            raise SettingError(f"{self.title}: a choice is one trial; use trials=1")

    @property
    def observation_size(self) -> int:
        return 1

    def check_values(self, y: Tensor) -> Tensor:
        return (y >= 0) & (y <= self.dim) & (y == y.round())

    def preprocess(self, observation: Tensor) -> Tensor:
        """The outcome of each binary choice: 0 before the category, 1 for it, and missing after it."""
        places = torch.arange(self.dim, dtype=observation.dtype, device=observation.device)
        taken = (places == observation).to(observation)
        return torch.where(places <= observation, taken, torch.nan)

    def forecast_observation(self, ctx: Context, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities of all categories, (..., dim + 1), and the variances of their indicators."""
        each = super().forecast_observation(ctx, mean, variance)[0]
        none = torch.cat([torch.ones_like(each[..., :1]), (1 - each).cumprod(-1)], -1)
        chosen = none * torch.cat([each, torch.ones_like(each[..., :1])], -1)
        return chosen, chosen * (1 - chosen)

    def draw(self, p: Tensor, log_precision: Tensor, generator: torch.Generator) -> Tensor:
        each = super().draw(p, log_precision, generator)
        return (each.cumsum(-1) == 0).sum(-1, keepdim=True).to(p)


@settings
class StudentTNode(FamilyNode):
    """Observations y = p + noise of a Student t distribution, which allows for outliers.

    Args:
        degrees: Degrees of freedom ν; the smaller, the heavier the tails.
        scale: Scale of the noise. With a precision node, its variance at the centre is scale² exp(−λ), and is learned.
    """

    _: KW_ONLY
    degrees: float = Field(default=4.0, gt=0)
    scale: Positive = number(1.0)

    def __post_init__(self) -> None:
        LikelihoodNode.__post_init__(self)
        if self.scale.dim():
            raise SettingError(f"{self.title}: scale must be one number")

    def _log_variance(self, log_precision: Tensor) -> Tensor:
        return 2 * math.log(float(self.scale)) - log_precision

    def log_likelihood(self, y: Tensor, prediction: Tensor, log_precision: Tensor) -> Tensor:
        nu, log_variance = self.degrees, self._log_variance(log_precision)
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
        squares = (y - prediction) ** 2 * (-log_variance).exp()
        return constant - 0.5 * log_variance - 0.5 * (nu + 1) * (1 + squares / nu).log()

    def guess(self, y: Tensor) -> Tensor:
        return y

    def score(self, y: Tensor, p: Tensor, log_precision: Tensor) -> tuple[Tensor, Tensor]:
        nu, noise = self.degrees, self._log_variance(log_precision).exp()
        error = y - p
        return (nu + 1) * error / (nu * noise + error**2), ((nu + 1) / (nu + 3) / noise).expand_as(p)

    def tilted_moments(self, given: Tensor, there: Tensor, mean: Tensor, variance: Tensor) -> TiltedMoments:
        """Moments as those of a mixture over the scale: y ~ N(p, σ²/w) with w ~ Gamma(ν/2, ν/2).

        The integral over log w is by the trapezoidal rule, from where the prior of w is to where y asks for it.
        """
        y, level = given.chunk(2, -1)
        nu, noise = self.degrees, self._log_variance(level).exp()
        error = torch.where(there, y - mean, 0.0)
        asked = ((nu + 1) / (nu + error**2 / noise)).log()
        width = 8 * math.sqrt(2 / (nu + 1))
        low, high = asked.clamp_max(0.0) - width - 40 / (nu + 1), asked.clamp_min(0.0) + width
        share = torch.linspace(0, 1, SCALES, dtype=mean.dtype, device=mean.device)[:, None]
        z = low[:, None] + (high - low)[:, None] * share  # log w, (B, k, d)
        prior = 0.5 * nu * (z - z.exp()) + 0.5 * nu * math.log(nu / 2) - math.lgamma(nu / 2)
        total = variance[:, None] + noise[:, None] * (-z).exp()
        fit = -0.5 * (error[:, None] ** 2 / total + (2 * math.pi * total).log())
        gain = variance[:, None] / total
        step = ((high - low) / (SCALES - 1)).log()[:, None]
        centres, spreads = mean[:, None] + gain * error[:, None], variance[:, None] * (1 - gain)
        found = weighed_moments(centres, prior + fit + step, spreads)
        seen = (there, torch.zeros_like(mean)), (there, mean), (there, variance)
        return TiltedMoments(*(torch.where(a, value, b) for value, (a, b) in zip(found, seen, strict=True)))

    def response(self, p: Tensor, log_precision: Tensor) -> tuple[Tensor, Tensor]:
        nu, noise = self.degrees, self._log_variance(log_precision).exp()
        return p, (noise * (nu / (nu - 2) if nu > 2 else math.inf)).expand_as(p)

    def draw(self, p: Tensor, log_precision: Tensor, generator: torch.Generator) -> Tensor:
        seed = int(torch.randint(2**31, (1,), generator=generator))
        noise = np.random.default_rng(seed).standard_t(self.degrees, tuple(p.shape))
        return p + (0.5 * self._log_variance(log_precision)).exp() * torch.as_tensor(noise).to(p)


def _softplus(p: Tensor) -> Tensor:
    """log(1 + exp(p)), without overflow."""
    return p.clamp_min(0.0) + (-p.abs()).exp().log1p()
