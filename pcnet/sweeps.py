"""Sweeps: one model under many settings, as few large batches, spread over processes or machines, nothing lost."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from pydantic import ByteSize, TypeAdapter, ValidationError
from torch import Tensor
from tqdm import tqdm

from pcnet.batching import digest, form
from pcnet.errors import StudyError
from pcnet.graph import Model
from pcnet.inversion import Array, Build, Task, built, memory_of
from pcnet.result import package_version
from pcnet.store import Planned, Store, to_json
from pcnet.study import RESERVED, Source, Study
from pcnet.workers import choose, cores

Grid = Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]]
LARGEST = 512
"""Larger batches are hardly quicker, and more is lost with one that is interrupted."""
SMALLEST = 32
"""Batches are not cut below this for the sake of more processes."""


def sweep(
    build: Build,
    grid: Grid,
    observations: Any,
    file: str | Path | None = None,
    *,
    truth: Mapping[str, Any] | None = None,
    processes: int | None = None,
    scheduler: Any = None,
    memory: int | str = "2 GB",
    progress: bool | None = None,
) -> Study:
    """Invert a model under every setting of a grid, and keep what came out in a study.

    build: a function of settings by name that returns a graph, or a graph and its schedule; it is called with single
    values. Settings that only change numbers are run together, in one batch.
    grid: lists of values by name, all combinations of which are run; or the combinations themselves, a mapping each.
    observations: (T, dim) or (replicates, T, dim), or a mapping from sensory nodes to these.
    file: where the study is kept, an SQLite file; in memory unless given. If it exists the sweep goes on where it was
    interrupted, or adds what is new in the grid.
    truth: what is known of nodes, (T, dim) or (replicates, T, dim) over time, or (dim,) for constants; scored as "mse"
    and "coverage", the share of truth within two standard deviations.
    processes: as many as there are cores unless given. scheduler: the address of a Dask scheduler, or a client.
    memory: for all batches that are worked on at a time, beside some 0.3 GB a process.
    """
    settings = _settings(grid)
    models = [built(build, each) for each in settings]
    data = _data(observations, truth or {}, models[0])
    budget = _budget(processes, memory)
    path = None if file is None else Path(file)
    with _alone(path):
        store = Store(path, create=True)
        _check_origin(store, data)
        _plan(store, settings, models, data, budget)
        tasks = _tasks(store, build, data)
        total = sum(len(task.settings) * task.length for _, task in tasks.values())
        hidden = not (sys.stderr.isatty() if progress is None else progress)
        workers = choose(budget.processes, scheduler, len(tasks))
        with tqdm(total=total, disable=hidden or not tasks, unit="obs", unit_scale=True, desc="sweep") as bar:
            for batch, outcomes in workers.run({batch: task for batch, (_, task) in tasks.items()}, bar.update):
                store.finish(tasks[batch][0], outcomes)
    return Study(store, Source(build, data.observations))


# --- what is to be done ---------------------------------------------------------------------------------------------
def _settings(grid: Grid) -> list[dict[str, Any]]:
    """All settings of a grid, as JSON keeps them."""
    if isinstance(grid, Mapping):
        listed = {name: _values(name, values) for name, values in grid.items()}
        found = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
    else:
        found = [dict(each) for each in grid]
    if not found:
        raise StudyError("the grid is empty: give values for at least one setting")
    texts: dict[str, None] = {}
    for each in found:
        for name in each:
            if not isinstance(name, str) or name in RESERVED or "." in name:
                raise StudyError(f"a setting cannot be called {name!r}: the study has a column of that name; rename it")
        texts[_settings_json(each)] = None
    return [json.loads(text) for text in texts]


def _values(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise StudyError(f"the grid has {name} = {values!r}; give a list of values, also if there is only one")
    return list(values)


def _settings_json(settings: Mapping[str, Any]) -> str:
    """One text for the same settings, in whichever order they are given."""
    try:
        return json.dumps({name: _simple(value) for name, value in settings.items()}, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise StudyError(
            "settings must be finite numbers, texts, booleans, None or lists of these, so that a file can keep them; "
            f"got {dict(settings)!r}. For anything else, give it a name and look it up in build"
        ) from None


def _simple(value: Any) -> Any:
    """Numbers of numpy and torch as those of Python."""
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        return value.tolist()
    return value


def _plan(store: Store, settings: list[dict[str, Any]], models: list[Model], data: Data, work: Budget) -> None:
    """Add what is new to the study, in batches of models of equal form."""
    known = store.known()
    groups: dict[Hashable, list[tuple[Planned, Model]]] = {}
    for each, model in zip(settings, models, strict=True):
        text, mark, what = _settings_json(each), digest(model), _what_becomes_of_data(model)
        for replicate in range(data.replicates):
            before = known.get((text, replicate))
            if before is None:
                groups.setdefault(form(model), []).append((Planned(text, replicate, mark, what), model))
            elif before != mark:
                raise StudyError(
                    f"build makes another model of {text} than when the study was begun; use a new file, so that "
                    "results of different models are not mixed"
                )
    batches: list[list[Planned]] = []
    for group in groups.values():
        planned = sorted((each for each, _ in group), key=lambda each: each.replicate)
        largest = max(1, min(LARGEST, work.memory // (work.processes * memory_of(group[0][1], data.observations))))
        pieces = max(math.ceil(len(planned) / largest), min(work.processes, len(planned) // SMALLEST))
        bounds = np.linspace(0, len(planned), max(pieces, 1) + 1).round().astype(int)
        batches += [planned[low:high] for low, high in itertools.pairwise(bounds)]
    if len(batches) > 16 and len(batches) > sum(map(len, batches)) / 2:
        warnings.warn(
            f"{sum(map(len, batches))} inversions make {len(batches)} batches, which is slow: build seems to make a "
            "new flow or mapping each time; define it once, outside of build",
            stacklevel=3,
        )
    store.plan(batches)


def _what_becomes_of_data(model: Model) -> str:
    return to_json({name: node.data for name, node in model.graph.nodes.items() if node.observes})


def _tasks(store: Store, build: Build, data: Data) -> dict[int, tuple[list[int], Task]]:
    """The batches that are still open, with the numbers of their inversions; the largest first, to end together."""
    tasks = {}
    for batch, rows in store.open_batches().items():
        used = sorted({replicate for _, _, replicate in rows})
        task = Task(
            build,
            tuple(json.loads(text) for _, text, _ in rows),
            tuple(used.index(replicate) for _, _, replicate in rows),
            {name: values[used] for name, values in data.observations.items()},
            {name: values[used] if values.ndim == 3 else values for name, values in data.truth.items()},
        )
        tasks[batch] = [number for number, _, _ in rows], task
    return dict(sorted(tasks.items(), key=lambda item: -len(item[1][0])))


# --- what it is done on -----------------------------------------------------------------------------------------------
class Data(NamedTuple):
    """Observations (replicates, T, dim) by sensory node, and what is known of nodes: the same, or (dim,)."""

    observations: dict[str, Array]
    truth: dict[str, Array]

    @property
    def replicates(self) -> int:
        return len(next(iter(self.observations.values())))

    @property
    def fingerprint(self) -> str:
        found = hashlib.sha256()
        for part in (self.observations, self.truth):
            for name, values in sorted(part.items()):
                found.update(f"{name}{values.shape}".encode() + np.ascontiguousarray(values).tobytes())
        return found.hexdigest()


def _data(observations: Any, truth: Mapping[str, Any], model: Model) -> Data:
    if not isinstance(observations, Mapping):
        names = [name for name, node in model.graph.nodes.items() if node.observes]
        if len(names) != 1:
            raise StudyError(f"there are several sensory nodes; give a mapping from {', '.join(map(repr, names))}")
        observations = {names[0]: observations}
    seen = {name: _array(f"observations of {name!r}", values) for name, values in observations.items()}
    seen = {name: values[None] if values.ndim == 2 else values for name, values in seen.items()}
    shape = {values.shape[:2] for values in seen.values()}
    if any(values.ndim != 3 for values in seen.values()) or len(shape) != 1:
        raise StudyError("observations must be (T, dim) or (replicates, T, dim), of the same length for all nodes")
    (replicates, length), *_ = shape
    known = {}
    for name, given in truth.items():
        values = _array(f"truth of {name!r}", given)
        if values.ndim == 2:
            values = np.broadcast_to(values, (replicates, *values.shape))
        if values.ndim not in (1, 3) or (values.ndim == 3 and values.shape[:2] != (replicates, length)):
            raise StudyError(
                f"the truth of {name!r} has shape {np.shape(given)}; give (dim,) for a constant, (T, dim) or "
                f"(replicates, T, dim) with {replicates} replicates and T = {length}"
            )
        known[name] = values
    return Data(seen, known)


def _array(what: str, values: Any) -> Array:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise StudyError(f"{what} must be numbers in a rectangular array") from None
    if not array.size or not np.isfinite(array).all():
        raise StudyError(f"{what} must not be empty and must be finite")
    return array


def _check_origin(store: Store, data: Data) -> None:
    """Refuse to go on with a study of other observations; warn if it was begun by another version."""
    before = store.about("data")
    if before is not None and before != data.fingerprint:
        raise StudyError(f"{str(store.path)!r} is a study of other observations or another truth; use a new file")
    begun = store.about("version")
    if begun is not None and begun != package_version():
        warnings.warn(
            f"the study was begun by pcnet {begun}, this is {package_version()}; the column 'version' tells which "
            "inversion is whose",
            stacklevel=3,
        )
    if before is None:
        store.note("data", data.fingerprint)
        store.note("version", package_version())


class Budget(NamedTuple):
    """How many processes there are to be, and bytes for all of them together."""

    processes: int
    memory: int


def _budget(processes: int | None, memory: int | str) -> Budget:
    if processes is not None and (not isinstance(processes, int) or processes < 1):
        raise StudyError(f"processes must be a whole number, 1 or more, not {processes!r}")
    try:
        size = int(TypeAdapter(ByteSize).validate_python(memory))
    except ValidationError:
        raise StudyError(f"memory must be a number of bytes, or a text such as '2 GB', not {memory!r}") from None
    return Budget(processes or cores(), size)


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """Keep others from working on the same file meanwhile; the lock goes with the process, however that ends."""
    if path is None:
        yield
        return
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StudyError(
            f"another process is at work on {str(path)!r}; wait for it, or look at what is there by Study.open"
        ) from None
    except OSError as error:
        raise StudyError(f"cannot work on {str(path)!r}: {error}") from None
    try:
        yield
    finally:
        lock.release()
