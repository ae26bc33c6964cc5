"""Figures of the calibration study: errors, coverage, precisions, and parameters over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pcnet.results.drawing import COLOURS
from studies.calibration.design import CASES, DT, RIGHT
from studies.calibration.measures import NOMINAL_COVERAGE
from studies.calibration.methods import LEARN_NOISE, NAMES
from studies.calibration.results import NEAR_JUMP, NEAR_X, NEAR_Y, Cell, StudyResults
from studies.calibration.targets import COVERAGE
from studies.reporting import WIDTH, Drawing, Picture, legend, save_figures

PRECISION_RANGE = (5e-3, 2e2)
"""Learned precisions, over the true ones, outside this range are drawn at its ends."""
TINTS = dict(zip(NAMES, (COLOURS[i] for i in (0, 1, 2, 3, 2, 5, 2, 4, 4)), strict=True))
"""Colour of each method; methods that do not occur in the same case may share one."""


def draw(results: StudyResults, folder: Path) -> list[Picture]:
    """Write every figure as a PNG file into a folder."""
    drawings = (make(results) for make in (errors, coverages, precisions, parameters))
    return save_figures((drawing for drawing in drawings if drawing is not None), folder)


def errors(results: StudyResults) -> Drawing:
    """MSE of every seed: one panel per case, one row per cell."""

    def panel(ax: Axes, cells: Sequence[Cell]) -> None:
        for place, cell in enumerate(cells):
            values = results.rows(cell)["mse"].dropna().to_numpy(dtype=float)
            _dots(ax, place, values, TINTS[cell.method])
        ax.set_xscale("log")
        ax.axvline(results.summary(cells[0]).raw, color="black", linestyle=":", linewidth=1.2)

    figure = _rows_of_cells(results, panel, "MSE of the states in the second half of the time")
    legend(figure, [_median(), Line2D([], [], color="black", linestyle=":", label="raw observations")], fontsize=9)
    caption = (
        "Errors of the inferred states: one dot per seed; bars are medians. pcnet and ODEM start from the named prior "
        "of the noise; the Kalman filters are given the true noise."
    )
    return Drawing("errors", "Errors of the states", caption, figure)


def coverages(results: StudyResults) -> Drawing:
    """Coverage of the intervals of parameters and states."""

    def panel(ax: Axes, cells: Sequence[Cell]) -> None:
        ax.axvspan(*COVERAGE, color="0.9")
        ax.axvline(NOMINAL_COVERAGE, color="black", linestyle=":", linewidth=1.2)
        for place, cell in enumerate(cells):
            summary = results.summary(cell)
            shares = ((summary.coverage_parameters, "s", -0.15), (summary.coverage_states, "o", 0.15))
            for share, marker, shift in shares:
                ax.plot([share.low, share.high], [place + shift] * 2, color=TINTS[cell.method], linewidth=1.5)
                ax.plot(share.value, place + shift, marker, color=TINTS[cell.method], markersize=5)
        ax.set_xlim(-0.02, 1.02)

    figure = _rows_of_cells(results, panel, "share of true values within ±2 sd")
    handles = [
        Line2D([], [], color="0.3", marker="s", linestyle="-", label="parameters, at the end"),
        Line2D([], [], color="0.3", marker="o", linestyle="-", label="states, second half"),
        Patch(color="0.9", label="target"),
        Line2D([], [], color="black", linestyle=":", label="nominal"),
    ]
    legend(figure, handles, fontsize=9)
    caption = (
        "Coverage of intervals of ±2 standard deviations, with Wilson's 95 % interval, counting one trial per seed."
    )
    return Drawing("coverage", "Coverage", caption, figure)


def precisions(results: StudyResults) -> Drawing | None:
    """Learned precisions relative to the true ones."""
    cases = [case for case in results.cases if CASES[case].model.right]
    if not any(cell.method in LEARN_NOISE for case in cases for cell in results.cells(case)):
        return None

    def panel(ax: Axes, cells: Sequence[Cell]) -> None:
        ax.axvspan(*NEAR_X, color="0.92")
        ax.axvspan(*NEAR_Y, color="0.8")
        for place, cell in enumerate(cells):
            rows = results.rows(cell)
            for name, colour, shift in (("precision_y", COLOURS[0], -0.17), ("precision_x", COLOURS[1], 0.17)):
                values = rows[name].dropna().to_numpy(dtype=float).clip(*PRECISION_RANGE)
                _dots(ax, place + shift, values, colour, height=0.12)
        ax.set_xscale("log")
        ax.set_xlim(PRECISION_RANGE[0] / 1.2, PRECISION_RANGE[1] * 1.2)

    figure = _rows_of_cells(results, panel, "final precision ÷ true precision", cases, LEARN_NOISE)
    handles = [
        Line2D([], [], color=COLOURS[0], marker="o", linestyle="", label="of observations, y"),
        Line2D([], [], color=COLOURS[1], marker="o", linestyle="", label="of states, x"),
        Patch(color="0.8", label="target for y"),
        Patch(color="0.92", label="target for x"),
        _median(),
    ]
    legend(figure, handles, fontsize=9)
    caption = (
        "Final precisions relative to the true ones: one dot per seed, of the worst channel. Values outside the axis "
        "are drawn at its ends."
    )
    return Drawing("precisions", "Precisions", caption, figure)


def parameters(results: StudyResults) -> Drawing | None:
    """First parameter over time, of pcnet and of the baseline."""
    cases = [case for case in results.cases if CASES[case].model.right]
    if not cases:
        return None
    columns = 2
    figure = Figure(figsize=(WIDTH, 2.4 * -(-len(cases) // columns) + 0.6), layout="constrained")
    axes = np.atleast_1d(figure.subplots(-(-len(cases) // columns), columns, squeeze=False)).ravel()
    for ax in axes[len(cases) :]:
        ax.set_axis_off()
    for ax, case in zip(axes, cases, strict=False):
        shown = [cell for cell in results.cells(case) if cell.prior in ("", RIGHT[0].name)]
        shown = [cell for cell in shown if cell.method in ("pcnet", "ekf", "ekf matched", "ekf random walk")]
        for cell in shown:
            trial, colour = results.trials[cell], TINTS[cell.method]
            assert trial.at is not None
            assert trial.spread is not None
            low, middle, high = trial.spread
            ax.fill_between(trial.at * DT, low, high, color=colour, alpha=0.25, linewidth=0)
            ax.plot(trial.at * DT, middle, color=colour, linewidth=1.3)
        process = CASES[case].process
        first, last = process.parameters[0], (process.jump or process.parameters)[0]
        end = results.samples * DT
        ax.plot([0, end / 2, end / 2, end], [first, first, last, last], color="black", linestyle=":", linewidth=1.3)
        spread = max(0.25 * abs(last), 5 * NEAR_JUMP) if process.jump else 0.2 * abs(first)
        ax.set_ylim(min(first, last) - spread, max(first, last) + spread)
        ax.set_title(CASES[case].title, fontsize=9)
        ax.set_xlabel("time")
    figure.supylabel("first parameter", fontsize=10)
    handles = [
        Line2D([], [], color=TINTS["pcnet"], label="pcnet"),
        Line2D([], [], color=TINTS["ekf"], label="extended Kalman filter, true noise"),
        Line2D([], [], color="black", linestyle=":", label="truth"),
    ]
    legend(figure, handles, fontsize=9)
    caption = (
        "Mean of the first parameter over time, from the right prior: median and central 90 % of the seeds. The Kalman "
        "filters assume matched noise, and a random walk where parameters jump."
    )
    return Drawing("parameters", "Parameters over time", caption, figure)


# --- parts -----------------------------------------------------------------------------------------------------------
def _rows_of_cells(
    results: StudyResults,
    panel: Callable[[Axes, Sequence[Cell]], None],
    label: str,
    cases: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
) -> Figure:
    """One panel per case, stacked, with one row per cell."""
    chosen = {
        case: [cell for cell in results.cells(case) if methods is None or cell.method in methods]
        for case in (results.cases if cases is None else cases)
    }
    chosen = {case: cells for case, cells in chosen.items() if cells}
    heights = [len(cells) + 1.6 for cells in chosen.values()]
    figure = Figure(figsize=(WIDTH, 0.21 * sum(heights) + 1.0), layout="constrained")
    axes = figure.subplots(len(chosen), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for ax, (case, cells) in zip(axes, chosen.items(), strict=True):
        panel(ax, cells)
        ax.set_yticks(range(len(cells)), [cell.label for cell in cells], fontsize=8)
        ax.set_ylim(len(cells) - 0.4, -0.6)
        ax.set_title(CASES[case].title, loc="left", fontsize=9)
        ax.grid(axis="x", color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
    axes[-1].set_xlabel(label)
    return figure


def _dots(ax: Axes, place: float, values: np.ndarray, colour: str, height: float = 0.28) -> None:
    """One dot per value, spread vertically around a row, and a bar at the median."""
    if not len(values):
        return
    shift = height * (np.arange(len(values)) * 0.618034 % 1 - 0.5) * 2
    ax.plot(values, place + shift, ".", color=colour, markersize=3, alpha=0.5, markeredgewidth=0)
    ax.plot([np.median(values)] * 2, [place - 1.3 * height, place + 1.3 * height], color="black", linewidth=1.5)


def _median() -> Line2D:
    return Line2D([], [], color="black", marker="|", markersize=9, markeredgewidth=1.5, linestyle="", label="median")
