"""The same sweep on a real Dask scheduler with two worker processes, one of which is killed."""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import pcnet as pc
from pcnet.errors import StudyError
from pcnet.graphs import odem
from pcnet.sweeps import sweep as sweeps
from pcnet.sweeps import workers
from pcnet.sweeps.study import Study
from support.paths import ROOT, TESTS
from support.waiting import PATIENCE, wait_until

pytest.importorskip("distributed", reason="sweeps on a cluster need Dask: pip install 'pcnet[dask]'")

SEEN = pc.simulate.glv_process(samples=60, noise="white", seed=3).observations.numpy()
GRID = {"kappa": [0.4, 0.6, 0.8, 1.0], "orders": [2, 3], "rate": [1e-4, 30.0]}


def build(**settings):
    return odem(**settings, every=8)


class Cluster:
    """A scheduler and two workers on this machine, each a process of its own; killed on leaving the context."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = {}
        self.env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(TESTS), str(ROOT)])}

    def __enter__(self):
        common = ("--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(self.folder / "scheduler.json"))
        try:
            self._start("scheduler", "--port", "0", *common)
            for _ in range(2):
                self._start("worker", "--nthreads", "2", "--no-nanny", *common)  # waits for the file of the scheduler
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, *command):
        name = f"{command[0]}-{len(self.processes)}"
        with (self.folder / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "dask", *command], stdout=log, stderr=log, cwd=self.folder, env=self.env
            )

    def _wait(self):
        """Wait until the scheduler listens and knows both workers."""
        from distributed import Client

        file = self.folder / "scheduler.json"
        wait_until(lambda: file.exists() and file.read_text().strip().endswith("}"), "a running scheduler")
        self.address = json.loads(file.read_text())["address"]
        with Client(self.address, timeout=PATIENCE, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=PATIENCE)

    def kill(self, name):
        self.processes[name].kill()
        assert self.processes[name].wait() == -signal.SIGKILL

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(workers, "SCHEDULER_TIMEOUT", PATIENCE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("dask")) as made:
        yield made


def figures(study):
    return study.to_dataframe().drop(columns="seconds")


def test_a_killed_worker_does_not_change_the_study(cluster, tmp_path, monkeypatch):
    """The same batches and the same bits as on one machine."""
    monkeypatch.setattr(sweeps, "MAX_BATCH", 2)
    local = pc.sweep(build, GRID, SEEN, tmp_path / "local.db", processes=1)
    assert local.counts == {"open": 0, "done": 8, "diverged": 8, "failed": 0}
    mark = tmp_path / "mark"
    log = tmp_path / "log"

    def slow(**settings):
        """The same model. The one that is to be killed holds its first batch until then, the other waits for that."""
        if os.getpid() != here:
            with log.open("a") as file:
                file.write(f"{os.getpid()}\n")
            end = time.monotonic() + PATIENCE
            while mark.exists() and time.monotonic() < end:
                if os.getpid() != victim and str(victim) in log.read_text().split():
                    break
                time.sleep(0.02)
        return build(**settings)

    here, victim = os.getpid(), cluster.processes["worker-2"].pid
    keep = sweeps.Store.finish

    def finish(store, ids, outcomes):
        keep(store, ids, outcomes)
        if mark.exists():  # after the first batch, of the other worker: the victim holds one, and never ends it
            assert str(victim) in log.read_text().split()
            cluster.kill("worker-2")
            mark.unlink()

    monkeypatch.setattr(sweeps.Store, "finish", finish)
    mark.touch()
    study = pc.sweep(slow, GRID, SEEN, tmp_path / "dask.db", processes=1, scheduler=cluster.address)
    assert not mark.exists()
    assert cluster.processes["worker-1"].poll() is None
    assert study.counts == {"open": 0, "done": 8, "diverged": 8, "failed": 0}
    pd.testing.assert_frame_equal(figures(study), figures(local), check_exact=True)
    pd.testing.assert_frame_equal(figures(Study.open(tmp_path / "dask.db")), figures(local), check_exact=True)


def test_a_given_client_is_used_and_left_open(cluster):
    from distributed import Client

    with Client(cluster.address, set_as_default=False) as client:
        study = pc.sweep(build, {"kappa": [1.0, 0.5]}, SEEN, scheduler=client)
        assert client.status == "running"
    expected = []
    for kappa in (1.0, 0.5):
        graph, schedule = build(kappa=kappa)
        expected.append(graph.run(SEEN, schedule=schedule).free_action)
    np.testing.assert_allclose(study.to_dataframe()["free_action"], expected, rtol=1e-12)


def test_a_worker_with_several_threads_runs_one_batch_at_a_time(monkeypatch):
    """Functions cannot be traced in several threads at once, and workers have several threads by default."""
    busy = threading.Semaphore(1)

    def invert(task):
        alone = busy.acquire(blocking=False)
        time.sleep(0.05)
        if alone:
            busy.release()
        return [task, alone]

    monkeypatch.setattr(workers, "invert", invert)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(partial(workers._invert_job, workers.version()), [pickle.dumps(i) for i in range(8)]))
    assert found == [[i, True] for i in range(8)]


def test_an_error_on_a_worker_is_raised(cluster):
    here = os.getpid()

    def elsewhere(kappa):
        if os.getpid() != here:
            raise RuntimeError("no such pendulum")
        return build(kappa=kappa)

    with pytest.raises(RuntimeError, match="no such pendulum"):
        pc.sweep(elsewhere, {"kappa": [1.0]}, SEEN, scheduler=cluster.address)


def test_a_module_that_workers_lack_is_named(cluster, tmp_path, monkeypatch):
    text = "from pcnet.graphs import odem\n\ndef build(kappa):\n    return odem()\n"
    (tmp_path / "only_here.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with pytest.raises(StudyError, match="a worker of the cluster has no module named 'only_here'; install it there"):
        pc.sweep(only_here.build, {"kappa": [1.0]}, SEEN, scheduler=cluster.address)


def test_a_missing_scheduler_is_an_error(monkeypatch):
    monkeypatch.setattr(workers, "SCHEDULER_TIMEOUT", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StudyError, match=rf"there is no Dask scheduler at '{re.escape(address)}'"):
            pc.sweep(build, {"kappa": [1.0]}, SEEN, scheduler=address)


def test_a_worker_of_another_version_refuses():
    with pytest.raises(StudyError, match=r"a worker has pcnet .* and not 9.9; install the same version"):
        workers._invert_job("9.9", b"")


def test_a_cluster_that_dies_is_named_and_finished_work_is_kept(tmp_path, monkeypatch):
    """First its workers go, then the scheduler."""
    monkeypatch.setattr(workers, "POLL", 0.2)
    monkeypatch.setattr(workers, "WORKERLESS", 0.5)
    with Cluster(tmp_path) as cluster:
        for name in list(cluster.processes):
            if name.startswith("worker"):
                cluster.kill(name)
        with (
            pytest.warns(UserWarning, match="the cluster has no workers; waiting"),
            pytest.raises(StudyError, match=r"no workers for .*finished work is kept"),
        ):
            pc.sweep(build, GRID, SEEN, tmp_path / "study.db", scheduler=cluster.address)
        assert Study.open(tmp_path / "study.db").counts["open"] == 16
        monkeypatch.setattr(workers, "WORKERLESS", 600)
        timer = threading.Timer(1.0, cluster.kill, ["scheduler-0"])
        timer.start()
        with (
            pytest.warns(UserWarning, match="no workers"),
            pytest.raises(StudyError, match="scheduler is lost"),
        ):
            pc.sweep(build, GRID, SEEN, tmp_path / "study.db", scheduler=cluster.address)
        timer.join()
