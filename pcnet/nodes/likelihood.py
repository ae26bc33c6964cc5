"""Sensory nodes with a likelihood of one's own: counts, choices, heavy tails."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.traced import TracedFunction
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Predicts, Weighs
from pcnet.model.messages import GaussianPrediction, PredictionError, ScoreError
from pcnet.model.node import BatchSpec, Energy, Recordable
from pcnet.nodes.precision import PrecisionNode
from pcnet.nodes.sensory import Context, SensoryNode
from pcnet.numerics.coloured_noise import Noise, NoiseSpec
from pcnet.numerics.kernels import White
from pcnet.numerics.precision import DenseCurvature
from pcnet.settings import settings

NEWTON_STEPS = 12  # Newton steps to the mode of likelihood times predictive distribution


class Laplace(NamedTuple):
    """The likelihood around a prediction, and the errors that follow from it."""

    prediction: Tensor  # where it is expanded, (B, dim): the prediction or, below a Kalman state, the posterior mode
    log_density: Tensor  # log-likelihood (B,) or, below a Kalman state, Laplace's approximation of the log-evidence
    weighted: Tensor  # error for the parent, (B, dim)
    curvature: Tensor  # precision for the parent, (B, dim, dim)
    exact: Tensor  # −∂²ℓ/∂p², (B, dim)


@settings
class LikelihoodNode(SensoryNode):
    """Observations with a likelihood p(y | p) of one's own, independent for each channel, given the prediction p.

    A subclass writes `log_likelihood` in torch operations; derivatives are traced from it. It works below both kinds of
    state: below a generalised state the error is ∂ℓ/∂p with curvature −∂²ℓ/∂p² (negative values count as 0), below a
    Kalman state the update is that of the mode of ℓ(p) + log N(p; m, V) with Laplace's covariance and evidence. A
    precision node is optional; if there is one, its log-precision λ is passed on, and learned.
    """

    def __post_init__(self) -> None:
        SensoryNode.__post_init__(self)
        if self.orders != 1:
            raise SettingError(f"{self.title}: a likelihood is one of values; use orders=1")

    @abstractmethod
    def log_likelihood(self, y: Tensor, prediction: Tensor, log_precision: Tensor) -> Tensor:
        """log p(y | p, λ) of each channel; arguments and result are (B, dim). λ is 0 without a precision node."""

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
        found = self.laplace(ctx)
        if isinstance(link, Predicts):
            negative, noise = found.exact.clamp_max(0.0), Noise(torch.zeros_like(found.weighted), White(), 0)
            curvature = DenseCurvature(found.curvature)
            return PredictionError(found.weighted[:, None], lambda: curvature, negative.diag_embed, None, noise)
        given, there = self._given(ctx)
        p, ones = found.prediction[:, None], there.to(given)[:, None]
        slope = self._function.parameter_slope(p, given, 1)[:, 0, :, self.dim :]
        bend = self._function.parameter_contracted_hessian(p, given, ones)
        weighted = torch.where(there, slope.diagonal(dim1=-2, dim2=-1), 0.0)
        second = torch.zeros_like(weighted) if bend is None else -bend.diagonal(dim1=-2, dim2=-1)[:, self.dim :]
        return ScoreError(weighted, lambda: torch.where(there, second, 0.0).clamp_min(0.0))

    def energy(self, ctx: Context) -> Energy:
        return Energy(accuracy=self.laplace(ctx).log_density)

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape = ("order", "dimension")
        return {
            "observation": Recordable(shape, lambda ctx: self.where_seen(ctx, ctx.state.observation, torch.nan)),
            "prediction": Recordable(shape, lambda ctx: self._prediction(ctx)[:, None]),
            "weighted_error": Recordable(shape, lambda ctx: self.laplace(ctx).weighted[:, None]),
        }

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

    def laplace(self, ctx: Context) -> Laplace:
        """The likelihood around the prediction; computed once for the same observation and messages."""
        messages = [ctx.message(link) for link in ctx.above_of(Predicts)]
        given, there = self._given(ctx)
        keys = [each if isinstance(each, GaussianPrediction) else each.value for each in messages]

        def compute() -> Laplace:
            mean = self._prediction(ctx)
            if not isinstance(messages[0], GaussianPrediction):
                value, first, second = self._derivatives(mean, given, there)
                return Laplace(mean, value.sum(-1), first, second.clamp_min(0.0).diag_embed(), second)
            covariance = messages[0].distribution.covariance
            eye = torch.eye(self.dim, dtype=mean.dtype, device=mean.device)
            p = mean
            for _ in range(NEWTON_STEPS):  # p ← m + (I + VA)⁻¹V(g + A(p − m))
                _, first, second = self._derivatives(p, given, there)
                a = second.clamp_min(0.0)
                right = torch.bmm(covariance, (first + a * (p - mean))[..., None])
                p = mean + torch.linalg.solve(eye + covariance * a[:, None], right)[..., 0]
            value, first, second = self._derivatives(p, given, there)
            a = second.clamp_min(0.0)
            joint = eye + a[..., None] * covariance  # I + AV
            curvature = torch.linalg.solve(joint, a.diag_embed())
            log_evidence = value.sum(-1) - 0.5 * ((p - mean) * first).sum(-1) - 0.5 * torch.linalg.slogdet(joint)[1]
            return Laplace(p, log_evidence, first, curvature, second)

        links = ctx.above_of(Weighs)
        level = ctx.message(links[0]).value if links else None
        return ctx.cached("laplace", compute, ctx.state.observation, ctx.state.seen, *keys, level)
