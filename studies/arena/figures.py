"""One figure per task: a stretch of the first seed, and the errors of all filters by what they are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from studies.arena.cells import Cell
from studies.arena.methods import METHODS
from studies.arena.tasks import TASKS
from studies.reporting import Drawing

COLOURS = {
    "pcnet": "#0072B2",
    "dynamax-ekf": "#D55E00",
    "dynamax-ukf": "#E69F00",
    "cuthbert": "#CC79A7",
    "cuthbert-ukf": "#882255",
    "cuthbert-enkf": "#999933",
    "cuthbert-particles": "#AA4499",
    "filterpy": "#009E73",
    "filterpy-imm": "#56B4E9",
    "particles": "#000000",
    "odem": "#7F7F7F",
    "pyhgf": "#8C564B",
}
ROWS = {"everything": "everything", "noise": "the noise", "parameters": "the parameters", "neither": "neither"}
FARTHEST = 4.0  # largest ratio that is shown at its place


def draw(table: pd.DataFrame, cells: Sequence[Cell], seeds: Sequence[int], folder: Path) -> list[Drawing]:
    """Figures of all tasks that have cells."""
    found = []
    for name in dict.fromkeys(table["task"]):
        part = table[(table["task"] == name) & (table["contest"] == "filter")]
        traces = {
            (cell.method, cell.information): content["trace"]
            for cell in cells
            if cell.task == name and (content := cell.read(folder, seeds)) is not None and content.get("trace")
        }
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        rival = _show_run(left, part, traces)
        _show_errors(right, part)
        methods = [method for method in COLOURS if method in set(part["method"])]
        handles = [Line2D([], [], color=COLOURS[m], marker="o", ls="", label=METHODS[m].title) for m in methods]
        handles.append(Line2D([], [], color="#888888", marker="x", ls="", label="failed"))
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        title = TASKS[name].system.title
        caption = f"Left: truth, and pcnet{f' beside {METHODS[rival].title}' if rival else ''}, told neither, ±2 sd; "
        caption += "right: error of all filters over the lowest one that is told everything."
        found.append(Drawing(f"arena-{name}", title, caption, figure))
    return found


def _show_run(axes: Any, part: pd.DataFrame, traces: dict[Any, Any]) -> str | None:
    """The last state in a stretch of the first seed; returns the rival that is shown."""
    ours = traces.get(("pcnet", "neither"))
    others = part[(part["information"] == "neither") & ~part["method"].isin(["pcnet", "odem"])].sort_values("whole")
    rivals = [name for name in others["method"] if (name, "neither") in traces]
    if ours is not None:
        axes.plot(ours["times"], ours["truth"], color="black", lw=1.0, label="truth", zorder=3)
    for name, trace in (
        (rivals[0] if rivals else None, traces.get((rivals[0], "neither")) if rivals else None),
        ("pcnet", ours),
    ):
        if name is None or trace is None:
            continue
        times, mean, sd = (np.array(trace[key]) for key in ("times", "mean", "sd"))
        axes.fill_between(times, mean - 2 * sd, mean + 2 * sd, color=COLOURS[name], alpha=0.18, lw=0)
        axes.plot(times, mean, color=COLOURS[name], lw=1.2, label=METHODS[name].title)
    if ours is not None:
        truth = np.array(ours["truth"])
        room = max(float(np.ptp(truth)), 1e-9)
        axes.set_ylim(truth.min() - 0.4 * room, truth.max() + 0.5 * room)
        axes.legend(loc="upper left", fontsize=7, frameon=False, ncols=3)
    axes.set_xlabel("time", fontsize=8)
    axes.set_title("last state, first seed, told neither", fontsize=9)
    axes.tick_params(labelsize=8)
    return rivals[0] if rivals else None


def _show_errors(axes: Any, part: pd.DataFrame) -> None:
    rows = [key for key in ROWS if key in set(part["information"])]
    methods = [name for name in COLOURS if name in set(part["method"])]
    for _, cell in part.iterrows():
        if math.isnan(cell["oracle"]):
            continue
        height = rows.index(cell["information"]) + 0.7 * ((methods.index(cell["method"]) + 0.5) / len(methods) - 0.5)
        marker = "x" if cell["failure"] else "o"
        place = min(max(cell["oracle"], 1 / FARTHEST), FARTHEST)
        axes.plot(place, height, marker, color=COLOURS[cell["method"]], ms=5)
        if cell["oracle"] > FARTHEST:
            axes.annotate("→", (place, height), textcoords="offset points", xytext=(5, -3), fontsize=8)
    axes.axvline(1.0, color="#888888", lw=0.8)
    axes.set_xscale("log")
    largest = min(1.15 * float(part["oracle"].clip(upper=FARTHEST).max()), 1.15 * FARTHEST)
    limits = max(min(0.95, 0.97 * float(part["oracle"].min())), 0.97 / FARTHEST), max(largest, 1.3)
    marks = (
        (0.25, 0.5, 0.8, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0) if limits[1] < 2 else (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
    )
    ticks = [tick for tick in marks if limits[0] <= tick <= limits[1]]
    axes.set_xlim(*limits)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [ROWS[key] for key in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    for place in range(len(rows) - 1):
        axes.axhline(place + 0.5, color="#dddddd", lw=0.6)
    axes.tick_params(labelsize=8)
    axes.set_title("error over the best that is told everything", fontsize=9)
    axes.set_ylabel("told", fontsize=8)
