"""A manoeuvring target: straight on, left turns and right turns, told nothing of the noise nor of the turn rate.

Run:  python examples/manoeuvre.py
A target moves at constant speed and turns now and then, for a random time. Its position is seen with noise. Categories
choose the flow: v is 0, 1 or −1 times a turn rate that is learned. A filter with random forces instead of turns, and
nothing else different, shows what the categories are worth. The example prints errors and writes
output/manoeuvre.png.
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
from pcnet.graphs import adaptive_filter

Array = NDArray[np.float64]
DT, RATE, NOISE, DWELL = 1.0, 0.12, 1.0, 25.0
NAMES, COLOURS = ("straight", "left", "right"), ("#999999", "#0072B2", "#D55E00")
position = pc.systems.linear([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])


def turning(x: Tensor, v: Tensor, theta: Tensor) -> Tensor:
    """(x, ẋ, y, ẏ) with the velocity turning at the rate vθ."""
    rate = (v * theta)[..., 0]
    return torch.stack([x[..., 1], -rate * x[..., 3], x[..., 3], rate * x[..., 1]], -1)


turns = pc.CategoricalNode("turn", values=[[0.0], [1.0], [-1.0]], dwell=pc.DwellTime(mean=DWELL, sd=0.5 * DWELL))
switching = adaptive_filter(
    turning, dim=4, dt=DT, mapping=position, parameter_mean=[0.2], parameter_sd=0.1, switching=turns
)
coasting = pc.systems.linear([[0.0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
without = adaptive_filter(coasting, dim=4, dt=DT, mapping=position)


def world(samples: int, seed: int) -> tuple[Array, Array, Array]:
    """True states (time, 4), observations (time, 2) and categories (time,)."""
    rng = np.random.default_rng(seed)
    x, kind, left, states, kinds = np.array([0.0, 1.0, 0.0, 0.5]), 0, DWELL, [], []
    for _ in range(samples):
        states.append(x)
        kinds.append(kind)
        left -= 1
        if left <= 0:
            kind, left = (kind + rng.integers(1, 3)) % 3, rng.gamma(4.0, DWELL / 4)
        angle = (0.0, RATE, -RATE)[kind] * DT
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        velocity = turn @ x[[1, 3]] + 0.01 * rng.normal(size=2)
        x = np.stack([x[[0, 2]] + DT * 0.5 * (velocity + x[[1, 3]]), velocity], 1).ravel()
    found = np.array(states)
    return found, found[:, [0, 2]] + NOISE * rng.normal(size=(samples, 2)), np.array(kinds)


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=400)
    options = parser.parse_args()
    states, seen, kinds = world(options.samples, 3)
    found = switching.run(seen, record=("mean", "sd", "probability"))
    plain = without.run(seen, record=("mean", "sd"))
    for label, each in (("switching", found), ("without turns", plain)):
        error = np.sqrt(((each.mean("x")[:, 0] - states) ** 2).mean(0))
        inside = np.abs(each.mean("x")[:, 0] - states) < 1.96 * each.sd("x")[:, 0]
        print(f"{label}: error of the position {error[[0, 2]].mean():.2f}, of the velocity {error[[1, 3]].mean():.3f}")
        print(f"  {100 * inside.mean():.0f} % within 95 % intervals")
    probability = found.get("turn", "probability")
    print(f"the right category in {100 * (probability.argmax(1) == kinds).mean():.0f} % of the time")
    print(f"turn rate {found.mean('theta')[-1, 0]:.3f} ± {found.sd('theta')[-1, 0]:.3f} (true: {RATE})")

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplot_mosaic("ab;ac", width_ratios=[1.1, 1])
    path, above, below = axes["a"], axes["b"], axes["c"]
    path.plot(*seen.T, ".", color="0.8", markersize=3, label="observed")
    path.plot(states[:, 0], states[:, 2], color="black", linewidth=1, label="truth")
    path.plot(*found.mean("x")[:, 0, [0, 2]].T, color="#009E73", linewidth=1, label="tracked")
    path.set(xlabel="x", ylabel="y", aspect="equal", title="A target that turns")
    path.legend(frameon=False, fontsize="small")
    times = DT * np.arange(options.samples)
    for i, colour in enumerate(COLOURS):
        above.fill_between(times, i + 0.9 * (kinds == i), i, color=colour, alpha=0.25, step="mid", linewidth=0)
        above.plot(times, i + 0.9 * probability[:, i], color=colour, linewidth=1)
    above.set(yticks=[0.4, 1.4, 2.4], yticklabels=NAMES, title="probability of each category (shaded: truth)")
    below.plot(times, found.mean("theta")[:, 0], color="#009E73")
    spread = 1.96 * found.sd("theta")[:, 0]
    middle = found.mean("theta")[:, 0]
    below.fill_between(times, middle - spread, middle + spread, color="#009E73", alpha=0.2, linewidth=0)
    below.axhline(RATE, color="black", linewidth=0.8)
    below.set(xlabel="time", title="turn rate", ylim=(0, 0.4))
    target = Path("output") / "manoeuvre.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=120)
    print(f"picture: {target}")


if __name__ == "__main__":
    main()
