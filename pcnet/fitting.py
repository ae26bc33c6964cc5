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
import sys
from collections.abc import Iterable, Iterator, Mapping
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcnet import plan
from pcnet.errors import DivergenceError, ObservationError, ResultError, ScheduleError, SettingError
from pcnet.graph import Graph
from pcnet.movers import ParameterMover
from pcnet.node import merge
from pcnet.record import Record
from pcnet.result import Array, Interval, Result
from pcnet.runner import Live
from pcnet.schedule import Schedule

HALVINGS = 10
"""A step that does not lower the free action is halved so many times before it is given up."""


class Fit(NamedTuple):
    """What repeated passes have found. Arrays lead with the batch dimensions of the run, (...)."""

    result: Result
    """The last pass, with what was found."""
    free_actions: Array
    """What is minimised, after each pass; (..., passes). It never rises: what would raise it is taken back."""
    settled: Array
    """Whether it changed by less than the tolerance in the end; (...)."""
    passes: Array
    """How many passes it took; (...)."""
    halved: Array
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
        count, batch = int(self.settled.sum()), self.settled.shape
        if batch:
            settled = f"{count} of {self.settled.size} settled"
        else:
            settled = "settled" if count else "not settled"
        lines = [f"Fit of {self.result.observations} observations in {self.free_actions.shape[-1]} passes, {settled}"]
        if not batch:
            lines.append(f"  free action {self.free_actions[0]:.6g} → {self.free_actions[-1]:.6g}")
            for node, mean in self.means.items():
                lines.append(f"  {node}: {_text(mean)} (sd {_text(self.sd(node))})")
        return "\n".join(lines)


class Stand(NamedTuple):
    """Where a pass stood and what it led to: its free action (B,); by node the mean (B, n), the step from there (B, n)
    and the belief after it. And which batch elements can take that step, (B,)."""

    action: Tensor
    means: dict[str, Tensor]
    steps: dict[str, Tensor]
    beliefs: dict[str, Any]
    able: Tensor

    def where(self, chosen: Tensor, other: Stand) -> Stand:
        """This one for the chosen batch elements (B,), and the other for the rest."""
        return Stand(
            torch.where(chosen, self.action, other.action),
            {name: torch.where(chosen[:, None], mean, other.means[name]) for name, mean in self.means.items()},
            {name: torch.where(chosen[:, None], step, other.steps[name]) for name, step in self.steps.items()},
            {name: merge(chosen, belief, other.beliefs[name]) for name, belief in self.beliefs.items()},
            torch.where(chosen, self.able, other.able),
        )


class Search(NamedTuple):
    """How far the search for a minimum has got: the best stand, and for each batch element (B,) which share of its step
    is to be tried next, whether it goes on, whether it has settled, its passes, and how often a step was halved."""

    best: Stand
    share: Tensor
    going: Tensor
    settled: Tensor
    passes: Tensor
    halved: Tensor

    @classmethod
    def begin(cls, first: Stand) -> Search:
        one, going = torch.ones_like(first.action), first.able & torch.isfinite(first.action)
        return cls(first, one, going, torch.zeros_like(going), one, torch.zeros_like(one))

    def next_means(self) -> dict[str, Tensor]:
        share = torch.where(self.going, self.share, 0.0)[:, None]
        return {name: mean + share * self.best.steps[name] for name, mean in self.best.means.items()}

    def judge(self, tried: Stand, tolerance: float) -> Search:
        """Take the step where it has lowered the free action, halve it where it has not, and stop where it is small."""
        change = tried.action - self.best.action
        better = self.going & (change < 0)  # what is not finite is no better
        worse = self.going & ~better
        settled = self.going & (change.abs() <= tolerance * self.share)
        best = tried.where(better, self.best)
        share = torch.where(better, (2 * self.share).clamp_max(1.0), self.share / 2)
        given_up = worse & (share < 0.5**HALVINGS)
        return Search(
            best,
            torch.where(self.going, share, self.share),
            self.going & ~settled & ~given_up & best.able,
            self.settled | settled,
            self.passes + self.going,
            self.halved + (worse & ~settled),
        )


class Passes:
    """Runs over the same observations, as often as they are asked for."""

    def __init__(
        self, graph: Graph, schedule: Schedule, observations: Any, times: list[float] | None, **options: Any
    ) -> None:
        self.graph, self.schedule, self.observations, self.times = graph, schedule, observations, times
        self.options = options
        self.names = _check(graph, schedule)

    def run(self, beliefs: Mapping[str, Any], bar: Any, **options: Any) -> Live:
        """One pass that begins with these beliefs, up to its last observation."""
        live = Live(self.graph, self.schedule, **self.options, **options)
        live.stand(beliefs)
        live.watchers.append(lambda *_: bar.update())
        bar.reset(total=bar.total)
        live.run(self.observations, progress=False, times=self.times)
        bar.total = live.tick
        return live

    def stand(self, beliefs: Mapping[str, Any], bar: Any) -> tuple[Stand, Live, dict[str, Any]]:
        """One pass with its closing: where it stood, the run, and the beliefs that it began with."""
        live = self.run(beliefs, bar, record=(), on_divergence="stop")
        action = live.free_action.reshape(-1)
        before = {name: live.local(name).belief for name in self.names}
        live.close()
        after = {name: live.local(name).belief for name in self.names}
        able = torch.as_tensor(live.diverged.at == -1, device=action.device).reshape(-1)
        means = {name: belief.mean for name, belief in before.items()}
        steps = {name: belief.mean - means[name] for name, belief in after.items()}
        return Stand(action, means, steps, after, able), live, before


