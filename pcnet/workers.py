"""Where batches of inversions are worked on: in this process, in several on this machine, or on a Dask cluster."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from pcnet.errors import PcnetError, StudyError
from pcnet.inversion import Outcome, Task, invert

Moved = Callable[[int], object]
"""Is told how many more (inversions × observations) have passed."""


class Workers(ABC):
    """Does tasks in any order, and hands over each as it is done."""

    @abstractmethod
    def run(self, tasks: Mapping[int, Task], moved: Moved) -> Iterator[tuple[int, list[Outcome]]]:
        """Do all tasks; yields the key and the outcomes of each."""


class Here(Workers):
    """One after the other, in this process."""

    def run(self, tasks: Mapping[int, Task], moved: Moved) -> Iterator[tuple[int, list[Outcome]]]:
        for key, task in tasks.items():
            size = len(task.settings)
            yield key, invert(task, lambda ticks, size=size: moved(ticks * size))  # type: ignore[misc]


class Processes(Workers):
    """In several processes on this machine, one thread each."""

    def __init__(self, count: int) -> None:
        self.count = count

    def run(self, tasks: Mapping[int, Task], moved: Moved) -> Iterator[tuple[int, list[Outcome]]]:
        from loky import ProcessPoolExecutor, wait
        from loky.process_executor import TerminatedWorkerError

        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with tempfile.TemporaryDirectory(prefix="pcnet-") as folder:
            board = Board(Path(folder) / "progress", len(tasks))
            executor = ProcessPoolExecutor(max_workers=min(self.count, len(tasks)), env=one_thread)
            try:
                futures = {
                    executor.submit(_invert_elsewhere, task, board.path, place, os.getpid()): (key, place)
                    for place, (key, task) in enumerate(tasks.items())
                }
                sizes = np.array([len(task.settings) for task in tasks.values()])
                seen = 0
                waiting = set(futures)
                while waiting:
                    done, waiting = wait(waiting, timeout=0.2, return_when="FIRST_COMPLETED")
                    now = int(board.ticks @ sizes)
                    moved(now - seen)
                    seen = now
                    for future in done:
                        yield futures[future][0], future.result()
            except TerminatedWorkerError as error:
                raise StudyError(
                    "a worker process was killed, most likely because memory ran out; what was finished is kept: start "
                    "again with less memory or fewer processes"
                ) from error
            finally:
                executor.shutdown(wait=False, kill_workers=True)


class Board:
    """A small file in which each worker notes how many observations its task has passed."""

    def __init__(self, path: Path, places: int) -> None:
        self.path = path
        self.ticks = np.memmap(path, dtype=np.int64, mode="w+", shape=(places,))


def _invert_elsewhere(task: Task, board: Path, place: int, parent: int) -> list[Outcome]:
    ticks = np.memmap(board, dtype=np.int64, mode="r+")

    def report(more: int) -> None:
        if os.getppid() != parent:
            sys.exit(1)  # whoever waits for this is gone
        ticks[place] += more

    return invert(task, report)


class Dask(Workers):
    """On a Dask cluster, given the address of its scheduler or a client of one's own."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def run(self, tasks: Mapping[int, Task], moved: Moved) -> Iterator[tuple[int, list[Outcome]]]:
        try:
            from distributed import as_completed
        except ImportError:
            raise StudyError("a scheduler needs Dask: pip install 'pcnet[dask]'") from None
        name = f"pcnet-{uuid.uuid4().hex}"
        with self._client() as client:
            futures = {
                client.submit(invert, task, key=f"{name}-{key}", pure=False): (key, len(task.settings) * task.length)
                for key, task in tasks.items()
            }
            try:
                for future in as_completed(list(futures)):  # type: ignore[no-untyped-call]
                    key, passed = futures[future]
                    yield key, self._result(future)
                    moved(passed)
            finally:
                client.cancel(list(futures))

    def _client(self) -> AbstractContextManager[Any]:
        from distributed import Client

        if isinstance(self.scheduler, Client):
            return nullcontext(self.scheduler)
        try:
            client: AbstractContextManager[Any] = Client(  # type: ignore[no-untyped-call]
                self.scheduler, timeout=20, set_as_default=False
            )
        except (OSError, ValueError) as error:
            raise StudyError(f"there is no Dask scheduler at {self.scheduler!r}: {error}") from None
        return client

    @staticmethod
    def _result(future: Any) -> list[Outcome]:
        from distributed import KilledWorker

        try:
            outcomes: list[Outcome] = future.result()
        except KilledWorker as error:
            raise StudyError(
                "a batch was lost with every worker that took it up, most likely because memory ran out; what was "
                "finished is kept: start again with less memory"
            ) from error
        except PcnetError:
            raise
        return outcomes


def choose(processes: int | None, scheduler: Any, tasks: int) -> Workers:
    """A cluster if a scheduler is given; else as many processes as there are cores, or as are asked for."""
    if scheduler is not None:
        return Dask(scheduler)
    count = min(processes or cores(), max(tasks, 1))
    return Here() if count == 1 else Processes(count)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
