"""Sweeps: inversions of a model under many settings, in large batches, on several processes or machines."""

import inspect
import itertools
import json
import math
import sys
import threading
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from pydantic import ByteSize, TypeAdapter, ValidationError
from torch import Tensor
from tqdm import tqdm

from pcnet.errors import StudyError
from pcnet.files import check_target, explain
from pcnet.model.digest import digest
from pcnet.model.model import Model
from pcnet.results.result import package_version
from pcnet.sweeps.batching import batch_key
from pcnet.sweeps.evaluate import Build, BuildTimeoutError, Data, Task, build_model, dry_run, fingerprint, parse_data
from pcnet.sweeps.store import Planned, Store, to_json
from pcnet.sweeps.study import RESERVED, Study
from pcnet.sweeps.workers import choose_workers, cores

Grid = Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]]
MAX_BATCH = 768  # larger batches are hardly faster, and an interruption loses more
MIN_BATCH = 32  # batches are not split below this size to use more processes


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
    build_limit: float = 60.0,
) -> Study:
    """Invert a model under every setting of a grid and store the outcomes in a study.

    Settings that change only numbers run together in one batch. An existing file is continued: finished inversions are
    kept, and new settings are added.

    Args:
        build: Function of settings by name that returns a model, a graph, or a graph and its schedule. It is called
            with single values.
        grid: Lists of values by name, of which all combinations are run; or a list of combinations, a mapping each.
        observations: (T, dim) or (replicates, T, dim), or a mapping from sensory nodes to these; NaN where missing.
        file: SQLite file of the study; in memory by default.
        truth: True values by node: (T, dim) or (replicates, T, dim) over time, or (dim,) for constants. They are scored
            as "mse" and "coverage", the share of true values within two standard deviations.
        processes: Number of processes; the number of cores by default. With a scheduler: the number of workers.
        scheduler: Address of a Dask scheduler, or a Dask client. A worker runs one batch at a time.
        memory: Memory of all concurrent batches, such as "2 GB", besides about 0.3 GB per process.
        progress: Show a progress bar; by default if standard error is a terminal.
        build_limit: Seconds that a call of build may take. A setting for which build takes longer or raises an error
            has the status "failed", with the reason in the column "error"; another sweep tries it again.
    """
    if not callable(build) or isinstance(build, Model):
        raise StudyError(
            f"build must be a function of settings, not {type(build).__name__}: "
            "def build(sd): return adaptive_filter(..., parameter_sd=sd), with the grid {'sd': [0.1, 1.0]}"
        )
    if isinstance(build_limit, bool) or not isinstance(build_limit, (int, float)) or not build_limit > 0:
        raise StudyError(f"build_limit must be a number of seconds, not {build_limit!r}")
    settings = _settings(grid)
    _check_names(build, settings[0])
    models = _Models(build, min(float(build_limit), threading.TIMEOUT_MAX))
    data = parse_data(observations, {} if truth is None else truth, models.first(settings))
    processes, bytes_per_process = _budget(processes, memory)
    path = None if file is None else Path(file)
    if path is not None:
        check_target(path, StudyError)
    with _exclusive(path), _opened(path) as store:
        _check_origin(store, data)
        settings += _unfinished(store, settings)
        batches, failed = _batches(store, models, settings, data, processes, bytes_per_process)
        _note_origin(store, data)
        store.plan(batches, failed)
        tasks = _tasks(store, models, data)
        total = sum(len(task.settings) * data.length for _, task in tasks.values())
        hidden = not (sys.stderr.isatty() if progress is None else progress)
        run = choose_workers(processes, scheduler, len(tasks))
        with tqdm(total=total, disable=hidden or not tasks, unit="obs", unit_scale=True, desc="sweep") as bar:
            for batch, outcomes in run({batch: task for batch, (_, task) in tasks.items()}, bar.update):
                store.finish(tasks[batch][0], outcomes)
    return Study(store, build, data)


