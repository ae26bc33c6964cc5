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
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pcnet.graphs import odem

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


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


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


RIVALS = {"glv": (lotka_volterra, np.array([0.3, -0.2, 0.3]), 0.25), "lorenz": (lorenz, np.array([30.0]), 9.0)}


def cells(observations: Array, conventions: str) -> dict[tuple[object, ...], tuple[Callable[[], object], int]]:
    """What is timed: a function for each cell of the table, and how many observations times inversions it does."""
    found: dict[tuple[object, ...], tuple[Callable[[], object], int]] = {}
    for model, (flow, prior, sd) in RIVALS.items():
        found[model, "Kalman"] = partial(kalman, observations[:1000], flow, prior, sd), 1000
        for orders in (2, 3):
            for batch in BATCHES:
                samples = max(12, min(300, STEADY // batch))
                graph, schedule = odem(model=model, orders=orders, conventions=conventions, **settings(batch))
                live = graph.start(schedule, record=("mean", "energy"))
                live.run(observations[:2])  # what is done once, before the first observation, does not count
                found[model, orders, batch] = partial(live.run, observations[:samples]), samples * batch
    return found


def first_tick(model: str, orders: int) -> None:
    graph, schedule = odem(model=model, orders=orders)
    graph.run(np.ones((1, 3)), schedule=schedule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=8, help="how often the whole table is timed; the best counts")
    parser.add_argument("--conventions", choices=("paper", "authors"), default="paper")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cold = {(model, orders): seconds(partial(first_tick, model, orders)) for model in RIVALS for orders in (2, 3)}
    timed = cells(process(1000), options.conventions)
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(options.passes):  # pass after pass, so that a slow spell of the machine spoils no cell for good
        for key, (run, work) in timed.items():
            best[key] = min(best[key], seconds(run) / work * 1e6)

    print(f"Python {platform.python_version()}, torch {torch.__version__}, 1 thread, {options.conventions} conventions")
    print("µs per observation and inversion; in brackets how many steps of the Kalman filter that is\n")
    header = " ".join(f"{'batch ' + str(batch):>16}" for batch in BATCHES)
    print(f"{'model':<8} {'orders':>6} {'Kalman':>8} {header} {'first tick':>11}")
    for model in RIVALS:
        rival = best[model, "Kalman"]
        for orders in (2, 3):
            costs = (best[model, orders, batch] for batch in BATCHES)
            row = " ".join(f"{cost:8.1f} ({cost / rival:5.2f})" for cost in costs)
            print(f"{model:<8} {orders:>6} {rival:8.1f} {row} {cold[model, orders] * 1e3:8.0f} ms")


if __name__ == "__main__":
    main()
