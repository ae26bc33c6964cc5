"""Simulations of tasks that are no diffusion with Gaussian observations at regular times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from studies.systems.design import HORIZONS, Realisation, System, simulate

STAY = 0.97
"""Probability that the manoeuvring target goes on as it does, from one observation to the next."""
TURNS = (0.0, 0.2, -0.2)
"""Its turn rates."""


def _realisation(states: list[np.ndarray], observations: list[np.ndarray], dt: float) -> Realisation:
    """From lists over seeds of states (T + HORIZONS[-1], d) and observations (T, m)."""
    count = len(observations[0])
    path, y = torch.as_tensor(np.stack(states)), torch.as_tensor(np.stack(observations))
    times = dt * torch.arange(count, dtype=torch.float64)
    return Realisation(times, path[:, :count], y, torch.zeros_like(y, dtype=torch.bool), path[:, count:])


def simulate_growth(system: System, seeds: Sequence[int]) -> Realisation:
    """x ← x/2 + ax/(1 + x²) + b cos 1.2t + noise, y = x²/20 + noise."""
    a, b = system.parameters
    states, observations = [], []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        x = [system.initial_mean[0] + system.initial_sd[0] * rng.standard_normal()]
        for k in range(system.samples + HORIZONS[-1] - 1):
            new = x[-1] / 2 + a * x[-1] / (1 + x[-1] ** 2) + b * np.cos(1.2 * k)
            x.append(new + system.diffusion[0] * rng.standard_normal())
        path = np.array(x)[:, None]
        states.append(path)
        noise = rng.standard_normal((system.samples, 1))
        observations.append(path[: system.samples] ** 2 / 20 + system.observation_sd[0] * noise)
    return _realisation(states, observations, system.dt)


def simulate_manoeuvres(system: System, seeds: Sequence[int]) -> Realisation:
    """A target that turns at one of three rates, in steps of a hundredth of an interval."""
    fine, states, observations = 100, [], []
    h = system.dt / fine
    for seed in seeds:
        rng = np.random.default_rng(seed)
        x, mode = np.array(system.initial_mean) + np.array(system.initial_sd) * rng.standard_normal(4), 0
        path = [x]
        for _ in range(system.samples + HORIZONS[-1] - 1):
            if rng.random() > STAY:
                mode = (mode + 1 + int(rng.integers(2))) % 3
            cosine, sine = np.cos(TURNS[mode] * h), np.sin(TURNS[mode] * h)
            turn = np.array([[cosine, -sine], [sine, cosine]])
            noise = np.sqrt(h) * np.array(system.diffusion) * rng.standard_normal((fine, 4))
            for each in noise:
                later = turn @ x[2:]
                x = np.concatenate([x[:2] + 0.5 * h * (x[2:] + later), later]) + each
            path.append(x)
        states.append(np.array(path))
        noise = np.array(system.observation_sd) * rng.standard_normal((system.samples, 2))
        observations.append(states[-1][: system.samples, :2] + noise)
    return _realisation(states, observations, system.dt)


def simulate_returns(system: System, seeds: Sequence[int]) -> Realisation:
    """Returns y = exp(x/2) ε of a volatility whose log x is a diffusion."""
    data = simulate(system, seeds)
    normal = [np.random.default_rng(seed).standard_normal((system.samples, 1)) for seed in seeds]
    return data._replace(observations=(0.5 * data.states).exp() * torch.as_tensor(np.stack(normal)))


def simulate_counts(system: System, seeds: Sequence[int]) -> Realisation:
    """Counts with the log-rates that the system's observation function gives."""
    data = simulate(system, seeds)
    rates = system.observe(data.states).exp().numpy()
    counts = [np.random.default_rng(seed).poisson(rate) for seed, rate in zip(seeds, rates, strict=True)]
    return data._replace(observations=torch.as_tensor(np.stack(counts).astype(float)))


def simulate_sensors(system: System, seeds: Sequence[int]) -> Realisation:
    """Positions with outliers at every tick, velocities without at every fifth; nothing in the last fifth of 100 ticks.

    What is missing is NaN.
    """
    data = simulate(system, seeds)
    sd = torch.tensor(system.observation_sd, dtype=torch.float64)
    seen = system.observe(data.states)
    velocity = torch.arange(system.channels) >= 2
    y = torch.where(data.is_outlier & velocity, seen + (data.observations - seen) / 20, data.observations)
    assert len(sd) == y.shape[-1]
    tick = torch.arange(system.samples)
    missing = (tick % 100 >= 80)[:, None] | ((tick % 5 != 0)[:, None] & velocity)
    return data._replace(
        observations=torch.where(missing, torch.nan, y), is_outlier=data.is_outlier & ~velocity & ~missing
    )
