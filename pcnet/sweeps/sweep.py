"""Sweeps: one model under many settings, as few large batches, spread over processes or machines, nothing lost."""

from __future__ import annotations

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

from pcnet.errors import StudyError
from pcnet.model.digest import digest
from pcnet.model.model import Model
from pcnet.results.result import package_version
from pcnet.sweeps.batching import form
from pcnet.sweeps.evaluate import Build, Data, Task, built, fingerprint, given_data, rehearse
from pcnet.sweeps.store import Planned, Store, to_json
from pcnet.sweeps.study import RESERVED, Source, Study
from pcnet.sweeps.workers import choose, cores

Grid = Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]]
LARGEST = 768
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
    observations: (T, dim) or (replicates, T, dim), or a mapping from sensory nodes to these; NaN where missing.
    file: where the study is kept, an SQLite file; in memory unless given. If it exists the sweep goes on where it was
    interrupted, or adds what is new in the grid.
    truth: what is known of nodes, (T, dim) or (replicates, T, dim) over time, or (dim,) for constants; scored as "mse"
    and "coverage", the share of truth within two standard deviations.
    processes: as many as there are cores unless given. scheduler: the address of a Dask scheduler, or a client; then
    processes says for how many workers to cut batches. A worker does one batch at a time, whatever its threads.
    memory: for all batches that are worked on at a time, beside some 0.3 GB a process.
    """
    if not callable(build):
        raise StudyError(f"build must be a function of settings, not {type(build).__name__}")
    settings = _settings(grid)
    data = given_data(observations, {} if truth is None else truth, built(build, settings[0]))
    budget = _budget(processes, memory)
    path = None if file is None else Path(file)
    if path is not None and not path.parent.is_dir():
        raise StudyError(f"there is no folder {str(path.parent)!r} for a study")
    with _alone(path), _opened(path) as store:
        _check_origin(store, data)
        batches = _batches(store, build, settings + _begun(store, settings), data, budget)
        _note_origin(store, data)
        store.plan(batches)
        tasks = _tasks(store, build, data)
        total = sum(len(task.settings) * data.length for _, task in tasks.values())
        hidden = not (sys.stderr.isatty() if progress is None else progress)
        workers = choose(budget.processes, scheduler, len(tasks))
        with tqdm(total=total, disable=hidden or not tasks, unit="obs", unit_scale=True, desc="sweep") as bar:
            for batch, outcomes in workers.run({batch: task for batch, (_, task) in tasks.items()}, bar.update):
                store.finish(tasks[batch][0], outcomes)
    return Study(store, Source(build, data))


# --- what is to be done ---------------------------------------------------------------------------------------------
def _settings(grid: Grid) -> list[dict[str, Any]]:
    """All settings of a grid, as JSON keeps them."""
    if isinstance(grid, Mapping):
        listed = {name: _values(name, values) for name, values in grid.items()}
        found: list[Any] = [dict(zip(listed, values, strict=True)) for values in itertools.product(*listed.values())]
    else:
        found = list(grid) if isinstance(grid, Iterable) else [grid]
    if not all(isinstance(each, Mapping) for each in found):
        raise StudyError("the grid must be lists of values by name, or a list of mappings from names to values")
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


def _begun(store: Store, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings of an earlier grid that were left open: they are finished too, by the same build or not at all."""
    here = {_settings_json(each) for each in settings}
    texts = dict.fromkeys(text for rows in store.open_batches().values() for _, text, _ in rows)
    return [json.loads(text) for text in texts if text not in here]


def _batches(
    store: Store, build: Build, settings: list[dict[str, Any]], data: Data, budget: Budget
) -> list[list[Planned]]:
    """What is new to the study, in batches of models of equal form."""
    known = store.known()
    groups: dict[Hashable, tuple[Model, list[Planned]]] = {}
    for each in settings:
        model = built(build, each)
        text, mark, what = _settings_json(each), digest(model), _what_becomes_of_data(model)
        for replicate in range(data.replicates):
            if known.get((text, replicate), mark) != mark:
                raise StudyError(
                    f"build makes another model of {text} than when the study was begun; use a new file, so that "
                    "results of different models are not mixed"
                )
        new = [replicate for replicate in range(data.replicates) if (text, replicate) not in known]
        if new:
            group = groups.setdefault(form(model), (model, []))[1]
            group += [Planned(text, replicate, mark, what) for replicate in new]
    batches: list[list[Planned]] = []
    for model, group in groups.values():
        planned = sorted(group, key=lambda each: each.replicate)
        largest = max(1, min(LARGEST, budget.memory // (budget.processes * rehearse(model, data))))
        pieces = max(math.ceil(len(planned) / largest), min(budget.processes, len(planned) // SMALLEST))
        bounds = np.linspace(0, len(planned), max(pieces, 1) + 1).round().astype(int)
        batches += [planned[low:high] for low, high in itertools.pairwise(bounds)]
    if len(groups) > 16 and len(groups) > sum(map(len, batches)) / 2:
        warnings.warn(
            f"{sum(map(len, batches))} inversions make {len(groups)} batches, which is slow: build seems to make a "
            "new flow or mapping each time; define it once, outside of build",
            stacklevel=3,
        )
    return batches


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
            data.of(used),
        )
        tasks[batch] = [number for number, _, _ in rows], task
    return dict(sorted(tasks.items(), key=lambda item: -len(item[1][0])))


# --- what it is done on -----------------------------------------------------------------------------------------------
def _check_origin(store: Store, data: Data) -> None:
    """Refuse to go on with a study of other observations; warn if it was begun by another version."""
    for what, values in data._asdict().items():
        if store.about(what) not in (None, fingerprint(values)):
            raise StudyError(
                f"{str(store.path)!r} is a study of other observations; use a new file"
                if what == "observations"
                else f"{str(store.path)!r} was begun with another truth; use a new file, since scores would not compare"
            )
    begun = store.about("version")
    if begun not in (None, package_version()):
        warnings.warn(
            f"the study was begun by pcnet {begun}, this is {package_version()}; the column 'version' tells which "
            "inversion is whose",
            stacklevel=3,
        )


def _note_origin(store: Store, data: Data) -> None:
    if store.about("version") is None:
        for what, values in data._asdict().items():
            store.note(what, fingerprint(values))
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
def _opened(path: Path | None) -> Iterator[Store]:
    """A study's file that stays open, unless the sweep fails."""
    store = Store(path, create=True)
    try:
        yield store
    except BaseException:
        store.close()
        raise


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """Keep others from working on the same file meanwhile; the lock goes with the process, however that ends."""
    if path is None:
        yield
        return
    lock = FileLock(f"{path.resolve()}.lock")
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
