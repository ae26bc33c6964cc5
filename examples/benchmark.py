"""Microseconds per observation and inversion, beside an extended Kalman filter written in numpy, in the same run.

Run it:  python examples/benchmark.py            (make bench)

Both of the paper's models at two and three orders, for batches of 1 to 756 inversions, on one thread. The rival is an
extended Kalman filter with the parameters in its state: the cheapest thing that also tracks states and learns
parameters, though neither precisions nor free energy. Each figure is the best of several runs: the machine's noise only
ever adds. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from pcnet import Graph, Schedule
from pcnet.graphs import paper

Array = NDArray[np.float64]
BATCHES = (1, 32, 256, 756)
STEADY = 4000  # inversions timed at once: enough to be steady, few enough to be quick


def process(samples: int) -> Array:
    """The paper's Lotka–Volterra process with white noise, (samples, 3)."""
    draw = np.random.default_rng(0)
    interaction = np.array([[0.0, 0.2, -0.4], [-0.2, 0.0, 0.1], [0.4, -0.1, 0.0]])
    x, rows = 5 * np.array([0.45, 0.22, 0.33]), []
    for _ in range(samples):
        rows.append(x + 0.1 * draw.normal(size=3))
        x = np.clip(x + 0.01 * (x * (interaction @ x) + 0.05 * draw.normal(size=3)), 0, 5)
    return np.array(rows)


def lotka_volterra(x: Array, a: Array) -> tuple[Array, Array, Array]:
    """The flow, its slope in the state and its slope in the parameters."""
    matrix = np.array([[0, a[0], a[1]], [-a[0], 0, a[2]], [-a[1], -a[2], 0]])
    pull = matrix @ x
    by_parameter = np.array(
        [[x[0] * x[1], x[0] * x[2], 0], [-x[0] * x[1], 0, x[1] * x[2]], [0, -x[0] * x[2], -x[1] * x[2]]]
    )
    return x * pull, np.diag(pull) + x[:, None] * matrix, by_parameter


def lorenz(x: Array, a: Array) -> tuple[Array, Array, Array]:
    flow = np.array([10 * (x[1] - x[0]), x[0] * (a[0] - x[2]) - x[1], x[0] * x[1] - 8 / 3 * x[2]])
    slope = np.array([[-10, 10, 0], [a[0] - x[2], -1, -x[0]], [x[1], x[0], -8 / 3]])
    return flow, slope, np.array([[0.0], [x[0]], [0.0]])


def kalman(observations: Array, flow: Callable[..., tuple[Array, Array, Array]], prior: Array, sd: float) -> Array:
    """An extended Kalman filter over states and parameters; the last mean."""
    dt, n, p = 0.01, 3, len(prior)
    mean = np.concatenate([observations[0], prior])
    covariance = np.diag([0.01] * n + [sd**2] * p)
    noise = np.diag([(dt * 0.05) ** 2] * n + [0.0] * p)
    sensor, eye = 0.01 * np.eye(n), np.eye(n + p)
    for y in observations:
        change, slope, by_parameter = flow(mean[:n], mean[n:])
        step = eye.copy()
        step[:n, :n] += dt * slope
        step[:n, n:] = dt * by_parameter
        mean[:n] += dt * change
        covariance = step @ covariance @ step.T + noise
        gain = np.linalg.solve(covariance[:n, :n] + sensor, covariance[:n]).T
        mean = mean + gain @ (y - mean[:n])
        covariance = covariance - gain @ covariance[:n]
    return mean


def best(run: Callable[[], object], times: int) -> float:
    """Seconds of the quickest of several runs."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return min(found)


def settings(batch: int) -> dict[str, torch.Tensor]:
    """The first `batch` of the paper's 756 settings at one order, or all of them."""
    axes = (
        torch.tensor([10.0, 20, 50, 500, 5000, 12500, 25000]),
        torch.tensor([1.0, 0.5, 0.25]),
        torch.tensor([64.0, 128, 256, 512]),
        torch.tensor([0.0, 0.1, 0.2]),
        torch.tensor([0.0, 0.1, 0.2]),
    )
    names = ("expected_precision_y", "kappa", "every", "beta_lambda", "beta_theta")
    grid = torch.cartesian_prod(*axes).double()
    chosen = torch.linspace(0, len(grid) - 1, batch).long()
    return {name: grid[chosen, i] for i, name in enumerate(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--conventions", choices=("paper", "authors"), default="paper")
    options = parser.parse_args()
    torch.set_num_threads(1)
    observations = process(2000)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, 1 thread, {options.conventions} conventions")
    print("µs per observation and inversion; in brackets how many steps of the Kalman filter that is\n")
    print(
        f"{'model':<8} {'orders':>6} {'Kalman':>8} "
        + " ".join(f"{'batch ' + str(b):>16}" for b in BATCHES)
        + f" {'first tick':>11}"
    )
    for model, flow, prior, sd in (
        ("glv", lotka_volterra, np.array([0.3, -0.2, 0.3]), 0.25),
        ("lorenz", lorenz, np.array([30.0]), 9.0),
    ):
        rival = (
            best(lambda f=flow, m=prior, s=sd: kalman(observations, f, m, s), options.repeats) / len(observations) * 1e6
        )
        for orders in (2, 3):
            cells = []
            for batch in BATCHES:
                samples = max(30, min(1000, STEADY // batch))
                graph, schedule = paper.odem(
                    model=model, orders=orders, conventions=options.conventions, **settings(batch)
                )

                def invert(graph: Graph = graph, schedule: Schedule = schedule, samples: int = samples) -> None:
                    graph.run(observations[:samples], schedule=schedule, record=("mean", "energy"))

                cost = best(invert, options.repeats) / samples / batch * 1e6
                cells.append(f"{cost:8.1f} ({cost / rival:5.2f})")

            def first(orders: int = orders, model: str = model) -> None:
                graph, schedule = paper.odem(model=model, orders=orders)
                graph.run(observations[:1], schedule=schedule)

            cold = best(first, 1) * 1e3
            print(f"{model:<8} {orders:>6} {rival:8.1f} " + " ".join(cells) + f" {cold:8.0f} ms")


if __name__ == "__main__":
    main()
