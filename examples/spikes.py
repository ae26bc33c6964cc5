"""Point process: a hidden movement is read from the spikes of eight neurons.

Run:  python examples/spikes.py
A hidden state of two dimensions turns with an unknown speed. Each neuron fires at a rate that depends on the direction
of the state. The model sees spike counts in bins of 20 ms. It learns the speed and the noise of the movement, and is
told neither. The example prints errors and writes output/spikes.png.
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
BIN, SPEED, NOISE, BASE = 0.02, 3.0, 0.4, 15.0  # seconds, radians per second, per √second, spikes per second
ANGLES = 2 * math.pi * torch.arange(8, dtype=torch.float64) / 8
PREFERRED = torch.stack([ANGLES.cos(), ANGLES.sin()], -1)  # directions in which neurons fire most


def turning(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """A rotation with the speed θ, and a pull to the unit circle."""
    pull = 1 - (x**2).sum(-1, keepdim=True)
    return theta * torch.stack([-x[..., 1], x[..., 0]], -1) + pull * x


def log_rates(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x @ PREFERRED.to(x).T + math.log(BASE)


def world(samples: int, seed: int) -> tuple[Array, Array]:
    """States (time, 2) and spike counts (time, 8)."""
    rng = np.random.default_rng(seed)
    x, speed = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([SPEED], dtype=torch.float64)
    states = []
    for _ in range(samples):
        states.append(x.numpy())
        x = x + BIN * turning(x, speed) + math.sqrt(BIN) * NOISE * torch.as_tensor(rng.normal(size=2))
    rates = log_rates(torch.as_tensor(np.array(states)), speed).exp().numpy()
    return np.array(states), rng.poisson(BIN * rates).astype(float)


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    x, counts = world(options.samples, options.seed)
    spikes = Sensor(mapping=log_rates, family="poisson", family_settings={"exposure": BIN})
    model = adaptive_filter(
        turning,
        2,
        BIN,
        sensors={"spikes": spikes},
        parameter_mean=[2.0],
        parameter_sd=1.0,
        initial_mean=[0.0, 0.0],
        process_noise_sd=0.2,
        noise_per_channel=False,
        hypotheses=None,
    )
    result = model.run({"spikes": counts}, smooth=True)
    smoothed, later = result.smoothed("x"), slice(options.samples // 10, None)
    vote = counts @ PREFERRED.numpy()  # population vector: each spike votes for the direction of its neuron
    window = np.ones(15) / 15
    vote = np.stack([np.convolve(part, window, "same") for part in vote.T], -1)
    vote *= (vote * x).sum() / (vote**2).sum()  # the best scale, in hindsight
    for label, found in (("filter", result.mean("x")[:, 0]), ("smoother", smoothed.mean), ("population vector", vote)):
        print(f"{label}: error {math.sqrt(((found - x)[later] ** 2).mean()):.3f}")
    inside = (np.abs(smoothed.mean - x) < 2 * smoothed.sd)[later].mean()
    speed, sd = float(result.mean("theta")[-1, 0]), float(result.sd("theta")[-1, 0])
    print(f"speed {speed:.2f} ± {sd:.2f}, true {SPEED}; {inside:.0%} of the states within 2 sd of the smoother")

    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    times = BIN * np.arange(options.samples)
    for neuron in range(8):
        at = times[counts[:, neuron] > 0]
        above.plot(at, np.full_like(at, neuron), "|", color="black", markersize=5)
    above.set(ylabel="neuron", title="Spikes of eight neurons, and the movement behind them")
    below.plot(times, x[:, 0], color="black", linewidth=1, label="truth")
    for mean, sd_, colour, label in (
        (result.mean("x")[:, 0, 0], result.sd("x")[:, 0, 0], "#D55E00", "filter"),
        (smoothed.mean[:, 0], smoothed.sd[:, 0], "#0072B2", "smoother"),
    ):
        below.plot(times, mean, color=colour, linewidth=1.2, label=f"{label}, ± 2 sd")
        below.fill_between(times, mean - 2 * sd_, mean + 2 * sd_, color=colour, alpha=0.2, linewidth=0)
    below.set(xlabel="time (s)", ylabel="state")
    below.legend(loc="upper right", ncols=3, fontsize="small")
    path = Path("output") / "spikes.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
