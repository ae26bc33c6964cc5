"""Sensor fusion: a fast noisy sensor and a slow accurate one track better than either alone.

Run:  python examples/fusion.py
An oscillator is driven by random forces. One sensor reports its position at every tick with a standard deviation of
0.5, the other at every twentieth tick with 0.05. Between its reports the second one is missing. The model is told
nothing of the noise. The example prints errors over several seeds and writes output/fusion.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import pcnet as pc
from pcnet.graphs import Sensor, adaptive_filter

Array = NDArray[np.float64]
DT, EVERY = 0.05, 20
NOISY, ACCURATE = 0.5, 0.05  # standard deviations of the sensors
FLOW = [[0.0, 1.0], [-1.0, -0.05]]

position = pc.systems.linear([[1.0, 0.0]])
sensors = {"fast": Sensor(mapping=position), "slow": Sensor(mapping=position, every=EVERY)}
model = adaptive_filter(pc.systems.linear(FLOW), dim=2, dt=DT, sensors=sensors)


def world(samples: int, seed: int) -> tuple[Array, dict[str, Array]]:
    """True position and velocity (time, 2), and the observations of each sensor, one row for each of its reports."""
    rng = np.random.default_rng(seed)
    x = np.zeros((samples, 2))
    x[0] = 1, 0
    for k in range(1, samples):
        force = math.sqrt(DT) * 0.3 * rng.normal()
        x[k] = x[k - 1] + DT * (np.array(FLOW) @ x[k - 1]) + (0, force)
    fast = x[:, :1] + NOISY * rng.normal(size=(samples, 1))
    slow = x[:, :1] + ACCURATE * rng.normal(size=(samples, 1))
    return x, {"fast": fast, "slow": slow[::EVERY]}


def tracked(observations: dict[str, Array], names: tuple[str, ...], samples: int) -> Array:
    """Posterior mean of the position, (time,), from the named sensors; the others are missing."""
    missing = {"fast": np.full((samples, 1), np.nan)}  # the ticks are those of the fast sensor
    result = model.run(missing | {name: observations[name] for name in names}, record=("mean",))
    mean: Array = result.mean("x")[:, 0, 0]
    return mean


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    sets = {"both": ("fast", "slow"), "fast and noisy alone": ("fast",), "slow and accurate alone": ("slow",)}
    squared = dict.fromkeys(sets, 0.0)
    kept: dict[str, Array] = {}
    for seed in range(options.seeds):
        x, observations = world(options.samples, seed)
        for label, names in sets.items():
            kept[label] = tracked(observations, names, options.samples)
            squared[label] += float(((kept[label] - x[:, 0]) ** 2)[options.samples // 10 :].mean()) / options.seeds
    for label, error in squared.items():
        print(f"{label}: error {math.sqrt(error):.3f}")

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    part = slice(0, min(options.samples, 400))
    times = DT * np.arange(options.samples)
    axes.plot(times[part], observations["fast"][part, 0], ".", color="0.8", label="fast and noisy")
    slow = observations["slow"][: math.ceil(part.stop / EVERY), 0]
    axes.plot(times[::EVERY][: len(slow)], slow, "o", color="#E69F00", markersize=4, label="slow and accurate")
    axes.plot(times[part], x[part, 0], color="black", linewidth=1, label="truth")
    for (label, mean), colour in zip(kept.items(), ("#0072B2", "#D55E00", "#009E73"), strict=True):
        axes.plot(times[part], mean[part], color=colour, linewidth=1.6 if label == "both" else 0.8, label=label)
    axes.set(xlabel="time", ylabel="position", title="Two sensors with different sampling intervals")
    axes.legend(loc="upper right", ncols=3, fontsize="small")
    path = Path("output") / "fusion.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
