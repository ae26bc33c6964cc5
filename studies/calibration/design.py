"""What the study consists of: processes with known truth, models that invert them, and priors."""

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
"""The first seed of the report. Nothing may be chosen by looking at these: they are for the report alone."""
DEVELOPMENT = 1_000
"""The first seed for everything else: trying rules out, choosing settings of the rivals, tests."""

JUMP_TO = (0.35, *GLV_PARAMETERS[1:])
"""The parameters after the jump."""
JUMP_DELAY = 2_000
"""By so many observations after it the jump should have been followed."""


class Prior(NamedTuple):
    """By which factors the first guess of the noises' variances is wrong: of the states' and of the observations'."""

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
    """A process x ← clip(x + dt (f(x, θ) + z)), y = Hx + w, with all that is true of it.

    width: of the noises' kernel, in samples. seen: which states are observed, all of them with the same noise. jump:
    the parameters of the second half of the time, if they are others.
    """

    flow: Function | PlainFunction
    parameters: tuple[float, ...]
    initial: tuple[float, ...]
    state_sd: tuple[float, ...]
    observation_sd: float
    width: float = 0.0
    seen: tuple[int, ...] = (0, 1, 2)
    bounds: tuple[float | None, float | None] = (None, None)
    jump: tuple[float, ...] | None = None

    @property
    def dim(self) -> int:
        return len(self.initial)

    @property
    def matching(self) -> float:
        """By how much white noise has to be stronger to have the smooth noise's spectral density: 2√π width."""
        return max(1.0, 2 * math.sqrt(math.pi) * self.width)

    def look(self, x: Tensor, _: Tensor) -> Tensor:
        """What is seen of a state without noise."""
        return x[..., list(self.seen)]

    def realise(self, samples: int, seeds: Sequence[int]) -> Simulation:
        """A realisation for each seed."""
        world = simulate(
            self.flow,
            parameters=self.parameters,
            initial=self.initial,
            samples=samples,
            dt=DT,
            state_sd=list(self.state_sd),
            observation_sd=self.observation_sd,
            width=self.width * DT,
            mapping=self.look,
            lower=self.bounds[0],
            upper=self.bounds[1],
            seed=list(seeds),
        )
        if self.jump is None:
            return world
        half = samples // 2
        later = euler(
            self.flow,
            parameters=self.jump,
            initial=world.states[:, half],
            noise=world.state_noise[:, half:],
            dt=DT,
            lower=self.bounds[0],
            upper=self.bounds[1],
        )
        states = torch.cat([world.states[:, :half], later], 1)
        clean = self.look(states, states)
        return world._replace(states=states, observations=clean + world.observation_noise)


class Model(NamedTuple):
    """What the methods take the process for. initial: where states that are not seen are guessed to begin."""

    flow: Function | PlainFunction
    mean: tuple[float, ...]
    sd: tuple[float, ...]
    initial: tuple[float, ...] = (0.0, 0.0, 0.0)
    initial_sd: float = 1.0
    written_out: PlainFunction | None = None
    """The flow in plain operations, if it has a cheaper form: rivals share no code with what they are compared to."""
    right: bool = True
    """Whether it has the form of the process; parameters of a model that has not are neither right nor wrong."""


class Case(NamedTuple):
    """A process and a model of it, with the methods that are tried and the priors that pcnet begins from."""

    title: str
    process: Process
    model: Model
    methods: tuple[str, ...]
    priors: tuple[Prior, ...] = RIGHT


# --- flows -----------------------------------------------------------------------------------------------------------
def _pendulum(x: Tensor, parameters: Tensor) -> Tensor:
    """The angle moves by the velocity, the velocity by −k sin(angle) − c velocity; θ = (c, k)."""
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


_OF_ITS_FORM = Model(flows.lotka_volterra, (0.3, -0.2, 0.3), (0.25,) * 3, written_out=_three_species)
_OF_ANOTHER = Model(flows.lorenz, (30.0,), (9.0,), right=False)
_SWINGING = Process(pendulum, (0.2, 4.0), (2.0, 0.0), (0.05, 1.0), 0.1, seen=(0,))
_CHAOTIC = Process(flows.lorenz, (28.0,), (1.0, 1.0, 25.0), (1.0,) * 3, 1.0, seen=(0,))
_FILTERS = ("pcnet", "paper", "ekf", "ukf")
_MATCHED = ("pcnet", "paper", "ekf marginal", "ekf matched", "ukf matched")

CASES: Mapping[str, Case] = {
    "white": Case("GLV, white noise", _glv(0), _OF_ITS_FORM, _FILTERS, PRIORS),
    "smooth5": Case("GLV, smooth noise, kernel 5 samples", _glv(5), _OF_ITS_FORM, _MATCHED, PRIORS),
    "smooth50": Case(
        "GLV, smooth noise, kernel 50 samples", _glv(50), _OF_ITS_FORM, (*_MATCHED, "ekf noise as states"), PRIORS
    ),
    "lorenz-white": Case("Lorenz model on GLV data, white noise", _glv(0), _OF_ANOTHER, ("pcnet", "paper"), PRIORS),
    "lorenz-smooth5": Case(
        "Lorenz model on GLV data, kernel 5 samples", _glv(5), _OF_ANOTHER, ("pcnet", "paper"), PRIORS
    ),
    "jump-white": Case("GLV with a jump, white noise", _glv(0, JUMP_TO), _OF_ITS_FORM, ("pcnet", "ekf random walk")),
    "jump-smooth5": Case(
        "GLV with a jump, kernel 5 samples", _glv(5, JUMP_TO), _OF_ITS_FORM, ("pcnet", "ekf random walk")
    ),
    "pendulum": Case(
        "Damped pendulum, only its angle seen",
        _SWINGING,
        Model(pendulum, (0.5, 6.0), (0.5, 3.0), (0.0, 0.0)),
        ("pcnet", "ekf"),
        PRIORS[:3],
    ),
    "lorenz63": Case(
        "Lorenz-63, only x seen",
        _CHAOTIC,
        Model(flows.lorenz, (30.0,), (9.0,), (0.0, 0.0, 25.0), 10.0),
        ("pcnet", "ekf"),
        PRIORS[:3],
    ),
}
"""All cases by their short names."""

DRIFT = 1.0
"""How long, in time units, what is wrong with a model of another form is taken to last."""
RANDOM_WALK = 0.0005
"""By how much the parameters of the rival may walk at each observation, as a standard deviation: between
0.0003 and 0.001, of which the first follows the jump in most development seeds with white noise, the second with
smooth noise (tried with 0.0001 and 0.003)."""


def first_state(case: Case, observations: Tensor) -> Tensor:
    """Where all methods begin: at what is seen first, and at the model's guess of what is not seen; (seeds, dim)."""
    guess = torch.tensor(case.model.initial, dtype=torch.float64).repeat(len(observations), 1)
    guess[:, list(case.process.seen)] = observations[:, 0]
    return guess
