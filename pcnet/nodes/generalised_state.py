"""Generalised hidden states: a belief about value, velocity, acceleration, …, moved by a flow and by errors."""

import math
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal

import torch
from pydantic import SkipValidation
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function, subtract_contracted_hessian
from pcnet.functions.linearisation import Linearisation
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Drives, Parametrises, Predicts, Weighs
from pcnet.model.messages import PredictionError, ScoreError
from pcnet.model.node import AnyNode
from pcnet.model.protocols import ForecastStart
from pcnet.nodes.flow import FlowForecasts, check_state, checked_flow, first_value, parameters_of
from pcnet.nodes.generalised_variable import Context, GeneralisedState, GeneralisedVariable, LocalErrors
from pcnet.nodes.precision import precision_score
from pcnet.numerics.precision import DenseCurvature
from pcnet.numerics.trees import spans
from pcnet.settings import settings


@settings
class GeneralisedStateNode(FlowForecasts, GeneralisedVariable):
    """A generalised hidden state (..., orders, dim) with a flow, which predicts the nodes below it.

    Local energy ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| of the motion error ε̃ = Dx̃ − f̃(x̃, ṽ, θ).

    Args:
        flow: Function of (state, parameters), or of (state, causes, parameters) for a state that causes drive; or a
            `Function` with its own derivatives.
        initial_mean: x̃ before the first observation, (..., orders, dim); found from the first observation unless given.
        last_error: "keep" the error of the highest order, 0 − J_f x^(k−1), or "drop" it.
        jacobian_derivative: In Jacobians of higher orders, "keep" the term ∂(J x')/∂x, or "drop" it as SPM does.
    """

    _: KW_ONLY
    flow: SkipValidation[Any]
    last_error: Literal["keep", "drop"] = "keep"
    jacobian_derivative: Literal["keep", "drop"] = "keep"
    kind: ClassVar[str] = "state"
    child_of: ClassVar[tuple[type[AnyLink], ...]] = (Drives, Parametrises, Weighs)

    def __post_init__(self) -> None:
        GeneralisedVariable.__post_init__(self)
        if self.last_error == "drop" and self.orders < 2:
            raise SettingError(f"{self.title}: last_error='drop' leaves no motion error with one order; use orders=2")
        object.__setattr__(self, "flow", checked_flow(self, self.flow, self.dim))

    @property
    def rows(self) -> int:
        return self.orders if self.last_error == "keep" else self.orders - 1

    def describe(self) -> str:
        return f"dim {self.dim}, orders {self.orders}, flow {self.flow!r}"

    def check(self, links: Neighbours, like: Tensor) -> None:
        check_state(self, self.dim, self.flow, links, like)
        for link in links.above_of(Drives):
            rows = link.parent.shape.rows
            if rows > self.orders:
                of = f"the {rows} of its cause {link.parent.name!r}"
                raise GraphError(f"{self.title} has {self.orders} orders, fewer than {of}; give it more orders")

    def initialise(self, ctx: Context) -> GeneralisedState:
        """Find the value from the first observation; the velocity then follows the flow.

        Higher orders start at zero: their precision is so low that errors of a wrong flow would persist there.
        """
        if self.initial_mean is not None:
            return ctx.state

        def errors(value: Tensor) -> dict[Predicts, PredictionError]:
            ctx.propose(self._with_value(ctx, value))
            return {link: ctx.error(link) for link in ctx.below_of(Predicts)}

        value = ctx.state.mean[:, 0]
        ctx.propose(self._with_value(ctx, value))
        value = first_value(value, self.local_errors(ctx).mappings, errors)
        state = self._with_value(ctx, value)
        if self.orders == 1:
            return state
        causes = self._argument(ctx, self.flow)[:, 0, self.dim :]
        velocity = self.flow(torch.cat([value, causes], -1), parameters_of(ctx, None, value))
        mean = torch.cat([value[:, None], velocity[:, None], state.mean[:, 2:]], 1)
        return state._replace(mean=mean)

    def _with_value(self, ctx: Context, value: Tensor) -> GeneralisedState:
        """The state with this value (B, dim), at rest."""
        return ctx.state._replace(mean=torch.constant_pad_nd(value[:, None], (0, 0, 0, self.orders - 1)))

    def check_as_child(self, link: AnyLink) -> None:
        if isinstance(link, Predicts) and link.parent.role == "state":
            remedy = f"graph.predicts({link.parent.name}, cause), graph.drives(cause, {self.name})"
            raise GraphError(f"{self.title} cannot be predicted directly; put a CauseNode between: {remedy}")
        super().check_as_child(link)

    def error(self, ctx: Context, link: AnyLink) -> ScoreError | PredictionError:
        local = self.local_errors(ctx)
        if isinstance(link, Weighs):
            return precision_score(local.precision, local.error, local.weighted)
        if isinstance(link, Drives):
            return self._cause_error(ctx, link)
        if link.of is None:  # parameters of the flow
            error = PredictionError(local.weighted, lambda: local.precision)
            return self._parameter_error(ctx, link, self.flow, error)
        (below,) = (other for other in ctx.below_of(Predicts) if other.child is link.of)
        return self._parameter_error(ctx, link, below.function, ctx.error(below))

    def _parameter_error(self, ctx: Context, link: AnyLink, function: Function, error: PredictionError) -> ScoreError:
        """An error, pulled back to the parameters of the function that made the prediction."""
        weighted, rows = error.weighted, error.weighted.shape[1]
        x = self._argument(ctx, function)
        theta = parameters_of(ctx, link.of, ctx.state.mean)
        links: tuple[AnyLink, ...] = ctx.above_of(Parametrises, link.of)
        mine = spans(other.parent.n_parameters for other in links)[links.index(link)]
        slope = function.parameter_slope(x, theta, rows)[..., mine]
        flat = slope.reshape(slope.shape[0], -1, slope.shape[-1])

        def remainder() -> Tensor | None:
            hessian = function.parameter_contracted_hessian(x, theta, weighted)
            own = None if hessian is None else -hessian[:, mine, mine]
            if error.remainder is None:
                return own
            passed_on = flat.mT @ error.remainder @ flat
            return passed_on if own is None else own + passed_on

        pulled = torch.bmm(weighted.reshape(slope.shape[0], 1, -1), flat)[:, 0]
        return ScoreError(pulled, lambda: error.precision.quadratic_form(flat), remainder)

    def _cause_error(self, ctx: Context, link: Drives) -> PredictionError:
        """The own error and those of the nodes below, pulled back to a cause."""
        local = self.local_errors(ctx)
        batch = local.weighted.shape[0]
        own = local.by_cause[link]
        through = {below: slopes[link] for below, slopes in local.mapped.items()}
        weighted = -torch.bmm(local.weighted.view(batch, 1, -1), own)[:, 0]
        for below, slope in through.items():
            weighted = weighted + torch.bmm(ctx.error(below).weighted.reshape(batch, 1, -1), slope)[:, 0]

        def precision() -> DenseCurvature:
            parts = [ctx.error(below).precision.quadratic_form(slope) for below, slope in through.items()]
            return DenseCurvature(sum(parts, local.precision.quadratic_form(own)))

        def remainder() -> Tensor:
            here = self._causes(ctx)[link]
            found = weighted.new_zeros(batch, weighted.shape[1], weighted.shape[1])
            for hessian in self._contracted_hessians(ctx, with_causes_only=True):
                found = subtract_contracted_hessian(found, hessian[:, : link.parent.shape.rows, here, here])
            for below, slope in through.items():
                passed_on = ctx.error(below).remainder
                found = found if passed_on is None else found + slope.mT @ passed_on @ slope
            return found

        answer = (lambda: self.eliminated_error(ctx, own, through)) if ctx.bound.integrator.implicit else None
        return PredictionError(weighted, precision, remainder, answer)

    def forecast_start(self, ctx: Context) -> ForecastStart:
        mean, covariance = (self.quantities[name].read(ctx) for name in ("mean", "covariance"))
        return ForecastStart(mean[:, 0], covariance[:, : self.dim, : self.dim])

    def local_errors(self, ctx: Context) -> LocalErrors:
        mean = ctx.state.mean

        def compute() -> LocalErrors:
            flow, by_cause = self._linearise(ctx, self.flow, None, self.rows)
            target = torch.constant_pad_nd(mean[:, 1:], (0, 0, 0, 1))[:, : self.rows]
            (link,) = ctx.above_of(Weighs)
            precision = ctx.message(link).value
            error = target - flow.value
            mappings, mapped = {}, {}
            for below in ctx.below_of(Predicts):
                mappings[below], slopes = self._linearise(ctx, below.function, below.child, below.child.shape.rows)
                if slopes:
                    mapped[below] = slopes
            jacobian = ctx.bound.shift[:, : self.rows * self.dim] - flow.slope
            none = {
                cause: jacobian.new_zeros(*jacobian.shape[:2], math.prod(cause.parent.shape))
                for cause in ctx.above_of(Drives)
            }
            own = {cause: -slope for cause, slope in (by_cause or none).items()}
            return LocalErrors(error, jacobian, precision, precision.weigh(error), mappings, own, mapped)

        return ctx.cached("local errors", compute, mean, *[ctx.message(link).value for link in ctx.above])

    def _linearise(
        self, ctx: Context, function: Function, of: AnyNode | None, rows: int
    ) -> tuple[Linearisation, dict[Drives, Tensor]]:
        """A function, linearised in the state, and its Jacobians with respect to the causes, if it takes them."""
        theta = parameters_of(ctx, of, ctx.state.mean)
        found = function.linearise(self._argument(ctx, function), theta, rows)
        if self.jacobian_derivative == "drop":
            found = Linearisation(found.value, found.jacobian, None, self.orders)
        if not function.takes_causes:
            return found, {}
        causes = self._causes(ctx).items()
        parts = {link: found.restrict(here, link.parent.shape.rows).slope for link, here in causes}
        return found.restrict(slice(self.dim), self.orders), parts

    def subtract_second_derivatives(self, ctx: Context, curvature: Tensor) -> Tensor:
        for hessian in self._contracted_hessians(ctx):
            curvature = subtract_contracted_hessian(curvature, hessian[..., : self.dim, : self.dim])
        return curvature

    def _contracted_hessians(self, ctx: Context, with_causes_only: bool = False) -> list[Tensor]:
        """Σ ξ ∂²f̃/∂x̃² of the flow and, with the errors from below, of the mappings; see `Function`."""
        own: tuple[Function, AnyNode | None, Tensor] = (self.flow, None, self.local_errors(ctx).weighted)
        found = []
        for function, of, xi in (own, *((b.function, b.child, ctx.error(b).weighted) for b in ctx.below_of(Predicts))):
            if function.takes_causes or not with_causes_only:
                theta = parameters_of(ctx, of, ctx.state.mean)
                hessian = function.contracted_hessian(self._argument(ctx, function), theta, xi)
                found += [] if hessian is None else [hessian]
        return found

    def _argument(self, ctx: Context, function: Function) -> Tensor:
        """The argument of a function: the state and, if it takes them, the causes beside it; (B, orders, …)."""
        mean = ctx.state.mean
        if not function.takes_causes:
            return mean
        causes = [ctx.message(link).value for link in ctx.above_of(Drives)]

        def joined() -> Tensor:
            padded = [torch.constant_pad_nd(v, (0, 0, 0, self.orders - v.shape[1])) for v in causes]
            return torch.cat([mean, *padded], -1)

        return ctx.cached("state and causes", joined, mean, *causes)

    def _causes(self, ctx: Context) -> dict[Drives, slice]:
        """The places of the causes in the argument of a function."""
        links = ctx.above_of(Drives)
        return dict(zip(links, spans((link.parent.shape.dim for link in links), self.dim), strict=True))
