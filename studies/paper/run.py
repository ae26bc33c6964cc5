"""Runs the paper's study: the sweep, full runs of the selected settings, claims, figures and report."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pcnet.errors import SettingError
from pcnet.results.recorder import Record
from pcnet.results.result import Divergence, Result, Trace
from pcnet.simulate import Simulation
from pcnet.sweeps.evaluate import build_model
from pcnet.sweeps.study import Study
from pcnet.sweeps.sweep import sweep
from pcnet.sweeps.workers import cores
from studies.paper import claims, figures, report
from studies.paper.checks import Claim
from studies.paper.design import GRIDS, MODELS, Cell, Conventions, DataName, GridName, build, ratio_name, realisations
from studies.paper.report import Report
from studies.paper.results import Speed, StudyResults

SLOW_NODES = ("theta", "lambda_x", "lambda_y")
EVERY = 50
"""Slow beliefs are kept at every EVERY-th observation."""
TIMED_RUNS, TIMED_OBSERVATIONS = 6, 500
"""Number and length of the single runs that are timed for comparison."""


class Reproduction(NamedTuple):
    """The study and everything derived from it."""

    study: Study
    results: StudyResults
    claims: Sequence[Claim]
    report: Report


def reproduce(
    folder: str | Path,
    *,
    data: DataName = "authors",
    grid: GridName = "paper",
    conventions: Conventions = "authors",
    seeds: int = 1,
    observations: int = 10_000,
    processes: int | None = None,
    scheduler: Any = None,
    memory: int | str = "2 GB",
    progress: bool | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Reproduction:
    """Run the paper's study and write its report into a folder; an interrupted study is continued.

    Args:
        data: Noise of the process.
        seeds: Number of realisations.
        observations: Observations per realisation.
        processes, scheduler, memory, progress: As for `pcnet.sweep`.
        log: Called with messages about the progress.
    """
    if grid not in GRIDS:
        raise SettingError(f"there is no grid {grid!r}; choose {', '.join(GRIDS)}")
    if seeds < 1 or observations < 4 * EVERY:
        raise SettingError(f"seeds must be 1 or more, observations {4 * EVERY} or more")
    started = time.perf_counter()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    processes = processes or cores()
    simulated = realisations(data, seeds, observations)
    build_setting = partial(build, conventions=conventions)
    settings = int(np.prod([len(values) for values in GRIDS[grid].values()]))
    log(f"inverting {settings * seeds} models with {observations} observations each")
    study = sweep(
        build_setting,
        GRIDS[grid],
        np.stack([each.observations.numpy() for each in simulated]),
        folder / "study.db",
        truth={"x": np.stack([each.states.numpy() for each in simulated])},
        processes=processes,
        scheduler=scheduler,
        memory=memory,
        progress=progress,
    )
    sweep_seconds = time.perf_counter() - started
    table = study.to_dataframe()
    winners = study.best(by=["model", "orders", "ratio", "replicate"])
    log(f"running the {len(winners)} selected models again with full recording")
    traces, slow = _run_winners(study, winners)
    speed = Speed(
        seconds=0.0,
        inversions=len(table),
        observations=observations,
        rate=len(table) * observations / _sweep_duration(table, sweep_seconds, processes),
        single_rate=_single_rate(build_setting, table, simulated[0]),
        processes=processes,
        peak_memory=_peak_memory(processes),
    )
    results = StudyResults(
        data, grid, conventions, simulated, table, winners.reset_index(drop=True), traces, slow, speed
    )
    log("drawing the figures")
    pictures = figures.draw(results, folder / "figures")
    results = results._replace(speed=speed._replace(seconds=time.perf_counter() - started))
    tested = claims.examine(results)
    return Reproduction(study, results, tested, report.write(results, tested, pictures, folder))


def _sweep_duration(table: pd.DataFrame, seconds: float, processes: int) -> float:
    """Seconds of the whole sweep; estimated if most inversions were computed by an earlier, interrupted call."""
    total = float(table["seconds"].sum())
    continued = total > 2 * cores() * seconds
    return min(seconds, total / processes) if continued else seconds


def _run_winners(study: Study, winners: pd.DataFrame) -> tuple[Mapping[Cell, Result], Mapping[Cell, Result]]:
    """Full results of the winners of the first replicate, and slow beliefs of the winners of all replicates."""
    first, others = winners[winners["replicate"] == 0], winners[winners["replicate"] != 0]
    keys = zip(*(winners[name] for name in ("model", "orders", "ratio")), strict=True)
    cells = {int(number): Cell(*key) for number, key in zip(winners.index, keys, strict=True)}
    full = study.rerun(first, Record(quantities=("mean", "sd", "observation", "prediction", "energy")))
    rest = study.rerun(others, Record(quantities=("mean", "sd"), nodes=SLOW_NODES, every=EVERY))
    downsampled = {number: _downsampled(result) for number, result in full.items()} | rest
    by_cell: dict[Cell, list[Result]] = {}
    for number, cell in cells.items():  # in the order of the replicates
        by_cell.setdefault(cell, []).append(downsampled[number])
    slow = {cell: _stacked(results) for cell, results in by_cell.items()}
    return {cells[number]: result for number, result in full.items()}, slow


def _downsampled(result: Result) -> Result:
    """Slow beliefs of a full result at every EVERY-th observation."""
    kept = {f"{node}.{quantity}" for node in SLOW_NODES for quantity in ("mean", "sd")}
    which = slice(EVERY - 1, None, EVERY)
    traces = {key: Trace(trace.values[which], trace.dims) for key, trace in result.traces.items() if key in kept}
    return dataclasses.replace(result, traces=traces, times=result.times[which])


def _stacked(results: Sequence[Result]) -> Result:
    """Results of the same model as one result with a batch dimension."""
    first, batch = results[0], (len(results),)
    traces = {
        key: Trace(np.stack([result.traces[key].values for result in results]), trace.dims)
        for key, trace in first.traces.items()
    }
    diverged = Divergence(*(np.stack(parts) for parts in zip(*(result.diverged for result in results), strict=True)))
    action = np.array([result.free_action for result in results])
    return dataclasses.replace(
        first, traces=traces, batch_shape=batch, free_action=action, fallbacks={}, diverged=diverged
    )


def _single_rate(build_setting: Callable[..., Any], table: pd.DataFrame, simulated: Simulation) -> float:
    """Observations per second of single runs, on settings spread over the grid."""
    names = [name for name in GRIDS["paper"] if name in table]
    chosen = np.linspace(0, len(table) - 1, TIMED_RUNS).round().astype(int)
    settings = [dict(zip(names, row, strict=True)) for row in table[names].iloc[chosen].astype(object).to_numpy()]
    models = [build_model(build_setting, each) for each in settings]
    observations = simulated.observations[:TIMED_OBSERVATIONS]
    started = time.perf_counter()
    for model in models:
        model.run(observations, record=(), on_divergence="stop", screen=False, progress=False)
    return len(models) * len(observations) / (time.perf_counter() - started)


def _peak_memory(processes: int) -> int | None:
    """Upper bound in bytes: the peak of this process, plus that of the largest worker for each worker."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return int((own + (processes if processes > 1 else 0) * largest) * unit)


