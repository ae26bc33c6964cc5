"""The report of the arena as Markdown and HTML: losses of pcnet first, then verdicts, then all figures."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from studies.arena.cells import LIMIT, Cell
from studies.arena.methods import METHODS
from studies.arena.tasks import TASKS
from studies.arena.verdicts import NEAR, judge, losses
from studies.reporting import number, render_html, table, write_files

COLUMNS = {
    "neither": "told neither noise nor parameters",
    "parameters": "told the parameters, not the noise",
    "noise": "told the noise, not the parameters",
    "everything": "told everything",
}
ABOUT = f"""\
Errors of states are roots of mean squares relative to the spread of each state; those of parameters are in \
prior standard deviations, at the end. Coverage is that of ±2 sd, nominally 95.4 %, with a 95 % binomial \
interval for the number of effectively independent cases. The log-score is the mean log-density of one-step \
forecasts of y. Times are CPU times: per observation the median of all seeds but the first, with \
the cost of fitting the noise; the first result includes compilation. A verdict compares filters with the same \
information by their error in the whole run. A filter failed if it diverged (not finite, or a relative error \
above 1.5 in the second half), if it is overconfident (the interval of its coverage is below 90 %), or if it is \
too slow (more than {LIMIT:.0f} s before the last seed).

All filters know flow, observation function, priors, and the correlation time of coloured noise. Rivals hold \
parameters in the augmented state, take two Runge–Kutta steps between observations, and where parameters change \
they also have the best rate of a random walk on development seeds, which pcnet has not. Rivals that are not \
told the noise get maximum likelihood on the first third of the record: dynamax by L-BFGS with derivatives of \
its own likelihood, filterpy on a grid of nine pairs of levels. They then filter the whole record, so that their \
errors in the first third are of a filter that has seen it before; pcnet sees every observation once. \
filterpy leaves out observations more than 5 sd \
away in the task with outliers, a usual gate; the filters of dynamax and cuthbert run in one call and have none. \
The particle filter (1000 particles) is the oracle: it also knows which observations are outliers, and \
takes no part in the contest. No filter was tuned on the reported seeds."""


class Report(NamedTuple):
    """What was written, the table of all cells, and how many are missing."""

    markdown: Path
    html: Path
    cells: pd.DataFrame
    left: int


def write(cells: Sequence[Cell], seeds: Sequence[int], folder: Path) -> Report:
    """Write report.md, report.html and cells.csv."""
    judged = judge(cells, seeds, folder)
    text = compose(judged, seeds, len(cells) - len(judged))
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder / "report.md", folder / "report.html", judged, len(cells) - len(judged))
    write_files(
        {
            report.markdown: text,
            report.html: render_html(text, {}, "The arena"),
            folder / "cells.csv": judged.to_csv(index=False),
        }
    )
    return report


def compose(judged: pd.DataFrame, seeds: Sequence[int], left: int) -> str:
    """The report as Markdown."""
    packages = {method.package for method in METHODS.values()}
    parts = [
        "# The arena",
        f"Seeds {seeds[0]} to {seeds[-1]}, {len(seeds)} a task. " + ", ".join(map(_version, sorted(packages))) + ".",
    ]
    if judged.empty:
        return "\n\n".join([*parts, "No cell has run yet."]) + "\n"
    if left:
        parts.append(f"**{left} cells have not run**: the time was over. Run it again to go on.")
    lost = losses(judged)
    parts += ["## Where pcnet loses", "\n".join(f"- {each}" for each in lost) if lost else "Nowhere.", _score(judged)]
    parts += ["## Verdicts", "\n\n".join(_verdicts(judged, key, title) for key, title in COLUMNS.items())]
    parts += ["## How it was measured", ABOUT, "## All figures"]
    for name in dict.fromkeys(judged["task"]):
        parts += [f"### {TASKS[name].system.title}", _figures(judged[judged["task"] == name])]
    return "\n\n".join(parts) + "\n"


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} (not installed)"


def _score(judged: pd.DataFrame) -> str:
    """How often the adaptive filter is best or within 5 %, and its coverage is that of a sound filter."""
    lines = []
    for key, title in COLUMNS.items():
        part = judged[(judged["method"] == "pcnet") & (judged["information"] == key)]
        good = part["verdict"].isin(["best", "within 5 %"]).sum()
        sound = part["coverage"].between(0.90, 0.98).sum()
        later = ((part["failure"] == "") & (part["half_ratio"] <= NEAR)).sum()
        text = f"- {title}: best or within 5 % in {good} of {len(part)} tasks, by the second half alone in {later}; "
        text += f"coverage 90–98 % in {sound}"
        times = _slower(judged[judged["information"] == key])
        lines.append(text + (f"; time per observation {times} that of the fastest rival" if times else ""))
    return "The adaptive filter of pcnet,\n\n" + "\n".join(lines)


def _slower(part: pd.DataFrame) -> str:
    """Range over tasks of pcnet's time per observation relative to the fastest rival that did not fail."""
    rivals = part[(part["failure"] == "") & ~part["method"].isin(["pcnet", "odem", "particles"])]
    ours = part[part["method"] == "pcnet"].set_index("task")["microseconds"]
    ratios = (ours / rivals.groupby("task")["microseconds"].min()).dropna()
    return f"{number(ratios.min())} to {number(ratios.max())} times" if len(ratios) else ""


def _verdicts(judged: pd.DataFrame, key: str, title: str) -> str:
    part = judged[judged["information"] == key]
    methods = [name for name in METHODS if name in set(part["method"])]
    rows = []
    for name in dict.fromkeys(part["task"]):
        found = part[part["task"] == name].set_index("method")["verdict"]
        rows.append([TASKS[name].system.title, *(found.get(method, "–") for method in methods)])
    head = ["task", *(METHODS[name].title for name in methods)]
    return f"### {title[0].upper()}{title[1:]}\n\n{table(head, rows, left=len(head))}"


def _figures(part: pd.DataFrame) -> str:
    head = ["filter", "told", "verdict", "whole", "half", "θ", "coverage, %", "log-score", "µs", "first, s", "seeds"]
    rows = []
    for key in COLUMNS:
        for _, cell in part[part["information"] == key].iterrows():
            rows.append([METHODS[cell["method"]].title, key, cell["verdict"], *_numbers(cell)])
    return table(head, rows, left=3)


def _numbers(cell: pd.Series[Any]) -> list[str]:
    coverage = "–"
    if not math.isnan(cell["coverage"]):
        coverage = f"{100 * cell['coverage']:.0f} ({100 * cell['low']:.0f}–{100 * cell['high']:.0f})"
    return [
        *(number(float(cell[name])) for name in ("whole", "half", "parameters")),
        coverage,
        number(float(cell["log_score"])),
        *(number(float(cell.get(name, math.nan))) for name in ("microseconds", "first")),
        str(cell["seeds"]),
    ]
