"""How long a live step takes, with and without recording, and what it adds to the bare tick.

Run it:  python examples/benchmark_live.py            (make bench)
The bare tick is all that the schedule asks of the nodes, with the free energy; what a step adds is reading the
observation, clocks, sums, the watch for divergence, and recording. The paper's graph, one inversion, one thread.
Runs take turns, so that a busy machine slows all of them alike. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from pcnet.engine.session import Session
from pcnet.graphs import odem

TURNS = 20
RECORDS = {"nothing recorded": (), "as by default": None}


class Timed(Session):
    """A run that notes the seconds of each step, and of the bare tick within it."""

    whole: list[float]
    bare: list[float]

    def act(self) -> None:
        begun = time.perf_counter()
        super().act()
        self.bare.append(time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observations", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    observations = 1.5 + 0.1 * draw.normal(size=(options.observations, 3))
    runs = {
        f"{orders} orders, {label}": Timed(*odem(orders=orders), record=record)
        for label, record in RECORDS.items()
        for orders in (2, 3)
    }
    for turn, part in enumerate(np.array_split(observations, TURNS)):
        for run in runs.values():
            if turn < 2:  # what is traced and laid out once does not count
                run.whole, run.bare = [], []
            for y in part:
                begun = time.perf_counter()
                run.step(y)
                run.whole.append(time.perf_counter() - begun)
    print(f"{'live.step, µs':<28} {'median':>8} {'99th percentile':>16} {'bare tick':>10} {'overhead':>9}")
    for label, run in runs.items():
        middle, slow, inner = 1e6 * np.median(run.whole), 1e6 * np.quantile(run.whole, 0.99), 1e6 * np.median(run.bare)
        print(f"{label:<28} {middle:8.0f} {slow:16.0f} {inner:10.0f} {middle / inner - 1:9.1%}")


if __name__ == "__main__":
    main()
