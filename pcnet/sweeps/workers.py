"""Execution of batches of inversions: in this process, in several processes, or on a Dask cluster."""

import os
import pickle
import signal
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from pcnet.engine.compiled.manifest import sources as fingerprint_of_package
from pcnet.errors import StudyError
from pcnet.results.result import package_version
from pcnet.sweeps.evaluate import Outcome, Task, invert

Progress = Callable[[int], object]  # called with the number of inversions × observations since the last call
Finished = Iterator[tuple[int, list[Outcome]]]  # key and outcomes of each task as it is finished
Run = Callable[[Mapping[int, Task], Progress], Finished]
SCHEDULER_TIMEOUT = 20  # seconds to wait for a Dask scheduler
POLL = 2.0  # seconds between two looks at a Dask cluster
WORKERLESS = 300.0  # seconds to wait for a worker if a cluster has none
LOST = "the connection to the Dask scheduler is lost; finished work is kept: start the sweep again with a scheduler"


def run_here(tasks: Mapping[int, Task], progress: Progress) -> Finished:
    """Run tasks one after another in this process."""
    for key, task in tasks.items():
        size = len(task.settings)
        yield key, invert(task, lambda ticks, size=size: progress(ticks * size))  # type: ignore[misc]


def run_in_processes(count: int, tasks: Mapping[int, Task], progress: Progress) -> Finished:
    """Run tasks in several processes on this machine, with one thread each."""
    from loky import wait

    with tempfile.TemporaryDirectory(prefix="pcnet-") as folder, process_pool(min(count, len(tasks))) as pool:
        path = Path(folder) / "progress"  # each worker writes the number of finished ticks of its task
        ticks = np.memmap(path, dtype=np.int64, mode="w+", shape=(len(tasks),))
        sizes = np.array([len(task.settings) for task in tasks.values()])
        futures = {pool.submit(_invert_in_worker, task, path, i): key for i, (key, task) in enumerate(tasks.items())}
        reported, waiting = 0, set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=0.2, return_when="FIRST_COMPLETED")
            total = int(ticks @ sizes)
            progress(total - reported)
            reported = total
            for future in done:
                yield futures[future], future.result()


@contextmanager
def process_pool(count: int) -> Iterator[Any]:
    """A pool of processes with one thread each that end with this process; they are killed on leaving the context."""
    from loky import ProcessPoolExecutor
    from loky.process_executor import TerminatedWorkerError

    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    pool = ProcessPoolExecutor(count, env=one_thread, initializer=_follow_parent, initargs=(os.getpid(),))
    try:
        yield pool
    except TerminatedWorkerError as error:
        raise StudyError(
            "a worker process was killed, most likely because memory ran out; finished work is kept: start again with "
            "fewer processes"
        ) from error
    finally:
        pool.shutdown(wait=False, kill_workers=True)


def _follow_parent(parent: int) -> None:
    """End this process when its parent ends, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _invert_in_worker(task: Task, progress_file: Path, index: int) -> list[Outcome]:
    ticks = np.memmap(progress_file, dtype=np.int64, mode="r+")

    def report(more: int) -> None:
        ticks[index] += more

    return invert(task, report)


def run_on_dask(scheduler: Any, tasks: Mapping[int, Task], progress: Progress) -> Finished:
    """Run tasks on a Dask cluster, given the address of its scheduler or a client."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
        import distributed  # noqa: F401
    except ImportError:
        raise StudyError("a scheduler needs Dask: pip install 'pcnet[dask]'") from None
    name, futures = f"pcnet-{uuid.uuid4().hex}", dict[Any, tuple[int, int]]()
    with _dask_client(scheduler) as client:
        try:
            for key, task in tasks.items():
                job = version(), cloudpickle.dumps(task)
                future = client.submit(_invert_job, *job, key=f"{name}-{key}", pure=False)
                futures[future] = key, len(task.settings) * task.data.length
            for future in _completed(client, list(futures)):
                key, size = futures[future]
                yield key, _dask_result(future)
                progress(size)
        finally:
            with suppress(Exception):  # the scheduler may be gone
                client.cancel(list(futures))


def _completed(client: Any, waiting: Iterable[Any]) -> Iterator[Any]:
    """Futures as they are completed. Says so if the cluster has no workers, and gives up if none comes back."""
    done: SimpleQueue[Any] = SimpleQueue()
    left = 0
    for future in waiting:
        future.add_done_callback(done.put)
        left += 1
    alone: float | None = None  # when the last worker was gone
    while left:
        try:
            yield done.get(timeout=POLL)
        except Empty:
            pass
        else:
            left, alone = left - 1, None
            continue
        if client.status != "running":
            raise StudyError(f"{LOST} (the client is {client.status})")
        if client.scheduler_info(n_workers=-1)["workers"]:
            alone = None
        elif alone is None:
            alone = time.monotonic()
            warnings.warn(f"the cluster has no workers; waiting {WORKERLESS:g} s for one", stacklevel=2)
        elif time.monotonic() - alone > WORKERLESS:
            raise StudyError(
                f"the cluster has had no workers for {WORKERLESS:g} s; finished work is kept: start workers, then the "
                "sweep again"
            )


def version() -> str:
    """The version of pcnet, and a fingerprint of its code."""
    return f"{package_version()} ({fingerprint_of_package()[:12]})"


def _dask_client(scheduler: Any) -> AbstractContextManager[Any]:
    from distributed import Client

    if isinstance(scheduler, Client):
        return nullcontext(scheduler)
    try:
        client: AbstractContextManager[Any] = Client(  # type: ignore[no-untyped-call]
            scheduler, timeout=SCHEDULER_TIMEOUT, set_as_default=False
        )
    except (OSError, TypeError, ValueError) as error:
        raise StudyError(f"there is no Dask scheduler at {scheduler!r}: {error}") from None
    return client


def _dask_result(future: Any) -> list[Outcome]:
    from distributed import KilledWorker
    from distributed.comm.core import CommClosedError

    try:
        outcomes: list[Outcome] = future.result()
    except KilledWorker as error:
        raise StudyError(
            "a batch killed every worker that ran it, most likely because memory ran out; finished work is kept: start "
            "again with workers that have more memory"
        ) from error
    except ModuleNotFoundError as error:
        raise StudyError(
            f"a worker of the cluster has {str(error)[0].lower()}{str(error)[1:]}; install it there, or define build "
            "in the script itself"
        ) from error
    except AttributeError as error:
        if "_invert_job" not in str(error):
            raise
        raise StudyError(f"a worker has another version of pcnet than {version()} here; install the same one") from None
    except (CommClosedError, CancelledError, TimeoutError) as error:
        raise StudyError(f"{LOST} ({type(error).__name__})") from error
    return outcomes


def _invert_job(wanted: str, task: bytes) -> list[Outcome]:
    """Run a task that was pickled by `run_on_dask`, so that the scheduler need not be able to import it.

    wanted: the version of pcnet there.
    """
    if version() != wanted:
        raise StudyError(f"a worker has pcnet {version()} and not {wanted}; install the same version there")
    with TRACING:
        return invert(pickle.loads(task))


TRACING = threading.Lock()  # functions can be traced in one thread at a time only, and a Dask worker may have several


def choose_workers(processes: int, scheduler: Any, tasks: int) -> Run:
    """A Dask cluster if a scheduler is given, else at most `processes` processes."""
    if scheduler is not None:
        return partial(run_on_dask, scheduler)
    count = min(processes, max(tasks, 1))
    return run_here if count == 1 else partial(run_in_processes, count)


def cores() -> int:
    """Number of cores that this process may use."""
    from loky import cpu_count

    return int(cpu_count())
