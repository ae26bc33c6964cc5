"""Time and memory of a tick as models grow, to 10,000 channels and to 100 states, beside an extended Kalman filter.

Run it:  python examples/benchmark_size.py

Channels: three Lotka–Volterra populations at three orders of motion, seen through many channels (two orders), by a
known linear map or by a torch function that bends. States: the Lorenz-96 ring, observed directly. States are tracked,
parameters and a precision for each channel are learned, by ODEM with a slow step every 64 observations, on one thread.
The rival is an extended Kalman filter in numpy with the parameters in its state, in information form, so that its cost
is linear in the channels as well; it learns no precisions and knows no free energy.

Each case runs in a process of its own. Memory is how much more that process holds at most than it did after a run of
the same kind and the smallest size; the filter's is what numpy allocates at most. The first tick includes tracing.
Times are the best of several passes. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
TICKS, DT = 64, 0.01  # one slow step in each pass


def peak_memory() -> float:
    """Megabytes that this process has held at most."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform != "darwin" else 1024) / 1024


def best_tick(run: Callable[[], object], passes: int) -> float:
    """Milliseconds a tick, the best of several passes over TICKS observations: the machine's noise only ever adds."""
    times = []
    for _ in range(passes):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times) / TICKS * 1e3


# --- the models -------------------------------------------------------------------------------------------------------
def lotka_volterra(x: Array, a: Array) -> tuple[Array, Array, Array]:
    """The flow, its slope in the state and its slope in the parameters."""
    matrix = np.array([[0, a[0], a[1]], [-a[0], 0, a[2]], [-a[1], -a[2], 0]])
    pull = matrix @ x
    by_parameter = np.array(
        [[x[0] * x[1], x[0] * x[2], 0], [-x[0] * x[1], 0, x[1] * x[2]], [0, -x[0] * x[2], -x[1] * x[2]]]
    )
    return x * pull, np.diag(pull) + x[:, None] * matrix, by_parameter


@functools.cache
def neighbour(n: int, step: int) -> Array:
    """The matrix that picks x_{i+step} on a ring of n."""
    return np.roll(np.eye(n), step, 1)


def lorenz96(x: Array, a: Array) -> tuple[Array, Array, Array]:
    n = len(x)
    before, difference = np.roll(x, 1), np.roll(x, -1) - np.roll(x, 2)
    slope = before[:, None] * (neighbour(n, 1) - neighbour(n, -2)) + difference[:, None] * neighbour(n, -1)
    return difference * before - x + a[0], slope - np.eye(n), np.ones((n, 1))


def kalman(observations: Array, flow: Any, sense: Any, state: Array, prior: Array, sd: float, noise: float) -> Array:
    """An extended Kalman filter over states and parameters in information form; the last mean."""
    n, p = len(state), len(prior)
    mean = np.concatenate([state, prior])
    covariance = np.diag([0.01] * n + [sd**2] * p)
    drift = np.diag([(DT * 0.05) ** 2] * n + [0.0] * p)
    for y in observations:
        change, slope, by_parameter = flow(mean[:n], mean[n:])
        step = np.eye(n + p)
        step[:n, :n] += DT * slope
        step[:n, n:] = DT * by_parameter
        mean[:n] += DT * change
        precision = np.linalg.inv(step @ covariance @ step.T + drift)
        predicted, sensitivity, information = sense(mean[:n])
        precision[:n, :n] += information / noise**2
        covariance = np.linalg.inv(precision)
        mean = mean + covariance[:, :n] @ (sensitivity.T @ (y - predicted)) / noise**2
    return mean


