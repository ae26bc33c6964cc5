"""The report of the arena as Markdown and HTML: losses of pcnet first, then verdicts, then all figures."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from studies.arena.cells import FEWEST, TOO_SLOW, Cell
from studies.arena.figures import draw
from studies.arena.hgf_rival import version as hgf_version
from studies.arena.methods import METHODS
from studies.arena.spm import Comparison
from studies.arena.tasks import TASKS
from studies.arena.verdicts import LARGEST_ERROR, NEAR, NEAR_GAUSSIAN, PARTICLES, SOUND, goals, judge, losses
from studies.reporting import figure_links, number, render_html, save_figures, table, write_files

COLUMNS = {
    "neither": "told neither noise nor parameters",
    "parameters": "told the parameters, not the noise",
    "noise": "told the noise, not the parameters",
    "everything": "told everything",
}
ABOUT = f"""\
Errors of states are roots of mean squares relative to the spread of each state; those of parameters are in prior \
standard deviations, at the end. "× told" is the error over the lowest one that is told everything. Noise is the \
factor by which learned standard deviations are off at the end, root mean square of logs, for process / observations. \
Coverage is that of ±2 sd, nominally 95.4 %, with a 95 % binomial interval for the number of effectively independent \
cases. The log-score is the mean log-density of one-step forecasts of y, "ten" that of the states, in units of their \
spread, ten observations ahead, at ten origins in the second half of each of the first eight seeds: −∞ if there was \
no forecast. Times are CPU times: per observation the median of all seeds but the first, with the cost of fitting the \
noise; the first result includes compilation. A verdict compares filters with the same information by their error in \
the whole run, on the seeds that both have run: a cell of a rival begins no further seed 3 s of CPU time after the \
first, 2 s with filterpy, but runs {FEWEST} unless they take {TOO_SLOW:g} s. A filter failed if it diverged (not \
finite, or a relative error above {LARGEST_ERROR:g} in the second half of a seed), if it is overconfident (the \
interval of its coverage is below 90 %), or if it is too slow (fewer than {FEWEST} seeds in that time). pcnet starts \
every cell without compiled code of a former one.

All filters know flow, observation function, priors, the kind of noise, and the correlation time of coloured noise. \
Rivals hold parameters in the augmented state and take two Runge–Kutta steps between observations. Gaps are filled \
with missing observations for them. Where parameters change they also have the best rate of a random walk on \
development seeds, which pcnet has not; where a turn rate switches, filters other than IMM, particles and pcnet let \
it walk. Rivals that are not told the noise get maximum likelihood on the first third of the record: dynamax by \
L-BFGS with derivatives of its own likelihood, filterpy and particles on a grid of nine pairs of levels. \
Its time is part of theirs. They then filter the whole record, so that their errors in the first third are of a filter \
that has seen it before; pcnet sees every observation once. Told the noise, pcnet is a single filter \
(`hypotheses=None`), unless there are outliers, parameters that change, or several peaks (then `peaks=8`); not told, \
it is its default, which also expects outliers and drift. Returns are given to Gaussian filters as logs of squares, \
and counts by conditional moments, as is usual; pcnet and the particle filters have the exact likelihoods. filterpy \
leaves out observations more than 5 sd away in the task with outliers, a usual gate; the Gaussian filters of dynamax \
and cuthbert run in one call and have none. Bootstrap filters have 1000 particles, as in cuthbert's documentation, \
and know the distribution of outliers. cuthbert's unscented filter is its filter of conditional moments with the \
sigma points and weights that its library has by default; its ensemble filter has perturbed observations and 100 \
members without inflation, the best of four settings on development seeds of three tasks, one of them that of its \
documentation, 25 members inflated by 5 %. pyhgf runs in an environment of its own, as the model that comes nearest: \
a random walk with a volatility that walks. No filter was tuned on the reported seeds."""
LEFT_OUT = """\
A dash is a task that a filter is not made for. Particle filters have no column where parameters are unknown: \
particles that hold parameters keep only a few of their values when they are resampled. They are left out with Matérn \
noise, too, which is part of the state, so that nearly all weights are zero. The covariance of observations of \
cuthbert's ensemble filter cannot depend on the state, as that of counts does. Some columns are left out \
because the arena would take longer than its 20 minutes: cuthbert's filters that are not told the noise, which they \
would fit as dynamax does, and its extended one with the same figures, and filterpy's filter told the parameters. \
`rts_smoother` of filterpy has one process covariance for all intervals and is left out, and so are smoothers by \
particles, whose time is the square of their number."""
README_TASKS = {
    "neuron": "neuron",
    "lorenz": "Lorenz-63",
    "stiff": "stiff oscillator",
    "pendulum": "pendulum",
    "tracking": "tracking",
    "manoeuvres": "manoeuvres",
    "growth": "growth model",
    "volatility": "volatility",
    "spikes": "spikes",
    "paper": "Lotka–Volterra",
}
"""Rows of the README, chosen before the results were seen."""


