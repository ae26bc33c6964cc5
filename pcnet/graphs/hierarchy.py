"""Stacks: the states of a tier predict the parameters of the one below it, each on a clock of its own."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any, Literal

from pydantic import Field, SkipValidation

from pcnet.errors import SettingError
from pcnet.graph import Graph, Model
from pcnet.graphs.triple import kernel_of, learner, leveller, row
from pcnet.movers import Newton
from pcnet.node import Node
from pcnet.nodes import CategoricalNode, FilterNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.schedule import Level, tracking
from pcnet.settings import PositiveVector, Vector, number, settings, to_tensor


@settings
class Tier:
    """One tier of a stack: a state that moves by its flow, and how it predicts what is below it.

    flow, dim: of its state. mapping: from the state to the observations or to the parameters of the tier below; the
    identity unless given.
    mean, sd: the parameters of its flow, if it has any. At the top they are learned from this prior. Else the tier
    above predicts them, and sd is how far a window's parameters may be from what is predicted.
    expected_precision: of the noise of its flow, 1/variance; noise="learned" takes it for a first guess.
    smoothness: the width in time units of the autocorrelation of that noise, or a `Kernel`; white without it.
    """

    flow: SkipValidation[Any]
    dim: int = Field(ge=1)
    _: KW_ONLY
    mapping: SkipValidation[Any] = None
    mean: Vector | None = None
    sd: PositiveVector | None = None
    expected_precision: PositiveVector = number(1.0)
    noise: Literal["learned", "given"] = "given"
    smoothness: SkipValidation[Any] = None
    initial_mean: Vector | None = None
    initial_sd: PositiveVector = number(1.0)
    substeps: int = Field(default=1, ge=1)

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.sd is None):
            raise SettingError("Tier: give both mean and sd of the parameters, or neither")


def hierarchy(
    *tiers: Tier | CategoricalNode,
    dt: Any,
    channels: int | None = None,
    expected_precision_y: Any = 1.0,
    noise_y: Literal["learned", "given"] = "learned",
    smoothness_y: Any = None,
    every: Any = 64,
    sd_lambda: Any = 2.0,
) -> Model:
    """A stack of tiers, the lowest first, with its schedule: nodes x1, x2, …, theta1, …, noise1, …, y and noise_y.

    The lowest tier is observed at intervals dt, in so many channels (as many as it has dimensions unless given). Each
    tier acts once in `every` times that the one below it does. The top may be a `CategoricalNode`, under its own name.
    """
    if not tiers or not isinstance(tiers[0], Tier):
        raise SettingError("hierarchy: give at least one Tier, the lowest first")
    for i, tier in enumerate(tiers[:-1], 1):
        if not isinstance(tier, Tier):
            raise SettingError(f"hierarchy: {tier.title} has no parameters to be predicted; let it be the last tier")
        if tier.mean is None:
            raise SettingError(
                f"hierarchy: tier {i} has no parameters that tier {i + 1} could predict: give mean and sd"
            )

    def precision(name: str, expected: Any, width: Any, steady: bool) -> PrecisionNode:
        log = to_tensor(expected).log()
        channels: Literal["each", "shared"] = "each" if log.dim() and log.shape[-1] > 1 else "shared"
        rule, kernel = leveller(steady), kernel_of(width)
        return PrecisionNode(name, mean=log, sd=sd_lambda, kernel=kernel, channels=channels, mover=rule)

    graph, levels = Graph(), []
    below: Node = SensoryNode("y", dim=tiers[0].dim if channels is None else channels, orders=1, dt=dt)
    noisy = precision("noise_y", expected_precision_y, smoothness_y, steady=False)
    for i, tier in enumerate(tiers, 1):
        if not isinstance(tier, Tier):
            graph.predicts(tier, below)
            levels.append(Level((tier.name,), (), ()))
            continue
        learned = (f"noise{i}",) if tier.noise == "learned" else ()
        if i == 1 and noise_y == "learned":
            learned = (*learned, noisy.name)
        x = FilterNode(
            f"x{i}",
            dim=tier.dim,
            flow=tier.flow,
            initial_mean=row(tier.initial_mean),
            initial_sd=tier.initial_sd,
            substeps=tier.substeps,
            noise="learned" if learned else "given",
        )
        graph.predicts(x, below, via=tier.mapping)
        graph.weighs(precision(f"noise{i}", tier.expected_precision, tier.smoothness, steady=True), x)
        if i == 1:
            graph.weighs(noisy, below)
        if tier.mean is not None:
            mover = learner() if i == len(tiers) else Newton()
            assert tier.sd is not None
            below = ParameterNode(f"theta{i}", mean=tier.mean, sd=tier.sd, mover=mover)
            graph.parametrises(below, x)
        parameters = () if tier.mean is None else (f"theta{i}",)
        levels.append(Level((x.name,), learned, parameters))
    return Model(graph, tracking(every, levels=levels))
