"""Inversion of a batch of models and its summary: free action, scores against the truth, and final beliefs."""

from __future__ import annotations

import hashlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pcnet.engine.session import Session
from pcnet.errors import StudyError
from pcnet.model.graph import Graph
from pcnet.model.model import Model
from pcnet.model.schedule import Schedule
from pcnet.numerics.dispatch import DispatchMode
from pcnet.results.downsample import Array
from pcnet.results.recorder import Record
from pcnet.sweeps.batching import stack_models

Build = Callable[..., Any]  # a function of settings by name that returns a model, a graph, or a graph and its schedule

COVERAGE_TICKS = 500  # coverage is measured at about this many ticks, evenly spaced
INTERVAL_SDS = 2.0  # half-width of intervals in standard deviations
MEMORY_FACTOR = 1.8
"""Memory of a process over the peak of its tensors; 1.1 to 1.7 was measured for batches of various graphs."""


# --- data ------------------------------------------------------------------------------------------------------------
class Data(NamedTuple):
    """Observations (replicates, T, dim) by sensory node; truth by node, of the same shape or (dim,) for constants."""

    observations: dict[str, Array]
    truth: dict[str, Array]

    @property
    def replicates(self) -> int:
        return len(next(iter(self.observations.values())))

    @property
    def length(self) -> int:
        return int(next(iter(self.observations.values())).shape[1])

    def select(self, replicates: Sequence[int]) -> Data:
        """Data of some replicates."""
        return Data(
            {name: values[replicates] for name, values in self.observations.items()},
            {name: values[replicates] if values.ndim == 3 else values for name, values in self.truth.items()},
        )


def parse_data(observations: Any, truth: Mapping[str, Any], model: Model) -> Data:
    """Validate the observations and the truth given to `pcnet.sweep`."""
    if not isinstance(observations, Mapping):
        names = [name for name, node in model.graph.nodes.items() if node.observes]
        if len(names) != 1:
            raise StudyError(f"there are several sensory nodes; give a mapping from {', '.join(map(repr, names))}")
        observations = {names[0]: observations}
    if not isinstance(truth, Mapping):
        raise StudyError("truth must be a mapping from node names to true values")
    observed = {name: _array(f"observations of {name!r}", values, gaps=True) for name, values in observations.items()}
    observed = {name: values[None] if values.ndim == 2 else values for name, values in observed.items()}
    shapes = {values.shape[:2] for values in observed.values()}
    if any(values.ndim != 3 for values in observed.values()) or len(shapes) != 1:
        raise StudyError("observations must be (T, dim) or (replicates, T, dim), of the same length for all nodes")
    (replicates, length), *_ = shapes
    true = {}
    for name, given in truth.items():
        values = _array(f"truth of {name!r}", given)
        if values.ndim == 2:
            values = np.broadcast_to(values, (replicates, *values.shape))
        if values.ndim not in (1, 3) or (values.ndim == 3 and values.shape[:2] != (replicates, length)):
            raise StudyError(
                f"the truth of {name!r} has shape {tuple(np.shape(given))}; give (dim,) for a constant, (T, dim) or "
                f"(replicates, T, dim) with {replicates} replicates and T = {length}"
            )
        true[name] = values
    return Data(observed, true)


def _array(what: str, values: Any, gaps: bool = False) -> Array:
    """Real, finite numbers; gaps: NaN is allowed."""
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
        if np.iscomplexobj(array):
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise StudyError(f"{what} must be real numbers in a rectangular array") from None
    if not np.isfinite(array).any() or not (np.isfinite(array) | (gaps & np.isnan(array))).all():
        raise StudyError(f"{what} must not be empty and must be finite{', or NaN where missing' if gaps else ''}")
    return array


def fingerprint(arrays: Mapping[str, Array]) -> str:
    """Hash of named arrays."""
    found = hashlib.sha256()
    for name, values in sorted(arrays.items()):
        found.update(f"{name}{values.shape}".encode() + np.ascontiguousarray(values).tobytes())
    return found.hexdigest()


