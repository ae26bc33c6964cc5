"""What the study found: a row for each method, case, prior and seed, and what that comes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from studies.calibration.design import CASES, PRIORS
from studies.calibration.measures import Share, wilson
from studies.calibration.trials import Outcome

NEAR_Y, NEAR_X = (0.8, 1.2), (0.5, 2.0)
"""Between these a learned precision should be, over the true one: that of observations and that of states."""
NEAR_JUMP = 0.02
"""How close parameters should be to the truth again after a jump."""


class Cell(NamedTuple):
    """A method on a case from a prior; the prior is "" for methods that are told the noise."""

    case: str
    method: str
    prior: str


class Summary(NamedTuple):
    """What a cell comes to: means over the seeds that did not diverge; shares are of all seeds.

    Coverages have the interval of as many trials as there are seeds: what one seed says of several parameters, or of a
    state at many times, is not independent.
    """

    seeds: int
    lost: int
    mse: float
    mse_whole: float
    raw: float
    error: float
    coverage_parameters: Share
    coverage_states: Share
    near_y: Share
    near_x: Share
    precision_y: float
    precision_x: float
    followed: Share


class Findings(NamedTuple):
    """The whole study.

    table: a row for each cell and seed with the columns case, method, prior, seed; mse (of the states, in the second
    half of the time), mse_whole (in all of it), raw (of the observations, in the second half), error (the largest of
    the parameters, at the end), error_later (some time after a jump), coverage_states and coverage_parameters (the
    share within two sd), precision_x and precision_y (at the end, over the true ones), lost (whether it diverged).
    outcomes: each trial with beliefs about parameters over time.
    """

    table: pd.DataFrame
    outcomes: Mapping[Cell, Outcome]
    samples: int
    seeds: tuple[int, ...]
    held_out: bool
    seconds: float

    @property
    def cases(self) -> list[str]:
        found = set(self.table["case"])
        return [name for name in CASES if name in found]

    @property
    def skipped(self) -> dict[Cell, str]:
        return {cell: outcome.skipped for cell, outcome in self.outcomes.items() if outcome.skipped is not None}

    def cells(self, case: str) -> list[Cell]:
        """The cells of a case in the order of its methods and priors, without those that were skipped."""
        priors = {prior.name: i for i, prior in enumerate(PRIORS)}
        own = [cell for cell, outcome in self.outcomes.items() if cell.case == case and outcome.skipped is None]
        return sorted(own, key=lambda cell: (CASES[case].methods.index(cell.method), priors.get(cell.prior, -1)))

    def rows(self, cell: Cell) -> pd.DataFrame:
        table = self.table
        chosen = (table["case"] == cell.case) & (table["method"] == cell.method) & (table["prior"] == cell.prior)
        return table[chosen]

    def summary(self, cell: Cell) -> Summary:
        return summarise(self.rows(cell))


def summarise(rows: pd.DataFrame) -> Summary:
    """What the seeds of a cell come to."""
    count, lost = len(rows), int(rows["lost"].sum())

    def column(name: str) -> pd.Series[float]:
        return rows[name] if name in rows else pd.Series(np.nan, rows.index)

    def near(name: str, limits: tuple[float, float]) -> Share:
        known = column(name)
        if not known.notna().any():
            return wilson(np.nan, 0)
        return wilson(float(known.between(*limits).mean()), count)

    later = column("error_later")
    followed = wilson(float((later <= NEAR_JUMP).mean()), count) if later.notna().any() else wilson(np.nan, 0)
    return Summary(
        seeds=count,
        lost=lost,
        mse=float(column("mse").mean()),
        mse_whole=float(column("mse_whole").mean()),
        raw=float(column("raw").mean()),
        error=float(column("error").mean()),
        coverage_parameters=wilson(float(column("coverage_parameters").mean()), count - lost),
        coverage_states=wilson(float(column("coverage_states").mean()), count - lost),
        near_y=near("precision_y", NEAR_Y),
        near_x=near("precision_x", NEAR_X),
        precision_y=float(column("precision_y").median()),
        precision_x=float(column("precision_x").median()),
        followed=followed,
    )
