"""Verdicts: who is best in a task with the same information, who is within 5 %, and who failed and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from studies.arena.cells import Cell
from studies.arena.methods import METHODS
from studies.arena.tasks import TASKS

NEAR = 1.05  # largest ratio to the best error that counts as equal
LOWEST_COVERAGE = 0.90  # a filter is overconfident if the interval of its coverage is below
LARGEST_ERROR = 1.5  # relative error in the second half from which a filter has diverged; 1 is that of a constant


def interval(share: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of so many independent cases."""
    if not count > 0:
        return 0.0, 1.0
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return centre - half, centre + half


def summarise(content: dict[str, Any]) -> dict[str, Any]:
    """One row of the table from a cell's file: errors are roots of means over seeds."""
    rows = pd.DataFrame(content["rows"])
    found: dict[str, Any] = {key: content[key] for key in ("task", "method", "information")}
    if content["missing"] is not None:
        return {**found, "seeds": 0, "failure": "not installed"}
    samples = TASKS[found["task"]].system.samples
    good = rows[rows["lost"] == 0]
    later = rows["seconds"].iloc[1:] if len(rows) > 1 else rows["seconds"]
    found |= {"seeds": len(rows), "first": rows["first"].iloc[0], "microseconds": 1e6 * later.median() / samples}
    for name in ("whole", "half", "parameters"):
        found[name] = math.sqrt(good[name].mean()) if name in good and len(good) else math.nan
    for name in ("coverage", "parameter_coverage", "log_score"):
        found[name] = float(good[name].mean()) if name in good and len(good) else math.nan
    count = float(good["effective"].sum()) if len(good) else 0.0
    found["low"], found["high"] = interval(found["coverage"], count) if len(good) else (math.nan, math.nan)
    if len(good) < len(rows) or good["half"].max() > LARGEST_ERROR**2:
        found["failure"] = "diverged"
    elif found["high"] < LOWEST_COVERAGE:
        found["failure"] = "overconfident"
    else:
        found["failure"] = "too slow" if len(rows) < content["wanted"] else ""
    return found


def judge(cells: Sequence[Cell], seeds: Sequence[int], folder: Path) -> pd.DataFrame:
    """All cells that have a file, with the ratio to the best error of those that did not fail, and a verdict.

    The oracle takes no part in the contest: its ratio is to the best of the others.
    """
    contents = [cell.read(folder, seeds) for cell in cells]
    table = pd.DataFrame([summarise(content) for content in contents if content is not None])
    if table.empty:
        return table
    for name in ("whole", "half", "parameters", "coverage", "parameter_coverage", "log_score", "low", "high"):
        table[name] = table[name].astype(float) if name in table else np.nan
    contest = table[(table["failure"] == "") & (table["method"] != "particles")]
    best = contest.groupby(["task", "information"])["whole"].min()
    keys = pd.MultiIndex.from_frame(table[["task", "information"]])
    table["ratio"] = table["whole"].to_numpy() / best.reindex(keys).to_numpy()
    later = contest.groupby(["task", "information"])["half"].min()
    table["half_ratio"] = table["half"].to_numpy() / later.reindex(keys).to_numpy()
    table["verdict"] = [_verdict(*row) for row in zip(table["method"], table["failure"], table["ratio"], strict=True)]
    return table


def _verdict(method: str, failure: str, ratio: float) -> str:
    if failure:
        return failure
    if method == "particles":
        return "oracle"
    if ratio <= 1:
        return "best"
    behind = 100 * (ratio - 1)
    return "within 5 %" if ratio <= NEAR else f"{behind:.{0 if behind >= 9.95 else 1}f} % behind"


def losses(table: pd.DataFrame) -> list[str]:
    """Cells of pcnet that failed or are more than 5 % behind, with the measured reason."""
    found = []
    for _, cell in table.iterrows():
        if not METHODS[cell["method"]].is_ours or cell["verdict"] in ("best", "within 5 %"):
            continue
        others = table[(table["task"] == cell["task"]) & (table["information"] == cell["information"])]
        winner = others[others["verdict"] == "best"]
        text = f"**{TASKS[cell['task']].system.title}**, {METHODS[cell['method']].title}, told {cell['information']}: "
        text += cell["verdict"]
        if not math.isnan(cell["coverage"]):
            text += f" (coverage {100 * cell['coverage']:.0f} %)"
        if len(winner) and winner.index[0] != cell.name:
            text += f"; best: {METHODS[winner.iloc[0]['method']].title}"
            text += f". {reason(cell, winner.iloc[0])}".rstrip(" .") + "."
        found.append(text)
    return found


def reason(cell: pd.Series[Any], best: pd.Series[Any]) -> str:
    """Where the error arises: in the intervals, at the start, in the parameters, or throughout."""
    if cell["failure"] == "overconfident":
        ratio = cell["whole"] / best["whole"]
        return f"Its intervals are too narrow; its error is {ratio:.2f} times the best."
    if cell["failure"]:
        return ""
    later = cell["half"] / best["half"]
    if later <= NEAR:
        return f"In the second half its error is {later:.2f} times the best: the loss is at the start."
    if cell["parameters"] > NEAR * best["parameters"]:
        ratio = cell["parameters"] / best["parameters"]
        return f"In the second half it is {later:.2f} times the best; that of the parameters is {ratio:.1f} times."
    return f"It persists: in the second half it is {later:.2f} times the best."
