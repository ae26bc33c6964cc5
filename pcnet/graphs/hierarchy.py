"""Stacks: the state of a level predicts the parameters of the level below it, each level on its own clock."""

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

from pydantic import Field, SkipValidation

from pcnet.errors import SettingError, naming
from pcnet.functions.check import output_size
from pcnet.functions.traced import as_function
from pcnet.graphs.sensors import kernel_of, noise_node
from pcnet.model.graph import Graph
from pcnet.model.hypotheses import Hypotheses
from pcnet.model.model import Model
from pcnet.model.node import AnyNode
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import CategoricalNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.nodes.kalman_belief import Linearisation
from pcnet.numerics.transitions import IntegratorName
from pcnet.settings import PositiveVector, Vector, number, settings

SHARED = (
    "dim",
    "flow",
    "initial_mean",
    "initial_sd",
    "integrator",
    "substeps",
    "linearisation",
    "process_noise",
)
"""Settings of a level that are those of its state."""


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
        process_noise_sd: Standard deviation of the process noise, one number or (..., dim): of a diffusion in units of
            the state per √time, or of smooth or held noise in units of ẋ. A first guess with learn_noise=True. None,
            at the lowest level, to find it from the first observations; `hierarchy` then needs hypotheses.
        learn_noise: Whether the level of the process noise is learned.
        correlation_time: Lengthscale of the autocorrelation of the process noise in time units, or a `Kernel`; white
            unless given.
        initial_mean: First state, (..., dim); found from the first observation unless given.
        initial_sd: Standard deviation of the first state.
        integrator: How the flow is integrated, see `KalmanStateNode`; so are the next three.
        substeps: Integration steps between two updates of the level.
        linearisation: How means and covariances pass through flow and mapping.
        process_noise: White process noise as "diffusion", or "held" constant between two updates.
    """

    flow: SkipValidation[Any]
    dim: int = Field(ge=1)
    _: KW_ONLY
    mapping: SkipValidation[Any] = None
    parameter_mean: Vector | None = None
    parameter_sd: PositiveVector | None = None
    process_noise_sd: PositiveVector | None = number(1.0)
    learn_noise: bool = False
    correlation_time: SkipValidation[Any] = None
    initial_mean: Vector | None = None
    initial_sd: PositiveVector = number(1.0)
    integrator: IntegratorName = "rk4"
    substeps: int = Field(default=1, ge=1)
    linearisation: Linearisation = "unscented"
    process_noise: Literal["diffusion", "held"] = "diffusion"

    def __post_init__(self) -> None:
        if (self.parameter_mean is None) != (self.parameter_sd is None):
            raise SettingError("Level: give both parameter_mean and parameter_sd, or neither")
        if self.process_noise_sd is None and not self.learn_noise:
            raise SettingError("Level: process_noise_sd=None is found from observations; give learn_noise=True as well")


@naming(SettingError)
def hierarchy(
    *levels: Level | CategoricalNode,
    dt: Any,
    channels: int | None = None,
    observation_noise_sd: Any = 1.0,
    learn_noise_y: bool = True,
    correlation_time_y: Any = None,
    every: Any = 64,
    noise_sd: Any = 1.6,
    hypotheses: Hypotheses | None = None,
) -> Model:
    """A stack of levels with its schedule: nodes x1, x2, …, theta1, …, noise1, …, y and noise_y.

    Args:
        levels: The levels, the lowest first. The top may be a `CategoricalNode`, which keeps its own name.
        dt: Sampling interval, in time units.
        channels: Number of observed channels; that of the lowest mapping's output unless given.
        observation_noise_sd: Standard deviation of the observation noise, one number or (..., channels); a first guess
            with learn_noise_y=True. None to find it from the first observations, which needs hypotheses.
        learn_noise_y: Whether the level of the observation noise is learned.
        correlation_time_y: Lengthscale of the autocorrelation of the observation noise, or a `Kernel`; white unless
            given.
        every: A level acts once in `every` actions of the level below it.
        noise_sd: Prior standard deviation of the logs of noise variances around their first guess.
        hypotheses: A bank of hypotheses about the noise levels that are learned and about outliers, with which wrong
            first guesses do no harm; drift is the matter of the levels above. None for a single filter.
    """
    if not levels or not isinstance(levels[0], Level):
        raise SettingError("hierarchy: give at least one Level, the lowest first")
    for i, level in enumerate(levels[:-1], 1):
        if not isinstance(level, Level):
            raise SettingError(f"hierarchy: {level.title} has no parameters to predict; make it the last level")
        if level.parameter_mean is None:
            lacking = f"level {i} has no parameters for level {i + 1} to predict"
            raise SettingError(f"hierarchy: {lacking}: give parameter_mean and parameter_sd")

    given = {f"noise{i}": level.process_noise_sd for i, level in enumerate(levels, 1) if isinstance(level, Level)}
    given = {"noise_y": observation_noise_sd, **given}
    missing = _missing(given, learn_noise_y, hypotheses)

    def precision(name: str, correlation_time: Any) -> PrecisionNode:
        return noise_node(name, given[name], noise_sd, kernel_of(correlation_time), per_channel=True)

    graph, nodes = Graph(), []
    if channels is None:
        dim = levels[0].dim
        channels = output_size(as_function(levels[0].mapping, dim), dim, 0)
    outliers = 0.0 if hypotheses is None or correlation_time_y is not None else hypotheses.outliers
    below: AnyNode = SensoryNode("y", dim=channels, orders=1, dt=dt, outliers=number(outliers))
    noise_y = precision("noise_y", correlation_time_y)
    for i, level in enumerate(levels, 1):
        if not isinstance(level, Level):
            graph.predicts(level, below)
            nodes.append(LevelNodes((level.name,), (), ()))
            continue
        learned = (f"noise{i}",) if level.learn_noise else ()
        if i == 1 and learn_noise_y:
            learned = (*learned, noise_y.name)
        shared: dict[str, Any] = {name: getattr(level, name) for name in SHARED}
        x = KalmanStateNode(f"x{i}", learn_noise=bool(learned), **shared)
        graph.predicts(x, below, via=level.mapping)
        graph.weighs(precision(f"noise{i}", level.correlation_time), x)
        if i == 1:
            graph.weighs(noise_y, below)
        if level.parameter_mean is not None:
            sd: Any = level.parameter_sd
            below = ParameterNode(f"theta{i}", mean=level.parameter_mean, sd=sd)
            graph.parametrises(below, x)
        nodes.append(LevelNodes((x.name,), learned, () if level.parameter_mean is None else (f"theta{i}",)))
    if hypotheses is not None:
        known = tuple(name for level in nodes for name in level.precisions)
        hypotheses = _bank(hypotheses, known, tuple(given), guess=missing, outliers=outliers)
    return Model(graph, adaptive_filtering(every, levels=nodes), hypotheses)


def _missing(given: Mapping[str, Any], learn_noise_y: bool, hypotheses: Hypotheses | None) -> tuple[str, ...]:
    """Names of the noises without a first guess; an error if it cannot be found from the first observations."""
    missing = tuple(name for name, sd in given.items() if sd is None)
    if set(missing) - {"noise_y", "noise1"}:
        raise SettingError(
            f"hierarchy: {missing[-1]} cannot be found from the first observations; give process_noise_sd of that level"
        )
    if "noise_y" in missing and not learn_noise_y:
        raise SettingError("hierarchy: observation_noise_sd=None is found from observations; leave out learn_noise_y")
    if missing and hypotheses is None:
        raise SettingError(
            "hierarchy: give process_noise_sd and observation_noise_sd; only with hypotheses=pcnet.Hypotheses() are "
            "they found from the first observations"
        )
    return missing


def _bank(hypotheses: Hypotheses, learned: tuple[str, ...], noises: tuple[str, ...], **changes: Any) -> Hypotheses:
    """Hypotheses about the noises of a stack that are learned."""
    changes |= {"told": tuple(name for name in noises if name not in learned), "walks": ()}
    if not set(learned) - {"noise_y"}:
        changes["process_factors"] = (1.0,)
    if "noise_y" not in learned:
        changes["observation_factors"] = (1.0,)
    return dataclasses.replace(hypotheses, **changes)
