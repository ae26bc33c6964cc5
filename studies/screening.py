"""What screening costs on signals that jump, and what outliers cost in spite of it.

    python -m studies.screening [--first-seed 100] [--seeds 12] [--chosen-with]

Each run is compared with one that knows better: of good signals the same filter without screening, of outliers the same
filter with these observations as missing. The rule was chosen with the first kinds of signal (--chosen-with) and seeds
below 100; the others were run once it was fixed.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import pcnet as pc
from pcnet.graphs import adaptive_filter

Array = NDArray[Any]
Signal = Callable[[np.random.Generator, int], Array]
NOISE = 0.1
SAMPLES = 800


def spikes(rng: np.random.Generator, n: int) -> Array:
    """Half sines of random heights and widths, after silence."""
    y, t = np.zeros(n), 100
    while t < n - 40:
        width = int(rng.integers(6, 20))
        y[t : t + width] = rng.uniform(2, 10) * np.sin(np.pi * np.arange(1, width + 1) / (width + 1))
        t += width + int(rng.integers(60, 160))
    return y


def saw(rng: np.random.Generator, n: int) -> Array:
    """A ramp that is reset after random times."""
    y, level, left = np.zeros(n), 0.0, 0
    for t in range(n):
        if left == 0:
            level, left = 0.0, int(rng.integers(60, 140))
        y[t] = level
        level, left = level + 0.1, left - 1
    return y


def steps(rng: np.random.Generator, n: int) -> Array:
    """A level that jumps at random times."""
    return np.repeat(rng.normal(0, 5, size=n // 40), rng.integers(40, 160, size=n // 40))[:n]


def bursts(rng: np.random.Generator, n: int) -> Array:
    """Fast oscillations between silences."""
    on = (np.arange(n) // int(rng.integers(60, 120))) % 2
    return np.asarray(rng.uniform(2, 6) * on * np.sin(0.9 * np.arange(n)))


def square(rng: np.random.Generator, n: int) -> Array:
    """A square wave."""
    return np.asarray(rng.uniform(2, 10) * ((np.arange(n) // int(rng.integers(50, 120))) % 2))


def rise(rng: np.random.Generator, n: int) -> Array:
    """A ramp after silence."""
    return np.asarray(np.maximum(0.0, np.arange(n) - float(rng.integers(200, 500))) * rng.uniform(0.2, 2))


def staircase(rng: np.random.Generator, n: int) -> Array:
    """Steps upwards only: every level is new."""
    return np.cumsum((rng.random(n) < 0.01) * rng.uniform(2, 8, size=n))


def decays(rng: np.random.Generator, n: int) -> Array:
    """Shots at random times that decay: y ← 0.95 y + shot."""
    y, shots = np.zeros(n), (rng.random(n) < 0.015) * rng.exponential(5, size=n)
    for t in range(1, n):
        y[t] = 0.95 * y[t - 1] + shots[t]
    return y


def telegraph(rng: np.random.Generator, n: int) -> Array:
    """Three levels, changed at random."""
    y, level = np.zeros(n), 0.0
    for t in range(n):
        level = rng.choice([-4.0, 0.0, 6.0]) if rng.random() < 0.02 else level
        y[t] = level
    return y


def wild(rng: np.random.Generator, n: int) -> Array:
    """Noise whose size changes by decades."""
    return np.repeat(10 ** rng.uniform(-1, 1, size=n // 50 + 1), 50)[:n] * rng.normal(size=n)


def heartbeat(rng: np.random.Generator, n: int) -> Array:
    """Narrow peaks with a regular period, on a slow wave."""
    t, period = np.arange(n), float(rng.integers(30, 60))
    phase = (t % period) - period / 2
    return np.asarray(rng.uniform(5, 12) * np.exp(-((phase / 1.5) ** 2)) + np.sin(0.02 * t))


def oscillator(rng: np.random.Generator, n: int) -> Array:
    """A relaxation oscillator (van der Pol, μ = 8)."""
    x, v, y = rng.normal(), 0.0, np.zeros(n)
    for t in range(n):
        for _ in range(20):
            x, v = x + 0.01 * v, v + 0.01 * (8 * (1 - x * x) * v - x)
        y[t] = 3 * x
    return y


CHOSEN_WITH: dict[str, Signal] = {f.__name__: f for f in (spikes, saw, steps, bursts, square, rise)}
OTHERS: dict[str, Signal] = {f.__name__: f for f in (staircase, decays, telegraph, wild, heartbeat, oscillator)}


def walk(**options: Any) -> pc.Model:
    """A random walk seen with noise: it knows nothing of the signal; levels are learned from these guesses."""
    flow = pc.systems.linear(torch.zeros(1, 1, dtype=torch.float64))
    guesses = {"process_noise_sd": 0.3, "observation_noise_sd": NOISE, "hypotheses": None}
    return adaptive_filter(flow, 1, 1.0, **(guesses | options))


def estimate(model: pc.Model, y: Array, screen: bool) -> tuple[Array, int]:
    """Estimates of the signal, and how many values were taken as missing."""
    session = model.start(on_divergence="hold", screen=screen, record=("mean",)).run(y[:, None])
    return session.result().mean("x").reshape(len(y)), session.screened


def squared(found: Array, truth: Array) -> float:
    return float(np.mean((found - truth)[50:] ** 2))


def good_signals(kinds: dict[str, Signal], seeds: range) -> None:
    """Prints what screening costs where every observation is good."""
    model = walk()
    print("| signal | lost of 800 | error, all runs | median run | worst run |\n| --- | --- | --- | --- | --- |")
    for name, make in kinds.items():
        lost, with_it, without = [], [], []
        for seed in seeds:
            rng = np.random.default_rng(seed)
            truth = make(rng, SAMPLES)
            y = truth + NOISE * rng.normal(size=SAMPLES)
            found, count = estimate(model, y, True)
            lost.append(count)
            with_it.append(squared(found, truth))
            without.append(squared(estimate(model, y, False)[0], truth))
        ratio = np.array(with_it) / np.array(without)
        print(
            f"| {name} | {np.mean(lost):.1f} | {np.sum(with_it) / np.sum(without):.2g} × | {np.median(ratio):.2g} × "
            f"| {ratio.max():.2g} × |",
            flush=True,
        )


def outliers(seeds: range, smooth: bool) -> None:
    """Prints what outliers cost, over the same filter with these as missing."""
    model = walk()
    print("| size | 0.5 % | 3 % |\n| --- | --- | --- |")
    for size in (3.0, 5.0, 8.0, 12.0, 20.0, 100.0):
        cells = []
        for share in (0.005, 0.03):
            with_it, without = [], []
            for seed in seeds:
                rng = np.random.default_rng(seed)
                if smooth:
                    truth = 3 * np.sin(0.03 * np.arange(600) + rng.uniform(0, 6))
                else:
                    truth = np.cumsum(0.1 * rng.normal(size=600))
                y = truth + NOISE * rng.normal(size=600)
                hit = (rng.random(600) < share) & (np.arange(600) > 20)
                bad = np.where(hit, y + size * NOISE * np.sign(rng.normal(size=600)), y)
                with_it.append(squared(estimate(model, bad, True)[0], truth))
                without.append(squared(estimate(model, np.where(hit, np.nan, y), True)[0], truth))
            cells.append(f"{np.sum(with_it) / np.sum(without):.3g}")
        print(f"| {size:g} sd | {cells[0]} | {cells[1]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What screening costs, and what outliers cost in spite of it.")
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--chosen-with", action="store_true")
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    warnings.simplefilter("ignore")
    good_signals(CHOSEN_WITH if given.chosen_with else OTHERS, seeds)
    for smooth in (False, True):
        print("\noutliers,", "a sine" if smooth else "a random walk")
        outliers(seeds, smooth)


if __name__ == "__main__":
    main()
