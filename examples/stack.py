"""A hierarchy of two levels: the upper level predicts a parameter of the lower one that drifts or switches.

Run:  python examples/stack.py
Three species compete. The interaction a₁₂ oscillates slowly, or switches between three values. Three models track it:

- two levels, with an oscillator above whose period is 10 % wrong (drift), or with a categorical node above that has the
  order of the values and their dwell time, 10 % wrong (switch);
- two levels, with a categorical node above that has a constant probability of switching;
- one level, which learns a₁₂ as a parameter with the best forgetting factor.

Prints mean squared errors of a₁₂ over several seeds and writes output/stack.png. While the first species is almost
extinct the data contain no information about a₁₂; there the dwell time matters.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pcnet as pc
from pcnet.functions.closed_form import Linear, Quadratic
from pcnet.graphs import Level, hierarchy
from pcnet.graphs.adaptive_filter import kernel_of
from pcnet.nodes import CategoricalNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton

DT, EVERY, PERIOD, DWELL = 0.01, 64, 50.0, 25.0
VALUES = (0.2, 0.35, 0.05)
FORGETTING = torch.tensor([0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9], dtype=torch.float64)


SIMULATED: dict[str, Any] = {"integrator": "euler", "process_noise": "held"}
"""As the process is simulated: Euler steps, with noise that is held constant over each."""

C = pc.systems.lotka_volterra.coefficients
FLOW = Quadratic(torch.stack([C[..., 0] - 0.4 * C[..., 2] + 0.1 * C[..., 3], C[..., 1]], -1))
"""The paper's flow with known a₁₃ = −0.4 and a₂₃ = 0.1; a₁₂ is the parameter."""


def interaction(kind: str, samples: int) -> Tensor:
    """True a₁₂ at each time, (samples,)."""
    t = DT * torch.arange(samples, dtype=torch.float64)
    if kind == "drift":
        return 0.2 + 0.15 * torch.sin(2 * math.pi * t / PERIOD)
    return torch.tensor(VALUES, dtype=torch.float64)[(t / DWELL).long() % 3]


def world(a12: Tensor, width: float, seeds: list[int]) -> Tensor:
    """Observations (seeds, samples, 3) with white noise (width 0), or smooth noise with a kernel of this width."""
    rngs = [np.random.default_rng(seed).spawn(2) for seed in seeds]
    z, w = (
        torch.stack([pc.simulate.smooth_noise(len(a12), 3, sd=sd, width=width, dt=DT, seed=rng[i]) for rng in rngs])
        for i, sd in enumerate((0.05, 0.1))
    )
    x, states = torch.tensor(pc.simulate.GLV_INITIAL, dtype=torch.float64).expand(len(seeds), 3), []
    for t, value in enumerate(a12):
        states.append(x)
        x = (x + DT * (FLOW(x, value.expand(len(seeds), 1)) + z[:, t])).clamp(0, 5)
    return torch.stack(states, 1) + w


def one_level(correlation_time: float | None) -> pc.Model:
    """a₁₂ as a parameter, with a batch of forgetting factors, for a batch of processes and seeds."""
    x, y = KalmanStateNode("x1", dim=3, flow=FLOW, **SIMULATED), SensoryNode("y", dim=3, orders=1, dt=DT)
    a12 = ParameterNode("theta1", mean=[0.2], sd=0.2, estimator=Newton(forgetting_factor=FORGETTING[:, None, None]))
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(a12, x)
    for name, node, noise_sd in (("noise1", x, 0.05), ("noise_y", y, 0.1)):
        log, kernel = -2 * math.log(noise_sd), kernel_of(correlation_time)
        graph.weighs(PrecisionNode(name, mean=log, sd=1.6, kernel=kernel, channels="shared"), node)
    return pc.Model(graph, pc.adaptive_filtering(learn_every=EVERY))


def categorical(correlation_time: float | None, dwell: float | None = None) -> pc.Model:
    """A categorical node over three values, with a mean dwell time (in time units), or with a constant probability."""
    steps = None if dwell is None else dwell / (EVERY * DT)
    transition: dict[str, Any] = (
        {"stay": 0.93} if steps is None else {"dwell": pc.DwellTime(mean=steps, sd=0.1 * steps, order="cycle")}
    )
    return hierarchy(
        Level(
            FLOW,
            3,
            parameter_mean=[0.2],
            parameter_sd=0.01,
            process_noise_sd=0.05,
            learn_noise=True,
            correlation_time=correlation_time,
            **SIMULATED,
        ),
        CategoricalNode("which", values=[[value] for value in VALUES], **transition),
        dt=DT,
        observation_noise_sd=0.1,
        correlation_time_y=correlation_time,
        every=EVERY,
    )


