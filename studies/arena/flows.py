"""Flows and observations of the tasks for numpy and jax, as a user of another package writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Flow = Callable[..., Any]
"""f(xp, x, θ), or f(xp, x, θ, t), where xp is numpy or jax.numpy; elements of x and θ lead, (d, ...)."""
Mapped = Callable[[Any, Any], Any]
"""g(xp, x)."""


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


def double_well(_: Any, x: Any, p: Any) -> Any:
    return p[0] * (x - x**3)


def growth(xp: Any, x: Any, p: Any, t: Any) -> Any:
    """The increment of one step of the map."""
    return -0.5 * x + p[0] * x / (1 + x**2) + p[1] * xp.cos(1.2 * t)


def reversion(_: Any, x: Any, p: Any) -> Any:
    """θ = (rate, mean)."""
    return p[0] * (p[1] - x)


def oscillator(xp: Any, x: Any, p: Any) -> Any:
    return xp.stack([x[1], -p[1] * x[0] - p[0] * x[1]])


def three_species(xp: Any, x: Any, p: Any) -> Any:
    u, v, w = xp.exp(x[0]), xp.exp(x[1]), xp.exp(x[2])
    return xp.stack([p[0] * v + p[1] * w, p[2] * w - p[0] * u, -p[1] * u - p[2] * v])


def populations(xp: Any, x: Any, p: Any) -> Any:
    rates = xp.stack([p[0] * x[1] + p[1] * x[2], p[2] * x[2] - p[0] * x[0], -p[1] * x[0] - p[2] * x[1]])
    return x * rates


def predator_prey(xp: Any, x: Any, p: Any) -> Any:
    """Logs of prey and predators; θ = logs of the rates of birth, of being eaten, of death and of growth by eating."""
    rate = xp.exp(p)
    return xp.stack([rate[0] - rate[1] * xp.exp(x[1]), rate[3] * xp.exp(x[0]) - rate[2]])


def lorenz96(xp: Any, x: Any, p: Any) -> Any:
    return (xp.roll(x, -1, 0) - xp.roll(x, 2, 0)) * xp.roll(x, 1, 0) - x + p[0]


def turning(xp: Any, x: Any, p: Any) -> Any:
    return xp.stack([x[2], x[3], -p[0] * x[3], p[0] * x[2]])


def constant_velocity(xp: Any, x: Any, _: Any) -> Any:
    return xp.stack([x[2], x[3], 0.0 * x[2], 0.0 * x[3]])


def range_and_bearing(xp: Any, x: Any) -> Any:
    u, v = x[0] + 20.0, x[1] + 20.0
    return xp.stack([xp.sqrt(u**2 + v**2), xp.arctan2(v, u)])


def sine(xp: Any, x: Any) -> Any:
    return xp.sin(x[:1])


def square(_: Any, x: Any) -> Any:
    return x[:1] ** 2


def twentieth_of_square(_: Any, x: Any) -> Any:
    return x[:1] ** 2 / 20


def log_rates(xp: Any, x: Any) -> Any:
    """Logs of the mean counts of three neurons."""
    return xp.stack([1.0 + x[0], 1.0 - x[0], 1.0 + x[1]])


def element(*places: int) -> Mapped:
    """Some elements of the state."""
    return lambda xp, x: xp.stack([x[place] for place in places])
