"""Tasks of the arena: systems of `studies.systems` and a few more, with their flows for numpy and jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.functions.systems import lotka_volterra
from studies.systems.design import SYSTEMS, System, seen

Flow = Callable[[Any, Any, Any], Any]
"""f(xp, x, θ) of single vectors, where xp is numpy or jax.numpy."""
Mapped = Callable[[Any, Any], Any]
"""g(xp, x) of a single vector."""


class Task(NamedTuple):
    """A system with the same flow and observation once more, as a user of numpy or jax writes them."""

    system: System
    flow: Flow
    observe: Mapped
    drift: tuple[tuple[float, ...], ...] | None = None  # A of a linear flow Ax without parameters
    gate: bool = False  # whether observations are screened, where a package's documentation says how
    paper: bool = False  # whether the paper's graph is a model of it


def fitzhugh_nagumo(xp: Any, x: Any, p: Any) -> Any:
    return xp.stack([x[0] - x[0] ** 3 / 3 - x[1] + p[0], p[1] * (x[0] + 0.7 - 0.8 * x[1])])


def lorenz63(xp: Any, x: Any, p: Any) -> Any:
    return xp.stack([p[0] * (x[1] - x[0]), x[0] * (p[1] - x[2]) - x[1], x[0] * x[1] - p[2] * x[2]])


def van_der_pol(xp: Any, x: Any, p: Any) -> Any:
    return xp.stack([x[1], p[0] * (1 - x[0] ** 2) * x[1] - x[0]])


def pendulum(xp: Any, x: Any, p: Any) -> Any:
    return xp.stack([x[1], -p[1] * xp.sin(x[0]) - p[0] * x[1]])


def duffing(xp: Any, x: Any, p: Any) -> Any:
    return xp.stack([x[1], p[1] * x[0] - x[0] ** 3 - p[0] * x[1]])


def oscillator(xp: Any, x: Any, p: Any) -> Any:
    return xp.stack([x[1], -p[1] * x[0] - p[0] * x[1]])


def three_species(xp: Any, x: Any, p: Any) -> Any:
    u, v, w = xp.exp(x[0]), xp.exp(x[1]), xp.exp(x[2])
    return xp.stack([p[0] * v + p[1] * w, p[2] * w - p[0] * u, -p[1] * u - p[2] * v])


def populations(xp: Any, x: Any, p: Any) -> Any:
    rates = xp.stack([p[0] * x[1] + p[1] * x[2], p[2] * x[2] - p[0] * x[0], -p[1] * x[0] - p[2] * x[1]])
    return x * rates


def lorenz96(xp: Any, x: Any, p: Any) -> Any:
    return (xp.roll(x, -1) - xp.roll(x, 2)) * xp.roll(x, 1) - x + p[0]


def turning(xp: Any, x: Any, p: Any) -> Any:
    return xp.stack([x[2], x[3], -p[0] * x[3], p[0] * x[2]])


def range_and_bearing(xp: Any, x: Any) -> Any:
    u, v = x[0] + 20.0, x[1] + 20.0
    return xp.stack([xp.sqrt(u**2 + v**2), xp.arctan2(v, u)])


def constant_velocity(xp: Any, x: Any, _: Any) -> Any:
    return xp.stack([x[2], x[3], 0.0 * x[2], 0.0 * x[3]])


def _constant_velocity(x: Tensor, _: Tensor) -> Tensor:
    return torch.cat([x[..., 2:], torch.zeros_like(x[..., 2:])], -1)


def element(*places: int) -> Mapped:
    """Some elements of the state."""
    return lambda xp, x: xp.stack([x[place] for place in places])


_TRACKING = System(
    "Constant-velocity target, 5 % outliers, irregular times and gaps",
    "outliers and gaps",
    _constant_velocity,
    (),
    (),
    (),
    (0.0, 0.0, 1.0, 0.0),
    (1.0, 1.0, 0.5, 0.5),
    (0.02, 0.02, 0.2, 0.2),
    (0.5, 0.5),
    0.2,
    500,
    seen(0, 1),
    irregular=True,
    outliers=0.05,
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

TASKS: Mapping[str, Task] = {
    "neuron": Task(SYSTEMS["neuron"], fitzhugh_nagumo, element(0)),
    "lorenz": Task(SYSTEMS["chaotic"], lorenz63, element(0)),
    "stiff": Task(SYSTEMS["stiff"], van_der_pol, element(0)),
    "pendulum": Task(SYSTEMS["sine"], pendulum, lambda xp, x: xp.stack([xp.sin(x[0])])),
    "tracking": Task(
        _TRACKING,
        constant_velocity,
        element(0, 1),
        drift=((0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0), (0.0,) * 4, (0.0,) * 4),
        gate=True,
    ),
    "jump": Task(SYSTEMS["jump"], van_der_pol, element(0)),
    "paper": Task(_PAPER, populations, element(0, 1, 2), paper=True),
    "wells": Task(SYSTEMS["wells"], duffing, element(0)),
    "smooth": Task(SYSTEMS["matern"], oscillator, element(0)),
    "drift": Task(SYSTEMS["drift"], three_species, element(0, 1, 2)),
    "radar": Task(SYSTEMS["radar"], turning, range_and_bearing),
    "lattice": Task(
        SYSTEMS["lattice20"]._replace(
            title="Lorenz-96 with 20 states, every other one seen",
            observation_sd=(1.0,) * 10,
            observe=seen(*range(0, 20, 2)),
        ),
        lorenz96,
        element(*range(0, 20, 2)),
    ),
}
"""Tasks by name, in the order in which they run."""
