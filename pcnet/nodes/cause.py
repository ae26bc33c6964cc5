"""Hidden causes: inputs of states, predicted from above, by a known input, or by a constant."""

from dataclasses import KW_ONLY
from typing import ClassVar

import torch
from torch import Tensor

from pcnet.errors import GraphError
from pcnet.functions.check import check_function
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Drives, Predicts, Weighs
from pcnet.model.messages import PredictionError, ScoreError
from pcnet.model.node import BatchSpec
from pcnet.model.protocols import ForecastContext
from pcnet.nodes.generalised_variable import (
    Context,
    GeneralisedBound,
    GeneralisedState,
    GeneralisedVariable,
    LocalErrors,
)
from pcnet.nodes.precision import precision_score
from pcnet.settings import Vector, check_size, number, settings


@settings
class CauseNode(GeneralisedVariable):
    """A generalised cause ṽ (..., orders, dim) that drives the flows and mappings of states.

    Local energy ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| of ε̃ = ṽ − η̃, where η̃ is the sum of the predictions from above or, without any,
    the constant `prior` at rest.

    Args:
        prior: The constant, one number or (..., dim).
    """

    _: KW_ONLY
    prior: Vector = number(0.0)
    kind: ClassVar[str] = "cause"
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Predicts, Drives)
    child_of: ClassVar[tuple[type[AnyLink], ...]] = (Predicts, Weighs)

    def __post_init__(self) -> None:
        GeneralisedVariable.__post_init__(self)
        check_size(self.title, "prior", self.prior, self.dim)

    def describe(self) -> str:
        return f"dim {self.dim}, orders {self.orders}"

    def check(self, links: Neighbours, like: Tensor) -> None:
        if not links.below:
            raise GraphError(f"{self.title} has no effect: add graph.drives({self.name}, state)")
        if not links.above_of(Weighs):
            raise GraphError(f"{self.title} has no precision: add graph.weighs(PrecisionNode(...), {self.name})")
        for link in links.below_of(Predicts):
            what = f"the mapping from {self.name!r} to {link.child.name!r}"
            check_function(what, link.function, self.dim, 0, link.child.shape.dim, like)

    def bind(self, links: Neighbours, spec: BatchSpec) -> GeneralisedBound:
        value = spec.expand_vector(self.prior, self.dim)
        at_rest = torch.constant_pad_nd(value[:, None], (0, 0, 0, self.orders - 1))
        return GeneralisedVariable.bind(self, links, spec)._replace(prior=at_rest)

    def initialise(self, ctx: Context) -> GeneralisedState:
        """Start at the predicted value."""
        return ctx.state if self.initial_mean is not None else ctx.state._replace(mean=self._predicted(ctx))

    def error(self, ctx: Context, link: AnyLink) -> ScoreError | PredictionError:
        local = self.local_errors(ctx)
        if isinstance(link, Weighs):
            return precision_score(local.precision, local.error, local.weighted)
        implicit = ctx.bound.integrator.implicit
        answer = (lambda: self.eliminated_error(ctx, -local.jacobian, {})) if implicit else None
        return PredictionError(local.weighted, lambda: local.precision, compute_eliminated=answer)

    def local_errors(self, ctx: Context) -> LocalErrors:
        mean = ctx.state.mean

        def compute() -> LocalErrors:
            (link,) = ctx.above_of(Weighs)
            precision = ctx.message(link).value
            error = mean - self._predicted(ctx)
            batch, n = mean.shape[0], self.orders * self.dim
            jacobian = torch.eye(n, dtype=mean.dtype, device=mean.device).expand(batch, -1, -1)
            none, links = mean.new_zeros(batch, 0), ctx.below_of(Predicts)
            mappings = {link: link.function.linearise(mean, none, link.child.shape.rows) for link in links}
            return LocalErrors(error, jacobian, precision, precision.weigh(error), mappings)

        return ctx.cached("local errors", compute, mean, *[ctx.message(link).value for link in ctx.above])

    def forecast_message(self, ctx: Context, link: AnyLink, now: ForecastContext) -> Tensor:
        given = now.of(Predicts)
        value = (sum(given[1:], given[0]) if given else now.repeat(ctx.bound.prior[:, 0])) + now.noise
        return value if link.function is None else link.function(value, value.new_zeros(*value.shape[:-1], 0))

    def _predicted(self, ctx: Context) -> Tensor:
        """η̃, (B, orders, dim)."""
        predicted = [ctx.message(link).value for link in ctx.above_of(Predicts)]
        return sum(predicted[1:], predicted[0]) if predicted else ctx.bound.prior
