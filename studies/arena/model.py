"""The discrete model that rivals filter: state, unknown parameters and coloured noise in one vector."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from studies.arena.tasks import Task
from studies.systems.design import Realisation, matern_step

Array = NDArray[Any]
Information = Literal["everything", "noise", "parameters", "neither"]
"""What a filter is told; flow, observation function and priors always."""
SUBSTEPS = 2  # Runge–Kutta steps between two observations
TINY = 1e-6  # variance of white noise beside coloured noise, relative to it
SHARED_FROM = 6  # states from which a fit has one process level, and one observation level, for all


class Record(NamedTuple):
    """Observations of one seed."""

    times: Array  # (T,)
    observations: Array  # (T, m)
    theta: Array  # true parameters at each observation, (T, p), for filters that are told them
    is_outlier: Array  # (T, m), for the particle filter alone

    @property
    def intervals(self) -> Array:
        """Time since the observation before, (T,); 0 for the first."""
        return np.diff(self.times, prepend=self.times[0])

    def first(self, count: int) -> Record:
        return Record(*(part[:count] for part in self))


def record_of(task: Task, data: Realisation, seed: int) -> Record:
    """Observations of the seed with this index."""
    count = task.system.samples
    theta = np.array([task.system.parameters_at(k / count) for k in range(count)]).reshape(count, -1)
    return Record(data.times.numpy(), data.observations[seed].numpy(), theta, data.is_outlier[seed].numpy())


class Noise(NamedTuple):
    """Standard deviations of process noise per √time, (d,), and observation noise, (m,)."""

    x: Any
    y: Any


class DiscreteModel:
    """z = (x, θ, coloured noise): z' = step(z) + N(0, Q), y = observe(z) + N(0, R); θ only if it is not told."""

    def __init__(self, task: Task, information: Information) -> None:
        self.task, system = task, task.system
        self.learns_theta = information in ("noise", "neither") and bool(system.parameters)
        self.learns_noise = information in ("parameters", "neither")
        self.d, self.m = system.dim, system.channels
        self.p = len(system.parameters) if self.learns_theta else 0
        self.coloured = system.correlation_time is not None
        if system.correlation_time is not None:
            matrix, covariance = matern_step(system.dt, system.correlation_time)
            self.memory, self.fresh = matrix.numpy(), covariance.numpy()
            self.slope = float(np.sqrt(3) / system.correlation_time)
        self.dim = self.d + self.p + (2 * self.m if self.coloured else 0)
        self.shared = self.d >= SHARED_FROM  # whether a fit has one level for all states and one for all channels
        self.fitted_x = 1 if self.shared else self.d  # number of process levels of a fit
        self.told = Noise(np.array(system.diffusion), np.array(system.observation_sd))

    def step(self, xp: Any, z: Any, interval: Any, theta: Any) -> Any:
        """Mean of z after an interval; theta: True parameters, used if they are told."""
        d, p, h = self.d, self.p, interval / SUBSTEPS
        x, theta = z[:d], z[d : d + p] if self.learns_theta else theta
        for _ in range(SUBSTEPS):
            k1 = self.task.flow(xp, x, theta)
            k2 = self.task.flow(xp, x + 0.5 * h * k1, theta)
            k3 = self.task.flow(xp, x + 0.5 * h * k2, theta)
            k4 = self.task.flow(xp, x + h * k3, theta)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        parts = [x, z[d : d + p]]
        if self.coloured:
            parts.append((z[d + p :].reshape(self.m, 2) @ self.memory.T).reshape(-1))
        return xp.concatenate(parts)

    def observe(self, xp: Any, z: Any) -> Any:
        seen = self.task.observe(xp, z[: self.d])
        return seen + z[self.d + self.p :: 2] if self.coloured else seen

    def process_covariance(self, xp: Any, noise: Noise, interval: Any) -> Any:
        """Q of one interval, (n, n): exact for linear flows without parameters, else interval · D²."""
        system, square = self.task.system, xp.diag(noise.x**2)
        block = interval * square
        if self.task.drift is not None:  # ∫ (1 + As) D² (1 + As)ᵀ ds, exact where A² = 0
            drift = xp.asarray(self.task.drift)
            cross = drift @ square
            block = block + interval**2 / 2 * (cross + cross.T) + interval**3 / 3 * cross @ drift.T
        blocks = [block]
        if self.p:
            blocks.append(xp.diag((system.walk * xp.asarray(system.prior_sd)) ** 2) * interval / system.dt)
        if self.coloured:
            blocks += [noise.y[i] ** 2 * xp.asarray(self.fresh) for i in range(self.m)]
        return block_diagonal(xp, blocks)

    def observation_covariance(self, xp: Any, noise: Noise) -> Any:
        return xp.diag((TINY if self.coloured else 1.0) * noise.y**2)

    def initial(self, xp: Any, noise: Noise) -> tuple[Any, Any]:
        """Mean (n,) and covariance (n, n) before the first observation."""
        system = self.task.system
        mean = [*system.initial_mean, *(system.prior_mean if self.learns_theta else ())]
        sd = [*system.initial_sd, *(system.prior_sd if self.learns_theta else ())]
        blocks = [xp.diag(xp.asarray(sd) ** 2)]
        if self.coloured:
            blocks += [noise.y[i] ** 2 * xp.diag(xp.asarray([1.0, self.slope**2])) for i in range(self.m)]
        return xp.asarray([*mean, *[0.0] * (self.dim - len(mean))]), block_diagonal(xp, blocks)

    def first_guess(self, record: Record) -> Array:
        """Where a fit of the noise starts: logs of standard deviations, (d + m,) or, with many states, (2,)."""
        x = np.log(0.3 * np.array(self.task.system.initial_sd))
        y = np.log(np.diff(record.observations, axis=0).std(0) / np.sqrt(2))
        return np.array([x.mean(), y.mean()]) if self.shared else np.concatenate([x, y])

    def noise_of(self, xp: Any, logs: Any) -> Noise:
        """Standard deviations from what a fit varies."""
        if self.shared:
            return Noise(xp.exp(logs[0]) * xp.ones(self.d), xp.exp(logs[1]) * xp.ones(self.m))
        return Noise(xp.exp(logs[: self.d]), xp.exp(logs[self.d :]))


def block_diagonal(xp: Any, blocks: list[Any]) -> Any:
    """A matrix with square blocks on its diagonal."""
    width, rows, place = sum(len(block) for block in blocks), [], 0
    for block in blocks:
        left, right = xp.zeros((len(block), place)), xp.zeros((len(block), width - place - len(block)))
        rows.append(xp.concatenate([left, block, right], 1))
        place += len(block)
    return xp.concatenate(rows, 0)
