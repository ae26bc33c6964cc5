"""Compiled ticks of a run: single ones and blocks, ahead of the run's snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcnet.engine.clock import Clock
from pcnet.engine.compiled.engine import CompiledEngine, Series
from pcnet.engine.compiled.layout import Array
from pcnet.engine.compiled.stepper import Stepper
from pcnet.engine.divergence import DivergenceLog
from pcnet.engine.inputs import Observation, Sample, time_of
from pcnet.engine.run import Run, Snapshot
from pcnet.engine.state import NodeStates
from pcnet.engine.tick import Outputs
from pcnet.errors import ObservationError

ROWS = 256
"""Rows that single ticks record before they go into the recorder."""


class Place(NamedTuple):
    """Where compiled code is: a snapshot without the state, which stays in its memory until it is read.

    elapsed: the time since the observation before; None for the sampling interval. flipped: whether the state is in the
    second of two buffers.
    """

    tick: int
    clock: Clock
    elapsed: float | None
    rows: int
    flipped: bool = False


class Lead:
    """Takes in observations with compiled code, which may lead to a place after the run's snapshot.

    place: where compiled code is, if the snapshot is behind it.
    """

    def __init__(self, run: Run, engine: CompiledEngine) -> None:
        self.engine = engine
        self.place: Place | None = None
        self._run = run
        self._loaded: Snapshot | None = None  # the snapshot that compiled code started from
        self._flushed = 0  # rows that are in the recorder, and not in the memory of single ticks
        self._stepper: Stepper | None = None
        self._series: tuple[Mapping[str, Tensor], Series] | None = None

    def step(self, observation: Any, t: Any, *, is_read: bool = False) -> bool:
        """One tick of a single run; False if it has to go another way, which may raise an error.

        is_read: whether the observation was read, as tensors by node, and the time is a number.
        """
        stepper, place, run = self._stepper, self.place, self._run
        if stepper is None or not stepper.valid:
            return False
        if place is None:
            if self._loaded is not run.snapshot:
                return False
            place = self._at_snapshot()
        if not is_read and isinstance(observation, Sample) and t is None:
            observation, t = observation
        moment = self._moment(place, t)
        if moment is None or not (stepper.fill(observation) if is_read else stepper.read(observation)):
            return False
        number, (time, elapsed) = place.tick, moment
        row = place.rows - self._flushed
        if row >= ROWS:
            self.flush()
            row = 0
        if not stepper.tick(number, place.flipped, row, elapsed):
            return False
        rows = place.rows
        if (number + 1) % run.record.every == 0 and run.recorder.columns:
            stepper.times[row] = time
            rows += 1
        self.engine.compiled_ticks += 1
        clock = Clock(time, place.clock.timed or t is not None)
        self.place = Place(number + 1, clock, elapsed, rows, not place.flipped)
        return True

    def _moment(self, place: Place, t: Any) -> tuple[float, float | None] | None:
        """The next time, and the time step, None for the sampling interval; None if the time needs a closer look."""
        clock, interval = place.clock, self._run.interval
        if t is None:
            return (clock.time + interval.dt if clock.timed else place.tick * interval.dt), None
        elapsed = t - clock.time if type(t) is float else -1.0
        if not 0 < elapsed < math.inf:
            return None
        return t, None if interval.is_regular(elapsed) else elapsed

    def take(self, observation: Observation, t: float | None) -> bool:
        """One tick; False if it has to be eager."""
        if self.step(observation, t, is_read=True):
            return True
        values = {name: value[None] for name, value in observation.items()}
        try:
            series = self.engine.series(values, None if t is None else np.array([t]))
        except RuntimeError:
            return False
        return bool(self._advance(series, 0, 1))

    def take_block(self, series: Mapping[str, Tensor], moments: Sequence[float] | None, start: int, size: int) -> int:
        """Take in up to `size` observations of a series (T, ..., n) from `start` on; their number, 0 if it cannot."""
        try:
            whole = self._series_of(series, moments)
        except (RuntimeError, ObservationError):  # the eager engine says what is wrong, at the right observation
            return 0
        if start >= len(whole):
            return 0
        return self._advance(whole, start, min(size, self.engine.block_size(), len(whole) - start))

    def _series_of(self, series: Mapping[str, Tensor], moments: Sequence[float] | None) -> Series:
        """The observations of a run as the compiled engine takes them, made once."""
        if self._series is None or self._series[0] is not series:
            times = None if moments is None else np.array([time_of(t) for t in moments])
            self._series = series, self.engine.series(series, times)
        return self._series[1]

    def _advance(self, series: Series, start: int, count: int) -> int:
        """Take in observations of a series; their number."""
        self._settle()
        run, engine, place = self._run, self.engine, self.place
        if place is None:
            if self._loaded is not run.snapshot:
                engine.load(run.snapshot.state)
                self._loaded = run.snapshot
            place = self._at_snapshot()
        self._forget_derived()
        made = engine.advance(series, start, count, place.tick, place.clock, run.record.every)
        if made.ticks:
            rows = place.rows
            if made.times and run.recorder.columns:
                run.recorder.truncate(rows)
                run.recorder.add_block(made.times, made.record)
                rows += len(made.times)
            self.place, self._flushed = Place(place.tick + made.ticks, made.clock, made.elapsed, rows), rows
            if Stepper.fits(engine) and (self._stepper is None or not self._stepper.valid):
                self._stepper = Stepper(engine, ROWS)
        return made.ticks

    def _forget_derived(self) -> None:
        """Let single ticks derive anew what depends on a state that others have changed."""
        if self._stepper is not None:
            self._stepper.forget_derived()

    def _at_snapshot(self) -> Place:
        """The place of the run's snapshot, whose state compiled code has loaded."""
        now = self._run.snapshot
        self._flushed = now.rows
        return Place(now.tick, now.clock, None, now.rows)

    def copy_elements(self, other: Lead, index: NDArray[np.int64], log: DivergenceLog) -> bool:
        """Go on where another one (or this one) is, with copies of its batch elements (B,), in compiled memory.

        Returns:
            Whether that could be done: its memory holds the present state, and nothing has stopped.
        """
        other._settle()
        run, place, before = self._run, other.place, other._run.snapshot
        if place is None and other._loaded is before:
            elapsed = None if before.relative_dt is None else float(before.state.dt[0])
            place = other._at_snapshot()._replace(elapsed=elapsed)
        if place is None or not self.engine.copy_elements(other.engine, index):
            return False
        run.snapshot = before._replace(state=run.program.initial, relative_dt=None, log=log)
        self._loaded, self.place, self._flushed = run.snapshot, place, place.rows
        self._forget_derived()
        return True

    def node_state(self, name: str) -> Any:
        """The state of a node where compiled code is."""
        self._settle()
        return self.engine.node_state(name)

    def replace_nodes(self, nodes: NodeStates) -> None:
        """Replace the states of some nodes where compiled code is."""
        self._settle()
        self.engine.replace_nodes(nodes)
        self._forget_derived()

    def catch_up(self) -> None:
        """Bring the run's snapshot and recorder to where compiled code is."""
        self._settle()
        place, run = self.place, self._run
        if place is None:
            return
        interval = run.program.interval
        relative = None if place.elapsed is None else torch.full_like(interval, place.elapsed) / interval
        log, outputs = run.snapshot.log, Outputs({})
        run.snapshot = Snapshot(place.tick, self.engine.state(), place.clock, relative, log, outputs, place.rows)
        self._loaded, self.place = run.snapshot, None

    def _settle(self) -> None:
        """Bring what single ticks have done to where all else looks for it."""
        self.flush()
        if self.place is not None and self._stepper is not None:
            self.engine.run.settle(self.place.flipped)
            self.place = self.place._replace(flipped=False)

    def flush(self) -> None:
        """Move rows that single ticks have recorded into the recorder."""
        if self._stepper is not None and self.place is not None and self.place.rows > self._flushed:
            times, rows = self._stepper.recorded(self.place.rows - self._flushed)
            self._run.recorder.truncate(self._flushed)
            self._run.recorder.add_block(times, self.engine.columns(rows))
            self._flushed = self.place.rows

    def newest(self, name: str) -> Array | None:
        """The last value of a column, (n, lanes), if a single tick has recorded it and no batch element has stopped."""
        stepper, place = self._stepper, self.place
        row = -1 if stepper is None or place is None or not stepper.valid else place.rows - self._flushed - 1
        if row < 0 or stepper is None or self.engine.run.batch < self._run.program.spec.batch:
            return None
        found: Array = stepper.rows[row, stepper.columns[name]]
        return found

    def forget_rows(self, before: Snapshot) -> None:
        """Record from row 0 on, because rows were taken out of the recorder; before: the snapshot until then."""
        if self._loaded is before:
            self._loaded = self._run.snapshot
        if self.place is not None:
            self.place = self.place._replace(rows=0)
        self._flushed = 0
