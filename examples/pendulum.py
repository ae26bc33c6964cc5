"""Learn an unknown pendulum online with a small neural network, and forecast it.

Run:  python examples/pendulum.py
Angle and velocity of a damped pendulum, driven by a smooth random force, are observed with noise. The flow of the model
is a network (2-8-2, tanh) whose 42 weights are parameters. States and weights are inferred together, in one pass, one
observation at a time. Forecasts start in the last third of the stream, from the inferred states, with the weights
learned before. They are compared with persistence (the inferred state, held constant) and with the true flow from the
same states. The future force is unknown to all three.

The settings were chosen on other seeds (0 to 11) than those shown. The noise is smooth, as generalised coordinates
assume, and its level and correlation time are given. With white noise these settings lose track.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import pcnet as pc
from pcnet.functions.base import PlainFunction
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton
from pcnet.numerics.integrators import LocalLinearisation
from pcnet.results.drawing import COLOURS, DASHES

DT = 0.02
REACH = 2.0
"""Longest horizon of the forecasts, in seconds."""
HORIZONS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
GRAVITY, DAMPING = 4.9, 0.15
NOISE = (0.05, 0.15)
WIDTH = 0.1
"""Width of the kernel that smooths both noises; the lengthscale of their autocorrelation is √2 times as large."""
NAMES = {"learned": "learned network", "persistence": "persistence", "true": "true flow"}
LOOKS: dict[str, dict[str, Any]] = {
    "learned": {"color": COLOURS[0]},
    "persistence": {"color": COLOURS[1]},
    "true": {"color": "black", "linestyle": DASHES},
}


def pendulum(x: Tensor, _: Tensor) -> Tensor:
    """d angle/dt = velocity, d velocity/dt = −g/l sin(angle) − damping · velocity."""
    angle, velocity = x.unbind(-1)
    return torch.stack([velocity, -GRAVITY * angle.sin() - DAMPING * velocity], -1)


class Learned(NamedTuple):
    """The stream, with inferred states (seeds, time, 2) and weights (seeds, time, 42)."""

    truth: Tensor
    observations: Tensor
    states: Tensor
    weights: Tensor
    network: pc.Network


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    seeds = list(range(options.seed, options.seed + options.seeds))
    samples = round(options.seconds / DT)
    frozen = 2 * samples // 3
    started = time.perf_counter()
    learned = learn(*simulate(seeds, samples), seeds)
    took = time.perf_counter() - started
    print(f"{options.seconds:g} s of {len(seeds)} pendulums in {took:.0f} s, {1e3 * took / samples:.1f} ms per step.")
    forecasts = forecast(learned, frozen, frozen)
    report(forecasts)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(learned, forecasts, frozen).savefig(options.output, dpi=150)
    print(f"picture: {options.output}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="length of the stream; forecasts start in its last third"
    )
    parser.add_argument("--seeds", type=int, default=8, help="number of pendulums, each with its own network")
    parser.add_argument("--seed", type=int, default=200, help="the first seed")
    parser.add_argument("--output", type=Path, default=Path("output/pendulum.png"), metavar="FILE")
    options = parser.parse_args()
    if options.seconds < 3 * (REACH + 1) or options.seeds < 1:
        parser.error(f"give at least {3 * (REACH + 1):g} seconds and one seed")
    return options


# --- process and model ------------------------------------------------------------------------------------------------
def simulate(seeds: list[int], samples: int, substeps: int = 10) -> tuple[Tensor, Tensor]:
    """States and observations (seeds, time, 2), simulated with `substeps` steps per observation."""
    process = pc.simulate.simulate(
        pendulum,
        initial=[1.0, 0.0],
        samples=samples * substeps,
        dt=DT / substeps,
        state_sd=[0.0, 1.0],
        observation_sd=NOISE,
        width=WIDTH,
        seed=seeds,
    )
    return process.states[:, ::substeps], process.observations[:, ::substeps]


def learn(truth: Tensor, observations: Tensor, seeds: list[int]) -> Learned:
    """One pass over all streams as a batch, with different initial weights for each."""
    networks = []
    for seed in seeds:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            networks.append(pc.Network(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))))
    first = torch.stack([network.initial for network in networks])

    # the flow is wrong at first: a low precision limits its influence on the states, and a high kappa lets velocities
    # and accelerations follow the observations
    x = GeneralisedStateNode(
        "x", dim=2, orders=3, flow=networks[0], integrator=LocalLinearisation(kappa=400.0, step_size=DT)
    )
    y = SensoryNode("y", dim=2, orders=3, dt=DT)
    weights = ParameterNode("weights", mean=first, sd=0.5, estimator=Newton())
    correlation_time = 2**0.5 * WIDTH
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(weights, x)
    graph.weighs(PrecisionNode("noise_x", prior_precision=[1.0, 0.1], sd=0.1, correlation_time=correlation_time), x)
    graph.weighs(
        PrecisionNode("noise_y", prior_precision=[sd**-2 for sd in NOISE], sd=0.1, correlation_time=correlation_time), y
    )
    result = pc.Model(graph, pc.odem(every=10)).run(observations, record=["mean"])
    states, inferred = torch.as_tensor(result.mean("x")[..., 0, :]), torch.as_tensor(result.mean("weights"))
    return Learned(truth, observations, states, inferred, networks[0])


# --- forecasts --------------------------------------------------------------------------------------------------------
class Forecasts(NamedTuple):
    """Forecast paths (steps, seeds, origins, 2) by method, and the truth; origins are sample numbers."""

    origins: list[int]
    paths: dict[str, Tensor]
    truth: Tensor

    def error(self, name: str, channel: int = 0) -> Tensor:
        """RMS error over the origins, (steps, seeds)."""
        return (self.paths[name] - self.truth)[..., channel].square().mean(-1).sqrt()


def forecast(learned: Learned, frozen: int, first: int) -> Forecasts:
    """Forecasts from every half second after `first`, with the weights learned up to `frozen`."""
    steps, samples = round(REACH / DT), learned.truth.shape[1]
    origins = list(range(first, samples - steps, round(0.5 / DT)))
    start = learned.states[:, origins]
    weights = learned.weights[:, None, frozen - 1].expand(-1, len(origins), -1)
    paths = {
        "learned": integrate(learned.network, start, weights, steps),
        "persistence": start.expand(steps + 1, *start.shape),
        "true": integrate(pendulum, start, weights, steps),
    }
    truth = torch.stack([learned.truth[:, [t + step for t in origins]] for step in range(steps + 1)])
    return Forecasts(origins, paths, truth)


def integrate(flow: PlainFunction, x: Tensor, parameters: Tensor, steps: int) -> Tensor:
    """Solution of ẋ = f(x) by fourth-order Runge–Kutta steps, (steps + 1, ...)."""
    path = [x]
    with torch.no_grad():
        for _ in range(steps):
            a = flow(x, parameters)
            b = flow(x + DT / 2 * a, parameters)
            c = flow(x + DT / 2 * b, parameters)
            d = flow(x + DT * c, parameters)
            x = x + DT / 6 * (a + 2 * b + 2 * c + d)
            path.append(x)
    return torch.stack(path)


def report(forecasts: Forecasts) -> None:
    seeds = forecasts.truth.shape[1]
    print(f"\nRMS error of {len(forecasts.origins)} forecasts per seed, mean of {seeds} seeds (angle | velocity)")
    print(f"{'horizon':<9}" + "".join(f"{name:>18}" for name in NAMES.values()) + f"{'better than persistence':>30}")
    for horizon in HORIZONS:
        at, row, wins = round(horizon / DT), f"{horizon:<4g} s   ", []
        for name in NAMES:
            means = [float(forecasts.error(name, channel)[at].mean()) for channel in (0, 1)]
            row += f"{means[0]:>11.3f} | {means[1]:<4.2f}"
        for channel in (0, 1):
            ours, theirs = (forecasts.error(name, channel)[at] for name in ("learned", "persistence"))
            wins.append(int((ours < theirs).sum()))
        print(f"{row}{f'{wins[0]} | {wins[1]} of {seeds} seeds':>30}")
    print()


# --- figure -----------------------------------------------------------------------------------------------------------
def draw(learned: Learned, forecasts: Forecasts, frozen: int) -> Figure:
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplot_mosaic([["path"] * 3, ["horizon", "force", "time"]], height_ratios=[1.1, 1])
    draw_paths(axes["path"], learned, forecasts)
    draw_horizons(axes["horizon"], forecasts)
    draw_force(axes["force"], learned, frozen)
    draw_learning(axes["time"], learned, forecasts, frozen)
    for ax in axes.values():
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A network learns an unknown pendulum online and forecasts it", fontsize="x-large")
    return figure


def draw_paths(ax: Axes, learned: Learned, forecasts: Forecasts) -> None:
    """One pendulum after learning: truth, observations, and forecasts that do not overlap."""
    first, steps = forecasts.origins[0], len(forecasts.truth) - 1
    times = np.arange(first, learned.truth.shape[1]) * DT
    ax.plot(times, learned.observations[0, first:, 0], ".", markersize=2.5, color="0.75", label="observations")
    ax.plot(times, learned.truth[0, first:, 0], color="black", linewidth=1.0, label="truth")
    for i in range(0, len(forecasts.origins), round((REACH + 0.5) / 0.5)):
        span = (forecasts.origins[i] + np.arange(steps + 1)) * DT
        for name in ("persistence", "learned"):
            label = None if i else f"{NAMES[name]}, {REACH:g} s ahead"
            ax.plot(span, forecasts.paths[name][:, 0, i, 0], linewidth=2.4, label=label, **LOOKS[name])
        ax.plot(span[:1], forecasts.paths["learned"][:1, 0, i, 0], "o", color="black", markersize=4)
    ax.set(xlabel="time (s)", ylabel="angle (rad)")
    ax.margins(x=0.01)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, markerscale=3)


def draw_horizons(ax: Axes, forecasts: Forecasts) -> None:
    times = np.arange(len(forecasts.truth)) * DT
    for name, label in NAMES.items():
        errors = forecasts.error(name)
        ax.plot(times, errors, linewidth=0.6, alpha=0.4, **LOOKS[name])
        ax.plot(times, errors.mean(1), linewidth=2.2, label=label, **LOOKS[name])
    ax.set(xlabel="horizon (s)", ylabel="RMS error of the angle (rad)", xlim=(0, REACH), ylim=(0, None))
    ax.set_title(f"Error against horizon: {errors.shape[1]} seeds, mean", loc="left")
    ax.legend(frameon=False, loc="upper left")


def draw_force(ax: Axes, learned: Learned, frozen: int) -> None:
    """Acceleration at rest by angle; the shaded range is that of the training data."""
    weights = learned.weights[:, frozen - 1]
    visited = learned.truth[:, :frozen, 0]
    low, high = float(visited.quantile(0.005)), float(visited.quantile(0.995))
    angles = torch.linspace(1.4 * low, 1.4 * high, 200, dtype=torch.float64)
    rest = torch.stack([angles, torch.zeros_like(angles)], -1).expand(len(weights), -1, -1)
    with torch.no_grad():
        forces = learned.network(rest, weights[:, None].expand(-1, len(angles), -1))[..., 1]
    ax.axvspan(low, high, color="0.92")
    ax.text((low + high) / 2, 0.02, "training range", transform=ax.get_xaxis_transform(), ha="center", color="0.35")
    for i, force in enumerate(forces):
        ax.plot(angles, force, linewidth=0.9, alpha=0.7, label=None if i else NAMES["learned"], **LOOKS["learned"])
    ax.plot(angles, -GRAVITY * angles.sin(), linewidth=1.8, label="truth", **LOOKS["true"])
    ax.set(xlabel="angle (rad)", ylabel="acceleration at rest (rad/s²)")
    ax.margins(x=0)
    ax.set_title(f"Force learned by {len(forces)} networks", loc="left")
    ax.legend(frameon=False, loc="upper right")


def draw_learning(ax: Axes, learned: Learned, forecasts: Forecasts, frozen: int) -> None:
    """Error of one-second forecasts against the time of learning."""
    at, times = round(1.0 / DT), np.unique(np.linspace(50, frozen, 25).astype(int) // 50 * 50)
    errors = torch.stack([forecast(learned, int(t), frozen).error("learned")[at] for t in times])
    ax.plot(times * DT, errors, linewidth=0.6, alpha=0.4, **LOOKS["learned"])
    ax.plot(times * DT, errors.mean(1), linewidth=2.2, label=NAMES["learned"], **LOOKS["learned"])
    for name in ("persistence", "true"):
        level = float(forecasts.error(name)[at].mean())
        ax.axhline(level, linewidth=2.2, label=NAMES[name], **LOOKS[name])
    ax.set(xlabel="seconds of learning", ylabel="RMS error 1 s ahead (rad)", ylim=(0, None), xlim=(0, frozen * DT))
    ax.set_title(f"Error against learning: {errors.shape[1]} seeds, mean", loc="left")


if __name__ == "__main__":
    main()