class Extras(NamedTuple):
    """What is measured beside the cells: costs of packages, forecasts of a real record, and SPM's recorded errors."""

    costs: Sequence[Mapping[str, Any]] = ()
    lynx: Sequence[Mapping[str, Any]] = ()
    spm: Sequence[Comparison] = ()


class Report(NamedTuple):
    """What was written, the table of all cells, and how many are missing."""

    markdown: Path
    html: Path
    cells: pd.DataFrame
    left: int


def write(cells: Sequence[Cell], seeds: Sequence[int], folder: Path, extras: Extras) -> Report:
    """Write report.md, report.html, cells.csv, a figure of each task, and the table of the README."""
    judged = judge(cells, seeds, folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [] if judged.empty else save_figures(draw(judged, cells, seeds, folder), folder / "figures")
    links = figure_links(pictures, folder)
    text = compose(judged, seeds, len(cells) - len(judged), extras, dict(zip(_tasks(judged), links, strict=True)))
    report = Report(folder / "report.md", folder / "report.html", judged, len(cells) - len(judged))
    write_files(
        {
            report.markdown: text,
            report.html: render_html(text, links, "The arena"),
            folder / "cells.csv": judged.to_csv(index=False),
            folder / "readme.md": readme_rows(judged),
        }
    )
    return report


def _tasks(judged: pd.DataFrame) -> list[str]:
    return [] if judged.empty else list(dict.fromkeys(judged["task"]))


def compose(judged: pd.DataFrame, seeds: Sequence[int], left: int, extras: Extras, links: Mapping[str, str]) -> str:
    """The report as Markdown; links: of the figures, by task."""
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
    parts += ["## Where pcnet loses", "\n".join(f"- {each}" for each in lost) if lost else "Nowhere."]
    parts += ["## Goals", _goals(judged), _score(judged)]
    parts += ["## Verdicts", "\n\n".join(_verdicts(judged, key, title) for key, title in COLUMNS.items())]
    smoothers = [_verdicts(judged, key, COLUMNS[key], "smoother") for key in ("neither", "everything")]
    parts += ["## Smoothers", "\n\n".join(each for each in smoothers if each)]
    parts += [_left_out(judged)]
    parts += [text for text in (_costs(extras.costs), _lynx(extras.lynx), _spm(extras.spm)) if text]
    parts += ["## How it was measured", ABOUT, _processor_time(judged), "## Task by task"]
    for name in _tasks(judged):
        title = TASKS[name].system.title
        parts += [f"### {title}", f"![{title}](<{links[name]}>)", _figures(judged[judged["task"] == name])]
    return "\n\n".join(parts) + "\n"


def readme_rows(judged: pd.DataFrame) -> str:
    """Ten rows: error of pcnet and of the best rival, both told neither, over the best that is told everything.

    Slow rivals have run fewer seeds, which may be easier than all of them. So the error of a rival is that of pcnet
    times the ratio of both on the seeds that they share; ratios are to the best other filter.
    """
    rows = ["|task|pcnet|best rival|coverage, %|", "|---|---|---|---|"]
    for name, title in README_TASKS.items():
        part = judged[judged["task"] == name] if not judged.empty else judged
        if part.empty:
            continue
        part = part[(part["contest"] == "filter") & (part["information"] == "neither")]
        ours = part[part["method"] == "pcnet"]
        rivals = part[~part["method"].isin(["pcnet", "odem"]) & (part["failure"] == "")]
        if ours.empty:
            continue
        cell = ours.iloc[0]
        behind = 1 / cell["ratio"] if cell["ratio"] > 1 else rivals["ratio"].min()
        best = f"{cell['oracle'] * behind:.2f}" if len(rivals) else "failed"
        failed = f" ({cell['failure'].split()[0]})" if cell["failure"] else ""
        rows.append(f"|{title}|{cell['oracle']:.2f}{failed}|{best}|{100 * cell['coverage']:.0f}|")
    return "\n".join(rows) + "\n"


def _version(package: str) -> str:
    if package == "pyhgf":
        return f"pyhgf {hgf_version()}"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} (not installed)"


