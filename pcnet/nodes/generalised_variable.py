"""What generalised states and causes share: a belief about a generalised variable, updated by errors from all sides."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.linearisation import Linearisation
from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import AnyLink, Drives, Predicts
from pcnet.model.messages import PointPrediction, PredictionError
from pcnet.model.node import INDEFINITE, BatchSpec, Energy, ErrorShape, Indefinite, Node, Recordable
from pcnet.model.protocols import Forecasts
from pcnet.numerics.generalised import shift_matrix
from pcnet.numerics.integrators import LocalLinearisation, LocalQuadratic, StateIntegrator
from pcnet.numerics.laplace import covariance_of, laplace_posterior, standard_deviations
from pcnet.numerics.precision import DenseCurvature, Precision
from pcnet.settings import Matrix, settings


class GeneralisedState(NamedTuple):
    """A Gaussian belief about a generalised variable."""

    mean: Tensor  # x̃, (B, orders, dim)
    precision: Tensor  # (B, n, n)
    log_det_covariance: Tensor  # log|Σ|, (B,)
    regularised: Tensor  # how often the precision was regularised, (B,)


class GeneralisedBound(NamedTuple):
    """Constants of a run."""

    integrator: StateIntegrator
    initial_mean: Tensor  # (B, orders, dim)
    prior: Tensor  # η̃, (B, orders, dim)
    shift: Tensor  # D, (1, n, n)


Context = NodeContext[GeneralisedState, GeneralisedBound]


class LocalErrors(NamedTuple):
    """What follows from the belief and the messages from above; shared by all rules of the node."""

    error: Tensor  # the node's own error ε, (B, rows, dim)
    jacobian: Tensor  # ∂ε/∂x̃, (B, rows·dim, n)
    precision: Precision  # Π̃
    weighted: Tensor  # ξ = Π̃ε
    mappings: Mapping[Predicts, Linearisation]  # g̃ of each node that is predicted below, linearised
    by_cause: Mapping[Drives, Tensor] = MappingProxyType({})  # ∂ε/∂ṽ (B, rows·dim, n_v) for each cause
    mapped: Mapping[Predicts, Mapping[Drives, Tensor]] = MappingProxyType({})  # ∂g̃/∂ṽ of mappings that take causes


def _error(ctx: Context, link: Predicts | Drives, eliminate: bool) -> PredictionError:
    """The error on a link below; eliminate: the one that is left after the sender's own answer."""
    error: PredictionError = ctx.error(link)
    return error.eliminated if eliminate else error


