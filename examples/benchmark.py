"""Microseconds per observation of both engines, beside extended Kalman filters in the same run.

Run:  python examples/benchmark.py            (make bench)
One thread, processor time. The reference is an extended Kalman filter in numpy with the parameters in its state: it
tracks states and learns parameters, but is told the noise and has no free energy. The filters of other packages are
timed if these are installed; see `rivals.py`. Each number is the minimum of several passes, because other load only
adds time.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rivals import RIVALS, SAMPLES, STEPS, TITLES, Array, Timed, process, start

import pcnet as pc
from pcnet.graphs import Level, adaptive_filter, hierarchy, odem

FEW, BATCH = 60, 756
FIRST, SETTLED = 200, 2000
"""Observations of a bank's beginning, and after which few of its hypotheses are left."""
AHEAD = 200  # steps of a forecast
NEW = ("odem glv, 3 orders", "adaptive filter", "one hypothesis, white noise")  # models that are run in a new process


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


def tracking(**options: Any) -> pc.Model:
    """An adaptive filter: states, three parameters and the noise of each channel, all learned; one hypothesis."""
    known = {"process_noise_sd": 0.01, "observation_noise_sd": 0.1, "hypotheses": None}
    prior = {"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25}
    return adaptive_filter(pc.systems.lotka_volterra, 3, 0.01, **(prior | known | options))


def two_levels() -> pc.Model:
    """A slow state above the parameters of the adaptive filter."""
    above = Level(pc.systems.linear(-0.1 * np.eye(3)), 3, process_noise_sd=0.14)
    below = Level(
        pc.systems.lotka_volterra, 3, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=[0.25] * 3, process_noise_sd=0.1
    )
    return hierarchy(below, above, dt=0.01, every=16)


def ten_species() -> pc.Model:
    """Generalised Lotka–Volterra with ten species, two orders, no parameters to learn."""
    rng = np.random.default_rng(1)
    matrix = torch.as_tensor(0.1 * rng.normal(size=(10, 10)))
    matrix = matrix - matrix.mT

    def flow(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x * (x @ matrix.mT)

    x = pc.GeneralisedStateNode("x", dim=10, orders=3, flow=flow)
    y = pc.SensoryNode("y", dim=10, orders=2, dt=0.01)
    graph = pc.Graph()
    graph.predicts(x, y)
    for node in (x, y):
        graph.weighs(
            pc.PrecisionNode(f"noise {node.name}", prior_precision=500.0, sd=0.1, correlation_time=0.005), node
        )
    return pc.Model(graph, pc.odem(every=64))


MODELS: dict[str, Callable[[], pc.Model]] = {
    "odem glv, 2 orders": lambda: odem(model="glv", orders=2),
    "odem glv, 3 orders": lambda: odem(model="glv", orders=3),
    "odem lorenz, 2 orders": lambda: odem(model="lorenz", orders=2),
    "odem lorenz, 3 orders": lambda: odem(model="lorenz", orders=3),
    "adaptive filter": lambda: tracking(hypotheses=pc.Hypotheses()),
    "one hypothesis, white noise": tracking,
    "one hypothesis, smooth noise": lambda: tracking(correlation_time=0.07),
    "two levels": two_levels,
    "glv of 10 species, 3 orders": ten_species,
}
BATCHES: dict[str, Callable[[], pc.Model]] = {
    "odem glv, 2 orders": lambda: odem(model="glv", orders=2, **settings(BATCH)),
    "odem glv, 3 orders": lambda: odem(model="glv", orders=3, **settings(BATCH)),
    "one hypothesis, white noise": lambda: tracking(observation_noise_sd=torch.logspace(0.5, -1, BATCH)[:, None]),
}


def best(timed: dict[str, tuple[Callable[[], object], int]], passes: int) -> dict[str, float]:
    """The smallest time of each, in µs; the table as a whole is repeated, so that other load affects all alike."""
    found = dict.fromkeys(timed, float("inf"))
    for _ in range(passes):
        for name, (run, work) in timed.items():
            clock = time.perf_counter if name.startswith("pyhgf") else time.process_time  # a process of its own
            started = clock()
            run()
            found[name] = min(found[name], (clock() - started) / work * 1e6)
    return found


def observed(model: pc.Model, samples: int) -> Array:
    """Observations with as many channels as the model has, and with smooth noise if it expects that."""
    channels = model.graph["y"].observation_size
    series = process(samples)
    noise = model.graph.nodes.get("noise_y")
    if isinstance(noise, pc.PrecisionNode) and isinstance(noise.noise_kernel, pc.kernels.SquaredExponential):
        series = pc.simulate.glv_process(samples, noise="smooth", seed=0).observations.numpy()
    return np.concatenate([series] * -(-channels // 3), 1)[:, :channels]


def stepped(model: pc.Model, record: Any, passes: int) -> Callable[[], object]:
    """Single steps of a session that has started; each pass goes on with the series."""
    before = 2 if model.hypotheses is None else 2500  # until few hypotheses are left
    session, series = model.start(engine="compiled", record=record), observed(model, before + passes * STEPS)
    session.run(series[:before])
    ahead = iter(series[before:])

    def run() -> None:
        for y in islice(ahead, STEPS):
            session.step(y)

    return run


def forecasting(model: pc.Model, series: Array) -> Callable[[], object]:
    """Forecasts of a session."""
    session = model.start(engine="compiled", record=()).run(series)
    return partial(session.forecast, AHEAD * session.interval)


FIRST_RESULT = """
import sys
import time
import torch
sys.path.insert(0, sys.argv[1])
started = time.process_time()
from benchmark import MODELS, observed
model = MODELS[sys.argv[2]]()
model.run(observed(model, 300), progress=False)
print(time.process_time() - started)
"""
"""Prints the processor time to the first result of a model, after torch was imported."""


def first_results(name: str) -> list[float]:
    """Seconds to the first result of a new process, without and with compiled code in the cache.

    Python keeps the bytecode of pcnet, as in an installed package.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", FIRST_RESULT, str(Path(__file__).parent), name]
        environment = {**os.environ, "PCNET_CACHE": folder, "PYTHONDONTWRITEBYTECODE": ""}
        runs = [subprocess.run(command, env=environment, check=True, capture_output=True, text=True) for _ in range(2)]
    return [float(run.stdout.split()[-1]) for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=6, help="number of timings; the minimum is shown")
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="rows of the table; all unless given")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="observations of a compiled run")
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), help="filters of other packages; all unless given")
    parser.add_argument("--pyhgf", metavar="PYTHON", help="the interpreter of an environment that has pyhgf")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, 1 thread, {platform.processor() or 'cpu'}")
    started = {
        name: start(name, options.pyhgf if name.startswith("pyhgf") else None)
        for name in dict.fromkeys(["numpy", *options.rivals])
    }
    timed: dict[str, tuple[Callable[[], object], int]] = {
        name: (each.run, each.samples) for name, each in started.items() if isinstance(each, Timed)
    }
    engines: dict[str, str] = {}
    for name in options.models:
        model = MODELS[name]()
        series = observed(model, options.samples)
        found = model.run(series, progress=False)  # compiles
        engines[name] = f"{found.engine}, {found.eager_ticks} eager"
        timed[f"{name}/run"] = partial(model.run, series, progress=False), options.samples
        timed[f"{name}/step"] = stepped(model, (), options.passes), STEPS
        timed[f"{name}/recorded step"] = stepped(model, None, options.passes), STEPS
        timed[f"{name}/forecast"] = forecasting(model, series[:FEW]), AHEAD
        if model.hypotheses is not None:
            for count in (FIRST, SETTLED):
                timed[f"{name}/{count}"] = partial(model.run, series[:count], progress=False), count
        few = series[:FEW]
        timed[f"{name}/eager"] = partial(model.run, few, engine="eager", progress=False), FEW
        if name in BATCHES:
            many = BATCHES[name]()
            many.run(series[:150], progress=False, record=("mean", "energy"))
            run = partial(many.run, series[:300], progress=False, record=("mean", "energy"))
            timed[f"{name}/batch"] = run, 300 * BATCH
    costs = best(timed, options.passes)
    reference = costs["numpy"]
    print(
        "µs per observation; in brackets: relative to a step of an extended Kalman filter in numpy, which is told the"
    )
    print(f"noise. batch: per observation and element of {BATCH}. All of pcnet with its usual recording.\n")
    for name, each in started.items():
        shown = f"{costs[name]:8.2f} ({costs[name] / reference:5.2f})" if isinstance(each, Timed) else f"    {each}"
        print(f"{TITLES[name]:<58} {shown}")
    columns = ("run", "step", "recorded step", "batch", "forecast", "eager")
    print(f"\n{'':<30} " + " ".join(f"{column:>16}" for column in columns))
    for name in options.models:
        cells = []
        for column in columns:
            cost = costs.get(f"{name}/{column}")
            cells.append(f"{'':>16}" if cost is None else f"{cost:8.2f} ({cost / reference:5.2f})")
        print(f"{name:<30} " + " ".join(cells) + f"  {engines[name]}")
    print("\nseconds to the first result of a new process, after importing torch: cold, and with a cache")
    for name in (name for name in NEW if name in options.models):
        cold, cached = first_results(name)
        print(f"{name:<30} {cold:8.2f} {cached:8.2f}")
    for name in options.models:
        if f"{name}/{FIRST}" in costs:
            first, settled, whole = costs[f"{name}/{FIRST}"], costs[f"{name}/{SETTLED}"], costs[f"{name}/run"]
            steady = (whole * options.samples - settled * SETTLED) / max(1, options.samples - SETTLED)
            print(
                f"\n{name}: {first:.1f} ({first / reference:.2f}) in the first {FIRST} observations, {steady:.2f} "
                f"({steady / reference:.2f}) after {SETTLED}"
            )


if __name__ == "__main__":
    main()
