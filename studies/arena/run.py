"""Runs the arena within a limit of time: cells that a former run finished are read, not run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pcnet.errors import SettingError
from pcnet.sweeps.workers import cores, process_pool
from studies.arena.cells import Cell, list_cells, list_jobs, run_job
from studies.arena.costs import measure_costs
from studies.arena.lynx import measure_forecasts
from studies.arena.methods import METHODS
from studies.arena.report import Extras, Report, write
from studies.arena.spm import compare
from studies.arena.tasks import TASKS

REPORTED = 60_000
"""First seed of reports. Nothing may be chosen with seeds from here on."""
DEVELOPMENT = 3_000
"""First seed for everything else."""


def run_arena(
    folder: str | Path,
    *,
    seeds: int = 20,
    tasks: Sequence[str] = (),
    methods: Sequence[str] = (),
    first_seed: int = REPORTED,
    minutes: float = 19.0,
    processes: int | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run cells that have no file yet, until the time is over, and write report.md, report.html and cells.csv.

    Args:
        folder: Where to write.
        seeds: Number of realisations of each task.
        tasks: Names of tasks; all by default.
        methods: Names of methods; all by default.
        first_seed: First seed; those of reports by default.
        minutes: No cell starts after so many minutes.
        processes: Number of processes; the number of cores by default.
        log: Called with messages about the progress.
    """
    for kind, names, known in (("task", tasks, TASKS), ("method", methods, METHODS)):
        for name in names:
            if name not in known:
                raise SettingError(f"there is no {kind} {name!r}; {kind}s: {', '.join(known)}")
    folder, deadline = Path(folder), time.time() + 60 * minutes
    chosen = range(first_seed, first_seed + seeds)
    cells = list_cells([name for name in TASKS if name in tasks or not tasks], list(methods) or list(METHODS))
    folder.mkdir(parents=True, exist_ok=True)
    extras = Extras()
    if not tasks and not methods and minutes > 0:
        log("costs of packages")  # with nothing beside them, because their times are those of a clock
        extras = Extras(measure_costs(folder, DEVELOPMENT))
    waiting = [cell for cell in cells if cell.read(folder, chosen) is None]
    log(f"{len(cells)} cells, {len(cells) - len(waiting)} of them done before")
    jobs, done = list_jobs(waiting), 0

    def tell(job: Sequence[Cell], there: Sequence[bool]) -> None:
        nonlocal done
        for cell, finished in zip(job, there, strict=True):
            done += 1
            state = "" if finished else " (no time left)"
            title = METHODS[cell.method].title
            log(f"{done} of {len(waiting)}: {cell.task}, {title}, told {cell.information}{state}")

    if (processes or cores()) == 1:
        if extras.costs:
            extras = extras._replace(lynx=measure_forecasts(folder), spm=compare())
        for job in jobs:
            tell(job, run_job(job, chosen, folder, deadline))
    else:
        from loky import as_completed

        with process_pool(processes or cores()) as pool:
            if extras.costs:
                lynx, spm = pool.submit(measure_forecasts, folder), pool.submit(compare)
            futures = {pool.submit(run_job, job, chosen, folder, deadline): job for job in jobs}
            for future in as_completed(futures):
                tell(futures[future], future.result())
            if extras.costs:
                extras = extras._replace(lynx=lynx.result(), spm=spm.result())
    return write(cells, chosen, folder, extras)
