"""Design of the calibration study: processes with known truth, assumed models, and noise priors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.functions import systems as flows
from pcnet.functions.base import Function, PlainFunction
from pcnet.functions.traced import TracedFunction
from pcnet.simulate import (
    GLV_INITIAL,
    GLV_LOWER,
    GLV_OBSERVATION_SD,
    GLV_PARAMETERS,
    GLV_STATE_SD,
    GLV_UPPER,
    Simulation,
    euler,
    simulate,
)

DT = 0.01
HELD_OUT = 20_000
"""First seed of reports. Seeds from here on are held out: no method or setting may be chosen with them."""
DEVELOPMENT = 1_000
"""First seed for everything else: development, settings of the baselines, tests."""

JUMP_TO = (0.35, *GLV_PARAMETERS[1:])
"""Parameters after the jump."""
JUMP_DELAY = 2_000
"""Number of observations after the jump at which the parameters are compared."""


class Prior(NamedTuple):
    """Factors by which the assumed variances of state noise (x) and observation noise (y) are wrong."""

    name: str
    x: float
    y: float


PRIORS = (
    Prior("right", 1, 1),
    Prior("both × 50", 50, 50),
    Prior("both ÷ 50", 1 / 50, 1 / 50),
    Prior("x × 50, y ÷ 50", 50, 1 / 50),
    Prior("x ÷ 50, y × 50", 1 / 50, 50),
)
RIGHT = PRIORS[:1]


class Process(NamedTuple):
    """A process x ← clip(x + dt (f(x, θ) + z)), y = Hx + w with its true values.

    Attributes:
        width: Kernel width of the noises in samples.
        observed: Indices of the observed states, all with the same noise.
        bounds: Lower and upper bound of the states.
        jump: Parameters of the second half of the time, if they differ.
    """

    flow: Function | PlainFunction
    parameters: tuple[float, ...]
    initial: tuple[float, ...]
    state_sd: tuple[float, ...]
    observation_sd: float
    width: float = 0.0
    observed: tuple[int, ...] = (0, 1, 2)
    bounds: tuple[float | None, float | None] = (None, None)
    jump: tuple[float, ...] | None = None

    @property
    def dim(self) -> int:
        return len(self.initial)

    @property
    def spectral_factor(self) -> float:
        """Variance of white noise with the spectral density of the smooth noise, relative to it: 2√π width."""
        return max(1.0, 2 * math.sqrt(math.pi) * self.width)

    def observe(self, x: Tensor, _: Tensor | None = None) -> Tensor:
        """Noise-free observation of a state."""
        return x[..., list(self.observed)]

    def simulate(self, samples: int, seeds: Sequence[int]) -> Simulation:
        """One realisation per seed."""
        simulation = simulate(
            self.flow,
            parameters=self.parameters,
            initial=self.initial,
            samples=samples,
            dt=DT,
            state_sd=list(self.state_sd),
            observation_sd=self.observation_sd,
            width=self.width * DT,
            mapping=self.observe,
            lower=self.bounds[0],
            upper=self.bounds[1],
            seed=list(seeds),
        )
        if self.jump is None:
            return simulation
        half = samples // 2
        later = euler(
            self.flow,
            parameters=self.jump,
            initial=simulation.states[:, half],
            noise=simulation.state_noise[:, half:],
            dt=DT,
            lower=self.bounds[0],
            upper=self.bounds[1],
        )
        states = torch.cat([simulation.states[:, :half], later], 1)
        return simulation._replace(states=states, observations=self.observe(states) + simulation.observation_noise)


class AssumedModel(NamedTuple):
    """Model that the methods assume: flow, prior of the parameters, and prior of unobserved initial states."""

    flow: Function | PlainFunction
    mean: tuple[float, ...]
    sd: tuple[float, ...]
    initial: tuple[float, ...] = (0.0, 0.0, 0.0)
    initial_sd: float = 1.0
    plain_flow: PlainFunction | None = None
    """The flow in plain operations, so that the baselines share no code with pcnet's flow."""
    right: bool = True
    """Whether the model has the form of the process."""


class Case(NamedTuple):
    """A process and an assumed model, with the methods and the noise priors that are compared."""

    title: str
    process: Process
    model: AssumedModel
    methods: tuple[str, ...]
    priors: tuple[Prior, ...] = RIGHT


# --- flows -----------------------------------------------------------------------------------------------------------
def _pendulum(x: Tensor, parameters: Tensor) -> Tensor:
    """Damped pendulum, φ̈ = −k sin φ − c φ̇; x = (φ, φ̇), θ = (c, k)."""
    angle, velocity = x[..., 0], x[..., 1]
    damping, stiffness = parameters[..., 0], parameters[..., 1]
    return torch.stack([velocity, -stiffness * angle.sin() - damping * velocity], -1)


