"""Soak test: a million observations in constant memory, with valid covariances throughout.

Run:  python examples/soak.py            (make soak)
      python examples/soak.py --model adaptive_filter --observations 200000
The paper's model, or `adaptive_filter`, tracks the paper's process one observation at a time. Some observations are
missing and some are late. Every `--check` observations the script prints the memory of the process, the asymmetry and
the smallest eigenvalue of the precision (for a Kalman state: the covariance) of states and parameters, and the free
action. Half-way the session is saved and resumed. For a while the original session continues in parallel, and both must
be identical to the last digit. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import pcnet as pc
from pcnet.engine.session import Session
from pcnet.graphs import adaptive_filter, odem
from pcnet.nodes.kalman_state import KalmanState

DT = 0.01
PARALLEL = 10_000  # observations for which the resumed session is compared with the original
SLACK = 16.0  # megabytes by which memory may rise after the first check, for the allocator


MODELS = {
    "paper": lambda: odem(orders=2, dt=DT),
    "adaptive_filter": lambda: adaptive_filter(
        pc.systems.lotka_volterra, 3, DT, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25, model_error_time=1.0
    ),
}


def process(seed: int) -> Iterator[pc.Sample]:
    """Endless Lotka–Volterra process of the paper; 1 % of observations are late, and 1 % have a missing channel."""
    rng = np.random.default_rng(seed)
    interaction = np.array([[0.0, 0.2, -0.4], [-0.2, 0.0, 0.1], [0.4, -0.1, 0.0]])
    x, t = 5 * np.array([0.45, 0.22, 0.33]), 0.0
    while True:
        y = x + 0.1 * rng.normal(size=3)
        chance = rng.random()
        if chance < 0.01:
            y[rng.integers(3)] = math.nan
        yield pc.Sample(y, t)
        step = DT * (3.0 if chance > 0.99 else 1.0)
        x = np.clip(x + step * (x * (interaction @ x) + 0.05 * rng.normal(size=3)), 0, 5)
        t += step


def megabytes() -> float:
    """Resident memory of the process in megabytes; its peak where only that is available."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def check(session: Session) -> tuple[float, float, float]:
    """Largest relative asymmetry and smallest relative eigenvalue of the stored matrices, and the free action."""
    asymmetry, smallest = 0.0, math.inf
    for name in ("x", "theta"):
        state = session.state.nodes[name]
        matrix = state.belief.covariance[0] if isinstance(state, KalmanState) else state.precision[0]
        size = float(matrix.abs().max())
        asymmetry = max(asymmetry, float((matrix - matrix.T).abs().max()) / size)
        smallest = min(smallest, float(torch.linalg.eigvalsh(matrix)[0]) / size)
    return asymmetry, smallest, float(session.free_action)


def identical(one: Session, other: Session) -> bool:
    """Whether the states of both sessions are identical to the last digit."""
    tensors, others = one.state.tensors(), other.state.tensors()
    return one.tick == other.tick and all(
        torch.equal(value.nan_to_num(math.pi), others[name].nan_to_num(math.pi)) for name, value in tensors.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observations", type=int, default=1_000_000)
    parser.add_argument("--check", type=int, default=50_000, help="observations between two checks")
    parser.add_argument("--model", choices=MODELS, default="paper")
    options = parser.parse_args()
    model = MODELS[options.model]()
    session = model.start(record=())
    first, started, failures = None, time.perf_counter(), []
    half, original = options.observations // 2, None
    print(f"{'observations':>12} {'MB':>8} {'asymmetry':>10} {'smallest':>10} {'free action':>14} {'ms/step':>8}")
    for k, sample in enumerate(process(0), 1):
        session.step(sample)
        if original is not None:
            original.step(sample)
            if k == min(half + PARALLEL, options.observations):
                if not identical(session, original):
                    failures.append("the resumed session differs from the original")
                print(f"resumed at {half}, compared with the original session for {k - half} observations")
                original = None
        if k == half:
            with tempfile.TemporaryDirectory() as folder:
                session, original = pc.resume(session.save(Path(folder) / "run"), model), session
        if k % options.check == 0 or k == options.observations:
            memory, (asymmetry, smallest, action) = megabytes(), check(session)
            duration = (time.perf_counter() - started) / k * 1e3
            print(
                f"{k:12d} {memory:8.1f} {asymmetry:10.1e} {smallest:10.1e} {action:14.4g} {duration:8.3f}", flush=True
            )
            first = memory if first is None else first
            if memory > first + SLACK:
                failures.append(f"memory rose from {first:.1f} to {memory:.1f} MB")
            if not asymmetry < 1e-10:
                failures.append(f"a matrix is asymmetric by {asymmetry:.1e}")
            if not smallest > 0:
                failures.append("a matrix is not positive definite")
            if not math.isfinite(action):
                failures.append("the free action is not finite")
        if failures or k == options.observations:
            break
    print(f"{session.tick} observations: {failures[0] if failures else 'all checks passed'}")
    return 1 if failures else 0


if __name__ == "__main__":
    code = main()
    if code:
        raise SystemExit(code)
