"""A hidden force: what pushes an oscillator is inferred from its noisy position.

Run:  python examples/hidden_force.py
An oscillator is pushed by a force that nobody measures: it varies slowly, and jumps twice. The force is a hidden cause
in the belief of the state, an Ornstein–Uhlenbeck process. Damping, all noise levels and the force are inferred
together. The example prints errors and writes output/hidden_force.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import pcnet as pc
from pcnet.graphs import Cause, adaptive_filter

Array = NDArray[np.float64]
DT, DAMPING, NOISE = 0.05, 0.3, 0.05


def pushed(x: Tensor, force: Tensor, theta: Tensor) -> Tensor:
    """Position and velocity of an oscillator with damping θ."""
    return torch.cat([x[..., 1:], force - x[..., :1] - theta * x[..., 1:]], -1)


model = adaptive_filter(
    pushed,
    dim=2,
    dt=DT,
    mapping=pc.systems.linear([[1.0, 0.0]]),
    parameter_mean=[0.5],
    parameter_sd=0.3,
    process_noise_sd=0.01,
    observation_noise_sd=0.1,
    causes={"force": Cause(correlation_time=5.0)},
)


def world(samples: int, seed: int) -> tuple[Array, Array, Array]:
    """True states (time, 2), forces (time,) and observed positions (time, 1)."""
    rng = np.random.default_rng(seed)
    times = DT * np.arange(samples)
    force = np.sin(0.35 * times) + 1.2 * (times > 0.4 * times[-1]) - 1.8 * (times > 0.7 * times[-1])
    x, states = np.zeros(2), []
    for push in force:
        states.append(x)
        for _ in range(10):
            x = x + 0.1 * DT * np.array([x[1], push - x[0] - DAMPING * x[1]])
    found = np.array(states)
    return found, force, found[:, :1] + NOISE * rng.normal(size=(samples, 1))


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1200)
    options = parser.parse_args()
    states, force, seen = world(options.samples, 0)
    result = model.run(seen, record=("mean", "sd"), smooth=True)
    smoothed = result.smoothed("force")
    online, sd = result.mean("force")[:, 0, 0], result.sd("force")[:, 0, 0]
    after = smoothed.mean.reshape(-1)
    half = slice(options.samples // 4, None)
    for label, mean in (("online", online), ("smoothed", after)):
        error = math.sqrt(((mean - force)[half] ** 2).mean())
        print(f"force, {label}: error {error:.2f}, sd of the force {force.std():.2f}")
    inside = np.abs(online - force)[half] < 1.96 * sd[half]
    print(f"{100 * inside.mean():.0f} % of the forces within 95 % intervals")
    print(f"damping {result.mean('theta')[-1, 0]:.2f} ± {result.sd('theta')[-1, 0]:.2f} (true: {DAMPING})")

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    times = DT * np.arange(options.samples)
    above.plot(times, seen[:, 0], ".", color="0.7", markersize=2, label="observed position")
    above.plot(times, states[:, 0], color="black", linewidth=0.8, label="true position")
    above.plot(times, result.mean("x")[:, 0, 0], color="#0072B2", linewidth=0.8, label="inferred")
    below.fill_between(times, online - 1.96 * sd, online + 1.96 * sd, color="#0072B2", alpha=0.15, linewidth=0)
    below.plot(times, online, color="#0072B2", linewidth=0.8, label="inferred online, with 95 % interval")
    below.plot(times, after, color="#D55E00", linewidth=1, label="smoothed")
    below.plot(times, force, color="black", linewidth=1, label="true force")
    below.set(xlabel="time", ylabel="hidden force", ylim=(-4, 4))
    for axes in (above, below):
        axes.legend(frameon=False, fontsize="small", ncols=3, loc="lower left")
    path = Path("output") / "hidden_force.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
