"""Pictures of the study: errors, coverages, precisions, and parameters over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pcnet.files import atomic_write
from pcnet.results.drawing import COLOURS
from studies.calibration.design import CASES, DT, RIGHT
from studies.calibration.findings import NEAR_JUMP, NEAR_X, NEAR_Y, Cell, Findings
from studies.calibration.judging import SURE
from studies.calibration.measures import EXACT
from studies.calibration.methods import GUESSING, NAMES
from studies.paper.figures import DPI, Drawing, Picture

WIDTH = 9.0
SHOWN = (5e-3, 2e2)
"""Learned precisions over the true ones that are beyond these are drawn at the edge."""
TINTS = dict(
    zip(NAMES, (*COLOURS[:3], COLOURS[3], COLOURS[2], COLOURS[5], COLOURS[2], COLOURS[4], COLOURS[4]), strict=True)
)
"""A colour for each method; those that never meet in a case may share one."""


def draw(findings: Findings, folder: Path) -> list[Picture]:
    """Write every figure as a PNG into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for make in (errors, coverages, precisions, parameters):
        drawing = make(findings)
        if drawing is None:
            continue
        path = folder / f"{drawing.name}.png"
        with atomic_write(path) as scratch:
            drawing.figure.savefig(scratch, dpi=DPI, format="png")
        pictures.append(Picture(drawing.name, path, drawing.title, drawing.caption))
    return pictures


def errors(findings: Findings) -> Drawing:
    """The MSE of every seed, a row a cell and a panel a case."""

    def panel(ax: Axes, cells: Sequence[Cell]) -> None:
        for place, cell in enumerate(cells):
            values = findings.rows(cell)["mse"].dropna().to_numpy(dtype=float)
            _dots(ax, place, values, TINTS[cell.method])
        ax.set_xscale("log")
        ax.axvline(findings.summary(cells[0]).raw, color="black", linestyle=":", linewidth=1.2)

    figure = _rows_of_cells(findings, panel, "MSE of the states in the second half of the time")
    _legend(figure, [_median(), Line2D([], [], color="black", linestyle=":", label="raw observations")])
    caption = (
        "Errors of the inferred states: a dot a seed, a bar the median. The graph and the paper's rules begin from the "
        "prior that is named; the filters are told the noise."
    )
    return Drawing("errors", "Errors of the states", caption, figure)


def coverages(findings: Findings) -> Drawing:
    """How often intervals contain the truth, of parameters and states."""

    def panel(ax: Axes, cells: Sequence[Cell]) -> None:
        ax.axvspan(*SURE, color="0.9")
        ax.axvline(EXACT, color="black", linestyle=":", linewidth=1.2)
        for place, cell in enumerate(cells):
            found = findings.summary(cell)
            for share, marker, shift in ((found.coverage_parameters, "s", -0.15), (found.coverage_states, "o", 0.15)):
                ax.plot([share.low, share.high], [place + shift] * 2, color=TINTS[cell.method], linewidth=1.5)
                ax.plot(share.value, place + shift, marker, color=TINTS[cell.method], markersize=5)
        ax.set_xlim(-0.02, 1.02)

    figure = _rows_of_cells(findings, panel, "share of truths within ±2 sd")
    handles = [
        Line2D([], [], color="0.3", marker="s", linestyle="-", label="parameters, at the end"),
        Line2D([], [], color="0.3", marker="o", linestyle="-", label="states, second half"),
        Patch(color="0.9", label="target"),
        Line2D([], [], color="black", linestyle=":", label="exact"),
    ]
    _legend(figure, handles)
    caption = (
        "Coverage of intervals of two standard deviations, with Wilson's 95 % interval for as many trials as there are "
        "seeds."
    )
    return Drawing("coverage", "Coverage", caption, figure)


def precisions(findings: Findings) -> Drawing | None:
    """Learned precisions over the true ones."""
    cases = [case for case in findings.cases if CASES[case].model.right]
    if not any(cell.method in GUESSING for case in cases for cell in findings.cells(case)):
        return None

    def panel(ax: Axes, cells: Sequence[Cell]) -> None:
        ax.axvspan(*NEAR_X, color="0.92")
        ax.axvspan(*NEAR_Y, color="0.8")
        for place, cell in enumerate(cells):
            rows = findings.rows(cell)
            for name, colour, shift in (("precision_y", COLOURS[0], -0.17), ("precision_x", COLOURS[1], 0.17)):
                values = rows[name].dropna().to_numpy(dtype=float).clip(*SHOWN)
                _dots(ax, place + shift, values, colour, height=0.12)
        ax.set_xscale("log")
        ax.set_xlim(SHOWN[0] / 1.2, SHOWN[1] * 1.2)

    figure = _rows_of_cells(findings, panel, "precision at the end ÷ true precision", cases, GUESSING)
    handles = [
        Line2D([], [], color=COLOURS[0], marker="o", linestyle="", label="of observations, y"),
        Line2D([], [], color=COLOURS[1], marker="o", linestyle="", label="of states, x"),
        Patch(color="0.8", label="target for y"),
        Patch(color="0.92", label="target for x"),
        _median(),
    ]
    _legend(figure, handles)
    caption = (
        "Precisions at the end, in units of the true ones: a dot a seed. Of several channels the one that is furthest "
        "off; what is beyond the axis is drawn at its end."
    )
    return Drawing("precisions", "Precisions", caption, figure)


