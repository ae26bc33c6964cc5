"""Trials: one method on one case from one prior, all seeds at once; each gives a row a seed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pcnet.simulate import Simulation
from studies.calibration.design import CASES, JUMP_DELAY, Case, Prior
from studies.calibration.measures import Array, Beliefs, covered, squared_error, worst
from studies.calibration.methods import GUESSING, METHODS
from studies.calibration.unscented import missing


class Trial(NamedTuple):
    case: str
    method: str
    prior: Prior | None


class Outcome(NamedTuple):
    """The rows of a trial, how long it took, beliefs about the parameters over time (seeds, T, p) at indices (T,) of
    observations; or why it was skipped."""

    trial: Trial
    rows: list[dict[str, Any]]
    seconds: float = 0.0
    at: Array | None = None
    theta: Array | None = None
    theta_sd: Array | None = None
    skipped: str | None = None


def trials(cases: Sequence[str]) -> list[Trial]:
    """All trials of these cases, the longest first."""
    found = []
    for name in cases:
        for method in CASES[name].methods:
            priors: tuple[Prior | None, ...] = CASES[name].priors if method in GUESSING else (None,)
            found += [Trial(name, method, prior) for prior in priors]
    return sorted(found, key=_weight, reverse=True)


def _weight(trial: Trial) -> float:
    """How long a trial takes compared with others, roughly."""
    smooth = CASES[trial.case].process.width > 0
    return {"pcnet": 10.0 if smooth else 2.0, "ekf noise as states": 15.0}.get(trial.method, 1.0)


def conduct(trial: Trial, world: Simulation, seeds: Sequence[int]) -> Outcome:
    """Conduct a trial on a realisation for each seed, on one thread.

    The world is given, not made here: of a chaotic process, rounding that differs between two programs makes two.
    """
    reason = missing() if trial.method.startswith("ukf") else None
    if reason is not None:
        return Outcome(trial, [], skipped=reason)
    torch.set_num_threads(1)
    case = CASES[trial.case]
    begun = time.perf_counter()
    beliefs = METHODS[trial.method](case, trial.prior or case.priors[0], world.observations)
    seconds = time.perf_counter() - begun
    rows = measure(case, world, beliefs)
    name = "" if trial.prior is None else trial.prior.name
    head = {"case": trial.case, "method": trial.method, "prior": name}
    rows = [{**head, "seed": seed, **row} for seed, row in zip(seeds, rows, strict=True)]
    return Outcome(trial, rows, seconds, beliefs.at, beliefs.theta, beliefs.theta_sd)


def measure(case: Case, world: Simulation, beliefs: Beliefs) -> list[dict[str, Any]]:
    """A row a seed: what the states were like in the second half of the time and in all of it, and the rest at the end.

    Of a run that diverged nothing is measured. Parameters of a model of another form have no truth.
    """
    samples = world.states.shape[1]
    half = beliefs.at >= samples // 2
    states = world.states.numpy()[:, beliefs.at]
    raw = (world.observations - case.process.look(world.states, world.states)).numpy()[:, samples // 2 :]
    columns = {
        "mse_whole": squared_error(beliefs.mean, states),
        "mse": squared_error(beliefs.mean[:, half], states[:, half]),
        "coverage_states": covered(beliefs.mean[:, half], beliefs.sd[:, half], states[:, half]),
        "raw": np.square(raw).mean(axis=(1, 2)),
        "precision_x": beliefs.precision_x,
        "precision_y": beliefs.precision_y,
    }
    if case.model.right:
        truth = np.array(case.process.jump or case.process.parameters)
        columns["error"] = worst(beliefs.theta[:, -1], truth)
        columns["coverage_parameters"] = covered(beliefs.theta[:, -1], beliefs.theta_sd[:, -1], truth)
        if case.process.jump is not None:
            later = np.searchsorted(beliefs.at, samples // 2 + JUMP_DELAY - 1).clip(max=len(beliefs.at) - 1)
            columns["error_later"] = worst(beliefs.theta[:, later], truth)
    for name, values in columns.items():
        if name != "raw":
            columns[name] = np.where(beliefs.lost, np.nan, values)
    rows = [dict(zip(columns, map(float, values), strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{**row, "lost": bool(lost)} for row, lost in zip(rows, beliefs.lost, strict=True)]
