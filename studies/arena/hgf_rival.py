"""The hierarchical Gaussian filter of pyhgf, in an environment of its own: it needs an older jax than cuthbert."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import weakref
from pathlib import Path

import numpy as np

from studies.arena.beliefs import Beliefs, Filter
from studies.arena.model import Information, Record
from studies.arena.tasks import Task

PYTHON = Path(os.environ.get("PYHGF", ".venv-hgf/bin/python"))
"""A Python that has pyhgf; `make arena` sets it up."""
SCRIPT = """
import json, sys, time
import numpy as np
from pyhgf.model import Network

def run(returns, level, tonic):
    network = (
        Network()
        .add_nodes(precision=1e4)
        .add_nodes(value_children=0, mean=0.0, precision=1.0, tonic_volatility=level)
        .add_nodes(volatility_children=1, mean=0.0, precision=1.0, tonic_volatility=tonic)
    )
    return network.input_data(input_data=np.cumsum(returns)).to_pandas()

def density(returns, level, tonic):
    found = run(returns, level, tonic)
    mean, precision = found["x_1_expected_mean"].to_numpy(float), found["x_1_expected_precision"].to_numpy(float)
    value = 0.5 * (np.log(precision) - precision * (np.cumsum(returns) - mean) ** 2).sum()
    return value if np.isfinite(value) else -np.inf

for line in sys.stdin:
    returns = np.array(json.loads(line))
    started = time.process_time()
    third = returns[: len(returns) // 3]
    level = float(np.log(third.var()))
    tonic = max((-2.0, -3.0, -4.0, -5.0, -6.0), key=lambda each: density(third, level, each))
    found = run(returns, level, tonic)
    mean, precision = found["x_2_mean"].to_numpy(float) + level, found["x_2_precision"].to_numpy(float)
    answer = {"mean": mean.tolist(), "precision": precision.tolist(), "seconds": time.process_time() - started}
    print(json.dumps(answer), flush=True)
"""


def missing() -> str | None:
    """Why it cannot run here, or None."""
    return None if PYTHON.exists() else "pyhgf has no environment: make arena sets up .venv-hgf"


@functools.cache
def version() -> str:
    """Its version, or that it is not installed."""
    if missing():
        return "(not installed)"
    code = "import importlib.metadata as m; print(m.version('pyhgf'))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def build(task: Task, _: Information) -> Filter:
    """Three levels: the price is the sum of returns, a random walk whose log-volatility walks as well.

    The mean of the log-volatility is that of the first third of the record, and its rate is the one of five that
    predicts this third best. The other settings are those of its tutorials; it has no mean reversion.
    """
    assert task.family == "volatility"
    process = subprocess.Popen(
        [PYTHON, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    given, answers = process.stdin, process.stdout
    weakref.finalize(given, process.kill)

    def apply(record: Record) -> Beliefs:
        print(json.dumps(record.observations[:, 0].tolist()), file=given, flush=True)
        answer = answers.readline()
        if not answer:
            raise RuntimeError("pyhgf stopped")
        found = json.loads(answer)
        mean, sd = np.array(found["mean"])[:, None], np.array(found["precision"])[:, None] ** -0.5
        nothing = np.zeros(0)
        return Beliefs(mean, sd, nothing, nothing, np.nan, further_seconds=found["seconds"])

    return apply
