"""What states and causes have in common: a belief about a generalised variable, moved by errors from all sides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.linearisation import Linearisation
from pcnet.model.messages import Error, Prediction
from pcnet.model.node import INDEFINITE, BatchSpec, Energy, ErrorShape, Indefinite, Link, Node, NodeContext, Recordable
from pcnet.numerics.generalised import shift_matrix
from pcnet.numerics.integrators import LocalLinearisation, LocalQuadratic, StateIntegrator
from pcnet.numerics.laplace import covariance_of, laplace_posterior, standard_deviations
from pcnet.numerics.precision import DenseCurvature, Precision
from pcnet.settings import Matrix, settings


class GeneralisedBelief(NamedTuple):
    """Mean x̃ (B, orders, dim), posterior precision (B, n, n) and log|Σ| (B,); n = orders·dim."""

    mean: Tensor
    precision: Tensor
    log_det_covariance: Tensor


class GeneralisedMemory(NamedTuple):
    """How often the posterior had to be mended, (B,)."""

    regularised: Tensor


class Work(NamedTuple):
    """What follows from the belief and the messages from above, and that all rules of the node share.

    The node's own error ε (B, rows, dim), its slope in the belief ∂ε/∂x̃ (B, rows·dim, n), its precision Π̃ and
    ξ = Π̃ε; and for each node that is predicted below the mapping g̃ with its slope.

    For each cause that drives the node: by_cause, ∂ε/∂ṽ (B, rows·dim, n of the cause); and mapped, by the links below
    through whose mappings it goes, ∂g̃/∂ṽ.
    """

    error: Tensor
    slope: Tensor
    precision: Precision
    weighted: Tensor
    mappings: Mapping[Link, Linearisation]
    by_cause: Mapping[Link, Tensor] = MappingProxyType({})
    mapped: Mapping[Link, Mapping[Link, Tensor]] = MappingProxyType({})


Answer = Callable[[Error[Any]], Error[Any]]
"""Which of the errors from below to go by: as they are, or with the senders' own answer in them."""


def as_is(error: Error[Any]) -> Error[Any]:
    return error


def eliminated(error: Error[Any]) -> Error[Any]:
    return error.eliminated


