"""Verdicts: who is best in a task with the same information, who is within 5 %, and who failed and how."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from studies.arena.cells import FEWEST, LEAST_FIRST, Cell
from studies.arena.methods import METHODS
from studies.arena.tasks import TASKS

NEAR = 1.05  # largest ratio to the best error that counts as equal
LOWEST_COVERAGE = 0.90  # a filter is overconfident if the interval of its coverage is below
SOUND = (0.90, 0.98)  # coverage of ±2 sd that counts as right
LARGEST_ERROR = 3.0  # relative error in the second half from which a filter has diverged; 1 is that of a constant
ROOTS = ("whole", "half", "parameters")  # means of squares
MEANS = ("coverage", "parameter_coverage", "log_score", "ten_steps")
LOGS = ("noise_x", "noise_y")  # means of squares of logs
NEAR_GAUSSIAN = 1.02  # largest ratio to the best Gaussian filter that counts as equal
PARTICLES = ("particles", "cuthbert-particles")  # filters that are not Gaussian
MOSTLY_BEST, MOSTLY_SOUND = 12 / 15, 13 / 15  # shares of tasks that are wanted
COLUMNS = (*ROOTS, *MEANS, *LOGS, "low", "high", "ratio", "half_ratio", "oracle")


def interval(share: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of so many independent cases."""
    if not count > 0:
        return 0.0, 1.0
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return centre - half, centre + half


