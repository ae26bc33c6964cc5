"""Runs the study: all trials of each system, then the tables and the report.

What a trial has found is kept in the folder, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pcnet.errors import SettingError, StudyError
from pcnet.sweeps.workers import cores
from studies.kept import run_jobs
from studies.systems.design import HELD_OUT, SYSTEMS
from studies.systems.report import Report, write
from studies.systems.trials import Trial, job_of, list_trials


def run_study(
    folder: str | Path,
    *,
    seeds: int = 20,
    systems: Sequence[str] = (),
    ablations: bool = False,
    first_seed: int = HELD_OUT,
    processes: int | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run the study and write trials.csv, cells.csv and report.md into a folder.

    Trials that a former run has kept there are not run again; those that raise an error are named in the report.

    Args:
        folder: Where to write.
        seeds: Number of realisations of each system.
        systems: Names of systems; all by default.
        ablations: Whether variants of the filter without one of its parts are run too.
        first_seed: First seed; the held-out seeds by default.
        processes: Number of processes; the number of cores by default.
        log: Called with messages about the progress.
    """
    unknown = [name for name in systems if name not in SYSTEMS]
    if unknown:
        raise SettingError(f"there is no system {unknown[0]!r}; systems: {', '.join(SYSTEMS)}")
    started = time.perf_counter()
    chosen = tuple(range(first_seed, first_seed + seeds))
    names = [name for name in SYSTEMS if name in systems or not systems]
    trials = [trial for name in names for trial in list_trials([name], ablations)]
    jobs = {job_of(trial, chosen): trial for trial in trials}
    groups = [[job for job, trial in jobs.items() if trial.system == name] for name in names]
    left = {name: len(group) for name, group in zip(names, groups, strict=True)}
    done, failed = dict[Trial, list[dict[str, Any]]](), dict[str, str]()
    for outcome in run_jobs(groups, Path(folder) / "trials", processes or cores()):
        trial = jobs[outcome.job]
        if outcome.error is None:
            done[trial] = outcome.result
        else:
            failed[trial.name] = outcome.error
            log(f"{trial.name}: failed, {outcome.error}")
        left[trial.system] -= 1
        if not left[trial.system]:
            over = sum(not count for count in left.values())
            log(f"{over} of {len(names)}: {SYSTEMS[trial.system].title}")
    rows = [row for trial in trials for row in done.get(trial, ())]
    if not rows:
        raise StudyError("; ".join(["no trial has succeeded", *dict.fromkeys(failed.values())]))
    return write(pd.DataFrame(rows), Path(folder), time.perf_counter() - started, failed)