@settings
class GeneralisedVariable(Node[GeneralisedState, GeneralisedBound], Forecasts):
    """A hidden generalised variable (..., orders, dim).

    The gradient of the energy is ∂ε/∂x̃ᵀξ − Σ J_g̃ᵀξ_child. The curvature is Gauss–Newton (JᵀΠ̃J, never indefinite) or
    exact (with the terms Σξ∂²ε).

    Args:
        dim: Dimension.
        orders: Number of generalised orders, 1 for values alone.
        initial_mean: First mean, (..., orders, dim).
        integrator: How the mean moves.
        curvature: "gauss-newton" or "exact".
        indefinite: What to do where the exact curvature is not positive definite.
    """

    _: KW_ONLY
    dim: int = Field(ge=1)
    orders: int = Field(ge=1)
    initial_mean: Matrix | None = None
    integrator: StateIntegrator = LocalLinearisation()
    curvature: Literal["gauss-newton", "exact"] = "gauss-newton"
    indefinite: Indefinite = "clamp"
    role: ClassVar[str] = "state"
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Predicts,)
    private_fields: ClassVar[frozenset[str]] = frozenset({"precision", "log_det_covariance", "regularised"})

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        shape = (self.orders, self.dim)
        if self.initial_mean is not None and tuple(self.initial_mean.shape[-2:]) != shape:
            given = tuple(self.initial_mean.shape)
            raise SettingError(f"{self.title}: initial_mean has shape {given}; it must end in (orders, dim) = {shape}")

    @property
    def rows(self) -> int:
        """Orders of the node's own error."""
        return self.orders

    @property
    def error_shape(self) -> ErrorShape:
        return ErrorShape(self.rows, self.dim)

    def check_as_parent(self, link: AnyLink) -> None:
        if isinstance(link, Drives) and Drives not in self.parent_of:
            below = link.child.name
            remedy = f"graph.predicts({self.name}, cause), graph.drives(cause, {below})"
            raise GraphError(f"{self.title} cannot drive {below!r} directly; put a CauseNode between them: {remedy}")
        super().check_as_parent(link)
        shape = link.child.error_shape
        if isinstance(link, Predicts) and shape is not None and shape.rows > self.orders:
            raise GraphError(
                f"{self.title} has {self.orders} orders and cannot predict the {shape.rows} of "
                f"{link.child.name!r}; give {self.name!r} more orders or {link.child.name!r} fewer"
            )

    def bind(self, links: Neighbours, spec: BatchSpec) -> GeneralisedBound:
        zero = spec.zeros(self.orders, self.dim)
        mean = zero if self.initial_mean is None else spec.expand(self.initial_mean, 2)
        shift = shift_matrix(self.orders, self.dim).to(mean)[None]
        return GeneralisedBound(spec.expand_to_batch(self.integrator), mean, zero, shift)

    def init(self, bound: GeneralisedBound, spec: BatchSpec) -> GeneralisedState:
        none = spec.zeros()
        return GeneralisedState(bound.initial_mean, spec.eye(self.orders * self.dim), none, none)

    def prediction(self, ctx: Context, link: AnyLink) -> PointPrediction:
        if isinstance(link, Predicts):
            return PointPrediction(self.local_errors(ctx).mappings[link].value)
        return PointPrediction(ctx.state.mean)

    def eliminated_error(self, ctx: Context, own: Tensor, through: Mapping[Predicts, Tensor]) -> PredictionError:
        """The error about p that is left once this node has moved in answer to it.

        With the implicit step M δx = r, M = I/h − D + κH, r = Dx̃ − κ∇: −∂E/∂p becomes w − H_px M⁻¹r, and ∂²E/∂p²
        H_pp − κH_px M⁻¹H_xp. own: ∂ε/∂p, (B, rows·dim, p). through: ∂g̃/∂p of the mappings that p is part of.
        """
        local, batch = self.local_errors(ctx), ctx.state.mean.shape[0]
        weighted = -torch.bmm(local.weighted.view(batch, 1, -1), own.expand(batch, -1, -1))[:, 0]
        curvature = local.precision.bilinear_form(own, own)
        cross = local.precision.bilinear_form(local.jacobian, own)
        for link, slope in through.items():
            error = ctx.error(link).eliminated
            weighted = weighted + torch.bmm(error.weighted.reshape(batch, 1, -1), slope)[:, 0]
            curvature = curvature + error.precision.bilinear_form(slope, slope)
            cross = cross + error.precision.bilinear_form(local.mappings[link].slope, slope)
        answer = ctx.bound.integrator.joint_step(self._quadratic(ctx), cross)
        weighted = weighted - torch.bmm(cross.mT, answer.step[..., None])[..., 0]
        left = curvature - torch.bmm(cross.mT, answer.sensitivity)
        return PredictionError(weighted, lambda: DenseCurvature(left))

    def update(self, ctx: Context) -> GeneralisedState:
        mean = ctx.state.mean
        step = ctx.bound.integrator.step(self._quadratic(ctx))
        return ctx.state._replace(mean=mean + step.view_as(mean))

    def _quadratic(self, ctx: Context) -> LocalQuadratic:
        """The local quadratic model that the integrator steps on."""
        flat = ctx.state.mean.flatten(1)
        motion = torch.constant_pad_nd(flat[:, self.dim :], (0, self.dim))
        integrator, shift = ctx.bound.integrator, ctx.bound.shift
        gradient = self.gradient(ctx, integrator.implicit)
        if integrator.implicit:
            curvature: Tensor | None = self._gauss_newton(ctx, eliminate=True)
        else:
            curvature = self.hessian(ctx) if integrator.needs_curvature else None
        return LocalQuadratic(flat, motion, shift, gradient, curvature, ctx.relative_dt)

    def update_covariance(self, ctx: Context) -> GeneralisedState:
        (precision, log_det, found), count = laplace_posterior(self.hessian(ctx)), ctx.state.regularised
        if found is not None and self.indefinite == "raise":
            ctx.mark_diverged(found, INDEFINITE)
        count = count if found is None else count + found
        return ctx.state._replace(precision=precision, log_det_covariance=log_det, regularised=count)

    def energy(self, ctx: Context) -> Energy:
        local = self.local_errors(ctx)
        fit = (local.weighted * local.error).sum((1, 2))
        return Energy(complexity=0.5 * (fit - local.precision.log_det - ctx.state.log_det_covariance))

    def fallbacks(self, ctx: Context) -> Tensor:
        return ctx.state.regularised

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        def sd(precision: Tensor) -> Tensor:
            return standard_deviations(covariance_of(precision)).view(-1, self.orders, self.dim)

        shape, errors = ("order", "dimension"), ("error_order", "dimension")
        return {
            "mean": Recordable(shape, lambda ctx: ctx.state.mean),
            "sd": Recordable(shape, lambda ctx: ctx.state.precision, sd),
            "covariance": Recordable(("element", "element_"), lambda ctx: ctx.state.precision, covariance_of),
            "error": Recordable(errors, lambda ctx: self.local_errors(ctx).error),
            "weighted_error": Recordable(errors, lambda ctx: self.local_errors(ctx).weighted),
        }

    @abstractmethod
    def local_errors(self, ctx: Context) -> LocalErrors:
        """The node's own error and its mappings; computed once for the same belief and messages."""

    def gradient(self, ctx: Context, eliminate: bool = False) -> Tensor:
        local, batch = self.local_errors(ctx), ctx.state.mean.shape[0]
        gradient = torch.bmm(local.weighted.flatten(1)[:, None], local.jacobian)[:, 0]
        for link, mapping in local.mappings.items():
            weighted = _error(ctx, link, eliminate).weighted.view(batch, *mapping.value.shape[1:])
            gradient = gradient - mapping.vjp(weighted)
        for driven in ctx.below_of(Drives):
            gradient = gradient - _error(ctx, driven, eliminate).weighted
        return gradient

    def hessian(self, ctx: Context) -> Tensor:
        curvature = self._gauss_newton(ctx)
        if self.curvature == "gauss-newton":
            return curvature
        for link, mapping in self.local_errors(ctx).mappings.items():
            remainder, slope = ctx.error(link).remainder, mapping.slope
            curvature = curvature if remainder is None else curvature + slope.mT @ remainder @ slope
        for driven in ctx.below_of(Drives):
            remainder = ctx.error(driven).remainder
            curvature = curvature if remainder is None else curvature + remainder
        return self.subtract_second_derivatives(ctx, curvature)

    def subtract_second_derivatives(self, ctx: Context, curvature: Tensor) -> Tensor:
        """A curvature minus Σ ξ ∂²/∂x̃² of everything that is nonlinear in the belief."""
        return curvature

    def _gauss_newton(self, ctx: Context, eliminate: bool = False) -> Tensor:
        local = self.local_errors(ctx)
        parts = []
        for link, mapping in local.mappings.items():
            precision = _error(ctx, link, eliminate).precision
            # for a linear mapping this changes on the slow clock only
            name, inputs = f"curvature of {link.child.name}", (mapping.jacobian, mapping.jacobian_derivative, precision)
            parts.append(ctx.cached(name, partial(mapping.quadratic_form, precision), *inputs))
        for driven in ctx.below_of(Drives):
            curvature = _error(ctx, driven, eliminate).precision
            assert isinstance(curvature, DenseCurvature)
            parts.append(curvature.matrix)
        own = local.precision
        return ctx.cached("gauss-newton", lambda: sum(parts, own.quadratic_form(local.jacobian)), local, *parts)
