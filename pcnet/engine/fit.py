"""Fitting to recorded data by repeated passes, until the free action converges.

In a pass, states run over all observations while parameters and precisions μ with priors N(η, P⁻¹) stay fixed and
accumulate gradients g and curvatures C of the errors. After it they take a Gauss–Newton step,
μ ← μ − (P + C)⁻¹(g + P(μ − η)), and the next pass starts anew from there, so that the same data do not count twice.

The objective is the free action of a pass, Σ_t F_t + ½(μ − η)ᵀP(μ − η). With a Kalman state that is
−log p(y | μ) − log p(μ) up to a constant. A step that does not lower it is taken back and halved. In the last pass, and
in its free action, the posterior has the covariance Σ = (P + C)⁻¹: with ½(log|P⁻¹| − log|Σ|) added, this is Laplace's
approximation of −log p(y), for comparing models.
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcnet.engine.session import Session
from pcnet.engine.smooth import SmoothingSession
from pcnet.errors import DivergenceError, GraphError, ObservationError, ResultError, ScheduleError, SettingError
from pcnet.model.model import Model, OnDivergence
from pcnet.model.protocols import FitsRecordedData
from pcnet.model.schedule import Act
from pcnet.numerics.estimators import ParameterEstimator
from pcnet.numerics.lbfgs import LBFGS, Iterate
from pcnet.numerics.trees import spans, tree_map
from pcnet.results.downsample import Array
from pcnet.results.recorder import Record
from pcnet.results.result import Interval, Result

Slopes = Literal["exact", "messages"]
"""Where the slopes of the free action come from: copies of a run with varied values, or messages."""


class Fit(NamedTuple):
    """The result of a fit. Arrays lead with the batch dimensions of the run, (...)."""

    result: Result  # the last pass, with the fitted values
    free_actions: Array  # the objective after each pass, (..., iterations); it never rises
    converged: Array  # whether the objective changed by less than the tolerance in the end, (...)
    iterations: Array  # number of passes, (...)
    backtracks: Array  # how often a step was taken back and halved, (...)
    means: Mapping[str, Array]  # fitted values by node, (..., n)
    covariances: Mapping[str, Array]  # their covariances by node, given the other nodes, (..., n, n)

    def mean(self, node: str) -> Array:
        return self.means[self._known(node)]

    def covariance(self, node: str) -> Array:
        return self.covariances[self._known(node)]

    def sd(self, node: str) -> Array:
        deviation: Array = np.sqrt(np.diagonal(self.covariance(node), axis1=-2, axis2=-1))
        return deviation

    def interval(self, node: str, probability: float = 0.95) -> Interval:
        """The central credible interval of the fitted values."""
        return Interval.normal(self.mean(node), self.sd(node), probability)

    def _known(self, node: str) -> str:
        if node not in self.means:
            raise ResultError(f"{node!r} was not fitted; fitted nodes: {', '.join(self.means)}")
        return node

    def __repr__(self) -> str:
        count, batch = int(self.converged.sum()), self.converged.shape
        one = "converged" if count else "not converged"
        converged = f"{count} of {self.converged.size} converged" if batch else one
        lines = [f"Fit of {self.result.observations} observations in {self.free_actions.shape[-1]} passes, {converged}"]
        if not batch:
            lines.append(f"  free action {self.free_actions[0]:.6g} → {self.free_actions[-1]:.6g}")
            for node, mean in self.means.items():
                lines.append(f"  {node}: {_text(mean)} (sd {_text(self.sd(node))})")
        return "\n".join(lines)


class Passes:
    """Passes over the same observations. The values that stay fixed during a pass are one vector (B, n)."""

    def __init__(self, model: Model, observations: Any, times: list[float] | None, bar: Any, **options: Any) -> None:
        self.names = _check(model)
        self.model, self.observations, self.times, self.bar = model, observations, times, bar
        self.options = options | {"screen": False}  # recorded data are fitted as they are
        session = Session(model, record=(), **options).prepare(observations)
        self.prior: dict[str, Any] = {name: session.state.nodes[name] for name in self.names}
        sizes = (state.mean.shape[1] for state in self.prior.values())
        self.parts = dict(zip(self.names, spans(sizes), strict=True))
        self.first = torch.cat([state.mean for state in self.prior.values()], 1)

    def run(
        self, states: Mapping[str, Any], copies: int | None = None, smooth: bool = False, **options: Any
    ) -> Session:
        """One pass that starts from these states, up to its last observation; smooth: with what a smoother needs."""
        given = self.options | options | {"warm_start": states, "copies": copies}
        session = SmoothingSession(self.model, **given) if smooth else Session(self.model, **given)
        session.on_progress = self.bar.update
        self.bar.reset(total=self.bar.total)
        session.run(self.observations, progress=False, times=self.times)
        self.bar.total = session.tick
        return session

    def evaluate(self, mean: Tensor, scales: Tensor | None) -> tuple[Iterate, Session]:
        """One pass at these values (B, n) with the update after it.

        scales: units (B, n) in which to vary them, to find slopes from the free actions of copies of the run; None for
        the slopes of messages.
        """
        batch, varied = len(mean), mean[None]
        if scales is not None:
            by = torch.finfo(mean.dtype).eps ** 0.2 * scales
            each = by.diag_embed().movedim(1, 0)
            varied = torch.cat([varied, mean + each, mean - each])
        session = self.run(self._states(varied), len(varied), record=(), on_divergence="stop")
        actions = session.free_action.view(-1, batch)
        if scales is not None:
            up, down = actions[1:].chunk(2)
            self._set_slopes(session, (up - down).mT / (2 * by))
        states: Mapping[str, Any] = session.state.nodes
        slopes = torch.cat([states[name].accumulated.gradient[:batch] for name in self.names], 1)
        session.finish()
        nodes = session.state.nodes
        after: dict[str, Any] = {name: tree_map(lambda part: part[:batch], nodes[name]) for name in self.names}
        able = torch.as_tensor(session.diverged.at == -1, device=mean.device).view(-1, batch)[0]
        step = torch.cat([state.mean for state in after.values()], 1) - mean
        precision = torch.zeros_like(step).diag_embed()
        for name, part in self.parts.items():
            precision[:, part, part] = after[name].precision
        return Iterate(actions[0], mean, step, able, slopes, precision, after), session

    def _states(self, means: Tensor) -> dict[str, Any]:
        """Priors with other means (copies, B, n), by node."""
        found = {}
        for name, prior in self.prior.items():
            copied = tree_map(lambda each: each.repeat(len(means), *(1,) * (each.dim() - 1)), prior)
            found[name] = copied._replace(mean=means[..., self.parts[name]].flatten(0, 1))
        return found

    def _set_slopes(self, session: Session, slopes: Tensor) -> None:
        """Replace accumulated gradients by these slopes (B, n), where they are finite."""
        changed = {}
        for name, part in self.parts.items():
            state: Any = session.state.nodes[name]
            slope, gradient = slopes[:, part], state.accumulated.gradient.clone()
            gradient[: len(slope)] = torch.where(torch.isfinite(slope), slope, gradient[: len(slope)])
            changed[name] = state._replace(accumulated=state.accumulated._replace(gradient=gradient))
        session.replace_nodes(changed)


def _scales(states: Iterable[Any]) -> Tensor:
    """Standard deviation of each value given the others, (B, n)."""
    return torch.cat([state.precision.diagonal(dim1=-2, dim2=-1) ** -0.5 for state in states], 1)


def fit(
    model: Model,
    observations: Any,
    *,
    max_iterations: int,
    tolerance: float,
    estimator: ParameterEstimator | None,
    slopes: Slopes,
    progress: bool | None,
    times: Iterable[float] | None,
    record: Record | Iterable[str] | None = None,
    on_divergence: OnDivergence = "raise",
    smooth: bool | int = False,
    screen: bool = False,
    **options: Any,
) -> Fit:
    """Passes until the free action converges; see `Model.fit`."""
    if type(max_iterations) is not int or max_iterations < 1:
        raise SettingError(f"max_iterations must be a whole number, 1 or more, not {max_iterations!r}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise SettingError(f"tolerance must be 0 or more, not {tolerance!r}")
    if on_divergence not in ("raise", "stop"):
        raise SettingError(f"on_divergence must be 'raise' or 'stop' for a fit, not {on_divergence!r}")
    if screen is not False:
        raise SettingError("a fit takes in all observations: leave out screen, and pass NaN for implausible values")
    if type(smooth) is not bool:
        raise SettingError(f"smooth must be True or False for a fit, not {smooth!r}")
    if slopes not in get_args(Slopes):
        raise SettingError(f"slopes must be 'exact' or 'messages', not {slopes!r}")
    if isinstance(observations, Iterator):
        raise ObservationError("observations can be read only once; give an array, or list(observations)")
    if times is not None and not isinstance(times, Iterable):
        raise ObservationError(f"times must be a number for each observation, not {times!r}")
    if estimator is not None:
        model = _with_estimator(model, estimator)
    hidden = not (sys.stderr.isatty() if progress is None else progress)
    with torch.inference_mode(), tqdm(disable=hidden, unit="obs", leave=False) as bar:
        passes = Passes(model, observations, None if times is None else list(times), bar, screen=False, **options)
        exact = slopes == "exact"
        bar.set_description("pass 1")
        first, session = passes.evaluate(passes.first, _scales(passes.prior.values()) if exact else None)
        if on_divergence == "raise" and not bool(first.feasible.all()):
            _raise(session, first)
        descent = LBFGS.init(first)
        actions = [descent.best.free_action]
        while len(actions) < max_iterations and bool(descent.active.any()):
            bar.set_description(f"pass {len(actions) + 1}, free action {float(actions[-1].nanmean()):.6g}")
            scales = _scales(descent.best.states.values()) if exact else None
            descent = descent.update(passes.evaluate(descent.candidate, scales)[0], tolerance, remember=exact)
            actions.append(descent.best.free_action)
        bar.set_description("last pass")
        best, states = descent.best.mean, descent.best.states.items()
        found = {name: state._replace(mean=best[:, passes.parts[name]]) for name, state in states}
        session = passes.run(found, smooth=smooth, record=record, on_divergence=on_divergence)
    shape = session.batch_shape
    return Fit(
        session.result(),
        torch.stack(actions, -1).reshape(*shape, -1).cpu().numpy(),
        descent.converged.reshape(shape).cpu().numpy(),
        descent.iterations.long().reshape(shape).cpu().numpy(),
        descent.backtracks.long().reshape(shape).cpu().numpy(),
        {name: session.mean(name).cpu().numpy() for name in passes.names},
        {name: session.read(name, "covariance").cpu().numpy() for name in passes.names},
    )


def _check(model: Model) -> list[str]:
    """The names of the nodes that are fitted; raises an error if the schedule does not fit them."""
    graph, schedule = model.graph, model.schedule
    nodes = graph.nodes
    graph.check()
    schedule.check(nodes)
    after = ("update", "update_covariance", "renew_prior")
    ending = {action: _takes(model, schedule.on_end, action) for action in after}
    names = [name for name in nodes if name in ending["update"]]
    if not names:
        raise ScheduleError(
            f"{schedule.name}: nothing is updated after a pass; use pcnet.batch(), or a schedule with "
            "on_end=(act('update', 'parameter'), act('update_covariance', 'parameter'))"
        )
    for name in names:
        for action in ending:
            if name in _takes(model, schedule.acts, action):
                raise ScheduleError(f"{schedule.name}: {name!r} takes {action!r} within a pass and is updated after it")
        if name in ending["renew_prior"]:
            raise ScheduleError(f"{schedule.name}: {name!r} must not renew its prior: the same data would count twice")
        if name not in ending["update_covariance"]:
            raise ScheduleError(f"{schedule.name}: add act('update_covariance', {name!r}) to on_end")
        if name not in _takes(model, schedule.acts, "accumulate"):
            raise ScheduleError(f"{schedule.name}: {name!r} accumulates nothing; add act('accumulate', {name!r})")
        node = nodes[name]
        if not isinstance(node, FitsRecordedData):
            raise GraphError(f"{node.title} cannot be updated after a pass; let it act at every observation")
        node.check_fit(graph.neighbours(node))
    return names


def _takes(model: Model, acts: Iterable[Act], action: str) -> set[str]:
    """The names of the nodes that take an action in these acts."""
    return {name for act in acts if act.action == action for name in act.names(model.graph.nodes)}


def _with_estimator(model: Model, estimator: ParameterEstimator) -> Model:
    """The same model, with this estimator for whatever is updated after a pass."""
    if not isinstance(estimator, ParameterEstimator):
        raise SettingError(f"estimator must be one of parameters, such as pcnet.estimators.Newton(), not {estimator!r}")
    nodes: dict[str, Any] = dict(model.graph.nodes)
    for name in _takes(model, model.schedule.on_end, "update"):
        nodes[name] = dataclasses.replace(nodes[name], estimator=estimator)
    return Model(model.graph.with_nodes(nodes), model.schedule)


def _raise(session: Session, first: Iterate) -> None:
    """Raise an error that says why the first pass diverged."""
    batch = len(first.feasible)
    event = next(each for each in session.divergence_events if each.element < batch)
    of = f" (batch element {event.element})" if batch > 1 else ""
    raise DivergenceError(
        f"{session.graph[event.node].title} at observation {event.observation} of the first pass{of}: {event.why}; "
        "use a prior nearer to the truth, lower precisions, or estimator=NoiseScoring() for log-precisions; "
        "on_divergence='stop' lets the other batch elements go on"
    )


def _text(values: Array) -> str:
    shown = ", ".join(f"{value:.4g}" for value in values[:6])
    return shown + (", …" if len(values) > 6 else "")