# --- settings --------------------------------------------------------------------------------------------------------
def _settings(grid: Grid) -> list[dict[str, Any]]:
    """All distinct settings of a grid, as JSON stores them."""
    if isinstance(grid, Mapping):
        values = {name: _values(name, each) for name, each in grid.items()}
        combinations: list[Any] = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    else:
        combinations = list(grid) if isinstance(grid, Iterable) else [grid]
    if not all(isinstance(each, Mapping) for each in combinations):
        raise StudyError("the grid must be lists of values by name, or a list of mappings from names to values")
    if not combinations:
        raise StudyError("the grid is empty: give values for at least one setting")
    for name in itertools.chain.from_iterable(combinations):
        if not isinstance(name, str) or name in RESERVED or "." in name:
            raise StudyError(f"a setting cannot be called {name!r}: the study has such a column; rename the setting")
    return [json.loads(text) for text in dict.fromkeys(map(_settings_json, combinations))]


def _check_names(build: Build, settings: Mapping[str, Any]) -> None:
    """Raise `StudyError` unless build takes the settings of a grid."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise StudyError(
            f"build takes {', '.join(signature.parameters) or 'nothing'}, and the grid has {', '.join(settings)}: "
            f"{error}; use the same names in both"
        ) from None


def _values(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise StudyError(f"the grid has {name} = {values!r}; give a list of values, even for a single value")
    return list(values)


def _settings_json(settings: Mapping[str, Any]) -> str:
    """Canonical text of settings, independent of their order."""
    plain = {k: v.tolist() if isinstance(v, (np.ndarray, np.generic, Tensor)) else v for k, v in settings.items()}
    try:
        return json.dumps(plain, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise StudyError(
            "settings must be finite numbers, texts, booleans, None or lists of these, so that they can be stored; "
            f"got {dict(settings)!r}. Give other objects a name and look it up in build"
        ) from None


def _unfinished(store: Store, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Unfinished settings of earlier grids; they are finished too, if `build` still makes the same models."""
    given = {_settings_json(each) for each in settings}
    texts = dict.fromkeys(text for rows in store.open_batches().values() for _, text, _ in rows)
    return [json.loads(text) for text in texts if text not in given]


class _Models:
    """The models that build makes, and the reasons where it makes none."""

    def __init__(self, build: Build, limit: float) -> None:
        self.build, self.limit = build, limit
        self._first: dict[str, Model | Exception] = {}

    def of(self, settings: Mapping[str, Any]) -> Model | Exception:
        """The model of a setting, or the error of build."""
        known = self._first.pop(_settings_json(settings), None)  # kept for one use: models may be large
        if known is not None:
            return known
        try:
            return build_model(self.build, settings, self.limit)
        except Exception as error:
            return error

    def first(self, settings: list[dict[str, Any]]) -> Model:
        """The first model that can be made; the first error if there is none."""
        for each in settings:
            made = self._first[_settings_json(each)] = self.of(each)
            if isinstance(made, Model):
                return made
            if isinstance(made, BuildTimeoutError):
                break  # others would take as long
        raise next(error for error in self._first.values() if isinstance(error, Exception))


