"""A long run: a million observations in constant memory, with beliefs that stay sound.

Run it:  python examples/soak.py            (make soak)
         python examples/soak.py --graph triple --observations 200000
The paper's graph, or `triple`, tracks the paper's process, one observation at a time, some of them missing and some
late. At every look: the memory of the process, the asymmetry and the smallest eigenvalue of what is kept of beliefs
about states and parameters (precisions; of a filter the covariance), and the free action. Half-way, the run is saved
and goes on from the file; for a while the one that never stopped goes on beside it, and both must be the same to the
last digit. Ends with exit code 1 if anything is not as it should be.
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
from pcnet.graphs import adaptive_filter, odem

DT = 0.01
BESIDE = 10_000  # observations for which a run that was resumed is compared with itself
SLACK = 16.0  # megabytes by which memory may rise after the first look: the allocator's, not ours


GRAPHS = {
    "paper": lambda: odem(orders=2, dt=DT),
    "triple": lambda: adaptive_filter(
        pc.systems.lotka_volterra, 3, DT, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25, model_error_time=1.0
    ),
}


def process(seed: int) -> Iterator[pc.Sample]:
    """The paper's Lotka–Volterra process without end; one in a hundred observations is late, one has a gap."""
    draw = np.random.default_rng(seed)
    interaction = np.array([[0.0, 0.2, -0.4], [-0.2, 0.0, 0.1], [0.4, -0.1, 0.0]])
    x, t = 5 * np.array([0.45, 0.22, 0.33]), 0.0
    while True:
        y = x + 0.1 * draw.normal(size=3)
        chance = draw.random()
        if chance < 0.01:
            y[draw.integers(3)] = math.nan
        yield pc.Sample(y, t)
        wait = DT * (3.0 if chance > 0.99 else 1.0)
        x = np.clip(x + wait * (x * (interaction @ x) + 0.05 * draw.normal(size=3)), 0, 5)
        t += wait


def megabytes() -> float:
    """What the process holds in memory now, or held at most where that is all that is known."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def look(live: pc.runner.Session) -> tuple[float, float, float]:
    """The greatest relative asymmetry and the smallest eigenvalue of what is kept of beliefs, and the free action."""
    asymmetry, smallest = 0.0, math.inf
    for name in ("x", "theta"):
        belief = live.local(name).belief
        kept = belief.precision[0] if hasattr(belief, "precision") else belief.carried.covariance[0]
        size = float(kept.abs().max())
        asymmetry = max(asymmetry, float((kept - kept.T).abs().max()) / size)
        smallest = min(smallest, float(torch.linalg.eigvalsh(kept)[0]) / size)
    return asymmetry, smallest, float(live.free_action)


def same(one: pc.runner.Session, other: pc.runner.Session) -> bool:
    """Whether all that changes during a run is the same in both, to the last digit."""
    (tensors, facts), (others, other_facts) = one.state(), other.state()
    return facts == other_facts and all(
        torch.equal(value.nan_to_num(math.pi), others[name].nan_to_num(math.pi)) for name, value in tensors.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observations", type=int, default=1_000_000)
    parser.add_argument("--look", type=int, default=50_000)
    parser.add_argument("--graph", choices=GRAPHS, default="paper")
    options = parser.parse_args()
    graph, schedule = GRAPHS[options.graph]()
    live = graph.start(schedule, record=())
    first, begun, bad = None, time.perf_counter(), []
    half, unstopped = options.observations // 2, None
    print(f"{'observations':>12} {'MB':>8} {'asymmetry':>10} {'smallest':>10} {'free action':>14} {'ms each':>8}")
    for k, sample in enumerate(process(0), 1):
        live.step(sample)
        if unstopped is not None:
            unstopped.step(sample)
            if k == min(half + BESIDE, options.observations):
                if not same(live, unstopped):
                    bad.append("the run that was resumed is not the same as the one that never stopped")
                print(f"resumed at {half}, {k - half} observations beside the run that never stopped")
                unstopped = None
        if k == half:
            with tempfile.TemporaryDirectory() as folder:
                live, unstopped = pc.resume(live.save(Path(folder) / "run"), graph, schedule), live
        if k % options.look == 0 or k == options.observations:
            memory, (asymmetry, smallest, action) = megabytes(), look(live)
            each = (time.perf_counter() - begun) / k * 1e3
            print(f"{k:12d} {memory:8.1f} {asymmetry:10.1e} {smallest:10.1e} {action:14.4g} {each:8.3f}", flush=True)
            first = memory if first is None else first
            if memory > first + SLACK:
                bad.append(f"memory rose from {first:.1f} to {memory:.1f} MB")
            if not asymmetry < 1e-10:
                bad.append(f"a precision is asymmetric by {asymmetry:.1e}")
            if not smallest > 0:
                bad.append("a precision is not positive definite")
            if not math.isfinite(action):
                bad.append("the free action is not finite")
        if bad or k == options.observations:
            break
    print(f"after {live.tick} observations: {bad[0]}" if bad else f"{live.tick} observations, sound to the end")
    return 1 if bad else 0


if __name__ == "__main__":
    code = main()
    if code:
        raise SystemExit(code)
