"""The result figures of the paper, drawn from what the study found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from pcnet.files import atomic_write
from pcnet.results.drawing import COLOURS, DASHES, Series, channel_names, draw_series, extremes, finish
from pcnet.results.result import Result
from pcnet.simulate import GLV_OBSERVATION_SD, GLV_PARAMETERS, GLV_STATE_SD
from studies.paper.findings import MODELS, NOISES, PARAMETERS, SCENARIOS, Cell, Findings, ratio_name

Array = NDArray[Any]

WIDTH = 9.0
DPI = 150
LINES: dict[int, tuple[Any, str]] = {2: ("-", "o"), 3: (DASHES, "s")}
"""Line and marker of each order of motion."""
CHANNELS = tuple(COLOURS[:3])
TRUE_PARAMETERS: dict[str, Sequence[float]] = {"glv": GLV_PARAMETERS}
TRUE_LOG_PRECISIONS = {"lambda_y": -2 * math.log(GLV_OBSERVATION_SD), "lambda_x": -2 * math.log(GLV_STATE_SD)}
PRECISIONS = {"lambda_y": ("y", "observation noise"), "lambda_x": ("x", "state noise")}
HEADROOM = 0.2
"""How far the axes of states and sensations reach beyond what they show, as a share of its range."""

OPENING = 0.05
"""Bands in this first share of the time, where beliefs are still those of the prior, do not count for an axis."""
NOTHING = "every inversion diverged"


class Drawing(NamedTuple):
    """A figure and what to say about it."""

    name: str
    title: str
    caption: str
    figure: Figure


class Picture(NamedTuple):
    """A figure in a file."""

    name: str
    path: Path
    title: str
    caption: str


def draw(findings: Findings, folder: str | Path) -> list[Picture]:
    """Write every figure as a PNG into a folder, which is made if need be."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for make in makers(findings):
        drawing = make()
        path = folder / f"{drawing.name}.png"
        with atomic_write(path) as scratch:
            drawing.figure.savefig(scratch, dpi=DPI, format="png")
        pictures.append(Picture(drawing.name, path, drawing.title, drawing.caption))
    return pictures


def makers(findings: Findings) -> list[Callable[[], Drawing]]:
    """A function for each figure, in the order of the paper; none is drawn before it is called."""
    by_order: list[Callable[[], Drawing]] = []
    for shown in (inferred_states, predicted_sensations):
        by_order += [lambda shown=shown, k=k: shown(findings, k) for k in findings.orders]  # type: ignore[misc]
    return [
        lambda: process(findings),
        lambda: errors(findings),
        lambda: free_actions(findings),
        lambda: log_precisions(findings, "lambda_y"),
        lambda: log_precisions(findings, "lambda_x"),
        lambda: parameters(findings),
        *by_order,
    ]


# --- the process -----------------------------------------------------------------------------------------------------
def process(findings: Findings) -> Drawing:
    """True states above, observations below."""
    world = findings.worlds[0]
    times = world.times.numpy()
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    shown = {"true state x (population)": world.states, "observation y (population)": world.observations}
    for ax, (label, values) in zip(figure.subplots(2, 1, sharex=True, sharey=True), shown.items(), strict=True):
        found = values.numpy()
        series = [
            Series(label[-1], name, colour, found[:, i])
            for i, (name, colour) in enumerate(zip(channel_names("x", found.shape[1]), CHANNELS, strict=True))
        ]
        draw_series(ax, times, series)
        finish(ax, label, times, series)
        ax.label_outer()
    names = [f"channel {i}" for i in range(1, 4)]
    _legend(figure, [Line2D([], [], color=c, label=n) for n, c in zip(names, CHANNELS, strict=True)])
    caption = (
        "One realisation of the generalised Lotka–Volterra process: true states with state noise (top) and the "
        f"observations made of them (bottom). The noise is {NOISES.get(findings.data, findings.data)}."
    )
    if len(findings.worlds) > 1:
        caption += f" The first of {len(findings.worlds)} replicates."
    return Drawing("process", "The process", caption, figure)


