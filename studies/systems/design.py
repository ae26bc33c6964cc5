"""Systems of the study: stochastic differential equations with a known truth, and the first guesses of their noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.functions.base import PlainFunction
from studies.systems.flows import (
    Observe,
    battery,
    battery_voltage,
    bioreactor,
    brusselator,
    calcium,
    circuit,
    cortex,
    coupled_pendulums,
    driven_duffing,
    duffing,
    epidemic,
    fitzhugh_nagumo,
    food_chain,
    friction,
    glucose,
    glycolysis,
    grazing,
    hindmarsh_rose,
    infusion,
    laser,
    lorenz63,
    lorenz84,
    lorenz96,
    magnet,
    morris_lecar,
    motor,
    oscillator,
    pendulum,
    range_and_bearing,
    reactor,
    reentry,
    repressilator,
    rigid_body,
    roessler,
    rotors,
    seen,
    ship,
    synapses,
    tanks,
    thomas,
    three_species,
    tumour,
    turning,
    van_der_pol,
    vehicle,
    wilson_cowan,
)

HELD_OUT = 40_000
"""First seed of reports. Seeds from here on are held out: no rule or setting may be chosen with them."""
DEVELOPMENT = 3_000
"""First seed for everything else."""
FINE = 20
"""Steps of the simulation in one sampling interval."""
HORIZONS = (1, 10, 100)
"""Forecast horizons, in sampling intervals."""

Group = Literal["development", "frozen"]


class Guess(NamedTuple):
    """Factors of the true variances of process (x) and observation noise (y); None for no guess at all."""

    name: str
    x: float | None
    y: float | None


GUESSES = (
    Guess("right", 1.0, 1.0),
    Guess("both × 50", 50.0, 50.0),
    Guess("both ÷ 50", 1 / 50, 1 / 50),
    Guess("x × 50, y ÷ 50", 50.0, 1 / 50),
    Guess("x ÷ 50, y × 50", 1 / 50, 50.0),
    Guess("none", None, None),
)


class System(NamedTuple):
    """dx = f(x, θ) dt + D dW, y = g(x) + w, and what a filter is told beforehand."""

    title: str
    kind: str  # what makes it hard
    flow: PlainFunction
    parameters: tuple[float, ...]  # the truth
    prior_mean: tuple[float, ...]
    prior_sd: tuple[float, ...]
    initial_mean: tuple[float, ...]  # x(0) ~ N(initial_mean, initial_sd²)
    initial_sd: tuple[float, ...]
    diffusion: tuple[float, ...]  # D, per √time
    observation_sd: tuple[float, ...]
    dt: float
    samples: int
    observe: Observe
    group: Group = "development"
    irregular: bool = False  # intervals between 0.2 and 1.8 dt, and a gap of 10 dt every 50 observations
    outliers: float = 0.0  # share of observations with 20 times the noise
    later: Callable[[float], tuple[float, ...]] | None = None  # θ at a fraction of the time, if it changes
    walk: float = 0.0  # of the parameters of the rivals, in prior sds per √observation, best on development seeds
    correlation_time: float | None = None  # of Matérn-3/2 observation noise, instead of white noise
    integrator: Literal["rk4", "local_linearisation"] = "rk4"
    two_peaks: bool = False  # whether beliefs may have two, so that a particle filter runs beside

    @property
    def dim(self) -> int:
        return len(self.initial_mean)

    @property
    def channels(self) -> int:
        return len(self.observation_sd)

    def parameters_at(self, fraction: float) -> tuple[float, ...]:
        """θ at a fraction of the time."""
        return self.parameters if self.later is None else self.later(min(fraction, 1.0))


class Realisation(NamedTuple):
    """Simulated data of all seeds, with the states of HORIZONS[-1] further intervals."""

    times: Tensor  # (T,)
    states: Tensor  # (S, T, d)
    observations: Tensor  # (S, T, m)
    is_outlier: Tensor  # (S, T, m)
    future: Tensor  # (S, HORIZONS[-1], d)

    @property
    def scale(self) -> Tensor:
        """Standard deviations of the states over time and seeds, (d,): errors are relative to them."""
        return self.states.flatten(0, 1).std(0).clamp_min(1e-12)


def simulate(system: System, seeds: Sequence[int]) -> Realisation:
    """One realisation per seed: Runge–Kutta steps of the flow, FINE in an interval, with noise after each."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def normal(*shape: int) -> Tensor:
        return torch.stack([torch.randn(*shape, generator=g, dtype=torch.float64) for g in generators], 1)

    def uniform(*shape: int) -> Tensor:
        return torch.stack([torch.rand(*shape, generator=g, dtype=torch.float64) for g in generators])

    count, ahead = system.samples, HORIZONS[-1]
    intervals = _intervals(system, count)
    mean, sd, diffusion = (
        torch.tensor(each, dtype=torch.float64) for each in (system.initial_mean, system.initial_sd, system.diffusion)
    )
    x = mean + sd * normal(1, system.dim)[0]
    states = [x]
    for k in range(1, count + ahead):
        h = float(intervals[min(k, count - 1)]) / FINE if k < count else system.dt / FINE
        theta = torch.tensor(system.parameters_at(k / count), dtype=torch.float64).expand(len(x), -1)
        noise = normal(FINE, system.dim)
        for i in range(FINE):
            x = _runge_kutta(system.flow, x, theta, h) + math.sqrt(h) * diffusion * noise[i]
        states.append(x)
    path = torch.stack(states, 1)
    noise_sd = torch.tensor(system.observation_sd, dtype=torch.float64)
    noise = normal(count, system.channels).transpose(0, 1)
    if system.correlation_time is not None:
        noise = matern_noise(noise, normal(count, system.channels).transpose(0, 1), intervals, system.correlation_time)
    is_outlier = uniform(count, system.channels) < system.outliers
    noise = torch.where(is_outlier, 20.0, 1.0) * noise_sd * noise
    observations = system.observe(path[:, :count]) + noise
    return Realisation(intervals.cumsum(0), path[:, :count], observations, is_outlier, path[:, count:])


