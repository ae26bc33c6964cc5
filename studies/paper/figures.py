"""Result figures of the paper, drawn from the results of the study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pcnet.results.downsample import Array, extremes
from pcnet.results.drawing import COLOURS, DASHES, Series, channel_names, draw_series, finish
from pcnet.results.result import Result
from pcnet.simulate import GLV_OBSERVATION_SD, GLV_PARAMETERS, GLV_STATE_SD
from studies.paper.design import MODELS, NOISES, PARAMETERS, SCENARIOS, Cell, ratio_name
from studies.paper.results import StudyResults
from studies.reporting import WIDTH, Drawing, Picture, legend, save_figures

LINES: dict[int, tuple[Any, str]] = {2: ("-", "o"), 3: (DASHES, "s")}
"""Line style and marker of each number of orders."""
CHANNELS = tuple(COLOURS[:3])
TRUE_PARAMETERS: dict[str, Sequence[float]] = {"glv": GLV_PARAMETERS}
TRUE_LOG_PRECISIONS = {"lambda_y": -2 * math.log(GLV_OBSERVATION_SD), "lambda_x": -2 * math.log(GLV_STATE_SD)}
PRECISIONS = {"lambda_y": ("y", "observation noise"), "lambda_x": ("x", "state noise")}
HEADROOM = 0.2
"""Margin of the axes of states and observations as a share of the range of the data."""
BURN_IN = 0.05
"""Bands in this first share of the time, where beliefs are close to the prior, do not affect the limits of an axis."""
NOTHING = "every inversion diverged"


def draw(results: StudyResults, folder: str | Path) -> list[Picture]:
    """Write every figure as a PNG file into a folder."""
    return save_figures((make() for make in makers(results)), folder)


def makers(results: StudyResults) -> list[Callable[[], Drawing]]:
    """One function per figure, in the order of the paper; a figure is drawn when its function is called."""
    by_order: list[Callable[[], Drawing]] = []
    for shown in (inferred_states, predicted_sensations):
        by_order += [lambda shown=shown, k=k: shown(results, k) for k in results.orders]  # type: ignore[misc]
    return [
        lambda: process(results),
        lambda: errors(results),
        lambda: free_actions(results),
        lambda: log_precisions(results, "lambda_y"),
        lambda: log_precisions(results, "lambda_x"),
        lambda: parameters(results),
        *by_order,
    ]


# --- the process -----------------------------------------------------------------------------------------------------
def process(results: StudyResults) -> Drawing:
    """True states (top) and observations (bottom)."""
    first = results.realisations[0]
    times = first.times.numpy()
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    shown = {"true state x (population)": first.states, "observation y (population)": first.observations}
    for ax, (label, values) in zip(figure.subplots(2, 1, sharex=True, sharey=True), shown.items(), strict=True):
        names = channel_names("x", values.shape[1])
        series = [
            Series("", name, colour, channel)
            for name, colour, channel in zip(names, CHANNELS, values.numpy().T, strict=True)
        ]
        draw_series(ax, times, series)
        finish(ax, label, times, series)
        ax.label_outer()
    names = [f"channel {i}" for i in range(1, 4)]
    legend(figure, [Line2D([], [], color=c, label=n) for n, c in zip(names, CHANNELS, strict=True)])
    caption = (
        "One realisation of the generalised Lotka–Volterra process: true states (top) and observations (bottom). The "
        f"noise is {NOISES.get(results.data, results.data)}."
    )
    if len(results.realisations) > 1:
        caption += f" First of {len(results.realisations)} replicates."
    return Drawing("process", "The process", caption, figure)


# --- against C -------------------------------------------------------------------------------------------------------
def errors(results: StudyResults) -> Drawing:
    """MSE of the selected models against C: one panel per scenario, one line per number of orders."""
    figure, axes = _panels(results)
    for model, ax in zip(results.models, axes, strict=True):
        for colour, orders in zip(COLOURS, results.orders, strict=False):
            _against_ratio(ax, results, model, orders, "x.mse", colour, _geometric_mean)
        ax.set_yscale("log")
        ax.axhline(results.state_variance, color="black", linestyle=":", linewidth=1.2)
        ax.axhline(results.raw_mse, color="0.45", linestyle="-.", linewidth=1.2)
    axes[0].set_ylabel("MSE of the inferred states (population²)")
    handles = [_order_handle(orders, colour) for colour, orders in zip(COLOURS, results.orders, strict=False)]
    handles += [
        Line2D([], [], color="black", linestyle=":", label="variance of the states"),
        Line2D([], [], color="0.45", linestyle="-.", label="MSE of the raw observations"),
    ]
    legend(figure, handles)
    caption = (
        "Mean squared error between true and inferred states of the model with the lowest free action at each prior "
        "precision ratio C. Above the dotted line a model is worse than a constant estimate, the mean of the states; "
        f"below the dash-dotted line it is better than the raw observations.{_spread(results, 'geometric mean')}"
    )
    return Drawing("mse", "Error of the inferred states", caption + _gaps(results), figure)


def free_actions(results: StudyResults) -> Drawing:
    """Free action and its two terms against C: one panel per scenario, one line per number of orders."""
    parts = {"free_action": "free action", "complexity": "complexity", "inaccuracy": "−accuracy"}
    winners = results.winners.assign(inaccuracy=-results.winners["accuracy"])
    extended = results._replace(winners=winners)
    figure, axes = _panels(results)
    for model, ax in zip(results.models, axes, strict=True):
        for colour, column in zip((COLOURS[0], COLOURS[2], COLOURS[1]), parts, strict=True):
            for orders in results.orders:
                _against_ratio(ax, extended, model, orders, column, colour, np.mean)
    values = winners[list(parts)].to_numpy(dtype=float)
    for ax in axes:
        if (values > 0).all():
            ax.set_yscale("log")
        else:
            ax.set_yscale("symlog", linthresh=float(np.quantile(np.abs(values), 0.1)) or 1.0)
    axes[0].set_ylabel("sum over the run (nats)")
    colours = zip((COLOURS[0], COLOURS[2], COLOURS[1]), parts.values(), strict=True)
    handles = [Line2D([], [], color=colour, label=label) for colour, label in colours]
    legend(figure, handles + [_order_handle(orders, "0.3") for orders in results.orders])
    caption = (
        "Free action = complexity − accuracy of the model with the lowest free action at each C. The negative accuracy "
        f"is drawn, so that a lower line is a more accurate model.{_spread(results, 'mean')}"
    )
    return Drawing("free_action", "Free action, accuracy and complexity", caption + _gaps(results), figure)


def _panels(results: StudyResults) -> tuple[Figure, list[Axes]]:
    """One panel per scenario over the ratios C, with a common scale."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = list(figure.subplots(1, len(results.models), sharey=True, squeeze=False)[0])
    for model, ax in zip(results.models, axes, strict=True):
        ax.set_xscale("log")
        ax.set_xticks(results.ratios, [ratio_name(ratio) for ratio in results.ratios], fontsize="small")
        ax.minorticks_off()
        ax.set_xlabel("prior precision ratio C")
        ax.set_title(_scenario(model), loc="left", fontsize="medium")
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def _against_ratio(
    ax: Axes, results: StudyResults, model: str, orders: int, column: str, colour: str, average: Callable[[Any], Any]
) -> None:
    """Column of the winners at every C: average over replicates, with bars from minimum to maximum."""
    rows = results.winners
    own = rows[(rows["model"] == model) & (rows["orders"] == orders)].groupby("ratio")[column]
    middle = own.agg(lambda values: float(average(values.to_numpy()))).reindex(results.ratios)
    below, above = middle - own.min().reindex(results.ratios), own.max().reindex(results.ratios) - middle
    line, marker = LINES.get(orders, (":", "^"))
    offset = 1.05 ** (1 if orders % 2 else -1)  # keeps the bars of two and three orders apart
    bars = [below.clip(lower=0).to_numpy(), above.clip(lower=0).to_numpy()] if len(results.realisations) > 1 else None
    ax.errorbar(
        [ratio * offset for ratio in results.ratios] if bars is not None else results.ratios,
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


def _spread(results: StudyResults, average: str) -> str:
    count = len(results.realisations)
    return f" Points: {average} over {count} replicates; bars: minimum to maximum." if count > 1 else ""


# --- slow beliefs over time ------------------------------------------------------------------------------------------
class Slow(NamedTuple):
    """A slow belief over time: mean over replicates, two standard deviations, and the final value of each replicate."""

    ratio: float
    times: Array
    mean: Array
    band: Array
    ends: Array

    def series(self, colour: str, first: int = 0) -> Series:
        mean, band = self.mean[first:], self.band[first:]
        return Series("", ratio_name(self.ratio), colour, mean, mean - band, mean + band)


def log_precisions(results: StudyResults, node: str) -> Drawing:
    """A log-precision over time: one column per scenario, one row per number of orders, one line per ratio."""
    short, noise = PRECISIONS[node]
    figure = Figure(figsize=(WIDTH, 3.2 * len(results.orders) + 0.9), layout="constrained")
    grid = figure.subplots(len(results.orders), len(results.models), sharex=True, sharey="col", squeeze=False)
    channels = max((result.mean(node).shape[-1] for result in results.slow.values()), default=1)
    label = f"log-precision of {short}" + (f"\n(mean of {channels} channels)" if channels > 1 else "")
    truth = TRUE_LOG_PRECISIONS[node]
    for column, model in zip(grid.T, results.models, strict=True):
        drawn: list[Slow] = []
        for ax, orders in zip(column, results.orders, strict=True):
            drawn += _draw_slow(ax, results, model, orders, node)
            ax.axhline(truth, color="black", linestyle=DASHES, linewidth=1.2, zorder=3)
            ax.set_title(f"{_scenario(model)}, {orders} orders", loc="left", fontsize="medium")
        _finish_slow(column, results, label, drawn, truth)
    for ax in grid[:-1].flat:
        ax.set_xlabel("")
    legend(figure, [*_ratio_handles(results), _truth_handle()], columns=len(results.ratios))
    caption = (
        f"Posterior log-precision of the {noise} over time for each prior precision ratio C. Bands: two posterior "
        "standard deviations, which may leave the axes at the beginning. Dashed: log-precision of the noise in the "
        f"process. The scenarios have separate scales.{_replicate_note(results)}"
    )
    if channels > 1:
        caption += (
            f" There is one log-precision per channel; means and standard deviations are averaged over {channels}."
        )
    name = "log_precision_" + short
    return Drawing(name, f"Log-precision of the {noise}", caption + _gaps(results), figure)


def parameters(results: StudyResults) -> Drawing:
    """Parameters over time: one row per parameter, one column per number of orders, one line per ratio."""
    rows = [(model, i) for model in results.models for i in range(len(PARAMETERS[model]))]
    figure = Figure(figsize=(WIDTH, 2.5 * len(rows) + 0.9), layout="constrained")
    grid = figure.subplots(len(rows), len(results.orders), sharex=True, sharey="row", squeeze=False)
    for row, (model, i) in zip(grid, rows, strict=True):
        truth = TRUE_PARAMETERS[model][i] if model in TRUE_PARAMETERS else None
        drawn: list[Slow] = []
        for ax, orders in zip(row, results.orders, strict=True):
            drawn += _draw_slow(ax, results, model, orders, "theta", i)
            if truth is not None:
                ax.axhline(truth, color="black", linestyle=DASHES, linewidth=1.2, zorder=3)
            ax.set_title(f"{MODELS[model]}, {orders} orders", loc="left", fontsize="medium")
        _finish_slow(row, results, f"parameter {PARAMETERS[model][i]}", drawn, truth)
    for ax in grid.flat:
        ax.label_outer()
    legend(figure, [*_ratio_handles(results), _truth_handle()], columns=len(results.ratios))
    caption = (
        "Posterior parameters over time for each prior precision ratio C. Bands: two posterior standard deviations, "
        "which may leave the axes at the beginning. Dashed: values of the process; ρ has none, because the process is "
        f"not of the Lorenz form.{_replicate_note(results)}"
    )
    return Drawing("parameters", "Parameters", caption + _gaps(results), figure)


def _slow(results: StudyResults, cell: Cell, node: str, channel: int | None = None) -> Slow | None:
    """Belief of the winners of a cell in one channel, or averaged over channels."""
    result = results.slow.get(cell)
    if result is None:
        return None
    which = slice(None) if channel is None else slice(channel, channel + 1)
    means, sds = (values[..., which].mean(-1) for values in (result.mean(node), result.sd(node)))
    return Slow(cell.ratio, result.times, means.mean(0), 2 * sds.mean(0), means[:, -1])


def _draw_slow(
    ax: Axes, results: StudyResults, model: str, orders: int, node: str, channel: int | None = None
) -> list[Slow]:
    """One line with its band per ratio, and the range of the final values over replicates beside its end."""
    beliefs = [_slow(results, Cell(model, orders, ratio), node, channel) for ratio in results.ratios]
    drawn = [each for each in beliefs if each is not None]
    colours = ratio_colours(results.ratios)
    for i, each in enumerate(drawn):
        draw_series(ax, each.times, [each.series(colours[each.ratio])])
        if len(results.realisations) > 1:
            at, ends = each.times[-1] * (1.02 + 0.012 * i), [each.ends.min(), each.ends.max()]
            ax.plot([at, at], ends, color=colours[each.ratio], linewidth=2, marker="o", markersize=2)
    if not drawn:
        ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", va="center")
    return drawn


def _finish_slow(
    axes: Sequence[Axes], results: StudyResults, label: str, drawn: Sequence[Slow], truth: float | None = None
) -> None:
    """Common labels and limits, which may cut off bands at the beginning only."""
    times = next((result.times for result in results.slow.values()), np.array([0.0, 1.0]))
    first = int(BURN_IN * len(times))
    beyond = 1.03 + 0.012 * len(results.ratios) if len(results.realisations) > 1 else 1.0
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
    """Colours from dark to light with C, safe for colour-blind readers; the palest ones are left out."""
    shades = mpl.colormaps["viridis"](np.linspace(0.0, 0.92, len(ratios)))
    return {ratio: to_hex(shade) for ratio, shade in zip(ratios, shades, strict=True)}


def _ratio_handles(results: StudyResults) -> list[Any]:
    colours = ratio_colours(results.ratios)
    handles: list[Any] = [Line2D([], [], color=c, linewidth=2, label=ratio_name(r)) for r, c in colours.items()]
    handles[0].set_label(f"C = {ratio_name(results.ratios[0])}")
    handles.append(Patch(color="0.5", alpha=0.35, linewidth=0, label="±2 sd"))
    if len(results.realisations) > 1:
        bar: dict[str, Any] = {"linestyle": "none", "marker": "|", "markersize": 11, "markeredgewidth": 2}
        handles.append(Line2D([], [], color="0.3", **bar, label="replicates at the end"))
    return handles


def _truth_handle() -> Line2D:
    return Line2D([], [], color="black", linestyle=DASHES, linewidth=1.2, label="true value")


def _replicate_note(results: StudyResults) -> str:
    count = len(results.realisations)
    if count == 1:
        return ""
    return (
        f" Lines and bands are means over {count} replicates; the bars at the right show the range of the final values."
    )


# --- fast beliefs over time ------------------------------------------------------------------------------------------
def inferred_states(results: StudyResults, orders: int) -> Drawing:
    """Inferred and true states: one row per ratio, one column per scenario."""
    truth = results.realisations[0].states.numpy()

    def read(result: Result) -> tuple[Array, Array]:
        return result.mean("x")[:, 0], truth

    figure = _rows(results, orders, "state", read, truth, pale=2.6)
    legend(figure, _channel_handles("x", "inferred", "true"))
    caption = (
        f"Inferred states (thin lines) and true states (broad, pale lines) with {orders} orders of motion: one row per "
        f"prior precision ratio C, one column per scenario.{_first(results)}"
    )
    name = f"states_{orders}_orders"
    return Drawing(name, f"Inferred states, {orders} orders of motion", caption + _gaps(results, orders), figure)


def predicted_sensations(results: StudyResults, orders: int) -> Drawing:
    """Predicted and actual observations: one row per ratio, one column per scenario."""
    observed = results.realisations[0].observations.numpy()

    def read(result: Result) -> tuple[Array, Array]:
        return result.prediction("y")[:, 0], result.observation("y")[:, 0]

    figure = _rows(results, orders, "observation", read, observed, pale=0.8)
    legend(figure, _channel_handles("y", "predicted", "observed"))
    caption = (
        f"Predicted (solid) and actual observations (transparent) with {orders} orders of motion: one row per prior "
        f"precision ratio C, one column per scenario.{_first(results)}"
    )
    name = f"sensations_{orders}_orders"
    return Drawing(name, f"Predicted observations, {orders} orders of motion", caption + _gaps(results, orders), figure)


def _rows(
    results: StudyResults,
    orders: int,
    label: str,
    read: Callable[[Result], tuple[Array, Array]],
    shown: Array,
    *,
    pale: float,
) -> Figure:
    """One panel per ratio and model with the two series that `read` returns, the second one pale; limits by `shown`."""
    ratios, models = results.ratios, results.models
    figure = Figure(figsize=(WIDTH, 1.55 * len(ratios) + 1.2), layout="constrained")
    grid = figure.subplots(len(ratios), len(models), sharex=True, sharey=True, squeeze=False)
    margin = HEADROOM * (shown.max() - shown.min())
    low, high = shown.min() - margin, shown.max() + margin
    for i, ratio in enumerate(ratios):
        for j, model in enumerate(models):
            ax, result = grid[i, j], results.traces.get(Cell(model, orders, ratio))
            ax.set_ylim(low, high)
            ax.margins(x=0)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_ylabel(f"C = {ratio_name(ratio)}\n{label}")
            ax.set_xlabel("time")
            if i == 0:
                ax.set_title(f"{_scenario(model)}\n", loc="left", fontsize="medium")  # one line above the right title
            if result is None:
                ax.text(0.5, 0.5, NOTHING, transform=ax.transAxes, ha="center", va="center")
            else:
                inferred, reference = read(result)
                for values, width, alpha in ((reference, pale, 0.35), (inferred, 0.9, 1.0)):
                    for colour, channel in zip(CHANNELS, values.T, strict=True):
                        shown_at = extremes(channel)
                        ax.plot(result.times[shown_at], channel[shown_at], color=colour, linewidth=width, alpha=alpha)
                hidden = 100 * float(((inferred < low) | (inferred > high)).any(-1).mean())
                percentage = f"{hidden:.2g} %" if hidden >= 0.01 else "<0.01 %"
                off = f"{percentage} of the time off the axis; " if hidden > 0 else ""
                mse = float(((inferred - reference) ** 2).mean())
                ax.set_title(f"{off}MSE {mse:.2g}", loc="right", fontsize="small", color="0.3")
            ax.label_outer()
    return figure


def _channel_handles(name: str, inferred: str, reference: str) -> list[Any]:
    handles = [
        Line2D([], [], color=colour, linewidth=2, label=label)
        for colour, label in zip(CHANNELS, channel_names(name, len(CHANNELS)), strict=True)
    ]
    handles.append(Line2D([], [], color="0.2", linewidth=0.9, label=inferred))
    handles.append(Line2D([], [], color="0.2", linewidth=2.6, alpha=0.35, label=reference))
    return handles


# --- texts and legends -----------------------------------------------------------------------------------------------
def _scenario(model: str) -> str:
    return f"{MODELS[model]} model ({SCENARIOS[model]})"


def _order_handle(orders: int, colour: str) -> Line2D:
    line, marker = LINES.get(orders, (":", "^"))
    return Line2D([], [], color=colour, linestyle=line, marker=marker, markersize=5, label=f"{orders} orders of motion")


def _first(results: StudyResults) -> str:
    return " First replicate." if len(results.realisations) > 1 else ""


def _gaps(results: StudyResults, orders: int | None = None) -> str:
    """Sentence about cells without a winner."""
    columns = (results.winners[name].tolist() for name in ("model", "orders", "ratio"))
    present = {Cell(str(m), int(k), float(c)) for m, k, c in zip(*columns, strict=True)}
    missing = [str(cell) for cell in results.cells if cell not in present and orders in (None, cell.orders)]
    return f" Not shown, because every inversion diverged: {'; '.join(missing)}." if missing else ""
