"""Sensory nodes: turn observations into generalised observations and hold the sensory error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.generalised import backward_differences, taylor_shift
from pcnet.linalg import Precision
from pcnet.messages import Error
from pcnet.node import Energy, ErrorShape, Link, Local, Node, Quantity, Start
from pcnet.nodes.precision import precision_error
from pcnet.settings import NotNegative, Positive, number, settings


class SensoryBelief(NamedTuple):
    """The generalised observation ỹ, (B, orders, dim)."""

    observation: Tensor


class SensoryRule(NamedTuple):
    """The sampling interval (B, 1), and the matrix that moves data on (B, orders, orders), if they do."""

    dt: Tensor
    ahead: Tensor | None


class SensoryWork(NamedTuple):
    """The prediction g̃, the error ε̃ = ỹ − g̃, its precision Π̃ and ξ = Π̃ε̃; (B, orders, dim) each."""

    prediction: Tensor
    error: Tensor
    precision: Precision
    weighted: Tensor


@settings
class SensoryNode(Node):
    """Generalised observations ỹ (..., orders, dim), by backward differences over the sampling interval dt, or given.

    Local energy ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| of ε̃ = ỹ − Σ g̃, the sum over the states that predict it.

    dt: the time between two observations, if it is known; needed for more orders than one.
    start: where differences begin. "first" takes the first observation as standing still, "zeros" as a jump from 0.
    What is done before the first observation then finds an observation of 0.
    derivatives: "backward" differences, or "given": an observation then is all orders of ỹ, one after the other.
    ahead: how far, in time, data move on by themselves when the node is asked to move: ỹ ← exp(D·ahead)ỹ.
    """

    _: KW_ONLY
    dim: int = Field(ge=1)
    orders: int = Field(ge=1)
    dt: Positive | None = None
    start: Literal["first", "zeros"] = "first"
    derivatives: Literal["backward", "given"] = "backward"
    ahead: NotNegative = number(0.0)
    role: ClassVar[str] = "sensory"
    observes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if self.dt is None and self.orders > 1 and self.derivatives == "backward":
            raise SettingError(f"{self.title}: give dt, the time between two observations, for {self.orders} orders")

    @property
    def error_shape(self) -> ErrorShape:
        return ErrorShape(self.orders, self.dim)

    @property
    def observed_width(self) -> int:
        return self.dim if self.derivatives == "backward" else self.orders * self.dim

    @property
    def sampling_interval(self) -> Tensor | None:
        return self.dt

    @property
    def data(self) -> Mapping[str, Any]:
        dt = None if self.dt is None else self.dt.tolist()
        known: dict[str, Any] = {"orders": self.orders, "channels": self.dim, "dt": dt, "start": self.start}
        return known if self.derivatives == "backward" else {**known, "derivatives": self.derivatives}

    def describe(self) -> str:
        interval = number(1.0) if self.dt is None else self.dt
        dt = f"{interval.item():g}" if interval.numel() == 1 else "one for each batch element"
        return f"dim {self.dim}, orders {self.orders}, dt {dt}"

    def as_child(self, link: Link) -> None:
        if link.kind not in ("predicts", "weighs"):
            Node.as_child(self, link)

    def check(self, above: tuple[Link, ...], below: tuple[Link, ...], like: Tensor) -> None:
        if not any(link.kind == "predicts" for link in above):
            raise GraphError(f"{self.title} is predicted by nothing: add graph.predicts(state, {self.name})")
        if not any(link.kind == "weighs" for link in above):
            raise GraphError(
                f"{self.title} has no precision: add graph.weighs(PrecisionNode(...), {self.name}) for its error"
            )

    def begin(self, local: Local, start: Start) -> None:
        dt = start.fill(number(1.0) if self.dt is None else self.dt, 0)[:, None]
        ahead = start.fill(self.ahead, 0)
        local.rule = SensoryRule(dt, taylor_shift(ahead, self.orders) if bool((ahead != 0).any()) else None)
        zeros = torch.zeros(start.batch, self.orders, self.dim, dtype=start.dtype, device=start.device)
        if self.start == "first" and local.observation is not None:
            zeros[:, 0] = local.observation[:, : self.dim]
        local.belief = SensoryBelief(zeros)

    def sense(self, local: Local) -> None:
        assert local.observation is not None
        if self.derivatives == "given":
            local.belief = SensoryBelief(local.observation.view(-1, self.orders, self.dim))
            return
        previous = local.belief.observation
        local.belief = SensoryBelief(backward_differences(local.observation, previous, local.rule.dt))

    def move(self, local: Local) -> None:
        """Let the data move on under their own derivatives."""
        if local.rule.ahead is not None:
            local.belief = SensoryBelief(torch.bmm(local.rule.ahead, local.belief.observation))

    def err(self, local: Local, link: Link) -> Error[Any]:
        work = self.work(local)
        if link.kind == "weighs":
            return precision_error(work.precision, work.error, work.weighted)
        return Error(work.weighted, work.precision)

    def energy(self, local: Local) -> Energy:
        work = self.work(local)
        fit = (work.weighted * work.error).sum((1, 2))
        constant = self.orders * self.dim * math.log(2 * math.pi)
        return Energy(accuracy=0.5 * (work.precision.log_det - fit - constant))

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        shape = ("order", "dimension")
        return {
            "observation": Quantity(shape, lambda local: local.belief.observation),
            "prediction": Quantity(shape, lambda local: self.work(local).prediction),
            "error": Quantity(shape, lambda local: self.work(local).error),
            "weighted_error": Quantity(shape, lambda local: self.work(local).weighted),
        }

    def work(self, local: Local) -> SensoryWork:
        """The sensory error and its weight; once for the same observation and messages."""
        observation: Tensor = local.belief.observation

        def compute() -> SensoryWork:
            parts = [local.prediction(link) for link in local.links_above("predicts")]
            (link,) = local.links_above("weighs")
            prediction, precision = sum(parts[1:], parts[0]), local.prediction(link)
            error = observation - prediction
            return SensoryWork(prediction, error, precision, precision.weigh(error))

        return local.once("work", compute, observation, *[local.prediction(link) for link in local.above])
