"""Two tiers: an interaction that drifts, or switches, is tracked by a state above it that knows how it moves.

Run it:  python examples/stack.py
Three species compete; how strongly the second acts on the first, a₁₂, swings slowly or jumps between three values. An
oscillator whose period is 10 % off, or a set of categories, predicts it from above. The categories are given in the
order in which they come, with how long each lasts, 10 % off as well; beside them some without that knowledge, which may
become another at any time. And one tier alone, which learns a₁₂ as a parameter and forgets as fast as serves it best.
Prints mean squared errors of a₁₂ over several seeds and writes output/stack.png. Where the first species has all but
died out nothing can be seen of a₁₂: there it counts what is known of how long values last.
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
from pcnet.graphs.adaptive_filter import kernel_of, noise_estimator
from pcnet.model.schedule import adaptive_filtering
from pcnet.nodes import CategoricalNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton

DT, EVERY, PERIOD, LASTS = 0.01, 64, 50.0, 25.0
VALUES = (0.2, 0.35, 0.05)
FORGETTING = torch.tensor([0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9], dtype=torch.float64)


C = pc.systems.lotka_volterra.coefficients
FLOW = Quadratic(torch.stack([C[..., 0] - 0.4 * C[..., 2] + 0.1 * C[..., 3], C[..., 1]], -1))
"""The paper's flow, of which a₁₃ = −0.4 and a₂₃ = 0.1 are known, and a₁₂ is the parameter."""


def interaction(kind: str, samples: int) -> Tensor:
    """a₁₂ at each time, (samples,)."""
    t = DT * torch.arange(samples, dtype=torch.float64)
    if kind == "drift":
        return 0.2 + 0.15 * torch.sin(2 * math.pi * t / PERIOD)
    return torch.tensor(VALUES, dtype=torch.float64)[(t / LASTS).long() % 3]


def world(a12: Tensor, width: float, seeds: list[int]) -> Tensor:
    """Observations (seeds, samples, 3) with noise that is white, or smooth with a kernel of this width."""
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


def one_tier(smoothness: float | None) -> pc.graph.Model:
    """a₁₂ as a parameter, under a batch of rates of forgetting; for worlds of several kinds and seeds."""
    x, y = KalmanStateNode("x1", dim=3, flow=FLOW), SensoryNode("y", dim=3, orders=1, dt=DT)
    a12 = ParameterNode("theta1", mean=[0.2], sd=0.2, estimator=Newton(forgetting_factor=FORGETTING[:, None, None]))
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(a12, x)
    for name, node, expected in (("noise1", x, 400.0), ("noise_y", y, 100.0)):
        graph.weighs(
            PrecisionNode(
                name,
                mean=math.log(expected),
                sd=2.0,
                kernel=kernel_of(smoothness),
                channels="shared",
                estimator=noise_estimator(steady=node is x),
            ),
            node,
        )
    return pc.graph.Model(graph, adaptive_filtering(EVERY))


def categories(smoothness: float | None, lasts: float | None = None) -> pc.graph.Model:
    """One of three values at a time, which last for about so long; or which may become another at any time."""
    steps = None if lasts is None else lasts / (EVERY * DT)
    how: dict[str, Any] = (
        {"stay": 0.93} if steps is None else {"dwell": pc.DwellTime(mean=steps, sd=0.1 * steps, order="cycle")}
    )
    return hierarchy(
        Level(
            FLOW,
            3,
            parameter_mean=[0.2],
            parameter_sd=0.01,
            expected_precision=400.0,
            learn_noise=True,
            correlation_time=smoothness,
        ),
        CategoricalNode("which", values=[[value] for value in VALUES], **how),
        dt=DT,
        expected_precision_y=100.0,
        correlation_time_y=smoothness,
        every=EVERY,
    )


def oscillator(smoothness: float | None, period: float) -> pc.graph.Model:
    """A constant and a swing above, both unknown, and a period that is only nearly known."""
    omega = 2 * math.pi / period
    return hierarchy(
        Level(
            FLOW,
            3,
            parameter_mean=[0.2],
            parameter_sd=0.003,
            expected_precision=400.0,
            learn_noise=True,
            correlation_time=smoothness,
        ),
        Level(
            Linear([[0.0, 0.0, 0.0], [0.0, 0.0, -omega], [0.0, omega, 0.0]]),
            3,
            mapping=Linear([[1.0, 1.0, 0.0]]),
            expected_precision=[1e10, 2500.0, 2500.0],
            initial_mean=[0.2, 0.0, 0.0],
            initial_sd=[0.05, 0.15, 0.15],
            substeps=8,
        ),
        dt=DT,
        expected_precision_y=100.0,
        correlation_time_y=smoothness,
        every=EVERY,
    )


def _error(found: Any, truth: Tensor) -> Any:
    """The mean squared error over all but the first quarter of the time and all seeds; found: (..., seeds, samples)."""
    away = found - truth.numpy()
    return (away[..., away.shape[-1] // 4 :] ** 2).mean((-2, -1))


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=7_500)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--width", type=float, default=0.0, help="of the noise's kernel; 0.05 is five samples")
    options = parser.parse_args()
    seeds, samples = list(range(options.seeds)), options.samples
    smoothness = math.sqrt(2) * options.width if options.width else None
    truths = {kind: interaction(kind, samples) for kind in ("drift", "switch")}
    worlds = [world(truth, options.width, seeds) for truth in truths.values()]
    graph, schedule = one_tier(smoothness)
    alone = graph.run(torch.stack(worlds), schedule, record=("mean",)).mean("theta1")[..., 0]  # both kinds at once
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    for i, (axes, (kind, truth)) in enumerate(zip(figure.subplots(2, 1, sharex=True), truths.items(), strict=True)):
        if kind == "drift":
            models = {"an oscillator above": oscillator(smoothness, 1.1 * PERIOD)}
        else:
            models = {"categories above": categories(smoothness, 1.1 * LASTS)}
            models |= {"categories without memory": categories(smoothness)}
        errors = _error(alone[:, i], truth)
        best = int(errors.argmin())
        print(
            f"{kind}: mean squared error of a12, one tier that never forgets {errors[0]:.5f}, one that forgets as is "
            f"best ({FORGETTING[best]:g} a window) {errors[best]:.5f}"
        )
        t = DT * np.arange(samples)
        axes.plot(t, truth, color="black", lw=1.5, label="truth")
        axes.plot(t, alone[best, i, 0], color="#D55E00", lw=1, label="one tier, forgetting")
        for (name, (graph, schedule)), colour in zip(models.items(), ("#0072B2", "#009E73"), strict=False):
            result = graph.run(worlds[i], schedule, record=("mean", "sd"))
            error = _error(result.mean("theta1")[..., 0], truth)
            print(f"  {name} {error:.5f}: {error / errors[0]:.3f} and {error / errors[best]:.3f} of these")
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
