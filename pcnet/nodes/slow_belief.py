"""What parameter and precision nodes share: a slow Gaussian belief, learned by an estimator."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import Parametrises, Weighs
from pcnet.model.node import INDEFINITE, Energy, Indefinite, Node, Prior
from pcnet.model.protocols import FitsRecordedData
from pcnet.numerics.estimators import ParameterEstimator, RobbinsMonro
from pcnet.numerics.laplace import covariance_of, laplace_posterior

Context = NodeContext[Any, Any]


class SlowBelief(Node[Any, Any], FitsRecordedData):
    """A Gaussian belief N(μ, Λ⁻¹) with prior N(η, P⁻¹). Local energy ½(μ − η)ᵀP(μ − η).

    Its state begins with mean, precision and log|Σ|, and the same of the prior, and has `accumulated`. A precision is a
    matrix (B, n, n), or the diagonal (B, n) of one where elements do not interact. Subclasses have the settings below.
    """

    estimator: ParameterEstimator | None
    curvature: str
    indefinite: Indefinite
    informed_by: ClassVar[type[Parametrises | Weighs]]  # the kind of link on which errors come
    private_fields: ClassVar[frozenset[str]] = frozenset({"accumulated"})

    def resolve_estimator(self, links: Neighbours) -> ParameterEstimator:
        """The given estimator, or the default of the node below; the paper's if that has none."""
        suggested = [links.default_estimators.get(link) for link in links.below]
        return next((each for each in (self.estimator, *suggested) if each is not None), RobbinsMonro())

    def prior_belief(self, bound: Any) -> Prior:
        return Prior(bound.mean, bound.sd)

    def warm_start(self, ctx: Context, state: Any) -> Any:
        pull = times(state.prior_precision, state.mean - state.prior_mean)
        return state._replace(accumulated=ctx.bound.estimator.warm_start(ctx.state.accumulated, pull))

    def accumulate(self, ctx: Context) -> Any:
        estimator, state = ctx.bound.estimator, ctx.state
        if not estimator.needs_curvature:
            return state._replace(accumulated=estimator.accumulate(state.accumulated, self.gradient(ctx)))
        gradient = self._subtract_errors(ctx, torch.zeros_like(state.mean))
        curvature = self._add_curvatures(ctx, torch.zeros_like(state.precision))
        return state._replace(accumulated=estimator.accumulate(state.accumulated, gradient, curvature))

    def update(self, ctx: Context) -> Any:
        change, accumulated = ctx.bound.estimator.step(ctx.state.accumulated)
        return ctx.state._replace(mean=ctx.state.mean + change, accumulated=accumulated)

    def update_covariance(self, ctx: Context) -> Any:
        accumulated = ctx.state.accumulated
        tracked = ctx.bound.estimator.needs_curvature
        curvature = accumulated.precision if tracked else self._add_curvatures(ctx, ctx.state.prior_precision)
        if curvature.dim() == 2:
            return ctx.state._replace(precision=curvature, log_det_covariance=-curvature.log().sum(-1))
        precision, log_det, regularised = laplace_posterior(curvature)
        if regularised is not None:
            if self.indefinite == "raise":
                ctx.mark_diverged(regularised, INDEFINITE)
            accumulated = accumulated._replace(regularised=accumulated.regularised + regularised)
        return ctx.state._replace(precision=precision, log_det_covariance=log_det, accumulated=accumulated)

    def renew_prior(self, ctx: Context) -> Any:
        state = ctx.state
        return state._replace(
            prior_mean=state.mean,
            prior_precision=state.precision,
            prior_log_det_covariance=state.log_det_covariance,
            accumulated=ctx.bound.estimator.forget(state.accumulated),
        )

    def predicted(self, ctx: Context) -> Tensor:
        """η, (B, n)."""
        prior: Tensor = ctx.state.prior_mean
        return prior

    def gradient(self, ctx: Context) -> Tensor:
        return self._subtract_errors(ctx, times(ctx.state.prior_precision, ctx.state.mean - self.predicted(ctx)))

    def hessian(self, ctx: Context) -> Tensor:
        return as_matrix(self._add_curvatures(ctx, ctx.state.prior_precision))

    def _subtract_errors(self, ctx: Context, gradient: Tensor) -> Tensor:
        """A gradient (B, n) with that of the errors below."""
        for link in ctx.below_of(self.informed_by):
            gradient = gradient - self.shape_gradient(ctx.error(link).weighted)
        return gradient

    def _add_curvatures(self, ctx: Context, curvature: Tensor) -> Tensor:
        """A curvature with that of the errors below."""
        for link in ctx.below_of(self.informed_by):
            error = ctx.error(link)
            curvature = curvature + self.shape_curvature(ctx, error.precision)
            if self.curvature == "exact" and error.remainder is not None:
                curvature = curvature + self.shape_curvature(ctx, error.remainder)
        return curvature

    def shape_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of an error, in the form of the belief."""
        return gradient

    def shape_curvature(self, ctx: Context, curvature: Tensor) -> Tensor:
        """The curvature of an error, in the form of the belief."""
        return curvature

    def energy(self, ctx: Context) -> Energy:
        state, predicted = ctx.state, self.predicted(ctx)

        def compute() -> Energy:
            moved = state.mean - predicted
            fit = (moved * times(state.prior_precision, moved)).sum(-1)
            return Energy(complexity=0.5 * (fit + state.prior_log_det_covariance - state.log_det_covariance))

        return ctx.cached("energy", compute, predicted, *state[:6])

    def fallbacks(self, ctx: Context) -> Tensor | None:
        counted: Tensor = ctx.state.accumulated.regularised
        return counted if ctx.state.precision.dim() == 3 else None

    def covariance(self, ctx: Context) -> Tensor:
        """Σ, (B, n, n) or its diagonal (B, n)."""
        precision = ctx.state.precision
        invert = covariance_of if precision.dim() == 3 else torch.reciprocal
        return ctx.cached("covariance", lambda: invert(precision), precision)


def times(precision: Tensor, vector: Tensor) -> Tensor:
    """A diagonal (B, n) or matrix (B, n, n) times a vector (B, n)."""
    return precision * vector if precision.dim() == 2 else torch.bmm(precision, vector[..., None])[..., 0]


def as_matrix(precision: Tensor) -> Tensor:
    """A diagonal (B, n) or matrix (B, n, n) as a matrix."""
    return precision.diag_embed() if precision.dim() == 2 else precision
