"""Recorded data, pass after pass, until the free action settles.

In a pass states run over all observations while parameters and precisions μ, with priors N(η, P⁻¹), stand still and
gather gradients g and curvatures C of the errors. After it they take the step of Gauss and Newton,
μ ← μ − (P + C)⁻¹(g + P(μ − η)), and the next pass begins anew from there: the same data do not count twice.

What is minimised is the free action of a pass, Σ_t F_t + ½(μ − η)ᵀP(μ − η): with a `FilterNode` that is
−log p(y | μ) − log p(μ), but for a constant. Where a step has not lowered it, it is taken back and tried again at half
its length. In the last pass, and in its free action, the posterior has the covariance Σ = (P + C)⁻¹: with
½(log|P⁻¹| − log|Σ|) added that is Laplace's approximation of −log p(y), for comparing models.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcnet.engine.session import Session
from pcnet.errors import DivergenceError, ObservationError, ResultError, ScheduleError, SettingError
from pcnet.model.graph import Graph
from pcnet.model.schedule import Schedule
from pcnet.numerics.estimators import ParameterEstimator
from pcnet.numerics.lbfgs import LBFGS, Iterate
from pcnet.results.recorder import Record
from pcnet.results.result import Array, Interval, Result

Slopes = Literal["exact", "messages"]
"""Where the slopes of the free action are taken from: copies of a run that are varied a little, or messages."""


class Fit(NamedTuple):
    """What repeated passes have found. Arrays lead with the batch dimensions of the run, (...)."""

    result: Result
    """The last pass, with what was found."""
    free_actions: Array
    """What is minimised, after each pass; (..., passes). It never rises: what would raise it is taken back."""
    converged: Array
    """Whether it changed by less than the tolerance in the end; (...)."""
    passes: Array
    """How many passes it took; (...)."""
    backtracks: Array
    """How often a step was taken back and halved; (...)."""
    means: Mapping[str, Array]
    """What was found, by node; (..., n)."""
    covariances: Mapping[str, Array]
    """How sure it is, by node, the others taken as given; (..., n, n)."""

    def mean(self, node: str) -> Array:
        return self.means[self._known(node)]

    def covariance(self, node: str) -> Array:
        return self.covariances[self._known(node)]

    def sd(self, node: str) -> Array:
        deviation: Array = np.sqrt(np.diagonal(self.covariance(node), axis1=-2, axis2=-1))
        return deviation

    def interval(self, node: str, probability: float = 0.95) -> Interval:
        """The central credible interval of what was found."""
        if not 0 < probability < 1:
            raise ResultError(f"a probability must be between 0 and 1, not {probability}")
        reach = NormalDist().inv_cdf(0.5 + probability / 2) * self.sd(node)
        return Interval(self.mean(node) - reach, self.mean(node) + reach)

    def _known(self, node: str) -> str:
        if node not in self.means:
            raise ResultError(f"{node!r} took no steps after passes; those that did: {', '.join(self.means)}")
        return node

    def __repr__(self) -> str:
        count, batch = int(self.converged.sum()), self.converged.shape
        one = "settled" if count else "not settled"
        converged = f"{count} of {self.converged.size} settled" if batch else one
        lines = [f"Fit of {self.result.observations} observations in {self.free_actions.shape[-1]} passes, {converged}"]
        if not batch:
            lines.append(f"  free action {self.free_actions[0]:.6g} → {self.free_actions[-1]:.6g}")
            for node, mean in self.means.items():
                lines.append(f"  {node}: {_text(mean)} (sd {_text(self.sd(node))})")
        return "\n".join(lines)


class Passes:
    """Runs over the same observations, as often as they are asked for. What stands still is one vector (B, n)."""

    def __init__(
        self, graph: Graph, schedule: Schedule, observations: Any, times: list[float] | None, bar: Any, **options: Any
    ) -> None:
        self.names = _check(graph, schedule)
        self.graph, self.schedule, self.observations, self.times, self.bar = graph, schedule, observations, times, bar
        self.options = options
        live = self._start(record=()).prepare(observations)
        self.prior = {name: live.local(name).belief for name in self.names}
        ends = [0, *itertools.accumulate(belief.mean.shape[1] for belief in self.prior.values())]
        self.parts = {name: slice(*ends[i : i + 2]) for i, name in enumerate(self.names)}
        self.first = torch.cat([belief.mean for belief in self.prior.values()], 1)

    def _start(self, **options: Any) -> Session:
        return Session(self.graph, self.schedule, **self.options, **options)

    def run(self, beliefs: Mapping[str, Any], copies: int | None = None, **options: Any) -> Session:
        """One pass that begins with these beliefs, up to its last observation."""
        live = self._start(**options)
        live.warm_start(beliefs, copies)
        live.watchers.append(lambda *_: self.bar.update())
        self.bar.reset(total=self.bar.total)
        live.run(self.observations, progress=False, times=self.times)
        self.bar.total = live.tick
        return live

    def stand(self, mean: Tensor, scales: Tensor | None) -> tuple[Iterate, Session]:
        """One pass with its closing: where it stood, and what it led to.

        scales: the units (B, n) in which to vary what stands still, to find slopes by the free actions of copies of the
        run; None for the slopes that messages tell.
        """
        batch, varied = len(mean), mean[None]
        if scales is not None:
            by = torch.finfo(mean.dtype).eps ** 0.2 * scales
            each = by.diag_embed().movedim(1, 0)
            varied = torch.cat([varied, mean + each, mean - each])
        live = self.run(self._beliefs(varied), len(varied), record=(), on_divergence="stop")
        actions = live.free_action.view(-1, batch)
        if scales is not None:
            up, down = actions[1:].chunk(2)
            self._go_by(live, (up - down).mT / (2 * by))
        slopes = torch.cat([live.local(name).memory.gradient[:batch] for name in self.names], 1)
        live.close()
        after = {name: _first(live.local(name).belief, batch) for name in self.names}
        able = torch.as_tensor(live.diverged.at == -1, device=mean.device).view(-1, batch)[0]
        step = torch.cat([belief.mean for belief in after.values()], 1) - mean
        precision = torch.zeros_like(step).diag_embed()
        for name, part in self.parts.items():
            precision[:, part, part] = after[name].precision
        return Iterate(actions[0], mean, step, able, slopes, precision, after), live

    def _beliefs(self, means: Tensor) -> dict[str, Any]:
        """Priors with other means (copies, B, n), by node."""
        found = {}
        for name, prior in self.prior.items():
            copied = type(prior)(*(each.repeat(len(means), *(1,) * (each.dim() - 1)) for each in prior))
            found[name] = copied._replace(mean=means[..., self.parts[name]].flatten(0, 1))
        return found

    def _go_by(self, live: Session, slopes: Tensor) -> None:
        """Let nodes step by these slopes (B, n), where they are finite, instead of those that they have gathered."""
        for name, part in self.parts.items():
            local, slope = live.local(name), slopes[:, part]
            told = local.memory.gradient.clone()
            told[: len(slope)] = torch.where(torch.isfinite(slope), slope, told[: len(slope)])
            local.memory = local.memory._replace(gradient=told)


def _first(belief: Any, batch: int) -> Any:
    """A belief of the first of all copies."""
    return type(belief)(*(part[:batch] for part in belief))


def _scales(beliefs: Iterable[Any]) -> Tensor:
    """How far each number may be off while the others stand still, (B, n)."""
    return torch.cat([belief.precision.diagonal(dim1=-2, dim2=-1) ** -0.5 for belief in beliefs], 1)


def fit(
    graph: Graph,
    observations: Any,
    schedule: Schedule,
    *,
    max_iterations: int,
    tolerance: float,
    estimator: ParameterEstimator | None,
    slopes: Slopes,
    record: Record | Iterable[str] | None,
    dtype: torch.dtype,
    device: torch.device,
    threads: int | None,
    on_divergence: Literal["raise", "stop"],
    progress: bool | None,
    times: Iterable[float] | None,
) -> Fit:
    """Passes until the free action settles; see `Graph.fit`."""
    if isinstance(max_iterations, bool) or not isinstance(max_iterations, int) or max_iterations < 1:
        raise SettingError(f"max_iterations must be a whole number, 1 or more, not {max_iterations!r}")
    if not tolerance >= 0:
        raise SettingError(f"tolerance must be 0 or more, not {tolerance!r}")
    if on_divergence not in ("raise", "stop"):
        raise SettingError(f"on_divergence must be 'raise' or 'stop' for passes, not {on_divergence!r}")
    if slopes not in get_args(Slopes):
        raise SettingError(f"slopes must be 'exact' or 'messages', not {slopes!r}")
    if isinstance(observations, Iterator):
        raise ObservationError(
            f"observations are read once for each pass, and a {type(observations).__name__} can be read only once: "
            "give an array, or a list: list(observations)"
        )
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"schedule must be a Schedule, such as pcnet.batch(), not {schedule!r}")
    if estimator is not None:
        graph = _moved_by(graph, schedule, estimator)
    hidden = not (sys.stderr.isatty() if progress is None else progress)
    options = {"dtype": dtype, "device": device, "threads": threads}
    with torch.inference_mode(), tqdm(disable=hidden, unit="obs", leave=False) as bar:
        every = Passes(graph, schedule, observations, None if times is None else list(times), bar, **options)
        exact = slopes == "exact"
        bar.set_description("pass 1")
        first, live = every.stand(every.first, _scales(every.prior.values()) if exact else None)
        if on_divergence == "raise" and not bool(first.feasible.all()):
            _raise(live, first)
        descent = LBFGS.init(first)
        actions = [descent.best.free_action]
        while len(actions) < max_iterations and bool(descent.active.any()):
            bar.set_description(f"pass {len(actions) + 1}, free action {float(actions[-1].nanmean()):.6g}")
            scales = _scales(descent.best.beliefs.values()) if exact else None
            descent = descent.update(every.stand(descent.candidate, scales)[0], tolerance, remember=exact)
            actions.append(descent.best.free_action)
        bar.set_description("last pass")
        found = {
            name: belief._replace(mean=descent.best.mean[:, every.parts[name]])
            for name, belief in descent.best.beliefs.items()
        }
        live = every.run(found, record=record, on_divergence=on_divergence)
    shape = live.batch_shape
    return Fit(
        live.result(),
        torch.stack(actions, -1).reshape(*shape, -1).cpu().numpy(),
        descent.converged.reshape(shape).cpu().numpy(),
        descent.iterations.long().reshape(shape).cpu().numpy(),
        descent.backtracks.long().reshape(shape).cpu().numpy(),
        {name: live.mean(name).cpu().numpy() for name in every.names},
        {name: live.read(name, "covariance").cpu().numpy() for name in every.names},
    )


def _check(graph: Graph, schedule: Schedule) -> list[str]:
    """The names of what steps after a pass, or why that cannot be."""
    nodes = graph.nodes
    graph.check()
    schedule.check(nodes)
    closing = {verb: _who(schedule.on_end, verb, graph) for verb in ("update", "update_covariance", "renew_prior")}
    names = [name for name in nodes if name in closing["update"]]
    if not names:
        raise ScheduleError(
            f"{schedule.name}: nothing steps after a pass, so that passes would be all the same; use pcnet.batch(), "
            "or a schedule of your own with closing=(act('move', 'parameter'), act('settle', 'parameter'))"
        )
    for name in names:
        for verb in ("update", "update_covariance", "renew_prior"):
            if name in _who(schedule.acts, verb, graph):
                raise ScheduleError(f"{schedule.name}: {name!r} is to {verb} within a pass and to step after it")
        if name in closing["renew_prior"]:
            raise ScheduleError(
                f"{schedule.name}: {name!r} is to carry after a pass, but the same data must not count as news again"
            )
        if name not in closing["update_covariance"]:
            raise ScheduleError(f"{schedule.name}: {name!r} moves after a pass; let it settle there too")
        if name not in _who(schedule.acts, "accumulate", graph):
            raise ScheduleError(f"{schedule.name}: {name!r} steps after a pass but never gathers; add act('gather', …)")
        nodes[name].check_batch(graph.above(nodes[name]))
    return names


def _who(acts: Iterable[Any], verb: str, graph: Graph) -> set[str]:
    return {name for act in acts if act.action == verb for name in act.names(graph.nodes)}


def _moved_by(graph: Graph, schedule: Schedule, estimator: ParameterEstimator) -> Graph:
    """The same graph, but that what steps after a pass does so by this estimator."""
    if not isinstance(estimator, ParameterEstimator):
        raise SettingError(f"estimator must be one of parameters, such as pcnet.estimators.Newton(), not {estimator!r}")
    nodes: dict[str, Any] = dict(graph.nodes)
    for name in _who(schedule.on_end, "update", graph):
        nodes[name] = dataclasses.replace(nodes[name], estimator=estimator)
    return graph.with_nodes(nodes)


def _raise(live: Session, first: Iterate) -> None:
    """Say what was wrong with the first pass where it diverged."""
    batch = len(first.feasible)
    incident = next(each for each in live.divergence_events if each.element < batch)
    of = f" (batch element {incident.element})" if batch > 1 else ""
    raise DivergenceError(
        f"{live.graph[incident.node].title} at observation {incident.observation} of the first pass{of}: "
        f"{incident.why}; a prior nearer to the truth, lower precisions, or log-precisions that move by "
        "Scoring() help, and on_divergence='stop' lets the others of a batch go on"
    )


def _text(values: Array) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[:6])
    return shown + (", …" if len(values) > 6 else "")
