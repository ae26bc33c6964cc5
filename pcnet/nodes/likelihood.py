"""Sensory nodes with a likelihood of one's own: counts, choices, heavy tails."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.traced import TracedFunction
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Predicts, Weighs
from pcnet.model.messages import Alternatives, GaussianPrediction, PredictionError, ScoreError
from pcnet.model.node import BatchSpec, Energy, Recordable
from pcnet.nodes.precision import PrecisionNode
from pcnet.nodes.sensory import Context, SensoryNode
from pcnet.numerics.coloured_noise import Noise, NoiseSpec
from pcnet.numerics.kernels import White
from pcnet.numerics.moment_matching import (
    MatchedMoments,
    TiltedMoments,
    hermite_moments,
    match_moments,
    mode,
    normal_quadrature,
)
from pcnet.numerics.precision import DenseCurvature
from pcnet.settings import settings

LEAST_PRECISION = 1e-12  # that a weighted error is divided by


class LikelihoodErrors(NamedTuple):
    """The likelihood at a prediction, and the errors that follow from it."""

    prediction: Tensor  # (B, dim); below a Kalman state, the posterior mean
    log_density: Tensor  # log-likelihood (B,) or, below a Kalman state, the log-evidence
    weighted: Tensor  # error for the parent, (B, dim)
    curvature: Tensor  # precision for the parent, (B, dim, dim)
    exact: Tensor  # −∂²ℓ/∂p², (B, dim)
    variance: Tensor | None = None  # posterior variance of p below a Kalman state, (B, dim)


@settings
class LikelihoodNode(SensoryNode):
    """Observations with a likelihood p(y | p) of one's own, independent for each channel, given the prediction p.

    A subclass writes `log_likelihood` in torch operations; derivatives are traced from it. It works below both kinds of
    state: below a generalised state the error is ∂ℓ/∂p with curvature −∂²ℓ/∂p² (negative values count as 0). Below a
    Kalman state the update has the mean, the covariance and the evidence of exp(ℓ(p)) N(p; m, V), by quadrature; see
    `pcnet.numerics.moment_matching`. A precision node is optional; if there is one, its log-precision λ is passed on,
    and learned.
    """

    orders: int = Field(default=1, ge=1)
    takes_low_rank: ClassVar[bool] = False

    def __post_init__(self) -> None:
        SensoryNode.__post_init__(self)
        if self.orders != 1:
            raise SettingError(f"{self.title}: a likelihood is one of values; use orders=1")

    @abstractmethod
    def log_likelihood(self, y: Tensor, prediction: Tensor, log_precision: Tensor) -> Tensor:
        """log p(y | p, λ) of each channel; arguments and result are (..., dim). λ is 0 without a precision node."""

    @cached_property
    def _function(self) -> TracedFunction:
        """The log-likelihood as a function of the prediction, given observation and log-precision in one vector."""
        return TracedFunction(lambda p, given: self.log_likelihood(given.chunk(2, -1)[0], p, given.chunk(2, -1)[1]))

    def check(self, links: Neighbours, like: Tensor) -> None:
        if not links.above_of(Predicts):
            raise GraphError(f"{self.title} is predicted by nothing: add graph.predicts(state, {self.name})")
        for link in links.above_of(Weighs):
            if isinstance(link.parent, PrecisionNode) and link.parent.channels == "full":
                raise GraphError(f"the channels of {self.title} are independent, but {link.parent.name!r} couples them")

    def noise_spec(self, above: tuple[AnyLink, ...], spec: BatchSpec) -> NoiseSpec:
        """No Gaussian noise: all of it is in the likelihood."""
        return NoiseSpec(White(), self.dim, 0)

    def error(self, ctx: Context, link: AnyLink) -> PredictionError | ScoreError:
        found = self.likelihood_errors(ctx)
        if isinstance(link, Predicts):
            negative, noise = found.exact.clamp_max(0.0), Noise(torch.zeros_like(found.weighted), White(), 0)
            curvature = DenseCurvature(found.curvature)
            compare = None if found.variance is None else partial(self._compare, ctx, found)
            weighted = found.weighted[:, None]
            return PredictionError(weighted, lambda: curvature, negative.diag_embed, None, noise, compare=compare)
        given, there = self._given(ctx)
        if found.variance is None:
            slope, second = self._level_derivatives(found.prediction, given)
        else:  # the expectation over the posterior of p is the slope of the log-evidence
            nodes, weights = (given.new_tensor(each) for each in normal_quadrature())
            points = found.prediction[:, None] + found.variance.sqrt()[:, None] * nodes[:, None]
            repeated = given[:, None].expand(-1, len(nodes), -1).flatten(0, 1)
            parts = self._level_derivatives(points.flatten(0, 1), repeated)
            slope, second = ((weights[:, None] * part.view_as(points)).sum(1) for part in parts)
        weighted = torch.where(there, slope, 0.0)
        return ScoreError(weighted, lambda: torch.where(there, second, 0.0).clamp_min(0.0))

    def _level_derivatives(self, p: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """∂ℓ/∂λ and −∂²ℓ/∂λ² of each channel at p, (B, dim) each."""
        slope = self._function.parameter_slope(p[:, None], given, 1)[:, 0, :, self.dim :]
        bend = self._function.parameter_contracted_hessian(p[:, None], given, torch.ones_like(p)[:, None])
        second = torch.zeros_like(p) if bend is None else -bend.diagonal(dim1=-2, dim2=-1)[:, self.dim :]
        return slope.diagonal(dim1=-2, dim2=-1), second

    def energy(self, ctx: Context) -> Energy:
        return Energy(accuracy=self.likelihood_errors(ctx).log_density)

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape = ("order", "dimension")
        return {
            "observation": Recordable(shape, lambda ctx: self.where_seen(ctx, ctx.state.observation, torch.nan)),
            "prediction": Recordable(shape, lambda ctx: self._prediction(ctx)[:, None]),
            "error": Recordable(shape, lambda ctx: self.where_seen(ctx, self._newton_error(ctx)[:, None], torch.nan)),
            "weighted_error": Recordable(shape, lambda ctx: self.likelihood_errors(ctx).weighted[:, None]),
        }

    def _newton_error(self, ctx: Context) -> Tensor:
        """Weighted error over its precision, (B, dim): y − p for a Gaussian likelihood.

        Where the likelihood is not concave, the absolute value of the precision, so that the surprise is real.
        """
        found = self.likelihood_errors(ctx)
        return found.weighted / found.exact.abs().clamp_min(LEAST_PRECISION)

    def _prediction(self, ctx: Context) -> Tensor:
        """The sum of the predictions from above, (B, dim)."""
        values = [ctx.message(link).value[:, 0] for link in ctx.above_of(Predicts)]
        return sum(values[1:], values[0])

    def _given(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Observation and log-precision in one vector (B, 2 dim), and the channels that are observed (B, dim)."""
        y, there = ctx.state.observation[:, 0], ctx.state.seen > 0
        links = ctx.above_of(Weighs)
        level = ctx.message(links[0]).value.channel.log() if links else torch.zeros_like(y)
        return torch.cat([y, level], -1), there

    def _derivatives(self, p: Tensor, given: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ℓ, ∂ℓ/∂p and −∂²ℓ/∂p² of each channel at p, (B, dim) each; 0 where nothing is observed."""
        line = self._function.linearise(p[:, None], given, 1)
        hessian = self._function.contracted_hessian(p[:, None], given, torch.ones_like(p)[:, None])
        second = torch.zeros_like(p) if hessian is None else -hessian[:, 0].diagonal(dim1=-2, dim2=-1)
        parts = line.value[:, 0], line.jacobian.diagonal(dim1=-2, dim2=-1), second
        value, first, second = (torch.where(there, part, 0.0) for part in parts)
        return value, first, second

    def tilted_moments(self, given: Tensor, there: Tensor, mean: Tensor, variance: Tensor) -> TiltedMoments:
        """Moments of each channel of exp(ℓ(p)) N(p; mean, variance), (B, dim) each; by quadrature around the mode.

        given: observation and log-precision in one vector (B, 2 dim). there: channels that are observed, (B, dim).
        """
        centre, spread = self.mode(given, there, mean, variance)
        y, level = (each[:, None] for each in given.chunk(2, -1))
        seen = there[:, None]

        def log_likelihood(points: Tensor) -> Tensor:
            found = self.log_likelihood(y.expand_as(points), points, level.expand_as(points))
            return torch.where(seen, found, 0.0)

        return hermite_moments(log_likelihood, mean, variance, centre, spread)

    def mode(self, given: Tensor, there: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mode of exp(ℓ(p)) N(p; mean, variance) of each channel, and about the variance there; as `tilted_moments`."""
        return mode(lambda p: self._derivatives(p, given, there), mean, variance)

    def _compare(self, ctx: Context, found: LikelihoodErrors, mean: Tensor, covariance: Tensor) -> Alternatives:
        """The posteriors of k other predictions (k·B, dim), side by side."""
        k = len(mean) // len(found.log_density)
        given, there = (each.repeat(k, 1) for each in self._given(ctx))
        other = self._matched(given, there, mean, covariance)
        return Alternatives(other.weighted, other.precision, other.log_evidence, found.log_density)

    def _matched(self, given: Tensor, there: Tensor, mean: Tensor, covariance: Tensor) -> MatchedMoments:
        """The posterior of N(mean, covariance); given and there as in `tilted_moments`."""

        def tilted(m: Tensor, v: Tensor) -> TiltedMoments:
            return self.tilted_moments(given, there, m, v)

        def derivatives(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._derivatives(p, given, there)

        return match_moments(tilted, derivatives, mean, covariance, there)

    def likelihood_errors(self, ctx: Context) -> LikelihoodErrors:
        """The likelihood at the prediction; computed once for the same observation and messages."""
        messages = [ctx.message(link) for link in ctx.above_of(Predicts)]
        given, there = self._given(ctx)
        keys = [each if isinstance(each, GaussianPrediction) else each.value for each in messages]

        def compute() -> LikelihoodErrors:
            mean = self._prediction(ctx)
            if not isinstance(messages[0], GaussianPrediction):
                value, first, second = self._derivatives(mean, given, there)
                return LikelihoodErrors(mean, value.sum(-1), first, second.clamp_min(0.0).diag_embed(), second)
            covariance = messages[0].distribution.covariance
            found = self._matched(given, there, mean, covariance)
            exact = found.precision.diagonal(dim1=-2, dim2=-1)
            left = covariance - covariance @ found.precision @ covariance
            variance = left.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)
            return LikelihoodErrors(found.mean, found.log_evidence, found.weighted, found.precision, exact, variance)

        links = ctx.above_of(Weighs)
        level = ctx.message(links[0]).value if links else None
        return ctx.cached("likelihood", compute, ctx.state.observation, ctx.state.seen, *keys, level)
