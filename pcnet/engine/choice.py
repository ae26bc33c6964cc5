"""Which engine runs a session, and why."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, get_args

from pcnet.errors import SettingError
from pcnet.model.model import Engine

if TYPE_CHECKING:
    from pcnet.engine.compiled.engine import Known
    from pcnet.engine.compiled.lead import Lead
    from pcnet.engine.run import Run
    from pcnet.model.model import Model
    from pcnet.model.node import BatchSpec

FEW = 200
"""With engine="auto", a run of fewer observations than this is not worth compiling;"""
CROWD = 300
"""in a batch of so many elements, or rows, half as many are enough, because eager ticks take twice as long."""
FEW_STEPS = 100
"""The same for a forecast, whose eager steps cost more."""
_WARNED: set[str] = set()


class EngineChoice:
    """The engine of a run.

    lead: the compiled ticks; None if the eager engine acts. eager_ticks: number of observations that were eager.
    """

    def __init__(self, wanted: Engine) -> None:
        preferred = os.environ.get("PCNET_ENGINE") or "auto"
        if preferred not in get_args(Engine):
            raise SettingError(f"PCNET_ENGINE must be 'auto', 'compiled' or 'eager', not {preferred!r}")
        self._asked: Engine = wanted
        self._wanted: Engine = "eager" if wanted == "auto" and preferred == "eager" else wanted
        self._few = 0 if preferred == "compiled" else FEW
        self._goes_on = False
        self.lead: Lead | None = None
        self.eager_ticks = 0
        self._why_eager = "" if self._wanted != "eager" else "asked for"

    def continue_with(self, acting: Engine) -> None:
        """Let the engine go on that acted before, whatever PCNET_ENGINE says here."""
        if self._asked == "auto":
            self._wanted = "auto" if acting == "compiled" else "eager"
            self._goes_on = acting == "compiled"
            self._why_eager = "" if self._wanted != "eager" else "as before"

    def known_before(self, model: Model, spec: BatchSpec, smooth: bool) -> Known | None:
        """What the compiled engine knows of a model from an earlier session; None if nothing, or if eager is wanted."""
        if self._wanted == "eager" or not model.compiled:
            return None
        from pcnet.engine.compiled.engine import known_before

        return known_before(model, spec, smooth)

    def choose(self, run: Run, total: int | None, known: Known | None = None) -> None:
        """Decide which engine acts, before the first observation.

        total: number of observations, if known. known: what is known of the run for the compiled engine.
        """
        if self._wanted == "eager":
            return
        few = 0.0 if self._goes_on else self._few / (1 + run.program.spec.batch / CROWD)
        if self._wanted == "auto" and total is not None and total < few:
            self._why_eager = f"fewer than {few:.0f} observations"
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
        from pcnet.engine.compiled.errors import UntraceableError
        from pcnet.engine.compiled.lead import Lead

        try:
            self.lead = Lead(run, compiled_engine(run.program, run.interval, run.record, known))
        except UntraceableError as error:
            self._refuse(str(error))

    def is_worth_compiling(self, steps: int) -> bool:
        """Whether the compiled engine acts, and so many steps are enough for it to compile them."""
        return self.lead is not None and steps >= min(self._few, FEW_STEPS)

    def _refuse(self, why: str) -> None:
        self.lead, self._why_eager = None, why
        if self._wanted == "compiled":
            raise SettingError(f"engine='compiled' cannot run this model: {why}; use engine='auto' or 'eager'")

    def count_eager_tick(self, tick: int) -> None:
        """Note a tick that was eager; tick: number of observations after it."""
        self.eager_ticks += 1
        if self.lead is not None and tick > 2 and self.lead.engine.given_up is not None:
            self._refuse(self.lead.engine.given_up)

    @property
    def acted(self) -> str:
        """ "compiled" or "eager"."""
        return "compiled" if self.lead is not None and self.lead.engine.compiled_ticks else "eager"

    def report(self) -> str:
        """See `Session.engine_report`."""
        if self.lead is None:
            return f"engine: eager ({self._why_eager or 'no observation yet'})"
        from pcnet.engine.compiled.run import report

        engine = self.lead.engine
        head = f"engine: compiled, {engine.compiled_ticks} observations; {self.eager_ticks} were eager"
        return f"{head}\n{report(engine.variants)}"