def fit(
    graph: Graph,
    observations: Any,
    schedule: Schedule,
    *,
    passes: int,
    tolerance: float,
    mover: ParameterMover | None,
    record: Record | Iterable[str] | None,
    dtype: torch.dtype,
    device: torch.device,
    threads: int | None,
    on_divergence: Literal["raise", "stop"],
    progress: bool | None,
    times: Iterable[float] | None,
) -> Fit:
    """Passes until the free action settles; see `Graph.fit`."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise SettingError(f"passes must be a whole number, 1 or more, not {passes!r}")
    if not tolerance >= 0:
        raise SettingError(f"tolerance must be 0 or more, not {tolerance!r}")
    if on_divergence not in ("raise", "stop"):
        raise SettingError(f"on_divergence must be 'raise' or 'stop' for passes, not {on_divergence!r}")
    if isinstance(observations, Iterator):
        raise ObservationError(
            f"observations are read once for each pass, and a {type(observations).__name__} can be read only once: "
            "give an array, or a list: list(observations)"
        )
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"schedule must be a Schedule, such as pcnet.offline(), not {schedule!r}")
    if mover is not None:
        graph = _moved_by(graph, schedule, mover)
    every = Passes(
        graph,
        schedule,
        observations,
        None if times is None else list(times),
        dtype=dtype,
        device=device,
        threads=threads,
    )
    hidden = not (sys.stderr.isatty() if progress is None else progress)
    with torch.inference_mode(), tqdm(disable=hidden, unit="obs", desc="pass 1", leave=False) as bar:
        first, live, prior = every.stand({}, bar)
        if on_divergence == "raise" and live.incidents:
            _raise(live)
        search = Search.begin(first)
        actions = [search.best.action]
        while len(actions) < passes and bool(search.going.any()):
            bar.set_description(f"pass {len(actions) + 1}, free action {float(search.best.action.nanmean()):.6g}")
            stand = {name: prior[name]._replace(mean=mean) for name, mean in search.next_means().items()}
            search = search.judge(every.stand(stand, bar)[0], tolerance)
            actions.append(search.best.action)
        bar.set_description("last pass")
        found = {
            name: belief._replace(mean=search.best.means[name]) for name, belief in search.best.beliefs.items()
        }
        live = every.run(found, bar, record=record, on_divergence=on_divergence)
    shape = live.batch_shape
    return Fit(
        live.result(),
        torch.stack(actions, -1).reshape(*shape, -1).cpu().numpy(),
        *(each.reshape(shape).cpu().numpy() for each in (search.settled, search.passes.long(), search.halved.long())),
        {name: live.mean(name).cpu().numpy() for name in every.names},
        {name: live.read(name, "covariance").cpu().numpy() for name in every.names},
    )


def _check(graph: Graph, schedule: Schedule) -> list[str]:
    """The names of what steps after a pass, or why that cannot be."""
    nodes = graph.nodes
    graph.check()
    plan.check(schedule, nodes)
    closing = {verb: _who(schedule.closing, verb, graph) for verb in ("move", "settle", "carry")}
    names = [name for name in nodes if name in closing["move"]]
    if not names:
        raise ScheduleError(
            f"{schedule.name}: nothing steps after a pass, so that passes would be all the same; use pcnet.offline(), "
            "or a schedule of your own with closing=(act('move', 'parameter'), act('settle', 'parameter'))"
        )
    for name in names:
        for verb in ("move", "settle", "carry"):
            if name in _who(schedule.acts, verb, graph):
                raise ScheduleError(f"{schedule.name}: {name!r} is to {verb} within a pass and to step after it")
        if name in closing["carry"]:
            raise ScheduleError(
                f"{schedule.name}: {name!r} is to carry after a pass, but the same data must not count as news again"
            )
        if name not in closing["settle"]:
            raise ScheduleError(f"{schedule.name}: {name!r} moves after a pass; let it settle there too")
        if name not in _who(schedule.acts, "gather", graph):
            raise ScheduleError(f"{schedule.name}: {name!r} steps after a pass but never gathers; add act('gather', …)")
        nodes[name].check_passes(graph.above(nodes[name]))
    return names


def _who(acts: Iterable[Any], verb: str, graph: Graph) -> set[str]:
    return {name for act in acts if act.verb == verb for name in plan.who_acts(act, graph.nodes)}


def _moved_by(graph: Graph, schedule: Schedule, mover: ParameterMover) -> Graph:
    """The same graph, but that what steps after a pass does so by this mover."""
    if not isinstance(mover, ParameterMover):
        raise SettingError(f"mover must be one of parameters, such as pcnet.movers.Newton(), not {mover!r}")
    who = _who(schedule.closing, "move", graph)
    return graph.with_nodes(
        {name: dataclasses.replace(node, mover=mover) if name in who else node for name, node in graph.nodes.items()}
    )


def _raise(live: Live) -> None:
    incident = live.incidents[0]
    of = f" (batch element {incident.element})" if live.batch_shape else ""
    raise DivergenceError(
        f"{live.graph[incident.node].title} at observation {incident.observation} of the first pass{of}: {incident.why}; "
        "a prior nearer to the truth or lower precisions help, or on_divergence='stop' for the others of a batch"
    )


def _text(values: Array) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[:6])
    return shown + (", …" if len(values) > 6 else "")
