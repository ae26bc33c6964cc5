"""Online triple estimation: states, parameters and noise levels of one system, inferred together."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pcnet.errors import SettingError, naming
from pcnet.functions.base import Function, PlainFunction
from pcnet.graphs.causes import Cause, cause_nodes, drive
from pcnet.graphs.sensors import Input, Sensor, check_names, check_sensors, input_nodes, kernel_of, noise_node
from pcnet.guidance import instead
from pcnet.model.graph import Graph
from pcnet.model.hypotheses import Hypotheses
from pcnet.model.model import Model
from pcnet.model.node import AnyNode
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import CategoricalNode, GaussianSumStateNode, KalmanStateNode, ParameterNode, SwitchingStateNode
from pcnet.nodes.kalman_belief import Linearisation
from pcnet.numerics.kernels import Matern
from pcnet.numerics.transitions import IntegratorName
from pcnet.settings import number, to_tensor

DEFAULT = Hypotheses()


LINEAR = "a function of (state, parameters), or pcnet.systems.linear(matrix)"
INSTEAD = instead(
    {
        "F A f fx transition transition_matrix dynamics dynamics_function ode rhs": f"flow, dx/dt in continuous time: "
        f"{LINEAR}; of a transition matrix F, scipy.linalg.logm(F) / dt",
        "H C h hx g emission emission_function observation_matrix observation measurement": f"mapping=: {LINEAR}",
        "Q q process_noise_cov transition_covariance dynamics_covariance process_sd state_sd": "process_noise_sd=, "
        "standard deviations per √time; a first guess, which is learned",
        "R r measurement_noise_cov observation_covariance emission_covariance observation_sd": "observation_noise_sd=, "
        "standard deviations; a first guess, which is learned",
        "x x0 m0 mu0 initial initial_state initial_state_mean": "initial_mean=",
        "P P0 initial_covariance initial_state_covariance initial_cov": "initial_sd=, standard deviations",
        "dim_x n_states state_dim n": "dim",
        "dim_z n_obs emission_dim dim_y": "channels=, or a mapping",
        "B dim_u u control": 'inputs={"u": 1}, with a flow f(x, u, theta)',
        "theta params parameters prior theta0": "parameter_mean= and parameter_sd=, the prior",
        "parameter_cov parameter_var theta_sd": "parameter_sd=, standard deviations",
        "delta_t time_step step sampling_interval": "dt",
        "observations y data z": "model = adaptive_filter(flow, dim, dt), then model.run(observations)",
        "learn_noise": "noise_sd=1e-6 with hypotheses=None for noise levels that are known",
    }
)


@naming(SettingError, INSTEAD)
def adaptive_filter(
    flow: Function | PlainFunction,
    dim: int,
    dt: Any,
    *,
    parameter_mean: Any = None,
    parameter_sd: Any = None,
    mapping: Function | PlainFunction | None = None,
    channels: int | None = None,
    sensors: Mapping[str, Sensor] | None = None,
    inputs: Mapping[str, int | Input] | None = None,
    process_noise_sd: Any = None,
    observation_noise_sd: Any = None,
    noise_sd: Any = 1.2,
    correlation_time: Any = None,
    correlation_time_y: Any = None,
    correlation_time_sd: Any = None,
    model_error_time: Any = None,
    noise_per_channel: bool = True,
    initial_mean: Any = None,
    initial_sd: Any = 1.0,
    integrator: IntegratorName = "rk4",
    substeps: int = 1,
    linearisation: Linearisation = "unscented",
    process_noise: Literal["diffusion", "held"] = "diffusion",
    causes: Mapping[str, Cause] | None = None,
    switching: CategoricalNode | None = None,
    peaks: int = 1,
    hypotheses: Hypotheses | None = DEFAULT,
) -> Model:
    """Online triple estimation for ẋ = f(x, u, θ) + ω_x, y = g(x, u) + ω_y: states, θ and both noise levels at once.

    The nodes are called x, y, theta, noise_x and noise_y (and model_error_x). With `sensors`, each sensor has its own
    name, and that of its noise is "noise_" with it. Numbers may be tensors with leading batch dimensions; then every
    result has them too.

    Args:
        flow: f(x, θ), f(x, u, θ) or f(x, u, θ, t), batched over leading dimensions.
        dim: Dimension of the state.
        dt: Sampling interval, in time units.
        parameter_mean: Prior mean of θ, (..., p). Without it there are no parameters.
        parameter_sd: Prior standard deviation of θ, one number or (..., p).
        mapping: g(x, θ_g), or with inputs and time as the flow; the identity unless given.
        channels: Number of observed channels; that of the mapping's output unless given.
        sensors: Several sensors by name, each with mapping, rate and noise of its own, instead of `mapping`,
            `channels`, `observation_noise_sd` and the settings of correlation times of ω_y.
        inputs: Known inputs by name: the number of channels of each, or an `Input`. They are given with the
            observations, {"y": ..., "u": ...}.
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
        initial_sd: Its standard deviation, one number or (..., dim). The default suits states of a size of about 1.
        integrator: How the flow is integrated, see `KalmanStateNode`; so are the next three.
        substeps: Integration steps between two observations.
        linearisation: How means and covariances pass through flow and mapping.
        process_noise: White process noise as "diffusion", or "held" constant between observations.
        causes: Hidden causes v by name, which are inferred with the state: the flow is then f(x, v, θ); inputs u follow
            v. The noise of each is "noise_" with its name.
        switching: Categories that the system switches between, one step of their clock at each observation: the flow is
            then f(x, v, θ) with v the values of the present category; inputs u follow v. See `SwitchingStateNode`.
        peaks: Largest number of Gaussians that the belief of the state may consist of, such as 12 where it has several
            peaks; see `GaussianSumStateNode`. 1 for a single Gaussian.
        hypotheses: The bank of hypotheses about noise levels, outliers and drift; None for a single filter, which needs
            first guesses that are about right.
    """
    if (parameter_mean is None) != (parameter_sd is None):
        raise SettingError("adaptive_filter: give both parameter_mean and parameter_sd, or neither")
    if hypotheses is not None and not isinstance(hypotheses, Hypotheses):
        raise SettingError(f"adaptive_filter: hypotheses must be pcnet.Hypotheses(...) or None, not {hypotheses!r}")
    if switching is not None and not isinstance(switching, CategoricalNode):
        raise SettingError(
            "adaptive_filter: switching is a node of categories, such as CategoricalNode('mode', "
            f"values=[[0.0], [1.0]], stay=0.95), not {switching!r}"
        )
    _check_dim(dim)
    _check_positive("dt", dt, "is the time between two observations as a number and ", optional=False)
    _check_positive("model_error_time", model_error_time)
    deviation = "is a standard deviation, one number or one for each channel (1e-6 where there is hardly any), and "
    _check_positive("process_noise_sd", process_noise_sd, deviation)
    _check_positive("observation_noise_sd", observation_noise_sd, deviation)
    single = {
        "mapping": mapping,
        "channels": channels,
        "observation_noise_sd": observation_noise_sd,
        "correlation_time_y": correlation_time_y,
        "correlation_time_sd": correlation_time_sd,
    }
    if sensors is not None:
        seen = check_sensors("adaptive_filter", sensors, [name for name, given in single.items() if given is not None])
    else:
        seen = {
            "y": Sensor(
                mapping=mapping,
                channels=channels,
                noise_sd=observation_noise_sd,
                correlation_time=correlation_time if correlation_time_y is None else correlation_time_y,
                correlation_time_sd=correlation_time_sd,
                noise_per_channel=noise_per_channel,
            )
        }
    kind, several = _kind_of_state(switching, peaks)
    x = kind(
        "x",
        dim=dim,
        flow=flow,
        initial_mean=initial_mean,
        initial_sd=initial_sd,
        integrator=integrator,
        substeps=substeps,
        linearisation=linearisation,
        process_noise=process_noise,
        **several,
    )
    noisy = {name: sensor for name, sensor in seen.items() if sensor.has_noise}
    given = {"noise_x": process_noise_sd, **{f"noise_{name}": sensor.noise_sd for name, sensor in noisy.items()}}
    missing = tuple(name for name, guess in given.items() if guess is None)
    if hypotheses is None and missing:
        raise SettingError(
            "adaptive_filter: give process_noise_sd and observation_noise_sd (noise_sd of each sensor); only with "
            "hypotheses they are found from the first observations"
        )
    outliers = 0.0
    if hypotheses is not None:
        outliers = hypotheses.outliers if any(sensor.is_white for sensor in seen.values()) else 0.0
        changes: dict[str, Any] = {"guess": missing, "outliers": outliers}
        if not noisy:
            changes["observation_factors"] = (1.0,)
        hypotheses = dataclasses.replace(hypotheses, **changes)
    graph, driving = Graph(), input_nodes("adaptive_filter", inputs, dt)
    hidden = cause_nodes("adaptive_filter", causes, noise_sd)
    above: list[AnyNode] = [*([] if switching is None else [switching]), *(cause for cause, _ in hidden), *driving]
    check_names("adaptive_filter", seen, above)
    width = sum(node.shape.dim for node in above)
    nodes = {name: sensor.node(name, dim, width, dt, outliers) for name, sensor in seen.items()}
    for name, node in nodes.items():
        graph.predicts(x, node, via=seen[name].mapping)
    drive(graph, x, above, hidden)
    if parameter_mean is not None:
        graph.parametrises(ParameterNode("theta", mean=parameter_mean, sd=parameter_sd), x)
    graph.weighs(noise_node("noise_x", process_noise_sd, noise_sd, kernel_of(correlation_time), noise_per_channel), x)
    if model_error_time is not None:
        error = Matern(model_error_time, number(0.5))
        graph.weighs(noise_node("model_error_x", process_noise_sd, noise_sd, error, noise_per_channel), x)
    for name, node in ((name, nodes[name]) for name in noisy):
        graph.weighs(seen[name].noise_node(f"noise_{name}", noise_sd), node)
    level = LevelNodes(parameters=() if parameter_mean is None else ("parameter",))
    return Model(graph, adaptive_filtering(levels=(level,)), hypotheses)


def _check_dim(dim: object) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise SettingError(f"adaptive_filter: dim is the number of states, a whole number from 1 on, not {dim!r}")


def _check_positive(name: str, value: Any, what: str = "", optional: bool = True) -> None:
    try:
        right = (optional and value is None) or bool((to_tensor(value) > 0).all())
    except (ValueError, TypeError, RuntimeError):
        right = False
    if not right:
        raise SettingError(f"adaptive_filter: {name} {what}must be positive, not {value!r}")


def _kind_of_state(switching: CategoricalNode | None, peaks: int) -> tuple[type[KalmanStateNode], dict[str, Any]]:
    """The kind of state node, and the settings that only it has."""
    if not isinstance(peaks, int) or isinstance(peaks, bool) or peaks < 1:
        raise SettingError(f"adaptive_filter: peaks must be a whole number from 1 on, not {peaks!r}")
    if switching is None:
        return (KalmanStateNode, {}) if peaks == 1 else (GaussianSumStateNode, {"peaks": peaks})
    if peaks > 1:
        raise SettingError("adaptive_filter: a state that switches has one belief for each category; leave out peaks")
    return SwitchingStateNode, {}
