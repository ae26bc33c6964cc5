"""Two sensors with clocks of their own: a fast rough one and a slow exact one track better than either alone.

Run it:  python examples/fusion.py
A swing is pushed about at random. One sensor reports its position at every tick with a standard deviation of 1, the
other at every tenth with 0.05; between these it is simply absent. Errors are printed over several seeds.

Each set of sensors is given the step size with the least error on the very seeds that are printed, and the precision of
the motion was set by hand with such runs in view. So the errors say what each set can do at best, all three favoured
alike, and not what it would do on data not seen before. Writes fusion.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import pcnet as pc
from pcnet.nodes import GeneralisedStateNode, PrecisionNode, SensoryNode
from pcnet.numerics.integrators import LocalLinearisation

Array = NDArray[np.float64]
DT, EVERY = 0.05, 10
ROUGH, EXACT = 1.0, 0.05  # standard deviations
FLOW = [[0.0, 1.0], [-1.0, -0.05]]
STEPS = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)


def world(samples: int, seed: int) -> tuple[Array, dict[str, Array]]:
    """The true position and velocity (time, 2), and what the sensors see of the position; NaN where they are silent."""
    draw = np.random.default_rng(seed)
    x = np.zeros((samples, 2))
    x[0] = 1, 0
    for k in range(1, samples):
        push = math.sqrt(DT) * 0.3 * draw.normal()
        x[k] = x[k - 1] + DT * (np.array(FLOW) @ x[k - 1]) + (0, push)
    fast = x[:, :1] + ROUGH * draw.normal(size=(samples, 1))
    slow = x[:, :1] + EXACT * draw.normal(size=(samples, 1))
    slow[np.arange(samples) % EVERY != 0] = np.nan
    return x, {"fast": fast, "slow": slow}


def build() -> pc.Graph:
    """Both sensors on one state, under a batch of step sizes."""
    x = GeneralisedStateNode(
        "x", dim=2, orders=2, flow=pc.systems.linear(FLOW), integrator=LocalLinearisation(STEPS, step_size=DT)
    )
    graph = pc.Graph()
    for name, every, sd in (("fast", 1, ROUGH), ("slow", EVERY, EXACT)):
        y = SensoryNode(name, dim=1, orders=1, dt=every * DT)
        graph.predicts(x, y, via=pc.systems.linear([[1.0, 0.0]]))
        graph.weighs(PrecisionNode(f"noise_{name}", prior_precision=sd**-2, sd=0.1, correlation_time=1.0), y)
    graph.weighs(PrecisionNode("noise_x", prior_precision=[20.0, 0.2], sd=0.1, correlation_time=0.3), x)
    return graph


def track(seen: dict[str, Array], names: tuple[str, ...]) -> Array:
    """The believed position at each tick, (steps, time); a sensor that is not named is silent all the time."""
    graph = build()
    result = graph.run({name: seen[name] for name in names}, schedule=pc.states_only(), record=("mean",))
    mean: Array = result.mean("x")[:, :, 0, 0]
    return mean


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    sets = {"both": ("fast", "slow"), "fast and rough alone": ("fast",), "slow and exact alone": ("slow",)}
    squared = {label: np.zeros(len(STEPS)) for label in sets}
    kept: dict[str, Array] = {}
    for seed in range(options.seeds):
        x, seen = world(options.samples, seed)
        for label, names in sets.items():
            mean = track(seen, names)
            squared[label] += ((mean - x[:, 0]) ** 2)[:, options.samples // 10 :].mean(-1) / options.seeds
            if seed == options.seeds - 1:
                kept[label] = mean
    for label, errors in squared.items():
        best = int(errors.argmin())
        print(f"{label}: error {math.sqrt(errors[best]):.3f} (kappa {float(STEPS[best]):g})")

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    part = slice(0, min(options.samples, 400))
    times = DT * np.arange(options.samples)[part]
    axes.plot(times, seen["fast"][part, 0], ".", color="0.8", label="fast and rough")
    axes.plot(times, seen["slow"][part, 0], "o", color="#E69F00", markersize=4, label="slow and exact")
    axes.plot(times, x[part, 0], color="black", linewidth=1, label="truth")
    for (label, mean), colour in zip(kept.items(), ("#0072B2", "#D55E00", "#009E73"), strict=True):
        best = int(squared[label].argmin())
        axes.plot(times, mean[best, part], color=colour, linewidth=1.6 if label == "both" else 0.8, label=label)
    axes.set(xlabel="time", ylabel="position", title="Two sensors, each with a clock of its own")
    axes.legend(loc="upper right", ncols=3, fontsize="small")
    path = Path("output") / "fusion.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
