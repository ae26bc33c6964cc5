"""The discrete model that rivals filter: state, unknown parameters and coloured noise in one vector."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from studies.arena.tasks import LOG_CHI2, Task
from studies.systems.design import Realisation, matern_step

Array = NDArray[Any]
Information = Literal["everything", "noise", "parameters", "neither"]
"""What a filter is told; flow, observation function, priors and the kind of noise always."""
SUBSTEPS = 2  # Runge–Kutta steps between two observations
TINY = 1e-6  # variance of white noise beside coloured noise, relative to it
SHARED_FROM = 6  # states from which all filters know that there is one process level and one observation level


class Record(NamedTuple):
    """Observations of one seed."""

    times: Array  # (T,)
    observations: Array  # (T, m); NaN where nothing is seen
    theta: Array  # true parameters at each observation, (T, p), for filters that are told them

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
    return Record(data.times.numpy(), data.observations[seed].numpy(), theta)


def without_gaps(record: Record, dt: float) -> tuple[Record, Array]:
    """The record with missing observations in gaps of more than two intervals, and the places of its own ones."""
    parts = [max(1, round(interval / dt)) if interval > 2 * dt else 1 for interval in record.intervals]
    places = np.cumsum(parts) - 1
    source = np.repeat(np.arange(len(parts)), parts)
    times = np.interp(np.arange(places[-1] + 1), places, record.times)
    y = np.full((len(times), record.observations.shape[1]), np.nan)
    y[places] = record.observations
    return Record(times, y, record.theta[source]), places


class Noise(NamedTuple):
    """Standard deviations of process noise per √time, (d,), and observation noise, (m,)."""

    x: Any
    y: Any


class DiscreteModel:
    """z = (x, θ, coloured noise): z' = step(z) + N(0, Q), y = observe(z) + N(0, R); θ only if it is not told."""

    def __init__(self, task: Task, information: Information) -> None:
        self.task, system = task, task.system
        self.learns_theta = bool(system.parameters) and (information in ("noise", "neither") or task.switches)
        self.learns_noise = information in ("parameters", "neither")
        self.learns_noise_y = self.learns_noise and task.family == "gaussian"
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

    def step(self, xp: Any, z: Any, interval: Any, time: Any, theta: Any) -> Any:
        """Mean of z, (n, ...), after an interval.

        Args:
            xp: numpy or jax.numpy.
            z: State, parameters and coloured noise.
            interval: Its length; 0 before the first observation.
            time: When it ends.
            theta: True parameters, (p, ...), used if they are told.
        """
        d, p, h = self.d, self.p, interval / SUBSTEPS
        x, theta = z[:d], z[d : d + p] if self.learns_theta else theta
        if self.task.is_map:
            clock = (time - interval,) if self.task.takes_time else ()
            x = x + xp.where(interval > 0, 1.0, 0.0) * self.task.flow(xp, x, theta, *clock)
        for _ in range(0 if self.task.is_map else SUBSTEPS):
            k1 = self.task.flow(xp, x, theta)
            k2 = self.task.flow(xp, x + 0.5 * h * k1, theta)
            k3 = self.task.flow(xp, x + 0.5 * h * k2, theta)
            k4 = self.task.flow(xp, x + h * k3, theta)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        parts = [x, z[d : d + p]]
        if self.coloured:
            noise = z[d + p :].reshape(self.m, 2, *z.shape[1:])
            parts.append(xp.einsum("ij,mj...->mi...", self.memory, noise).reshape(z[d + p :].shape))
        return xp.concatenate(parts)

    def observe(self, xp: Any, z: Any) -> Any:
        """Mean of an observation, or of its log-square where a volatility is seen."""
        seen = self.task.observe(xp, z[: self.d])
        if self.task.family == "poisson":
            return xp.exp(seen)
        if self.task.family == "volatility":
            return seen + LOG_CHI2[0]
        return seen + z[self.d + self.p :: 2] if self.coloured else seen

    def readings(self, record: Record) -> tuple[Array, float]:
        """What Gaussian filters take in, (T, m), and what their log-evidence lacks to be that of the observations.

        Returns are squared and their logs taken, as is usual for stochastic volatility; the density of a return is
        that of the log-square, divided by the return's size.
        """
        if self.task.family != "volatility":
            return record.observations, 0.0
        size = np.abs(record.observations).clip(1e-6)
        return 2 * np.log(size), -float(np.log(size).sum())

    def process_covariance(self, xp: Any, noise: Noise, interval: Any) -> Any:
        """Q of one interval, (n, n): exact where A² = 0 and the flow is Ax, else interval · D²."""
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

    def observation_covariance(self, xp: Any, noise: Noise, z: Any) -> Any:
        """R, (m, m): of counts it is their mean."""
        if self.task.family == "poisson":
            return xp.diag(self.observe(xp, z))
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
        """Where a fit of the noise starts: logs of standard deviations of x and y, of all together if `shared`."""
        x = np.log(0.3 * np.array(self.task.system.initial_sd))
        if self.shared:
            x = x.mean(keepdims=True)
        if not self.learns_noise_y:
            return x
        seen = [channel[np.isfinite(channel)] for channel in record.observations.T]
        y = np.log([np.diff(channel).std() / np.sqrt(2) for channel in seen])
        return np.concatenate([x, y.mean(keepdims=True) if self.shared else y])

    def noise_of(self, xp: Any, logs: Any) -> Noise:
        """Standard deviations from what a fit varies."""
        x, y = logs[: self.fitted_x], logs[self.fitted_x :]
        x = xp.exp(x) * xp.ones(self.d)
        return Noise(x, xp.exp(y) * xp.ones(self.m) if self.learns_noise_y else xp.asarray(self.told.y))


def block_diagonal(xp: Any, blocks: list[Any]) -> Any:
    """A matrix with square blocks on its diagonal."""
    width, rows, place = sum(len(block) for block in blocks), [], 0
    for block in blocks:
        left, right = xp.zeros((len(block), place)), xp.zeros((len(block), width - place - len(block)))
        rows.append(xp.concatenate([left, block, right], 1))
        place += len(block)
    return xp.concatenate(rows, 0)
