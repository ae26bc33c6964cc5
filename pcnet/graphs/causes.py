"""Hidden causes of a state, as settings of a ready-made model."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

from pydantic import Field, SkipValidation

from pcnet.errors import SettingError
from pcnet.graphs.sensors import kernel_of, noise_node
from pcnet.model.graph import Graph
from pcnet.model.node import AnyNode
from pcnet.nodes import KalmanCauseNode, PrecisionNode
from pcnet.settings import Positive, PositiveVector, Vector, number, settings


@settings
class Cause:
    """A hidden cause v of a state, with a belief that is part of the state's.

    Args:
        dim: Its dimension.
        flow: h of v̇ = h(v, θ) + noise; the relaxation −v/correlation_time unless given.
        correlation_time: How long it lasts without a flow, in time units.
        noise_sd: First guess of the standard deviation of its noise, in units of v per √time. Without a flow its own
            standard deviation is then noise_sd √(correlation_time/2).
        initial_mean: Its value at the first observation, (..., dim); 0 unless given.
        initial_sd: Standard deviation of that, one number or (..., dim).
    """

    _: KW_ONLY
    dim: int = Field(default=1, ge=1)
    flow: SkipValidation[Any] = None
    correlation_time: Positive | None = None
    noise_sd: PositiveVector = number(1.0)
    initial_mean: Vector | None = None
    initial_sd: PositiveVector = number(1.0)

    def node(self, name: str) -> KalmanCauseNode:
        return KalmanCauseNode(
            name,
            dim=self.dim,
            flow=self.flow,
            correlation_time=self.correlation_time,
            initial_mean=self.initial_mean,
            initial_sd=self.initial_sd,
        )


def cause_nodes(title: str, causes: Any, noise_sd: Any) -> list[tuple[KalmanCauseNode, PrecisionNode]]:
    """Causes with the precisions of their noises; noise_sd: prior standard deviation of the logs of their variances."""
    if causes is None:
        return []
    if not isinstance(causes, Mapping) or not all(isinstance(each, Cause) for each in causes.values()):
        example = '{"force": Cause(correlation_time=2.0)}'
        raise SettingError(f"{title}: causes are Causes by name, such as {example}, not {causes!r}")
    return [
        (each.node(name), noise_node(f"noise_{name}", each.noise_sd, noise_sd, kernel_of(None), True))
        for name, each in causes.items()
    ]


def drive(
    graph: Graph, state: AnyNode, above: Sequence[AnyNode], hidden: Sequence[tuple[KalmanCauseNode, PrecisionNode]]
) -> None:
    """Let all nodes above drive a state, the hidden causes among them with their precisions."""
    for node in above:
        graph.drives(node, state)
    for cause, noise in hidden:
        graph.weighs(noise, cause)
