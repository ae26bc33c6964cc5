"""Conducts the study: all trials in processes of one thread each, then judgements, figures and the report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from pcnet.errors import SettingError, StudyError
from pcnet.simulate import Simulation
from pcnet.sweeps.workers import cores, follow_parent
from studies.calibration import figures, report
from studies.calibration.design import CASES, HELD_OUT
from studies.calibration.findings import Cell, Findings
from studies.calibration.judging import VERDICTS, Judgement, judge
from studies.calibration.report import Report
from studies.calibration.trials import Outcome, Trial, conduct, trials

LEAST = 200
"""Fewer observations leave too little to measure."""


class Calibration(NamedTuple):
    """The study with all that came of it."""

    findings: Findings
    judgements: Sequence[Judgement]
    report: Report


def calibrate(
    folder: str | Path,
    *,
    seeds: int = 100,
    samples: int = 10_000,
    cells: Sequence[str] = (),
    first_seed: int = HELD_OUT,
    processes: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Run the study and write its report into a folder.

    cells: names of cases, all of them unless given. first_seed: of the held-out seeds, unless something is tried out.
    """
    unknown = [name for name in cells if name not in CASES]
    if unknown:
        raise SettingError(f"there is no cell {unknown[0]!r}; cells: {', '.join(CASES)}")
    if seeds < 1 or samples < LEAST:
        raise SettingError(f"seeds must be 1 or more, samples {LEAST} or more")
    begun = time.perf_counter()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = tuple(range(first_seed, first_seed + seeds))
    planned = trials([name for name in CASES if name in cells or not cells])
    outcomes: dict[Cell, Outcome] = {}
    worlds = {name: CASES[name].process.realise(samples, chosen) for name in {trial.case for trial in planned}}
    for outcome in _conducted(planned, worlds, chosen, processes or cores()):
        cell = Cell(outcome.trial.case, outcome.trial.method, outcome.trial.prior.name if outcome.trial.prior else "")
        outcomes[cell] = outcome
        done = f"skipped, {outcome.skipped}" if outcome.skipped else f"{outcome.seconds:.0f} s"
        say(f"{len(outcomes)} of {len(planned)}: {CASES[cell.case].title}; {figures.cell_name(cell)}: {done}")
    findings = Findings(
        table=pd.DataFrame([row for outcome in outcomes.values() for row in outcome.rows]),
        outcomes=outcomes,
        samples=samples,
        seeds=chosen,
        held_out=first_seed >= HELD_OUT,
        seconds=time.perf_counter() - begun,
    )
    judgements = judge(findings)
    pictures = figures.draw(findings, folder / "figures")
    return Calibration(findings, judgements, report.write(findings, judgements, pictures, folder))


def _conducted(
    planned: Sequence[Trial], worlds: Mapping[str, Simulation], seeds: Sequence[int], processes: int
) -> Iterator[Outcome]:
    """Trials as they are done: here, or in several processes."""
    if processes == 1:
        yield from (conduct(trial, worlds[trial.case], seeds) for trial in planned)
        return
    from loky import ProcessPoolExecutor, as_completed
    from loky.process_executor import TerminatedWorkerError

    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    executor = ProcessPoolExecutor(
        max_workers=min(processes, len(planned)), env=one_thread, initializer=follow_parent, initargs=(os.getpid(),)
    )
    finished = False
    try:
        futures = [executor.submit(conduct, trial, worlds[trial.case], seeds) for trial in planned]
        for future in as_completed(futures):
            yield future.result()
        finished = True
    except TerminatedWorkerError as error:
        raise StudyError(
            "a worker process was killed, most likely because memory ran out; start again with fewer processes or seeds"
        ) from error
    finally:
        executor.shutdown(wait=True, kill_workers=not finished)


def conclude(done: Calibration) -> str:
    """The outcome in a few lines, for a terminal."""
    findings = done.findings
    lines = []
    for case in findings.cases:
        lines += ["", CASES[case].title]
        for cell in findings.cells(case):
            found = findings.summary(cell)
            lines.append(
                f"  {figures.cell_name(cell):<42} MSE {found.mse:<9.3g} error {found.error:<8.3g} covered "
                f"{100 * found.coverage_parameters.value:4.0f} / {100 * found.coverage_states.value:3.0f} %"
            )
    lines.append("")
    lines += [f"{each.case}: missed by {each.missed}: {each.target}" for each in done.judgements if each.missed]
    counts = {verdict: sum(each.verdict == verdict for each in done.judgements) for verdict in VERDICTS}
    lines.append("Targets: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    lines += [f"Skipped: {figures.cell_name(cell)}, {why}" for cell, why in findings.skipped.items()]
    lines += [f"Took {findings.seconds / 60:.1f} min", f"Report: {done.report.html} and {done.report.markdown}"]
    return "\n".join(lines)
