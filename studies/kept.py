"""Results of trials that are kept in files, so that a study that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pcnet.engine.compiled.manifest import sources
from pcnet.errors import StudyError
from pcnet.files import atomic_write
from pcnet.sweeps.workers import process_pool


class Job(NamedTuple):
    """A function whose result is data for JSON, its arguments, and what the result depends on.

    name: of its file, and in messages; no other job of the folder has it.
    key: of what the result depends on. A result that was kept with another key is not used.
    """

    name: str
    key: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def path(self, folder: Path) -> Path:
        """Its file: a name that is readable and valid everywhere, and a digest that tells it from others."""
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', self.name).strip('-')}-{digest}.json"


class Outcome(NamedTuple):
    """The result of a job, or the error that it raised; kept: whether a former run has found it."""

    job: Job
    result: Any
    error: str | None = None
    kept: bool = False


def key_of(files: Iterable[Path], packages: Iterable[str], *settings: object) -> str:
    """A key of what results depend on.

    Args:
        files: Code of the study. All code of pcnet is part of the key in any case.
        packages: Names of other packages, whose versions are part of it.
        settings: Values with a `repr` of their own, such as seeds.
    """
    digest = hashlib.sha256(sources().encode())
    for path in sorted(files):
        digest.update(path.read_bytes())
    versions = [importlib.metadata.version(name) for name in packages]
    digest.update(repr((versions, settings)).encode())
    return digest.hexdigest()[:16]


def read(job: Job, folder: Path) -> Outcome | None:
    """What a former run has kept of a job; None if nothing that still holds."""
    with suppress(FileNotFoundError, ValueError):  # a file that is no JSON is not ours
        content = json.loads(job.path(folder).read_bytes())
        if isinstance(content, dict) and content.get("key") == job.key:
            return Outcome(job, content["result"], kept=True)
    return None


def run_job(job: Job, folder: Path) -> Outcome:
    """Run a job and keep its result; an error is its outcome, and is not kept."""
    try:
        result = job.run(*job.arguments)
    except Exception as error:
        text = str(error).strip()
        return Outcome(job, None, f"{type(error).__name__}: {text}" if text else type(error).__name__)
    with atomic_write(job.path(folder), StudyError) as file:
        file.write(json.dumps({"name": job.name, "key": job.key, "result": result}).encode())
    return Outcome(job, result)


def run_jobs(groups: Iterable[Sequence[Job]], folder: Path, processes: int) -> Iterator[Outcome]:
    """Outcomes of jobs: first what former runs have kept, then the others as they are done.

    Args:
        groups: Jobs of one group run one after the other in one process, groups side by side in the order given.
        folder: Of the files; it is made if necessary.
        processes: Number of processes; with 1, jobs run in this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = []
    for group in groups:
        found = [(job, read(job, folder)) for job in group]
        yield from (outcome for _, outcome in found if outcome is not None)
        waiting.append([job for job, outcome in found if outcome is None])
    waiting = [group for group in waiting if group]
    if not waiting:
        return
    if processes == 1:
        yield from (run_job(job, folder) for group in waiting for job in group)
        return
    from loky import as_completed

    with process_pool(min(processes, len(waiting))) as pool:
        for future in as_completed([pool.submit(_run_group, group, folder) for group in waiting]):
            yield from future.result()


def _run_group(group: Sequence[Job], folder: Path) -> list[Outcome]:
    return [run_job(job, folder) for job in group]
