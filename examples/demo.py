"""A neuron seen through one noisy electrode: hidden state, parameters and noise levels, found while the data come in.

Run:  python examples/demo.py            (make demo)
A FitzHugh–Nagumo neuron is simulated with random input. Only its membrane potential is observed, with noise; in 3 % of
the observations the electrode glitches, and for a while it fails. The adaptive filter is told the equations and rough
priors of two parameters, and nothing of noise and glitches. An extended Kalman filter is given the same priors and
wrong noise levels, as one has them in practice. The run is a typical one. One in twenty of the 95 % intervals should
miss the truth: --seed shows other runs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

import pcnet as pc
from pcnet.graphs import adaptive_filter
from pcnet.results.drawing import COLOURS

Array = NDArray[np.float64]

DT, SAMPLES, AHEAD = 0.2, 2000, 200
GAP = slice(1200, 1350)  # observations that are missing
TRUTH = np.array([0.5, 0.08])  # current, rate of recovery
PRIOR_MEAN, PRIOR_SD = np.array([0.3, 0.12]), np.array([0.3, 0.05])
PROCESS_SD, OBSERVATION_SD = np.array([0.05, 0.02]), 0.2  # per √time, and of an observation
GLITCHES, GLITCH_SD = 0.03, 2.0  # their share of the observations, and their size
WRONG = 5.0  # factor by which the Kalman filter takes the electrode for better, and the neuron for noisier, than it is
FINE = 20  # steps of the simulation in a sampling interval
NAMES = ("current", "rate of recovery")


def neuron(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Membrane potential v and recovery w: v̇ = v − v³/3 − w + θ₁, ẇ = θ₂ (v + 0.7 − 0.8 w)."""
    v, w = x[..., 0], x[..., 1]
    return torch.stack([v - v**3 / 3 - w + p[..., 0], p[..., 1] * (v + 0.7 - 0.8 * w)], -1)


