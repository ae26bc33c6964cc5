"""Known inputs: what is put into a system, and so expected of a cause that may differ from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pcnet.errors import GraphError, ObservationError
from pcnet.model.messages import Error, Prediction
from pcnet.model.node import Energy, ForecastContext, Link, Node, NodeContext, Recordable
from pcnet.nodes.sensory import SensoryNode
from pcnet.settings import settings


@settings
class InputNode(SensoryNode):
    """A generalised input ũ (..., orders, dim), observed without error, that predicts a cause.

    Settings are those of a `SensoryNode`. It has no error of its own: how far a cause may be from its input is the
    precision of the cause. Where it is missing, the last value holds, at rest.
    """

    def as_child(self, link: Link) -> None:
        Node.as_child(self, link)

    def as_parent(self, link: Link) -> None:
        shape = link.child.error_shape
        if link.kind != "predicts" or link.child.observes:
            Node.as_parent(self, link)
        if shape is None or (shape.rows, shape.dim) != (self.orders, self.dim):
            raise GraphError(f"{self.title} must have the orders and dimensions of {link.child.name!r}, {shape}")

    def check(self, above: tuple[Link, ...], below: tuple[Link, ...], like: Tensor) -> None:
        if not below:
            raise GraphError(f"{self.title} has no effect: add graph.predicts({self.name}, cause)")

    def prediction(self, local: NodeContext, link: Link) -> Prediction[Tensor]:
        belief = local.belief
        if self.complete(local):
            return Prediction(belief.observation)
        held = self.where_seen(local, belief.observation, 0.0)
        return Prediction(torch.cat([belief.observation[:, :1], held[:, 1:]], 1))

    def observe(self, local: NodeContext) -> None:
        super().observe(local)
        if bool((local.memory.known == 0).any()):
            raise ObservationError(f"{self.title} has no value yet that could hold: its first one must not be missing")

    def forecast_message(self, local: NodeContext, link: Link, now: ForecastContext) -> Tensor:
        """The last value, which holds."""
        return now.spread(local.belief.observation[:, 0])

    def forecast_value(self, local: NodeContext, now: ForecastContext) -> None:
        """Nothing: it is not predicted."""
        return

    def error(self, local: NodeContext, link: Link) -> Error[Any]:
        raise GraphError(f"{self.title} has no error")

    def energy(self, local: NodeContext) -> Energy:
        return Energy()

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        return {"observation": Recordable(("order", "dimension"), lambda local: local.belief.observation)}
