"""Single observations of a run, one at a time, with as little work around the compiled tick as possible."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from pcnet.engine.compiled.engine import CompiledEngine
from pcnet.engine.compiled.layout import Array, Layout
from pcnet.engine.compiled.run import EVERYTHING, WORD
from pcnet.engine.inputs import Observation

_STATE, _OTHER, _RECORD, _STALE = WORD["state"], WORD["other"], WORD["record"], WORD["stale"]


class Stepper:
    """Takes in one observation at a time, the same for all batch elements; there are no more of these than lanes.

    The state is in one of two buffers, and a tick writes the new state into the other. Which one holds the state is
    kept by the session, so that a tick that is interrupted has not happened.
    """

    def __init__(self, engine: CompiledEngine, rows: int) -> None:
        """rows: number of rows that can be recorded before `recorded` has to be called."""
        self.engine = engine
        run = engine.run
        self.n = sum(slot.size for slot in run.layout.given if not slot.name.startswith("/"))
        self._given = np.zeros((1, run.n_given, run.width))
        self._observed = self._given[0, : self.n]
        self._dt = self._given[0, run.layout.given_at["/dt"]]
        self._irregular = 1 << len(engine.program.acts)
        self._slices = {slot.name: slot.places for slot in run.layout.given if not slot.name.startswith("/")}
        self._kind = np.zeros(1, dtype=np.uint8)
        self._flag = np.ones(1, dtype=np.uint8)
        self.rows = np.zeros((rows, max(1, Layout.size(run.layout.record)), run.width))
        self.columns = {slot.name: slot.places for slot in run.layout.record}
        self.times = np.zeros(rows)
        self._words = run.words_for(self._given, self._kind, self._flag, self.rows)
        self._address = self._words.ctypes.data
        self._places = int(self._words[_STATE]), int(self._words[_OTHER])
        self._row, self._row_bytes = int(self._words[_RECORD]), self.rows.strides[0]
        self._run = run.function
        self._version, self._kinds = run.version, len(run.kinds)
        self._variants, self._known = engine.variants, engine.variants.version
        periods: dict[int, int] = {}
        for bit, act in enumerate(engine.program.acts):
            periods[act.periods[0]] = periods.get(act.periods[0], 0) | 1 << bit
        self._always = periods.pop(1, 0)
        self._periods = list(periods.items())
        self._codes: dict[int, int] = {}

    @staticmethod
    def fits(engine: CompiledEngine) -> bool:
        """Whether all batch elements are in one group of lanes, on the same clocks."""
        return engine.run.groups == 1 and all(act.by_element is None for act in engine.program.acts)

    @property
    def valid(self) -> bool:
        """Whether the memory and the code that this refers to are still in use."""
        return self._version == self.engine.run.version and self._known == self._variants.version

    def forget_derived(self) -> None:
        """Derive anew what depends on slow ticks, because another loop changes the state."""
        self._words[_STALE] = EVERYTHING

    def read(self, observation: Any) -> bool:
        """Read an observation of a plain form, all of it seen; False if it needs a closer look."""
        if isinstance(observation, Tensor):
            if observation.dim() != 1 or len(observation) != self.n:
                return False
            observation = observation.detach().cpu().numpy()
        elif (
            not isinstance(observation, np.ndarray) or observation.shape != (self.n,) or observation.dtype != np.float64
        ):
            return False
        if len(self._slices) != 1:
            return False
        self._observed[:] = observation[:, None]
        total = float(observation.sum())
        return total - total == 0.0

    def fill(self, observation: Observation) -> bool:
        """Take over an observation that was read otherwise; False if it is not the same for all batch elements."""
        for name, places in self._slices.items():
            value = observation[name].reshape(-1).cpu().numpy()
            if len(value) != places.stop - places.start:
                return False
            self._observed[places] = value[:, None]
        return True

    def tick(self, number: int, flipped: bool, row: int, elapsed: float | None) -> bool:
        """One tick, number `number` (from 0); False if compiled code cannot do it, and then nothing has changed.

        flipped: whether the second buffer holds the state. row: where to record. elapsed: the time since the
        observation before; None for the sampling interval.
        """
        count = number + 1
        code = self._always
        for period, mask in self._periods:
            if count % period == 0:
                code |= mask
        if elapsed is not None:
            code |= self._irregular
            self._dt[:] = elapsed
        kind = self._codes.get(code)
        if kind is None:
            kind = self._codes[code] = self.engine.number_of(code)
        if kind >= self._kinds:  # not in the table yet
            return False
        self._kind[0] = kind
        words = self._words
        words[_STATE], words[_OTHER] = (self._places[1], self._places[0]) if flipped else self._places
        words[_RECORD] = self._row + row * self._row_bytes
        return bool(self._run(self._address))

    def recorded(self, count: int) -> tuple[list[float], Array]:
        """Times and values (rows, B, n) of the first rows."""
        return self.times[:count].tolist(), self.rows[:count].copy().swapaxes(1, 2)[:, : self.engine.run.batch]