# --- against C -------------------------------------------------------------------------------------------------------
def errors(findings: Findings) -> Drawing:
    """The MSE of the selected models against C, a panel a scenario and a line an order."""
    figure, axes = _panels(findings)
    for model, ax in zip(findings.models, axes, strict=True):
        for colour, orders in zip(COLOURS, findings.orders, strict=False):
            _against_ratio(ax, findings, model, orders, "x.mse", colour, _geometric_mean)
        ax.set_yscale("log")
        ax.axhline(findings.state_variance, color="black", linestyle=":", linewidth=1.2)
        ax.axhline(findings.raw_mse, color="0.45", linestyle="-.", linewidth=1.2)
    axes[0].set_ylabel("MSE of the inferred states (population²)")
    handles = [_order_handle(orders, colour) for colour, orders in zip(COLOURS, findings.orders, strict=False)]
    handles += [
        Line2D([], [], color="black", linestyle=":", label="variance of the states"),
        Line2D([], [], color="0.45", linestyle="-.", label="MSE of the raw observations"),
    ]
    _legend(figure, handles)
    caption = (
        "Mean squared error between true and inferred states of the model with the lowest free action at each prior "
        "precision ratio C. Above the dotted line a model does worse than a constant, the mean of the states; below "
        f"the dash-dotted one it does better than the observations it was given.{_spread(findings, 'geometric mean')}"
    )
    return Drawing("mse", "Error of the inferred states", caption + _gaps(findings), figure)


def free_actions(findings: Findings) -> Drawing:
    """Free action and its two parts against C, a panel a scenario and a line an order."""
    parts = {"free_action": "free action", "complexity": "complexity", "inaccuracy": "−accuracy"}
    winners = findings.winners.assign(inaccuracy=-findings.winners["accuracy"])
    ours = findings._replace(winners=winners)
    figure, axes = _panels(findings)
    for model, ax in zip(findings.models, axes, strict=True):
        for colour, column in zip((COLOURS[0], COLOURS[2], COLOURS[1]), parts, strict=True):
            for orders in findings.orders:
                _against_ratio(ax, ours, model, orders, column, colour, np.mean)
    values = winners[list(parts)].to_numpy(dtype=float)
    for ax in axes:
        if (values > 0).all():
            ax.set_yscale("log")
        else:
            ax.set_yscale("symlog", linthresh=float(np.quantile(np.abs(values), 0.1)) or 1.0)
    axes[0].set_ylabel("sum over the run (nats)")
    colours = zip((COLOURS[0], COLOURS[2], COLOURS[1]), parts.values(), strict=True)
    handles = [Line2D([], [], color=colour, label=label) for colour, label in colours]
    _legend(figure, handles + [_order_handle(orders, "0.3") for orders in findings.orders])
    caption = (
        "Free action = complexity − accuracy of the model with the lowest free action at each C. The accuracy is drawn "
        f"with its sign turned, so that a lower line is a more accurate model.{_spread(findings, 'mean')}"
    )
    return Drawing("free_action", "Free action, accuracy and complexity", caption + _gaps(findings), figure)


