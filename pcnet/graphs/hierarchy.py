"""Stacks: the state of a level predicts the parameters of the level below it, each level on its own clock."""

from dataclasses import KW_ONLY
from typing import Any, Literal

from pydantic import Field, SkipValidation

from pcnet.errors import SettingError
from pcnet.functions.check import output_size
from pcnet.functions.traced import as_function
from pcnet.graphs.adaptive_filter import kernel_of
from pcnet.model.graph import Graph
from pcnet.model.model import Model
from pcnet.model.node import AnyNode
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import CategoricalNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.nodes.kalman_state import noise_estimator, parameter_estimator
from pcnet.numerics.estimators import Newton
from pcnet.settings import PositiveVector, Vector, number, settings, to_tensor


@settings
class Level:
    """One level of a stack: a state with its flow, and how it predicts the level below.

    Args:
        flow: f(x, θ) of the state.
        dim: Dimension of the state.
        mapping: From the state to the observations, or to the parameters of the level below; the identity unless given.
        parameter_mean: Prior mean of the parameters of the flow, (..., p), if it has any. At the top they are learned
            from this prior; below, the level above predicts them.
        parameter_sd: Their standard deviation: of the prior at the top; below, of the deviation of a window's
            parameters from what the level above predicts.
        expected_precision: 1/variance of the process noise; a first guess with learn_noise=True.
        learn_noise: Whether the level of the process noise is learned.
        correlation_time: Lengthscale of the autocorrelation of the process noise in time units, or a `Kernel`; white
            unless given.
        initial_mean: First state, (..., dim); found from the first observation unless given.
        initial_sd: Standard deviation of the first state.
        substeps: Integration steps between two updates of the level.
    """

    flow: SkipValidation[Any]
    dim: int = Field(ge=1)
    _: KW_ONLY
    mapping: SkipValidation[Any] = None
    parameter_mean: Vector | None = None
    parameter_sd: PositiveVector | None = None
    expected_precision: PositiveVector = number(1.0)
    learn_noise: bool = False
    correlation_time: SkipValidation[Any] = None
    initial_mean: Vector | None = None
    initial_sd: PositiveVector = number(1.0)
    substeps: int = Field(default=1, ge=1)

    def __post_init__(self) -> None:
        if (self.parameter_mean is None) != (self.parameter_sd is None):
            raise SettingError("Level: give both parameter_mean and parameter_sd, or neither")


def hierarchy(
    *levels: Level | CategoricalNode,
    dt: Any,
    channels: int | None = None,
    expected_precision_y: Any = 1.0,
    learn_noise_y: bool = True,
    correlation_time_y: Any = None,
    every: Any = 64,
    sd_lambda: Any = 2.0,
) -> Model:
    """A stack of levels with its schedule: nodes x1, x2, …, theta1, …, noise1, …, y and noise_y.

    Args:
        levels: The levels, the lowest first. The top may be a `CategoricalNode`, which keeps its own name.
        dt: Sampling interval, in time units.
        channels: Number of observed channels; that of the lowest mapping's output unless given.
        expected_precision_y: 1/variance of the observation noise; a first guess with learn_noise_y=True.
        learn_noise_y: Whether the level of the observation noise is learned.
        correlation_time_y: Lengthscale of the autocorrelation of the observation noise, or a `Kernel`; white unless
            given.
        every: A level acts once in `every` actions of the level below it.
        sd_lambda: Prior standard deviation of log-precisions.
    """
    if not levels or not isinstance(levels[0], Level):
        raise SettingError("hierarchy: give at least one Level, the lowest first")
    for i, level in enumerate(levels[:-1], 1):
        if not isinstance(level, Level):
            raise SettingError(f"hierarchy: {level.title} has no parameters to predict; make it the last level")
        if level.parameter_mean is None:
            lacking = f"level {i} has no parameters for level {i + 1} to predict"
            raise SettingError(f"hierarchy: {lacking}: give parameter_mean and parameter_sd")

    def precision(name: str, expected: Any, correlation_time: Any, process: bool) -> PrecisionNode:
        log = to_tensor(expected).log()
        shared: Literal["each", "shared"] = "each" if log.dim() and log.shape[-1] > 1 else "shared"
        kernel, estimator = kernel_of(correlation_time), noise_estimator(process)
        return PrecisionNode(name, mean=log, sd=sd_lambda, kernel=kernel, channels=shared, estimator=estimator)

    graph, nodes = Graph(), []
    if channels is None:
        dim = levels[0].dim
        channels = output_size(as_function(levels[0].mapping, dim), dim, 0)
    below: AnyNode = SensoryNode("y", dim=channels, orders=1, dt=dt)
    noise_y = precision("noise_y", expected_precision_y, correlation_time_y, process=False)
    for i, level in enumerate(levels, 1):
        if not isinstance(level, Level):
            graph.predicts(level, below)
            nodes.append(LevelNodes((level.name,), (), ()))
            continue
        learned = (f"noise{i}",) if level.learn_noise else ()
        if i == 1 and learn_noise_y:
            learned = (*learned, noise_y.name)
        same = ("dim", "flow", "initial_mean", "initial_sd", "substeps")
        shared: dict[str, Any] = {name: getattr(level, name) for name in same}
        x = KalmanStateNode(f"x{i}", learn_noise=bool(learned), **shared)
        graph.predicts(x, below, via=level.mapping)
        graph.weighs(precision(f"noise{i}", level.expected_precision, level.correlation_time, process=True), x)
        if i == 1:
            graph.weighs(noise_y, below)
        if level.parameter_mean is not None:
            estimator = parameter_estimator() if i == len(levels) else Newton()
            sd: Any = level.parameter_sd
            below = ParameterNode(f"theta{i}", mean=level.parameter_mean, sd=sd, estimator=estimator)
            graph.parametrises(below, x)
        nodes.append(LevelNodes((x.name,), learned, () if level.parameter_mean is None else (f"theta{i}",)))
    return Model(graph, adaptive_filtering(every, levels=nodes))
