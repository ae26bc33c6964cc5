"""The time of a run: when the last observation came, and how long that was after the one before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pcnet.errors import ObservationError

ROUNDING = 1e-9
"""A time that differs from the sampling interval by no more than this share of it is that interval."""


class Clock:
    """Goes on by one sampling interval (B,) with each observation, or to the time that it brings."""

    def __init__(self, interval: Tensor, dt: float) -> None:
        """dt: the shortest interval as it was given, before it was rounded to the run's precision."""
        self.interval = interval
        """The time from one observation to the next, (B,)."""
        self._common = bool((interval == interval[0]).all())
        self.dt = dt if self._common else 1.0
        """The interval of all batch elements, or 1 where these differ: then times are observation numbers."""
        self.time = 0.0
        """When the last observation came; the first is at 0 unless times are given."""
        self.timed = False
        """Whether a time was ever given."""
        self.elapsed = interval
        """The time since the previous observation (B,); at the first one, the sampling interval."""
        self.pace: Tensor | None = None
        """`elapsed` over the sampling interval (B,), where observations do not come at that interval."""
        self.now = torch.zeros_like(interval, dtype=torch.float64)
        """The time now (B,), from one sampling interval before the first observation on.

        In double precision whatever the run's is: in single precision a clock that has run for long would stand still.
        """

    def advance(self, t: float | None, tick: int) -> None:
        """Go on to observation number `tick`, at t or a sampling interval after the one before."""
        if t is None:
            self.time = self.time + self.dt if self.timed else tick * self.dt
            self.wait(None)
        else:
            if tick:
                self.wait(self._since(t, tick))
            self.time, self.timed = t, True
        self.now = self.elapsed + self.now

    def _since(self, t: float, tick: int) -> Tensor | None:
        """The time since the previous observation (B,), or None if that is the sampling interval."""
        elapsed = t - self.time
        if elapsed <= 0:
            how = "the same as that of" if elapsed == 0 else "before"
            raise ObservationError(
                f"observation {tick} is at t = {t:g}, {how} the previous one at t = {self.time:g}; times must rise"
            )
        regular = self._common and abs(elapsed - self.dt) <= ROUNDING * self.dt
        return None if regular else torch.full_like(self.interval, elapsed)

    def mark(self) -> tuple[Any, ...]:
        """How things are, to go back to."""
        return self.time, self.timed, self.elapsed, self.pace, self.now

    def go_back(self, mark: tuple[Any, ...]) -> None:
        self.time, self.timed, self.elapsed, self.pace, self.now = mark

    def wait(self, elapsed: Tensor | None) -> None:
        """So much time has passed (B,); None for a sampling interval."""
        self.elapsed = self.interval if elapsed is None else elapsed
        self.pace = None if elapsed is None else elapsed / self.interval