def _panels(findings: Findings) -> tuple[Figure, list[Axes]]:
    """A panel a scenario over the ratios C, with one common scale."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = list(figure.subplots(1, len(findings.models), sharey=True, squeeze=False)[0])
    for model, ax in zip(findings.models, axes, strict=True):
        ax.set_xscale("log")
        ax.set_xticks(findings.ratios, [ratio_name(ratio) for ratio in findings.ratios], fontsize="small")
        ax.minorticks_off()
        ax.set_xlabel("prior precision ratio C")
        ax.set_title(_scenario(model), loc="left", fontsize="medium")
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def _against_ratio(
    ax: Axes, findings: Findings, model: str, orders: int, column: str, colour: str, average: Callable[[Any], Any]
) -> None:
    """A column of the winners at every C: the average over replicates, bars from the least to the greatest."""
    rows = findings.winners
    own = rows[(rows["model"] == model) & (rows["orders"] == orders)].groupby("ratio")[column]
    middle = own.agg(lambda values: float(average(values.to_numpy()))).reindex(findings.ratios)
    below, above = middle - own.min().reindex(findings.ratios), own.max().reindex(findings.ratios) - middle
    line, marker = LINES.get(orders, (":", "^"))
    nudge = 1.05 ** (1 if orders % 2 else -1)  # so that the bars of two orders do not hide each other
    bars = [below.clip(lower=0).to_numpy(), above.clip(lower=0).to_numpy()] if len(findings.worlds) > 1 else None
    ax.errorbar(
        [ratio * nudge for ratio in findings.ratios] if bars is not None else findings.ratios,
        middle.to_numpy(),
        yerr=bars,
        color=colour,
        linestyle=line,
        marker=marker,
        markersize=5,
        linewidth=1.6,
        elinewidth=1.0,
        capsize=3,
    )


def _geometric_mean(values: Array) -> float:
    return float(np.exp(np.log(values).mean()))


def _spread(findings: Findings, average: str) -> str:
    count = len(findings.worlds)
    return f" Points: {average} over {count} replicates; bars: least to greatest." if count > 1 else ""


# --- slow beliefs over time ------------------------------------------------------------------------------------------
class Slow(NamedTuple):
    """One channel, or the mean of several, over time: mean over replicates, two-sd reach, and all final values."""

    ratio: float
    times: Array
    mean: Array
    reach: Array
    ends: Array

    def series(self, colour: str, first: int = 0) -> Series:
        mean, reach = self.mean[first:], self.reach[first:]
        return Series("", ratio_name(self.ratio), colour, mean, mean - reach, mean + reach)


def log_precisions(findings: Findings, node: str) -> Drawing:
    """A log-precision over time: a column a scenario, a row an order, a line a ratio."""
    short, noise = PRECISIONS[node]
    figure = Figure(figsize=(WIDTH, 3.2 * len(findings.orders) + 0.9), layout="constrained")
    grid = figure.subplots(len(findings.orders), len(findings.models), sharex=True, sharey="col", squeeze=False)
    channels = max((result.mean(node).shape[-1] for result in findings.slow.values()), default=1)
    label = f"log-precision of {short}" + (f"\n(mean of {channels} channels)" if channels > 1 else "")
    truth = TRUE_LOG_PRECISIONS[node]
    for column, model in zip(grid.T, findings.models, strict=True):
        drawn: list[Slow] = []
        for ax, orders in zip(column, findings.orders, strict=True):
            drawn += _draw_slow(ax, findings, model, orders, node)
            ax.axhline(truth, color="black", linestyle=DASHES, linewidth=1.2, zorder=3)
            ax.set_title(f"{_scenario(model)}, {orders} orders", loc="left", fontsize="medium")
        _finish_slow(column, findings, label, drawn, truth)
    for ax in grid[:-1].flat:
        ax.set_xlabel("")
    _legend(figure, [*_ratio_handles(findings), _truth_handle()], columns=len(findings.ratios))
    caption = (
        f"Posterior log-precision of the {noise} over time, for each prior precision ratio C. Bands: two posterior "
        f"standard deviations; the first of them may leave the axes. Dashed: the log-precision of the noise "
        f"in the process. The scenarios have scales of their own."
        f"{_replicate_note(findings)}"
    )
    if channels > 1:
        caption += f" There is one log-precision a channel; means and standard deviations are averaged over {channels}."
    name = "log_precision_" + short
    return Drawing(name, f"Log-precision of the {noise}", caption + _gaps(findings), figure)


def parameters(findings: Findings) -> Drawing:
    """The parameters over time: a row a parameter, a column an order, a line a ratio."""
    rows = [(model, i) for model in findings.models for i in range(len(PARAMETERS[model]))]
    figure = Figure(figsize=(WIDTH, 2.5 * len(rows) + 0.9), layout="constrained")
    grid = figure.subplots(len(rows), len(findings.orders), sharex=True, sharey="row", squeeze=False)
    for row, (model, i) in zip(grid, rows, strict=True):
        truth = TRUE_PARAMETERS[model][i] if model in TRUE_PARAMETERS else None
        drawn: list[Slow] = []
        for ax, orders in zip(row, findings.orders, strict=True):
            drawn += _draw_slow(ax, findings, model, orders, "theta", i)
            if truth is not None:
                ax.axhline(truth, color="black", linestyle=DASHES, linewidth=1.2, zorder=3)
            ax.set_title(f"{MODELS[model]}, {orders} orders", loc="left", fontsize="medium")
        _finish_slow(row, findings, f"parameter {PARAMETERS[model][i]}", drawn, truth)
    for ax in grid.flat:
        ax.label_outer()
    _legend(figure, [*_ratio_handles(findings), _truth_handle()], columns=len(findings.ratios))
    caption = (
        "Posterior parameters over time, for each prior precision ratio C. Bands: two posterior standard deviations; "
        "the first of them may leave the axes. Dashed: the values of the process, which has no ρ: its form is not that "
        "of the Lorenz model."
        f"{_replicate_note(findings)}"
    )
    return Drawing("parameters", "Parameters", caption + _gaps(findings), figure)


def _slow(findings: Findings, cell: Cell, node: str, channel: int | None = None) -> Slow | None:
    """The belief of the winners of a cell; the mean of all channels unless one is named."""
    result = findings.slow.get(cell)
    if result is None:
        return None
    which = slice(None) if channel is None else slice(channel, channel + 1)
    means, sds = (values[..., which].mean(-1) for values in (result.mean(node), result.sd(node)))
    return Slow(cell.ratio, result.times, means.mean(0), 2 * sds.mean(0), means[:, -1])


def _draw_slow(
    ax: Axes, findings: Findings, model: str, orders: int, node: str, channel: int | None = None
) -> list[Slow]:
    """A line with its band for each ratio and, beside its end, the range of the replicates."""
    wanted = [_slow(findings, Cell(model, orders, ratio), node, channel) for ratio in findings.ratios]
    found = [each for each in wanted if each is not None]
    colours = ratio_colours(findings.ratios)
    for i, each in enumerate(found):
        draw_series(ax, each.times, [each.series(colours[each.ratio])])
        if len(findings.worlds) > 1:
            at, ends = each.times[-1] * (1.02 + 0.012 * i), [each.ends.min(), each.ends.max()]
            ax.plot([at, at], ends, color=colours[each.ratio], linewidth=2, marker="o", markersize=2)
    if not found:
        ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", va="center")
    return found


def _finish_slow(
    axes: Sequence[Axes], findings: Findings, label: str, drawn: Sequence[Slow], truth: float | None = None
) -> None:
    """Common labels and limits, which may cut off bands of the beginning, but nothing else."""
    times = next((result.times for result in findings.slow.values()), np.array([0.0, 1.0]))
    first = int(OPENING * len(times))
    beyond = 1.03 + 0.012 * len(findings.ratios) if len(findings.worlds) > 1 else 1.0
    always = [
        float(value) for each in drawn for values in (each.mean, each.ends) for value in (values.min(), values.max())
    ]
    always += [] if truth is None else [truth]
    for ax in axes:
        finish(ax, label, times[first:], [each.series("", first) for each in drawn])
        low, high = ax.get_ylim()
        margin = 0.03 * (high - low)
        ax.set_ylim(min([low, *(v - margin for v in always)]), max([high, *(v + margin for v in always)]))
        ax.set_xlim(times[0], times[-1] * beyond)


def ratio_colours(ratios: Sequence[float]) -> dict[float, str]:
    """Dark to light with C, told apart with any colour vision; the palest end is left out."""
    shades = mpl.colormaps["viridis"](np.linspace(0.0, 0.92, len(ratios)))
    return {ratio: to_hex(shade) for ratio, shade in zip(ratios, shades, strict=True)}


def _ratio_handles(findings: Findings) -> list[Any]:
    colours = ratio_colours(findings.ratios)
    handles: list[Any] = [Line2D([], [], color=c, linewidth=2, label=ratio_name(r)) for r, c in colours.items()]
    handles[0].set_label(f"C = {ratio_name(findings.ratios[0])}")
    handles.append(Patch(color="0.5", alpha=0.35, linewidth=0, label="±2 sd"))
    if len(findings.worlds) > 1:
        bar: dict[str, Any] = {"linestyle": "none", "marker": "|", "markersize": 11, "markeredgewidth": 2}
        handles.append(Line2D([], [], color="0.3", **bar, label="replicates at the end"))
    return handles


def _truth_handle() -> Line2D:
    return Line2D([], [], color="black", linestyle=DASHES, linewidth=1.2, label="true value")


def _replicate_note(findings: Findings) -> str:
    count = len(findings.worlds)
    if count == 1:
        return ""
    return (
        f" Lines and bands are means over {count} replicates; the bars at the right reach from the least to the "
        "greatest final value."
    )


# --- fast beliefs over time ------------------------------------------------------------------------------------------
def inferred_states(findings: Findings, orders: int) -> Drawing:
    """Inferred and true states: a row a ratio, a column a scenario."""
    truth = findings.worlds[0].states.numpy()

    def read(result: Result) -> tuple[Array, Array]:
        return result.mean("x")[:, 0], truth

    figure = _rows(findings, orders, "state", read, truth, pale=2.6)
    _legend(figure, _channel_handles("x", "inferred", "true"))
    caption = (
        f"Inferred states (thin lines) on the true ones (broad and pale) with {orders} orders of motion: a row a "
        f"prior precision ratio C, a column a scenario.{_first(findings)}"
    )
    name = f"states_{orders}_orders"
    return Drawing(name, f"Inferred states, {orders} orders of motion", caption + _gaps(findings, orders), figure)


def predicted_sensations(findings: Findings, orders: int) -> Drawing:
    """Predicted and actual sensations: a row a ratio, a column a scenario."""
    seen = findings.worlds[0].observations.numpy()

    def read(result: Result) -> tuple[Array, Array]:
        return result.prediction("y")[:, 0], result.observation("y")[:, 0]

    figure = _rows(findings, orders, "sensation", read, seen, pale=0.8)
    _legend(figure, _channel_handles("y", "predicted", "observed"))
    caption = (
        f"Predicted sensations (solid) and the observations (transparent) with {orders} orders of motion: a row a "
        f"prior precision ratio C, a column a scenario.{_first(findings)}"
    )
    name = f"sensations_{orders}_orders"
    return Drawing(name, f"Predicted sensations, {orders} orders of motion", caption + _gaps(findings, orders), figure)


def _rows(
    findings: Findings,
    orders: int,
    label: str,
    read: Callable[[Result], tuple[Array, Array]],
    shown: Array,
    *,
    pale: float,
) -> Figure:
    """A panel for each ratio and model: the second of what is read pale, the first on it; limits by `shown`."""
    ratios, models = findings.ratios, findings.models
    figure = Figure(figsize=(WIDTH, 1.55 * len(ratios) + 1.2), layout="constrained")
    grid = figure.subplots(len(ratios), len(models), sharex=True, sharey=True, squeeze=False)
    reach = HEADROOM * (shown.max() - shown.min())
    low, high = shown.min() - reach, shown.max() + reach
    for i, ratio in enumerate(ratios):
        for j, model in enumerate(models):
            ax, result = grid[i, j], findings.traces.get(Cell(model, orders, ratio))
            ax.set_ylim(low, high)
            ax.margins(x=0)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_ylabel(f"C = {ratio_name(ratio)}\n{label}")
            ax.set_xlabel("time")
            if i == 0:
                ax.set_title(f"{_scenario(model)}\n", loc="left", fontsize="medium")  # a line above the notes
            if result is None:
                ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", va="center")
            else:
                believed, known = read(result)
                _overlay(ax, result.times, believed, known, pale)
                lost = 100 * float(((believed < low) | (believed > high)).any(-1).mean())
                off = f"{_share(lost)} of the time off the axis; " if lost > 0 else ""
                mse = float(((believed - known) ** 2).mean())
                ax.set_title(f"{off}MSE {mse:.2g}", loc="right", fontsize="small", color="0.3")
            ax.label_outer()
    return figure


def _overlay(ax: Axes, times: Array, believed: Array, known: Array, pale: float) -> None:
    for i, colour in enumerate(CHANNELS):
        at = extremes(known[:, i])
        ax.plot(times[at], known[at, i], color=colour, linewidth=pale, alpha=0.35, zorder=1)
    for i, colour in enumerate(CHANNELS):
        at = extremes(believed[:, i])
        ax.plot(times[at], believed[at, i], color=colour, linewidth=0.9, zorder=2)


def _channel_handles(name: str, believed: str, known: str) -> list[Any]:
    handles = [
        Line2D([], [], color=colour, linewidth=2, label=label)
        for colour, label in zip(CHANNELS, channel_names(name, len(CHANNELS)), strict=True)
    ]
    handles.append(Line2D([], [], color="0.2", linewidth=0.9, label=believed))
    handles.append(Line2D([], [], color="0.2", linewidth=2.6, alpha=0.35, label=known))
    return handles


# --- words and legends -----------------------------------------------------------------------------------------------
def _scenario(model: str) -> str:
    return f"{MODELS[model]} model ({SCENARIOS[model]})"


def _order_handle(orders: int, colour: str) -> Line2D:
    line, marker = LINES.get(orders, (":", "^"))
    return Line2D([], [], color=colour, linestyle=line, marker=marker, markersize=5, label=f"{orders} orders of motion")


def _legend(figure: Figure, handles: Sequence[Any], columns: int | None = None) -> None:
    """Above all panels, where it hides nothing."""
    columns = columns or len(handles)
    rows = -(-len(handles) // columns)
    by_column = [handle for first in range(columns) for handle in handles[first::columns]] if rows > 1 else handles
    figure.legend(handles=by_column, loc="outside upper center", ncols=columns, frameon=False, columnspacing=1.2)


def _first(findings: Findings) -> str:
    return " The first replicate." if len(findings.worlds) > 1 else ""


def _share(percent: float) -> str:
    return f"{percent:.2g} %" if percent >= 0.01 else "<0.01 %"


def _gaps(findings: Findings, orders: int | None = None) -> str:
    """Which cells have nothing to show."""
    present = _cells(findings.winners)
    missing = [str(cell) for cell in findings.cells if cell not in present and orders in (None, cell.orders)]
    return f" Nothing to show, for want of an inversion that did not diverge: {'; '.join(missing)}." if missing else ""


def _cells(rows: pd.DataFrame) -> set[Cell]:
    columns = (rows[name].tolist() for name in ("model", "orders", "ratio"))
    return {Cell(str(m), int(k), float(c)) for m, k, c in zip(*columns, strict=True)}
