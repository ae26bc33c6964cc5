"""pcnet's own filters, and the particle filter of `studies.systems`, which is told everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.graphs import adaptive_filter, odem
from pcnet.graphs.adaptive_filter import DEFAULT
from pcnet.numerics.kernels import Matern
from pcnet.results.recorder import Record as Recorded
from pcnet.settings import number
from studies.arena.beliefs import Beliefs, Filter
from studies.arena.model import Information, Record
from studies.arena.tasks import Task
from studies.systems.design import Realisation
from studies.systems.rivals import particle_filter

KNOWN = 1e-3  # prior standard deviation of the log of a noise variance that is told


def build_adaptive(task: Task, information: Information) -> Filter:
    """The adaptive filter as users call it; noise that it is told stays as it is, with outliers and walks expected."""
    system = task.system
    options: dict[str, Any] = {}
    if information in ("noise", "neither") and system.parameters:
        options |= {"parameter_mean": list(system.prior_mean), "parameter_sd": list(system.prior_sd)}
    if information in ("everything", "noise"):
        rules = replace(DEFAULT, process_factors=(1.0,), observation_factors=(1.0,))
        options |= {"process_noise_sd": list(system.diffusion), "observation_noise_sd": list(system.observation_sd)}
        options |= {"noise_sd": KNOWN, "hypotheses": rules}
    if system.correlation_time is not None:
        options["correlation_time_y"] = Matern(number(system.correlation_time), number(1.5))
    told = information in ("everything", "parameters") and bool(system.parameters)
    changing = told and system.later is not None
    truth = torch.tensor(system.parameters, dtype=torch.float64)

    def flow_told(x: Tensor, _: Tensor) -> Tensor:
        return system.flow(x, truth.to(x).expand(*x.shape[:-1], -1))

    def flow_changing(x: Tensor, u: Tensor, _: Tensor) -> Tensor:
        return system.flow(x, u)

    flow: Any = flow_changing if changing else flow_told if told else system.flow
    mapping: Any = (lambda x, _u, _: system.observe(x)) if changing else (lambda x, _: system.observe(x))
    model = adaptive_filter(
        flow,
        system.dim,
        system.dt,
        mapping=mapping,
        channels=system.channels,
        inputs={"u": len(system.parameters)} if changing else None,
        initial_mean=list(system.initial_mean),
        initial_sd=list(system.initial_sd),
        **options,
    )

    def apply(record: Record) -> Beliefs:
        traces = Recorded(("mean", "sd"), nodes=("x", "theta") if "parameter_mean" in options else ("x",))
        session = model.start(record=traces, on_divergence="stop", screen=False)
        given: Any = {"y": record.observations, "u": record.theta} if changing else record.observations
        session.run(given, progress=False, times=record.times.tolist() if system.irregular else None)
        result = session.result()
        found = {key: np.asarray(trace.values) for key, trace in result.traces.items()}
        nothing = np.zeros((1, 0))
        return Beliefs(
            found["x.mean"][:, 0],
            found["x.sd"][:, 0],
            found.get("theta.mean", nothing)[-1],
            found.get("theta.sd", nothing)[-1],
            -float(result.free_action) / len(record.times),
        )

    return apply


def build_odem(task: Task, _: Information) -> Filter:
    """The paper's graph with its default settings; without a log-score: its free energy is no density of forecasts."""
    system = task.system
    first = torch.zeros(3, 3, dtype=torch.float64)
    first[0] = torch.tensor(system.initial_mean)
    model = odem("glv", 3, system.dt, initial_mean=first)

    def apply(record: Record) -> Beliefs:
        traces = Recorded(("mean", "sd"), nodes=("x", "theta"))
        result = model.run(record.observations, progress=False, record=traces, on_divergence="stop", screen=False)
        found = {key: np.asarray(trace.values) for key, trace in result.traces.items()}
        return Beliefs(
            found["x.mean"][:, 0], found["x.sd"][:, 0], found["theta.mean"][-1], found["theta.sd"][-1], float("nan")
        )

    return apply


def build_particles(task: Task, _: Information) -> Filter:
    """The bootstrap filter with 1000 particles, told everything, also which observations are outliers."""
    system = task.system

    def apply(record: Record) -> Beliefs:
        y, outlier = (torch.as_tensor(each)[None] for each in (record.observations, record.is_outlier))
        nothing = torch.empty(0)
        with torch.no_grad():
            found = particle_filter(system, Realisation(torch.as_tensor(record.times), nothing, y, outlier, nothing))
        score = float("nan") if system.outliers else float(found.log_evidence[0]) / len(record.times)
        return Beliefs(found.mean[0].numpy(), found.sd[0].numpy(), np.zeros(0), np.zeros(0), score)

    return apply
