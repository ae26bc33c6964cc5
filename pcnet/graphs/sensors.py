"""Sensors and known inputs of ready-made models."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal

from pydantic import Field, SkipValidation

from pcnet.errors import SettingError
from pcnet.functions.check import output_size
from pcnet.functions.traced import as_function
from pcnet.guidance import instead
from pcnet.model.node import AnyNode
from pcnet.nodes import (
    BinomialNode,
    ChoiceNode,
    InputNode,
    LikelihoodNode,
    PoissonNode,
    PrecisionNode,
    SensoryNode,
    StudentTNode,
)
from pcnet.numerics.kernels import Kernel, SquaredExponential, White
from pcnet.settings import PositiveVector, at_least_1d, number, settings, to_tensor

FAMILIES: dict[str, type[LikelihoodNode]] = {
    "poisson": PoissonNode,
    "binomial": BinomialNode,
    "choice": ChoiceNode,
    "student_t": StudentTNode,
}


@settings
class Sensor:
    """One of several sensors of a state.

    Args:
        mapping: g(x, θ_g), g(x, u, θ_g) or g(x, u, θ_g, t); the identity unless given.
        channels: Number of its channels; that of the mapping's output unless given.
        every: Its sampling interval in those of the model. Observations in between are missing.
        noise_sd: First guess of the standard deviation of its noise, one number or (..., channels); found from the
            first observations unless given.
        correlation_time: Lengthscale of the autocorrelation of its noise, or a `Kernel`; white noise unless given.
        correlation_time_sd: Prior standard deviation of the log of that lengthscale, which is then learned.
        noise_per_channel: Whether each channel has a noise level of its own.
        family: Distribution of its observations: "gaussian", "poisson" (counts), "binomial" (successes, or 0 and 1),
            "choice" (categories) or "student_t". The mapping gives the linear predictor, such as a log-rate; see
            `pcnet.nodes.families`. Counts, successes and choices have no noise level.
        family_settings: Settings of its node, such as {"exposure": 0.01} or {"link": "probit"}.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = instead(
        {
            "dt interval period rate": "every=, a whole number of sampling intervals of the model",
            "R sd observation_noise_sd noise": "noise_sd=",
            "H h g via function": "mapping=",
            "dim": "channels=",
        }
    )
    _: KW_ONLY
    mapping: SkipValidation[Any] = None
    channels: int | None = Field(default=None, ge=1)
    every: int = Field(default=1, ge=1)
    noise_sd: PositiveVector | None = None
    correlation_time: SkipValidation[Any] = None
    correlation_time_sd: SkipValidation[Any] = None
    noise_per_channel: bool = True
    family: Literal["gaussian", "poisson", "binomial", "choice", "student_t"] = "gaussian"
    family_settings: Mapping[str, Any] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.family_settings and self.family == "gaussian":
            raise SettingError("Sensor: family_settings are for other families than the gaussian")
        if not self.has_noise and (self.noise_sd is not None or self.correlation_time is not None):
            raise SettingError(f"Sensor: a {self.family} sensor has no noise level; leave out noise_sd")
        if self.family == "student_t" and self.correlation_time is not None:
            raise SettingError("Sensor: the noise of a student_t sensor is white; leave out correlation_time")
        if self.correlation_time_sd is not None and not isinstance(self.kernel, SquaredExponential):
            raise SettingError("Sensor: correlation_time_sd needs a correlation_time to start from")

    @property
    def kernel(self) -> Kernel:
        """The autocorrelation of its noise."""
        return kernel_of(self.correlation_time)

    @property
    def is_white(self) -> bool:
        """Whether its noise is Gaussian and white, so that outliers can be told apart."""
        return self.family == "gaussian" and isinstance(self.kernel, White)

    @property
    def has_noise(self) -> bool:
        """Whether it has a noise level."""
        return self.family in ("gaussian", "student_t")

    def node(self, name: str, dim: int, inputs: int, dt: Any, outliers: float) -> SensoryNode:
        """The sensory node of a state of dimension `dim` with so many inputs; outliers: their expected share."""
        size, interval = self._size(name, dim, inputs), to_tensor(dt) * self.every
        if self.family != "gaussian":
            return FAMILIES[self.family](name, dim=size, dt=interval, **self.family_settings)
        share = outliers if self.is_white else 0.0
        return SensoryNode(name, dim=size, orders=1, dt=interval, outliers=number(share))

    def noise_node(self, name: str, sd: Any) -> PrecisionNode:
        """The precision node of its noise; sd: prior standard deviation of the log of the variance."""
        return noise_node(name, self.noise_sd, sd, self.kernel, self.noise_per_channel, self.correlation_time_sd)

    def _size(self, name: str, dim: int, inputs: int) -> int:
        """Number of its channels."""
        title, function = f"sensor {name!r}", as_function(self.mapping, dim)
        further = (inputs if function.takes_causes or function.takes_time else 0) + function.takes_time
        channels = output_size(function, dim + further, 0, f"{title}: the mapping")
        if self.channels not in (None, channels):
            if self.mapping is None:
                given = f"{self.channels} channels of a state of dimension {dim}"
                raise SettingError(f"{title}: {given} need a mapping=...")
            raise SettingError(f"{title}: the mapping has {channels} outputs, not {self.channels} channels")
        return channels


