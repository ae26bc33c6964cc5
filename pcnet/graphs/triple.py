"""The recommended graph: states, parameters and precisions estimated at once, with nothing to tune."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.functions import Function, Plain
from pcnet.graph import Graph, Model
from pcnet.kernels import Kernel, SquaredExponential, White
from pcnet.movers import Newton
from pcnet.nodes import FilterNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.schedule import Level, tracking
from pcnet.settings import listed, number, to_tensor


def learner() -> Newton:
    """How parameters are learned: all windows count, the first less, and what recent ones contradict is reopened."""
    return Newton(fading=number(0.5), reopening=True)


def leveller() -> Newton:
    """How log-precisions are learned: alike, and by at most one unit in a step."""
    return Newton(fading=number(0.5), reopening=True, largest=number(1.0))


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
    by_channel: Literal["each", "shared"] = "shared",
    initial_mean: Any = None,
    initial_sd: Any = 1.0,
    every: Any = 64,
    substeps: int = 1,
) -> Model:
    """A graph of x, y, theta, noise_x and noise_y with the schedule `tracking`, for ẋ = f(x, θ) + z, y = g(x) + w.

    mean, sd: the prior of the parameters; without them there are none. mapping: g, the identity unless given, to so
    many channels. expected_precision_x and _y: a first guess of 1/variance of z and w, which may be wrong by far.
    smoothness: the width, in time units, of the squared-exponential autocorrelation of z and w, or a `Kernel`;
    without it both are white. smoothness_y: that of w, where it is another. by_channel: a precision for each channel,
    or one for all. Numbers may be tensors with leading batch dimensions; then every result has them too.
    """
    if (mean is None) != (sd is None):
        raise SettingError("triple: give both mean and sd of the parameters, or neither")
    seen = dim if channels is None else channels
    if mapping is None and seen != dim:
        raise SettingError(f"triple: without a mapping there are as many channels as dimensions, {dim}, not {seen}")
    x = FilterNode("x", dim=dim, flow=flow, initial_mean=row(initial_mean), initial_sd=initial_sd, substeps=substeps)
    y = SensoryNode("y", dim=seen, orders=1, dt=dt)

    def precision(name: str, expected: Any, width: Any) -> PrecisionNode:
        log = listed(to_tensor(expected)).log()
        return PrecisionNode(
            name, mean=log, sd=sd_lambda, kernel=kernel_of(width), channels=by_channel, mover=leveller()
        )

    graph = Graph()
    graph.predicts(x, y, via=mapping)
    if mean is not None:
        graph.parametrises(ParameterNode("theta", mean=mean, sd=sd, mover=learner()), x)
    graph.weighs(precision("noise_x", expected_precision_x, smoothness), x)
    graph.weighs(precision("noise_y", expected_precision_y, smoothness if smoothness_y is None else smoothness_y), y)
    level = Level(parameters=() if mean is None else ("parameter",))
    return Model(graph, tracking(every, levels=(level,)))


def kernel_of(smoothness: Any) -> Kernel:
    """A kernel from a width in time units; white noise without it."""
    if smoothness is None:
        return White()
    return smoothness if isinstance(smoothness, Kernel) else SquaredExponential(smoothness)


def row(value: Any) -> Tensor | None:
    """(..., dim) as a generalised state of one order."""
    return None if value is None else torch.as_tensor(to_tensor(value))[..., None, :]
