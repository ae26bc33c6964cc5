"""A particle in one of two wells, seen through its square: a belief with two peaks.

Run:  python examples/two_wells.py
ẋ = 2x(1 − x²) + noise has wells at −1 and 1. Only x² is seen, with noise, and a cue now and then that tells the side. A
belief with one peak has to choose a side; a sum of Gaussians keeps both until the cue. First guesses of the
noise are wrong by 2. The example prints log-scores and writes output/two_wells.png.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import pcnet as pc
from pcnet.graphs import Sensor, adaptive_filter

Array = NDArray[np.float64]
DT, PROCESS, NOISE, CUE, EVERY = 0.1, 0.7, 0.2, 0.3, 80
ROOT = math.sqrt(2 * math.pi)


def wells(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return 2 * x * (1 - x**2)


def square(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x**2


def model(peaks: int) -> pc.Model:
    sensors = {"square": Sensor(mapping=square, noise_sd=2 * NOISE), "cue": Sensor(noise_sd=2 * CUE)}
    return adaptive_filter(
        wells,
        dim=1,
        dt=DT,
        sensors=sensors,
        initial_mean=[0.0],
        process_noise_sd=0.5 * PROCESS,
        peaks=peaks,
    )


def world(samples: int, seed: int) -> tuple[Array, dict[str, Array]]:
    """True states (time,) and observations (time, 1) of both sensors, simulated in finer steps."""
    rng, h, x, found = np.random.default_rng(seed), DT / 20, 1.0, []
    for _ in range(samples):
        found.append(x)
        for _ in range(20):
            x += h * 2 * x * (1 - x**2) + PROCESS * math.sqrt(h) * rng.standard_normal()
    states = np.array(found)
    cue = np.full(samples, np.nan)
    cue[EVERY::EVERY] = states[EVERY::EVERY] + CUE * rng.standard_normal(len(states[EVERY::EVERY]))
    seen = states**2 + NOISE * rng.standard_normal(samples)
    return states, {"square": seen[:, None], "cue": cue[:, None]}


def density(result: pc.Result, x: Array) -> Array:
    """The density of the belief at one value for each time, (time,)."""
    weight, centre, width = (result.get("x", f"peak_{each}") for each in ("weight", "mean", "sd"))
    away = (x[:, None] - centre[..., 0]) / width[..., 0]
    found: Array = (weight * np.exp(-0.5 * away**2) / width[..., 0]).sum(-1) / ROOT
    return found


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--peaks", type=int, default=6)
    options = parser.parse_args()
    states, seen = world(options.samples, 4)
    record = ("mean", "sd", "energy", "peak_weight", "peak_mean", "peak_sd")
    several = model(options.peaks).run(seen, record=record)
    single = model(1).run(seen, record=record[:3])
    for label, each in ((f"up to {options.peaks} peaks", several), ("one peak", single)):
        mean, sd = each.mean("x").ravel(), each.sd("x").ravel()
        inside = np.abs(mean - states) < 1.96 * sd
        truth = density(each, states) if each is several else np.exp(-0.5 * ((states - mean) / sd) ** 2) / sd / ROOT
        print(
            f"{label}: log-density {each.accuracy.mean():.2f} of what is seen next, {np.log(truth).mean():.2f} of the "
            f"true state; {100 * inside.mean():.0f} % within 95 % intervals"
        )

    figure = Figure(figsize=(9, 5), layout="constrained")
    top, middle, low = figure.subplots(3, 1, sharex=True, height_ratios=[1, 1.6, 1])
    times, x = DT * np.arange(options.samples), np.linspace(-2, 2, 241)
    top.plot(times, seen["square"][:, 0], ".", color="0.6", markersize=3)
    top.set(title="seen: the square, and a cue now and then (lines)", ylabel="x²")
    shade = np.array([density(several, np.full(options.samples, at)) for at in x])
    middle.pcolormesh(times, x, np.sqrt(shade), cmap="Greens", rasterized=True, shading="nearest")
    middle.set(title="belief with several peaks (shaded) and truth", ylabel="x")
    mean, sd = single.mean("x").ravel(), single.sd("x").ravel()
    low.fill_between(times, mean - 1.96 * sd, mean + 1.96 * sd, color="#56B4E9", alpha=0.4, linewidth=0)
    low.set(title="belief with one peak (95 %) and truth", ylabel="x", xlabel="time", ylim=(-2, 2))
    for axes in (middle, low):
        axes.plot(times, states, color="black", linewidth=1)
    for axes in (top, middle, low):
        for k in np.flatnonzero(np.isfinite(seen["cue"][:, 0])):
            axes.axvline(times[k], color="#D55E00", linewidth=0.8)
    target = Path("output") / "two_wells.png"
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target, dpi=120)
    print(f"picture: {target}")


if __name__ == "__main__":
    main()
