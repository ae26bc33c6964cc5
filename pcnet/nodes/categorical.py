"""Categories: one of several values at a time, which predicts parameters below and switches now and then."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import AfterValidator
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.closed_form import Identity
from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import AnyLink, Drives, Predicts
from pcnet.model.messages import CategoryPosterior, CategoryPrediction, GaussianPrediction
from pcnet.model.node import BatchSpec, Energy, ErrorShape, Node, Recordable
from pcnet.model.protocols import ForecastContext, Forecasts
from pcnet.nodes.kalman_inputs import InputSpec
from pcnet.numerics.dwell_time import DwellTime
from pcnet.numerics.kalman import PredictiveDistribution
from pcnet.numerics.laplace import standard_deviations
from pcnet.settings import Fraction, Matrix, Vector, not_negative, settings

ROUNDING = 1e-6  # tolerance of the sum of probabilities


class CategoricalState(NamedTuple):
    """Probabilities, and the predicted moments of the parameters below."""

    probability: Tensor  # of each stage of each category, (B, k, s)
    predicted_mean: Tensor  # (B, p)
    predicted_covariance: Tensor  # with the parameters' own deviation, (B, p, p)
    lagged_covariance: Tensor  # with the parameters predicted before, (B, p, p)


class CategoricalBound(NamedTuple):
    """Constants of a run."""

    values: Tensor  # (B, k, p)
    transition: Tensor  # probabilities, (B, ks, ks)
    first: Tensor  # probabilities, (B, k, s)


Context = NodeContext[CategoricalState, CategoricalBound]


@settings
class CategoricalNode(Node[CategoricalState, CategoricalBound], Forecasts):
    """One of k categories at a time, each with its own values of the parameters below.

    `predict` applies the transition, p ← pT. `update` weighs the categories by the posterior of the parameters below.
    Downwards it sends the mean and covariance of the values (moment matching).

    It may drive a `SwitchingStateNode` instead, at every observation: its values are then those of the argument v of
    the flow f(x, v, θ). Category and state have one joint belief, which the state holds.

    Args:
        values: Values of parameters, or of v, in each category, (..., k, p).
        stay: Probability of staying in a category for one step of its clock; otherwise any other follows. Give one of
            stay, dwell and transition.
        dwell: Distribution of the time in a category, and which comes next; see `DwellTime`.
        transition: T itself, (..., n, n), from rows to columns. If n is a multiple of k, each category has n/k stages
            with the same values, those of the first category first.
        first: First probabilities of the categories, or of all n stages; uniform unless given.
    """

    _: KW_ONLY
    values: Matrix
    stay: Fraction | None = None
    dwell: DwellTime | None = None
    transition: Annotated[Matrix, AfterValidator(not_negative)] | None = None
    first: Annotated[Vector, AfterValidator(not_negative)] | None = None
    role: ClassVar[str] = "state"
    kind: ClassVar[str] = "categorical"
    sends_covariance: ClassVar[bool] = True
    required_actions: ClassVar[tuple[str, ...]] = ("predict", "update")

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if self.values.dim() < 2 or self.values.shape[-2] < 2:
            wanted = "(categories, parameters), with two categories or more: [[0.2], [0.35]]"
            raise SettingError(f"{self.title}: values must end in {wanted}")
        if sum(part is not None for part in (self.stay, self.dwell, self.transition)) != 1:
            options = "stay=0.9, dwell=DwellTime(mean=..., sd=...) and transition=[[...]]"
            raise SettingError(f"{self.title}: give one of {options}")
        k, t = self.categories, self.transition
        if t is not None and (t.dim() < 2 or t.shape[-1] != t.shape[-2] or t.shape[-1] % k):
            wanted = f"({k}, {k}), one row for each category, or in a multiple of it for stages"
            raise SettingError(f"{self.title}: transition must end in {wanted}, not in {tuple(t.shape)[-2:]}")
        if t is not None:
            self._check_sum(t, "each row of transition")
        try:
            n = k * self.stages
        except SettingError as error:
            raise SettingError(f"{self.title}: {error}") from None
        if self.first is not None:
            if self.first.dim() == 0 or self.first.shape[-1] not in (k, n):
                stages = f", or in {n}, one for each stage" if n > k else ""
                raise SettingError(f"{self.title}: first must end in {k}, one for each category{stages}")
            self._check_sum(self.first, "first")

    def _check_sum(self, probabilities: Tensor, what: str) -> None:
        sums = probabilities.sum(-1)
        off = (sums - 1).abs() > ROUNDING
        if bool(off.any()):
            raise SettingError(f"{self.title}: {what} must sum to 1, not to {sums[off][0].item():g}")

    @property
    def categories(self) -> int:
        """k."""
        return self.values.shape[-2]

    @property
    def stages(self) -> int:
        """Stages of each category."""
        if self.dwell is not None:
            return self.dwell.stages(self.categories)
        return 1 if self.transition is None else self.transition.shape[-1] // self.categories

    @property
    def error_shape(self) -> ErrorShape:
        """Shape of what it predicts."""
        return ErrorShape(1, self.values.shape[-1])

    def describe(self) -> str:
        return f"{self.categories} categories" + (f" of {self.stages} stages" if self.stages > 1 else "")

    def check_as_parent(self, link: AnyLink) -> None:
        shape = link.child.error_shape
        if isinstance(link, Drives) and link.child.switches:
            return
        if isinstance(link, Drives):
            raise GraphError(
                f"{self.title} drives states with several modes: make {link.child.name!r} a SwitchingStateNode"
            )
        if not isinstance(link, Predicts) or link.child.observes or shape is None:
            raise GraphError(f"{self.title} predicts parameters: graph.predicts({self.name}, ParameterNode(...))")
        if shape != self.error_shape:
            raise GraphError(f"{self.title} has values of {self.values.shape[-1]} parameters, not of {shape.dim}")
        if not isinstance(link.function, Identity):
            raise GraphError(f"{self.title} predicts its values themselves; leave out via")

    def check(self, links: Neighbours, like: Tensor) -> None:
        if len(links.below) != 1:
            raise GraphError(
                f"{self.title} must predict one node, graph.predicts({self.name}, parameters), or drive one, "
                f"graph.drives({self.name}, SwitchingStateNode(...))"
            )

    def bind(self, links: Neighbours, spec: BatchSpec) -> CategoricalBound:
        k, s = self.categories, self.stages
        first = torch.full((k,), 1 / k, dtype=torch.float64) if self.first is None else self.first
        if first.shape[-1] == k:
            first = first.repeat_interleave(s, -1) / s
        probability = spec.expand(first, 1).view(spec.batch, k, s)
        return CategoricalBound(spec.expand(self.values, 2), spec.expand(self._transition(), 2), probability)

    def init(self, bound: CategoricalBound, spec: BatchSpec) -> CategoricalState:
        p = self.values.shape[-1]
        return CategoricalState(bound.first, bound.values.mean(1), spec.zeros(p, p), spec.zeros(p, p))

    def _transition(self) -> Tensor:
        """T, (..., ks, ks)."""
        if self.dwell is not None:
            return self.dwell.transition(self.categories)
        if self.transition is not None:
            return self.transition / self.transition.sum(-1, keepdim=True)  # rounding
        assert self.stay is not None
        eye, stay = torch.eye(self.categories, dtype=torch.float64), self.stay[..., None, None]
        return stay * eye + (1 - stay) * (1 - eye) / (self.categories - 1)

    def initialise(self, ctx: Context) -> CategoricalState:
        """Predict the moments of the first probabilities."""
        if self._drives(ctx):
            return ctx.state
        return self._predicted(ctx, ctx.state.probability, torch.zeros_like(ctx.state.lagged_covariance))

    def prediction(self, ctx: Context, link: AnyLink) -> GaussianPrediction | CategoryPrediction:
        if isinstance(link, Drives):
            return CategoryPrediction(*ctx.bound, ctx.state.probability)
        _, mean, covariance, lagged = ctx.state
        (b, p), none = mean.shape, mean.new_zeros
        distribution = PredictiveDistribution(mean, covariance, none(b, p, 0), none(b, 0, p, p), none(b, p))
        return ctx.cached("prediction", lambda: GaussianPrediction(distribution, lagged), mean, covariance, lagged)

    def update(self, ctx: Context) -> CategoricalState:
        """p_k ∝ p_k exp(bᵀδ − ½δᵀAδ) with δ the value minus the predicted mean.

        ξ and Ω of the error below are b and A, the evidence there, attenuated by the predicted covariance v:
        b = (I − vΩ)⁻¹ξ, A = Ω(I − vΩ)⁻¹. The parameters' own deviation R then gives A ← A(I + RA)⁻¹.
        """
        if self._drives(ctx):
            return ctx.state._replace(probability=self._probability(ctx))
        (link,) = ctx.below_of(Predicts)
        error, state = ctx.error(link).eliminated, ctx.state
        weighted, precision = error.weighted[:, 0, :, None], error.precision.dense()
        eye = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
        through = eye - precision @ state.predicted_covariance
        found = torch.linalg.solve(through, torch.cat([weighted, precision], -1))
        found = torch.linalg.solve(eye + found[..., 1:] @ self._deviation(ctx), found)
        away = ctx.bound.values - state.predicted_mean[:, None]
        fit = (away @ found[..., :1])[..., 0] - 0.5 * (away * (away @ found[..., 1:].mT)).sum(-1)
        weighed = (state.probability.log() + fit[..., None]).flatten(1).softmax(-1)
        return state._replace(probability=weighed.view_as(state.probability))

    def predict(self, ctx: Context) -> CategoricalState:
        """Apply the transition, and predict the parameters below."""
        if self._drives(ctx):
            return ctx.state
        before, (values, transition, _) = ctx.state.probability, ctx.bound
        joint = before.flatten(1)[..., None] * transition
        after = joint.sum(1).view_as(before)
        joint = joint.view(*before.shape, *before.shape[1:]).sum((2, 4))  # over stages
        first, then = (torch.bmm(p.sum(-1)[:, None], values)[:, 0] for p in (before, after))
        lagged = values.mT @ joint @ values - first[..., None] * then[:, None]
        return self._predicted(ctx, after, lagged)

    def _predicted(self, ctx: Context, probability: Tensor, lagged: Tensor) -> CategoricalState:
        values, of_values = ctx.bound.values, probability.sum(-1)
        mean = torch.bmm(of_values[:, None], values)[:, 0]
        away = values - mean[:, None]
        covariance = away.mT @ (of_values[..., None] * away) + self._deviation(ctx)
        return CategoricalState(probability, mean, covariance, lagged)

    def _drives(self, ctx: Context) -> bool:
        return bool(ctx.below_of(Drives))

    def _probability(self, ctx: Context) -> Tensor:
        """Probability of each stage of each category, (B, k, s), in the joint belief with a state if it drives one."""
        if not self._drives(ctx):
            return ctx.state.probability
        posterior: Any = ctx.error(ctx.below_of(Drives)[0])
        assert isinstance(posterior, CategoryPosterior)
        return posterior.probability

    def _deviation(self, ctx: Context) -> Tensor:
        """Covariance of the parameters around the value of their category, (B, p, p)."""
        (link,) = ctx.below_of(Predicts)
        noise = ctx.error(link).noise
        assert noise is not None
        return noise.variance.diag_embed()

    def _moments(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Mean (B, p) and covariance (B, p, p) of the values."""
        if not self._drives(ctx):
            return ctx.state.predicted_mean, ctx.state.predicted_covariance
        weight, values = self._probability(ctx).sum(-1), ctx.bound.values
        mean = torch.bmm(weight[:, None], values)[:, 0]
        away = values - mean[:, None]
        return mean, away.mT @ (weight[..., None] * away)

    def input_spec(self, spec: BatchSpec) -> InputSpec:
        """What a switching state needs to know of it."""
        return InputSpec(self.values.shape[-1], False, None)

    def forecast_message(self, ctx: Context, link: AnyLink, now: ForecastContext) -> Tensor:
        """The present prediction, as if the category stayed."""
        return now.repeat(ctx.state.predicted_mean)

    def energy(self, ctx: Context) -> Energy:
        """None of its own: that of the parameters below contains their deviation from the prediction."""
        return Energy()

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape = ("order", "dimension")
        return {
            "probability": Recordable(("category",), lambda ctx: self._probability(ctx).sum(-1)),
            "stage": Recordable(("category", "stage"), self._probability),
            "mean": Recordable(shape, lambda ctx: self._moments(ctx)[0][:, None]),
            "sd": Recordable(shape, lambda ctx: standard_deviations(self._moments(ctx)[1])[:, None]),
        }