def _goals(judged: pd.DataFrame) -> str:
    """Goals of the adaptive filter: how many tasks reach them, and which do not."""
    rows = []
    for goal in goals(judged):
        if not goal.tasks:
            continue
        wanted = f"{'all' if goal.wanted == goal.tasks else goal.wanted} of {goal.tasks}"
        missed = "; ".join(goal.missed) or "none"
        rows.append([goal.title, wanted, f"{goal.reached}: {'met' if goal.is_met else 'missed'}", missed])
    if not rows:
        return "pcnet's adaptive filter has not run."
    return table(["goal of pcnet's adaptive filter", "wanted", "reached", "missed on"], rows, left=4)


def _score(judged: pd.DataFrame) -> str:
    """How often the adaptive filter is best or within 5 %, and its coverage is that of a sound filter."""
    lines = []
    for key, title in COLUMNS.items():
        part = judged[(judged["method"] == "pcnet") & (judged["information"] == key)]
        if part.empty:
            continue
        good = part["verdict"].isin(["best", "within 5 %"]).sum()
        sound = part["coverage"].between(*SOUND).sum()
        later = ((part["failure"] == "") & (part["half_ratio"] <= NEAR)).sum()
        text = f"- {title}: best or within 5 % in {good} of {len(part)} tasks, by the second half alone in {later}; "
        text += f"coverage 90–98 % in {sound}"
        if key == "everything":
            text += f"; within 2 % of the best Gaussian filter in {_near_gaussian(judged)}"
        times = _slower(judged[judged["information"] == key])
        lines.append(text + (f"; time per observation {times} that of the fastest rival" if times else ""))
    return "The adaptive filter of pcnet,\n\n" + "\n".join(lines)


def _near_gaussian(judged: pd.DataFrame) -> int:
    """Tasks in which pcnet, told everything, is within 2 % of the best filter that has no particles."""
    part = judged[(judged["information"] == "everything") & (judged["contest"] == "filter")]
    ours = part[part["method"] == "pcnet"].set_index("task")["oracle"]
    rivals = part[~part["method"].isin(["pcnet", *PARTICLES]) & (part["failure"] == "")]
    best = rivals.groupby("task")["oracle"].min().reindex(ours.index).fillna(math.inf)
    return int((ours <= NEAR_GAUSSIAN * best).sum())


def _slower(part: pd.DataFrame) -> str:
    """Range over tasks of pcnet's time per observation relative to the fastest rival that did not fail."""
    part = part[part["contest"] == "filter"]
    rivals = part[(part["failure"] == "") & ~part["method"].isin(["pcnet", "odem"])]
    ours = part[part["method"] == "pcnet"].set_index("task")["microseconds"]
    ratios = (ours / rivals.groupby("task")["microseconds"].min()).dropna()
    return f"{number(ratios.min())} to {number(ratios.max())} times" if len(ratios) else ""


def _verdicts(judged: pd.DataFrame, key: str, title: str, contest: str = "filter") -> str:
    part = judged[(judged["information"] == key) & (judged["contest"] == contest)]
    methods = [name for name in METHODS if name in set(part["method"][part["seeds"] > 0])]
    if not methods:
        return ""
    rows = []
    for name in dict.fromkeys(part["task"]):
        found = part[part["task"] == name].set_index("method")["verdict"]
        rows.append([TASKS[name].system.title, *(found.get(method, "–") for method in methods)])
    head = ["task", *(METHODS[name].title for name in methods)]
    return f"### {title[0].upper()}{title[1:]}\n\n{table(head, rows, left=len(head))}"


def _processor_time(judged: pd.DataFrame) -> str:
    """What all cells took together, by package."""
    packages = judged["method"].map(lambda name: METHODS[name].package)
    minutes = judged["cpu"].groupby(packages[packages != "pyhgf"]).sum() / 60  # it has a process of its own
    shares = ", ".join(f"{package} {number(each)}" for package, each in minutes.sort_values(ascending=False).items())
    return (
        f"All cells took {number(minutes.sum())} minutes of processor time, with simulations and forecasts: {shares}."
    )