# --- batches ---------------------------------------------------------------------------------------------------------
def _batches(
    store: Store, models: _Models, settings: list[dict[str, Any]], data: Data, processes: int, bytes_per_process: int
) -> tuple[list[list[Planned]], dict[Planned, str]]:
    """New inversions in batches of models with equal keys; and those that cannot be built, with the reason."""
    known, failed = store.digests(), dict[Planned, str]()
    groups: dict[Hashable, tuple[Model, list[Planned]]] = {}
    for each in settings:
        model, text = models.of(each), _settings_json(each)
        if isinstance(model, Exception):
            why = f"{type(model).__name__}: {model}"
            if any((text, replicate) in known for replicate in range(data.replicates)):
                raise StudyError(f"build no longer makes a model of {text}, which is part of the study: {why}")
            failed |= {Planned(text, replicate, "", "{}"): why for replicate in range(data.replicates)}
            continue
        mark = digest(model)
        processing = to_json({name: node.data for name, node in model.graph.nodes.items() if node.observes})
        for replicate in range(data.replicates):
            if known.get((text, replicate), mark) != mark:
                raise StudyError(
                    f"build makes another model of {text} than when the study was started; use a new file, so that "
                    "results of different models are not mixed"
                )
            if (text, replicate) not in known:
                planned = groups.setdefault(batch_key(model), (model, []))[1]
                planned.append(Planned(text, replicate, mark, processing))
    batches: list[list[Planned]] = []
    for model, planned in groups.values():
        planned.sort(key=lambda each: each.replicate)
        largest = max(1, min(MAX_BATCH, bytes_per_process // dry_run(model, data)))
        count = max(math.ceil(len(planned) / largest), min(processes, len(planned) // MIN_BATCH), 1)
        bounds = np.linspace(0, len(planned), count + 1).round().astype(int)
        batches += [planned[low:high] for low, high in itertools.pairwise(bounds)]
    total = sum(map(len, batches))
    if len(groups) > 16 and len(groups) > total / 2:
        warnings.warn(
            f"{total} inversions make {len(groups)} batches, which is slow: build seems to create a new flow or "
            "mapping each time; define it once, outside of build",
            stacklevel=3,
        )
    if failed:
        first, why = next(iter(failed.items()))
        warnings.warn(f"build failed for {len(failed)} inversions, first for {first.settings}: {why}", stacklevel=3)
    return batches, failed


def _tasks(store: Store, models: _Models, data: Data) -> dict[int, tuple[list[int], Task]]:
    """Inversion ids and task of each open batch; the largest first, so that workers finish at about the same time."""
    tasks = {}
    for batch, rows in store.open_batches().items():
        ids, texts, replicates = zip(*rows, strict=True)
        used = sorted(set(replicates))
        settings = tuple(json.loads(text) for text in texts)
        which = tuple(map(used.index, replicates))
        tasks[batch] = list(ids), Task(models.build, settings, which, data.select(used), models.limit)
    return dict(sorted(tasks.items(), key=lambda item: -len(item[1][0])))


def _budget(processes: int | None, memory: int | str) -> tuple[int, int]:
    """Number of processes, and bytes for each."""
    if processes is not None and (not isinstance(processes, int) or processes < 1):
        raise StudyError(f"processes must be a whole number, 1 or more, not {processes!r}")
    try:
        size = int(TypeAdapter(ByteSize).validate_python(memory))
    except ValidationError:
        raise StudyError(f"memory must be a number of bytes, or a text such as '2 GB', not {memory!r}") from None
    processes = processes or cores()
    return processes, size // processes


# --- file ------------------------------------------------------------------------------------------------------------
def _check_origin(store: Store, data: Data) -> None:
    """Refuse a study of other data; warn if another version of pcnet started it."""
    for what, values in data._asdict().items():
        if store.metadata(what) not in (None, fingerprint(values)):
            other = "of other observations" if what == "observations" else "with another truth"
            raise StudyError(f"{str(store.path)!r} is a study {other}; use a new file")
    version = store.metadata("version")
    if version not in (None, package_version()):
        warnings.warn(
            f"the study was started by pcnet {version}, this is {package_version()}; the column 'version' shows which "
            "version computed an inversion",
            stacklevel=3,
        )


def _note_origin(store: Store, data: Data) -> None:
    if store.metadata("version") is None:
        for what, values in data._asdict().items():
            store.set_metadata(what, fingerprint(values))
        store.set_metadata("version", package_version())


@contextmanager
def _opened(path: Path | None) -> Iterator[Store]:
    """The file of a study; it stays open unless the sweep fails."""
    store = Store(path, create=True)
    try:
        yield store
    except BaseException:
        store.close()
        raise


@contextmanager
def _exclusive(path: Path | None) -> Iterator[None]:
    """Lock a file against other sweeps; the operating system releases the lock if the process dies."""
    try:
        held = nullcontext() if path is None else FileLock(f"{path.resolve()}.lock").acquire(timeout=0)
    except Timeout:
        remedy = "wait for it, or read the file with Study.open"
        raise StudyError(f"another process is working on {str(path)!r}; {remedy}") from None
    except OSError as error:
        raise StudyError(explain(path, "written", error)) from None
    with held:
        yield
