"""Make the pictures of the documentation.

Run:  python docs/pictures.py [names]            (all of them unless named; a few minutes)
The pictures go to docs/pictures as PNG files with 256 colours, to keep the repository small, and two pixels for each
that a page shows. Their paper is white: the style sheet makes it that of the page, and inverts pictures on dark pages.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

import pcnet as pc
from pcnet.graphs import Level, adaptive_filter, hierarchy, odem
from pcnet.nodes import GeneralisedStateNode, PrecisionNode, SensoryNode
from pcnet.results.drawing import COLOURS

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
WIDTH = 2000  # largest width in pixels
DPI = 220
STYLE = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.titlelocation": "left",
    **{"legend.edgecolor": "none", "legend.framealpha": 0.85, "legend.facecolor": "white"},
}
"""One style of axes; legends may cover lines, and stay legible."""
PICTURES: dict[str, Callable[[], Figure | Path]] = {}


def picture(make: Callable[[], Figure | Path]) -> Callable[[], Figure | Path]:
    PICTURES[make.__name__] = make
    return make


def store(name: str, made: Figure | Path) -> Path:
    """Store a figure or an image file as a small PNG."""
    if isinstance(made, Figure):
        buffer = io.BytesIO()
        made.savefig(buffer, dpi=DPI, facecolor="white")
        image = Image.open(buffer)
    else:
        image = Image.open(made)
    image = image.convert("RGB")
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    path = HERE / "pictures" / f"{name}.png"
    # a strip of the line colours makes the quantiser keep them where few pixels have them
    extended = Image.new("RGB", (image.width, image.height + 16), "white")
    extended.paste(image)
    for i, colour in enumerate(COLOURS):
        extended.paste(colour, (80 * i, image.height, 80 * (i + 1), image.height + 16))
    small = extended.quantize(256, kmeans=3, dither=Image.Dither.NONE)
    small.crop((0, 0, image.width, image.height)).save(path, optimize=True)
    return path


def populations(samples: int = 2000) -> pc.simulate.Simulation:
    return pc.simulate.glv_process(samples=samples, noise="white", seed=1)


def tracked(samples: int = 2000) -> pc.Result:
    model = adaptive_filter(pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25)
    return model.run(populations(samples).observations)


# --- predictive coding -----------------------------------------------------------------------------------------------
@picture
def loop() -> Figure:
    return odem("glv").graph.draw().figure


@picture
def precision() -> Figure:
    figure = Figure(figsize=(9, 3), layout="constrained")
    at = np.linspace(-2, 6, 500)

    def density(mean: float, precision: float) -> np.ndarray:
        return np.sqrt(precision / (2 * np.pi)) * np.exp(-0.5 * precision * (at - mean) ** 2)

    for ax, observed in zip(figure.subplots(1, 2, sharey=True), (0.5, 4.0), strict=True):
        mean = (1 * 1 + observed * 3) / (1 + observed)
        curves = {"prediction": (1, 1.0), "observation": (3, observed), "posterior": (mean, 1 + observed)}
        for i, (name, (centre, precise)) in enumerate(curves.items()):
            style = "-" if name == "posterior" else "--"
            ax.plot(at, density(centre, precise), style, color=COLOURS[i], label=name)
        ax.fill_between(at, density(mean, 1 + observed), color=COLOURS[2], alpha=0.15)
        ax.set(title=f"precision of the observation: {observed:g}", xlabel="value", yticks=[])
        ax.spines["left"].set_visible(False)
    ax.legend(frameon=False)
    return figure


@picture
def motion() -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    t, now = np.linspace(0, 6, 400), 0.9
    ax.plot(t, np.sin(t) + 0.3 * np.sin(2.2 * t), color="0.2", linewidth=3, alpha=0.35, label="trajectory")
    orders = [
        np.sin(now) + 0.3 * np.sin(2.2 * now),
        np.cos(now) + 0.66 * np.cos(2.2 * now),
        -np.sin(now) - 0.66 * 2.2 * np.sin(2.2 * now),
    ]
    names = ("value", "value and velocity", "value, velocity and acceleration")
    for i, (name, span) in enumerate(zip(names, (0.8, 0.8, 1.3), strict=True)):
        near = t[abs(t - now) < span]
        lag = near - now
        taylor = sum(orders[k] * lag**k / (1, 1, 2)[k] for k in range(i + 1)) + 0 * near
        ax.plot(near, taylor, color=COLOURS[i], linewidth=2, label=name)
    ax.plot(now, orders[0], "o", color="black", zorder=5)
    ax.annotate("now", (now, orders[0]), (4, -16), textcoords="offset points")
    ax.set(xlabel="time", ylabel="state")
    ax.legend(frameon=False, loc="upper right")
    return figure


@picture
def energy() -> Figure:
    result = odem("glv").run(populations(1000).observations)
    figure = Figure(figsize=(9, 3), layout="constrained")
    ax = figure.subplots()
    parts = {"free energy": result.free_energy, "complexity": result.complexity, "−accuracy": -result.accuracy}
    for i, (name, values) in enumerate(parts.items()):
        ax.plot(result.times, values, ".", markersize=1.5, alpha=0.25, color=COLOURS[i])
        smooth = np.convolve(values, np.ones(50) / 50, mode="valid")
        ax.plot(result.times[49:], smooth, color=COLOURS[i], label=f"{name}, mean of 50")
    low, high = np.quantile(np.concatenate(list(parts.values())), [0.005, 0.99])
    ax.set(xlabel="time", ylabel="nats", ylim=(low - 1, high + 1))
    figure.legend(frameon=False, ncols=3, loc="outside upper center")
    return figure


# --- guide -----------------------------------------------------------------------------------------------------------
@picture
def quickstart() -> Figure:
    return tracked().plot(truth=populations().states)


@picture
def sensors() -> Figure:
    x = GeneralisedStateNode("x", dim=2, orders=2, flow=pc.systems.linear([[0.0, 1.0], [-1.0, -0.1]]))
    graph = pc.Graph()
    for sensor in (SensoryNode("fast", dim=1, orders=1, dt=0.05), SensoryNode("slow", dim=1, orders=1, dt=0.5)):
        graph.predicts(x, sensor, via=pc.systems.linear([[1.0, 0.0]]))
        graph.weighs(
            PrecisionNode(f"noise of {sensor.name}", prior_precision=1.0, sd=0.1, correlation_time=0.5), sensor
        )
    graph.weighs(PrecisionNode("noise of x", prior_precision=20.0, sd=0.1, correlation_time=0.3), x)
    return graph.draw().figure


def oscillator(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[..., 1], -theta[..., 0] * x[..., 0]], -1)


@picture
def drift() -> Figure:
    dt, count = 0.05, 4000
    times, rng = dt * np.arange(count), np.random.default_rng(0)
    stiffness = 2.0 + np.sin(2 * np.pi * times / 100)
    position, velocity, observations = 1.0, 0.0, []
    for k in stiffness:
        observations.append([position + 0.1 * rng.normal()])
        velocity += dt * (-k * position + 0.1 * rng.normal())
        position += dt * velocity
    model = hierarchy(
        Level(
            oscillator,
            2,
            mapping=pc.systems.linear([[1.0, 0.0]]),
            parameter_mean=[2.0],
            parameter_sd=[0.1],
            process_noise_sd=[0.002, 0.02],
        ),
        Level(lambda x, _: 0.0 * x, 1, initial_mean=[2.0], initial_sd=0.5, process_noise_sd=0.1),
        dt=dt,
        channels=1,
        observation_noise_sd=0.3,
        every=20,
    )
    result = model.run(observations)
    mean, sd = result.mean("x2").reshape(count), result.sd("x2").reshape(count)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    above.plot(times, observations, ".", markersize=1, color="0.5")
    above.set(ylabel="observed position")
    below.plot(times, stiffness, color="black", linewidth=1, label="true stiffness")
    below.plot(times, mean, color=COLOURS[0], label="state of the second level")
    below.fill_between(times, mean - 1.96 * sd, mean + 1.96 * sd, color=COLOURS[0], alpha=0.2, label="95 % interval")
    below.set(xlabel="time", ylabel="stiffness")
    below.legend(frameon=False, ncols=3)
    return figure


@picture
def schedule() -> Figure:
    lines = pc.odem(every=8).acts
    ticks = np.arange(24)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    for row, act in enumerate(lines):
        due = ticks[(ticks + 1) % int(act.clock.every) == 0]
        slow = int(act.clock.every) > 1
        ax.plot(due + 1, np.full(len(due), row), "s", markersize=9, color=COLOURS[1 if slow else 0])
    ax.set(yticks=range(len(lines)), yticklabels=[f"{', '.join(act.nodes)}: {act.action}" for act in lines])
    ax.set(xlabel="observation", xticks=range(1, 25), ylim=(len(lines) - 0.5, -0.5))
    ax.grid(axis="x", alpha=0.2)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


@picture
def tick() -> Figure:
    """The journey of one observation."""
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    ax = figure.subplots()
    ax.set(xlim=(0, 10), ylim=(-0.1, 5.4))
    ax.axis("off")

    def box(x: float, y: float, w: float, h: float, title: str, text: str = "", colour: str = "#FFFFFF") -> None:
        ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.04", facecolor=colour, edgecolor="#555555"))
        ax.text(x + w / 2, y + h - 0.12, title, ha="center", va="top", fontsize=10, weight="bold")
        ax.text(x + w / 2, y + h - 0.42, text, ha="center", va="top", fontsize=8.5, linespacing=1.4)

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str = "", colour: str = "#333333") -> None:
        ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.5})
        middle = ((start[0] + end[0]) / 2 + 0.06, (start[1] + end[1]) / 2)
        ax.text(*middle, text, fontsize=8.5, color=colour, va="center")

    box(0.1, 4.2, 1.9, 1.0, "Session.step(y, t)", "read y, advance the clock\n(inputs, clock)")
    box(0.1, 2.5, 1.9, 1.1, "Program", "constants, links,\nactions that are due")
    box(0.1, 0.9, 1.9, 1.1, "GraphState", "one tree of tensors:\nx, y, theta, noise, time")
    ax.add_patch(
        FancyBboxPatch((2.75, 0.35), 4.3, 4.85, boxstyle="round,pad=0.04", facecolor="#EEF3FA", edgecolor="#0072B2")
    )
    ax.text(4.9, 5.08, "tick(program, state, inputs)", ha="center", va="top", fontsize=11, weight="bold")
    box(3.0, 3.75, 1.75, 0.85, "precision", "update, renew_prior", "#F7E3F0")
    box(5.05, 3.75, 1.75, 0.85, "parameter", "update, renew_prior", "#FBEBD5")
    box(3.0, 2.05, 3.8, 0.95, "state", "predict, update, update_covariance", "#DDEEE6")
    box(3.0, 0.55, 3.8, 0.85, "sensory", "observe", "#DCE9F5")
    for x in (3.6, 5.65):
        arrow((x, 3.65), (x, 3.12), "Π̃" if x < 4 else "θ", COLOURS[0])
        arrow((x + 0.65, 3.12), (x + 0.65, 3.65), "ξ", COLOURS[1])
    arrow((4.3, 1.95), (4.3, 1.5), "prediction g̃(x)", COLOURS[0])
    arrow((6.2, 1.5), (6.2, 1.95), "error ξ", COLOURS[1])
    box(7.8, 4.2, 2.1, 1.0, "Outputs", "energies by node, failures")
    box(7.8, 2.5, 2.1, 1.1, "resolve", "diverged elements:\nraise, stop, hold, reset")
    box(7.8, 0.9, 2.1, 1.1, "Snapshot", "replaced in one assignment;\nthen recorder, watchers")
    arrow((2.08, 4.7), (2.7, 4.7))
    arrow((2.08, 3.05), (2.7, 3.05))
    arrow((2.08, 1.45), (2.7, 1.45))
    arrow((7.1, 4.7), (7.75, 4.7))
    arrow((7.1, 3.05), (7.75, 3.05), "")
    arrow((8.85, 4.1), (8.85, 3.7))
    arrow((8.85, 2.42), (8.85, 2.08))
    ax.plot([8.85, 8.85, 1.05], [0.82, 0.0, 0.0], color="#333333", lw=1.5)
    arrow((1.05, 0.0), (1.05, 0.82))
    ax.text(4.9, 0.05, "the state before the next observation", fontsize=8.5, ha="center", va="bottom")
    return figure


@picture
def learning() -> Figure:
    world = populations(4000)
    runs = {"ODEM": odem("glv").run(world.observations), "adaptive filter": tracked(4000)}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for ax, (name, result) in zip(figure.subplots(1, 2, sharey=True), runs.items(), strict=True):
        mean, sd = result.mean("theta"), result.sd("theta")
        for i, truth in enumerate(pc.simulate.GLV_PARAMETERS):
            ax.axhline(truth, color=COLOURS[i], linestyle="--", linewidth=1)
            ax.plot(result.times, mean[:, i], color=COLOURS[i], label=("a₁₂", "a₁₃", "a₂₃")[i])
            low, high = mean[:, i] - 1.96 * sd[:, i], mean[:, i] + 1.96 * sd[:, i]
            ax.fill_between(result.times, low, high, color=COLOURS[i], alpha=0.2)
        ax.set(title=name, xlabel="time", ylim=(-0.8, 0.8))
        error = ((result.mean("x")[:, 0] - world.states.numpy()) ** 2).mean()
        print(f"{name}: {mean[-1].round(3)} ± {sd[-1].round(4)}, squared error of the states {error:.5f}")
    ax.legend(frameon=False, loc="upper right", title="dashed: truth", ncols=3)
    return figure


# --- more ------------------------------------------------------------------------------------------------------------
@picture
def study() -> Figure:
    priors = {
        "lotka_volterra": {"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25},
        "lorenz": {"parameter_mean": [30.0], "parameter_sd": 9.0},
    }

    def build(model: str, noise_x: float, noise_y: float) -> pc.Model:
        noise = {"process_noise_sd": noise_x, "observation_noise_sd": noise_y}
        return adaptive_filter(getattr(pc.systems, model), 3, 0.01, **priors[model], **noise, noise_sd=0.1)

    grid = {
        "model": ["lotka_volterra", "lorenz"],
        "noise_x": [0.003, 0.01, 0.03],
        "noise_y": [0.06, 0.1, 0.2, 0.3],
    }
    world = populations(400)
    made = pc.sweep(build, grid, world.observations, truth={"x": world.states}, processes=1)
    return made.plot("noise_x", "noise_y", by="model")


@picture
def channels() -> Figure:
    """Levels of 300 channels, learned from 300 observations of three states."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(300, 3, generator=draw, dtype=torch.float64)
    world, true = populations(300), torch.logspace(-1.5, 0, 300, dtype=torch.float64)
    noise = true * torch.randn(300, 300, generator=draw, dtype=torch.float64)
    prior = {"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25}
    guess = {"process_noise_sd": 0.1, "observation_noise_sd": 0.3}
    flow, mapping = pc.systems.lotka_volterra, pc.systems.linear(weights)
    model = adaptive_filter(flow, 3, 0.01, **prior, **guess, mapping=mapping, hypotheses=None)
    result = model.run(torch.as_tensor(world.states) @ weights.T + noise)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    learned, error = figure.subplots(1, 2)
    learned.loglog(true, np.exp(-0.5 * result.mean("noise_y")[-1]), ".", color="#0072B2", markersize=3)
    learned.loglog(true, true, color="black", linewidth=0.8)
    learned.axhline(0.3, color="#999999", linestyle=":", linewidth=0.8)
    learned.set(xlabel="true sd of a channel", ylabel="learned sd", title="300 levels, one guess (dotted)")
    off = np.abs(result.mean("x")[:, 0] - np.asarray(world.states)).mean(1)
    error.semilogy(off, color="#0072B2", label="error")
    error.semilogy(result.sd("x")[:, 0].mean(1), color="#D55E00", label="standard deviation")
    error.set(xlabel="observation", title="states")
    error.legend(frameon=False)
    return figure


@picture
def smoothing() -> Figure:
    flow, mapping = pc.systems.linear([[0.0, 1.0], [-1.0, -0.05]]), pc.systems.linear([[1.0, 0.0]])
    world = pc.simulate.simulate(
        flow, mapping=mapping, initial=[2.0, 0.0], samples=400, dt=0.05, state_sd=2.0, observation_sd=0.5, seed=5
    )
    y = world.observations.numpy().copy()
    y[200:260] = np.nan
    result = adaptive_filter(flow, 2, 0.05, mapping=mapping, initial_sd=2.0).run(y, smooth=True)
    smoothed, times = result.smoothed("x"), world.times.numpy()
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    ax.plot(times, y[:, 0], ".", markersize=3, color="0.7", label="observed")
    ax.plot(times, world.states[:, 0], color="black", linewidth=0.9, label="truth")
    beliefs = ((result.mean("x")[:, 0], result.sd("x")[:, 0]), (smoothed.mean, smoothed.sd))
    for (mean, sd), colour, label in zip(beliefs, (COLOURS[1], COLOURS[0]), ("filter", "smoother"), strict=True):
        ax.plot(times, mean[:, 0], color=colour, linewidth=1.2, label=f"{label}, with 95 % interval")
        low, high = mean[:, 0] - 1.96 * sd[:, 0], mean[:, 0] + 1.96 * sd[:, 0]
        ax.fill_between(times, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.set(xlabel="time", ylabel="position", xlim=(2.0, 20.0), ylim=(-6, 6))
    ax.legend(loc="upper left", ncols=4, fontsize="small")
    return figure


@picture
def forecast() -> Figure:
    flow, mapping = pc.systems.linear([[0.0, 1.0], [-1.0, -0.05]]), pc.systems.linear([[1.0, 0.0]])
    world = pc.simulate.simulate(
        flow,
        mapping=mapping,
        initial=[2.0, 0.0],
        samples=700,
        dt=0.05,
        state_sd=0.5,
        observation_sd=0.3,
        width=0.3,
        seed=3,
    )
    model = adaptive_filter(flow, 2, 0.05, mapping=mapping, channels=1, initial_sd=2.0, correlation_time=0.3 * 2**0.5)
    session = model.start()
    for k, y in enumerate(world.observations[:500]):
        session.step(None if 280 <= k < 350 else y)
    past, future = session.result(), session.forecast(10.0)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    times, observed = world.times.numpy(), np.r_[0:280, 350:500]
    ax.plot(times[observed], world.observations[observed, 0], ".", markersize=2, color="0.6", label="observed")
    ax.plot(times, world.states[:, 0], color="black", linewidth=0.9, label="truth")
    for at, mean, sd, style in (
        (past.times, past.mean("x")[:, 0, 0], past.sd("x")[:, 0, 0], "-"),
        (future.times, future.mean("x").reshape(-1, 2)[:, 0], future.sd("x").reshape(-1, 2)[:, 0], "--"),
    ):
        ax.plot(at, mean, style, color=COLOURS[0], label="inferred, with 95 % interval" if style == "-" else None)
        ax.fill_between(at, mean - 1.96 * sd, mean + 1.96 * sd, color=COLOURS[0], alpha=0.25, linewidth=0)
    for start, end, words in ((14.0, 17.5, "no observations"), (25.0, 35.0, "forecast")):
        ax.axvspan(start, end, color="0.93", zorder=0)
        ax.text((start + end) / 2, 0.02, words, ha="center", transform=ax.get_xaxis_transform())
    ax.set(xlabel="time", ylabel="position", xlim=(0, 35))
    figure.legend(frameon=False, ncols=3, loc="outside upper center")
    return figure


Ranges = list[tuple[float, float]]


def ranges(text: str) -> Ranges:
    """The numbers of a cell of a table, such as "1.10–1.11 (no guess: 2.01), 1.04" or "97 / 92–98", as ranges."""
    plain = re.sub(r"\([^)]*\)", "", text)
    return [(float(low), float(high or low)) for low, high in re.findall(r"([\d.]+)(?:–([\d.]+))?", plain)]


def systems() -> list[tuple[str, Ranges, Ranges]]:
    """Error ratios of states (whole run, second half) and coverages (states, parameters) of the systems chosen last."""
    table = (HERE / "calibration_study.md").read_text(encoding="utf-8").partition("| system | error of states")[2]
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()[2:]]
    found = []
    for row in rows:
        without = re.search(r"\(no guess: ([\d.]+)\)", row[1])  # shown as the end of the range
        errors, cover = ranges(row[1]), ranges(row[3])
        if without:
            errors[0] = (errors[0][0], float(without[1]))
        found.append((row[0].split(",")[0], errors, cover))
    return found


@picture
def calibration() -> Figure:
    """The systems that were chosen after the rules: errors over those of told filters, and coverage."""
    found = systems()
    figure = Figure(figsize=(9.0, 0.5 * len(found) + 1.3), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    kinds = (("whole run", "second half"), ("states", "parameters"))
    for ax, (first, second), which in zip((left, right), kinds, (1, 2), strict=True):
        for i, each in enumerate((first, second)):
            for k, row in enumerate(found):
                low, high = row[which][i]
                style = {"color": COLOURS[i], "linewidth": 4, "marker": "o", "markersize": 5}
                ax.plot([low, high], [k + 0.16 * (2 * i - 1)] * 2, label=each if k == 0 else None, **style)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    least = min(0.75, 0.9 * min(low for row in found for low, _ in row[1]))
    left.axvspan(least, 1.3, color="0.93", zorder=0)
    left.axvline(1.0, color="black", linewidth=0.8, linestyle=(0, (4, 2)))
    left.set(xscale="log", xlim=(least, 2.1), xlabel="error over that of the best told filter")
    ticks = [each for each in (0.2, 0.5, 1.0, 1.3, 2.0) if each > least]
    left.set_xticks(ticks, [f"{each:g}" for each in ticks])
    left.minorticks_off()
    left.set_yticks(range(len(found)), [row[0] for row in found])
    left.invert_yaxis()
    right.axvspan(90, 99, color="0.93", zorder=0)
    right.axvline(95, color="black", linewidth=0.8, linestyle=(0, (4, 2)))
    right.set(xlim=(75, 101), xlabel="truth within ±2 sd, %")
    right.tick_params(axis="y", length=0)
    return figure


@picture
def flow() -> Figure:
    observations = populations(400).observations.clone()
    observations[250] += 1.5
    return odem(model="glv").run(observations, record=pc.Record.flow()).error_flow().plot()


@picture
def page() -> Path:
    return EXAMPLES / "pictures" / "flow.png"


SAVE = Figure.savefig


def finely(figure: Figure, *where: object, **options: object) -> None:
    """Save a figure with enough pixels, whatever an example asks for."""
    SAVE(figure, *where, **options | {"dpi": DPI})  # type: ignore[arg-type]


def example(name: str, *arguments: str, made: str) -> Path:
    """Run an example in a temporary folder; returns the path of its picture."""
    before, given, folder = Path.cwd(), sys.argv, Path(tempfile.mkdtemp())
    try:
        os.chdir(folder)
        sys.argv = [name, *arguments]
        with mock.patch.object(Figure, "savefig", finely):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        os.chdir(before)
        sys.argv = given
    return folder / "output" / made


SHOWN = "student_t pendulum blob fusion manoeuvre two_wells hidden_force heating spikes choices lynx_hare stack"
for each in SHOWN.split():
    PICTURES[each] = lambda each=each: example(f"{each}.py", made=f"{each}.png")
PICTURES["paper_demo"] = lambda: example("paper_demo.py", made="paper-demo/comparison.png")
PICTURES["demo"] = lambda: example("demo.py", made="demo/neuron.png")


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        with mpl.rc_context(STYLE):
            path = store(name, PICTURES[name]())
        print(f"{path.name}: {path.stat().st_size // 1024} kB", flush=True)
