"""Conducts the study: sweeps, re-runs what was selected, and hands the findings to figures, claims and report."""

from __future__ import annotations

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
from pcnet.results.result import Result, Trace
from pcnet.simulate import Simulation
from pcnet.sweeps.evaluate import built
from pcnet.sweeps.study import Study
from pcnet.sweeps.sweep import sweep
from pcnet.sweeps.workers import cores
from studies.paper import claims, figures, report
from studies.paper.design import GRIDS, Conventions, Data, GridName, build, worlds
from studies.paper.findings import MODELS, Cell, Findings, Speed, ratio_name
from studies.paper.judging import Claim
from studies.paper.report import Report

SLOW_NODES = ("theta", "lambda_x", "lambda_y")
THINNING = 50
"""Of slow beliefs, one in so many observations is kept."""
SAMPLE = 6
"""How many single runs are timed, for comparison."""
SAMPLE_LENGTH = 500


class Reproduction(NamedTuple):
    """The study with all that came of it."""

    study: Study
    findings: Findings
    claims: Sequence[Claim]
    report: Report


def reproduce(
    folder: str | Path,
    *,
    data: Data = "authors",
    grid: GridName = "paper",
    conventions: Conventions = "authors",
    seeds: int = 1,
    observations: int = 10_000,
    processes: int | None = None,
    scheduler: Any = None,
    memory: int | str = "2 GB",
    progress: bool | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Reproduction:
    """Run the paper's study and write its report into a folder; a study that was interrupted there is continued.

    data: the noise of the process. seeds: how many realisations of it. The rest as for `pcnet.sweep`.
    """
    if grid not in GRIDS:
        raise SettingError(f"there is no grid {grid!r}; choose {', '.join(GRIDS)}")
    if seeds < 1 or observations < 2 * THINNING:
        raise SettingError(f"seeds must be 1 or more, observations {2 * THINNING} or more")
    begun = time.perf_counter()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    realised = worlds(data, seeds, observations)
    make = partial(build, conventions=conventions)
    settings = int(np.prod([len(values) for values in GRIDS[grid].values()]))
    say(f"inverting {settings * seeds} models on {observations} observations each")
    study = sweep(
        make,
        GRIDS[grid],
        np.stack([world.observations.numpy() for world in realised]),
        folder / "study.db",
        truth={"x": np.stack([world.states.numpy() for world in realised])},
        processes=processes,
        scheduler=scheduler,
        memory=memory,
        progress=progress,
    )
    swept = time.perf_counter() - begun
    table = study.to_dataframe()
    winners = study.best(by=["model", "orders", "ratio", "replicate"])
    say(f"running the {len(winners)} selected ones again, with all that they believe")
    traces, slow = _selected(study, winners)
    single = _single_rate(make, table, realised[0])
    busy = min(swept, float(table["seconds"].sum()) / (processes or cores())) if _resumed(table, swept) else swept
    findings = Findings(
        data=data,
        grid=grid,
        conventions=conventions,
        worlds=realised,
        table=table,
        winners=winners.reset_index(drop=True),
        traces=traces,
        slow=slow,
        speed=Speed(
            seconds=0.0,
            inversions=len(table),
            observations=observations,
            rate=len(table) * observations / busy,
            single_rate=single,
            processes=processes or cores(),
            peak_memory=_peak_memory(processes or cores()),
        ),
    )
    say("drawing")
    pictures = figures.draw(findings, folder / "figures")
    findings = findings._replace(speed=findings.speed._replace(seconds=time.perf_counter() - begun))
    examined = claims.examine(findings)
    return Reproduction(study, findings, examined, report.write(findings, examined, pictures, folder))


def _resumed(table: pd.DataFrame, swept: float) -> bool:
    """Whether most of the inversions were done before, so that the time of this sweep says nothing of their speed."""
    return float(table["seconds"].sum()) > 2 * cores() * swept


def _selected(study: Study, winners: pd.DataFrame) -> tuple[Mapping[Cell, Result], Mapping[Cell, Result]]:
    """Everything about the winners of the first replicate, and the slow beliefs of all."""
    first, others = winners[winners["replicate"] == 0], winners[winners["replicate"] != 0]
    keys = zip(*(winners[name] for name in ("model", "orders", "ratio")), strict=True)
    cells = {int(number): Cell(*key) for number, key in zip(winners.index, keys, strict=True)}
    full = study.rerun(first, Record(quantities=("mean", "sd", "observation", "prediction", "energy")))
    thin = study.rerun(others, Record(quantities=("mean", "sd"), nodes=SLOW_NODES, every=THINNING))
    traces = {cells[number]: result for number, result in full.items()}
    thinned = {number: _thinned(result) for number, result in full.items()} | thin
    by_cell: dict[Cell, list[Result]] = {}
    for number, cell in cells.items():  # in the order of the replicates
        by_cell.setdefault(cell, []).append(thinned[number])
    return traces, {cell: _stacked(results) for cell, results in by_cell.items()}


def _thinned(result: Result) -> Result:
    """The slow beliefs of a full result, as if only they had been recorded, now and then."""
    kept = {f"{node}.{quantity}" for node in SLOW_NODES for quantity in ("mean", "sd")}
    later = slice(THINNING - 1, None, THINNING)
    traces = {key: Trace(trace.values[later], trace.dims) for key, trace in result.traces.items() if key in kept}
    return _like(result, traces, result.times[later], ())


def _stacked(results: Sequence[Result]) -> Result:
    """Results of the same model as one with a batch dimension; thinned alike."""
    first = results[0]
    traces = {
        key: Trace(np.stack([result.traces[key].values for result in results]), trace.dims)
        for key, trace in first.traces.items()
    }
    return _like(first, traces, first.times, (len(results),), np.array([r.free_action for r in results]))


def _like(
    result: Result,
    traces: Mapping[str, Trace],
    times: Any,
    batch_shape: tuple[int, ...],
    free_action: Any = None,
) -> Result:
    return Result(
        traces=traces,
        batch_shape=batch_shape,
        times=times,
        free_action=result.free_action if free_action is None else free_action,
        fallbacks={},
        observations=result.observations,
        roles=result.roles,
        summary=result.summary,
        schedule=result.schedule,
    )


def _single_rate(make: Callable[..., Any], table: pd.DataFrame, world: Simulation) -> float:
    """Observations a second in a loop of single runs, on a sample of the settings that is spread over the grid."""
    names = [name for name in GRIDS["paper"] if name in table]
    rows = table.iloc[np.linspace(0, len(table) - 1, SAMPLE).round().astype(int)]
    seen = world.observations[:SAMPLE_LENGTH]
    models = [built(make, {name: _plain(row[name]) for name in names}) for _, row in rows.iterrows()]
    begun = time.perf_counter()
    for model in models:
        model.graph.run(seen, model.schedule, record=(), on_divergence="stop", progress=False)
    return len(models) * len(seen) / (time.perf_counter() - begun)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _peak_memory(processes: int) -> int | None:
    """Bytes at most: this process at its peak, and every worker as much as the largest of them."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return int((own + (processes if processes > 1 else 0) * largest) * unit)


def conclude(done: Reproduction) -> str:
    """The outcome in a few lines, for a terminal."""
    findings, speed = done.findings, done.findings.speed
    lines = ["", "MSE of the inferred states, of the settings with the lowest free action:"]
    errors = findings.winners.groupby(["model", "orders", "ratio"])["x.mse"].mean()
    lines.append(f"{'C':>20}" + "".join(f"{ratio_name(ratio):>9}" for ratio in findings.ratios))
    for model in findings.models:
        for orders in findings.orders:
            cells = [errors.get((model, orders, ratio), np.nan) for ratio in findings.ratios]
            lines.append(f"{f'{MODELS[model]}, {orders} orders':>20}" + "".join(f"{value:>9.3g}" for value in cells))
    lines += [f"(raw observations {findings.raw_mse:.3g}, the states' own variance {findings.state_variance:.3g})", ""]
    verdicts = pd.Series([claim.verdict for claim in done.claims if claim.source == "paper"]).value_counts()
    lines.append("The paper's claims: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    lost = int(findings.table["diverged_at"].notna().sum())
    lines.append(f"Diverged: {lost} of {len(findings.table)} inversions")
    memory = "" if speed.peak_memory is None else f", at most {speed.peak_memory / 2**30:.2g} GiB"
    lines += [
        f"Took {speed.seconds:.0f} s with {speed.processes} processes{memory}: {speed.rate:,.0f} inversions × "
        f"observations a second, {speed.rate / speed.single_rate:.0f} times a loop of single runs "
        f"({speed.single_rate:,.0f})",
        f"Report: {done.report.html} and {done.report.markdown}",
    ]
    return "\n".join(lines)
