"""Trials: one method on one case from one prior, for all seeds at once."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pcnet.simulate import Simulation
from studies.calibration.design import CASES, JUMP_DELAY, Case, Prior
from studies.calibration.measures import Array, Beliefs, coverage, largest_error, mean_squared_error
from studies.calibration.methods import LEARN_NOISE, METHODS
from studies.calibration.unscented import PACKAGES, why_unavailable
from studies.kept import Job, key_of

SPREAD = (0.05, 0.5, 0.95)
"""Quantiles over the seeds that are kept of the first parameter."""
AFTERWARDS = ("__init__", "__main__", "figures", "report", "results", "run", "targets")
"""Modules that what a trial finds does not depend on."""
SECONDS: Mapping[str, float] = {"ekf noise as states": 19.0, "ukf": 6.0, "ukf matched": 6.0, "ekf": 5.0, "paper": 1.0}
OURS: Mapping[str, float] = {"smooth50": 45.0, "smooth5": 40.0, "lorenz-smooth5": 50.0, "jump-smooth5": 40.0}
"""CPU time of whole trials, by method, and of pcnet by case; about 5 where it is not given."""


class Trial(NamedTuple):
    case: str
    method: str
    prior: Prior | None

    @property
    def name(self) -> str:
        return f"{self.case}, {self.method}" + (f", prior {self.prior.name}" if self.prior else "")

    @property
    def skipped(self) -> str | None:
        """Why it cannot be run, or None."""
        return why_unavailable() if self.method.startswith("ukf") else None


class TrialResult(NamedTuple):
    """Result of a trial: one row per seed, and its CPU time; or why the trial was skipped.

    Attributes:
        at: Indices (T,) of observations.
        spread: Quantiles SPREAD over the seeds of the mean of the first parameter at these, (3, T).
    """

    trial: Trial
    rows: list[dict[str, Any]]
    seconds: float = 0.0
    at: Array | None = None
    spread: Array | None = None
    skipped: str | None = None

    def data(self) -> dict[str, Any]:
        """What is kept of it, as data for JSON."""
        assert self.at is not None
        assert self.spread is not None
        return {"rows": self.rows, "seconds": self.seconds, "at": self.at.tolist(), "spread": self.spread.tolist()}

    @classmethod
    def of(cls, trial: Trial, data: Mapping[str, Any]) -> TrialResult:
        """A result from what was kept of it."""
        return cls(trial, data["rows"], data["seconds"], np.array(data["at"]), np.array(data["spread"]))


def list_trials(cases: Sequence[str]) -> list[Trial]:
    """All trials of some cases, the longest first."""
    trials = []
    for name in cases:
        for method in CASES[name].methods:
            priors: tuple[Prior | None, ...] = CASES[name].priors if method in LEARN_NOISE else (None,)
            trials += [Trial(name, method, prior) for prior in priors]
    return sorted(trials, key=_seconds, reverse=True)


def _seconds(trial: Trial) -> float:
    return OURS.get(trial.case, 5.0) if trial.method == "pcnet" else SECONDS.get(trial.method, 5.0)


def run_trial(trial: Trial, simulation: Simulation, seeds: Sequence[int]) -> TrialResult:
    """Run a trial on one thread."""
    if trial.skipped is not None:
        return TrialResult(trial, [], skipped=trial.skipped)
    torch.set_num_threads(1)
    case = CASES[trial.case]
    started = time.process_time()
    beliefs = METHODS[trial.method](case, trial.prior or case.priors[0], simulation.observations)
    seconds = time.process_time() - started
    name = "" if trial.prior is None else trial.prior.name
    head = {"case": trial.case, "method": trial.method, "prior": name}
    scores = score(case, simulation, beliefs)
    rows = [{**head, "seed": seed, **row} for seed, row in zip(seeds, scores, strict=True)]
    with np.errstate(invalid="ignore"):
        spread = np.nanquantile(beliefs.theta[..., 0], SPREAD, axis=0)
    return TrialResult(trial, rows, seconds, beliefs.at, spread)


def job_of(trial: Trial, samples: int, seeds: Sequence[int]) -> Job:
    """A trial as a job whose result is kept. Its data follow from seeds, samples, the code and the version of torch."""
    files = (path for path in Path(__file__).parent.glob("*.py") if path.stem not in AFTERWARDS)
    packages = ("torch", "numpy", *(PACKAGES if trial.method.startswith("ukf") else ()))
    name = f"{trial.name}, {len(seeds)} seeds from {seeds[0]}, {samples} samples"
    return Job(name, key_of(files, packages, trial, samples, tuple(seeds)), _data_of, (trial, samples, tuple(seeds)))


def _data_of(trial: Trial, samples: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    return run_trial(trial, _simulated(trial.case, samples, seeds), seeds).data()


@functools.lru_cache(maxsize=2)
def _simulated(case: str, samples: int, seeds: tuple[int, ...]) -> Simulation:
    return CASES[case].process.simulate(samples, seeds)


def score(case: Case, simulation: Simulation, beliefs: Beliefs) -> list[dict[str, Any]]:
    """Scores of each seed; see `StudyResults.table`. Scores of diverged runs are NaN."""
    samples = simulation.states.shape[1]
    half = beliefs.at >= samples // 2
    states = simulation.states.numpy()[:, beliefs.at]
    noise = (simulation.observations - case.process.observe(simulation.states)).numpy()[:, samples // 2 :]
    columns = {
        "mse_whole": mean_squared_error(beliefs.mean, states),
        "mse": mean_squared_error(beliefs.mean[:, half], states[:, half]),
        "coverage_states": coverage(beliefs.mean[:, half], beliefs.sd[:, half], states[:, half]),
        "raw": np.square(noise).mean(axis=(1, 2)),
        "precision_x": beliefs.precision_x,
        "precision_y": beliefs.precision_y,
    }
    if case.model.right:  # parameters of a wrong model have no true values
        truth = np.array(case.process.jump or case.process.parameters)
        columns["error"] = largest_error(beliefs.theta[:, -1], truth)
        columns["coverage_parameters"] = coverage(beliefs.theta[:, -1], beliefs.theta_sd[:, -1], truth)
        if case.process.jump is not None:
            later = np.searchsorted(beliefs.at, samples // 2 + JUMP_DELAY - 1).clip(max=len(beliefs.at) - 1)
            columns["error_later"] = largest_error(beliefs.theta[:, later], truth)
    for name, values in columns.items():
        if name != "raw":
            columns[name] = np.where(beliefs.diverged, np.nan, values)
    rows = [dict(zip(columns, map(float, values), strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{**row, "diverged": bool(diverged)} for row, diverged in zip(rows, beliefs.diverged, strict=True)]
