"""Tables and report of the study: ratios to the better of two filters that are told the noise, and coverage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from studies.reporting import escape, table, write_files
from studies.systems.design import GUESSES, HELD_OUT, HORIZONS, SYSTEMS

RIVALS = ("extended", "cubature")
LIMITS = {"whole": 1.3, "half": 1.1, "parameters": 1.3}
"""Largest ratios to the better rival: errors of states in the whole run and in its second half, and of parameters."""
COVERAGE = (0.90, 0.99)
NEAR_Y, NEAR_X = (0.8, 1.25), (0.5, 2.0)
"""When a learned noise variance counts as right; process levels only where the record identifies them."""


class Report(NamedTuple):
    """What was written, and the share of cells of the filter that hold all limits, by group of systems, and of cells
    whose error limits the average over noise levels holds, too; failed: errors of trials that raised one."""

    markdown: Path
    trials: Path
    cells: Path
    holding: dict[str, float]
    failed: Mapping[str, str]


def cells_of(trials: pd.DataFrame) -> pd.DataFrame:
    """One row per system, method and first guess: means over seeds, and ratios to the better rival."""
    means = trials.groupby(["system", "method", "guess"], sort=False).mean(numeric_only=True).drop(columns="seed")
    keys = ["system", "method", "guess"]
    for name, (low, high) in {"level_y": NEAR_Y, "level_x": NEAR_X}.items():
        known = trials[trials[name].notna()]
        means[f"near_{name}"] = known.assign(near=known[name].between(low, high)).groupby(keys)["near"].mean()
        means[name] = trials.groupby(keys)[name].median()
    cells = means.reset_index()
    best = cells[cells["method"].isin(RIVALS)].groupby("system")[list(LIMITS)].min()
    for name in LIMITS:
        cells[f"{name}_ratio"] = cells[name] / cells["system"].map(best[name])
    return cells


def holds(cells: pd.DataFrame) -> pd.Series[bool]:
    """Whether a cell holds the limits of errors and the coverage of states and parameters."""
    found = pd.Series(True, cells.index)
    for name, limit in LIMITS.items():
        found &= cells[f"{name}_ratio"] <= limit
    for name in ("coverage", "parameter_coverage"):
        found &= cells[name].between(*COVERAGE) | (cells[name] > COVERAGE[1]) & (name == "parameter_coverage")
    return found & (cells["lost"] == 0)


def write(trials: pd.DataFrame, folder: Path, seconds: float, failed: Mapping[str, str]) -> Report:
    """Write trials.csv (one row per trial and seed), cells.csv and report.md."""
    cells = cells_of(trials)
    ours = cells[cells["method"] == "pcnet"]
    ours = ours.assign(holds=holds(ours), group=[SYSTEMS[name].group for name in ours["system"]])
    holding = {str(group): float(part["holds"].mean()) for group, part in ours.groupby("group")}
    average = cells[cells["method"] == "average"].set_index("system")
    attained = average.index[(average[[f"{name}_ratio" for name in LIMITS]] <= list(LIMITS.values())).all(axis=1)]
    if len(attained):
        holding["attainable"] = float(ours[ours["system"].isin(attained)]["holds"].mean())
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder / "report.md", folder / "trials.csv", folder / "cells.csv", holding, failed)
    write_files(
        {
            report.trials: trials.to_csv(index=False),
            report.cells: cells.to_csv(index=False),
            report.markdown: compose(trials, cells, ours, report, seconds),
        }
    )
    return report


def compose(trials: pd.DataFrame, cells: pd.DataFrame, ours: pd.DataFrame, report: Report, seconds: float) -> str:
    """The report as Markdown."""
    seeds = sorted(trials["seed"].unique())
    kind = "held out" if seeds[0] >= HELD_OUT else "of development"
    parts = [
        "# The adaptive filter on systems of many kinds",
        f"Seeds {seeds[0]} to {seeds[-1]}, {kind}; {seconds / 60:.1f} min. Errors of states are mean squared errors "
        "relative to the spread of each state; the ratios are to the better of an extended and a cubature Kalman "
        "filter that are told the noise and learn the parameters. Truth is simulated in steps 20 times as fine as "
        "the filter's. Ranges are over first guesses of the noise: " + "; ".join(guess.name for guess in GUESSES) + ".",
        "Cells that hold all limits (whole run 1.3, second half 1.1, parameters 1.3, coverage 90 to 99 %): "
        + ", ".join(f"{name} systems {100 * share:.0f} %" for name, share in report.holding.items())
        + ". Systems are attainable if the average of told filters over a grid of noise levels, weighed by their "
        "evidence, holds the limits of errors: it shows what not to know the noise costs.",
        "\n".join(f"- **Failed**: {escape(name)}, {escape(why)}" for name, why in report.failed.items()),
        _by_system(cells, ours),
        _rivals(cells),
    ]
    ablations = _ablations(cells)
    if ablations:
        parts += ["## Without one part", ablations]
    return "\n\n".join(part for part in parts if part) + "\n"


def _range(values: pd.Series[float], digits: int = 2, factor: float = 1.0) -> str:
    low, high = factor * values.min(), factor * values.max()
    if np.isnan(low):
        return "–"
    text = f"{low:.{digits}f}", f"{high:.{digits}f}"
    return text[0] if text[0] == text[1] else "–".join(text)


def _by_system(cells: pd.DataFrame, ours: pd.DataFrame) -> str:
    head = ["system", "whole", "half", "parameters", "coverage x / θ, %", f"ahead {HORIZONS}, %", "y ± 20 %", "x × 2"]
    rows = []
    for name in dict.fromkeys(cells["system"]):
        part = ours[ours["system"] == name]
        mark = " (frozen)" if SYSTEMS[name].group == "frozen" else ""
        ahead = " / ".join(_range(part[f"ahead_{k}"], 0, 100) for k in HORIZONS)
        rows.append(
            [
                SYSTEMS[name].title + mark,
                _range(part["whole_ratio"]),
                _range(part["half_ratio"]),
                _range(part["parameters_ratio"]),
                f"{_range(part['coverage'], 0, 100)} / {_range(part['parameter_coverage'], 0, 100)}",
                ahead,
                _range(part["near_level_y"], 0, 100),
                _range(part["near_level_x"], 0, 100),
            ]
        )
    return table(head, rows)


def _rivals(cells: pd.DataFrame) -> str:
    rows = []
    for _, cell in cells[cells["guess"] == ""].iterrows():
        ahead = " / ".join(f"{100 * cell[f'ahead_{k}']:.0f}" for k in HORIZONS)
        theta = "–" if np.isnan(cell["parameter_coverage"]) else f"{100 * cell['parameter_coverage']:.0f}"
        rows.append(
            [
                SYSTEMS[cell["system"]].title,
                cell["method"],
                *(f"{cell[name]:.4f} ({cell[f'{name}_ratio']:.2f})" for name in ("whole", "half", "parameters")),
                f"{100 * cell['coverage']:.0f} / {theta}",
                ahead,
            ]
        )
    return "## Rivals\n\n" + table(
        ["system", "filter", "whole", "half", "parameters", "coverage x / θ, %", f"ahead {HORIZONS}, %"], rows, left=2
    )


def _ablations(cells: pd.DataFrame) -> str:
    """What each part is worth: ratios of variants without it to the whole filter, over systems and guesses."""
    whole = cells[cells["method"] == "pcnet"].set_index(["system", "guess"])
    rows = []
    for method in dict.fromkeys(cells["method"]):
        if ": " not in method:
            continue
        part = cells[cells["method"] == method].set_index(["system", "guess"])
        both = part.join(whole, rsuffix="_all")
        ratio = (both["whole"] / both["whole_all"]).replace(np.inf, np.nan)
        worst = ratio.groupby("system").mean().sort_values().index[-1]
        missed = 100 * (part["coverage"].clip(upper=0.95) - both["coverage_all"].clip(upper=0.95)).min()
        theta = 100 * (part["parameter_coverage"] - both["parameter_coverage_all"]).min()
        rows.append(
            [
                method.partition(": ")[2],
                f"{np.exp(np.log(ratio).mean()):.2f}",
                f"{ratio.groupby('system').mean().max():.3g} ({worst})",
                f"{missed:+.0f}",
                f"{theta:+.0f}",
                f"{100 * part['lost'].max():.0f}",
            ]
        )
    head = ["without", "error, geometric mean", "largest, by system", "coverage x, points", "θ, points", "lost, %"]
    return table(head, rows) if rows else ""
