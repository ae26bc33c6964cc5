"""Cells of the arena: one method on one task with one kind of information, over all seeds; each is kept in a file."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import pcnet
from pcnet.files import atomic_write
from studies.arena import hgf_rival, likelihood
from studies.arena.beliefs import AHEAD, Beliefs, Forecasts, origins
from studies.arena.methods import METHODS, use_one_thread
from studies.arena.model import Information, record_of
from studies.arena.tasks import TASKS, Task
from studies.systems.design import Realisation
from studies.systems.trials import SDS

Array = NDArray[Any]
FORECASTS = 8  # seeds whose states are forecast
FEWEST = 3  # seeds that a cell runs in any case, unless it is too slow
TOO_SLOW = 12.0  # CPU time after the first seed, after which a cell gets no further one even if it has fewer
SHOWN = 200  # observations at the end of the first seed that a cell keeps for the figure


LEAST_FIRST: tuple[Information, ...] = ("neither", "parameters", "noise", "everything")
WITHOUT_PARAMETERS: Mapping[Information, Information] = {
    "everything": "everything",
    "noise": "everything",
    "parameters": "neither",
    "neither": "neither",
}


class Cell(NamedTuple):
    task: str
    method: str
    information: Information

    def path(self, folder: Path, seeds: Sequence[int]) -> Path:
        name = f"{self.task}-{self.method}-{self.information}-{seeds[0]}-{len(seeds)}.json"
        return folder / "cells" / name

    def read(self, folder: Path, seeds: Sequence[int]) -> dict[str, Any] | None:
        """What a former run has measured; None if nothing, or with another state of pcnet if the method is pcnet's."""
        path = self.path(folder, seeds)
        if not path.exists():
            return None
        content: dict[str, Any] = json.loads(path.read_text())
        return content if content["code"] == code_of(self.method) else None


@functools.cache
def code_of(method: str) -> str:
    """What a cell depends on: a digest of the tasks and filters of the arena, and pcnet's sources or a version."""
    package, here = METHODS[method].package, Path(__file__).parent
    ours = [here / "ours.py", *Path(pcnet.__file__).parent.rglob("*.py")]
    names = ("beliefs", "flows", "likelihood", "model", "simulation", "tasks")
    common = [*(here / f"{name}.py" for name in names), *here.glob("*_rival.py")]
    digest = hashlib.sha256()
    for path in sorted([*common, *ours] if package == "pcnet" else common):
        digest.update(path.read_bytes())
    if package == "pcnet":
        return digest.hexdigest()[:16]
    if METHODS[method].missing():
        return ""
    version = hgf_rival.version() if package == "pyhgf" else importlib.metadata.version(package)
    return f"{version} {digest.hexdigest()[:16]}"


