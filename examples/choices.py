"""Choices: how the preference of a chooser drifts, from choices alone.

Run:  python examples/choices.py
In each trial a chooser takes one of three options. The values of two options, relative to the third, drift slowly. The
model sees only which option was taken. It learns how fast preferences drift, and forecasts the next choice. The example
prints how well choices are forecast, and writes output/choices.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pcnet.graphs import Sensor, adaptive_filter

Array = NDArray[np.float64]
DRIFT = 0.15  # standard deviation of the drift of each value in one trial


def still(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Preferences have no direction of their own: a random walk."""
    return 0 * x


def probabilities(x: Array) -> Array:
    """Probabilities (time, 3) of the options: take the first, or else the second, or else the third."""
    take = 1 / (1 + np.exp(-x))
    return np.stack([take[:, 0], (1 - take[:, 0]) * take[:, 1], (1 - take[:, 0]) * (1 - take[:, 1])], -1)


def world(trials: int, seed: int) -> tuple[Array, Array]:
    """Preferences (time, 2), and the number of the option that was taken (time, 1)."""
    rng = np.random.default_rng(seed)
    x = np.cumsum(DRIFT * rng.normal(size=(trials, 2)), 0)
    taken = [rng.choice(3, p=each) for each in probabilities(x)]
    return x, np.array(taken, dtype=float)[:, None]


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=2)
    options = parser.parse_args()
    x, taken = world(options.trials, options.seed)
    model = adaptive_filter(
        still,
        2,
        1.0,
        sensors={"choice": Sensor(family="choice")},
        initial_mean=[0.0, 0.0],
        process_noise_sd=0.3,
        noise_per_channel=False,
        hypotheses=None,
    )
    session = model.start(smooth=True)
    scores = {"forecast": 0.0, "shares so far": 0.0, "told the preferences": 0.0}
    counts = np.ones(3)
    for k, choice in enumerate(taken):
        if k:
            option = int(choice[0])
            scores["forecast"] += math.log(session.forecast(1.0).mean("choice")[0, option])
            scores["shares so far"] += math.log(counts[option] / counts.sum())
            scores["told the preferences"] += math.log(probabilities(x[k : k + 1])[0, option])
        counts[int(choice[0])] += 1
        session.step(choice)
    for label, score in scores.items():
        print(f"{label}: {score / (options.trials - 1):.3f} nats per choice")
    result = session.result()
    drift = float(np.exp(-0.5 * result.mean("noise_x")[-1, 0]))
    smoothed = result.smoothed("x")
    inside = (np.abs(smoothed.mean - x) < 2 * smoothed.sd).mean()
    print(f"drift {drift:.2f} per trial, true {DRIFT}; {inside:.0%} of the preferences within 2 sd of the smoother")

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for i, ax in enumerate(axes):
        ax.plot(x[:, i], color="black", linewidth=1, label="truth")
        mean, sd = smoothed.mean[:, i], smoothed.sd[:, i]
        ax.plot(mean, color="#0072B2", label="smoother, ± 2 sd")
        ax.fill_between(np.arange(len(mean)), mean - 2 * sd, mean + 2 * sd, color="#0072B2", alpha=0.2, linewidth=0)
        at = np.flatnonzero(taken[:, 0] >= i)
        ax.plot(at, np.where(taken[at, 0] == i, 6.0, -6.0), "|", color="0.6", markersize=4)
        ax.set(ylabel=("first option", "second, if not first")[i], ylim=(-7, 7))
    axes[0].set_title("Preferences from choices (ticks: taken, above, or not, below)")
    axes[0].legend(loc="upper left", ncols=2, fontsize="small")
    axes[1].set_xlabel("trial")
    path = Path("output") / "choices.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