# --- inversion -------------------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """One batch of inversions: settings, and the index of the replicate (data set) of each."""

    build: Build
    settings: tuple[Mapping[str, Any], ...]
    replicates: tuple[int, ...]
    data: Data
    build_limit: float | None = None


class Outcome(NamedTuple):
    """Summary of one inversion; if it diverged, energies are NaN."""

    free_action: float
    accuracy: float
    complexity: float
    diverged_at: int | None  # index of the observation
    diverged_node: str | None
    scores: dict[str, dict[str, float]]  # by node: "mse", and "coverage", the share of truths within two sds
    beliefs: dict[str, dict[str, Any]]  # by node: final "mean" and "sd", as nested lists
    fallbacks: dict[str, int]
    seconds: float


class BuildTimeoutError(StudyError):
    """build did not return in time."""


def build_model(build: Build, settings: Mapping[str, Any], limit: float | None = None) -> Model:
    """Model of one setting; a graph without a schedule gets the one that fits its nodes.

    limit: seconds after which build has failed, with a `BuildTimeoutError`.
    """
    try:
        made = build(**settings) if limit is None else _within(limit, build, settings)
    except Exception as error:
        error.add_note(f"build was called with {dict(settings)}")
        raise
    if isinstance(made, Model):
        model = made
    else:
        graph, schedule = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(graph, Graph) or not isinstance(schedule, Schedule | None):
            what = "a model, a graph, or a graph and a schedule"
            raise StudyError(f"build must return {what}; for {dict(settings)} it returned {made!r}")
        model = Model(graph, schedule)
    batch = model.graph.batch_shape or model.schedule.batch_shape
    if batch:
        raise StudyError(
            f"build returned a model with batch dimensions {tuple(batch)} for {dict(settings)}; use single numbers in "
            "build: the sweep makes the batch"
        )
    return model


def _within(limit: float, build: Build, settings: Mapping[str, Any]) -> Any:
    """What build returns, if it does within a time limit. A call that hangs cannot be ended, and is left behind."""
    found: dict[str, Any] = {}

    def call() -> None:
        try:
            found["made"] = build(**settings)
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=call, daemon=True, name="pcnet build")
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        raise BuildTimeoutError(
            f"build did not return within {limit:g} s for {dict(settings)}; make it faster, or give build_limit=..."
        )
    if "error" in found:
        raise found["error"]
    return found["made"]


