"""Runs the calibration study: all trials in parallel, then targets, figures and report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from pcnet.errors import SettingError
from pcnet.simulate import Simulation
from pcnet.sweeps.workers import cores, process_pool
from studies.calibration import figures, report
from studies.calibration.design import CASES, HELD_OUT
from studies.calibration.report import Report
from studies.calibration.results import Cell, StudyResults
from studies.calibration.targets import VERDICTS, Judgement, judge
from studies.calibration.trials import Trial, TrialResult, list_trials, run_trial

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
    """Run the study and write its report into a folder.

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
    simulations = {name: CASES[name].process.simulate(samples, chosen) for name in {trial.case for trial in trials}}
    done: dict[Cell, TrialResult] = {}
    for result in _run_trials(trials, simulations, chosen, processes or cores()):
        cell = Cell(result.trial.case, result.trial.method, result.trial.prior.name if result.trial.prior else "")
        done[cell] = result
        outcome = f"skipped, {result.skipped}" if result.skipped else f"{result.seconds:.0f} s"
        log(f"{len(done)} of {len(trials)}: {CASES[cell.case].title}; {cell.label}: {outcome}")
    results = StudyResults(
        table=pd.DataFrame([row for result in done.values() for row in result.rows]),
        trials=done,
        samples=samples,
        seeds=chosen,
        held_out=first_seed >= HELD_OUT,
        seconds=time.perf_counter() - started,
    )
    judgements = judge(results)
    pictures = figures.draw(results, folder / "figures")
    return Calibration(results, judgements, report.write(results, judgements, pictures, folder))


def _run_trials(
    trials: Sequence[Trial], simulations: Mapping[str, Simulation], seeds: Sequence[int], processes: int
) -> Iterator[TrialResult]:
    """Results of trials as they are finished, computed in this process or in several."""
    if processes == 1:
        yield from (run_trial(trial, simulations[trial.case], seeds) for trial in trials)
        return
    from loky import as_completed

    with process_pool(min(processes, len(trials))) as pool:
        for future in as_completed([pool.submit(run_trial, trial, simulations[trial.case], seeds) for trial in trials]):
            yield future.result()


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
    lines += [f"Duration: {results.seconds / 60:.1f} min", f"Report: {done.report.html} and {done.report.markdown}"]
    return "\n".join(lines)
