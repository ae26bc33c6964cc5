"""Hidden causes: what drives a state from outside, predicted from above, by a known input or by a constant."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.check import check_function
from pcnet.model.messages import Error
from pcnet.model.node import BatchSpec, ForecastContext, Link, Node, NodeContext
from pcnet.nodes.generalised_variable import GeneralisedVariable, Work
from pcnet.nodes.precision import precision_error
from pcnet.numerics.precision import Precision
from pcnet.settings import Vector, at_least_1d, number, settings


class CauseMemory(NamedTuple):
    """How often the posterior had to be mended (B,), and the constant η̃ (B, orders, dim)."""

    regularised: Tensor
    prior: Tensor


@settings
class CauseNode(GeneralisedVariable):
    """A generalised cause ṽ (..., orders, dim) that drives the flows and mappings of states.

    Local energy ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| of ε̃ = ṽ − η̃, with η̃ the sum of what the nodes above predict of it; where there
    are none, the constant `prior`, at rest.
    """

    _: KW_ONLY
    prior: Vector = number(0.0)

    def __post_init__(self) -> None:
        GeneralisedVariable.__post_init__(self)
        given = at_least_1d(self.prior).shape[-1]
        if given not in (1, self.dim):
            raise SettingError(
                f"{self.title}: prior has {given} values in its last dimension, and the cause {self.dim} dimensions "
                "(for a batch of single values add one: prior[:, None])"
            )

    def describe(self) -> str:
        return f"dim {self.dim}, orders {self.orders}"

    def as_parent(self, link: Link) -> None:
        if link.kind != "drives":
            GeneralisedVariable.as_parent(self, link)

    def as_child(self, link: Link) -> None:
        if link.kind not in ("predicts", "weighs"):
            Node.as_child(self, link)

    def check(self, above: tuple[Link, ...], below: tuple[Link, ...], like: Tensor) -> None:
        if not below:
            raise GraphError(f"{self.title} has no effect: add graph.drives({self.name}, state)")
        if not any(link.kind == "weighs" for link in above):
            raise GraphError(
                f"{self.title} has no precision: add graph.weighs(PrecisionNode(...), {self.name}) for how far it may "
                "be from what is expected of it"
            )
        for link in below:
            if link.function is not None and link.child.error_shape is not None:
                what = f"the mapping from {self.name!r} to {link.child.name!r}"
                check_function(what, link.function, self.dim, 0, link.child.error_shape.dim, like)

    def begin(self, local: NodeContext, start: BatchSpec) -> None:
        GeneralisedVariable.begin(self, local, start)
        prior = at_least_1d(self.prior)
        value = start.fill(prior.expand(*prior.shape[:-1], self.dim), 1)
        at_rest = torch.constant_pad_nd(value[:, None], (0, 0, 0, self.orders - 1))
        local.memory = CauseMemory(local.memory.regularised, at_rest)

    def initialise(self, local: NodeContext) -> None:
        """Believe what is expected."""
        if self.initial_mean is None:
            local.belief = local.belief._replace(mean=self._expected(local))

    def error(self, local: NodeContext, link: Link) -> Error[Any]:
        work = self.work(local)
        if link.kind == "weighs":
            return precision_error(work.precision, work.error, work.weighted)
        if not local.rule.implicit:
            return Error(work.weighted, work.precision)
        return Error(work.weighted, work.precision, eliminated=lambda: self.after_answer(local, -work.slope, {}))

    def work(self, local: NodeContext) -> Work:
        mean: Tensor = local.belief.mean

        def compute() -> Work:
            (link,) = local.links_above("weighs")
            precision: Precision = local.prediction(link)
            error = mean - self._expected(local)
            slope = local.once("slope", lambda: torch.eye(self.orders * self.dim).to(mean)[None])
            mappings = {}
            for below in local.links_below("predicts"):
                function, shape = below.function, below.child.error_shape
                assert function is not None and shape is not None
                mappings[below] = function.linearise(mean, mean.new_zeros(mean.shape[0], 0), shape.rows)
            slope = slope.expand(mean.shape[0], -1, -1)
            return Work(error, slope, precision, precision.weigh(error), mappings)

        return local.once("work", compute, mean, *[local.prediction(link) for link in local.above])

    def forecast_message(self, local: NodeContext, link: Link, now: ForecastContext) -> Tensor:
        given = now.of("predicts")
        value = (sum(given[1:], given[0]) if given else now.spread(local.memory.prior[:, 0])) + now.noise
        return value if link.function is None else link.function(value, value.new_zeros(*value.shape[:-1], 0))

    def _expected(self, local: NodeContext) -> Tensor:
        """η̃, (B, orders, dim)."""
        predicted: list[Tensor] = [local.prediction(link) for link in local.links_above("predicts")]
        if predicted:
            return sum(predicted[1:], predicted[0])
        constant: Tensor = local.memory.prior
        return constant
