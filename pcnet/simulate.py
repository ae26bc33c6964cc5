"""Generative processes: states that move by a flow with noise, and noisy observations of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.errors import DivergenceError, SettingError
from pcnet.functions.base import Function, PlainFunction
from pcnet.functions.check import check_function
from pcnet.functions.systems import lotka_volterra
from pcnet.functions.traced import as_function
from pcnet.settings import broadcast, finite, not_negative, to_tensor

Seed = int | np.random.Generator | Sequence[int]
"""A seed, a generator, or a seed for each of several replicates."""

GLV_PARAMETERS = (0.2, -0.4, 0.1)
"""a₁₂, a₁₃ and a₂₃ of the paper's generative process."""

GLV_INITIAL = (5 * 0.45, 5 * 0.22, 5 * 0.33)
"""x(0) of the paper's generative process."""

GLV_STATE_SD, GLV_OBSERVATION_SD = 0.05, 0.1
GLV_LOWER, GLV_UPPER = 0.0, 5.0
AUTHORS_SAMPLES = 10_000


class Simulation(NamedTuple):
    """A simulated process: times (T,), states and state_noise (..., T, dim), the other two (..., T, dim_y).

    states[t] is observed at times[t], with observation_noise[t]; state_noise[t] drives the step from t to t + 1, so
    that the first state is x(0) and the last state noise has had no effect yet.
    """

    times: Tensor
    states: Tensor
    observations: Tensor
    state_noise: Tensor
    observation_noise: Tensor


# --- noise -----------------------------------------------------------------------------------------------------------
def smooth_noise(
    samples: int, dim: int, *, sd: Any = 1.0, width: float = 0.0, dt: float = 1.0, seed: int | np.random.Generator
) -> Tensor:
    """Stationary Gaussian noise: white noise convolved with a Gaussian kernel of unit energy; (samples, dim).

    z_t = sd Σ_j k_j n_{t−j}, k_j ∝ exp(−(j dt)²/2 width²), Σ k_j² = 1. The marginal standard deviation is sd, and the
    autocorrelation exp(−h²/4 width²): the kernel's width times √2 is the `smoothness` w of exp(−h²/2w²) by which a
    precision node knows such noise (exactly so at even lags; at odd ones up to 2e-4 if width = dt, less if it is more).

    sd: one number or (dim,). width: of the kernel, in the time units of dt; 0 leaves the noise white.
    """
    samples, dim = _whole("samples", samples), _whole("dim", dim)
    dt, width = _positive("dt", dt), _not_negative("width", width)
    scale = _sd("sd", sd, dim)
    if scale.dim() > 1:
        raise SettingError(f"sd must be one number or ({dim},), not of shape {tuple(scale.shape)}")
    rng = _generator(seed)
    kernel = _kernel(width / dt)
    white = rng.standard_normal((samples + len(kernel) - 1, dim))
    smooth = np.zeros((samples, dim))
    for j, weight in enumerate(kernel):
        smooth += weight * white[j : j + samples]
    return torch.from_numpy(smooth) * scale


def _kernel(width: float) -> list[float]:
    """A Gaussian kernel of unit energy, width in samples, cut where it has fallen below the rounding of its sum."""
    reach = math.ceil(8 * width)
    values = [math.exp(-0.5 * (lag / width) ** 2) if lag else 1.0 for lag in range(-reach, reach + 1)]
    energy = math.fsum(value**2 for value in values)
    return [value / math.sqrt(energy) for value in values]


# --- processes -------------------------------------------------------------------------------------------------------
def euler(
    flow: Function | PlainFunction,
    *,
    parameters: Any = (),
    initial: Any,
    noise: Any,
    dt: float,
    lower: Any = None,
    upper: Any = None,
) -> Tensor:
    """States (..., T, dim) of x_0 = initial, x_{t+1} = clip(x_t + dt (f(x_t, θ) + z_t), lower, upper).

    parameters (..., p), initial (..., dim) and noise z (..., T, dim) may each have batch dimensions; lower and upper
    are numbers, or (..., dim).
    """
    dt = _positive("dt", dt)
    theta, first = _vector("parameters", parameters), _vector("initial", initial)
    drive = _numbers("noise", noise)
    if drive.dim() < 2 or drive.shape[-1] != first.shape[-1] or drive.shape[-2] < 1:
        raise SettingError(f"noise has shape {tuple(drive.shape)}; it must end in (samples, {first.shape[-1]})")
    batch = _batch({"parameters": theta.shape[:-1], "initial": first.shape[:-1], "noise": drive.shape[:-2]})
    clip = _clip(lower, upper)
    x = clip(first.expand(*batch, -1).clone())
    theta = theta.expand(*batch, -1)
    check_function("the flow", as_function(flow), x.shape[-1], theta.shape[-1], x.shape[-1], x)
    drive = drive.movedim(-2, 0)
    states = torch.empty(len(drive), *x.shape, dtype=torch.float64)
    with torch.no_grad():
        states[0] = x
        for t in range(1, len(drive)):
            x = clip(x + dt * (flow(x, theta) + drive[t - 1]))
            states[t] = x
    broken = ~torch.isfinite(states).flatten(1).all(1)
    if bool(broken.any()):
        raise DivergenceError(
            f"the simulated states are no longer finite at sample {int(broken.nonzero()[0, 0])}; use a smaller dt, "
            "less noise, or the clamps lower and upper"
        )
    return states.movedim(0, -2).contiguous()


