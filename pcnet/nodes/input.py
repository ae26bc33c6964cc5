"""Known inputs, which predict a cause that may differ from them."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pcnet.errors import GraphError, ObservationError
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Predicts
from pcnet.model.messages import PointPrediction
from pcnet.model.node import Energy, Recordable
from pcnet.model.protocols import ForecastContext
from pcnet.nodes.sensory import Context, SensoryNode, SensoryState
from pcnet.numerics.branching import holds
from pcnet.settings import settings


@settings
class InputNode(SensoryNode):
    """A generalised input ũ (..., orders, dim), known without error, that predicts a cause.

    Settings are those of a `SensoryNode`. It has no error of its own: the deviation of a cause from its input is
    governed by the precision of the cause. Missing inputs keep their last value, at rest.
    """

    kind: ClassVar[str] = "input"
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Predicts,)
    child_of: ClassVar[tuple[type[AnyLink], ...]] = ()

    def check_as_parent(self, link: AnyLink) -> None:
        super().check_as_parent(link)
        shape = link.child.error_shape
        if link.child.observes:
            raise GraphError(f"{self.title} cannot be the parent in {link!r}: inputs predict causes")
        if shape is None or (shape.rows, shape.dim) != (self.orders, self.dim):
            raise GraphError(f"{self.title} must have the orders and dimensions of {link.child.name!r}, {shape}")

    def check(self, links: Neighbours, like: Tensor) -> None:
        if not links.below:
            raise GraphError(f"{self.title} has no effect: add graph.predicts({self.name}, cause)")

    def prediction(self, ctx: Context, link: AnyLink) -> PointPrediction:
        observation = ctx.state.observation
        if self.complete(ctx):
            return PointPrediction(observation)
        held = self.where_seen(ctx, observation, 0.0)
        return PointPrediction(torch.cat([observation[:, :1], held[:, 1:]], 1))

    def observe(self, ctx: Context) -> SensoryState:
        state = super().observe(ctx)
        if holds((state.known == 0).any()):
            raise ObservationError(f"{self.title} has no value yet to hold: its first input must not be missing")
        return state

    def forecast_message(self, ctx: Context, link: AnyLink, now: ForecastContext) -> Tensor:
        """The last value, held."""
        return now.repeat(ctx.state.observation[:, 0])

    def forecast_value(self, ctx: Context, now: ForecastContext) -> None:
        return None

    def error(self, ctx: Context, link: AnyLink) -> Any:
        raise GraphError(f"{self.title} has no error")

    def energy(self, ctx: Context) -> Energy:
        return Energy()

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        return {"observation": Recordable(("order", "dimension"), lambda ctx: ctx.state.observation)}