def conclude(done: Reproduction) -> str:
    """Summary of the study for a terminal."""
    results, speed = done.results, done.results.speed
    lines = ["", "MSE of the inferred states, of the settings with the lowest free action:"]
    errors = results.winners.groupby(["model", "orders", "ratio"])["x.mse"].mean()
    lines.append(f"{'C':>20}" + "".join(f"{ratio_name(ratio):>9}" for ratio in results.ratios))
    for model in results.models:
        for orders in results.orders:
            row = [errors.get((model, orders, ratio), np.nan) for ratio in results.ratios]
            lines.append(f"{f'{MODELS[model]}, {orders} orders':>20}" + "".join(f"{value:>9.3g}" for value in row))
    lines += [f"(raw observations {results.raw_mse:.3g}, variance of the states {results.state_variance:.3g})", ""]
    verdicts = pd.Series([claim.verdict for claim in done.claims if claim.source == "paper"]).value_counts()
    lines.append("Claims of the paper: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    diverged = int(results.table["diverged_at"].notna().sum())
    lines.append(f"Diverged: {diverged} of {len(results.table)} inversions")
    memory = "" if speed.peak_memory is None else f", at most {speed.peak_memory / 2**30:.2g} GiB"
    lines += [
        f"Duration: {speed.seconds:.0f} s with {speed.processes} processes{memory}; {speed.rate:,.0f} inversions × "
        f"observations per second, {speed.rate / speed.single_rate:.0f} times a loop of single runs "
        f"({speed.single_rate:,.0f})",
        f"Report: {done.report.html} and {done.report.markdown}",
    ]
    return "\n".join(lines)