@settings
class GeneralisedVariable(Node):
    """A generalised variable (..., orders, dim) that is not observed.

    Gradient ∂ε/∂x̃ᵀξ − Σ J_g̃ᵀξ_child of the energy around the node; the curvature is Gauss–Newton (JᵀΠ̃J, never
    indefinite) or exact (with the terms Σξ∂²ε).
    """

    _: KW_ONLY
    dim: int = Field(ge=1)
    orders: int = Field(ge=1)
    initial_mean: Matrix | None = None
    integrator: StateIntegrator = LocalLinearisation()
    curvature: Literal["gauss-newton", "exact"] = "gauss-newton"
    indefinite: Indefinite = "clamp"
    role: ClassVar[str] = "state"

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        shape = (self.orders, self.dim)
        if self.initial_mean is not None and tuple(self.initial_mean.shape[-2:]) != shape:
            raise SettingError(
                f"{self.title}: initial_mean has shape {tuple(self.initial_mean.shape)}; "
                f"it must end in (orders, dim) = {shape}"
            )

    # --- composing ---------------------------------------------------------------------------------------------
    @property
    def rows(self) -> int:
        """The orders of the node's own error."""
        return self.orders

    @property
    def error_shape(self) -> ErrorShape:
        return ErrorShape(self.rows, self.dim)

    def as_parent(self, link: Link) -> None:
        if link.kind != "predicts":
            Node.as_parent(self, link)
        shape = link.child.error_shape
        assert shape is not None
        if shape.rows > self.orders:
            raise GraphError(
                f"{self.title} has {self.orders} orders and cannot predict the {shape.rows} of "
                f"{link.child.name!r}; give {self.name!r} more orders or {link.child.name!r} fewer"
            )

    # --- beginning ---------------------------------------------------------------------------------------------
    def begin(self, local: NodeContext, start: BatchSpec) -> None:
        n = self.orders * self.dim
        mean = torch.zeros(self.orders, self.dim) if self.initial_mean is None else self.initial_mean
        filled = start.fill(mean, 2)
        none = filled.new_zeros(start.batch)
        local.rule = start.lay_out(self.integrator)
        local.belief = GeneralisedBelief(filled, torch.eye(n).to(filled).repeat(start.batch, 1, 1), none)
        local.memory = GeneralisedMemory(none)

    # --- messages ----------------------------------------------------------------------------------------------
    def prediction(self, local: NodeContext, link: Link) -> Prediction[Tensor]:
        if link.kind == "drives":
            return Prediction(local.belief.mean)
        return Prediction(self.work(local).mappings[link].value)

    def after_answer(self, local: NodeContext, own: Tensor, through: Mapping[Link, Tensor]) -> Error[DenseCurvature]:
        """What is left of an error about p once this node has moved in answer to it: itself eliminated.

        own: ∂ε/∂p (B, rows·dim, p); through: ∂g̃/∂p of the mappings that p is part of. With the implicit step
        M δx = r, M = I/h − D + κH, r = Dx̃ − κ∇: −∂E/∂p becomes w − H_px M⁻¹r, and ∂²E/∂p² H_pp − κH_px M⁻¹H_xp.
        """
        work, batch = self.work(local), local.belief.mean.shape[0]
        weighted = -torch.bmm(work.weighted.view(batch, 1, -1), own.expand(batch, -1, -1))[:, 0]
        curvature = work.precision.bilinear_form(own, own)
        cross = work.precision.bilinear_form(work.slope, own)
        for link, slope in through.items():
            error = local.error(link).eliminated
            weighted = weighted + torch.bmm(error.weighted.reshape(batch, 1, -1), slope)[:, 0]
            curvature = curvature + error.precision.bilinear_form(slope, slope)
            cross = cross + error.precision.bilinear_form(work.mappings[link].slope, slope)
        answer = local.rule.joint_step(self._evidence(local), cross)
        return Error(
            weighted - torch.bmm(cross.mT, answer.step[..., None])[..., 0],
            DenseCurvature(curvature - torch.bmm(cross.mT, answer.sensitivity)),
        )

    # --- acting ------------------------------------------------------------------------------------------------
    def update(self, local: NodeContext) -> None:
        mean: Tensor = local.belief.mean
        step = local.rule.step(self._evidence(local))
        local.belief = local.belief._replace(mean=mean + step.view_as(mean))

    def _evidence(self, local: NodeContext) -> LocalQuadratic:
        mean: Tensor = local.belief.mean
        flat = mean.flatten(1)
        motion = torch.constant_pad_nd(flat[:, self.dim :], (0, self.dim))
        shift = self.shift(local)
        if local.rule.implicit:
            gradient, curvature = self._gradient(local, eliminated), self._gauss_newton(local, eliminated)
            return LocalQuadratic(flat, motion, shift, gradient, curvature, local.pace)
        exact = self.hessian(local) if local.rule.needs_curvature else None
        return LocalQuadratic(flat, motion, shift, self.gradient(local), exact, local.pace)

    def update_covariance(self, local: NodeContext) -> None:
        found = laplace_posterior(self.hessian(local))
        if found.regularised is not None:
            if self.indefinite == "raise":
                local.fail(found.regularised, INDEFINITE)
            local.memory = local.memory._replace(regularised=local.memory.regularised + found.regularised)
        local.belief = local.belief._replace(precision=found.precision, log_det_covariance=found.log_det_covariance)

    def energy(self, local: NodeContext) -> Energy:
        work = self.work(local)
        fit = (work.weighted * work.error).sum((1, 2))
        return Energy(complexity=0.5 * (fit - work.precision.log_det - local.belief.log_det_covariance))

    def fallbacks(self, local: NodeContext) -> Tensor:
        regularised: Tensor = local.memory.regularised
        return regularised

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape = ("order", "dimension")
        return {
            "mean": Recordable(shape, lambda local: local.belief.mean),
            "sd": Recordable(shape, lambda local: local.belief.precision, self._sd),
            "covariance": Recordable(("element", "element_"), lambda local: local.belief.precision, covariance_of),
            "error": Recordable(("error_order", "dimension"), lambda local: self.work(local).error),
            "weighted_error": Recordable(("error_order", "dimension"), lambda local: self.work(local).weighted),
        }

    # --- what the rules above share --------------------------------------------------------------------------------
    @abstractmethod
    def work(self, local: NodeContext) -> Work:
        """The node's own error and its mappings; once for the same belief and messages from above."""

    def _sd(self, precision: Tensor) -> Tensor:
        return standard_deviations(covariance_of(precision)).view(-1, self.orders, self.dim)

    def shift(self, local: NodeContext) -> Tensor:
        """D, (1, n, n)."""
        mean: Tensor = local.belief.mean
        return local.once("shift", lambda: shift_matrix(self.orders, self.dim).to(mean)[None])

    def gradient(self, local: NodeContext) -> Tensor:
        return self._gradient(local, as_is)

    def _gradient(self, local: NodeContext, answer: Answer) -> Tensor:
        work = self.work(local)
        batch = work.weighted.shape[0]
        gradient = torch.bmm(work.weighted.flatten(1)[:, None], work.slope)[:, 0]
        for link, mapping in work.mappings.items():
            weighted = answer(local.error(link)).weighted.view(batch, *mapping.value.shape[1:])
            gradient = gradient - mapping.vjp(weighted)
        for link in local.links_below("drives"):
            gradient = gradient - answer(local.error(link)).weighted
        return gradient

    def hessian(self, local: NodeContext) -> Tensor:
        curvature = self._gauss_newton(local, as_is)
        if self.curvature == "gauss-newton":
            return curvature
        work = self.work(local)
        for link, mapping in work.mappings.items():
            remainder = local.error(link).remainder
            if remainder is not None:
                curvature = curvature + mapping.slope.mT @ remainder @ mapping.slope
        for link in local.links_below("drives"):
            remainder = local.error(link).remainder
            curvature = curvature if remainder is None else curvature + remainder
        return self.less_curves(local, curvature)

    def less_curves(self, local: NodeContext, curvature: Tensor) -> Tensor:
        """A curvature less Σ ξ ∂²/∂x̃² of what is not linear in the belief."""
        return curvature

    def _gauss_newton(self, local: NodeContext, answer: Answer) -> Tensor:
        work = self.work(local)
        shares = []
        for link, mapping in work.mappings.items():
            precision = answer(local.error(link)).precision
            # for a linear mapping this changes on the slow clock only
            name, inputs = f"evidence of {link.child.name}", (mapping.jacobian, mapping.jacobian_derivative, precision)
            shares.append(local.once(name, partial(mapping.quadratic_form, precision), *inputs))
        for link in local.links_below("drives"):
            shares.append(answer(local.error(link)).precision.matrix)
        return local.once("gauss-newton", lambda: sum(shares, work.precision.quadratic_form(work.slope)), work, *shares)