def invert(task: Task, report: Callable[[int], object] = lambda _: None) -> list[Outcome]:
    """Run a batch over all its observations; `report` is called with the number of ticks since its last call."""
    started = time.perf_counter()
    keys = [repr(settings) for settings in task.settings]  # several replicates may have the same settings
    distinct = dict(zip(keys, task.settings, strict=True))
    models = {key: build_model(task.build, each, task.build_limit) for key, each in distinct.items()}
    model = stack_models([models[key] for key in keys])
    which = torch.tensor(task.replicates)
    observations = {name: torch.as_tensor(values)[which] for name, values in task.data.observations.items()}
    moving = tuple(name for name, truth in task.data.truth.items() if truth.ndim > 1)
    record = Record(("mean",), nodes=moving) if moving else ()
    session = model.start(record=record, on_divergence="stop", screen=False).prepare(observations)
    scores = [Score(session, name, torch.as_tensor(values), which) for name, values in task.data.truth.items()]
    length = task.data.length
    stride = max(1, length // COVERAGE_TICKS)
    start = 0
    for end in [*range(1, length, stride), length]:  # coverage is measured after each of these blocks
        session.run({name: values[:, start:end] for name, values in observations.items()}, progress=False)
        recorded = session.take_recorded()
        for score in scores:
            score.update(recorded.get(f"{score.node}.mean"), slice(start, end), last=end == length)
        report(end - start)
        start = end
        if bool((session.diverged.at >= 0).all()):
            break
    report(length - start)
    return _outcomes(session, scores, len(task.settings), time.perf_counter() - started)


class Score:
    """Mean squared error and coverage of a node's belief; of a constant truth only the last belief counts."""

    def __init__(self, session: Session, node: str, truth: Tensor, which: Tensor) -> None:
        self.node = node
        self._session, self._truth, self._which = session, truth, which
        self._constant = truth.dim() == 1
        self._squares, self._covered = torch.zeros(2, len(which), dtype=torch.float64)
        self._ticks = self._measured = 0

    def update(self, means: Tensor | None, ticks: slice, last: bool) -> None:
        """Add the errors of a block of observations, and the coverage after it; means: (T, B, ...)."""
        if self._constant:
            if not last:
                return
            errors = (_value(self._session.mean(self.node)) - self._truth)[None]
        else:
            assert means is not None
            belief = means[:, :, 0] if means.dim() == 4 else means
            errors = belief - self._truth[self._which, ticks].movedim(1, 0)
        self._squares += (errors**2).mean(-1).sum(0)
        self._ticks += len(errors)
        sd = _value(self._session.sd(self.node))
        self._covered += (errors[-1].abs() <= INTERVAL_SDS * sd).double().mean(-1)
        self._measured += 1

    def values(self) -> list[dict[str, float]]:
        """Scores of each batch element; empty if all diverged before a constant could be compared."""
        if not self._ticks:
            return [{} for _ in self._squares]
        mse, coverage = (self._squares / self._ticks).tolist(), (self._covered / max(1, self._measured)).tolist()
        return [{"mse": m, "coverage": c} for m, c in zip(mse, coverage, strict=True)]


def _value(belief: Tensor) -> Tensor:
    """Value (B, dim) of a belief without its higher orders."""
    return belief[:, 0] if belief.dim() == 3 else belief


def _outcomes(session: Session, scores: list[Score], count: int, seconds: float) -> list[Outcome]:
    energies = torch.stack([session.free_action, session.total_accuracy, session.total_complexity], 1).tolist()
    at, node = session.diverged
    scored = {score.node: score.values() for score in scores}
    beliefs: dict[str, dict[str, list[Any]]] = {}
    for name, each in session.graph.nodes.items():
        quantities = [quantity for quantity in ("mean", "sd") if quantity in each.quantities]
        if quantities:
            beliefs[name] = {quantity: session.read(name, quantity).tolist() for quantity in quantities}
    fallbacks = {name: counts.tolist() for name, counts in session.fallbacks.items()}
    outcomes = []
    for i in range(count):
        used = {name: int(counts[i]) for name, counts in fallbacks.items()}
        if at[i] >= 0:
            lost = (math.nan, math.nan, math.nan, int(at[i]), str(node[i]))
            outcomes.append(Outcome(*lost, {}, {}, used, seconds / count))
            continue
        free_action, accuracy, complexity = energies[i]
        scores_of = {name: values[i] for name, values in scored.items()}
        final = {name: {quantity: v[i] for quantity, v in parts.items()} for name, parts in beliefs.items()}
        outcomes.append(Outcome(free_action, accuracy, complexity, None, None, scores_of, final, used, seconds / count))
    return outcomes


# --- memory ----------------------------------------------------------------------------------------------------------
def dry_run(model: Model, data: Data) -> int:
    """Run one observation, to find mismatches before any work is done; about how many bytes an inversion takes."""
    session = model.start(record=(), on_divergence="stop", screen=False, engine="eager")  # one tick: nothing to compile
    with PeakMemory() as peak:
        session.step({name: values[:1, 0] for name, values in data.observations.items()})
    for name, truth in data.truth.items():
        dim = _value(session.mean(name)).shape[-1]
        if truth.shape[-1] != dim:
            raise StudyError(f"the truth of {name!r} has {truth.shape[-1]} dimensions and its belief {dim}")
    return int(MEMORY_FACTOR * peak.bytes)


class PeakMemory(DispatchMode):
    """Context manager that measures the peak number of bytes of the tensors created within it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._current = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self._current += storage.nbytes()
                    self.bytes = max(self.bytes, self._current)
                    weakref.finalize(storage, self._release, storage._cdata)
        return made

    def _release(self, key: int) -> None:
        self._current -= self._sizes.pop(key, 0)