@settings
class Input:
    """One of several known inputs of a state.

    Args:
        channels: Number of its channels.
        interpolation: Its values between observations: "hold" keeps the last one, "linear" is a straight line.
        sd: Standard deviation of the true input around the given one; see `InputNode`.
    """

    _: KW_ONLY
    channels: int = Field(default=1, ge=1)
    interpolation: Literal["hold", "linear"] = "hold"
    sd: PositiveVector | None = None


def check_sensors(title: str, sensors: Any, beside: Sequence[str]) -> dict[str, Sensor]:
    """Sensors by name; `SettingError` for anything else, or if settings of a single one are given beside them."""
    if not isinstance(sensors, Mapping) or not sensors or not all(isinstance(s, Sensor) for s in sensors.values()):
        example = '{"gps": Sensor(mapping=..., channels=2)}'
        raise SettingError(f"{title}: sensors are Sensors by name, such as {example}, not {sensors!r}")
    if beside:
        raise SettingError(f"{title}: with sensors, give {', '.join(beside)} of each of them: Sensor(...)")
    if min(sensor.every for sensor in sensors.values()) > 1:
        raise SettingError(f"{title}: dt is the sampling interval of the fastest sensor; give that one every=1")
    return dict(sensors)


def check_names(title: str, sensors: Mapping[str, Sensor], above: Sequence[AnyNode]) -> None:
    """Raise `SettingError` if a sensor, an input, a cause or a category has the name of another node."""
    taken = {"x", "theta", "noise_x", "model_error_x", *(f"noise_{name}" for name in sensors)}
    for name in (*sensors, *(node.name for node in above)):
        if name in taken:
            raise SettingError(f"{title}: {name!r} is the name of another node; rename the sensor, input or cause")
        taken.add(name)


def kernel_of(correlation_time: Any) -> Kernel:
    """A squared-exponential kernel of this lengthscale, a kernel as it is, or white noise for None."""
    if correlation_time is None:
        return White()
    return correlation_time if isinstance(correlation_time, Kernel) else SquaredExponential(correlation_time)


def noise_node(
    name: str, guess: Any, sd: Any, kernel: Kernel, per_channel: bool, kernel_sd: Any = None
) -> PrecisionNode:
    """The precision node of a noise.

    Args:
        name: Its name.
        guess: First guess of the standard deviation of the noise; None if it is found from the first observations.
        sd: Prior standard deviation of the log of the variance.
        kernel: Autocorrelation.
        per_channel: Whether each channel has a level of its own.
        kernel_sd: Prior standard deviation of the log of the lengthscale, which is then learned.
    """
    return PrecisionNode(
        name,
        mean=-2 * at_least_1d(to_tensor(1.0 if guess is None else guess)).log(),
        sd=sd,
        kernel=kernel,
        correlation_time_sd=kernel_sd,
        channels="each" if per_channel else "shared",
    )


def input_nodes(title: str, inputs: Any, dt: Any) -> list[InputNode]:
    """Input nodes from numbers of channels or `Input`s by name."""
    if inputs is None:
        return []
    if not isinstance(inputs, Mapping):
        raise SettingError(f'{title}: inputs are numbers of channels, or Inputs, by name, such as {{"u": 1}}')
    found = []
    for name, given in inputs.items():
        one = given if isinstance(given, Input) else Input(channels=given)
        found.append(InputNode(name, dim=one.channels, dt=to_tensor(dt), interpolation=one.interpolation, sd=one.sd))
    return found