class Problem:
    """A process of one kind and size with its observations, and the prior of both who try to follow it."""

    def __init__(self, kind: str, size: int) -> None:
        ring = kind == "ring"
        draw = np.random.default_rng(0)
        self.kind = kind
        self.states, self.channels = (size, size) if ring else (3, size)
        self.start = 8 + draw.normal(size=size) if ring else 5 * np.array([0.45, 0.22, 0.33])
        self.flow = lorenz96 if ring else lotka_volterra
        self.prior, self.sd = (np.array([8.0]), 1.0) if ring else (np.array([0.3, -0.2, 0.3]), 0.25)
        self.weights = np.eye(size) if ring else draw.normal(size=(size, 3)) / np.sqrt(3)
        self.information = self.weights.T @ self.weights
        x, seen = self.start, []
        for _ in range(TICKS):
            seen.append(self.observe(x)[0] + 0.1 * draw.normal(size=self.channels))
            x = x + DT * self.flow(x, self.prior)[0]
        self.observations = np.array(seen)

    def observe(self, x: Array) -> tuple[Array, Array, Array]:
        """What there is to be seen, its slope H and HᵀH, which is made once where it stays the same."""
        if self.kind != "bent":
            return self.weights @ x, self.weights, self.information
        value = np.tanh(self.weights @ x)
        slope = self.weights * (1 - value**2)[:, None]
        return value, slope, slope.T @ slope

    def filter(self) -> Array:
        return kalman(self.observations, self.flow, self.observe, self.start, self.prior, self.sd, 0.1)

    def track(self) -> Any:
        """A run of ours that has taken in its first observation."""
        import torch

        import pcnet as pc

        weights = torch.tensor(self.weights)
        mappings = {"ring": None, "linear": pc.systems.linear(weights), "bent": lambda x, _: torch.tanh(x @ weights.T)}
        flow = pc.systems.lorenz96 if self.kind == "ring" else pc.systems.lotka_volterra
        initial = np.stack([self.start, self.flow(self.start, self.prior)[0], 0 * self.start])
        x = pc.GeneralisedStateNode("x", dim=self.states, orders=3, flow=flow, initial_mean=initial)
        y = pc.SensoryNode("y", dim=self.channels, orders=2, dt=DT)
        graph = pc.Graph()
        graph.predicts(x, y, via=mappings[self.kind])
        graph.parametrises(pc.ParameterNode("a", mean=self.prior, sd=self.sd), x)
        graph.weighs(pc.PrecisionNode("noise_x", prior_precision=500, sd=0.1, correlation_time=0.005), x)
        graph.weighs(pc.PrecisionNode("noise_y", prior_precision=100, sd=0.1, correlation_time=0.005), y)
        return graph.start(pc.odem(every=TICKS), record=pc.Record(("mean",), nodes=("x",))).step(self.observations[0])


def case(kind: str, size: int, passes: int) -> dict[str, float]:
    """One line of a table: milliseconds a tick and megabytes, ours and the filter's."""
    import torch

    torch.set_num_threads(1)
    small, problem = Problem(kind, 3), Problem(kind, size)
    small.track().run(small.observations)
    before, begun = peak_memory(), time.perf_counter()
    live = problem.track()
    found = {"first": time.perf_counter() - begun}
    found["ours"] = best_tick(lambda: live.run(problem.observations), passes)
    found["memory"] = peak_memory() - before
    found["filter"] = best_tick(problem.filter, passes)
    tracemalloc.start()
    problem.filter()
    found["filter_memory"] = tracemalloc.get_traced_memory()[1] / 2**20
    return found


# --- the tables -------------------------------------------------------------------------------------------------------
TITLES = {
    "linear": "channels of a known linear map; 3 states",
    "bent": "channels of a torch function, tanh(Wx); 3 states",
    "ring": "states of Lorenz-96, each observed",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, nargs="*", default=[10, 100, 1000, 10000])
    parser.add_argument("--states", type=int, nargs="*", default=[3, 10, 30, 100])
    parser.add_argument("--passes", type=int, default=5, help="how often each case is timed; the best counts")
    parser.add_argument("--case", nargs=2, metavar=("KIND", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case[0], int(options.case[1]), options.passes)))
        return
    print("milliseconds a tick, in brackets how many steps of the Kalman filter that is; megabytes at most")
    for kind, title in TITLES.items():
        print(f"\n{title:<52} {'pcnet':>17} {'Kalman':>8} {'pcnet':>9} {'Kalman':>8} {'first tick':>11}")
        for size in options.states if kind == "ring" else options.channels:
            command = [sys.executable, __file__, "--passes", str(options.passes), "--case", kind, str(size)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            cost = json.loads(done.stdout)
            print(
                f"{size:>52,} {cost['ours']:8.2f} ({cost['ours'] / cost['filter']:6.2f}) {cost['filter']:8.3f} "
                f"{cost['memory']:6.1f} MB {cost['filter_memory']:5.1f} MB {cost['first'] * 1e3:8.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
