"""Generalised hidden states: a belief about value, velocity, acceleration, …, moved by a flow and by errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import torch
from pydantic import SkipValidation
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function, subtract_contracted_hessian
from pcnet.functions.check import check_function
from pcnet.functions.linearisation import Linearisation
from pcnet.functions.traced import as_function
from pcnet.model.messages import Error
from pcnet.model.node import ForecastContext, ForecastStart, Link, Node, NodeContext
from pcnet.nodes.generalised_variable import GeneralisedVariable, Work
from pcnet.nodes.precision import precision_error
from pcnet.numerics.precision import DenseCurvature, Precision
from pcnet.settings import settings

HALVINGS = 30
"""How often a step towards the first observation is halved before it is given up."""


@settings
class GeneralisedStateNode(GeneralisedVariable):
    """A generalised hidden state (..., orders, dim) that moves by `flow` and predicts the nodes below it.

    Local energy ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| of the motion error ε̃ = Dx̃ − f̃(x̃, ṽ, θ).

    flow: function of (state, parameters), or of (state, causes, parameters) for a state that causes drive; or a
    `Function` with its own derivatives.
    initial_mean: x̃ before the first observation; found from the first observation unless given.
    last_error: keep the error of the highest order, 0 − J_f x^(k−1), or drop it.
    bend: in slopes, keep what the orders above the value owe to the change of J, ∂(J x')/∂x, or drop it as SPM does.
    """

    _: KW_ONLY
    flow: SkipValidation[Any]
    last_error: Literal["keep", "drop"] = "keep"
    jacobian_derivative: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        GeneralisedVariable.__post_init__(self)
        if self.last_error == "drop" and self.orders < 2:
            raise SettingError(f"{self.title}: last_error='drop' leaves no motion error with one order; use orders=2")
        if self.flow is None:
            raise SettingError(f"{self.title}: give a flow; for a state that drifts freely, lambda x, theta: 0 * x")
        object.__setattr__(self, "flow", as_function(self.flow, self.dim))

    # --- composing ---------------------------------------------------------------------------------------------
    @property
    def rows(self) -> int:
        """The orders of the motion error."""
        return self.orders if self.last_error == "keep" else self.orders - 1

    def describe(self) -> str:
        return f"dim {self.dim}, orders {self.orders}, flow {self.flow!r}"

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
        causes = [link.parent for link in above if link.kind == "drives"]
        width = sum(cause.error_shape.dim for cause in causes if cause.error_shape is not None)
        functions: list[tuple[str, Function, Node | None, int]] = [
            (f"the flow of {self.title}", self.flow, None, self.dim)
        ]
        for link in below:
            assert link.function is not None and link.child.error_shape is not None
            what = f"the mapping from {self.name!r} to {link.child.name!r}"
            functions.append((what, link.function, link.child, link.child.error_shape.dim))
        for what, function, of, out in functions:
            if function.takes_causes and not causes:
                raise GraphError(f"{what} is one of causes: add graph.drives(cause, {self.name})")
            dim = self.dim + width if function.takes_causes else self.dim
            check_function(what, function, dim, _count(above, of), out, like)
        if causes and not any(function.takes_causes for _, function, _, _ in functions):
            raise GraphError(
                f"{self.title} is driven by {causes[0].name!r}, but neither its flow nor a mapping of it takes causes; "
                "give a function of (state, causes, parameters)"
            )
        for cause in causes:
            if cause.error_shape is not None and cause.error_shape.rows > self.orders:
                raise GraphError(
                    f"{self.title} has {self.orders} orders and cannot take the {cause.error_shape.rows} of its cause "
                    f"{cause.name!r}"
                )

    # --- beginning ---------------------------------------------------------------------------------------------
    def initialise(self, local: NodeContext) -> None:
        """One Gauss–Newton step on what the nodes below report, of the value alone, halved until their errors fall.

        Its velocity then follows the flow. Higher orders start at zero: their precision is so low that what a wrong
        flow puts there would stay, and push the state away.
        """
        if self.initial_mean is not None:
            return
        value = self._argument(local, self.flow)[:, 0, : self.dim]
        before = self._errors_at(local, value)
        gradient, curvature = value.new_zeros(value.shape), value.new_zeros(*value.shape, self.dim)
        for link, mapping in self._mappings(local).items():
            error = local.error(link)
            gradient = gradient - mapping.vjp(error.weighted)[:, : self.dim]
            curvature = curvature + mapping.quadratic_form(error.precision)[:, : self.dim, : self.dim]
        step = -torch.einsum("bij,bj->bi", torch.linalg.pinv(curvature, hermitian=True), gradient)
        worse = torch.ones_like(before, dtype=torch.bool)
        for _ in range(HALVINGS):
            worse = ~(self._errors_at(local, value + step) <= before)
            if not bool(worse.any()):
                break
            step = torch.where(worse[:, None], 0.5 * step, step)
        self._believe(local, torch.where(worse[:, None], value, value + step), moving=True)

    def _errors_at(self, local: NodeContext, value: Tensor) -> Tensor:
        """Believe in this value; the squared errors of the nodes below, (B,)."""
        self._believe(local, value, moving=False)
        errors = [local.error(link).weighted.flatten(1) for link in local.below]
        return torch.cat(errors, 1).square().sum(1)

    def _believe(self, local: NodeContext, value: Tensor, moving: bool) -> None:
        """Believe in this value (B, dim), at rest or with the velocity that the flow gives it."""
        rows = [value] + [torch.zeros_like(value)] * (self.orders - 1)
        if moving and self.orders > 1:
            here = self._argument(local, self.flow)[:, 0, self.dim :]
            rows[1] = self.flow(torch.cat([value, here], -1), self._parameters(local, None))
        local.belief = local.belief._replace(mean=torch.stack(rows, 1))

    def _mappings(self, local: NodeContext) -> Mapping[Link, Linearisation]:
        return self.work(local).mappings

    # --- messages ----------------------------------------------------------------------------------------------
    def error(self, local: NodeContext, link: Link) -> Error[Any]:
        work = self.work(local)
        if link.kind == "weighs":
            return precision_error(work.precision, work.error, work.weighted)
        if link.kind == "drives":
            return self._cause_error(local, link)
        if link.of is None:  # the parameters of the flow hear of the motion error
            return self._parameter_error(local, link, self.flow, Error(work.weighted, work.precision))
        (below,) = (other for other in local.below if other.child is link.of)
        assert below.function is not None
        return self._parameter_error(local, link, below.function, local.error(below))

    def _parameter_error(
        self, local: NodeContext, link: Link, function: Function, error: Error[Precision]
    ) -> Error[Tensor]:
        """An error pulled back to the parameters of the function that made the prediction."""
        weighted, rows = error.weighted, error.weighted.shape[1]
        x = self._argument(local, function)
        everything = self._parameters(local, link.of)
        mine = self._slice(local, link)
        slope = function.parameter_slope(x, everything, rows)[..., mine]
        flat = slope.reshape(slope.shape[0], -1, slope.shape[-1])

        def remainder() -> Tensor | None:
            contracted_hessian = function.parameter_contracted_hessian(x, everything, weighted)
            own = None if contracted_hessian is None else -contracted_hessian[:, mine, mine]
            if error.remainder is None:
                return own
            passed_on = flat.mT @ error.remainder @ flat
            return passed_on if own is None else own + passed_on

        pulled = torch.bmm(weighted.reshape(slope.shape[0], 1, -1), flat)[:, 0]
        return Error(pulled, lambda: error.precision.quadratic_form(flat), remainder)

    def _cause_error(self, local: NodeContext, link: Link) -> Error[DenseCurvature]:
        """All errors that a cause has a part in, its own motion's and those of the nodes below, pulled back to it."""
        work = self.work(local)
        batch = work.weighted.shape[0]
        own = work.by_cause[link]
        through = {below: slopes[link] for below, slopes in work.mapped.items()}
        weighted = -torch.bmm(work.weighted.view(batch, 1, -1), own)[:, 0]
        for below, slope in through.items():
            weighted = weighted + torch.bmm(local.error(below).weighted.reshape(batch, 1, -1), slope)[:, 0]

        def precision() -> DenseCurvature:
            shares = [local.error(below).precision.quadratic_form(slope) for below, slope in through.items()]
            return DenseCurvature(sum(shares, work.precision.quadratic_form(own)))

        def remainder() -> Tensor:
            start, cause = self._place(local, link), link.parent.error_shape
            assert cause is not None
            found = weighted.new_zeros(batch, weighted.shape[1], weighted.shape[1])
            for contracted_hessian in self._curves(local, caused_only=True):
                found = subtract_contracted_hessian(
                    found, contracted_hessian[:, : cause.rows, start : start + cause.dim, start : start + cause.dim]
                )
            for below, slope in through.items():
                passed_on = local.error(below).remainder
                found = found if passed_on is None else found + slope.mT @ passed_on @ slope
            return found

        answer = (lambda: self.after_answer(local, own, through)) if local.rule.implicit else None
        return Error(weighted, precision, remainder, answer)

    # --- what is to come ---------------------------------------------------------------------------------------------
    def standing(self, local: NodeContext) -> ForecastStart:
        mean, covariance = (self.quantities[name].read(local) for name in ("mean", "covariance"))
        return ForecastStart(mean[:, 0], covariance[:, : self.dim, : self.dim])

    def drift(self, local: NodeContext, now: ForecastContext) -> Tensor:
        return self._to_come(local, self.flow, None, now) + now.noise

    def forecast_message(self, local: NodeContext, link: Link, now: ForecastContext) -> Tensor:
        assert link.function is not None
        return self._to_come(local, link.function, link.child, now)

    def forecast_value(self, local: NodeContext, now: ForecastContext) -> Tensor:
        return now.own

    def _to_come(self, local: NodeContext, function: Function, of: Node | None, now: ForecastContext) -> Tensor:
        """The flow, or the mapping to `of`, at a moment to come."""
        causes = [now.heard[link] for link in self._causes(local)] if function.takes_causes else []
        parameters = [now.heard[link] for link in local.links_above("parametrises", of)]
        none = now.own.new_zeros(*now.own.shape[:-1], 0)
        return function(torch.cat([now.own, *causes], -1), torch.cat(parameters, -1) if parameters else none)

    # --- what the rules share ----------------------------------------------------------------------------------------
    def work(self, local: NodeContext) -> Work:
        mean: Tensor = local.belief.mean

        def compute() -> Work:
            flow, by_cause = self._linearise(local, self.flow, None, self.rows)
            target = torch.constant_pad_nd(mean[:, 1:], (0, 0, 0, 1))[:, : self.rows]
            (link,) = local.links_above("weighs")
            precision: Precision = local.prediction(link)
            error = target - flow.value
            mappings, mapped = {}, {}
            for below in local.below:
                function, shape = below.function, below.child.error_shape
                assert function is not None and shape is not None
                mappings[below], slopes = self._linearise(local, function, below.child, shape.rows)
                if slopes:
                    mapped[below] = slopes
            slope = self.shift(local)[:, : self.rows * self.dim] - flow.slope
            own = {
                cause: -by_cause[cause] if by_cause else slope.new_zeros(*flow.slope.shape[:2], _size(cause))
                for cause in self._causes(local)
            }
            return Work(error, slope, precision, precision.weigh(error), mappings, own, mapped)

        return local.once("work", compute, mean, *[local.prediction(link) for link in local.above])

    def _linearise(
        self, local: NodeContext, function: Function, of: Node | None, rows: int
    ) -> tuple[Linearisation, dict[Link, Tensor]]:
        """A function with its slope in the state, and apart from that its slopes in the causes, if it takes them."""
        found = function.linearise(self._argument(local, function), self._parameters(local, of), rows)
        if self.jacobian_derivative == "drop":
            found = Linearisation(found.value, found.jacobian, None, self.orders)
        if not function.takes_causes:
            return found, {}
        parts, first = {}, self.dim
        for link in self._causes(local):
            shape = link.parent.error_shape
            assert shape is not None
            parts[link] = found.restrict(slice(first, first + shape.dim), shape.rows).slope
            first += shape.dim
        return found.restrict(slice(self.dim), self.orders), parts

    def less_curves(self, local: NodeContext, curvature: Tensor) -> Tensor:
        for contracted_hessian in self._curves(local):
            curvature = subtract_contracted_hessian(curvature, contracted_hessian[..., : self.dim, : self.dim])
        return curvature

    def _curves(self, local: NodeContext, caused_only: bool = False) -> list[Tensor]:
        """Σ ξ ∂²f̃/∂x̃² of the flow and, with the errors from below, of the mappings; see `Function.curve`."""
        functions: list[tuple[Function, Node | None, Tensor]] = [(self.flow, None, self.work(local).weighted)]
        for link in local.below:
            assert link.function is not None
            functions.append((link.function, link.child, local.error(link).weighted))
        found = []
        for function, of, weighted in functions:
            if function.takes_causes or not caused_only:
                x = self._argument(local, function)
                contracted_hessian = function.contracted_hessian(x, self._parameters(local, of), weighted)
                found += [] if contracted_hessian is None else [contracted_hessian]
        return found

    def _argument(self, local: NodeContext, function: Function) -> Tensor:
        """What a function is one of: the state, and beside it, if it takes them, the causes; (B, orders, …)."""
        mean: Tensor = local.belief.mean
        if not function.takes_causes:
            return mean
        causes = [local.prediction(link) for link in self._causes(local)]

        def joined() -> Tensor:
            padded = [torch.constant_pad_nd(v, (0, 0, 0, self.orders - v.shape[1])) for v in causes]
            return torch.cat([mean, *padded], -1)

        return local.once("state and causes", joined, mean, *causes)

    def _causes(self, local: NodeContext) -> tuple[Link, ...]:
        return local.links_above("drives")

    def _place(self, local: NodeContext, link: Link) -> int:
        """Where a cause begins among the arguments of a function."""
        first = self.dim
        for other in self._causes(local):
            if other is link:
                break
            assert other.parent.error_shape is not None
            first += other.parent.error_shape.dim
        return first

    def _parameters(self, local: NodeContext, of: Node | None) -> Tensor:
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

    def _slice(self, local: NodeContext, link: Link) -> slice:
        first = 0
        for other in local.links_above("parametrises", link.of):
            size = local.prediction(other).shape[-1]
            if other is link:
                return slice(first, first + size)
            first += size
        raise AssertionError("a link that is not ours")


def _count(above: tuple[Link, ...], of: Node | None) -> int:
    """How many parameters a flow (of is None) or the mapping to `of` is given."""
    total = 0
    for link in above:
        if link.kind == "parametrises" and link.of is of:
            total += link.parent.width
    return total


def _size(link: Link) -> int:
    shape = link.parent.error_shape
    assert shape is not None
    return shape.rows * shape.dim
