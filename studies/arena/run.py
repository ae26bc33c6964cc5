"""Runs the arena within a limit of time: cells that a former run finished are read, not run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pcnet.errors import SettingError
from pcnet.sweeps.workers import cores, process_pool
from studies.arena.cells import list_cells, run_cell
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
        log("costs of packages, the lynx and hare record, SPM's data")
        extras = Extras(measure_costs(folder, DEVELOPMENT), measure_forecasts(folder), compare())
    waiting = [cell for cell in cells if cell.read(folder, chosen) is None]
    log(f"{len(cells)} cells, {len(cells) - len(waiting)} of them done before")
    if (processes or cores()) == 1:
        for done, cell in enumerate(waiting, 1):
            run_cell(cell, chosen, folder, deadline)
            log(f"{done} of {len(waiting)}: {cell.task}, {METHODS[cell.method].title}, told {cell.information}")
    else:
        from loky import as_completed

        with process_pool(processes or cores()) as pool:
            futures = {pool.submit(run_cell, cell, chosen, folder, deadline): cell for cell in waiting}
            for done, future in enumerate(as_completed(futures), 1):
                cell, there = futures[future], future.result()
                state = "" if there else " (no time left)"
                log(f"{done} of {len(waiting)}: {cell.task}, {cell.method}, told {cell.information}{state}")
    return write(cells, chosen, folder, extras)