def _intervals(system: System, count: int) -> Tensor:
    """Time since the observation before, (T,); 0 for the first."""
    intervals = torch.full((count,), system.dt, dtype=torch.float64)
    if system.irregular:
        generator = torch.Generator().manual_seed(0)
        intervals = system.dt * (0.2 + 1.6 * torch.rand(count, generator=generator, dtype=torch.float64))
        intervals[50::50] = 10 * system.dt
    intervals[0] = 0.0
    return intervals


def _runge_kutta(flow: PlainFunction, x: Tensor, theta: Tensor, h: float) -> Tensor:
    first = flow(x, theta)
    second = flow(x + 0.5 * h * first, theta)
    third = flow(x + 0.5 * h * second, theta)
    fourth = flow(x + h * third, theta)
    return x + h / 6 * (first + 2 * second + 2 * third + fourth)


def matern_step(interval: float, time: float) -> tuple[Tensor, Tensor]:
    """Transition and noise covariance of a unit Matérn-3/2 process (value, slope) over an interval."""
    rate = math.sqrt(3) / time
    drift = torch.tensor([[0.0, 1.0], [-(rate**2), -2 * rate]], dtype=torch.float64)
    matrix = torch.linalg.matrix_exp(drift * interval)
    stationary = torch.diag(torch.tensor([1.0, rate**2], dtype=torch.float64))
    return matrix, stationary - matrix @ stationary @ matrix.T


def matern_noise(first: Tensor, second: Tensor, intervals: Tensor, time: float) -> Tensor:
    """Unit Matérn-3/2 noise (S, T, m) from standard normal numbers."""
    rate = math.sqrt(3) / time
    state = torch.stack([first[:, 0], rate * second[:, 0]], -1)
    values = [state[..., 0]]
    for k in range(1, first.shape[1]):
        matrix, covariance = matern_step(float(intervals[k]), time)
        root = torch.linalg.cholesky(covariance)
        state = state @ matrix.T + torch.stack([first[:, k], second[:, k]], -1) @ root.T
        values.append(state[..., 0])
    return torch.stack(values, 1)


