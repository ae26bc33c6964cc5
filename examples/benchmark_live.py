"""Time of `session.step` with and without recording, and its overhead over the bare tick.

Run:  python examples/benchmark_live.py            (make bench)
The bare tick is the actions of the nodes and the free energy. A step adds reading the observation, clocks, sums,
divergence checks and recording. The paper's model, one inversion, one thread. Runs alternate, so that other load
affects all of them alike.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from pcnet.engine.session import Session
from pcnet.engine.state import GraphState
from pcnet.engine.tick import Inputs, Outputs
from pcnet.graphs import odem

TURNS = 20
RECORDS = {"no recording": (), "default recording": None}


class Timed(Session):
    """A session that records the seconds of each step and of the bare tick in it."""

    whole: list[float]
    bare: list[float]

    def _tick(self, state: GraphState, inputs: Inputs) -> tuple[GraphState, Outputs]:
        started = time.perf_counter()
        result = super()._tick(state, inputs)
        self.bare.append(time.perf_counter() - started)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--observations", type=int, default=4000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    observations = 1.5 + 0.1 * rng.normal(size=(options.observations, 3))
    runs = {
        f"{orders} orders, {label}": Timed(odem(orders=orders), record=record)
        for label, record in RECORDS.items()
        for orders in (2, 3)
    }
    for turn, part in enumerate(np.array_split(observations, TURNS)):
        for run in runs.values():
            if turn < 2:  # excludes tracing and initialisation
                run.whole, run.bare = [], []
            for y in part:
                started = time.perf_counter()
                run.step(y)
                run.whole.append(time.perf_counter() - started)
    print(f"{'session.step, µs':<28} {'median':>8} {'99th percentile':>16} {'bare tick':>10} {'overhead':>9}")
    for label, run in runs.items():
        middle, slow, inner = 1e6 * np.median(run.whole), 1e6 * np.quantile(run.whole, 0.99), 1e6 * np.median(run.bare)
        print(f"{label:<28} {middle:8.0f} {slow:16.0f} {inner:10.0f} {middle / inner - 1:9.1%}")


if __name__ == "__main__":
    main()
