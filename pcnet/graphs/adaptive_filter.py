"""Online triple estimation: states, parameters and noise levels of one system, inferred together."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from pcnet.errors import SettingError
from pcnet.functions.base import Function, PlainFunction
from pcnet.functions.check import output_size
from pcnet.functions.traced import as_function
from pcnet.model.graph import Graph
from pcnet.model.model import Model
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.nodes.kalman_state import noise_estimator, parameter_estimator
from pcnet.numerics.estimators import NoiseScoring
from pcnet.numerics.kernels import Kernel, Matern, SquaredExponential, White
from pcnet.settings import at_least_1d, number, to_tensor


def adaptive_filter(
    flow: Function | PlainFunction,
    dim: int,
    dt: Any,
    *,
    parameter_mean: Any = None,
    parameter_sd: Any = None,
    mapping: Function | PlainFunction | None = None,
    channels: int | None = None,
    expected_precision_x: Any = 1.0,
    expected_precision_y: Any = 1.0,
    sd_lambda: Any = 2.0,
    correlation_time: Any = None,
    correlation_time_y: Any = None,
    correlation_time_sd: Any = None,
    model_error_time: Any = None,
    noise_per_channel: bool | Mapping[str, bool] = False,
    initial_mean: Any = None,
    initial_sd: Any = 1.0,
    every: Any = 64,
    substeps: int = 1,
) -> Model:
    """Online triple estimation for ẋ = f(x, θ) + ω_x, y = g(x) + ω_y: states, θ and both noise levels at once.

    The nodes are called x, y, theta, noise_x and noise_y (and model_error_x). Numbers may be tensors with leading batch
    dimensions; then every result has them too.

    Args:
        flow: f(x, θ), batched over leading dimensions.
        dim: Dimension of the state.
        dt: Sampling interval, in time units.
        parameter_mean: Prior mean of θ, (..., p). Without it there are no parameters.
        parameter_sd: Prior standard deviation of θ, one number or (..., p).
        mapping: g(x, θ_g); the identity unless given.
        channels: Number of observed channels; that of the mapping's output unless given.
        expected_precision_x: First guess of 1/variance of ω_x; may be wrong by orders of magnitude.
        expected_precision_y: First guess of 1/variance of ω_y.
        sd_lambda: Prior standard deviation of both log-precisions.
        correlation_time: Lengthscale of the squared-exponential autocorrelation of both noises in time units, or a
            `Kernel`; white noise unless given.
        correlation_time_y: The same for ω_y alone.
        correlation_time_sd: Prior standard deviation of the log of the lengthscale of ω_y, which is then learned.
        model_error_time: Correlation time of an additional Ornstein–Uhlenbeck process noise with its own level, for a
            flow that may be wrong.
        noise_per_channel: Whether each channel has a noise level of its own; a mapping such as {"y": True} sets it
            for x and y apart.
        initial_mean: First state, (..., dim); found from the first observation unless given.
        initial_sd: Standard deviation of the first state, one number or (..., dim).
        every: Period, in observations, of the updates of parameters and noise levels. Earlier ones come at 1, 2, 4, ….
        substeps: Integration steps between two observations.
    """
    if (parameter_mean is None) != (parameter_sd is None):
        raise SettingError("adaptive_filter: give both parameter_mean and parameter_sd, or neither")
    if channels is None:
        channels = output_size(as_function(mapping, dim), dim, 0)
    if mapping is None and channels != dim:
        raise SettingError(f"adaptive_filter: {channels} channels of a state of dimension {dim} need a mapping=...")
    if model_error_time is not None and not bool((torch.as_tensor(to_tensor(model_error_time)) > 0).all()):
        raise SettingError(f"adaptive_filter: model_error_time must be positive, not {model_error_time!r}")
    kernel_x = kernel_of(correlation_time)
    kernel_y = kernel_of(correlation_time if correlation_time_y is None else correlation_time_y)
    if correlation_time_sd is not None and not isinstance(kernel_y, SquaredExponential):
        raise SettingError("adaptive_filter: correlation_time_sd needs a correlation_time to start from")
    given = noise_per_channel if isinstance(noise_per_channel, Mapping) else dict.fromkeys("xy", noise_per_channel)
    if not set(given) <= {"x", "y"}:
        raise SettingError(f"adaptive_filter: noise_per_channel has the keys 'x' and 'y', not {sorted(given)}")
    x = KalmanStateNode("x", dim=dim, flow=flow, initial_mean=initial_mean, initial_sd=initial_sd, substeps=substeps)
    y = SensoryNode("y", dim=channels, orders=1, dt=dt)

    def precision(name: str, expected: Any, kernel: Kernel, estimator: NoiseScoring, sd: float = 1.0) -> PrecisionNode:
        shared: Literal["each", "shared"] = "each" if given.get(name[-1]) else "shared"
        return PrecisionNode(
            name,
            mean=at_least_1d(to_tensor(expected)).log(),
            sd=sd * to_tensor(sd_lambda),
            kernel=kernel,
            correlation_time_sd=correlation_time_sd if name == "noise_y" else None,
            channels=shared,
            estimator=estimator,
        )

    graph = Graph()
    graph.predicts(x, y, via=mapping)
    if parameter_mean is not None:
        theta = ParameterNode("theta", mean=parameter_mean, sd=parameter_sd, estimator=parameter_estimator())
        graph.parametrises(theta, x)
    graph.weighs(precision("noise_x", expected_precision_x, kernel_x, noise_estimator(process=True)), x)
    if model_error_time is not None:
        kernel = Matern(model_error_time, number(0.5))
        graph.weighs(precision("model_error_x", expected_precision_x, kernel, noise_estimator(), sd=2.0), x)
    graph.weighs(precision("noise_y", expected_precision_y, kernel_y, noise_estimator()), y)
    level = LevelNodes(parameters=() if parameter_mean is None else ("parameter",))
    return Model(graph, adaptive_filtering(every, levels=(level,), warmup="doubling"))


def kernel_of(correlation_time: Any) -> Kernel:
    """A squared-exponential kernel of this lengthscale, a kernel as it is, or white noise for None."""
    if correlation_time is None:
        return White()
    return correlation_time if isinstance(correlation_time, Kernel) else SquaredExponential(correlation_time)
