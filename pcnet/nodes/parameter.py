"""Parameter nodes: slow Gaussian beliefs about the parameters of a flow or mapping."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.errors import GraphError
from pcnet.guidance import instead
from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import AnyLink, Parametrises, Predicts, Weighs
from pcnet.model.messages import GaussianPrediction, ParameterPrediction, ParameterTransition, PredictionError
from pcnet.model.node import BatchSpec, Energy, ErrorShape, Indefinite, Node, Recordable
from pcnet.model.protocols import Assumes, ForecastContext, Forecasts, ForecastStart
from pcnet.nodes.flow import check_predictors
from pcnet.nodes.slow_belief import SlowBelief
from pcnet.numerics.coloured_noise import Noise, NoiseSpec
from pcnet.numerics.estimators import GradientAccumulator, ParameterEstimator
from pcnet.numerics.kernels import White
from pcnet.numerics.laplace import covariance_of, laplace_posterior, largest_eigenvalue, standard_deviations
from pcnet.numerics.precision import DenseCurvature
from pcnet.settings import NotNegativeVector, PositiveVector, Vector, check_shapes, check_size, number, settings


class ParameterState(NamedTuple):
    """The belief with its prior, the last transition, and gradients and curvatures since the last update."""

    mean: Tensor  # (B, p)
    precision: Tensor  # (B, p, p)
    log_det_covariance: Tensor  # log|Σ|, (B,)
    prior_mean: Tensor
    prior_precision: Tensor
    prior_log_det_covariance: Tensor
    transition: ParameterTransition
    walk: Tensor  # variance of their random walk per unit of time, (B, p)
    sent: Tensor  # the weighted error that a Kalman state above took in last, (B, 1, p)
    accumulated: GradientAccumulator


class ParameterBound(NamedTuple):
    """Constants of a run; mean and standard deviation of the prior are (B, p)."""

    estimator: ParameterEstimator
    mean: Tensor
    sd: Tensor
    walk: Tensor  # variance of the random walk per unit of time, (B, p)
    online: bool  # whether the parameters are learned during a run, and not after passes over recorded data
    joint: bool  # whether they are part of the belief of the state below


Context = NodeContext[ParameterState, ParameterBound]


@settings
class ParameterNode(SlowBelief, Forecasts, Assumes):
    """A Gaussian belief about parameters θ with prior N(η, sd²). Local energy ½(θ − η)ᵀΠ_θ(θ − η).

    η is the sum of the predictions of states above. Without any it is `mean`, and `renew_prior` makes the posterior the
    prior. Parameters of a single Kalman state, without an estimator, are part of the joint belief of that state: they
    are learned at every observation, and this node holds their prior and shows their marginal.

    Args:
        mean: Prior mean, (..., p) with leading batch dimensions. The belief starts there in any case.
        sd: Prior standard deviation, one number or (..., p).
        walk_sd: Standard deviation of a random walk of θ per √time, one number or (..., p), for parameters of a Kalman
            state that drift.
        estimator: How θ is learned, apart from states. Unless given: together with the state for parameters of one
            Kalman state, by `Newton` for those of several, and by the paper's `RobbinsMonro` for others.
        curvature: "gauss-newton" or "exact".
        indefinite: What to do where the exact curvature is not positive definite.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = instead(
        {
            "value init initial prior_mean mu": "mean=, the prior mean",
            "std sigma prior_sd variance cov": "sd=, the prior standard deviation",
            "drift walk": "walk_sd=, per √time",
        }
    )
    _: KW_ONLY
    mean: Vector
    sd: PositiveVector
    walk_sd: NotNegativeVector = number(0.0)
    estimator: ParameterEstimator | None = None
    curvature: Literal["gauss-newton", "exact"] = "gauss-newton"
    indefinite: Indefinite = "clamp"
    role: ClassVar[str] = "parameter"
    kind: ClassVar[str] = "parameter"
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Parametrises,)
    child_of: ClassVar[tuple[type[AnyLink], ...]] = (Predicts,)
    informed_by: ClassVar[type[Parametrises | Weighs]] = Parametrises
    assumption: ClassVar[str] = "walk"

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if self.mean.dim() == 0:
            object.__setattr__(self, "mean", self.mean[None])
        check_size(self.title, "sd", self.sd, self.n_parameters)
        check_size(self.title, "walk_sd", self.walk_sd, self.n_parameters)
        check_shapes(self.title, mean=self.mean, sd=self.sd, walk_sd=self.walk_sd)

    @property
    def n_parameters(self) -> int:
        return self.mean.shape[-1]

    def describe(self) -> str:
        return f"{self.n_parameters} parameter{'s' if self.n_parameters > 1 else ''}"

    @property
    def error_shape(self) -> ErrorShape:
        """Shape of the error of what is predicted of it: values only, without motion."""
        return ErrorShape(1, self.n_parameters)

    def check(self, links: Neighbours, like: Tensor) -> None:
        if not links.below:
            raise GraphError(f"{self.title} parametrises nothing: add graph.parametrises({self.name}, state)")
        estimator = self.resolve_estimator(links)
        if bool((self.walk_sd > 0).any()) and not self.joins_belief(links.below):
            raise GraphError(
                f"{self.title} has a walk_sd, which is for parameters of one KalmanStateNode, without an estimator; "
                "for others use estimator=pcnet.estimators.Newton(forgetting_factor=...)"
            )
        states = [link.parent for link in links.above_of(Predicts)]
        kalman = [state for state in states if state.sends_covariance]
        check_predictors(self, states)
        if estimator.needs_curvature and states and not kalman:
            keeps = f"{type(estimator).__name__} keeps its first prior; use RobbinsMonro, or a KalmanStateNode above"
            raise GraphError(f"{self.title} is predicted from above, but {keeps}")
        if kalman and not estimator.needs_curvature:
            needs = f"{kalman[0].name!r}, which needs its covariance; use estimator=pcnet.estimators.Newton()"
            raise GraphError(f"{self.title} is predicted by {needs}")

    def check_fit(self, links: Neighbours) -> None:
        self.resolve_estimator(links).check_batch(self.title)
        if links.above_of(Predicts):
            raise GraphError(
                f"{self.title} is predicted from above, so it moves within a pass and not after it; name the nodes "
                "that are updated after a pass: pcnet.batch(['noise_y', …])"
            )

    def joins_belief(self, below: tuple[AnyLink, ...]) -> bool:
        return self.estimator is None and len(below) == 1 and below[0].child.joins_parameters

    def noise_spec(self, above: tuple[AnyLink, ...], spec: BatchSpec) -> NoiseSpec:
        return NoiseSpec(White(), self.n_parameters, 0)

    def bind(self, links: Neighbours, spec: BatchSpec) -> ParameterBound:
        estimator = spec.expand_to_batch(self.resolve_estimator(links))
        sd = spec.expand_vector(self.sd, self.n_parameters)
        walk = spec.expand_vector(self.walk_sd, self.n_parameters) ** 2
        joint = not links.joint.isdisjoint(links.below)
        return ParameterBound(estimator, spec.expand(self.mean, 1), sd, walk, links.online, joint)

    def init(self, bound: ParameterBound, spec: BatchSpec) -> ParameterState:
        mean, sd = bound.mean, bound.sd
        precision, log_det = (sd**-2).diag_embed(), 2 * sd.log().sum(-1)
        eye = spec.eye(self.n_parameters)
        transition = ParameterTransition(spec.zeros(), mean, eye, torch.zeros_like(eye))
        accumulated = bound.estimator.init(mean, precision)
        belief, none = (mean, precision, log_det), spec.zeros(1, self.n_parameters)
        return ParameterState(*belief, *belief, transition, bound.walk, none, accumulated)

    def assume(self, bound: ParameterBound, state: ParameterState, value: Tensor) -> ParameterState:
        """A walk with this variance per unit of time, in prior variances, beside that of the settings."""
        return state._replace(walk=bound.walk + value[:, None] * bound.sd**2)

    def initialise(self, ctx: Context) -> ParameterState:
        """Start at the prediction of a Kalman state above."""
        return self._transition_from_above(ctx)._replace(sent=ctx.state.sent) if self._kalman_above(ctx) else ctx.state

    def prediction(self, ctx: Context, link: AnyLink) -> ParameterPrediction:
        moves = ctx.bound.estimator.needs_curvature and ctx.bound.online
        if ctx.bound.joint:  # only a state above moves what is part of the belief of another
            moves = moves and self._kalman_above(ctx)
        transition = ctx.state.transition if moves else None
        prior = partial(SlowBelief.covariance, self, ctx)
        return ParameterPrediction(ctx.state.mean, prior, transition, ctx.state.walk)

    def mean_now(self, ctx: Context) -> Tensor:
        """The mean of the belief, (B, p): if it is part of that of a state, its marginal there."""
        if not ctx.bound.joint:
            return ctx.state.mean
        mean: Tensor = ctx.error(ctx.below[0]).mean
        return mean

    def covariance(self, ctx: Context) -> Tensor:
        if not ctx.bound.joint:
            return super().covariance(ctx)
        covariance: Tensor = ctx.error(ctx.below[0]).covariance
        return covariance

    def error(self, ctx: Context, link: AnyLink) -> PredictionError:
        prior = ctx.state.prior_precision
        weighted = torch.bmm(prior, (self.mean_now(ctx) - self.predicted(ctx))[..., None]).mT
        noise = Noise(ctx.bound.sd**2, White(), 0)

        def eliminated() -> PredictionError:
            """Π − ΠΛ⁻¹Π: what is left of the precision of the prior once the posterior is known."""
            left = prior - prior @ self.covariance(ctx) @ prior
            return PredictionError(weighted, lambda: DenseCurvature(left), noise=noise)

        if not link.parent.sends_covariance:
            return PredictionError(weighted, lambda: DenseCurvature(prior), noise=noise)
        return PredictionError(weighted, lambda: DenseCurvature(prior), None, eliminated, noise, sent=ctx.state.sent)

    def _kalman_above(self, ctx: Context) -> bool:
        return any(link.parent.sends_covariance for link in ctx.above_of(Predicts))

    def predicted(self, ctx: Context) -> Tensor:
        predicted = [ctx.message(link).value[:, 0] for link in ctx.above_of(Predicts)]
        return sum(predicted[1:], predicted[0]) if predicted else ctx.state.prior_mean

    def accumulate(self, ctx: Context) -> ParameterState:
        return ctx.state if ctx.bound.joint else super().accumulate(ctx)

    def update(self, ctx: Context) -> ParameterState:
        """Nothing for parameters that are part of the belief of a state: they are updated there."""
        return ctx.state if ctx.bound.joint else super().update(ctx)

    def update_covariance(self, ctx: Context) -> ParameterState:
        return ctx.state if ctx.bound.joint else super().update_covariance(ctx)

    def energy(self, ctx: Context) -> Energy:
        """None for parameters that are part of the belief of a state: predictive likelihoods there contain it."""
        return Energy() if ctx.bound.joint else super().energy(ctx)

    def renew_prior(self, ctx: Context) -> ParameterState:
        if self._kalman_above(ctx):
            return self._transition_from_above(ctx)
        if ctx.bound.joint:
            return ctx.state
        state, estimator = ctx.state, ctx.bound.estimator
        if ctx.above_of(Predicts):
            return state  # the prior comes from above
        if not estimator.needs_curvature:
            return super().renew_prior(ctx)  # type: ignore[no-any-return]
        accumulated = estimator.forget(state.accumulated)
        left, before = laplace_posterior(accumulated.precision), covariance_of(state.precision)
        gain = before @ left.precision
        belief = (state.mean, left.precision, left.log_det_covariance)
        transition = ParameterTransition(state.transition.number + 1, state.mean, gain, before - gain @ before)
        return ParameterState(*belief, *belief, transition, state.walk, state.sent, accumulated)

    def _transition_from_above(self, ctx: Context) -> ParameterState:
        """Take the prediction of the Kalman state above as belief and prior, with its relation to the belief before.

        With v₀ the covariance so far, v₁ the predicted one and c the covariance between both: gain = c v₁⁻¹,
        residual_covariance = v₀ − gain v₁ gainᵀ.
        """
        (link,) = ctx.above_of(Predicts)
        message, state = ctx.message(link), ctx.state
        assert isinstance(message, GaussianPrediction)
        v0, v1 = self.covariance(ctx), message.distribution.covariance
        found = laplace_posterior(covariance_of(v1))
        gain = message.lagged_covariance @ found.precision
        explained = gain @ v1 @ gain.mT
        # where the distribution above is not normal, its moments may explain more than there was
        precision = covariance_of(v0) if ctx.bound.joint else state.precision
        most = largest_eigenvalue(precision, explained).clamp_min(1.0)[:, None, None]
        number = state.transition.number + 1
        transition = ParameterTransition(number, self.mean_now(ctx), gain / most.sqrt(), v0 - explained / most)
        belief = (message.distribution.mean, found.precision, found.log_det_covariance)
        accumulated = state.accumulated._replace(precision=found.precision, prior_precision=found.precision)
        # what the state above has taken in; the error of the new prediction begins at zero
        sent = torch.bmm(state.prior_precision, (self.mean_now(ctx) - state.prior_mean)[..., None]).mT
        return ParameterState(*belief, *belief, transition, state.walk, sent, accumulated)

    def forecast_start(self, ctx: Context) -> ForecastStart:
        return ForecastStart(self.mean_now(ctx), self.covariance(ctx))

    def offset(self, ctx: Context, now: ForecastContext) -> Tensor:
        """The deviation from the predictions of states above, which stays while these move."""
        return now.own - sum(now.of(Predicts), torch.zeros_like(now.own))

    def forecast_message(self, ctx: Context, link: AnyLink, now: ForecastContext) -> Tensor:
        return now.own + sum(now.of(Predicts), torch.zeros_like(now.own))

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        return {
            "mean": Recordable(("dimension",), self.mean_now),
            "sd": Recordable(("dimension",), self.covariance, standard_deviations),
            "covariance": Recordable(("dimension", "dimension_"), self.covariance),
        }
