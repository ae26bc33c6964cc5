"""Generalised hidden states: a belief about value, velocity, acceleration, …, moved by a flow and by errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, SkipValidation
from torch import Tensor

from pcnet.derived import as_function
from pcnet.errors import GraphError, SettingError
from pcnet.functions import Function, Linearisation, check_function, less_curve
from pcnet.generalised import shift_matrix
from pcnet.linalg import Precision, covariance_of, posterior
from pcnet.messages import Error, Prediction
from pcnet.movers import Evidence, Ozaki, StateMover
from pcnet.node import INDEFINITE, Energy, ErrorShape, Indefinite, Link, Local, Node, Quantity, Start
from pcnet.nodes.precision import precision_error
from pcnet.settings import Table, settings


class StateBelief(NamedTuple):
    """Mean x̃ (B, orders, dim), posterior precision (B, n, n) and log|Σ| (B,); n = orders·dim."""

    mean: Tensor
    precision: Tensor
    log_det_covariance: Tensor


class StateMemory(NamedTuple):
    """How often the posterior had to be mended, (B,)."""

    mended: Tensor


class Work(NamedTuple):
    """What follows from the belief and the messages from above, and that all rules of the node share.

    The error of the state's own motion ε = Dx̃ − f̃ (B, rows, dim), its slope D − ∂f̃/∂x̃ (B, rows·dim, n), its precision
    Π̃ and ξ = Π̃ε; and for each link below the mapping g̃ with its slope.
    """

    error: Tensor
    slope: Tensor
    precision: Precision
    weighted: Tensor
    mappings: dict[Link, Linearisation]


HALVINGS = 30
"""How often a step towards the first observation is halved before it is given up."""


@settings
class StateNode(Node):
    """A generalised hidden state (..., orders, dim) that moves by `flow` and predicts the nodes below it.

    Local energy ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| of the motion error ε̃ = Dx̃ − f̃(x̃, θ). Gradient (D − J_f̃)ᵀξ − Σ J_g̃ᵀξ_child; the
    curvature is Gauss–Newton (JᵀΠ̃J, never indefinite) or exact (with the terms Σξ∂²ε).

    flow: function of (state, parameters), or a `Function` with its own derivatives.
    initial_mean: x̃ before the first observation; found from the first observation unless given.
    last_error: keep the error of the highest order, 0 − J_f x^(k−1), or drop it.
    """

    _: KW_ONLY
    dim: int = Field(ge=1)
    orders: int = Field(ge=1)
    flow: SkipValidation[Any]
    initial_mean: Table | None = None
    mover: StateMover = Ozaki()
    curvature: Literal["gauss-newton", "exact"] = "gauss-newton"
    last_error: Literal["keep", "drop"] = "keep"
    indefinite: Indefinite = "clamp"
    role: ClassVar[str] = "state"

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if self.last_error == "drop" and self.orders < 2:
            raise SettingError(f"{self.title}: last_error='drop' leaves no motion error with one order; use orders=2")
        shape = (self.orders, self.dim)
        if self.initial_mean is not None and tuple(self.initial_mean.shape[-2:]) != shape:
            raise SettingError(
                f"{self.title}: initial_mean has shape {tuple(self.initial_mean.shape)}; "
                f"it must end in (orders, dim) = {shape}"
            )
        if self.flow is None:
            raise SettingError(f"{self.title}: give a flow; for a state that drifts freely, lambda x, theta: 0 * x")
        object.__setattr__(self, "flow", as_function(self.flow))

    # --- composing ---------------------------------------------------------------------------------------------
    @property
    def rows(self) -> int:
        """The orders of the motion error."""
        return self.orders if self.last_error == "keep" else self.orders - 1

    @property
    def error_shape(self) -> ErrorShape:
        return ErrorShape(self.rows, self.dim)

    def describe(self) -> str:
        return f"dim {self.dim}, orders {self.orders}, flow {self.flow!r}"

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

    def as_child(self, link: Link) -> None:
        if link.kind == "predicts":
            Node.as_child(self, link)

    def check(self, above: tuple[Link, ...], below: tuple[Link, ...], like: Tensor) -> None:
        if not below:
            raise GraphError(f"{self.title} predicts nothing: add graph.predicts({self.name}, node)")
        if not any(link.kind == "weighs" for link in above):
            raise GraphError(
                f"{self.title} has no precision: add graph.weighs(PrecisionNode(...), {self.name}) for its motion error"
            )
        given = _count(above, None)
        check_function(f"the flow of {self.title}", self.flow, self.dim, given, self.dim, like)
        for link in below:
            assert link.function is not None and link.child.error_shape is not None
            what = f"the mapping from {self.name!r} to {link.child.name!r}"
            given = _count(above, link.child)
            check_function(what, link.function, self.dim, given, link.child.error_shape.dim, like)

    # --- beginning ---------------------------------------------------------------------------------------------
    def begin(self, local: Local, start: Start) -> None:
        n = self.orders * self.dim
        mean = torch.zeros(self.orders, self.dim) if self.initial_mean is None else self.initial_mean
        filled = start.fill(mean, 2)
        none = filled.new_zeros(start.batch)
        local.rule = start.lay_out(self.mover)
        local.belief = StateBelief(filled, torch.eye(n).to(filled).repeat(start.batch, 1, 1), none)
        local.memory = StateMemory(none)

    def orient(self, local: Local) -> None:
        """One Gauss–Newton step on what the nodes below report, of the value alone, halved until their errors fall.

        Its velocity then follows the flow. Higher orders start at zero: their precision is so low that what a wrong
        flow puts there would stay, and push the state away.
        """
        if self.initial_mean is not None:
            return
        value: Tensor = local.belief.mean[:, 0]

        def place(value: Tensor) -> Tensor:
            """Believe in this value, at rest; the squared errors of the nodes below, (B,)."""
            rest = torch.zeros_like(value)
            local.belief = local.belief._replace(mean=torch.stack([value] + [rest] * (self.orders - 1), 1))
            errors = [local.error(link).weighted.flatten(1) for link in local.below]
            return torch.cat(errors, 1).square().sum(1)

        before = place(value)
        gradient, curvature = value.new_zeros(value.shape), value.new_zeros(*value.shape, self.dim)
        for link, mapping in self._work(local).mappings.items():
            slope, error = mapping.slope[..., : self.dim], local.error(link)
            gradient = gradient - torch.einsum("bri,br->bi", slope, error.weighted.flatten(1))
            curvature = curvature + error.precision.sandwich(slope)
        step = -torch.einsum("bij,bj->bi", torch.linalg.pinv(curvature, hermitian=True), gradient)
        worse = torch.ones_like(before, dtype=torch.bool)
        for _ in range(HALVINGS):
            worse = ~(place(value + step) <= before)
            if not bool(worse.any()):
                break
            step = torch.where(worse[:, None], 0.5 * step, step)
        value = torch.where(worse[:, None], value, value + step)
        rows = [value, self.flow(value, self._parameters(local, None))][: self.orders]
        rows += [torch.zeros_like(value)] * (self.orders - len(rows))
        local.belief = local.belief._replace(mean=torch.stack(rows, 1))

    # --- messages ----------------------------------------------------------------------------------------------
    def predict(self, local: Local, link: Link) -> Prediction[Tensor]:
        return Prediction(self._work(local).mappings[link].value)

    def err(self, local: Local, link: Link) -> Error[Any]:
        work = self._work(local)
        if link.kind == "weighs":
            return precision_error(work.weighted, work.error)
        if link.of is None:  # the parameters of the flow hear of the motion error
            return self._parameter_error(local, link, self.flow, Error(work.weighted, work.precision))
        (below,) = (other for other in local.below if other.child is link.of)
        assert below.function is not None
        return self._parameter_error(local, link, below.function, local.error(below))

    def _parameter_error(self, local: Local, link: Link, function: Function, error: Error[Precision]) -> Error[Tensor]:
        """An error pulled back to the parameters of the function that made the prediction."""
        mean, weighted, rows = local.belief.mean, error.weighted, error.weighted.shape[1]
        everything = self._parameters(local, link.of)
        mine = self._slice(local, link)
        slope = function.parameter_slope(mean, everything, rows)[..., mine]
        flat = slope.reshape(slope.shape[0], -1, slope.shape[-1])

        def remainder() -> Tensor | None:
            curve = function.parameter_curve(mean, everything, weighted)
            own = None if curve is None else -curve[:, mine, mine]
            if error.remainder is None:
                return own
            passed_on = flat.mT @ error.remainder @ flat
            return passed_on if own is None else own + passed_on

        pulled = torch.bmm(weighted.reshape(slope.shape[0], 1, -1), flat)[:, 0]
        return Error(pulled, lambda: error.precision.sandwich(flat), remainder)

    # --- acting ------------------------------------------------------------------------------------------------
    def move(self, local: Local) -> None:
        mean: Tensor = local.belief.mean
        flat = mean.flatten(1)
        motion = torch.constant_pad_nd(flat[:, self.dim :], (0, self.dim))
        curvature = self.hessian(local) if local.rule.needs_curvature else None
        step = local.rule.step(Evidence(flat, motion, self._shift(local), self.gradient(local), curvature))
        local.belief = local.belief._replace(mean=mean + step.view_as(mean))

    def settle(self, local: Local) -> None:
        found = posterior(self.hessian(local))
        if found.mended is not None:
            if self.indefinite == "raise":
                local.fail(found.mended, INDEFINITE)
            local.memory = StateMemory(local.memory.mended + found.mended)
        local.belief = StateBelief(local.belief.mean, found.precision, found.log_det_covariance)

    def energy(self, local: Local) -> Energy:
        work = self._work(local)
        fit = (work.weighted * work.error).sum((1, 2))
        return Energy(complexity=0.5 * (fit - work.precision.log_det - local.belief.log_det_covariance))

    def fallbacks(self, local: Local) -> Tensor:
        mended: Tensor = local.memory.mended
        return mended

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        shape = ("order", "dimension")
        return {
            "mean": Quantity(shape, lambda local: local.belief.mean),
            "sd": Quantity(shape, self._sd),
            "covariance": Quantity(("element", "element_"), lambda local: covariance_of(local.belief.precision)),
            "error": Quantity(("error_order", "dimension"), lambda local: self._work(local).error),
            "weighted_error": Quantity(("error_order", "dimension"), lambda local: self._work(local).weighted),
        }

    # --- what the rules above share --------------------------------------------------------------------------------
    def _sd(self, local: Local) -> Tensor:
        variance = covariance_of(local.belief.precision).diagonal(dim1=-2, dim2=-1)
        return variance.sqrt().view_as(local.belief.mean)

    def _work(self, local: Local) -> Work:
        mean: Tensor = local.belief.mean

        def compute() -> Work:
            flow = self.flow.linearise(mean, self._parameters(local, None), self.rows)
            target = torch.constant_pad_nd(mean[:, 1:], (0, 0, 0, 1))[:, : self.rows]
            (link,) = local.links_above("weighs")
            precision: Precision = local.prediction(link)
            error = target - flow.value
            mappings = {}
            for below in local.below:
                function, shape = below.function, below.child.error_shape
                assert function is not None and shape is not None
                mappings[below] = function.linearise(mean, self._parameters(local, below.child), shape.rows)
            slope = self._shift(local)[:, : self.rows * self.dim] - flow.slope
            return Work(error, slope, precision, precision.weigh(error), mappings)

        return local.once("work", compute, mean, *[local.prediction(link) for link in local.above])

    def _shift(self, local: Local) -> Tensor:
        """D, (1, n, n)."""
        mean: Tensor = local.belief.mean
        return local.once("shift", lambda: shift_matrix(self.orders, self.dim).to(mean)[None])

    def _parameters(self, local: Local, of: Node | None) -> Tensor:
        """θ (B, p) of the flow, or of the mapping to `of`: what the parameter nodes predict, in order of attachment."""
        links = local.links_above("parametrises", of)
        if len(links) == 1:
            only: Tensor = local.prediction(links[0])
            return only
        if not links:
            mean: Tensor = local.belief.mean
            return local.once("no parameters", lambda: mean.new_zeros(mean.shape[0], 0))
        parts = [local.prediction(link) for link in links]
        return local.once(f"parameters of {of.name if of else 'flow'}", lambda: torch.cat(parts, -1), *parts)

    def _slice(self, local: Local, link: Link) -> slice:
        first = 0
        for other in local.links_above("parametrises", link.of):
            size = local.prediction(other).shape[-1]
            if other is link:
                return slice(first, first + size)
            first += size
        raise AssertionError("a link that is not ours")

    def gradient(self, local: Local) -> Tensor:
        work = self._work(local)
        batch = work.weighted.shape[0]
        gradient = torch.bmm(work.weighted.view(batch, 1, -1), work.slope)
        for link, mapping in work.mappings.items():
            weighted = local.error(link).weighted.reshape(batch, 1, -1)
            gradient = torch.baddbmm(gradient, weighted, mapping.slope, alpha=-1)
        return gradient[:, 0]

    def hessian(self, local: Local) -> Tensor:
        curvature = self._gauss_newton(local)
        if self.curvature == "gauss-newton":
            return curvature
        work = self._work(local)
        mean: Tensor = local.belief.mean
        curves = [self.flow.curve(mean, self._parameters(local, None), work.weighted)]
        for link, mapping in work.mappings.items():
            assert link.function is not None
            error = local.error(link)
            curves.append(link.function.curve(mean, self._parameters(local, link.child), error.weighted))
            if error.remainder is not None:
                curvature = curvature + mapping.slope.mT @ error.remainder @ mapping.slope
        for curve in curves:
            curvature = curvature if curve is None else less_curve(curvature, curve)
        return curvature

    def _gauss_newton(self, local: Local) -> Tensor:
        work = self._work(local)
        shares = []
        for link, mapping in work.mappings.items():
            slope, precision = mapping.slope, local.error(link).precision
            # for a linear mapping this changes on the slow clock only
            name = f"evidence of {link.child.name}"
            shares.append(local.once(name, partial(precision.sandwich, slope), slope, precision))
        return local.once("gauss-newton", lambda: sum(shares, work.precision.sandwich(work.slope)), work, *shares)


def _count(above: tuple[Link, ...], of: Node | None) -> int:
    """How many parameters a flow (of is None) or the mapping to `of` is given."""
    total = 0
    for link in above:
        if link.kind == "parametrises" and link.of is of:
            total += link.parent.width
    return total
