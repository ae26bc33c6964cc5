"""pcnet's own filters, as its users call them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pcnet as pc
from pcnet.graphs import Sensor, adaptive_filter, odem
from pcnet.graphs.adaptive_filter import DEFAULT
from pcnet.model.model import Model
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import CategoricalNode, KalmanStateNode, LikelihoodNode, ParameterNode, PrecisionNode
from pcnet.numerics.kernels import Matern, White
from pcnet.results.recorder import Record as Recorded
from pcnet.settings import number, settings
from studies.arena.beliefs import Ahead, Array, Beliefs, Filter
from studies.arena.model import SHARED_FROM, Information, Noise, Record
from studies.arena.simulation import STAY, TURNS
from studies.arena.tasks import Task

PEAKS = 8  # Gaussians of a belief where it has several peaks, as in the documentation
KNOWN = 1e-3  # prior standard deviation of the log of a noise variance that is told


@settings
class ReturnsNode(LikelihoodNode):
    """Returns y ~ N(0, exp(p)) with the log of their variance p: a likelihood of one's own."""

    def log_likelihood(self, y: Tensor, prediction: Tensor, log_precision: Tensor) -> Tensor:
        return -0.5 * (prediction + y**2 * (-prediction).exp() + math.log(2 * math.pi))


def build_adaptive(task: Task, information: Information, smooth: bool = False) -> Filter:
    """The adaptive filter; noise that it is told stays as it is."""
    model = _model(task, information)
    system, learns_theta = task.system, information in ("noise", "neither") and _has_parameters(task)
    changing = _is_changing(task, information)
    names = tuple(task.sensors or {"y": ()})

    def given(record: Record, part: slice = slice(None)) -> Any:
        y = record.observations[part]
        rows = {name: y[:, list(channels)] for name, channels in (task.sensors or {}).items()} or {"y": y}
        return {**rows, "u": record.theta[part]} if changing else rows

    def times(record: Record, part: slice = slice(None)) -> list[float] | None:
        found: list[float] = record.times[part].tolist()
        return found if system.irregular else None

    def start(wanted: tuple[str, ...]) -> Any:
        traces = Recorded(("mean", "sd") if wanted else (), nodes=wanted or ("x",))
        return model.start(record=traces, on_divergence="stop", screen=False)

    def apply(record: Record) -> Beliefs:
        wanted = ("x", "theta") if learns_theta else ("x",)
        count = int(np.isfinite(record.observations).any(1).sum())
        nothing = np.zeros((1, 0))
        if smooth:
            traces = Recorded(("mean", "sd"), nodes=wanted)
            result = model.run(
                given(record), progress=False, times=times(record), record=traces, smooth=True, screen=False
            )
            found = result.smoothed("x")
            mean, sd = (np.asarray(each).reshape(len(record.times), -1) for each in (found.mean, found.sd))
            return Beliefs(mean, sd, nothing[0], nothing[0], math.nan)
        session = start(wanted)
        session.run(given(record), progress=False, times=times(record))
        result = session.result()
        traces_of = {key: np.asarray(trace.values) for key, trace in result.traces.items()}

        def ahead(places: Sequence[int], steps: int) -> Ahead:
            return _forecasts(start(wanted), record, given, system.dt, changing, places, steps)

        return Beliefs(
            traces_of["x.mean"][:, 0],
            traces_of["x.sd"][:, 0],
            traces_of.get("theta.mean", nothing)[-1],
            traces_of.get("theta.sd", nothing)[-1],
            -float(result.free_action) / count,
            _levels(session, names, task) if information in ("parameters", "neither") else None,
            None if system.irregular else ahead,
        )

    return apply


def _has_parameters(task: Task) -> bool:
    return bool(task.system.parameters) and not task.switches


def _is_changing(task: Task, information: Information) -> bool:
    """Whether parameters that change are told: they are then an input."""
    told = information in ("everything", "parameters") and _has_parameters(task)
    return told and task.system.later is not None


def _model(task: Task, information: Information) -> Model:
    system, flow, mapping = task.system, _flow(task, information), _mapping(task, information)
    options: dict[str, Any] = {"initial_mean": list(system.initial_mean), "initial_sd": list(system.initial_sd)}
    options["peaks"] = PEAKS if task.peaks else 1
    if information in ("noise", "neither") and _has_parameters(task):
        options |= {"parameter_mean": list(system.prior_mean), "parameter_sd": list(system.prior_sd)}
    told_noise = information in ("everything", "noise")
    shared = system.dim >= SHARED_FROM  # all levels are the same, which rivals know as well
    if shared:
        options["noise_per_channel"] = False
    if told_noise:
        level = system.diffusion[0] if shared else list(system.diffusion)
        options |= {"process_noise_sd": level, "noise_sd": KNOWN, "hypotheses": _hypotheses(task)}
    if task.is_map:
        options |= {"integrator": "euler"}
    if task.switches:
        values = [[rate] for rate in TURNS]
        options["switching"] = CategoricalNode("turn", values=torch.tensor(values), stay=number(STAY))
    if _is_changing(task, information):
        options["inputs"] = {"u": len(system.parameters)}
    if task.family == "volatility":
        return _volatility(task, flow, options)
    if task.family == "poisson":
        sensor = Sensor(family="poisson", mapping=mapping, channels=system.channels)
        return adaptive_filter(flow, system.dim, system.dt, sensors={"y": sensor}, **options)
    if task.sensors:
        sensors = {}
        for name, channels in task.sensors.items():
            noise: Any = [system.observation_sd[place] for place in channels] if told_noise else None
            sensors[name] = Sensor(mapping=_part(mapping, channels), noise_sd=noise)
        return adaptive_filter(flow, system.dim, system.dt, sensors=sensors, **options)
    if told_noise:
        options["observation_noise_sd"] = system.observation_sd[0] if shared else list(system.observation_sd)
    if system.correlation_time is not None:
        options["correlation_time_y"] = Matern(number(system.correlation_time), number(1.5))
    return adaptive_filter(flow, system.dim, system.dt, mapping=mapping, channels=system.channels, **options)