def simulate(
    flow: Function | PlainFunction,
    *,
    parameters: Any = (),
    initial: Any,
    samples: int,
    dt: float,
    state_sd: Any,
    observation_sd: Any,
    width: float = 0.0,
    mapping: Function | PlainFunction | None = None,
    mapping_parameters: Any = (),
    lower: Any = None,
    upper: Any = None,
    observation_lower: Any = None,
    seed: Seed,
) -> Simulation:
    """A process x ← clip(x + dt (f(x, θ) + z)) and its observations y = max(g(x, θ_g) + w, observation_lower).

    The noises z and w are independent, and smoothed alike: see `smooth_noise` for width. z is held over each step, so
    that where it is white its effect shrinks with dt.

    flow, mapping: functions of (state, parameters) or a `Function`; no mapping is the identity.
    initial (..., dim), parameters (..., p), mapping_parameters (..., q), state_sd and observation_sd (one number or
    (..., channels)): their batch dimensions make a process each, with noise of its own.
    seed: one, or a sequence of them for replicates along a new leading dimension, each as from its seed alone. A
    longer process of the same seed begins with the shorter one.
    """
    samples, dt = _whole("samples", samples), _positive("dt", dt)
    theta, first = _vector("parameters", parameters), _vector("initial", initial)
    weights = _vector("mapping_parameters", mapping_parameters)
    dim = first.shape[-1]
    seen = check_function("the mapping", as_function(mapping), dim, weights.shape[-1], None, first)
    scale_x, scale_y = _sd("state_sd", state_sd, dim), _sd("observation_sd", observation_sd, seen)
    given = {
        "parameters": theta,
        "initial": first,
        "mapping_parameters": weights,
        "state_sd": scale_x,
        "observation_sd": scale_y,
    }
    batch = _batch({name: value.shape[:-1] for name, value in given.items()})

    def draw(seed: int | np.random.Generator) -> tuple[Tensor, Tensor]:
        for_states, for_observations = _generator(seed).spawn(2)
        return (
            _noise(for_states, batch, samples, dim, width=width, dt=dt) * scale_x[..., None, :],
            _noise(for_observations, batch, samples, seen, width=width, dt=dt) * scale_y[..., None, :],
        )

    z, w = _replicate(draw, seed)
    states = euler(flow, parameters=theta, initial=first, noise=z, dt=dt, lower=lower, upper=upper)
    return _observe(states, z, w, dt=dt, floor=observation_lower, mapping=mapping, weights=weights)


def glv_process(
    samples: int = AUTHORS_SAMPLES,
    dt: float = 0.01,
    *,
    noise: Literal["smooth", "white", "authors"] = "smooth",
    width: float | None = None,
    clamp_observations: bool = True,
    seed: Seed = 42,
) -> Simulation:
    """The generalised Lotka–Volterra process of the paper: ẋ = x ⊙ Ax + z, y = x + w; (..., samples, 3).

    a₁₂ = 0.2, a₁₃ = −0.4, a₂₃ = 0.1; x(0) = 5·(0.45, 0.22, 0.33); z has standard deviation 0.05 and w 0.1; states are
    clamped to [0, 5] and observations, unless clamp_observations=False, at 0.

    noise: "smooth" has independent z and w of kernel width `width`, in time units, 0.05 (five samples at the default
    dt) unless given; "white" has independent white z and w; "authors" is the noise of the published program: white,
    and from one seed for both, so that w = 2z. With seed=42 and dt=0.01 that gives the authors' own 10,000
    observations, or the first of them.
    """
    if noise not in ("smooth", "white", "authors"):
        raise SettingError(f"there is no noise {noise!r}; choose 'smooth', 'white' or 'authors'")
    if width is not None and noise != "smooth":
        raise SettingError(f"noise={noise!r} is white and takes no width; leave it out, or use noise='smooth'")
    floor = GLV_LOWER if clamp_observations else None
    process: dict[str, Any] = {
        "parameters": GLV_PARAMETERS,
        "initial": GLV_INITIAL,
        "dt": dt,
        "lower": GLV_LOWER,
        "upper": GLV_UPPER,
    }
    if noise != "authors":
        return simulate(
            lotka_volterra,
            **process,
            samples=samples,
            state_sd=GLV_STATE_SD,
            observation_sd=GLV_OBSERVATION_SD,
            width=0.0 if noise == "white" else 0.05 if width is None else width,
            observation_lower=floor,
            seed=seed,
        )
    samples = _whole("samples", samples)
    if samples > AUTHORS_SAMPLES:
        raise SettingError(f"noise='authors' has {AUTHORS_SAMPLES} samples, not {samples}; use noise='white' for more")
    z, w = _replicate(lambda each: _authors_noise(each, samples), seed)
    states = euler(lotka_volterra, **process, noise=z)
    return _observe(states, z, w, dt=dt, floor=floor)