def oscillator(correlation_time: float | None, period: float) -> pc.Model:
    """An oscillator of this period around a constant; offset, amplitude and phase are inferred."""
    omega = 2 * math.pi / period
    return hierarchy(
        Level(
            FLOW,
            3,
            parameter_mean=[0.2],
            parameter_sd=0.003,
            process_noise_sd=0.05,
            learn_noise=True,
            correlation_time=correlation_time,
            **SIMULATED,
        ),
        Level(
            Linear([[0.0, 0.0, 0.0], [0.0, 0.0, -omega], [0.0, omega, 0.0]]),
            3,
            mapping=Linear([[1.0, 1.0, 0.0]]),
            process_noise_sd=[1e-5, 0.016, 0.016],
            initial_mean=[0.2, 0.0, 0.0],
            initial_sd=[0.05, 0.15, 0.15],
        ),
        dt=DT,
        observation_noise_sd=0.1,
        correlation_time_y=correlation_time,
        every=EVERY,
    )


def mean_squared_error(estimate: Any, truth: Tensor) -> Any:
    """Mean squared error over seeds and time without the first quarter; estimate: (..., seeds, samples)."""
    error = estimate - truth.numpy()
    return (error[..., error.shape[-1] // 4 :] ** 2).mean((-2, -1))


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=7_500)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--width", type=float, default=0.0, help="width of the noise kernel in time units; 0.05 is five samples"
    )
    options = parser.parse_args()
    seeds, samples = list(range(options.seeds)), options.samples
    correlation_time = math.sqrt(2) * options.width if options.width else None
    truths = {kind: interaction(kind, samples) for kind in ("drift", "switch")}
    worlds = [world(truth, options.width, seeds) for truth in truths.values()]
    single = one_level(correlation_time).run(torch.stack(worlds), record=("mean",)).mean("theta1")[..., 0]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    for i, (axes, (kind, truth)) in enumerate(zip(figure.subplots(2, 1, sharex=True), truths.items(), strict=True)):
        if kind == "drift":
            models = {"two levels, oscillator": oscillator(correlation_time, 1.1 * PERIOD)}
        else:
            models = {"two levels, dwell time": categorical(correlation_time, 1.1 * DWELL)}
            models |= {"two levels, constant probability": categorical(correlation_time)}
        errors = mean_squared_error(single[:, i], truth)
        best = int(errors.argmin())
        print(
            f"{kind}: mean squared error of a12 with one level: {errors[0]:.5f} without forgetting, "
            f"{errors[best]:.5f} with the best forgetting factor ({FORGETTING[best]:g} per window)"
        )
        t = DT * np.arange(samples)
        axes.plot(t, truth, color="black", lw=1.5, label="truth")
        axes.plot(t, single[best, i, 0], color="#D55E00", lw=1, label="one level, forgetting")
        for (name, model), colour in zip(models.items(), ("#0072B2", "#009E73"), strict=False):
            result = model.run(worlds[i], record=("mean", "sd"))
            error = mean_squared_error(result.mean("theta1")[..., 0], truth)
            print(f"  {name}: {error:.5f}, relative to these {error / errors[0]:.3f} and {error / errors[best]:.3f}")
            mean, sd = (part[0, :, 0] for part in (result.mean("theta1"), result.sd("theta1")))
            axes.plot(t, mean, color=colour, lw=1, label=name)
            if colour == "#0072B2":
                axes.fill_between(t, mean - 2 * sd, mean + 2 * sd, color=colour, alpha=0.2, lw=0, label="±2 sd")
        axes.set(ylabel="a₁₂", ylim=(-0.25, 0.65))
        axes.legend(loc="upper left", ncols=5, frameon=False, fontsize=8)
    axes.set_xlabel("time")
    path = Path("output") / "stack.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)
    print(path)


if __name__ == "__main__":
    main()
