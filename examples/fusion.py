"""Sensor fusion: a fast noisy sensor and a slow accurate one track better than either alone.

Run:  python examples/fusion.py
An oscillator is driven by random forces. One sensor reports its position at every tick with a standard deviation of 1,
the other at every tenth tick with 0.05. Between its reports the second one is missing. The example prints errors over
several seeds and writes output/fusion.png.

For each set of sensors the step size kappa is the best one on the seeds shown, and the precision of the motion was
chosen by hand on such runs. The errors are therefore best cases for all three sets, not errors on new data.
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
NOISY, ACCURATE = 1.0, 0.05  # standard deviations of the sensors
FLOW = [[0.0, 1.0], [-1.0, -0.05]]
KAPPAS = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)


def world(samples: int, seed: int) -> tuple[Array, dict[str, Array]]:
    """True position and velocity (time, 2), and the observations of each sensor; NaN where missing."""
    rng = np.random.default_rng(seed)
    x = np.zeros((samples, 2))
    x[0] = 1, 0
    for k in range(1, samples):
        force = math.sqrt(DT) * 0.3 * rng.normal()
        x[k] = x[k - 1] + DT * (np.array(FLOW) @ x[k - 1]) + (0, force)
    fast = x[:, :1] + NOISY * rng.normal(size=(samples, 1))
    slow = x[:, :1] + ACCURATE * rng.normal(size=(samples, 1))
    slow[np.arange(samples) % EVERY != 0] = np.nan
    return x, {"fast": fast, "slow": slow}


def build() -> pc.Model:
    """Both sensors on one state, with a batch of step sizes."""
    x = GeneralisedStateNode(
        "x", dim=2, orders=2, flow=pc.systems.linear(FLOW), integrator=LocalLinearisation(KAPPAS, step_size=DT)
    )
    graph = pc.Graph()
    for name, every, sd in (("fast", 1, NOISY), ("slow", EVERY, ACCURATE)):
        y = SensoryNode(name, dim=1, orders=1, dt=every * DT)
        graph.predicts(x, y, via=pc.systems.linear([[1.0, 0.0]]))
        graph.weighs(PrecisionNode(f"noise_{name}", prior_precision=sd**-2, sd=0.1, correlation_time=1.0), y)
    graph.weighs(PrecisionNode("noise_x", prior_precision=[20.0, 0.2], sd=0.1, correlation_time=0.3), x)
    return pc.Model(graph, pc.states_only())


def track(observations: dict[str, Array], names: tuple[str, ...]) -> Array:
    """Posterior mean of the position, (step sizes, time), from the named sensors; the others are missing."""
    result = build().run({name: observations[name] for name in names}, record=("mean",))
    mean: Array = result.mean("x")[:, :, 0, 0]
    return mean


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    sets = {"both": ("fast", "slow"), "fast and noisy alone": ("fast",), "slow and accurate alone": ("slow",)}
    squared = {label: np.zeros(len(KAPPAS)) for label in sets}
    kept: dict[str, Array] = {}
    for seed in range(options.seeds):
        x, observations = world(options.samples, seed)
        for label, names in sets.items():
            mean = track(observations, names)
            squared[label] += ((mean - x[:, 0]) ** 2)[:, options.samples // 10 :].mean(-1) / options.seeds
            if seed == options.seeds - 1:
                kept[label] = mean
    for label, errors in squared.items():
        best = int(errors.argmin())
        print(f"{label}: error {math.sqrt(errors[best]):.3f} (kappa {float(KAPPAS[best]):g})")

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    part = slice(0, min(options.samples, 400))
    times = DT * np.arange(options.samples)[part]
    axes.plot(times, observations["fast"][part, 0], ".", color="0.8", label="fast and noisy")
    axes.plot(times, observations["slow"][part, 0], "o", color="#E69F00", markersize=4, label="slow and accurate")
    axes.plot(times, x[part, 0], color="black", linewidth=1, label="truth")
    for (label, mean), colour in zip(kept.items(), ("#0072B2", "#D55E00", "#009E73"), strict=True):
        best = int(squared[label].argmin())
        axes.plot(times, mean[best, part], color=colour, linewidth=1.6 if label == "both" else 0.8, label=label)
    axes.set(xlabel="time", ylabel="position", title="Two sensors with different sampling intervals")
    axes.legend(loc="upper right", ncols=3, fontsize="small")
    path = Path("output") / "fusion.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
