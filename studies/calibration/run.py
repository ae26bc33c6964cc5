"""Runs the calibration study: all trials in parallel, then targets, figures and report.

What a trial has found is kept in the folder, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from pcnet.errors import SettingError, StudyError
from pcnet.sweeps.workers import cores
from studies.calibration import figures, report
from studies.calibration.design import CASES, HELD_OUT
from studies.calibration.report import Report, duration
from studies.calibration.results import Cell, StudyResults
from studies.calibration.targets import VERDICTS, Judgement, judge
from studies.calibration.trials import Trial, TrialResult, job_of, list_trials
from studies.kept import Job, run_jobs

MIN_SAMPLES = 200


class Calibration(NamedTuple):
    """The study and everything derived from it."""

    results: StudyResults
    judgements: Sequence[Judgement]
    report: Report


def calibrate(
    folder: str | Path,
    *,
    seeds: int = 100,
    samples: int = 10_000,
    cases: Sequence[str] = (),
    first_seed: int = HELD_OUT,
    processes: int | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Run the study and write its report into a folder; cells that a former run has kept there are not run again.

    Args:
        seeds: Number of realisations of each process.
        samples: Observations per realisation.
        cases: Names of cases; all by default.
        first_seed: First seed; the held-out seeds by default.
        processes: Number of processes; the number of cores by default.
        log: Called with messages about the progress.
    """
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise SettingError(f"there is no case {unknown[0]!r}; cases: {', '.join(CASES)}")
    if seeds < 1 or samples < MIN_SAMPLES:
        raise SettingError(f"seeds must be 1 or more, samples {MIN_SAMPLES} or more")
    started = time.perf_counter()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = tuple(range(first_seed, first_seed + seeds))
    trials = list_trials([name for name in CASES if name in cases or not cases])
    done: dict[Cell, TrialResult] = {}
    failed: dict[Cell, str] = {}
    kept = 0

    def tell(cell: Cell, outcome: str) -> None:
        log(f"{len(done) + len(failed)} of {len(trials)}: {CASES[cell.case].title}; {cell.label}: {outcome}")

    jobs: dict[Job, Trial] = {}
    for trial in trials:
        if trial.skipped is None:
            jobs[job_of(trial, samples, chosen)] = trial
        else:
            done[cell_of(trial)] = TrialResult(trial, [], skipped=trial.skipped)
            tell(cell_of(trial), f"skipped, {trial.skipped}")
    for outcome in run_jobs([[job] for job in jobs], folder / "cells", processes or cores()):
        trial = jobs[outcome.job]
        cell = cell_of(trial)
        if outcome.error is not None:
            failed[cell] = outcome.error
            tell(cell, f"failed, {outcome.error}")
            continue
        done[cell] = TrialResult.of(trial, outcome.result)
        kept += outcome.kept
        tell(cell, "done before" if outcome.kept else f"{done[cell].seconds:.0f} s")
    done = {cell: done[cell] for cell in map(cell_of, trials) if cell in done}  # in an order that is always the same
    rows = [row for result in done.values() for row in result.rows]
    if not rows:
        raise StudyError("; ".join(["no trial has succeeded", *dict.fromkeys(failed.values())]))
    results = StudyResults(
        table=pd.DataFrame(rows),
        trials=done,
        samples=samples,
        seeds=chosen,
        held_out=first_seed >= HELD_OUT,
        seconds=time.perf_counter() - started,
        kept=kept,
        failed=failed,
    )
    judgements = judge(results)
    pictures = figures.draw(results, folder / "figures")
    return Calibration(results, judgements, report.write(results, judgements, pictures, folder))


def cell_of(trial: Trial) -> Cell:
    """The cell that a trial measures."""
    return Cell(trial.case, trial.method, trial.prior.name if trial.prior else "")


def conclude(done: Calibration) -> str:
    """Summary of the study for a terminal."""
    results, lines = done.results, list[str]()
    for case in results.cases:
        lines += ["", CASES[case].title]
        for cell in results.cells(case):
            summary = results.summary(cell)
            lines.append(
                f"  {cell.label:<42} MSE {summary.mse:<9.3g} error {summary.error:<8.3g} "
                f"coverage {100 * summary.coverage_parameters.value:4.0f} / "
                f"{100 * summary.coverage_states.value:3.0f} %"
            )
    lines.append("")
    lines += [f"{each.case}: missed by {each.missed}: {each.target}" for each in done.judgements if each.missed]
    counts = {verdict: sum(each.verdict == verdict for each in done.judgements) for verdict in VERDICTS}
    lines.append("Targets: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    lines += [f"Skipped: {cell.label}, {why}" for cell, why in results.skipped.items()]
    lines += [f"Failed: {CASES[cell.case].title}; {cell.label}: {why}" for cell, why in results.failed.items()]
    lines += [f"Duration: {duration(results)}", f"Report: {done.report.html} and {done.report.markdown}"]
    return "\n".join(lines)
