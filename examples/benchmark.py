"""Microseconds per observation and inversion, compared with an extended Kalman filter in numpy in the same run.

Run:  python examples/benchmark.py            (make bench)
Both of the paper's models at two and three orders, for batches of 1 to 756 inversions, on one thread. The reference is
an extended Kalman filter with the parameters in its state. It tracks states and learns parameters, but has no
precisions and no free energy. Each number is the minimum of several passes, because other load only adds time.
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
WORK = 4000  # observations times inversions of one timing


def process(samples: int) -> Array:
    """The paper's Lotka–Volterra process with white noise, (samples, 3)."""
    rng = np.random.default_rng(0)
    interaction = np.array([[0.0, 0.2, -0.4], [-0.2, 0.0, 0.1], [0.4, -0.1, 0.0]])
    x, rows = 5 * np.array([0.45, 0.22, 0.33]), []
    for _ in range(samples):
        rows.append(x + 0.1 * rng.normal(size=3))
        x = np.clip(x + 0.01 * (x * (interaction @ x) + 0.05 * rng.normal(size=3)), 0, 5)
    return np.array(rows)


def lotka_volterra(x: Array, a: Array) -> tuple[Array, Array, Array]:
    """The flow and its Jacobians with respect to state and parameters."""
    matrix = np.array([[0, a[0], a[1]], [-a[0], 0, a[2]], [-a[1], -a[2], 0]])
    growth = matrix @ x
    jacobian_theta = np.array(
        [[x[0] * x[1], x[0] * x[2], 0], [-x[0] * x[1], 0, x[1] * x[2]], [0, -x[0] * x[2], -x[1] * x[2]]]
    )
    return x * growth, np.diag(growth) + x[:, None] * matrix, jacobian_theta


def lorenz(x: Array, a: Array) -> tuple[Array, Array, Array]:
    flow = np.array([10 * (x[1] - x[0]), x[0] * (a[0] - x[2]) - x[1], x[0] * x[1] - 8 / 3 * x[2]])
    jacobian = np.array([[-10, 10, 0], [a[0] - x[2], -1, -x[0]], [x[1], x[0], -8 / 3]])
    return flow, jacobian, np.array([[0.0], [x[0]], [0.0]])


def kalman(observations: Array, flow: Callable[..., tuple[Array, Array, Array]], prior: Array, sd: float) -> Array:
    """Extended Kalman filter of states and parameters; returns the last mean."""
    dt, n, p = 0.01, 3, len(prior)
    mean = np.concatenate([observations[0], prior])
    covariance = np.diag([0.01] * n + [sd**2] * p)
    Q = np.diag([(dt * 0.05) ** 2] * n + [0.0] * p)
    R, eye = 0.01 * np.eye(n), np.eye(n + p)
    for y in observations:
        velocity, jacobian, jacobian_theta = flow(mean[:n], mean[n:])
        F = eye.copy()
        F[:n, :n] += dt * jacobian
        F[:n, n:] = dt * jacobian_theta
        mean[:n] += dt * velocity
        covariance = F @ covariance @ F.T + Q
        gain = np.linalg.solve(covariance[:n, :n] + R, covariance[:n]).T
        mean = mean + gain @ (y - mean[:n])
        covariance = covariance - gain @ covariance[:n]
    return mean


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def settings(batch: int) -> dict[str, torch.Tensor]:
    """`batch` of the paper's 756 settings at one order, evenly spaced."""
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


REFERENCES = {"glv": (lotka_volterra, np.array([0.3, -0.2, 0.3]), 0.25), "lorenz": (lorenz, np.array([30.0]), 9.0)}


def cells(observations: Array, conventions: str) -> dict[tuple[object, ...], tuple[Callable[[], object], int]]:
    """For each cell of the table: the function to time, and its number of observations times inversions."""
    found: dict[tuple[object, ...], tuple[Callable[[], object], int]] = {}
    for model, (flow, prior, sd) in REFERENCES.items():
        found[model, "Kalman"] = partial(kalman, observations[:1000], flow, prior, sd), 1000
        for orders in (2, 3):
            for batch in BATCHES:
                samples = max(12, min(300, WORK // batch))
                inversion = odem(model=model, orders=orders, conventions=conventions, **settings(batch))
                session = inversion.start(record=("mean", "energy"))
                session.run(observations[:2])  # excludes tracing and initialisation from the timing
                found[model, orders, batch] = partial(session.run, observations[:samples]), samples * batch
    return found


def first_tick(model: str, orders: int) -> None:
    odem(model=model, orders=orders).run(np.ones((1, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=8, help="number of timings of the table; the minimum is shown")
    parser.add_argument("--conventions", choices=("paper", "authors"), default="paper")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cold = {(model, orders): seconds(partial(first_tick, model, orders)) for model in REFERENCES for orders in (2, 3)}
    timed = cells(process(1000), options.conventions)
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(options.passes):  # the table as a whole, so that a slow period affects no cell in all passes
        for key, (run, work) in timed.items():
            best[key] = min(best[key], seconds(run) / work * 1e6)

    print(f"Python {platform.python_version()}, torch {torch.__version__}, 1 thread, {options.conventions} conventions")
    print("µs per observation and inversion; in brackets: relative to a step of the Kalman filter\n")
    header = " ".join(f"{'batch ' + str(batch):>16}" for batch in BATCHES)
    print(f"{'model':<8} {'orders':>6} {'Kalman':>8} {header} {'first tick':>11}")
    for model in REFERENCES:
        reference = best[model, "Kalman"]
        for orders in (2, 3):
            costs = (best[model, orders, batch] for batch in BATCHES)
            row = " ".join(f"{cost:8.1f} ({cost / reference:5.2f})" for cost in costs)
            print(f"{model:<8} {orders:>6} {reference:8.1f} {row} {cold[model, orders] * 1e3:8.0f} ms")


if __name__ == "__main__":
    main()
