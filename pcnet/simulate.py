"""Simulation of generative processes: states that follow a flow with noise, and noisy observations of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.errors import DivergenceError, SettingError, naming
from pcnet.functions.base import Function, PlainFunction
from pcnet.functions.check import check_function
from pcnet.functions.systems import lotka_volterra
from pcnet.functions.traced import as_function
from pcnet.settings import at_least_1d, broadcast, finite, not_negative, to_tensor

OneSeed = int | np.random.Generator
Seed = OneSeed | Sequence[int]  # a seed, a generator, or one seed for each of several replicates

GLV_PARAMETERS = (0.2, -0.4, 0.1)  # a₁₂, a₁₃ and a₂₃ of the paper's generative process
GLV_INITIAL = (5 * 0.45, 5 * 0.22, 5 * 0.33)  # x(0) of the paper's generative process
GLV_STATE_SD, GLV_OBSERVATION_SD = 0.05, 0.1
GLV_LOWER, GLV_UPPER = 0.0, 5.0
AUTHORS_SAMPLES = 10_000


class Simulation(NamedTuple):
    """A simulated process. The first state is x(0), and the last state noise has no effect."""

    times: Tensor  # (T,)
    states: Tensor  # (..., T, dim)
    observations: Tensor  # of the states at the same times, (..., T, dim_y)
    state_noise: Tensor  # (..., T, dim); state_noise[t] acts on the step from t to t + 1
    observation_noise: Tensor  # (..., T, dim_y)


# --- noise -----------------------------------------------------------------------------------------------------------
@naming(SettingError)
def smooth_noise(
    samples: int, dim: int, *, sd: Any = 1.0, width: float = 0.0, dt: float = 1.0, seed: OneSeed
) -> Tensor:
    """Stationary Gaussian noise: white noise n convolved with a Gaussian kernel k of unit energy.

    z_t = sd Σ_j k_j n_{t−j}, k_j ∝ exp(−(j dt)²/2 width²), Σ k_j² = 1. The autocorrelation is exp(−h²/4 width²), so the
    `correlation_time` w of exp(−h²/2w²) that a precision node needs is √2 width (exact at even lags; the error at odd
    lags is at most 2e-4 for width ≥ dt).

    Args:
        sd: Marginal standard deviation; a number or (dim,).
        width: Standard deviation of the kernel in the time units of dt; 0 gives white noise.

    Returns:
        The noise, (samples, dim).
    """
    samples, dim = _count("samples", samples), _count("dim", dim)
    dt, width = _number("dt", dt, positive=True), _number("width", width)
    scale = _sd("sd", sd, dim)
    if scale.dim() > 1:
        raise SettingError(f"sd must be one number or ({dim},), not of shape {tuple(scale.shape)}")
    kernel = _kernel(width / dt)
    white = _generator(seed).standard_normal((samples + len(kernel) - 1, dim))
    smooth = np.zeros((samples, dim))
    for j, weight in enumerate(kernel):
        smooth += weight * white[j : j + samples]
    return torch.from_numpy(smooth) * scale


def _kernel(width: float) -> list[float]:
    """Gaussian kernel of unit energy, truncated at 8 widths; width in samples."""
    reach = math.ceil(8 * width)
    values = [math.exp(-0.5 * (lag / width) ** 2) if lag else 1.0 for lag in range(-reach, reach + 1)]
    energy = math.fsum(value**2 for value in values)
    return [value / math.sqrt(energy) for value in values]


# --- processes -------------------------------------------------------------------------------------------------------
@naming(SettingError)
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
    """Integrate x_0 = initial, x_{t+1} = clip(x_t + dt (f(x_t, θ) + z_t), lower, upper) by Euler steps.

    Args:
        parameters: θ, (..., p).
        initial: (..., dim).
        noise: z, (..., T, dim).
        lower, upper: Bounds of the states; numbers or (..., dim).

    Returns:
        The states, (..., T, dim).
    """
    dt = _number("dt", dt, positive=True)
    theta, first = _vector("parameters", parameters), _vector("initial", initial)
    drive = _tensor("noise", noise)
    if drive.dim() < 2 or drive.shape[-1] != first.shape[-1] or drive.shape[-2] < 1:
        raise SettingError(f"noise has shape {tuple(drive.shape)}; it must end in (samples, {first.shape[-1]})")
    batch = _batch_shape(parameters=theta.shape[:-1], initial=first.shape[:-1], noise=drive.shape[:-2])
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
    diverged = ~torch.isfinite(states).flatten(1).all(1)
    if bool(diverged.any()):
        raise DivergenceError(
            f"the simulated states are no longer finite at sample {int(diverged.nonzero()[0, 0])}; use a smaller dt, "
            "less noise, or the bounds lower and upper"
        )
    return states.movedim(0, -2).contiguous()


@naming(SettingError)
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
    """Simulate x ← clip(x + dt (f(x, θ) + z)) and observe y = max(g(x, θ_g) + w, observation_lower).

    The noises z and w are independent and have the same smoothness. z is constant over each step (zero-order hold), so
    the effect of white state noise shrinks with dt. Batch dimensions of the arguments give independent processes.

    Args:
        flow, mapping: Functions of (state, parameters); no mapping is the identity.
        parameters, initial, mapping_parameters: (..., p), (..., dim) and (..., q).
        state_sd, observation_sd: Standard deviations of z and w; numbers or (..., channels).
        width: Kernel width of the noises; see `smooth_noise`.
        lower, upper: Bounds of the states.
        seed: A seed, or a sequence of seeds for replicates along a new leading dimension. A replicate does not depend
            on the other seeds, and the first samples do not depend on `samples`.
    """
    samples, dt = _count("samples", samples), _number("dt", dt, positive=True)
    theta, first = _vector("parameters", parameters), _vector("initial", initial)
    weights = _vector("mapping_parameters", mapping_parameters)
    dim = first.shape[-1]
    channels = check_function("the mapping", as_function(mapping), dim, weights.shape[-1], None, first)
    scale_x, scale_y = _sd("state_sd", state_sd, dim), _sd("observation_sd", observation_sd, channels)
    batch = _batch_shape(
        parameters=theta.shape[:-1],
        initial=first.shape[:-1],
        mapping_parameters=weights.shape[:-1],
        state_sd=scale_x.shape[:-1],
        observation_sd=scale_y.shape[:-1],
    )

    def noise(rng: np.random.Generator, scale: Tensor) -> Tensor:
        flat = smooth_noise(samples, batch.numel() * scale.shape[-1], width=width, dt=dt, seed=rng)
        return flat.view(samples, *batch, -1).movedim(0, -2) * scale[..., None, :]

    def draw(seed: OneSeed) -> tuple[Tensor, Tensor]:
        for_states, for_observations = _generator(seed).spawn(2)
        return noise(for_states, scale_x), noise(for_observations, scale_y)

    z, w = _replicate(draw, seed)
    states = euler(flow, parameters=theta, initial=first, noise=z, dt=dt, lower=lower, upper=upper)
    clean = states
    if mapping is not None:
        with torch.no_grad():
            clean = mapping(states, weights[..., None, :].expand(*states.shape[:-1], -1))
    return _simulation(states, clean, z, w, dt, observation_lower)


@naming(SettingError)
def glv_process(
    samples: int = AUTHORS_SAMPLES,
    dt: float = 0.01,
    *,
    noise: Literal["smooth", "white", "authors"] = "smooth",
    width: float | None = None,
    clamp_observations: bool = True,
    seed: Seed = 42,
) -> Simulation:
    """Simulate the paper's generalised Lotka–Volterra process ẋ = x ⊙ Ax + z, y = x + w; (..., samples, 3).

    a₁₂ = 0.2, a₁₃ = −0.4, a₂₃ = 0.1; x(0) = 5·(0.45, 0.22, 0.33); sd of z 0.05, of w 0.1; states are clamped to [0, 5]
    and observations at 0.

    Args:
        noise: "smooth": independent smooth z and w. "white": independent white z and w. "authors": the noise of the
            authors' program, white and from one seed, so that w = 2z; with seed=42 and dt=0.01 these are the authors'
            own 10,000 observations.
        width: Kernel width of smooth noise in time units; 0.05 by default.
        clamp_observations: Clamp observations at 0.
    """
    if noise not in ("smooth", "white", "authors"):
        raise SettingError(f"there is no noise {noise!r}; choose 'smooth', 'white' or 'authors'")
    if width is not None and noise != "smooth":
        raise SettingError(f"noise={noise!r} is white and takes no width; leave it out, or use noise='smooth'")
    lower = GLV_LOWER if clamp_observations else None
    process: dict[str, Any] = {"parameters": GLV_PARAMETERS, "initial": GLV_INITIAL, "dt": dt}
    process |= {"lower": GLV_LOWER, "upper": GLV_UPPER}
    if noise != "authors":
        return simulate(
            lotka_volterra,
            **process,
            samples=samples,
            state_sd=GLV_STATE_SD,
            observation_sd=GLV_OBSERVATION_SD,
            width=0.0 if noise == "white" else 0.05 if width is None else width,
            observation_lower=lower,
            seed=seed,
        )
    samples = _count("samples", samples)
    if samples > AUTHORS_SAMPLES:
        raise SettingError(f"noise='authors' has {AUTHORS_SAMPLES} samples, not {samples}; use noise='white' for more")
    z, w = _replicate(lambda each: _authors_noise(each, samples), seed)
    states = euler(lotka_volterra, **process, noise=z)
    return _simulation(states, states, z, w, dt, lower)


# --- parts -----------------------------------------------------------------------------------------------------------
def _authors_noise(seed: OneSeed, samples: int) -> tuple[Tensor, Tensor]:
    """z and w = 2z, (samples, 3) each: the first of 10,000 normal numbers per channel."""
    if isinstance(seed, np.random.Generator):
        raise SettingError("noise='authors' needs a seed, not a generator: it uses numpy's legacy random numbers")
    rng = np.random.RandomState(_seed(seed))
    z = torch.from_numpy(rng.normal(0.0, GLV_STATE_SD, (3, AUTHORS_SAMPLES)).T[:samples].copy())
    return z, GLV_OBSERVATION_SD / GLV_STATE_SD * z


def _replicate(draw: Callable[[OneSeed], tuple[Tensor, Tensor]], seed: Seed) -> tuple[Tensor, Tensor]:
    """Both noises of one seed, or those of several seeds stacked along a new first dimension."""
    if isinstance(seed, np.ndarray):
        seed = seed.tolist()
    if not isinstance(seed, Sequence) or isinstance(seed, str):
        return draw(seed)
    if not seed:
        raise SettingError("seed must be a whole number, a generator, or a sequence of at least one whole number")
    z, w = zip(*(draw(_seed(each)) for each in seed), strict=True)
    return torch.stack(z), torch.stack(w)


def _simulation(states: Tensor, clean: Tensor, z: Tensor, w: Tensor, dt: float, lower: Any) -> Simulation:
    """A simulation with observations y = max(clean + w, lower)."""
    times = torch.arange(states.shape[-2], dtype=torch.float64) * dt
    return Simulation(times, states, _clip(lower, None)(clean + w), z, w)


def _clip(lower: Any, upper: Any) -> Callable[[Tensor], Tensor]:
    low = None if lower is None else _tensor("lower", lower)
    high = None if upper is None else _tensor("upper", upper)
    if low is not None and high is not None and bool((low > high).any()):
        raise SettingError("lower must not be above upper")
    if low is None and high is None:
        return lambda value: value
    return lambda value: value.clamp(low, high)


def _batch_shape(**shapes: torch.Size) -> torch.Size:
    try:
        return broadcast(*shapes.values())
    except RuntimeError:
        given = {name: tuple(shape) for name, shape in shapes.items()}
        raise SettingError(f"batch dimensions do not fit together: {given}") from None


# --- validation ------------------------------------------------------------------------------------------------------
def _tensor(name: str, value: Any, check: Callable[[Tensor], Tensor] = finite) -> Tensor:
    try:
        return check(finite(to_tensor(value)))
    except ValueError as error:
        raise SettingError(f"{name} {error}") from None


def _vector(name: str, value: Any, check: Callable[[Tensor], Tensor] = finite) -> Tensor:
    """Numbers as (..., n)."""
    return at_least_1d(_tensor(name, value, check))


def _sd(name: str, value: Any, channels: int) -> Tensor:
    """Standard deviations as (..., channels)."""
    tensor = _vector(name, value, not_negative)
    if tensor.shape[-1] not in (1, channels):
        raise SettingError(f"{name} has {tensor.shape[-1]} values in its last dimension for {channels} channels")
    return tensor.expand(*tensor.shape[:-1], channels)


def _number(name: str, value: Any, positive: bool = False) -> float:
    tensor = _tensor(name, value)
    if tensor.numel() != 1 or float(tensor) < 0 or (positive and float(tensor) == 0):
        raise SettingError(f"{name} must be one number, {'positive' if positive else '0 or more'}, not {value!r}")
    return float(tensor)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise SettingError(f"{name} must be a whole number, 1 or more, not {value!r}")
    return int(value)


def _generator(seed: OneSeed) -> np.random.Generator:
    return seed if isinstance(seed, np.random.Generator) else np.random.default_rng(_seed(seed))


def _seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise SettingError(f"a seed must be a whole number from 0 to 2³² − 1, not {seed!r}")
    return int(seed)