def summarise(content: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the table from a cell's file: errors are roots of means over seeds, noise is a factor."""
    rows = pd.DataFrame(content["rows"])
    found: dict[str, Any] = {key: content[key] for key in ("task", "method", "information")}
    found |= {"contest": METHODS[content["method"]].contest, "cpu": content.get("cpu", math.nan)}
    if content["missing"] is not None:
        return {**found, "seeds": 0, "failure": f"not run: {content['missing']}"}
    samples = TASKS[found["task"]].system.samples
    good = rows[rows["lost"] == 0]
    later = rows["seconds"].iloc[1:] if len(rows) > 1 else rows["seconds"]
    found |= {"seeds": len(rows), "first": rows["first"].iloc[0], "microseconds": 1e6 * later.median() / samples}
    for name in (*ROOTS, *MEANS, *LOGS):
        value = float(good[name].mean()) if name in good and len(good) else math.nan
        found[name] = math.sqrt(value) if name in ROOTS else math.exp(math.sqrt(value)) if name in LOGS else value
    count = float(good["effective"].sum()) if len(good) else 0.0
    found["low"], found["high"] = interval(found["coverage"], count) if len(good) else (math.nan, math.nan)
    lost = len(rows) - int((good["half"] <= LARGEST_ERROR**2).sum()) if len(good) else len(rows)
    if lost:
        found["failure"] = f"diverged in {lost} of {len(rows)}"
    elif found["high"] < LOWEST_COVERAGE:
        found["failure"] = "overconfident"
    else:
        found["failure"] = "too slow" if len(rows) < min(FEWEST, content["wanted"]) else ""
    return found


def judge(cells: Sequence[Cell], seeds: Sequence[int], folder: Path) -> pd.DataFrame:
    """All cells that have a file, with ratios to the best error of those that did not fail, and a verdict.

    Errors of two filters are compared on the seeds that both have run. `oracle` is the ratio to the lowest error of the
    filters, or of the smoothers, that are told everything.
    """
    contents = [content for content in (cell.read(folder, seeds) for cell in cells) if content is not None]
    table = pd.DataFrame([summarise(content) for content in contents])
    if table.empty:
        return table
    errors = [_errors(content) for content in contents]
    for name in COLUMNS:
        table[name] = table[name].astype(float) if name in table else np.nan
    for place in range(len(table)):
        cell = table.iloc[place]
        same = table[(table["task"] == cell["task"]) & (table["contest"] == cell["contest"]) & (table["failure"] == "")]
        rivals = same.index[same["information"] == cell["information"]]
        told = same.index[same["information"] == "everything"]
        for column, name, others in (
            ("ratio", "whole", rivals),
            ("half_ratio", "half", rivals),
            ("oracle", "whole", told),
        ):
            ratios = [_ratio(errors[place], errors[other], name) for other in others if other != place]
            least = [1.0] if column == "oracle" and place in others else []
            table.loc[place, column] = max([*ratios, *least], default=1.0 if place in others else math.nan)
    table["verdict"] = [_verdict(*each) for each in zip(table["failure"], table["ratio"], strict=True)]
    return table


class Goal(NamedTuple):
    """What pcnet's adaptive filter is to reach, and where it misses it."""

    title: str
    wanted: int  # number of tasks
    tasks: int  # that were measured
    missed: Sequence[str]  # names of tasks, with the figure that misses the goal

    @property
    def reached(self) -> int:
        return self.tasks - len(self.missed)

    @property
    def is_met(self) -> bool:
        return self.reached >= self.wanted


def goals(table: pd.DataFrame) -> list[Goal]:
    """The four goals of the adaptive filter, with the tasks that miss them; those that have not run are left out."""
    filters = table[table["contest"] == "filter"]
    ours = filters[filters["method"] == "pcnet"]
    neither, told = (ours[ours["information"] == key].set_index("task") for key in ("neither", "everything"))
    rivals = filters[~filters["method"].map(lambda name: METHODS[name].is_ours) & (filters["failure"] == "")]
    fastest = rivals[rivals["information"] == "neither"].groupby("task")["microseconds"].min()
    slower = (neither["microseconds"] / fastest.reindex(neither.index)).fillna(0.0)
    gaussian = rivals[(rivals["information"] == "everything") & ~rivals["method"].isin(PARTICLES)]
    behind = told["oracle"] / gaussian.groupby("task")["oracle"].min().reindex(told.index).fillna(math.inf)
    behind = behind.where(told["failure"] == "", math.inf)

    def missed(fails: pd.Series[Any], figure: pd.Series[Any]) -> list[str]:
        return [f"{TASKS[name].system.title} ({figure[name]})" for name in fails.index[fails]]

    def ratio(values: pd.Series[Any]) -> pd.Series[Any]:
        return values.map(lambda each: f"{each:.2f} times" if math.isfinite(each) else "failed")

    inside = neither["coverage"].between(*SOUND)
    coverage = neither["coverage"].map(lambda each: "diverged" if math.isnan(each) else f"{100 * each:.1f} %")
    best = neither["verdict"].isin(["best", "within 5 %"])
    count = len(neither)
    return [
        Goal(
            "told neither: best or within 5 %", math.ceil(MOSTLY_BEST * count), count, missed(~best, neither["verdict"])
        ),
        Goal("told neither: coverage 90–98 %", math.ceil(MOSTLY_SOUND * count), count, missed(~inside, coverage)),
        Goal(
            "told neither: faster per observation than every rival that did not fail",
            count,
            count,
            missed(slower > 1, ratio(slower)),
        ),
        Goal(
            "told everything: within 2 % of the best Gaussian filter",
            len(told),
            len(told),
            missed(behind > NEAR_GAUSSIAN, ratio(behind)),
        ),
    ]


def _errors(content: Mapping[str, Any]) -> pd.DataFrame:
    rows = pd.DataFrame(content["rows"])
    if "whole" not in rows:
        return pd.DataFrame({"whole": [], "half": []})
    return rows[rows["lost"] == 0].set_index("seed")[["whole", "half"]]


def _ratio(ours: pd.DataFrame, theirs: pd.DataFrame, name: str) -> float:
    """Ratio of root mean squares on the seeds that both have."""
    common = ours.index.intersection(theirs.index)
    if not len(common):
        return math.nan
    return math.sqrt(float(ours.loc[common, name].mean()) / float(theirs.loc[common, name].mean()))


def _verdict(failure: str, ratio: float) -> str:
    if failure:
        return failure.split(":", maxsplit=1)[0]
    if ratio <= 1:
        return "best"
    behind = 100 * (ratio - 1)
    return "within 5 %" if ratio <= NEAR else f"{behind:.{0 if behind >= 9.95 else 1}f} % behind"


def losses(table: pd.DataFrame) -> list[str]:
    """Cells of pcnet that failed or are more than 5 % behind, with the measured reason; those told least come first."""
    found = []
    order = table.assign(place=table["information"].map(LEAST_FIRST.index), smoother=table["contest"] == "smoother")
    for _, cell in order.sort_values(["smoother", "place"], kind="stable").iterrows():
        if not METHODS[cell["method"]].is_ours or cell["verdict"] in ("best", "within 5 %"):
            continue
        others = table[
            (table["task"] == cell["task"])
            & (table["information"] == cell["information"])
            & (table["contest"] == cell["contest"])
        ]
        winner = others[others["verdict"] == "best"]
        text = f"**{TASKS[cell['task']].system.title}**, {METHODS[cell['method']].title}, told {cell['information']}: "
        text += cell["verdict"]
        if not math.isnan(cell["coverage"]):
            text += f" (coverage {100 * cell['coverage']:.0f} %)"
        if len(winner) and winner.index[0] != cell.name:
            text += f"; best: {METHODS[winner.iloc[0]['method']].title}"
            text += f". {reason(cell, winner.iloc[0])}".rstrip(" .") + "."
        elif len(others) > 1:
            text += "; all others failed as well" if (others["failure"] != "").all() else ""
        found.append(text)
    return found


def reason(cell: pd.Series[Any], best: pd.Series[Any]) -> str:
    """Where the error arises: in the intervals, at the start, in parameters, in noise levels, or throughout."""
    if cell["failure"] == "overconfident":
        return f"Its intervals are too narrow; its error is {cell['ratio']:.2f} times the best."
    if cell["failure"]:
        return ""
    later, parts = cell["half_ratio"], []
    if later <= NEAR:
        return f"In the second half its error is {later:.2f} times the best: the loss is at the start."
    if cell["parameters"] > NEAR * best["parameters"]:
        parts.append(f"that of the parameters is {cell['parameters'] / best['parameters']:.1f} times")
    if max(cell["noise_x"], cell["noise_y"]) > 1.5:
        levels = [number for number in (cell["noise_x"], cell["noise_y"]) if not math.isnan(number)]
        parts.append("learned noise levels are off by factors of " + " and ".join(f"{each:.1f}" for each in levels))
    return "; ".join([f"In the second half it is {later:.2f} times the best", *parts])
