"""Where batches of inversions are worked on: in this process, in several on this machine, or on a Dask cluster."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from pcnet.errors import StudyError
from pcnet.sweeps.evaluate import Outcome, Task, invert

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
            executor = ProcessPoolExecutor(
                max_workers=min(self.count, len(tasks)),
                env=one_thread,
                initializer=follow_parent,
                initargs=(os.getpid(),),
            )
            try:
                futures = {
                    executor.submit(_invert_elsewhere, task, board.path, place): key
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
                        yield futures[future], future.result()
            except TerminatedWorkerError as error:
                raise StudyError(
                    "a worker process was killed, most likely because memory ran out; what was finished is kept: start "
                    "again with fewer processes"
                ) from error
            finally:
                executor.shutdown(wait=False, kill_workers=True)


class Board:
    """A small file in which each worker notes how many observations its task has passed."""

    def __init__(self, path: Path, places: int) -> None:
        self.path = path
        self.ticks = np.memmap(path, dtype=np.int64, mode="w+", shape=(places,))


def follow_parent(parent: int) -> None:
    """Have this process end when its parent does, however that ends, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _invert_elsewhere(task: Task, board: Path, place: int) -> list[Outcome]:
    ticks = np.memmap(board, dtype=np.int64, mode="r+")

    def report(more: int) -> None:
        ticks[place] += more

    return invert(task, report)


PATIENCE = 20
"""Seconds to wait for the scheduler of a cluster."""


class Dask(Workers):
    """On a Dask cluster, given the address of its scheduler or a client of one's own."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def run(self, tasks: Mapping[int, Task], moved: Moved) -> Iterator[tuple[int, list[Outcome]]]:
        try:
            import cloudpickle  # type: ignore[import-untyped]
            from distributed import as_completed
        except ImportError:
            raise StudyError("a scheduler needs Dask: pip install 'pcnet[dask]'") from None
        name = f"pcnet-{uuid.uuid4().hex}"
        with self._client() as client:
            futures = {
                client.submit(_invert_packed, cloudpickle.dumps(task), key=f"{name}-{key}", pure=False): (
                    key,
                    len(task.settings) * task.data.length,
                )
                for key, task in tasks.items()
            }
            try:
                for future in as_completed(list(futures), loop=client.loop):  # type: ignore[no-untyped-call]
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
                self.scheduler, timeout=PATIENCE, set_as_default=False
            )
        except (OSError, TypeError, ValueError) as error:
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
                "finished is kept: start again with workers that have more memory"
            ) from error
        except ModuleNotFoundError as error:
            raise StudyError(
                f"a worker of the cluster has {str(error)[0].lower()}{str(error)[1:]}; install it there, or define "
                "build in the script itself"
            ) from error
        return outcomes


def _invert_packed(task: bytes) -> list[Outcome]:
    """A task as `Dask.run` packed it, so that nobody on its way, such as the scheduler, has to understand it.

    A worker may have several threads, but functions cannot be traced in more than one at a time.
    """
    with ONE_AT_A_TIME:
        return invert(pickle.loads(task))


ONE_AT_A_TIME = threading.Lock()


def choose(processes: int | None, scheduler: Any, tasks: int) -> Workers:
    """A cluster if a scheduler is given; else as many processes as there are cores, or as are asked for."""
    if scheduler is not None:
        return Dask(scheduler)
    count = min(processes or cores(), max(tasks, 1))
    return Here() if count == 1 else Processes(count)


def cores() -> int:
    """How many cores this process may use."""
    from loky import cpu_count

    return int(cpu_count())
