"""How long a live step takes, with and without recording, and what it adds to the bare tick.

Run it:  python examples/benchmark_live.py            (make bench)
The bare tick is all that the schedule asks of the nodes, with the free energy; what a step adds is reading the
observation, clocks, sums, the watch for divergence, and recording. The paper's graph, one inversion, one thread.
Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from pcnet.graphs import paper
from pcnet.runner import Live


def steps(live: Live, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each step, and of the bare tick within it."""
    bare: list[float] = []
    act = live._act

    def timed() -> None:
        begun = time.perf_counter()
        act()
        bare.append(time.perf_counter() - begun)

    live._act = timed  # type: ignore[method-assign]
    whole = []
    for y in observations:
        begun = time.perf_counter()
        live.step(y)
        whole.append(time.perf_counter() - begun)
    warm = len(observations) // 10  # what is traced and laid out once does not count
    return np.array(whole)[warm:], np.array(bare)[warm:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observations", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    observations = 1.5 + 0.1 * draw.normal(size=(options.observations, 3))
    print(f"{'live.step, µs':<28} {'median':>8} {'99th percentile':>16} {'bare tick':>10} {'overhead':>9}")
    for label, record in (("nothing recorded", ()), ("as by default", None)):
        for orders in (2, 3):
            graph, schedule = paper.odem(orders=orders)
            whole, bare = steps(graph.start(schedule, record=record), observations)
            typical = float(np.median(whole) / np.median(bare) - 1)
            middle, slow, inner = (
                1e6 * float(v) for v in (np.median(whole), np.quantile(whole, 0.99), np.median(bare))
            )
            print(f"{f'{orders} orders, {label}':<28} {middle:8.0f} {slow:16.0f} {inner:10.0f} {typical:9.1%}")


if __name__ == "__main__":
    main()