def _three_species(x: Tensor, parameters: Tensor) -> Tensor:
    """ẋ = x ⊙ Ax; θ = (a₁₂, a₁₃, a₂₃)."""
    (u, v, w), (a, b, c) = x.unbind(-1), parameters.unbind(-1)
    return torch.stack([u * (a * v + b * w), v * (c * w - a * u), -w * (b * u + c * v)], -1)


pendulum = TracedFunction(_pendulum, parameters=2)


# --- cases -----------------------------------------------------------------------------------------------------------
def _glv(width: float, jump: tuple[float, ...] | None = None) -> Process:
    return Process(
        flows.lotka_volterra,
        GLV_PARAMETERS,
        GLV_INITIAL,
        (GLV_STATE_SD,) * 3,
        GLV_OBSERVATION_SD,
        width,
        bounds=(GLV_LOWER, GLV_UPPER),
        jump=jump,
    )


_RIGHT_MODEL = AssumedModel(flows.lotka_volterra, (0.3, -0.2, 0.3), (0.25,) * 3, plain_flow=_three_species)
_WRONG_MODEL = AssumedModel(flows.lorenz, (30.0,), (9.0,), right=False)
_PENDULUM = Process(pendulum, (0.2, 4.0), (2.0, 0.0), (0.05, 1.0), 0.1, observed=(0,))
_LORENZ63 = Process(flows.lorenz, (28.0,), (1.0, 1.0, 25.0), (1.0,) * 3, 1.0, observed=(0,))
_WHITE_METHODS = ("pcnet", "paper", "ekf", "ukf")
_SMOOTH_METHODS = ("pcnet", "paper", "ekf marginal", "ekf matched", "ukf matched")

CASES: Mapping[str, Case] = {
    "white": Case("GLV, white noise", _glv(0), _RIGHT_MODEL, _WHITE_METHODS, PRIORS),
    "smooth5": Case("GLV, smooth noise, kernel 5 samples", _glv(5), _RIGHT_MODEL, _SMOOTH_METHODS, PRIORS),
    "smooth50": Case(
        "GLV, smooth noise, kernel 50 samples",
        _glv(50),
        _RIGHT_MODEL,
        (*_SMOOTH_METHODS, "ekf noise as states"),
        PRIORS,
    ),
    "lorenz-white": Case("Lorenz model on GLV data, white noise", _glv(0), _WRONG_MODEL, ("pcnet", "paper"), PRIORS),
    "lorenz-smooth5": Case(
        "Lorenz model on GLV data, kernel 5 samples", _glv(5), _WRONG_MODEL, ("pcnet", "paper"), PRIORS
    ),
    "jump-white": Case("GLV with a jump, white noise", _glv(0, JUMP_TO), _RIGHT_MODEL, ("pcnet", "ekf random walk")),
    "jump-smooth5": Case(
        "GLV with a jump, kernel 5 samples", _glv(5, JUMP_TO), _RIGHT_MODEL, ("pcnet", "ekf random walk")
    ),
    "pendulum": Case(
        "Damped pendulum, only the angle observed",
        _PENDULUM,
        AssumedModel(pendulum, (0.5, 6.0), (0.5, 3.0), (0.0, 0.0)),
        ("pcnet", "ekf"),
        PRIORS[:3],
    ),
    "lorenz63": Case(
        "Lorenz-63, only x observed",
        _LORENZ63,
        AssumedModel(flows.lorenz, (30.0,), (9.0,), (0.0, 0.0, 25.0), 10.0),
        ("pcnet", "ekf"),
        PRIORS[:3],
    ),
}
"""Cases by name."""

MODEL_ERROR_TIME = 1.0
"""Correlation time of the model error that is assumed for a wrong model, in time units."""
RANDOM_WALK = 0.0005
"""Standard deviation of the parameters' random walk per observation in the baseline. It lies between 0.0003, which
follows the jump in most development seeds with white noise, and 0.001, which does so with smooth noise (0.0001 and
0.003 were also tried)."""


def first_state(case: Case, observations: Tensor) -> Tensor:
    """Initial states of all methods, (seeds, dim): the first observation, or the prior mean of unobserved states."""
    guess = torch.tensor(case.model.initial, dtype=torch.float64).repeat(len(observations), 1)
    guess[:, list(case.process.observed)] = observations[:, 0]
    return guess
