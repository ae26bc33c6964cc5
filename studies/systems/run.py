"""Runs the study: all trials of each system, then the tables and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from pcnet.errors import SettingError
from pcnet.sweeps.workers import cores, process_pool
from studies.systems.design import HELD_OUT, SYSTEMS
from studies.systems.report import Report, write
from studies.systems.trials import list_trials, run_trial


def run_system(name: str, seeds: Sequence[int], ablations: bool) -> pd.DataFrame:
    """All trials of a system, one row per trial and seed."""
    rows = [row for trial in list_trials([name], ablations) for row in run_trial(trial, seeds)]
    return pd.DataFrame(rows)


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
    found: dict[str, pd.DataFrame] = {}
    if (processes or cores()) == 1:
        for name in names:
            found[name] = run_system(name, chosen, ablations)
            log(f"{len(found)} of {len(names)}: {SYSTEMS[name].title}")
    else:
        from loky import as_completed

        with process_pool(min(processes or cores(), len(names))) as pool:
            futures = {pool.submit(run_system, name, chosen, ablations): name for name in names}
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                log(f"{len(found)} of {len(names)}: {SYSTEMS[futures[future]].title}")
    table = pd.concat([found[name] for name in names], ignore_index=True)
    return write(table, Path(folder), time.perf_counter() - started)