def _hypotheses(task: Task) -> pc.Hypotheses | None:
    """Where the noise is told: a single filter, unless there are outliers, parameters that change, or several peaks."""
    system = task.system
    if system.outliers or system.later or system.two_peaks or task.peaks:
        return replace(DEFAULT, process_factors=(1.0,), observation_factors=(1.0,))
    return None


def _part(mapping: Any, channels: tuple[int, ...]) -> Any:
    return lambda x, _: mapping(x, _)[..., list(channels)]


def _flow(task: Task, information: Information) -> Any:
    system = task.system
    if not _has_parameters(task):
        return (lambda x, v, _: system.flow(x, v)) if task.switches else system.flow
    if task.takes_time:
        timed: Any = system.flow
        if information in ("noise", "neither"):
            return lambda x, _u, theta, t: timed(x, theta, t)
        truth = torch.tensor(system.parameters, dtype=torch.float64)
        return lambda x, _u, _theta, t: timed(x, truth.to(x), t)
    if information in ("noise", "neither"):
        return system.flow
    if _is_changing(task, information):
        return lambda x, u, _: system.flow(x, u)
    truth = torch.tensor(system.parameters, dtype=torch.float64)
    return lambda x, _: system.flow(x, truth.to(x).expand(*x.shape[:-1], -1))


def _mapping(task: Task, information: Information) -> Any:
    observe = task.system.observe
    if _is_changing(task, information) or task.switches:
        return lambda x, _u, _theta: observe(x)
    return lambda x, _: observe(x)


def _volatility(task: Task, flow: Any, options: Mapping[str, Any]) -> Model:
    """The adaptive filter with a likelihood of one's own: its graph, by hand."""
    system = task.system
    x = KalmanStateNode(
        "x",
        dim=1,
        flow=flow,
        initial_mean=torch.tensor(system.initial_mean),
        initial_sd=torch.tensor(system.initial_sd),
    )
    graph = pc.Graph()
    graph.predicts(x, ReturnsNode("y", dim=1, dt=number(system.dt)))
    if "parameter_mean" in options:
        theta = ParameterNode("theta", mean=options["parameter_mean"], sd=options["parameter_sd"])
        graph.parametrises(theta, x)
    level = options.get("process_noise_sd", [1.0])[0]
    graph.weighs(
        PrecisionNode("noise_x", prior_precision=level**-2, sd=options.get("noise_sd", 1.6), kernel=White()), x
    )
    nodes = LevelNodes(parameters=("parameter",) if "parameter_mean" in options else ())
    rules = options.get("hypotheses", DEFAULT)
    if rules is not None:
        rules = replace(rules, observation_factors=(1.0,), outliers=0.0)
    return Model(graph, adaptive_filtering(levels=(nodes,)), rules)


def _levels(session: Any, names: tuple[str, ...], task: Task) -> Noise:
    """Standard deviations of the noise at the end."""

    def sd(name: str) -> Array:
        found: Array = np.exp(-0.5 * session.read(name, "mean").numpy().reshape(-1))
        return found

    y = [sd(f"noise_{name}") for name in names] if task.family == "gaussian" else [np.array(task.system.observation_sd)]
    return Noise(sd("noise_x"), np.concatenate(y))


def _forecasts(
    session: Any, record: Record, given: Any, dt: float, changing: bool, places: Sequence[int], steps: int
) -> Ahead:
    """Forecasts on the way through a record."""
    mean, sd, sd_y, before = [], [], [], 0
    for place in places:
        session.run(given(record, slice(before, place + 1)), progress=False)
        before = place + 1
        inputs = {"u": record.theta[place + 1 : place + 1 + steps]} if changing else None
        found = session.forecast(steps * dt, dt, inputs=inputs)
        mean.append(found.mean("x").reshape(steps, -1)[-1])
        sd.append(found.sd("x").reshape(steps, -1)[-1])
        sd_y.append(found.sd("y").reshape(steps, -1)[-1] if "y" in found.nodes else [])
    return Ahead(np.array(mean), np.array(sd), np.array(sd_y))


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
            found["x.mean"][:, 0], found["x.sd"][:, 0], found["theta.mean"][-1], found["theta.sd"][-1], math.nan
        )

    return apply
