"""Tasks of the arena: systems of `studies.systems` and further ones, with their flows for numpy and jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.functions.systems import lotka_volterra
from studies.arena import flows
from studies.arena.flows import Flow, Mapped, element
from studies.arena.simulation import (
    simulate_counts,
    simulate_growth,
    simulate_manoeuvres,
    simulate_returns,
    simulate_sensors,
)
from studies.systems.design import SYSTEMS, Realisation, System, simulate
from studies.systems.flows import oscillator, seen, turning, van_der_pol

Family = Literal["gaussian", "poisson", "volatility"]
VELOCITIES = ((0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0), (0.0,) * 4, (0.0,) * 4)
LOG_CHI2 = (-1.2703628454614782, math.pi / math.sqrt(2))
"""Mean and standard deviation of the log of the square of a standard normal number."""


class Task(NamedTuple):
    """A system with the same flow and observation once more, as a user of numpy or jax writes them."""

    system: System
    flow: Flow
    observe: Mapped
    drift: tuple[tuple[float, ...], ...] | None = None  # A of a flow that is nearly Ax, for its process covariance
    gate: bool = False  # whether observations are screened, where a package's documentation says how
    paper: bool = False  # whether the paper's graph is a model of it
    simulate: Callable[[System, Sequence[int]], Realisation] = simulate
    family: Family = "gaussian"  # of observations, given the output of `observe`
    is_map: bool = False  # whether the flow is the increment of one step of a map
    takes_time: bool = False  # whether the flow is f(x, θ, t)
    sensors: Mapping[str, tuple[int, ...]] | None = None  # channels of each of several sensors
    switches: bool = False  # whether θ is one of few values that switch; rivals without such a model let it walk
    peaks: bool = False  # whether beliefs have several peaks


# --- flows and observations of pcnet that no other study has ----------------------------------------------------------
def _constant_velocity(x: Tensor, _: Tensor) -> Tensor:
    return torch.cat([x[..., 2:], torch.zeros_like(x[..., 2:])], -1)


def _double_well(x: Tensor, p: Tensor) -> Tensor:
    return p * (x - x**3)


def _growth(x: Tensor, p: Tensor, t: Tensor) -> Tensor:
    return -0.5 * x + p[..., :1] * x / (1 + x**2) + p[..., 1:] * (1.2 * t).cos()[..., None]


def _reversion(x: Tensor, p: Tensor) -> Tensor:
    return p[..., :1] * (p[..., 1:] - x)


def _log_rates(x: Tensor) -> Tensor:
    return torch.stack([1.0 + x[..., 0], 1.0 - x[..., 0], 1.0 + x[..., 1]], -1)


# --- systems that no other study has ----------------------------------------------------------------------------------
_TRACKING = System(
    "Constant-velocity target, two sensors at two rates, outliers and gaps",
    "outliers and gaps",
    _constant_velocity,
    (),
    (),
    (),
    (0.0, 0.0, 1.0, 0.0),
    (1.0, 1.0, 0.5, 0.5),
    (0.02, 0.02, 0.2, 0.2),
    (0.5, 0.5, 0.2, 0.2),
    0.2,
    500,
    lambda x: x,
    outliers=0.05,
)
_MANOEUVRES = System(
    "Target that turns left, right or not, position seen",
    "switching",
    turning,
    (0.0,),
    (0.0,),
    (0.1,),
    (0.0, 0.0, 1.0, 0.0),
    (1.0, 1.0, 0.5, 0.5),
    (0.02, 0.02, 0.05, 0.05),
    (0.5, 0.5),
    1.0,
    400,
    seen(0, 1),
    walk=0.5,
)
_MILD = System(
    "Mild van der Pol oscillator at irregular times with gaps",
    "irregular times",
    van_der_pol,
    (1.0,),
    (2.0,),
    (1.0,),
    (1.0, 0.0),
    (0.5, 0.5),
    (0.05, 0.1),
    (0.2,),
    0.2,
    500,
    seen(0),
    irregular=True,
)
_PAPER = System(
    "Lotka–Volterra process of the paper, white noise",
    "three species, all seen",
    lotka_volterra,
    (0.2, -0.4, 0.1),
    (0.3, -0.2, 0.3),
    (0.25,) * 3,
    (2.25, 1.1, 1.65),
    (0.1,) * 3,
    (0.02,) * 3,
    (0.1,) * 3,
    0.01,
    1000,
    seen(0, 1, 2),
)
_SQUARE = System(
    "Double well seen through x²",
    "two peaks",
    _double_well,
    (2.0,),
    (3.0,),
    (1.0,),
    (1.0,),
    (0.3,),
    (0.8,),
    (0.3,),
    0.1,
    500,
    lambda x: x**2,
)
_GROWTH = System(
    "Growth model, x²/20 seen",
    "two peaks, a map",
    _growth,  # type: ignore[arg-type]  # it takes the time
    (25.0, 8.0),
    (20.0, 10.0),
    (5.0, 2.0),
    (0.0,),
    (3.0,),
    (math.sqrt(10.0),),
    (1.0,),
    1.0,
    500,
    lambda x: x**2 / 20,
)
_VOLATILITY = System(
    "Stochastic volatility, returns seen",
    "multiplicative noise",
    _reversion,
    (0.05, 0.0),
    (0.1, 1.0),
    (0.05, 1.0),
    (0.0,),
    (1.0,),
    (0.3,),
    (LOG_CHI2[1],),
    1.0,
    1000,
    lambda x: x,
)
_SPIKES = System(
    "Spikes of three neurons in a hidden rhythm",
    "counts",
    oscillator,
    (0.3, 2.0),
    (0.5, 3.0),
    (0.4, 1.0),
    (1.0, 0.0),
    (0.5, 0.5),
    (0.05, 0.5),
    (1.0,) * 3,
    0.1,
    600,
    _log_rates,
)

TASKS: Mapping[str, Task] = {
    "neuron": Task(SYSTEMS["neuron"], flows.fitzhugh_nagumo, element(0)),
    "lorenz": Task(SYSTEMS["chaotic"], flows.lorenz63, element(0)),
    "stiff": Task(SYSTEMS["stiff"], flows.van_der_pol, element(0)),
    "mild": Task(_MILD, flows.van_der_pol, element(0)),
    "pendulum": Task(SYSTEMS["sine"], flows.pendulum, flows.sine),
    "tracking": Task(
        _TRACKING,
        flows.constant_velocity,
        element(0, 1, 2, 3),
        drift=VELOCITIES,
        gate=True,
        simulate=simulate_sensors,
        sensors={"position": (0, 1), "velocity": (2, 3)},
    ),
    "manoeuvres": Task(
        _MANOEUVRES, flows.turning, element(0, 1), drift=VELOCITIES, simulate=simulate_manoeuvres, switches=True
    ),
    "jump": Task(SYSTEMS["jump"], flows.van_der_pol, element(0)),
    "paper": Task(_PAPER, flows.populations, element(0, 1, 2), paper=True),
    "wells": Task(SYSTEMS["wells"], flows.duffing, element(0)),
    "square": Task(_SQUARE, flows.double_well, flows.square, peaks=True),
    "growth": Task(
        _GROWTH,
        flows.growth,
        flows.twentieth_of_square,
        simulate=simulate_growth,
        is_map=True,
        takes_time=True,
        peaks=True,
    ),
    "volatility": Task(_VOLATILITY, flows.reversion, element(0), simulate=simulate_returns, family="volatility"),
    "spikes": Task(_SPIKES, flows.oscillator, flows.log_rates, simulate=simulate_counts, family="poisson"),
    "smooth": Task(SYSTEMS["matern"], flows.oscillator, element(0)),
    "drift": Task(SYSTEMS["drift"], flows.three_species, element(0, 1, 2)),
    "radar": Task(SYSTEMS["radar"], flows.turning, flows.range_and_bearing, drift=VELOCITIES),
    "lattice": Task(
        SYSTEMS["lattice20"]._replace(
            title="Lorenz-96 with 20 states, every other one seen",
            observation_sd=(1.0,) * 10,
            observe=seen(*range(0, 20, 2)),
        ),
        flows.lorenz96,
        element(*range(0, 20, 2)),
    ),
}
"""Tasks by name, in the order in which they run."""