def list_cells(tasks: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """All cells, task by task. Without parameters, being told them is the same as not being told."""
    found = []
    for name in tasks:
        task = TASKS[name]
        for key in methods:
            told = METHODS[key].told if METHODS[key].entered(task) else ()
            if not has_parameters(task):
                told = tuple(dict.fromkeys(WITHOUT_PARAMETERS[each] for each in told))
            found += [Cell(name, key, information) for information in told]
    return found


def list_jobs(cells: Sequence[Cell]) -> list[tuple[Cell, ...]]:
    """Cells that run one after the other in one process: a smoother after the filter whose noise levels it shares.

    pcnet comes first, then what is told least and takes longest.
    """

    def place(cell: Cell) -> tuple[bool, int, int]:
        system = TASKS[cell.task].system
        return not METHODS[cell.method].is_ours, LEAST_FIRST.index(cell.information), -system.dim * system.samples

    jobs: dict[Cell, tuple[Cell, ...]] = {}
    for cell in sorted(cells, key=lambda each: METHODS[each.method].contest):  # filters before smoothers
        first = cell._replace(method=METHODS[cell.method].levels_of or cell.method)
        first = first if first in jobs and cell.information in ("parameters", "neither") else cell
        jobs[first] = (*jobs.get(first, ()), cell)
    return sorted(jobs.values(), key=lambda job: place(job[0]))


def has_parameters(task: Task) -> bool:
    """Whether there are parameters to be told or not."""
    return bool(task.system.parameters) and not task.switches


def run_job(job: Sequence[Cell], seeds: Sequence[int], folder: Path, deadline: float) -> list[bool]:
    """Run cells one after the other, of which later ones use the noise levels that earlier ones have fitted."""
    likelihood.FITTED.clear()
    return [run_cell(cell, seeds, folder, deadline) for cell in job]


def run_cell(cell: Cell, seeds: Sequence[int], folder: Path, deadline: float) -> bool:
    """Run a cell and write its file, unless it is there or the time is over; whether the file is there."""
    if cell.read(folder, seeds) is not None:
        return True
    if time.time() > deadline:
        return False
    use_one_thread()
    started = time.process_time()
    with without_stored_code():
        content = {**cell._asdict(), "code": code_of(cell.method), **measure(cell, seeds, folder)}
    content["cpu"] = time.process_time() - started
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()  # compiled code of one cell is of no use to the next, and fills the memory
    gc.collect()
    path = cell.path(folder, seeds)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(json.dumps(content).encode())
    return True


@contextlib.contextmanager
def without_stored_code() -> Iterator[None]:
    """Let pcnet compile anew: no cell may start with what another one, or a former run, has compiled."""
    before = os.environ.get("PCNET_CACHE")
    os.environ["PCNET_CACHE"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["PCNET_CACHE"]
        else:
            os.environ["PCNET_CACHE"] = before


def measure(cell: Cell, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """Rows of scores, one per seed, or why there are none."""
    method, task = METHODS[cell.method], TASKS[cell.task]
    missing = method.missing()
    if missing is not None:
        return {"missing": missing, "rows": []}
    data = simulated(cell.task, tuple(seeds), folder)
    rows: list[dict[str, Any]] = []
    trace: dict[str, Any] = {}
    started, apart = time.process_time(), 0.0
    try:
        apply = method.build(task, cell.information)
    except ImportError:  # of this environment, not of the filter
        raise
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}".splitlines()[0][:200], "rows": []}
    built = time.process_time() - started
    for index, seed in enumerate(seeds):
        record = record_of(task, data, index)
        began = time.process_time()
        try:
            beliefs: Beliefs | None = apply(record)
            failure = ""
        except ImportError:
            raise
        except Exception as error:  # a rival's failure is a result
            beliefs, failure = None, f"{type(error).__name__}: {error}".splitlines()[0][:120]
        seconds = time.process_time() - began + (beliefs.further_seconds if beliefs else 0.0)
        apart += beliefs.further_seconds if beliefs else 0.0
        row = {"seed": seed, "seconds": seconds, "first": seconds + built, "failure": failure}
        rows.append({**row, **score(cell.task, data, index, beliefs)})
        if index == 0:
            started, apart = time.process_time(), 0.0  # the first seed compiles
        if beliefs is not None and not trace:
            shown = data.times.numpy(), data.states[index, :, -1].numpy(), beliefs.mean[:, -1], beliefs.sd[:, -1]
            trace = {
                name: np.asarray(each)[-SHOWN:].tolist()
                for name, each in zip(("times", "truth", "mean", "sd"), shown, strict=True)
            }
        spent = time.process_time() - started + apart
        if spent > method.seconds and (len(rows) >= FEWEST or spent > TOO_SLOW):
            break
    return {"missing": None, "rows": rows, "trace": trace, "wanted": len(seeds)}


@functools.lru_cache(maxsize=2)
def simulated(name: str, seeds: tuple[int, ...], folder: Path) -> Realisation:
    """The data of a task, simulated once and kept in a file for other cells and processes."""
    system, here = TASKS[name].system, Path(__file__).parent
    digest = hashlib.sha256(repr((*system[3:12], system.irregular, system.outliers, system.correlation_time)).encode())
    for path in (here / "simulation.py", here / "tasks.py", here.parent / "systems" / "design.py"):
        digest.update(path.read_bytes())
    path = folder / "data" / f"{name}-{seeds[0]}-{len(seeds)}-{digest.hexdigest()[:16]}.npz"
    if path.exists():
        with np.load(path) as stored:
            return Realisation(*(torch.from_numpy(stored[field]) for field in Realisation._fields))
    data = TASKS[name].simulate(system, seeds)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        np.savez(file, **{field: part.numpy() for field, part in data._asdict().items()})
    return data


def score(name: str, data: Realisation, index: int, beliefs: Beliefs | None) -> Mapping[str, float]:
    """Scores of one seed; errors of states relative to their spread, of parameters in prior standard deviations."""
    if beliefs is None or not (np.isfinite(beliefs.mean).all() and np.isfinite(beliefs.sd).all()):
        return {"lost": 1.0}
    system = TASKS[name].system
    half, states = system.samples // 2, data.states[index].numpy()
    error = ((beliefs.mean - states) / data.scale.numpy()) ** 2
    inside = (np.abs(beliefs.mean - states) <= SDS * beliefs.sd).astype(float)
    found = {
        "lost": 0.0,
        "whole": float(error.mean()),
        "half": float(error[half:].mean()),
        "coverage": float(inside.mean()),
        "effective": sum(effective_size(inside[:, i]) for i in range(system.dim)),
        "log_score": beliefs.log_score,
    }
    if len(beliefs.theta):
        away = (beliefs.theta - np.array(system.parameters_at(1.0))) / np.array(system.prior_sd)
        close = np.abs(away) <= SDS * beliefs.theta_sd / np.array(system.prior_sd)
        found |= {"parameters": float((away**2).mean()), "parameter_coverage": float(close.mean())}
    if beliefs.noise is not None:
        found["noise_x"] = float(np.mean(np.log(beliefs.noise.x / np.array(system.diffusion)) ** 2))
        if TASKS[name].family == "gaussian":
            found["noise_y"] = float(np.mean(np.log(beliefs.noise.y / np.array(system.observation_sd)) ** 2))
    if beliefs.ahead is not None and index < FORECASTS:
        found["ten_steps"] = score_ahead(beliefs.ahead, states, data.scale.numpy())
    return found


def score_ahead(ahead: Forecasts, states: Array, scale: Array) -> float:
    """Mean log-density of the true states, in units of their spread, ten observations after origins; −∞ without any.

    Args:
        ahead: Makes the forecasts.
        states: True ones, (T, d).
        scale: Their spread, (d,).
    """
    try:
        found = ahead(origins(len(states)), AHEAD)
    except Exception:  # of a forecast of any package
        return -math.inf
    truth = states[[place + AHEAD for place in origins(len(states))]]
    sd = np.maximum(found.sd / scale, 1e-9)
    density = -0.5 * ((truth - found.mean) / scale / sd) ** 2 - np.log(sd) - 0.5 * math.log(2 * math.pi)
    return float(np.nan_to_num(density.mean(), nan=-math.inf))


def effective_size(values: Array) -> float:
    """Number of independent values with the variance of the mean of a series, T / (1 + 2 Σ ρ) up to the first ρ < 0."""
    centred = values - values.mean()
    variance = float(centred @ centred)
    if variance == 0.0:
        return 1.0
    total = 1.0
    for lag in range(1, len(values) // 2):
        correlation = float(centred[lag:] @ centred[:-lag]) / variance
        if correlation < 0:
            break
        total += 2 * correlation
    return len(values) / total
