"""Which engine runs a session, and why."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

import numpy as np
from torch import Tensor

from pcnet.engine.clock import Interval
from pcnet.engine.inputs import time_of
from pcnet.engine.program import Program
from pcnet.errors import SettingError
from pcnet.model.model import Engine, Model
from pcnet.results.recorder import Record

if TYPE_CHECKING:
    from pcnet.engine.compiled.engine import CompiledEngine, Series
    from pcnet.engine.compiled.stepper import Stepper

FEW = 200
"""With engine="auto", a run of fewer observations than this is not worth compiling."""
_WARNED: set[str] = set()


class EngineChoice:
    """The engine of one session. compiled: the compiled engine, if it acts."""

    def __init__(self, wanted: Engine) -> None:
        preferred = os.environ.get("PCNET_ENGINE") or "auto"
        if preferred not in get_args(Engine):
            raise SettingError(f"PCNET_ENGINE must be 'auto', 'compiled' or 'eager', not {preferred!r}")
        self.asked: Engine = wanted
        self.wanted: Engine = "eager" if wanted == "auto" and preferred == "eager" else wanted
        self._few = 0 if preferred == "compiled" else FEW
        self.compiled: CompiledEngine | None = None
        self.stepper: Stepper | None = None
        self.why_eager = "" if self.wanted != "eager" else "asked for"
        self._eager_ticks = 0
        self._series: tuple[Mapping[str, Tensor], Series] | None = None

    def continue_with(self, acting: Engine) -> None:
        """Let the engine go on that acted before, whatever PCNET_ENGINE says here."""
        if self.asked == "auto":
            self.wanted = "auto" if acting == "compiled" else "eager"
            self.why_eager = "" if self.wanted != "eager" else "as before"

    def choose(self, model: Model, program: Program, interval: Interval, record: Record, total: int | None) -> None:
        """Decide which engine acts, at the first observation. total: number of observations of the run, if known."""
        if self.wanted == "eager":
            return
        if self.wanted == "auto" and total is not None and total < self._few:
            self.why_eager = f"fewer than {FEW} observations"
            return
        try:
            import llvmlite  # noqa: F401
        except ImportError:
            self._refuse("llvmlite is not installed (pip install llvmlite)")
            if "llvmlite" not in _WARNED:
                _WARNED.add("llvmlite")
                warnings.warn("llvmlite is not installed, so that models run eagerly and slowly", stacklevel=2)
            return
        from pcnet.engine.compiled.engine import compiled_engine
        from pcnet.engine.compiled.trace import UntraceableError

        try:
            self.compiled = compiled_engine(model, program, interval, record)
        except UntraceableError as error:
            self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        self.compiled, self.why_eager = None, why
        if self.wanted == "compiled":
            raise SettingError(f"engine='compiled' cannot run this model: {why}; use engine='auto' or 'eager'")

    def series_of(self, series: Mapping[str, Tensor], moments: Sequence[float] | None) -> Series:
        """The observations of a run as the compiled engine takes them, made once."""
        assert self.compiled is not None
        if self._series is None or self._series[0] is not series:
            times = None if moments is None else np.array([time_of(t) for t in moments])
            self._series = series, self.compiled.series(series, times)
        return self._series[1]

    def prepare_stepper(self, rows: int) -> None:
        """Get ready for single ticks; rows: how many can be recorded before they go into the recorder."""
        engine = self.compiled
        if engine is None or engine.program.spec.batch > 1 or (self.stepper is not None and self.stepper.valid):
            return
        from pcnet.engine.compiled.stepper import Stepper

        self.stepper = Stepper(engine, rows)

    def count_eager_tick(self, tick: int) -> None:
        """Note a tick that was eager; tick: number of observations after it."""
        self._eager_ticks += 1
        if self.compiled is not None and tick > 2 and self.compiled.given_up is not None:
            self._refuse(self.compiled.given_up)

    @property
    def acted(self) -> str:
        """ "compiled" or "eager"."""
        return "compiled" if self.compiled is not None and self.compiled.compiled_ticks else "eager"

    @property
    def eager_ticks(self) -> int:
        return self._eager_ticks

    def report(self, ticks: int) -> str:
        """See `Session.engine_report`."""
        if self.compiled is None:
            return f"engine: eager ({self.why_eager or 'no observation yet'})"
        from pcnet.engine.compiled.run import report

        head = f"engine: compiled, {self.compiled.compiled_ticks} observations; {self._eager_ticks} were eager"
        return f"{head}\n{report(self.compiled.variants)}"