def parameters(findings: Findings) -> Drawing | None:
    """The first parameter over time, of all seeds, by pcnet and by the rival."""
    cases = [case for case in findings.cases if CASES[case].model.right]
    if not cases:
        return None
    columns = 2
    figure = Figure(figsize=(WIDTH, 2.4 * -(-len(cases) // columns) + 0.6), layout="constrained")
    axes = np.atleast_1d(figure.subplots(-(-len(cases) // columns), columns, squeeze=False)).ravel()
    for ax in axes[len(cases) :]:
        ax.set_axis_off()
    for ax, case in zip(axes, cases, strict=False):
        shown = [cell for cell in findings.cells(case) if cell.prior in ("", RIGHT[0].name)]
        shown = [cell for cell in shown if cell.method in ("pcnet", "ekf", "ekf matched", "ekf random walk")]
        for cell in shown:
            outcome = findings.outcomes[cell]
            assert outcome.at is not None
            assert outcome.theta is not None
            low, middle, high = np.nanquantile(outcome.theta[..., 0], [0.05, 0.5, 0.95], axis=0)
            colour = TINTS[cell.method]
            ax.fill_between(outcome.at * DT, low, high, color=colour, alpha=0.25, linewidth=0)
            ax.plot(outcome.at * DT, middle, color=colour, linewidth=1.3)
        process = CASES[case].process
        first, last = process.parameters[0], (process.jump or process.parameters)[0]
        end = findings.samples * DT
        ax.plot([0, end / 2, end / 2, end], [first, first, last, last], color="black", linestyle=":", linewidth=1.3)
        spread = max(0.25 * abs(last), 5 * NEAR_JUMP) if process.jump else 0.2 * abs(first)
        ax.set_ylim(min(first, last) - spread, max(first, last) + spread)
        ax.set_title(CASES[case].title, fontsize=9)
        ax.set_xlabel("time")
    figure.supylabel("first parameter", fontsize=10)
    handles = [
        Line2D([], [], color=TINTS["pcnet"], label="pcnet"),
        Line2D([], [], color=TINTS["ekf"], label="extended Kalman filter told the noise"),
        Line2D([], [], color="black", linestyle=":", label="truth"),
    ]
    _legend(figure, handles)
    caption = (
        "Beliefs about the first parameter over time, from the right prior: median and 90 % of the seeds. The filters "
        "have the matched noise, and a random walk where parameters jump."
    )
    return Drawing("parameters", "Parameters over time", caption, figure)


# --- parts -----------------------------------------------------------------------------------------------------------
def _rows_of_cells(
    findings: Findings,
    panel: Callable[[Axes, Sequence[Cell]], None],
    label: str,
    cases: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
) -> Figure:
    """A panel a case, one below the other, each with a row a cell."""
    chosen = {
        case: [cell for cell in findings.cells(case) if methods is None or cell.method in methods]
        for case in (findings.cases if cases is None else cases)
    }
    chosen = {case: cells for case, cells in chosen.items() if cells}
    heights = [len(cells) + 1.6 for cells in chosen.values()]
    figure = Figure(figsize=(WIDTH, 0.21 * sum(heights) + 1.0), layout="constrained")
    axes = figure.subplots(len(chosen), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for ax, (case, cells) in zip(axes, chosen.items(), strict=True):
        panel(ax, cells)
        ax.set_yticks(range(len(cells)), [cell_name(cell) for cell in cells], fontsize=8)
        ax.set_ylim(len(cells) - 0.4, -0.6)
        ax.set_title(CASES[case].title, loc="left", fontsize=9)
        ax.grid(axis="x", color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
    axes[-1].set_xlabel(label)
    return figure


def cell_name(cell: Cell) -> str:
    """A method, with the prior it began from."""
    short = NAMES[cell.method].replace("extended Kalman filter", "EKF").replace("unscented Kalman filter", "UKF")
    return f"{short}, prior {cell.prior}" if cell.prior else short


def _dots(ax: Axes, place: float, values: np.ndarray, colour: str, height: float = 0.28) -> None:
    """A dot a value around a row, spread so that they can be told apart, and their median as a bar."""
    if not len(values):
        return
    shift = height * (np.arange(len(values)) * 0.618034 % 1 - 0.5) * 2
    ax.plot(values, place + shift, ".", color=colour, markersize=3, alpha=0.5, markeredgewidth=0)
    ax.plot([np.median(values)] * 2, [place - 1.3 * height, place + 1.3 * height], color="black", linewidth=1.5)


def _median() -> Line2D:
    return Line2D([], [], color="black", marker="|", markersize=9, markeredgewidth=1.5, linestyle="", label="median")


def _legend(figure: Figure, handles: Sequence[Artist]) -> None:
    figure.legend(handles=list(handles), loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
