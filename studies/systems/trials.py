"""Trials: one method on one system from one first guess, for all seeds at once, and its scores."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pcnet.errors import DivergenceError
from pcnet.graphs import adaptive_filter
from pcnet.graphs.adaptive_filter import DEFAULT
from pcnet.numerics.kernels import Matern
from pcnet.results.recorder import Record
from pcnet.settings import number
from studies.kept import Job, key_of
from studies.systems.design import GUESSES, HORIZONS, SYSTEMS, Guess, Realisation, System, simulate
from studies.systems.rivals import Filtered, averaged_filter, gaussian_filter, grid_size, particle_filter

Array = NDArray[Any]
SDS = 2.0  # half-width of intervals, in standard deviations
IDENTIFIED = 2.0
"""A process level counts as identified by a record if twice and half the true variance each lower the log-evidence of
the filter that is told everything else by so many nats."""
SMALLEST_GRID = 5  # levels of each noise, below which the average over them is left out

ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "one hypothesis of the noise": {"process_factors": (1.0,), "observation_factors": (1.0,), "contrast": 1.0},
    "no contrasts of elements": {"contrast": 1.0},
    "no robust rows": {"outliers": 0.0},
    "no walks": {"walks": ()},
    "no tilt of the prior": {"process_tilt": 0.0, "observation_tilt": 0.0},
    "no merging": {"merge": 0.0},
    "Euler steps": {"integrator": "euler"},
    "Taylor expansion": {"linearisation": "taylor"},
    "one level for all channels": {"noise_per_channel": False},
    "levels not learned": {"noise_sd": 1e-3},
}
"""Settings of variants of the filter, each without one of its parts."""
AFTERWARDS = ("__init__", "__main__", "report", "run")
"""Modules that what a trial finds does not depend on."""
ABLATED_FROM = ("x × 50, y ÷ 50", "none")  # first guesses that variants are run from: a wrong one, and none


class Trial(NamedTuple):
    system: str
    method: str  # "pcnet", "pcnet: <ablation>", "extended", "cubature", "average" or "particles"
    guess: str  # "" for methods that are told the noise

    @property
    def name(self) -> str:
        return f"{self.system}, {self.method}" + (f", guess {self.guess}" if self.guess else "")


class Beliefs(NamedTuple):
    """Beliefs of a method, and noise variances relative to the true ones at the end; NaN if it is told them."""

    filtered: Filtered
    level_x: Array  # (S, d)
    level_y: Array  # (S, m)
    lost: Array  # runs that diverged, (S,)


def list_trials(names: Sequence[str], ablations: bool = False) -> list[Trial]:
    """All trials of some systems: first those of the rivals."""
    found = []
    for name in names:
        rivals = ["extended", "cubature", *(["particles"] if SYSTEMS[name].two_peaks else [])]
        rivals += ["average"] if grid_size(SYSTEMS[name]) >= SMALLEST_GRID and not ablations else []
        found += [Trial(name, rival, "") for rival in rivals]
        found += [Trial(name, "pcnet", guess.name) for guess in GUESSES]
        if ablations:
            found += [Trial(name, f"pcnet: {part}", guess) for part in ABLATIONS for guess in ABLATED_FROM]
    return found


def job_of(trial: Trial, seeds: Sequence[int]) -> Job:
    """A trial as a job whose result is kept. Its data follow from the seeds, the code and the version of torch."""
    files = (path for path in Path(__file__).parent.glob("*.py") if path.stem not in AFTERWARDS)
    key = key_of(files, ("torch", "numpy"), trial, tuple(seeds))
    return Job(f"{trial.name}, {len(seeds)} seeds from {seeds[0]}", key, run_trial, (trial, tuple(seeds)))


def run_trial(trial: Trial, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One row of scores per seed."""
    torch.set_num_threads(1)
    system = SYSTEMS[trial.system]
    data = _simulated(trial.system, tuple(seeds))
    started = time.perf_counter()
    if trial.guess:
        (guess,) = (each for each in GUESSES if each.name == trial.guess)
        part = trial.method.partition(": ")[2]
        beliefs = run_pcnet(system, data, guess, **(ABLATIONS[part] if part else {}))
    else:
        beliefs = run_rival(system, data, trial.method)
    seconds = time.perf_counter() - started
    head = {**trial._asdict(), "seconds": seconds}
    rows = score(system, data, beliefs, _identified(trial.system, tuple(seeds)) if trial.guess else None)
    return [{**head, "seed": seed, **row} for seed, row in zip(seeds, rows, strict=True)]


@functools.lru_cache(maxsize=2)
def _simulated(name: str, seeds: tuple[int, ...]) -> Realisation:
    return simulate(SYSTEMS[name], seeds)


@functools.lru_cache(maxsize=2)
def _identified(name: str, seeds: tuple[int, ...]) -> Array:
    return identified(SYSTEMS[name], _simulated(name, seeds))