def potential(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x[..., :1]


class World(NamedTuple):
    """What happened, and what was seen of it."""

    times: Array  # (T,)
    states: Array  # (T, 2)
    observations: Array  # (T, 1), NaN in the gap


class Tracked(NamedTuple):
    """Means and standard deviations of the states over time, (T, 2), and of the parameters at the end, (2,)."""

    mean: Array
    sd: Array
    parameters: Array
    parameters_sd: Array


def simulated(seed: int) -> World:
    """The neuron, integrated in fine steps, with glitches and a gap in what is observed."""
    fine = DT / FINE
    process = pc.simulate.simulate(
        neuron,
        parameters=TRUTH,
        initial=[0.0, 0.0],
        samples=FINE * (SAMPLES + AHEAD),
        dt=fine,
        state_sd=PROCESS_SD / fine**0.5,  # a diffusion
        observation_sd=OBSERVATION_SD,
        mapping=potential,
        seed=seed,
    )
    observations = process.observations[::FINE].numpy().copy()
    rng = np.random.default_rng(seed + 1000)
    glitches = np.flatnonzero(rng.random(SAMPLES) < GLITCHES)
    observations[glitches, 0] += GLITCH_SD * rng.normal(size=len(glitches))
    observations[GAP] = np.nan
    return World(DT * np.arange(len(observations)), process.states[::FINE].numpy(), observations)


def wrong_kalman_filter(observations: Array) -> Tracked:
    """A joint extended Kalman filter of states and parameters, given noise levels that are wrong."""
    steps, h = 4, DT / 4
    mean = np.concatenate([[observations[0, 0], 0.0], PRIOR_MEAN])
    covariance = np.diag(np.concatenate([[1.0, 1.0], PRIOR_SD**2]))
    noise = np.diag(np.concatenate([(PROCESS_SD * WRONG) ** 2, [0.0, 0.0]])) * h
    means, sds = [], []
    for y in observations[:, 0]:
        if means:
            for _ in range(steps):
                v, w, current, rate = mean
                slope = np.eye(4)
                slope[0] += h * np.array([1 - v**2, -1.0, 1.0, 0.0])
                slope[1] += h * np.array([rate, -0.8 * rate, 0.0, v + 0.7 - 0.8 * w])
                mean = mean + h * np.array([v - v**3 / 3 - w + current, rate * (v + 0.7 - 0.8 * w), 0.0, 0.0])
                covariance = slope @ covariance @ slope.T + noise
        if np.isfinite(y):
            gain = covariance[:, 0] / (covariance[0, 0] + (OBSERVATION_SD / WRONG) ** 2)
            mean = mean + gain * (y - mean[0])
            covariance = covariance - np.outer(gain, covariance[0])
        means.append(mean[:2])
        sds.append(np.sqrt(np.diag(covariance)[:2]))
    return Tracked(np.array(means), np.array(sds), mean[2:], np.sqrt(np.diag(covariance)[2:]))


def main() -> None:
    options = arguments()
    started = time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    world = simulated(options.seed)
    print(f"A FitzHugh–Nagumo neuron: {SAMPLES:,} observations of its potential, noise sd {OBSERVATION_SD:g}, ", end="")
    print(f"{GLITCHES:.0%} glitches, {GAP.stop - GAP.start} missing.\n")

    model = adaptive_filter(
        *(neuron, 2, DT), mapping=potential, parameter_mean=PRIOR_MEAN, parameter_sd=PRIOR_SD, noise_per_channel=True
    )
    session = model.start(record=pc.Record.flow())
    session.run(world.observations[:SAMPLES], progress=False)
    result, forecast = session.result(), session.forecast(AHEAD * DT)
    print(result.summary())

    ours = Tracked(result.mean("x")[:, 0], result.sd("x")[:, 0], result.mean("theta")[-1], result.sd("theta")[-1])
    theirs = wrong_kalman_filter(world.observations[:SAMPLES])
    report(world, result, ours, theirs)
    inside = within(world.states[SAMPLES:, 0], forecast.mean("x")[:, 0], forecast.sd("x")[:, 0])
    print(f"\nForecast of the next {AHEAD * DT:g} time units: {inside:.0%} of the true potential inside the 95 % band.")

    files = [draw(world, result, ours, theirs, forecast, options.output / "neuron.png")]
    result.plot(world.states[:SAMPLES], TRUTH, labels={"theta": list(NAMES)}).savefig(
        options.output / "all.png", dpi=110
    )
    result.error_flow().save(options.output / "flow.html", title="A neuron seen through one electrode")
    if not options.no_timing:
        speed(model, world)
    print(f"\nFigures: {files[0]} and {options.output / 'all.png'}")
    print(f"Who was surprised, when, and what it told whom: open {options.output / 'flow.html'}")
    print(f"({time.perf_counter() - started:.0f} s in all)")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("output/demo"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--no-timing", action="store_true", help="leave out the measurement of the speed")
    return parser.parse_args()


def within(truth: Array, mean: Array, sd: Array) -> float:
    """Share of the truth inside mean ± 1.96 sd."""
    return float((np.abs(truth - mean) <= 1.96 * sd).mean())


def report(world: World, result: pc.Result, ours: Tracked, theirs: Tracked) -> None:
    """Compare both filters with the truth."""
    truth, second = world.states[:SAMPLES], slice(SAMPLES // 2, SAMPLES)
    wide = f"EKF, noise wrong by {WRONG:g} ×"
    print(f"\n{'':<34}{'truth':>10}{'told nothing of the noise':>30}{wide:>30}")
    for i, name in enumerate(NAMES):
        cells = (f"{each.parameters[i]:.4f} ± {1.96 * each.parameters_sd[i]:.4f}" for each in (ours, theirs))
        marked = [
            cell + (" ✓" if abs(TRUTH[i] - each.parameters[i]) <= 1.96 * each.parameters_sd[i] else " ✗")
            for cell, each in zip(cells, (ours, theirs), strict=True)
        ]
        print(f"{name + ', 95 % interval':<34}{TRUTH[i]:>10g}{marked[0]:>30}{marked[1]:>30}")
    for i, name in enumerate(("potential (seen)", "recovery (hidden)")):
        errors = [np.sqrt(np.mean((each.mean - truth)[second, i] ** 2)) for each in (ours, theirs)]
        print(f"{'error of the ' + name:<34}{'':>10}{errors[0]:>30.3f}{errors[1]:>30.3f}")
        shares = [within(truth[second, i], each.mean[second, i], each.sd[second, i]) for each in (ours, theirs)]
        print(f"{'  inside its 95 % intervals':<34}{'':>10}{shares[0]:>30.0%}{shares[1]:>30.0%}")
    found = [np.exp(-0.5 * result.mean(name)[-1]) for name in ("noise_y", "noise_x")]
    width = [np.exp(0.98 * result.sd(name)[-1]) for name in ("noise_y", "noise_x")]
    for label, true, sd, factor, told in (
        ("noise sd of the electrode", OBSERVATION_SD, found[0][0], width[0][0], OBSERVATION_SD / WRONG),
        ("noise sd of the potential", PROCESS_SD[0], found[1][0], width[1][0], PROCESS_SD[0] * WRONG),
        ("noise sd of the recovery", PROCESS_SD[1], found[1][1], width[1][1], PROCESS_SD[1] * WRONG),
    ):
        known = "✓" if sd / factor <= true <= sd * factor else "✗"
        cell = f"{sd:.3f} ({sd / factor:.3f} to {sd * factor:.3f}) {known}"
        print(f"{label:<34}{true:>10g}{cell:>30}{f'given: {told:.3f}':>30}")


def speed(model: pc.Model, world: World) -> None:
    """Microseconds an observation of both engines; compiled code is compiled before."""

    def microseconds(engine: Literal["compiled", "eager"], count: int) -> float:
        begun = time.perf_counter()
        model.run(world.observations[:count], engine=engine, progress=False)
        return 1e6 * (time.perf_counter() - begun) / count

    microseconds("compiled", SAMPLES)
    whole, few = microseconds("compiled", SAMPLES), 200
    first = [microseconds("compiled", few), microseconds("eager", few)]
    print(
        f"\nSpeed: {whole:,.0f} µs an observation. Of the first {few}, while many hypotheses about the noise are left: "
    )
    print(f"{first[0]:,.0f} µs with the compiled engine, {first[1]:,.0f} µs with the eager one.")


def draw(world: World, result: pc.Result, ours: Tracked, theirs: Tracked, forecast: pc.Forecast, path: Path) -> Path:
    """Seen and hidden state with forecast, parameters and noise levels, beside those of the other filter."""
    figure = Figure(figsize=(10.0, 6.2), layout="constrained")
    grid = figure.subplot_mosaic([["v"] * 4, ["w"] * 4, ["a", "b", "c", "d"]], height_ratios=[1.0, 1.0, 0.9])
    shown = slice(1100, None)
    times, future = world.times[:SAMPLES], world.times[SAMPLES:]
    for i, (key, label) in enumerate((("v", "potential (seen)"), ("w", "recovery (hidden)"))):
        ax = grid[key]
        if i == 0:
            ax.plot(times[shown], world.observations[:SAMPLES][shown, 0], ".", ms=2.5, color="0.6", label="observed")
        for at, mean, sd, colour, name in (
            (times[shown], theirs.mean[shown, i], theirs.sd[shown, i], COLOURS[1], "EKF with wrong noise"),
            (times[shown], ours.mean[shown, i], ours.sd[shown, i], COLOURS[0], "pcnet, told nothing of the noise"),
            (future, forecast.mean("x")[:, i], forecast.sd("x")[:, i], COLOURS[2], "its forecast"),
        ):
            thin = colour == COLOURS[1]
            band = 0.12 if thin else 0.3
            ax.fill_between(at, mean - 1.96 * sd, mean + 1.96 * sd, color=colour, alpha=band, linewidth=0)
            ax.plot(at, mean, color=colour, linewidth=0.7 if thin else 1.6, alpha=0.8 if thin else 1.0, label=name)
        ax.plot(world.times[shown], world.states[shown, i], color="black", lw=0.8, ls=(0, (4, 2)), label="truth")
        ax.axvspan(world.times[GAP.start], world.times[GAP.stop], color="0.5", alpha=0.12, linewidth=0)
        ax.set_ylabel(label)
        ax.set_xlim(times[shown][0], future[-1])
        low, high = world.states[:, i].min(), world.states[:, i].max()
        ax.set_ylim(low - 0.4 * (high - low), high + 0.4 * (high - low))
    grid["v"].text(world.times[GAP.start] + 1, grid["v"].get_ylim()[0] + 0.4, "electrode fails", fontsize="small")
    grid["v"].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False, fontsize="small")
    grid["w"].set_xlabel("time")
    for i, (key, name) in enumerate(zip("ab", NAMES, strict=True)):
        band = result.interval("theta")
        _course(grid[key], times, result.mean("theta")[:, i], band.lower[:, i], band.upper[:, i], TRUTH[i], name)
        error = 1.96 * theirs.parameters_sd[i]
        grid[key].errorbar(times[-1] * 1.03, theirs.parameters[i], error, color=COLOURS[1], marker="o", ms=3, capsize=3)
    for key, node, i, true, given, name in (
        ("c", "noise_y", 0, OBSERVATION_SD, OBSERVATION_SD / WRONG, "noise sd, electrode"),
        ("d", "noise_x", 0, PROCESS_SD[0], PROCESS_SD[0] * WRONG, "noise sd, potential"),
    ):
        band = result.interval(node)
        sd = [np.exp(-0.5 * part[:, i]) for part in (result.mean(node), band.upper, band.lower)]
        _course(grid[key], times, *sd, true, name)
        grid[key].set_yscale("log")
        grid[key].plot(times[-1] * 1.03, given, "o", color=COLOURS[1], ms=3)
        grid[key].set_ylim(true / 12, true * 12)
    for ax in grid.values():
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return path


def _course(ax: Axes, times: Array, mean: Array, lower: Array, upper: Array, true: float, name: str) -> None:
    """An estimate over time with its interval, and the truth."""
    ax.fill_between(times, lower, upper, color=COLOURS[0], alpha=0.25, linewidth=0)
    ax.plot(times, mean, color=COLOURS[0], linewidth=1.2)
    ax.axhline(true, color="black", linewidth=0.8, linestyle=(0, (4, 2)))
    ax.set_title(name, fontsize="medium", loc="left")
    ax.set_xlabel("time")


if __name__ == "__main__":
    main()
