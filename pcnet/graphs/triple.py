"""The recommended graph: states, parameters and precisions estimated at once, with nothing to tune."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.functions import Function, Plain
from pcnet.graph import Graph, Model
from pcnet.kernels import Kernel, Matern, SquaredExponential, White
from pcnet.movers import Newton, Scoring
from pcnet.nodes import FilterNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.schedule import Level, tracking
from pcnet.settings import listed, number, to_tensor


def learner() -> Newton:
    """How parameters are learned: all windows count, the first less, and what recent ones contradict is reopened."""
    return Newton(fading=number(0.5), reopening=True)


def leveller(steady: bool = False) -> Scoring:
    """How log-precisions are learned; steady: those of noise of states."""
    if steady:
        return Scoring(steady=number(1.5), fading=number(1.0), caution=number(0.5))
    return Scoring(caution=number(2.0))


def triple(
    flow: Function | Plain,
    dim: int,
    dt: Any,
    *,
    mean: Any = None,
    sd: Any = None,
    mapping: Function | Plain | None = None,
    channels: int | None = None,
    expected_precision_x: Any = 1.0,
    expected_precision_y: Any = 1.0,
    sd_lambda: Any = 2.0,
    smoothness: Any = None,
    smoothness_y: Any = None,
    smoothness_sd: Any = None,
    drift: Any = None,
    by_channel: Literal["each", "shared"] = "shared",
    initial_mean: Any = None,
    initial_sd: Any = 1.0,
    every: Any = 64,
    substeps: int = 1,
) -> Model:
    """A graph of x, y, theta, noise_x and noise_y with the schedule `tracking`, for ẋ = f(x, θ) + z, y = g(x) + w.

    mean, sd: the prior of the parameters; without them there are none. mapping: g, the identity unless given, to so
    many channels. expected_precision_x and _y: a first guess of 1/variance of z and w, which may be wrong by far;
    sd_lambda: how far, in logarithms.
    smoothness: the width, in time units, of the squared-exponential autocorrelation of z and w, or a `Kernel`;
    without it both are white. smoothness_y: that of w, where it is another. smoothness_sd: how unsure the log of the
    width of w is, which is then learned. drift: if f itself may be wrong, how long what is wrong with it lasts, in time
    units: then z is the sum of two noises, and the other one, of `drift_x`, lasts so long and has a precision of its
    own. by_channel: a precision for each channel, or one for all. every: parameters and precisions step at every
    so-many-th observation, and at first at the 1st, 2nd, 4th, 8th, … Numbers may be tensors with leading batch
    dimensions; then every result has them too.
    """
    if (mean is None) != (sd is None):
        raise SettingError("triple: give both mean and sd of the parameters, or neither")
    seen = dim if channels is None else channels
    if mapping is None and seen != dim:
        raise SettingError(f"triple: without a mapping there are as many channels as dimensions, {dim}, not {seen}")
    if drift is not None and not bool((torch.as_tensor(to_tensor(drift)) > 0).all()):
        raise SettingError(f"triple: drift must be positive, how long what is wrong with the flow lasts, not {drift!r}")
    of_x, of_y = kernel_of(smoothness), kernel_of(smoothness if smoothness_y is None else smoothness_y)
    if smoothness_sd is not None and not isinstance(of_y, SquaredExponential):
        raise SettingError("triple: smoothness_sd needs a smoothness to begin with, a width in time units")
    x = FilterNode("x", dim=dim, flow=flow, initial_mean=row(initial_mean), initial_sd=initial_sd, substeps=substeps)
    y = SensoryNode("y", dim=seen, orders=1, dt=dt)

    def precision(name: str, expected: Any, kernel: Kernel, mover: Scoring, unsure: float = 1.0) -> PrecisionNode:
        return PrecisionNode(
            name,
            mean=listed(to_tensor(expected)).log(),
            sd=unsure * to_tensor(sd_lambda),
            kernel=kernel,
            smoothness_sd=smoothness_sd if name == "noise_y" else None,
            channels=by_channel,
            mover=mover,
        )

    graph = Graph()
    graph.predicts(x, y, via=mapping)
    if mean is not None:
        graph.parametrises(ParameterNode("theta", mean=mean, sd=sd, mover=learner()), x)
    graph.weighs(precision("noise_x", expected_precision_x, of_x, leveller(steady=True)), x)
    if drift is not None:
        lasting = Matern(drift, number(0.5))
        graph.weighs(precision("drift_x", expected_precision_x, lasting, leveller(), unsure=2.0), x)
    graph.weighs(precision("noise_y", expected_precision_y, of_y, leveller()), y)
    level = Level(parameters=() if mean is None else ("parameter",))
    return Model(graph, tracking(every, levels=(level,), doubling=True))


def kernel_of(smoothness: Any) -> Kernel:
    """A kernel from a width in time units; white noise without it."""
    if smoothness is None:
        return White()
    return smoothness if isinstance(smoothness, Kernel) else SquaredExponential(smoothness)


def row(value: Any) -> Tensor | None:
    """(..., dim) as a generalised state of one order."""
    return None if value is None else torch.as_tensor(to_tensor(value))[..., None, :]
