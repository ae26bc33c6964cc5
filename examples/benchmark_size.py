"""Time and memory of a tick for up to 10,000 channels and 100 states, compared with an extended Kalman filter.

Run:  python examples/benchmark_size.py            (make bench)
Channels: three Lotka–Volterra populations at three orders of motion, observed in many channels (two orders) through a
linear mapping or a nonlinear torch function. States: the Lorenz-96 ring, observed directly. ODEM tracks states and
learns parameters and a precision for each channel, with a slow step every 64 observations, on one thread. The adaptive
filter of the same ring is one hypothesis of it, by sigma points, with one level for each of its noises. The reference
is an extended Kalman filter in numpy with the parameters in its state, in information form, so that its cost is linear
in the channels too. It has no precisions and no free energy.

Each case runs in its own process. Memory is the peak of that process minus its peak after a run of the smallest size;
for the filter it is the peak of numpy's allocations. The first tick includes tracing. Times are processor times, the
minimum of several passes.
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
    """Peak memory of this process in megabytes."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform != "darwin" else 1024) / 1024


def best_tick(run: Callable[[], object], passes: int) -> float:
    """Milliseconds per tick: the minimum of several passes over TICKS observations; other load only adds time."""
    times = []
    for _ in range(passes):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times) / TICKS * 1e3


# --- the models -------------------------------------------------------------------------------------------------------
def lotka_volterra(x: Array, a: Array) -> tuple[Array, Array, Array]:
    """The flow and its Jacobians with respect to state and parameters."""
    matrix = np.array([[0, a[0], a[1]], [-a[0], 0, a[2]], [-a[1], -a[2], 0]])
    growth = matrix @ x
    jacobian_theta = np.array(
        [[x[0] * x[1], x[0] * x[2], 0], [-x[0] * x[1], 0, x[1] * x[2]], [0, -x[0] * x[2], -x[1] * x[2]]]
    )
    return x * growth, np.diag(growth) + x[:, None] * matrix, jacobian_theta


@functools.cache
def neighbour(n: int, step: int) -> Array:
    """The matrix that picks x_{i+step} on a ring of n."""
    return np.roll(np.eye(n), step, 1)


def lorenz96(x: Array, a: Array) -> tuple[Array, Array, Array]:
    n = len(x)
    before, difference = np.roll(x, 1), np.roll(x, -1) - np.roll(x, 2)
    jacobian = before[:, None] * (neighbour(n, 1) - neighbour(n, -2)) + difference[:, None] * neighbour(n, -1)
    return difference * before - x + a[0], jacobian - np.eye(n), np.ones((n, 1))


def kalman(observations: Array, flow: Any, observe: Any, state: Array, prior: Array, sd: float, noise: float) -> Array:
    """Extended Kalman filter of states and parameters in information form; returns the last mean."""
    n, p = len(state), len(prior)
    mean = np.concatenate([state, prior])
    covariance = np.diag([0.01] * n + [sd**2] * p)
    Q = np.diag([(DT * 0.05) ** 2] * n + [0.0] * p)
    for y in observations:
        velocity, jacobian, jacobian_theta = flow(mean[:n], mean[n:])
        F = np.eye(n + p)
        F[:n, :n] += DT * jacobian
        F[:n, n:] = DT * jacobian_theta
        mean[:n] += DT * velocity
        precision = np.linalg.inv(F @ covariance @ F.T + Q)
        predicted, H, information = observe(mean[:n])
        precision[:n, :n] += information / noise**2
        covariance = np.linalg.inv(precision)
        mean = mean + covariance[:, :n] @ (H.T @ (y - predicted)) / noise**2
    return mean


def adaptive(states: int) -> Any:
    """The adaptive filter of the ring with its parameter, as one hypothesis."""
    import pcnet as pc
    from pcnet.graphs import adaptive_filter

    noise = {"process_noise_sd": 0.05, "observation_noise_sd": 0.1, "noise_per_channel": False}
    prior = {"parameter_mean": [8.0], "parameter_sd": 1.0}
    return adaptive_filter(pc.systems.lorenz96, states, DT, **prior, **noise, hypotheses=None)