_FHN = System(
    "FitzHugh–Nagumo neuron, potential seen",
    "partially seen",
    fitzhugh_nagumo,
    (0.5, 0.08),
    (0.3, 0.12),
    (0.3, 0.05),
    (0.0, 0.0),
    (0.5, 0.5),
    (0.05, 0.02),
    (0.2,),
    0.2,
    1000,
    seen(0),
)
_OSCILLATOR = System(
    "Damped oscillator, both elements seen",
    "different noise by channel",
    oscillator,
    (0.3, 2.0),
    (0.5, 3.0),
    (0.4, 1.0),
    (1.0, 0.0),
    (0.5, 0.5),
    (0.02, 0.5),
    (0.05, 0.5),
    0.1,
    1000,
    seen(0, 1),
)

SYSTEMS: Mapping[str, System] = {
    "stiff": System(
        "Stiff van der Pol oscillator, position seen",
        "stiff",
        van_der_pol,
        (8.0,),
        (5.0,),
        (3.0,),
        (2.0, 0.0),
        (0.3, 0.3),
        (0.05, 0.3),
        (0.2,),
        0.05,
        1000,
        seen(0),
    ),
    "chaotic": System(
        "Lorenz-63 at a coarse interval, x seen",
        "chaotic, coarse interval",
        lorenz63,
        (10.0, 28.0, 8 / 3),
        (9.0, 30.0, 2.5),
        (1.0, 4.0, 0.4),
        (1.0, 1.0, 25.0),
        (3.0, 3.0, 3.0),
        (0.5, 0.5, 0.5),
        (1.0,),
        0.05,
        1000,
        seen(0),
    ),
    "sine": System(
        "Pendulum seen through a sine",
        "strongly nonlinear observation",
        pendulum,
        (0.1, 4.0),
        (0.3, 5.0),
        (0.3, 2.0),
        (1.5, 0.0),
        (0.5, 0.5),
        (0.02, 0.4),
        (0.1,),
        0.05,
        1000,
        lambda x: x[..., :1].sin(),
        two_peaks=True,
    ),
    "neuron": _FHN,
    "outliers": _FHN._replace(title="The same with 5 % outliers", kind="outliers", outliers=0.05),
    "lattice10": System(
        "Lorenz-96 with 10 states, every other one seen",
        "10 states",
        lorenz96,
        (8.0,),
        (6.0,),
        (3.0,),
        (3.0,) * 10,
        (3.0,) * 10,
        (0.3,) * 10,
        (1.0,) * 5,
        0.05,
        500,
        seen(0, 2, 4, 6, 8),
    ),
    "lattice20": System(
        "Lorenz-96 with 20 states, all seen",
        "20 states",
        lorenz96,
        (8.0,),
        (6.0,),
        (3.0,),
        (3.0,) * 20,
        (3.0,) * 20,
        (0.3,) * 20,
        (1.0,) * 20,
        0.05,
        300,
        seen(*range(20)),
    ),
    "short": _OSCILLATOR._replace(
        title="Damped oscillator, position seen, 80 samples",
        kind="80 samples",
        samples=80,
        observe=seen(0),
        observation_sd=(0.2,),
    ),
    "channels": _OSCILLATOR,
    "irregular": _OSCILLATOR._replace(
        title="Damped oscillator at irregular times with gaps, position seen",
        kind="irregular times",
        irregular=True,
        observe=seen(0),
        observation_sd=(0.1,),
        samples=500,
    ),
    "epidemic": System(
        "Epidemic with reports in proportion to the infected",
        "nonlinear state and observation, 200 samples",
        epidemic,
        (1.0, 0.3),
        (0.8, 0.4),
        (0.3, 0.15),
        (0.9, -4.0),
        (0.03, 0.5),
        (0.01, 0.1),
        (0.01,),
        0.3,
        200,
        lambda x: x[..., 1:].exp(),
    ),
    "drift": System(
        "Three species with a drifting interaction",
        "drifting parameter",
        three_species,
        (0.2, -0.4, 0.1),
        (0.3, -0.2, 0.3),
        (0.25,) * 3,
        (0.8, 0.1, 0.5),
        (0.1,) * 3,
        (0.05,) * 3,
        (0.1,) * 3,
        0.05,
        1000,
        seen(0, 1, 2),
        later=lambda s: (0.2 + 0.15 * math.sin(4 * math.pi * s), -0.4, 0.1),
        walk=0.02,
    ),
    "jump": System(
        "Van der Pol oscillator whose parameter jumps",
        "jumping parameter",
        van_der_pol,
        (1.0,),
        (2.0,),
        (1.0,),
        (1.0, 0.0),
        (0.5, 0.5),
        (0.05, 0.1),
        (0.2,),
        0.1,
        1000,
        seen(0),
        later=lambda s: (1.0,) if s < 0.5 else (2.5,),
        walk=0.03,
    ),
    "matern": _OSCILLATOR._replace(
        title="Damped oscillator, position seen through Matérn-3/2 noise",
        kind="Matérn noise",
        observe=seen(0),
        observation_sd=(0.3,),
        correlation_time=0.3,
    ),
    "reaction": System(
        "Brusselator, one of two chemicals seen",
        "relaxation oscillation",
        brusselator,
        (1.0, 2.5),
        (1.3, 2.0),
        (0.4, 0.6),
        (1.0, 2.0),
        (0.3, 0.5),
        (0.05, 0.05),
        (0.2,),
        0.1,
        600,
        seen(0),
    ),
    "roessler": System(
        "Rössler attractor, y seen",
        "chaotic",
        roessler,
        (0.2, 5.7),
        (0.15, 5.0),
        (0.05, 1.0),
        (1.0, -5.0, 0.1),
        (1.0, 1.0, 0.05),
        (0.1, 0.1, 0.02),
        (0.5,),
        0.1,
        800,
        seen(1),
    ),
    "wells": System(
        "Particle in a double well, position seen",
        "two equilibria",
        duffing,
        (0.3, 1.0),
        (0.6, 1.5),
        (0.3, 0.5),
        (1.0, 0.0),
        (0.3, 0.3),
        (0.02, 0.4),
        (0.2,),
        0.1,
        800,
        seen(0),
    ),
    "bioreactor": System(
        "Bioreactor, biomass seen",
        "hidden substrate, 300 samples",
        bioreactor,
        (0.5, 1.0),
        (0.7, 1.5),
        (0.2, 0.5),
        (0.0, 0.5),
        (0.3, 0.5),
        (0.05, 0.1),
        (0.1,),
        0.2,
        300,
        lambda x: x[..., :1].exp(),
    ),
    "radar": System(
        "Turning target seen by range and bearing",
        "nonlinear observation of different scales",
        turning,
        (0.3,),
        (0.0,),
        (0.5,),
        (0.0, 0.0, 1.0, 0.0),
        (1.0, 1.0, 0.5, 0.5),
        (0.01, 0.01, 0.1, 0.1),
        (0.5, 0.02),
        0.5,
        400,
        range_and_bearing,
    ),
    "genes": System(
        "Three genes that repress each other in a ring, one protein seen",
        "steep saturation, two hidden states",
        repressilator,
        (6.0, 1.0),
        (4.0, 1.4),
        (2.0, 0.4),
        (1.0, 0.5, 1.5),
        (0.5, 0.5, 0.5),
        (0.05, 0.05, 0.05),
        (0.2,),
        0.1,
        700,
        seen(0),
    ),
    "membrane": System(
        "Morris–Lecar neuron in millivolts, potential seen",
        "states of very different scales, spikes",
        morris_lecar,
        (100.0, 0.04),
        (85.0, 0.06),
        (20.0, 0.02),
        (-30.0, 0.1),
        (10.0, 0.1),
        (1.0, 0.005),
        (3.0,),
        0.5,
        1000,
        seen(0),
    ),
    "body": System(
        "Tumbling rigid body, two of three angular velocities seen",
        "conserved quantities",
        rigid_body,
        (-0.8, 0.6),
        (-0.5, 0.3),
        (0.4, 0.4),
        (1.0, 0.2, 0.5),
        (0.5, 0.5, 0.5),
        (0.02, 0.02, 0.02),
        (0.1, 0.1),
        0.2,
        500,
        seen(0, 1),
    ),
    "tanks": System(
        "Three tanks in a cascade, the last two seen",
        "square roots, slow, 250 samples, different noise by channel",
        tanks,
        (0.5, 0.4),
        (0.7, 0.6),
        (0.2, 0.2),
        (2.0, 2.0, 1.0),
        (0.5, 0.5, 0.5),
        (0.1, 0.05, 0.05),
        (0.05, 0.2),
        0.5,
        250,
        seen(1, 2),
    ),
    "atmosphere": System(
        "Lorenz-84 circulation, the eddies seen",
        "chaotic, driven, one hidden state",
        lorenz84,
        (8.0, 1.0),
        (7.0, 1.3),
        (1.0, 0.4),
        (1.0, 0.0, 0.0),
        (0.5, 1.0, 1.0),
        (0.05, 0.1, 0.1),
        (0.3, 0.3),
        0.1,
        800,
        seen(1, 2),
    ),
    "grazing": System(
        "Prey and predators that are sated, prey counted",
        "saturation, exponential observation, 400 samples",
        grazing,
        (1.2, 0.4),
        (0.9, 0.5),
        (0.3, 0.15),
        (0.7, 0.0),
        (0.3, 0.3),
        (0.05, 0.05),
        (0.3,),
        0.2,
        400,
        lambda x: x[..., :1].exp(),
    ),
    "bursting": System(
        "Hindmarsh–Rose neuron that bursts, potential seen",
        "three time scales, two hidden states",
        hindmarsh_rose,
        (2.8, 0.01),
        (2.3, 0.02),
        (0.5, 0.01),
        (-1.0, -4.0, 2.5),
        (0.5, 1.0, 0.3),
        (0.05, 0.05, 0.01),
        (0.2,),
        0.1,
        1000,
        seen(0),
    ),
    "reentry": System(
        "Body that enters the atmosphere, seen by range from aside",
        "exponential drag, nonlinear observation, 200 samples, no stationary state",
        reentry,
        (-1.2,),
        (-2.0,),
        (1.0,),
        (100.0, 6.0),
        (1.0, 0.2),
        (0.01, 0.02),
        (0.1,),
        0.1,
        200,
        lambda x: (x[..., :1] ** 2 + 30.0**2).sqrt(),
    ),
    "glycolysis": System(
        "Sel'kov's glycolysis at irregular times with gaps, one metabolite seen",
        "irregular times, relaxation oscillation",
        glycolysis,
        (0.08, 0.6),
        (0.15, 0.5),
        (0.06, 0.15),
        (1.0, 1.0),
        (0.3, 0.3),
        (0.03, 0.03),
        (0.1,),
        0.3,
        500,
        seen(0),
        irregular=True,
    ),
    "coupled": System(
        "Two coupled pendulums, angles seen",
        "four states, different noise by channel",
        coupled_pendulums,
        (4.0, 1.0),
        (5.0, 1.5),
        (1.5, 0.7),
        (1.0, -0.5, 0.0, 0.0),
        (0.3, 0.3, 0.3, 0.3),
        (0.01, 0.01, 0.2, 0.2),
        (0.1, 0.3),
        0.1,
        500,
        seen(0, 1),
    ),
    "thomas": System(
        "Thomas' attractor, one of three elements seen",
        "chaotic, sines in the flow, hidden states",
        thomas,
        (0.2, 1.0),
        (0.3, 1.3),
        (0.1, 0.3),
        (1.0, 0.5, -1.0),
        (0.5, 0.5, 0.5),
        (0.1, 0.1, 0.1),
        (0.3,),
        0.2,
        700,
        seen(0),
    ),
    "populations": System(
        "Wilson–Cowan populations of neurons, excitatory ones seen",
        "steep saturation, one hidden state",
        wilson_cowan,
        (1.5, 16.0),
        (1.2, 14.0),
        (0.5, 2.0),
        (0.2, 0.1),
        (0.1, 0.1),
        (0.02, 0.02),
        (0.05,),
        0.25,
        600,
        seen(0),
    ),
    "infusion": System(
        "Drug under an infusion, concentration in blood seen",
        "saturation, approach to an equilibrium, 150 samples",
        infusion,
        (3.0, 0.5),
        (4.0, 0.8),
        (1.0, 0.3),
        (-1.0, -2.0),
        (0.3, 0.5),
        (0.05, 0.05),
        (0.15,),
        0.15,
        150,
        lambda x: x[..., :1].exp(),
    ),
    "reactor": System(
        "Stirred tank with a reaction that heats it, temperature seen",
        "exponential rates, hidden concentration, 400 samples",
        reactor,
        (-1.6, 0.8),
        (-2.0, 1.1),
        (0.4, 0.3),
        (0.6, 1.5),
        (0.2, 0.5),
        (0.03, 0.1),
        (0.3,),
        0.15,
        400,
        seen(1),
    ),
    "vehicle": System(
        "Vehicle at irregular times with gaps, position seen",
        "four states, irregular times, different noise by channel",
        vehicle,
        (0.15, 2.0),
        (0.0, 1.5),
        (0.2, 0.5),
        (0.0, 0.0, 0.0, 1.5),
        (1.0, 1.0, 0.3, 0.5),
        (0.05, 0.05, 0.1, 0.2),
        (0.5, 1.0),
        0.5,
        400,
        seen(0, 1),
        irregular=True,
    ),
    "friction": System(
        "Driven mass with dry friction, position seen",
        "steep friction, velocity hidden, different noise by element",
        friction,
        (0.3, 2.0),
        (0.6, 3.0),
        (0.3, 1.0),
        (0.5, 0.0, 0.0),
        (0.3, 0.3, 0.5),
        (0.01, 0.2, 0.02),
        (0.1,),
        0.1,
        600,
        seen(0),
    ),
    "circuit": System(
        "Chua's circuit with a cubic diode, one voltage seen",
        "chaotic, two hidden elements",
        circuit,
        (10.0, 16.0),
        (9.0, 14.0),
        (1.0, 2.0),
        (0.5, 0.0, 0.0),
        (0.5, 0.2, 0.5),
        (0.1, 0.02, 0.1),
        (0.1,),
        0.05,
        800,
        seen(0),
    ),
    "chain": System(
        "Food chain, plants and hunters counted",
        "saturation, exponential observation, slow hidden grazers, 300 samples",
        food_chain,
        (3.0, 0.5),
        (2.5, 0.7),
        (0.5, 0.2),
        (-0.3, -1.0, -0.5),
        (0.3, 0.3, 0.3),
        (0.05, 0.05, 0.02),
        (0.05, 0.1),
        0.5,
        300,
        lambda x: x[..., [0, 2]].exp(),
    ),
    "rotors": System(
        "Three coupled rotors, the sines of two seen",
        "phases, strongly nonlinear observation, one hidden rotor",
        rotors,
        (0.3, 0.7),
        (0.5, 1.0),
        (0.2, 0.3),
        (0.0, 0.5, 1.0),
        (0.3, 0.3, 0.3),
        (0.05, 0.15, 0.05),
        (0.2, 0.2),
        0.2,
        500,
        lambda x: x[..., :2].sin(),
    ),
    "glucose": System(
        "Glucose and insulin with meals at irregular times, glucose seen",
        "driven, two hidden elements, irregular times, 240 samples",
        glucose,
        (2.0, 8.0),
        (3.0, 5.0),
        (1.0, 3.0),
        (5.0, 0.0, 0.3, 0.0),
        (0.5, 0.2, 0.2, 0.01),
        (0.3, 0.05, 0.1, 0.002),
        (0.3,),
        0.05,
        240,
        seen(0),
        irregular=True,
    ),
    "duffing": System(
        "Duffing's oscillator, driven, position seen",
        "chaotic, driven, velocity hidden",
        driven_duffing,
        (0.3, 0.5),
        (0.5, 0.3),
        (0.2, 0.2),
        (1.0, 0.0, 0.0),
        (0.3, 0.3, 0.1),
        (0.02, 0.1, 0.02),
        (0.2,),
        0.1,
        600,
        seen(0),
    ),
    "motor": System(
        "Motor under an alternating voltage, speed seen",
        "linear in the state, driven, current hidden",
        motor,
        (0.5, 0.2),
        (0.8, 0.1),
        (0.3, 0.1),
        (0.0, 0.0, 0.0),
        (0.3, 0.3, 0.1),
        (0.1, 0.05, 0.01),
        (0.1,),
        0.1,
        400,
        seen(1),
    ),
    "calcium": System(
        "Calcium in a cell, seen through a dye that saturates",
        "relaxation oscillations, nonlinear observation, share of open channels hidden",
        calcium,
        (0.5, 0.9),
        (0.4, 1.1),
        (0.1, 0.2),
        (-2.0, 0.7),
        (0.3, 0.1),
        (0.1, 0.02),
        (0.03,),
        0.2,
        500,
        lambda x: x[..., :1].exp() / (x[..., :1].exp() + 0.3),
    ),
    "battery": System(
        "Battery under a varying load, voltage seen",
        "driven, hidden charge that hardly changes, nonlinear observation, 300 samples",
        battery,
        (0.3, 0.08),
        (0.5, 0.05),
        (0.2, 0.03),
        (0.8, 0.0, 0.0),
        (0.1, 0.02, 0.05),
        (0.002, 0.005, 0.005),
        (0.01,),
        0.5,
        300,
        battery_voltage,
    ),
    "cortex": System(
        "Neural mass of Jansen and Rit, the potential of one population seen",
        "six elements, of which a difference is seen",
        cortex,
        (3.25, 2.2),
        (3.6, 1.8),
        (0.4, 0.5),
        (0.1, 15.0, 10.0, 0.0, 0.0, 0.0),
        (0.05, 3.0, 3.0, 0.02, 1.0, 1.0),
        (0.001, 0.1, 0.1, 0.002, 0.5, 0.1),
        (1.0,),
        0.5,
        600,
        lambda x: x[..., 1:2] - x[..., 2:3],
    ),
    "synapses": System(
        "Network whose synapses tire and get readier, firing rate seen",
        "bursts, two hidden elements, states of very different scales",
        synapses,
        (3.3, -1.0),
        (3.0, -0.7),
        (0.3, 0.4),
        (3.0, 0.7, 0.4),
        (2.0, 0.1, 0.1),
        (1.0, 0.02, 0.02),
        (2.0,),
        0.1,
        600,
        seen(0),
        group="frozen",
    ),
    "tumour": System(
        "Tumour and immune cells, diameter of the tumour seen",
        "logs of populations of very different scales, nonlinear observation, 300 samples",
        tumour,
        (1.64, 1.13),
        (1.3, 1.4),
        (0.3, 0.25),
        (-0.5, 4.0),
        (0.3, 0.5),
        (0.05, 0.1),
        (0.3,),
        0.3,
        300,
        lambda x: (x[..., 1:] / 3).exp(),
        group="frozen",
    ),
    "ship": System(
        "Ship that rolls in irregular waves, angle seen",
        "softening spring, quadratic friction, hidden random drive, four states",
        ship,
        (0.3, 1.0),
        (0.5, 0.8),
        (0.2, 0.2),
        (0.0, 0.0, 0.0, 0.0),
        (0.2, 0.2, 0.2, 0.2),
        (0.01, 0.02, 0.01, 0.15),
        (0.1,),
        0.3,
        500,
        seen(0),
        group="frozen",
    ),
    "laser": System(
        "Laser with an absorber that bleaches, seen through a logarithmic amplifier",
        "pulses, nonlinear observation with a floor, two hidden elements",
        laser,
        (6.5, 5.0),
        (6.0, 5.4),
        (0.4, 0.4),
        (-1.0, 5.0, 3.5),
        (0.5, 0.5, 0.5),
        (0.1, 0.1, 0.1),
        (0.3,),
        0.2,
        600,
        lambda x: (x[..., :1].exp() + 0.1).log(),
        group="frozen",
    ),
    "magnet": System(
        "Ball held in the air by a magnet under feedback, gap seen",
        "unstable without its feedback, driven, force with a quotient, velocity and current hidden",
        magnet,
        (1.0, 1.0),
        (1.3, 0.8),
        (0.3, 0.2),
        (1.0, 0.0, 1.0, 0.0),
        (0.1, 0.1, 0.1, 0.1),
        (0.01, 0.1, 0.05, 0.02),
        (0.05,),
        0.1,
        500,
        seen(0),
        group="frozen",
    ),
}
"""Systems by name. Those of the group "frozen" were chosen after all rules of the filter had been, and run once."""
