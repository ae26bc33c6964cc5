"""Results of the calibration study: one row per method, case, prior and seed, and summaries of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from studies.calibration.design import CASES, PRIORS
from studies.calibration.measures import Share, wilson
from studies.calibration.methods import NAMES
from studies.calibration.trials import TrialResult

NEAR_Y, NEAR_X = (0.8, 1.2), (0.5, 2.0)
"""Acceptable range of the learned precision over the true one, of observations and of states."""
NEAR_JUMP = 0.02
"""Acceptable error of the parameters after a jump."""


class Cell(NamedTuple):
    """A method on a case from a prior; the prior is "" for methods that are given the noise."""

    case: str
    method: str
    prior: str

    @property
    def label(self) -> str:
        """Method, and the prior that it starts from."""
        short = NAMES[self.method].replace("extended Kalman filter", "EKF").replace("unscented Kalman filter", "UKF")
        return f"{short}, prior {self.prior}" if self.prior else short


class Summary(NamedTuple):
    """Summary of a cell: means over the seeds that did not diverge; `near_*` and `followed` are shares of all seeds.

    The intervals of coverages assume one trial per seed, because the parameters of a seed, or its states at many times,
    are not independent.
    """

    seeds: int
    diverged: int
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


class StudyResults(NamedTuple):
    """All results of the study.

    Attributes:
        table: One row per cell and seed. Columns: case, method, prior, seed; mse (of the states in the second half of
            the time), mse_whole (in all of it), raw (of the observations, second half), error (largest of the
            parameters, at the end), error_later (2,000 observations after a jump), coverage_states and
            coverage_parameters, precision_x and precision_y (final, over the true ones), diverged.
        trials: Result of the trial of each cell.
        samples: Observations per seed.
        seeds: The seeds.
        held_out: Whether these are the held-out seeds.
        seconds: Duration of this run of the study.
        kept: Number of cells that former runs have measured.
        failed: Errors of cells that raised one.
    """

    table: pd.DataFrame
    trials: Mapping[Cell, TrialResult]
    samples: int
    seeds: tuple[int, ...]
    held_out: bool
    seconds: float
    kept: int
    failed: Mapping[Cell, str]

    @property
    def cases(self) -> list[str]:
        present = set(self.table["case"])
        return [name for name in CASES if name in present]

    @property
    def skipped(self) -> dict[Cell, str]:
        """Skipped cells and why."""
        return {cell: result.skipped for cell, result in self.trials.items() if result.skipped is not None}

    def cells(self, case: str) -> list[Cell]:
        """Cells of a case in the order of its methods and priors, without skipped ones."""
        priors = {prior.name: i for i, prior in enumerate(PRIORS)}
        own = [cell for cell, result in self.trials.items() if cell.case == case and result.skipped is None]
        return sorted(own, key=lambda cell: (CASES[case].methods.index(cell.method), priors.get(cell.prior, -1)))

    def rows(self, cell: Cell) -> pd.DataFrame:
        """Rows of a cell, one per seed."""
        table = self.table
        return table[(table["case"] == cell.case) & (table["method"] == cell.method) & (table["prior"] == cell.prior)]

    def summary(self, cell: Cell) -> Summary:
        return summarise(self.rows(cell))


def summarise(rows: pd.DataFrame) -> Summary:
    """Summary of the rows of a cell."""
    count, diverged = len(rows), int(rows["diverged"].sum())

    def column(name: str) -> pd.Series[float]:
        return rows[name] if name in rows else pd.Series(np.nan, rows.index)

    def share_between(name: str, low: float, high: float) -> Share:
        values = column(name)
        return wilson(float(values.between(low, high).mean()), count) if values.notna().any() else wilson(np.nan, 0)

    return Summary(
        seeds=count,
        diverged=diverged,
        mse=float(column("mse").mean()),
        mse_whole=float(column("mse_whole").mean()),
        raw=float(column("raw").mean()),
        error=float(column("error").mean()),
        coverage_parameters=wilson(float(column("coverage_parameters").mean()), count - diverged),
        coverage_states=wilson(float(column("coverage_states").mean()), count - diverged),
        near_y=share_between("precision_y", *NEAR_Y),
        near_x=share_between("precision_x", *NEAR_X),
        precision_y=float(column("precision_y").median()),
        precision_x=float(column("precision_x").median()),
        followed=share_between("error_later", -np.inf, NEAR_JUMP),
    )