class Problem:
    """A process of one kind and size with its observations, and the prior of both methods."""

    def __init__(self, kind: str, size: int) -> None:
        ring = kind in ("ring", "adaptive")
        rng = np.random.default_rng(0)
        self.kind = kind
        self.states, self.channels = (size, size) if ring else (3, size)
        self.start = 8 + rng.normal(size=size) if ring else 5 * np.array([0.45, 0.22, 0.33])
        self.flow = lorenz96 if ring else lotka_volterra
        self.prior, self.sd = (np.array([8.0]), 1.0) if ring else (np.array([0.3, -0.2, 0.3]), 0.25)
        self.weights = np.eye(size) if ring else rng.normal(size=(size, 3)) / np.sqrt(3)
        self.information = self.weights.T @ self.weights
        x, observations = self.start, []
        for _ in range(TICKS):
            observations.append(self.observe(x)[0] + 0.1 * rng.normal(size=self.channels))
            x = x + DT * self.flow(x, self.prior)[0]
        self.observations = np.array(observations)

    def observe(self, x: Array) -> tuple[Array, Array, Array]:
        """Noise-free observation, its Jacobian H, and HᵀH."""
        if self.kind != "nonlinear":
            return self.weights @ x, self.weights, self.information
        value = np.tanh(self.weights @ x)
        H = self.weights * (1 - value**2)[:, None]
        return value, H, H.T @ H

    def filter(self) -> Array:
        return kalman(self.observations, self.flow, self.observe, self.start, self.prior, self.sd, 0.1)

    def track(self) -> Any:
        """A pcnet session after its first observation."""
        import torch

        import pcnet as pc

        if self.kind == "adaptive":
            model = adaptive(self.states)
            return model.start(record=pc.Record(("mean",), nodes=("x",))).step(self.observations[0])
        weights = torch.tensor(self.weights)
        mappings = {
            "ring": None,
            "linear": pc.systems.linear(weights),
            "nonlinear": lambda x, _: torch.tanh(x @ weights.T),
        }
        flow = pc.systems.lorenz96 if self.kind == "ring" else pc.systems.lotka_volterra
        initial = np.stack([self.start, self.flow(self.start, self.prior)[0], 0 * self.start])
        x = pc.GeneralisedStateNode("x", dim=self.states, orders=3, flow=flow, initial_mean=initial)
        y = pc.SensoryNode("y", dim=self.channels, orders=2, dt=DT)
        graph = pc.Graph()
        graph.predicts(x, y, via=mappings[self.kind])
        graph.parametrises(pc.ParameterNode("a", mean=self.prior, sd=self.sd), x)
        graph.weighs(pc.PrecisionNode("noise_x", prior_precision=500, sd=0.1, correlation_time=0.005), x)
        graph.weighs(pc.PrecisionNode("noise_y", prior_precision=100, sd=0.1, correlation_time=0.005), y)
        session = pc.Model(graph, pc.odem(every=TICKS)).start(record=pc.Record(("mean",), nodes=("x",)))
        return session.step(self.observations[0])


def case(kind: str, size: int, passes: int) -> dict[str, Any]:
    """One row of a table: milliseconds per tick and megabytes, of pcnet and of the filter."""
    import torch

    torch.set_num_threads(1)
    small, problem = Problem(kind, 3), Problem(kind, size)
    small.track().run(small.observations)
    before, started = peak_memory(), time.process_time()
    session = problem.track()
    found: dict[str, Any] = {"first": time.process_time() - started}
    found["pcnet"] = best_tick(lambda: session.run(problem.observations), passes)
    found["memory"], found["engine"] = peak_memory() - before, session.acting_engine
    found["filter"] = best_tick(problem.filter, passes)
    tracemalloc.start()
    problem.filter()
    found["filter_memory"] = tracemalloc.get_traced_memory()[1] / 2**20
    return found


# --- the tables -------------------------------------------------------------------------------------------------------
TITLES = {
    "linear": "channels of a linear mapping; 3 states",
    "nonlinear": "channels of a nonlinear mapping, tanh(Wx); 3 states",
    "ring": "states of Lorenz-96, each observed",
    "adaptive": "states of Lorenz-96, each observed; adaptive filter",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, nargs="*", default=[10, 100, 1000, 10000])
    parser.add_argument("--states", type=int, nargs="*", default=[3, 10, 30, 100])
    parser.add_argument("--filtered", type=int, nargs="*", default=[3, 10, 20, 40])
    parser.add_argument("--passes", type=int, default=5, help="number of timings of each case; the minimum is shown")
    parser.add_argument("--case", nargs=2, metavar=("KIND", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case[0], int(options.case[1]), options.passes)))
        return
    print("milliseconds per tick, in brackets: relative to a step of the Kalman filter; peak megabytes")
    for kind, title in TITLES.items():
        print(f"\n{title:<52} {'pcnet':>17} {'Kalman':>8} {'pcnet':>9} {'Kalman':>8} {'first tick':>11}")
        for size in {"ring": options.states, "adaptive": options.filtered}.get(kind, options.channels):
            command = [sys.executable, __file__, "--passes", str(options.passes), "--case", kind, str(size)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            cost = json.loads(done.stdout)
            print(
                f"{size:>52,} {cost['pcnet']:8.2f} ({cost['pcnet'] / cost['filter']:6.2f}) {cost['filter']:8.3f} "
                f"{cost['memory']:6.1f} MB {cost['filter_memory']:5.1f} MB {cost['first'] * 1e3:8.0f} ms  "
                f"{cost['engine']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