# --- parts -----------------------------------------------------------------------------------------------------------
def _authors_noise(seed: int | np.random.Generator, samples: int) -> tuple[Tensor, Tensor]:
    """z and w = 2z, both (samples, 3): channel by channel 10,000 normals, of which the first are used."""
    if isinstance(seed, np.random.Generator):
        raise SettingError("noise='authors' needs a seed, not a generator: its random numbers are of the legacy kind")
    rng = np.random.RandomState(_whole_seed(seed))
    z = torch.from_numpy(rng.normal(0.0, GLV_STATE_SD, (3, AUTHORS_SAMPLES)).T[:samples].copy())
    return z, GLV_OBSERVATION_SD / GLV_STATE_SD * z


def _noise(
    rng: np.random.Generator, batch: torch.Size, samples: int, channels: int, *, width: float, dt: float
) -> Tensor:
    """Unit noise (*batch, samples, channels), different in every batch element."""
    flat = smooth_noise(samples, batch.numel() * channels, width=width, dt=dt, seed=rng)
    return flat.view(samples, *batch, channels).movedim(0, -2)


def _replicate(draw: Callable[[int | np.random.Generator], tuple[Tensor, Tensor]], seed: Seed) -> tuple[Tensor, Tensor]:
    """Both noises of a seed, or of a sequence of seeds stacked along a new first dimension."""
    if isinstance(seed, np.ndarray):
        seed = seed.tolist()
    if not isinstance(seed, Sequence) or isinstance(seed, str):
        return draw(seed)
    if not seed:
        raise SettingError("seed must be a whole number, a generator, or a sequence of at least one whole number")
    pairs = [draw(_whole_seed(each)) for each in seed]
    return torch.stack([z for z, _ in pairs]), torch.stack([w for _, w in pairs])


def _observe(
    states: Tensor,
    z: Tensor,
    w: Tensor,
    *,
    dt: float,
    floor: Any,
    mapping: Function | PlainFunction | None = None,
    weights: Tensor | None = None,
) -> Simulation:
    """y = max(g(x, weights) + w, floor), at all times together."""
    with torch.no_grad():
        clean = states
        if mapping is not None and weights is not None:
            clean = mapping(states, weights[..., None, :].expand(*states.shape[:-1], -1))
        observations = _clip(floor, None)(clean + w)
    times = torch.arange(states.shape[-2], dtype=torch.float64) * dt
    return Simulation(times, states, observations, z, w)


def _clip(lower: Any, upper: Any) -> Callable[[Tensor], Tensor]:
    low = None if lower is None else _numbers("lower", lower)
    high = None if upper is None else _numbers("upper", upper)
    if low is not None and high is not None and bool((low > high).any()):
        raise SettingError("lower must not be above upper")
    if low is None and high is None:
        return lambda value: value
    return lambda value: value.clamp(low, high)


def _batch(shapes: dict[str, torch.Size]) -> torch.Size:
    try:
        return broadcast(*shapes.values())
    except RuntimeError:
        found = {name: tuple(shape) for name, shape in shapes.items()}
        raise SettingError(f"batch dimensions do not fit together: {found}") from None


def _numbers(name: str, value: Any) -> Tensor:
    try:
        tensor: Tensor = finite(to_tensor(value))
    except ValueError as error:
        raise SettingError(f"{name} {error}") from None
    return tensor


def _vector(name: str, value: Any) -> Tensor:
    """Numbers as (..., n)."""
    tensor = _numbers(name, value)
    return tensor if tensor.dim() else tensor[None]


def _sd(name: str, value: Any, channels: int) -> Tensor:
    """A standard deviation as (..., channels)."""
    tensor = _vector(name, value)
    try:
        not_negative(tensor)
    except ValueError as error:
        raise SettingError(f"{name} {error}") from None
    if tensor.shape[-1] not in (1, channels):
        raise SettingError(f"{name} has {tensor.shape[-1]} values in its last dimension for {channels} channels")
    return tensor.expand(*tensor.shape[:-1], channels)


def _positive(name: str, value: Any) -> float:
    number = _not_negative(name, value)
    if number == 0:
        raise SettingError(f"{name} must be positive")
    return number


def _not_negative(name: str, value: Any) -> float:
    tensor = _numbers(name, value)
    if tensor.numel() != 1 or float(tensor) < 0:
        raise SettingError(f"{name} must be one number that is not negative, not {value!r}")
    return float(tensor)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise SettingError(f"{name} must be a whole number, 1 or more, not {value!r}")
    return int(value)


def _generator(seed: int | np.random.Generator) -> np.random.Generator:
    return seed if isinstance(seed, np.random.Generator) else np.random.default_rng(_whole_seed(seed))


def _whole_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise SettingError(f"a seed must be a whole number from 0 to 2³² − 1, not {seed!r}")
    return int(seed)
