"""Online triple estimation: states, parameters and noise levels of one system, inferred together."""

import dataclasses
from typing import Any, Literal

import torch

from pcnet.errors import SettingError, naming
from pcnet.functions.base import Function, PlainFunction
from pcnet.functions.check import output_size
from pcnet.functions.traced import as_function
from pcnet.model.graph import Graph
from pcnet.model.hypotheses import Hypotheses
from pcnet.model.model import Model
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.kernels import Kernel, Matern, SquaredExponential, White
from pcnet.numerics.transitions import IntegratorName
from pcnet.settings import at_least_1d, number, to_tensor

DEFAULT = Hypotheses()


@naming(SettingError)
def adaptive_filter(
    flow: Function | PlainFunction,
    dim: int,
    dt: Any,
    *,
    parameter_mean: Any = None,
    parameter_sd: Any = None,
    mapping: Function | PlainFunction | None = None,
    channels: int | None = None,
    process_noise_sd: Any = None,
    observation_noise_sd: Any = None,
    noise_sd: Any = 1.6,
    correlation_time: Any = None,
    correlation_time_y: Any = None,
    correlation_time_sd: Any = None,
    model_error_time: Any = None,
    noise_per_channel: bool = True,
    initial_mean: Any = None,
    initial_sd: Any = 1.0,
    integrator: IntegratorName = "rk4",
    substeps: int = 1,
    linearisation: Literal["unscented", "taylor"] = "unscented",
    process_noise: Literal["diffusion", "held"] = "diffusion",
    hypotheses: Hypotheses | None = DEFAULT,
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
        process_noise_sd: First guess of the standard deviation of ω_x, one number or (..., dim): of a diffusion, in
            units of the state per √time, or of smooth or held noise, in units of ẋ. Found from the first observations
            unless given.
        observation_noise_sd: First guess of the standard deviation of ω_y, one number or (..., channels). Found from
            the first observations unless given.
        noise_sd: Prior standard deviation of the logs of all noise variances around the first guess.
        correlation_time: Lengthscale of the squared-exponential autocorrelation of both noises in time units, or a
            `Kernel`; white noise unless given.
        correlation_time_y: The same for ω_y alone.
        correlation_time_sd: Prior standard deviation of the log of the lengthscale of ω_y, which is then learned.
        model_error_time: Correlation time of an additional Ornstein–Uhlenbeck process noise with its own level, for a
            flow that may be wrong.
        noise_per_channel: Whether each channel has a noise level of its own.
        initial_mean: State at the first observation, (..., dim); found from that observation unless given.
        initial_sd: Its standard deviation, one number or (..., dim).
        integrator: How the flow is integrated, see `KalmanStateNode`; so are the next three.
        substeps: Integration steps between two observations.
        linearisation: How means and covariances pass through flow and mapping.
        process_noise: White process noise as "diffusion", or "held" constant between observations.
        hypotheses: The bank of hypotheses about noise levels, outliers and drift; None for a single filter, which needs
            first guesses that are about right.
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
    x = KalmanStateNode(
        "x",
        dim=dim,
        flow=flow,
        initial_mean=initial_mean,
        initial_sd=initial_sd,
        integrator=integrator,
        substeps=substeps,
        linearisation=linearisation,
        process_noise=process_noise,
    )
    if hypotheses is not None and not isinstance(hypotheses, Hypotheses):
        raise SettingError(f"adaptive_filter: hypotheses must be pcnet.Hypotheses(...) or None, not {hypotheses!r}")
    for name, sd in (("process_noise_sd", process_noise_sd), ("observation_noise_sd", observation_noise_sd)):
        if sd is not None and not bool((to_tensor(sd) > 0).all()):
            raise SettingError(f"adaptive_filter: {name} is a standard deviation and must be positive, not {sd!r}")
    given = {"noise_x": process_noise_sd, "noise_y": observation_noise_sd}
    missing = tuple(name for name, guess in given.items() if guess is None)
    if hypotheses is None and missing:
        raise SettingError(
            "adaptive_filter: give process_noise_sd and observation_noise_sd; only with hypotheses they are found from "
            "the first observations"
        )
    outliers = 0.0
    if hypotheses is not None:
        outliers = hypotheses.outliers if isinstance(kernel_y, White) else 0.0
        hypotheses = dataclasses.replace(hypotheses, guess=missing, outliers=outliers)
    y = SensoryNode("y", dim=channels, orders=1, dt=dt, outliers=number(outliers))

    def precision(name: str, noise: Any, kernel: Kernel) -> PrecisionNode:
        return PrecisionNode(
            name,
            mean=-2 * at_least_1d(to_tensor(1.0 if noise is None else noise)).log(),
            sd=noise_sd,
            kernel=kernel,
            correlation_time_sd=correlation_time_sd if name == "noise_y" else None,
            channels="each" if noise_per_channel else "shared",
        )

    graph = Graph()
    graph.predicts(x, y, via=mapping)
    if parameter_mean is not None:
        graph.parametrises(ParameterNode("theta", mean=parameter_mean, sd=parameter_sd), x)
    graph.weighs(precision("noise_x", process_noise_sd, kernel_x), x)
    if model_error_time is not None:
        graph.weighs(precision("model_error_x", process_noise_sd, Matern(model_error_time, number(0.5))), x)
    graph.weighs(precision("noise_y", observation_noise_sd, kernel_y), y)
    level = LevelNodes(parameters=() if parameter_mean is None else ("parameter",))
    return Model(graph, adaptive_filtering(levels=(level,)), hypotheses)


def kernel_of(correlation_time: Any) -> Kernel:
    """A squared-exponential kernel of this lengthscale, a kernel as it is, or white noise for None."""
    if correlation_time is None:
        return White()
    return correlation_time if isinstance(correlation_time, Kernel) else SquaredExponential(correlation_time)