def _left_out(judged: pd.DataFrame) -> str:
    """Why a method has no column, or no entry in a row: what it cannot do, and what did not run here."""
    idle = judged[judged["seeds"] == 0]
    lines = [LEFT_OUT]
    for (method, failure), part in idle.groupby(["method", "failure"], sort=False):
        tasks = ", ".join(dict.fromkeys(TASKS[name].system.title for name in part["task"]))
        lines.append(f"{METHODS[str(method)].title}, {failure} ({tasks}).")
    return "\n\n".join(lines)


def _costs(costs: Sequence[Mapping[str, Any]]) -> str:
    if not costs:
        return ""
    rows = []
    for cost in costs:
        measured = [number(cost[key]) if key in cost else "failed" for key in ("first", "first_cpu", "again", "memory")]
        rows.append([cost["package"], cost["told"], str(cost["lines"]), *measured])
    head = ["package", "told", "lines", "first result, s", "CPU, s", "second start, s", "memory, MB"]
    text = (
        "The neuron, 1,000 observations, as a script of one's own in `studies/arena/scripts`: lines of code, time from "
    )
    text += (
        "the start of Python to the result, the same once more with what the package keeps on disk, and peak memory."
    )
    return f"## What a package costs its user\n\n{text}\n\n{table(head, rows, left=2)}"


def _lynx(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    shown = []
    for row in rows:
        if "failure" in row:
            shown.append([row["title"], "–", row["failure"], "–", "–"])
            continue
        years = f"{row['steps']} year{'s' if row['steps'] > 1 else ''}"
        coverage = f"{100 * row['coverage']:.0f} of {row['count']}"
        shown.append([row["title"], years, number(row["error"]), coverage, number(row["log_score"])])
    head = ["forecast by", "ahead", "error of log pelts", "coverage, %", "log-score"]
    text = "Pelts of hares and lynxes that the Hudson's Bay Company took from 1900 to 1920. Each year from 1910 on is "
    text += "forecast from the years before, by Lotka–Volterra equations in logarithms with unknown rates and noise. "
    text += "Rivals fit the noise to the first third. One record of 21 years: no difference is significant."
    return f"## A real record\n\n{text}\n\n{table(head, shown, left=2)}"


def _spm(rows: Sequence[Comparison]) -> str:
    if not rows:
        return ""
    shown = [[row.model, row.measure, *(number(each) for each in row[2:])] for row in rows]
    head = ["model", "measure", "SPM", "pcnet, filtered", "pcnet, smoothed"]
    text = "Recorded, not run here: data and estimates of `spm_DEM` under GNU Octave (`tests/data`). SPM is told "
    text += "precisions and smoothness of the noise, and looks ahead by half of its embedding window. pcnet's adaptive "
    text += "filter is given the same flow and start; on the Lorenz attractor it is told nothing of the noise, in the "
    text += "convolution model it starts from SPM's precisions and is told that the cause lasts for about two samples. "
    text += "One record each."
    return f"## SPM's DEM\n\n{text}\n\n{table(head, shown, left=2)}"


def _figures(part: pd.DataFrame) -> str:
    head = ["filter", "told", "verdict", "whole", "half", "× told", "θ", "noise x/y", "coverage, %", "log-score", "ten"]
    head += ["µs", "first, s", "seeds"]
    rows = []
    for contest in ("filter", "smoother"):
        for key in COLUMNS:
            for _, cell in part[(part["information"] == key) & (part["contest"] == contest)].iterrows():
                rows.append([METHODS[cell["method"]].title, key, cell["verdict"], *_numbers(cell)])
    return table(head, rows, left=3)


def _numbers(cell: pd.Series[Any]) -> list[str]:
    coverage = "–"
    if not math.isnan(cell["coverage"]):
        coverage = f"{100 * cell['coverage']:.0f} ({100 * cell['low']:.0f}–{100 * cell['high']:.0f})"
    levels = [f"{cell[name]:.2f}" if not math.isnan(cell[name]) else "–" for name in ("noise_x", "noise_y")]
    ten = float(cell["ten_steps"])
    return [
        *(number(float(cell[name])) for name in ("whole", "half", "oracle", "parameters")),
        " / ".join(levels) if set(levels) != {"–"} else "–",
        coverage,
        number(float(cell["log_score"])),
        "−∞" if ten == -math.inf else number(ten),
        *(number(float(cell.get(name, math.nan))) for name in ("microseconds", "first")),
        str(cell["seeds"]),
    ]
