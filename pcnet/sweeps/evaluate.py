"""A batch of inversions of models that differ in numbers, each boiled down to a few figures."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcnet.engine.session import Session
from pcnet.errors import StudyError
from pcnet.model.graph import Graph
from pcnet.model.model import Model
from pcnet.model.schedule import Schedule, odem
from pcnet.sweeps.batching import together
from pcnet.sweeps.memory import Peak

Array = NDArray[Any]
Build = Callable[..., Any]
"""A function of settings by name that returns a graph, or a graph and its schedule."""

LOOKS = 500
"""How many times, evenly over a run, its intervals are held against the truth."""
REACH = 2.0
"""Intervals reach this many standard deviations either way."""
REPORT = 20
"""How many observations pass between two reports of progress."""


class Data(NamedTuple):
    """Observations (replicates, T, dim) by sensory node; what is known of nodes: the same, or (dim,) of constants."""

    observations: dict[str, Array]
    truth: dict[str, Array]

    @property
    def replicates(self) -> int:
        return len(next(iter(self.observations.values())))

    @property
    def length(self) -> int:
        return int(next(iter(self.observations.values())).shape[1])

    def of(self, replicates: Sequence[int]) -> Data:
        """Some of the replicates."""
        return Data(
            {name: values[replicates] for name, values in self.observations.items()},
            {name: values[replicates] if values.ndim == 3 else values for name, values in self.truth.items()},
        )


def given_data(observations: Any, truth: Mapping[str, Any], model: Model) -> Data:
    """Observations and truth in any form that `pcnet.sweep` takes."""
    if not isinstance(observations, Mapping):
        names = [name for name, node in model.graph.nodes.items() if node.observes]
        if len(names) != 1:
            raise StudyError(f"there are several sensory nodes; give a mapping from {', '.join(map(repr, names))}")
        observations = {names[0]: observations}
    seen = {name: _array(f"observations of {name!r}", values, gaps=True) for name, values in observations.items()}
    seen = {name: values[None] if values.ndim == 2 else values for name, values in seen.items()}
    shape = {values.shape[:2] for values in seen.values()}
    if any(values.ndim != 3 for values in seen.values()) or len(shape) != 1:
        raise StudyError("observations must be (T, dim) or (replicates, T, dim), of the same length for all nodes")
    (replicates, length), *_ = shape
    known = {}
    if not isinstance(truth, Mapping):
        raise StudyError("truth must be a mapping from nodes to what is known of them")
    for name, given in truth.items():
        values = _array(f"truth of {name!r}", given)
        if values.ndim == 2:
            values = np.broadcast_to(values, (replicates, *values.shape))
        if values.ndim not in (1, 3) or (values.ndim == 3 and values.shape[:2] != (replicates, length)):
            raise StudyError(
                f"the truth of {name!r} has shape {tuple(np.shape(given))}; give (dim,) for a constant, (T, dim) or "
                f"(replicates, T, dim) with {replicates} replicates and T = {length}"
            )
        known[name] = values
    return Data(seen, known)


def _array(what: str, values: Any, gaps: bool = False) -> Array:
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
        if np.iscomplexobj(array):
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise StudyError(f"{what} must be real numbers in a rectangular array") from None
    if not np.isfinite(array).any() or not (np.isfinite(array) | (gaps & np.isnan(array))).all():
        missing = ", or NaN where they are missing" if gaps else ""
        raise StudyError(f"{what} must not be empty and must be finite{missing}")
    return array


def fingerprint(arrays: Mapping[str, Array]) -> str:
    """The same for the same numbers only."""
    found = hashlib.sha256()
    for name, values in sorted(arrays.items()):
        found.update(f"{name}{values.shape}".encode() + np.ascontiguousarray(values).tobytes())
    return found.hexdigest()


class Task(NamedTuple):
    """Settings to invert in one batch, each with the number of the replicate (data set) it sees."""

    build: Build
    settings: tuple[Mapping[str, Any], ...]
    replicates: tuple[int, ...]
    data: Data


class Outcome(NamedTuple):
    """What is kept of one inversion. Numbers are NaN where it diverged; `diverged_at` is then an observation.

    scores: "mse" and "coverage" (how often the truth is within two standard deviations) of nodes whose truth is known.
    beliefs: "mean" and "sd" of each node at the end, as nested lists.
    """

    free_action: float
    accuracy: float
    complexity: float
    diverged_at: int | None
    diverged_node: str | None
    scores: dict[str, dict[str, float]]
    beliefs: dict[str, dict[str, Any]]
    fallbacks: dict[str, int]
    seconds: float


def built(build: Build, settings: Mapping[str, Any]) -> Model:
    """The model of one setting; ODEM is its schedule unless it brings one."""
    try:
        made = build(**settings)
    except Exception as error:
        error.add_note(f"build was called with {dict(settings)}")
        raise
    graph, schedule = made if isinstance(made, tuple) and len(made) == 2 else (made, odem())
    if not isinstance(graph, Graph) or not isinstance(schedule, Schedule):
        raise StudyError(f"build must return a graph, or a graph and a schedule; for {dict(settings)} it gave {made!r}")
    if graph.batch_shape or schedule.batch_shape:
        raise StudyError(
            f"build returned a graph with batch dimensions {tuple(graph.batch_shape or schedule.batch_shape)} for "
            f"{dict(settings)}; give it single numbers: the sweep makes the batch"
        )
    return Model(graph, schedule)


def invert(task: Task, report: Callable[[int], object] = lambda _: None) -> list[Outcome]:
    """Run a batch to the end of its observations; `report` is told now and then how many more have passed."""
    begun = time.perf_counter()
    texts = [repr(settings) for settings in task.settings]  # the same settings may be there for several replicates
    models = {text: built(task.build, each) for text, each in dict(zip(texts, task.settings, strict=True)).items()}
    model = together([models[text] for text in texts])
    live = model.graph.start(model.schedule, record=(), on_divergence="stop")
    which = torch.tensor(task.replicates)
    observations = {name: torch.as_tensor(values) for name, values in task.data.observations.items()}
    scores = [Score(live, name, torch.as_tensor(values), which) for name, values in task.data.truth.items()]
    unreported = 0
    for tick in range(task.data.length):
        live.step({name: values[which, tick] for name, values in observations.items()})
        for score in scores:
            score.take(tick, task.data.length)
        unreported += 1
        if unreported == REPORT:
            report(unreported)
            unreported = 0
            if bool((live.diverged.at >= 0).all()):
                break
    report(task.data.length - live.tick + unreported)
    return _outcomes(live, scores, len(task.settings), time.perf_counter() - begun)


class Score:
    """How far a node's belief is from the truth, and how often the truth is within reach of it."""

    def __init__(self, live: Session, node: str, truth: Tensor, which: Tensor) -> None:
        self.node = node
        self._live, self._truth, self._which = live, truth, which
        self._over_time = truth.dim() == 3
        self._squared = torch.zeros(len(which), dtype=torch.float64)
        self._covered = torch.zeros(len(which), dtype=torch.float64)
        self._taken = self._looked = 0

    def take(self, tick: int, length: int) -> None:
        """Compare the belief after an observation; of what is constant, only the last one counts."""
        last = tick == length - 1
        if not self._over_time and not last:
            return
        truth = self._truth[self._which, tick] if self._over_time else self._truth
        mean = value_of(self._live.mean(self.node))
        self._squared += ((mean - truth) ** 2).mean(-1)
        self._taken += 1
        if last or tick % max(1, length // LOOKS) == 0:
            sd = value_of(self._live.sd(self.node))
            self._covered += ((mean - truth).abs() <= REACH * sd).double().mean(-1)
            self._looked += 1

    def figures(self) -> list[dict[str, float]]:
        if not self._taken:  # everything diverged before the end
            return [{} for _ in self._squared]
        mse, coverage = (self._squared / self._taken).tolist(), (self._covered / max(1, self._looked)).tolist()
        return [{"mse": m, "coverage": c} for m, c in zip(mse, coverage, strict=True)]


def value_of(belief: Tensor) -> Tensor:
    """The value (B, dim) itself, without its higher orders."""
    return belief[:, 0] if belief.dim() == 3 else belief


def _outcomes(live: Session, scores: list[Score], count: int, seconds: float) -> list[Outcome]:
    energies = [each.tolist() for each in (live.free_action, live.total_accuracy, live.total_complexity)]
    at, node = live.diverged
    found = {score.node: score.figures() for score in scores}
    beliefs: dict[str, dict[str, list[Any]]] = {}
    for name, each in live.graph.nodes.items():
        known = [quantity for quantity in ("mean", "sd") if quantity in each.quantities]
        if known:
            beliefs[name] = {quantity: live.read(name, quantity).tolist() for quantity in known}
    fallbacks = {name: counts.tolist() for name, counts in live.fallbacks.items()}
    outcomes = []
    for i in range(count):
        lost = bool(at[i] >= 0)
        free_action, accuracy, complexity = (math.nan if lost else energy[i] for energy in energies)
        outcomes.append(
            Outcome(
                free_action,
                accuracy,
                complexity,
                int(at[i]) if lost else None,
                str(node[i]) if lost else None,
                {} if lost else {name: figures[i] for name, figures in found.items()},
                {} if lost else {name: {q: v[i] for q, v in parts.items()} for name, parts in beliefs.items()},
                {name: int(counts[i]) for name, counts in fallbacks.items()},
                seconds / count,
            )
        )
    return outcomes


def rehearse(model: Model, data: Data) -> int:
    """Take in one observation, so that what does not fit is refused before any work is done.

    Returns about how many bytes one inversion takes within a batch.
    """
    live = model.graph.start(model.schedule, record=(), on_divergence="stop")
    with Peak() as peak:
        live.step({name: values[:1, 0] for name, values in data.observations.items()})
    for name, truth in data.truth.items():
        dim = value_of(live.mean(name)).shape[-1]
        if truth.shape[-1] != dim:
            raise StudyError(f"the truth of {name!r} has {truth.shape[-1]} dimensions and its belief {dim}")
    return int(SLACK * peak.bytes)


SLACK = 1.5
"""What a process takes for tensors, over what these need; measured as 1.1 to 1.3 for batches of various graphs."""
