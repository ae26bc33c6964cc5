"""Known inputs, which drive a Kalman state, or predict a cause that may differ from them."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, ObservationError, SettingError
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Drives, Predicts
from pcnet.model.messages import PointPrediction
from pcnet.model.node import BatchSpec, Energy, Recordable
from pcnet.model.protocols import ForecastContext
from pcnet.nodes.kalman_inputs import InputSpec
from pcnet.nodes.sensory import Context, SensoryBound, SensoryNode, SensoryState
from pcnet.numerics.branching import holds
from pcnet.numerics.kernels import Kernel, White
from pcnet.numerics.trees import select
from pcnet.settings import PositiveVector, check_size, settings


@settings
class InputNode(SensoryNode):
    """A known input u that drives a Kalman state, or a generalised one ũ (..., orders, dim) that predicts a cause.

    `graph.drives(u, x)` makes the input an argument of the flow f(x, u, θ) and of the mappings g(x, u, θ) of a Kalman
    state. `graph.predicts(u, v)` is for generalised states: v is a cause, and its precision governs how far it is from
    the input. Missing inputs keep their last value, at rest. Further settings are those of a `SensoryNode`.

    Args:
        orders: 1 for a Kalman state.
        interpolation: Inputs of a Kalman state between observations: "hold" keeps that of the last observation,
            "linear" is a straight line to that of the next one.
        sd: Standard deviation of the true input of a Kalman state around the given one, one number or (..., dim). The
            deviation is constant from one observation to the next, and independent of the others.
    """

    _: KW_ONLY
    orders: int = Field(default=1, ge=1)
    interpolation: Literal["hold", "linear"] = "hold"
    sd: PositiveVector | None = None
    kind: ClassVar[str] = "input"
    is_input: ClassVar[bool] = True
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Drives, Predicts)
    child_of: ClassVar[tuple[type[AnyLink], ...]] = ()

    def __post_init__(self) -> None:
        SensoryNode.__post_init__(self)
        if self.sd is not None:
            check_size(self.title, "sd", self.sd, self.dim)
        if self.has_outliers:
            raise SettingError(f"{self.title}: an input has no outliers; give sd, its standard deviation")

    @property
    def is_interpolated(self) -> bool:
        return self.interpolation == "linear"

    def input_spec(self, spec: BatchSpec) -> InputSpec:
        """What a Kalman state needs to know of it."""
        variance = None if self.sd is None else spec.expand_vector(self.sd, self.dim) ** 2
        return InputSpec(self.dim, self.is_interpolated, variance)

    def check_as_parent(self, link: AnyLink) -> None:
        super().check_as_parent(link)
        shape = link.child.error_shape
        if isinstance(link, Drives):
            if not link.child.sends_covariance:
                raise GraphError(
                    f"{self.title} cannot drive {link.child.name!r} directly; put a cause between them: "
                    f"graph.predicts({self.name}, cause), graph.drives(cause, {link.child.name})"
                )
            if self.orders != 1:
                raise GraphError(f"{self.title} drives a Kalman state, which takes values only: use orders=1")
            return
        if self.sd is not None or self.interpolation != "hold":
            raise GraphError(
                f"{self.title} has an sd or an interpolation, which are for inputs that drive a Kalman state; the "
                f"precision of {link.child.name!r} says how far it is from its input"
            )
        if link.child.observes:
            raise GraphError(f"{self.title} cannot be the parent in {link!r}: inputs predict causes")
        if shape is None or (shape.rows, shape.dim) != (self.orders, self.dim):
            raise GraphError(f"{self.title} must have the orders and dimensions of {link.child.name!r}, {shape}")

    def check(self, links: Neighbours, like: Tensor) -> None:
        if not links.below:
            raise GraphError(
                f"{self.title} has no effect: add graph.drives({self.name}, state) for a Kalman state, or "
                f"graph.predicts({self.name}, cause)"
            )

    def bind(self, links: Neighbours, spec: BatchSpec) -> SensoryBound:
        return super().bind(links, spec)._replace(input_variance=self.input_spec(spec).variance)

    def prediction(self, ctx: Context, link: AnyLink) -> PointPrediction:
        observation = ctx.state.observation
        if self.complete(ctx):
            return PointPrediction(observation)
        held = self.where_seen(ctx, observation, 0.0)
        return PointPrediction(torch.cat([observation[:, :1], held[:, 1:]], 1))

    def initialise(self, ctx: Context) -> SensoryState:
        """The state at the first observation; inputs may have been known before it."""
        first, known = super().initialise(ctx), (ctx.state.known > 0).all(-1)
        return select(known, ctx.state, first)

    def observe(self, ctx: Context) -> SensoryState:
        state = super().observe(ctx)
        if holds((state.known == 0).any()):
            raise ObservationError(f"{self.title} has no value yet to hold: its first input must not be missing")
        return state

    def forecast_message(self, ctx: Context, link: AnyLink, now: ForecastContext) -> Tensor:
        """The last value, held."""
        return now.repeat(ctx.state.observation[:, 0]) + now.noise

    def forecast_noises(self, ctx: Context) -> list[tuple[Tensor, Kernel]]:
        """White noise that is held constant from one observation to the next."""
        variance = ctx.bound.input_variance
        return [] if variance is None else [(variance.diag_embed(), White())]

    def forecast_value(self, ctx: Context, now: ForecastContext) -> None:
        return None

    def error(self, ctx: Context, link: AnyLink) -> Any:
        raise GraphError(f"{self.title} has no error")

    def energy(self, ctx: Context) -> Energy:
        return Energy()

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        return {"observation": Recordable(("order", "dimension"), lambda ctx: ctx.state.observation)}