def run_pcnet(system: System, data: Realisation, guess: Guess, **changes: Any) -> Beliefs:
    """The adaptive filter, told nothing about the noise but a first guess, or not even that."""
    fields = {field.name for field in dataclasses.fields(DEFAULT)}
    rules = {name: value for name, value in changes.items() if name in fields}
    options = {name: value for name, value in changes.items() if name not in fields}
    true_x, true_y = np.square(system.diffusion), np.square(system.observation_sd)
    kernel = None if system.correlation_time is None else Matern(number(system.correlation_time), number(1.5))
    per_channel = options.get("noise_per_channel", True)

    def first(true: Array, factor: float | None) -> list[float] | None:
        sds = None if factor is None else np.sqrt(factor * true)
        return None if sds is None else (sds.tolist() if per_channel else [float(np.exp(np.log(sds).mean()))])

    model = adaptive_filter(
        system.flow,
        system.dim,
        system.dt,
        parameter_mean=list(system.prior_mean),
        parameter_sd=list(system.prior_sd),
        mapping=lambda x, _: system.observe(x),
        channels=system.channels,
        process_noise_sd=first(true_x, guess.x),
        observation_noise_sd=first(true_y, guess.y),
        correlation_time_y=kernel,
        initial_mean=list(system.initial_mean),
        initial_sd=list(system.initial_sd),
        hypotheses=dataclasses.replace(DEFAULT, **rules),
        **{"integrator": system.integrator, **options},
    )
    record = Record(("mean", "sd"), nodes=("x", "theta", "noise_x", "noise_y"))
    session = model.start(record=record, on_divergence="stop", screen=False)
    times = data.times.tolist() if system.irregular else None
    session.run(data.observations, progress=False, times=times)
    result = session.result()
    lost = np.asarray(result.diverged.at >= 0)
    values = {key: torch.as_tensor(trace.values) for key, trace in result.traces.items()}
    future = np.full((len(lost), len(HORIZONS), system.dim), np.nan)
    future_sd = future.copy()
    if not lost.all():
        with contextlib.suppress(DivergenceError):  # counts as intervals that do not contain the truth
            ahead = session.forecast(HORIZONS[-1] * system.dt)
            places = [k - 1 for k in HORIZONS]
            future, future_sd = ahead.mean("x")[:, places], ahead.sd("x")[:, places]
    filtered = Filtered(
        values["x.mean"][:, :, 0],
        values["x.sd"][:, :, 0],
        values["theta.mean"],
        values["theta.sd"],
        torch.as_tensor(future),
        torch.as_tensor(future_sd),
        torch.as_tensor(np.asarray(result.free_action)).neg(),
    )
    level_x = np.exp(-values["noise_x.mean"][:, -1].numpy()) / true_x
    level_y = np.exp(-values["noise_y.mean"][:, -1].numpy()) / true_y
    return Beliefs(filtered, level_x, level_y, lost)


def run_rival(system: System, data: Realisation, method: str) -> Beliefs:
    with torch.no_grad():
        if method == "particles":
            found = particle_filter(system, data)
        elif method == "average":
            found = averaged_filter(system, data)
        else:
            found = gaussian_filter(system, data, "extended" if method == "extended" else "cubature")
    unknown = np.full((len(data.states), 1), np.nan)
    return Beliefs(found, unknown, unknown, ~np.isfinite(found.mean.numpy()).all((1, 2)))


def identified(system: System, data: Realisation) -> Array:
    """Which process levels the record identifies, (S, d): see IDENTIFIED."""
    seeds, d = len(data.states), system.dim
    factors = torch.ones(1 + 2 * d, d, dtype=torch.float64)
    for i in range(d):
        factors[1 + 2 * i, i], factors[2 + 2 * i, i] = 2.0, 0.5
    levels = factors.repeat_interleave(seeds, 0)
    with torch.no_grad():
        evidence = gaussian_filter(system, data, "cubature", levels).log_evidence.reshape(-1, seeds)
    lowered = (evidence[:1] - evidence[1:]).reshape(d, 2, seeds)
    known: Array = (lowered >= IDENTIFIED).all(1).numpy().T
    return known


def score(system: System, data: Realisation, beliefs: Beliefs, known: Array | None) -> list[dict[str, float]]:
    """Scores of each seed; errors of states relative to their spread, of parameters in prior standard deviations.

    known: Which process levels the record identifies, (S, d).
    """
    found = beliefs.filtered
    half, scale = system.samples // 2, data.scale
    error = ((found.mean - data.states) / scale).square()
    inside = ((found.mean - data.states).abs() <= SDS * found.sd).double()
    columns = {
        "whole": error.mean((1, 2)),
        "half": error[:, half:].mean((1, 2)),
        "coverage": inside.mean((1, 2)),
        "log_evidence": found.log_evidence,
    }
    if found.theta.shape[-1]:
        truth = torch.tensor(system.parameters_at(1.0), dtype=torch.float64)
        sd = torch.tensor(system.prior_sd, dtype=torch.float64)
        last, last_sd = found.theta[:, -1], found.theta_sd[:, -1]
        columns["parameters"] = ((last - truth) / sd).square().mean(1).sqrt()
        columns["parameter_coverage"] = ((last - truth).abs() <= SDS * last_sd).double().mean(1)
    places = [k - 1 for k in HORIZONS]
    ahead = ((found.future - data.future[:, places]).abs() <= SDS * found.future_sd).double().mean(2)
    columns |= {f"ahead_{k}": ahead[:, i] for i, k in enumerate(HORIZONS)}
    arrays = {name: value.numpy() for name, value in columns.items()}
    level_x = beliefs.level_x if known is None else np.where(known, beliefs.level_x, np.nan)
    arrays["level_x"], arrays["level_y"] = worst(level_x), worst(beliefs.level_y)
    arrays = {name: np.where(beliefs.lost, np.nan, value) for name, value in arrays.items()}
    arrays["lost"] = beliefs.lost.astype(float)
    return [dict(zip(arrays, map(float, row), strict=True)) for row in zip(*arrays.values(), strict=True)]


def worst(ratios: Array) -> Array:
    """The ratio farthest from 1 of each seed, (S, n) → (S,); NaN where there is none."""
    log = np.log(ratios)
    far = np.where(np.isnan(log), -1.0, np.abs(log)).argmax(1)
    found: Array = np.exp(log[np.arange(len(log)), far])
    return found
