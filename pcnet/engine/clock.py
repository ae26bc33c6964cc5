"""The time of a run: regular sampling, or times that come with the observations."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from pcnet.errors import ObservationError
from pcnet.model.context import ROUNDING


class Clock(NamedTuple):
    """The time of the last observation, and whether times were ever given; the first observation is at 0 unless so."""

    time: float = 0.0
    timed: bool = False


class Interval(NamedTuple):
    """The sampling interval as a clock sees it."""

    interval: Tensor  # (B,)
    dt: float  # that of all batch elements, or 1 if they differ: then times are observation numbers
    common: bool  # whether they do not differ

    @classmethod
    def of(cls, interval: Tensor, shortest: float) -> Self:
        """shortest: the shortest interval as it was given, before rounding to the run's dtype."""
        common = bool((interval == interval[0]).all())
        return cls(interval, shortest if common else 1.0, common)

    def is_regular(self, elapsed: float) -> bool:
        """Whether a time step is the sampling interval."""
        return self.common and abs(elapsed - self.dt) <= ROUNDING * self.dt

    def advance(self, clock: Clock, t: float | None, tick: int) -> tuple[Clock, Tensor, Tensor | None]:
        """Move on to observation number `tick`, at time t or one interval after the previous one.

        Returns:
            The clock, the time since the previous observation (B,), and that over the interval (B,), None if regular.
        """
        if t is None:
            time = clock.time + self.dt if clock.timed else tick * self.dt
            return Clock(time, clock.timed), self.interval, None
        now = Clock(t, True)
        if not tick:
            return now, self.interval, None
        elapsed = t - clock.time
        if elapsed <= 0:
            how = "the same as" if elapsed == 0 else "before"
            raise ObservationError(
                f"observation {tick} is at t = {t:g}, {how} the previous one at t = {clock.time:g}; times must increase"
            )
        if self.is_regular(elapsed):
            return now, self.interval, None
        dt = torch.full_like(self.interval, elapsed)
        return now, dt, dt / self.interval
