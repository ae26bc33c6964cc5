"""Makes the pictures of the documentation, anew and by the code that the pages speak of.

Run it:  python docs/pictures.py [names]            (a few minutes; all of them unless named)
Pictures go to docs/pictures as PNG files of few colours, so that the repository stays small.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

import pcnet as pc
from pcnet.graphs import Level, adaptive_filter, hierarchy, odem
from pcnet.nodes import GeneralisedStateNode, PrecisionNode, SensoryNode
from pcnet.results.drawing import COLOURS

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
WIDTH = 1000  # pixels at most
PICTURES: dict[str, Callable[[], Figure | Path]] = {}


def picture(make: Callable[[], Figure | Path]) -> Callable[[], Figure | Path]:
    PICTURES[make.__name__] = make
    return make


def keep(name: str, made: Figure | Path) -> Path:
    """A figure or a file as a small PNG."""
    if isinstance(made, Figure):
        buffer = io.BytesIO()
        made.savefig(buffer, dpi=110, facecolor="white")
        image = Image.open(buffer)
    else:
        image = Image.open(made)
    image = image.convert("RGB")
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    path = HERE / "pictures" / f"{name}.png"
    image.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def populations(samples: int = 2000) -> pc.simulate.Simulation:
    return pc.simulate.glv_process(samples=samples, noise="white", seed=1)


def tracked(samples: int = 2000) -> pc.Result:
    graph, schedule = adaptive_filter(
        pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25
    )
    return graph.run(populations(samples).observations, schedule=schedule)


# --- what predictive coding is ---------------------------------------------------------------------------------------
@picture
def loop() -> Figure:
    graph, _ = odem("glv")
    return graph.draw().figure


@picture
def precision() -> Figure:
    figure = Figure(figsize=(9, 3), layout="constrained")
    at = np.linspace(-2, 6, 500)

    def bell(mean: float, precision: float) -> np.ndarray:
        return np.sqrt(precision / (2 * np.pi)) * np.exp(-0.5 * precision * (at - mean) ** 2)

    for ax, trust in zip(figure.subplots(1, 2, sharey=True), (0.5, 4.0), strict=True):
        mean = (1 * 1 + trust * 3) / (1 + trust)
        curves = {"prediction": (1, 1.0), "observation": (3, trust), "belief": (mean, 1 + trust)}
        for i, (name, (middle, exact)) in enumerate(curves.items()):
            style = "-" if name == "belief" else "--"
            ax.plot(at, bell(middle, exact), style, color=COLOURS[i], label=name)
        ax.fill_between(at, bell(mean, 1 + trust), color=COLOURS[2], alpha=0.15)
        ax.set(title=f"precision of the observation: {trust:g}", xlabel="value", yticks=[])
        ax.spines[["top", "right", "left"]].set_visible(False)
    ax.legend(frameon=False)
    return figure


@picture
def motion() -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    t, now = np.linspace(0, 6, 400), 0.9
    ax.plot(t, np.sin(t) + 0.3 * np.sin(2.2 * t), color="0.2", linewidth=3, alpha=0.35, label="what happens")
    orders = [
        np.sin(now) + 0.3 * np.sin(2.2 * now),
        np.cos(now) + 0.66 * np.cos(2.2 * now),
        -np.sin(now) - 0.66 * 2.2 * np.sin(2.2 * now),
    ]
    names = ("value", "value and velocity", "value, velocity and acceleration")
    for i, (name, span) in enumerate(zip(names, (0.8, 0.8, 1.3), strict=True)):
        near = t[abs(t - now) < span]
        ahead = near - now
        said = sum(orders[k] * ahead**k / (1, 1, 2)[k] for k in range(i + 1)) + 0 * near
        ax.plot(near, said, color=COLOURS[i], linewidth=2, label=name)
    ax.plot(now, orders[0], "o", color="black", zorder=5)
    ax.annotate("now", (now, orders[0]), (4, -16), textcoords="offset points")
    ax.set(xlabel="time", ylabel="state")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper right")
    return figure


@picture
def energy() -> Figure:
    graph, plan = odem("glv")
    result = graph.run(populations(1000).observations, schedule=plan)
    figure = Figure(figsize=(9, 3), layout="constrained")
    ax = figure.subplots()
    parts = {"free energy": result.free_energy, "complexity": result.complexity, "−accuracy": -result.accuracy}
    for i, (name, values) in enumerate(parts.items()):
        ax.plot(result.times, values, ".", markersize=1.5, alpha=0.25, color=COLOURS[i])
        smooth = np.convolve(values, np.ones(50) / 50, mode="valid")
        ax.plot(result.times[49:], smooth, color=COLOURS[i], label=f"{name}, mean of 50")
    low, high = np.quantile(np.concatenate(list(parts.values())), [0.005, 0.99])
    ax.set(xlabel="time", ylabel="nats", ylim=(low - 1, high + 1))
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=3, loc="outside upper center")
    return figure


# --- the first steps -------------------------------------------------------------------------------------------------
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


def swing(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[..., 1], -theta[..., 0] * x[..., 0]], -1)


@picture
def drift() -> Figure:
    dt, count = 0.05, 4000
    times, draw = dt * np.arange(count), np.random.default_rng(0)
    stiffness = 2.0 + np.sin(2 * np.pi * times / 100)
    position, velocity, seen = 1.0, 0.0, []
    for k in stiffness:
        seen.append([position + 0.1 * draw.normal()])
        velocity += dt * (-k * position + 0.1 * draw.normal())
        position += dt * velocity
    graph, schedule = hierarchy(
        Level(
            swing,
            2,
            mapping=pc.systems.linear([[1.0, 0.0]]),
            parameter_mean=[2.0],
            parameter_sd=[0.1],
            expected_precision=[1e4, 100.0],
        ),
        Level(lambda x, _: 0.0 * x, 1, initial_mean=[2.0], initial_sd=0.5, expected_precision=100.0),
        dt=dt,
        channels=1,
        expected_precision_y=10.0,
        every=20,
    )
    result = graph.run(seen, schedule=schedule)
    mean, sd = result.mean("x2").reshape(count), result.sd("x2").reshape(count)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    above.plot(times, seen, ".", markersize=1, color="0.5")
    above.set(ylabel="position seen")
    below.plot(times, stiffness, color="black", linewidth=1, label="true stiffness")
    below.plot(times, mean, color=COLOURS[0], label="state of the second level")
    below.fill_between(times, mean - 1.96 * sd, mean + 1.96 * sd, color=COLOURS[0], alpha=0.2, label="95 % interval")
    below.set(xlabel="time", ylabel="stiffness")
    below.legend(frameon=False, ncols=3)
    for ax in (above, below):
        ax.spines[["top", "right"]].set_visible(False)
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
    ax.set(yticks=range(len(lines)), yticklabels=[f"{', '.join(act.who)}: {act.verb}" for act in lines])
    ax.set(xlabel="observation", xticks=range(1, 25), ylim=(len(lines) - 0.5, -0.5))
    ax.grid(axis="x", alpha=0.2)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


@picture
def learning() -> Figure:
    world = populations(4000)
    graph, plan = odem("glv")
    runs = {
        "the paper's rules": graph.run(world.observations, schedule=plan),
        "carried beliefs (triple)": tracked(4000),
    }
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for ax, (name, result) in zip(figure.subplots(1, 2, sharey=True), runs.items(), strict=True):
        mean, sd = result.mean("theta"), result.sd("theta")
        for i, truth in enumerate(pc.simulate.GLV_PARAMETERS):
            ax.axhline(truth, color=COLOURS[i], linestyle="--", linewidth=1)
            ax.plot(result.times, mean[:, i], color=COLOURS[i], label=("a₁₂", "a₁₃", "a₂₃")[i])
            low, high = mean[:, i] - 1.96 * sd[:, i], mean[:, i] + 1.96 * sd[:, i]
            ax.fill_between(result.times, low, high, color=COLOURS[i], alpha=0.2)
        ax.set(title=name, xlabel="time", ylim=(-0.8, 0.8))
        ax.spines[["top", "right"]].set_visible(False)
        error = ((result.mean("x")[:, 0] - world.states.numpy()) ** 2).mean()
        print(f"{name}: {mean[-1].round(3)} ± {sd[-1].round(4)}, squared error of the states {error:.5f}")
    ax.legend(frameon=False, loc="upper right", title="dashed: truth", ncols=3)
    return figure


# --- more ------------------------------------------------------------------------------------------------------------
@picture
def study() -> Figure:
    priors = {"lotka_volterra": {"mean": [0.3, -0.2, 0.3], "sd": 0.25}, "lorenz": {"mean": [30.0], "sd": 9.0}}

    def build(model: str, precision_x: float, precision_y: float) -> pc.graph.Model:
        expected = {"expected_precision_x": precision_x, "expected_precision_y": precision_y}
        return adaptive_filter(getattr(pc.systems, model), 3, 0.01, **priors[model], **expected, sd_lambda=0.1)

    grid = {
        "model": ["lotka_volterra", "lorenz"],
        "precision_x": [10.0, 100.0, 1000.0],
        "precision_y": [10.0, 30.0, 100.0, 300.0],
    }
    world = populations(400)
    made = pc.sweep(build, grid, world.observations, truth={"x": world.states}, processes=1)
    return made.plot("precision_x", "precision_y", by="model")


@picture
def forecast() -> Figure:
    turn, sight = pc.systems.linear([[0.0, 1.0], [-1.0, -0.05]]), pc.systems.linear([[1.0, 0.0]])
    world = pc.simulate.simulate(
        turn,
        mapping=sight,
        initial=[2.0, 0.0],
        samples=700,
        dt=0.05,
        state_sd=0.5,
        observation_sd=0.3,
        width=0.3,
        seed=3,
    )
    graph, plan = adaptive_filter(
        turn, 2, 0.05, mapping=sight, channels=1, initial_sd=2.0, correlation_time=0.3 * 2**0.5
    )
    live = graph.start(plan)
    for k, y in enumerate(world.observations[:500]):
        live.step(None if 280 <= k < 350 else y)
    past, future = live.result(), live.forecast(10.0)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    times, seen = world.times.numpy(), np.r_[0:280, 350:500]
    ax.plot(times[seen], world.observations[seen, 0], ".", markersize=2, color="0.6", label="observed")
    ax.plot(times, world.states[:, 0], color="black", linewidth=0.9, label="truth")
    for at, mean, sd, style in (
        (past.times, past.mean("x")[:, 0, 0], past.sd("x")[:, 0, 0], "-"),
        (future.times, future.mean("x").reshape(-1, 2)[:, 0], future.sd("x").reshape(-1, 2)[:, 0], "--"),
    ):
        ax.plot(at, mean, style, color=COLOURS[0], label="believed, with 95 %" if style == "-" else None)
        ax.fill_between(at, mean - 1.96 * sd, mean + 1.96 * sd, color=COLOURS[0], alpha=0.25, linewidth=0)
    for start, end, words in ((14.0, 17.5, "nothing seen"), (25.0, 35.0, "forecast")):
        ax.axvspan(start, end, color="0.93", zorder=0)
        ax.text((start + end) / 2, 0.02, words, ha="center", transform=ax.get_xaxis_transform())
    ax.set(xlabel="time", ylabel="position", xlim=(0, 35))
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=3, loc="outside upper center")
    return figure


@picture
def flow() -> Figure:
    observations = populations(400).observations.clone()
    observations[250] += 1.5
    graph, plan = odem(model="glv")
    return graph.run(observations, schedule=plan, record=pc.Record.flow()).error_flow().plot()


@picture
def page() -> Path:
    return EXAMPLES / "pictures" / "flow.png"


def example(name: str, *arguments: str, made: str) -> Path:
    """Run an example somewhere else, and find the picture it makes."""
    before, given, folder = Path.cwd(), sys.argv, Path(tempfile.mkdtemp())
    try:
        os.chdir(folder)
        sys.argv = [name, *arguments]
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        os.chdir(before)
        sys.argv = given
    return folder / "output" / made


for each in ("student_t", "pendulum", "blob", "fusion", "lynx_hare", "stack"):
    PICTURES[each] = lambda each=each: example(f"{each}.py", made=f"{each}.png")
PICTURES["demo"] = lambda: example("demo.py", made="demo/comparison.png")


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        path = keep(name, PICTURES[name]())
        print(f"{path.name}: {path.stat().st_size // 1024} kB", flush=True)
