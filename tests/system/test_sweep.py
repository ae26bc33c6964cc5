"""Sweeps against loops of single runs, and interrupted sweeps against uninterrupted ones, bit for bit."""

import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

import pcnet as pc
from pcnet.errors import DivergenceError, GraphError, ObservationError, ScheduleError, SettingError, StudyError
from pcnet.functions import systems as flows
from pcnet.graphs import odem
from pcnet.nodes import GeneralisedStateNode, PrecisionNode, SensoryNode
from pcnet.results.result import package_version
from pcnet.sweeps import sweep as sweeps
from pcnet.sweeps import workers
from pcnet.sweeps.evaluate import dry_run, parse_data
from pcnet.sweeps.study import Study
from support.waiting import PATIENCE, wait_until

WORLD = pc.simulate.glv_process(samples=25, noise="white", seed=3)
SEEN, STATES = WORLD.observations.numpy(), WORLD.states.numpy()
TWICE = np.stack([SEEN, SEEN + 0.05])
THETA = [0.31, -0.19, 0.3]
GRID = {"kappa": [1.0, 0.5], "every": [4, 7], "orders": [2, 3]}


def build(kappa=1.0, every=4, orders=3, **others):
    return odem(kappa=kappa, every=every, orders=orders, **others)


def sweep(grid=None, observations=TWICE, file=None, *, build=build, **options):
    return pc.sweep(build, GRID if grid is None else grid, observations, file, **{"processes": 1, **options})


def product(grid):
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


# --- against a loop ----------------------------------------------------------------------------------------------
def against_a_loop(study, settings, observations, states=None, tolerance=1e-12):
    """Every figure in the table, worked out from single runs that recorded everything."""
    table = study.to_dataframe()
    assert len(table) == len(settings) * len(observations)
    for each in settings:
        for replicate, seen in enumerate(observations):
            chosen = (table[list(each)] == pd.Series(each)).all(axis=1) & (table["replicate"] == replicate)
            (row,) = table[chosen].to_dict("records")
            graph, schedule = build(**each)
            alone = graph.run(seen, schedule=schedule)
            expected = {
                "free_action": alone.free_action,
                "accuracy": alone.accuracy.sum(),
                "complexity": alone.complexity.sum(),
            }
            for node in ("x", "theta", "lambda_x", "lambda_y"):
                for quantity in ("mean", "sd"):
                    last = alone.get(node, quantity)[-1]
                    for index in np.ndindex(last.shape):
                        expected[f"{node}.{quantity}[{','.join(map(str, index))}]"] = last[index]
            for node, count in alone.fallbacks.items():
                expected[f"{node}.fallbacks"] = count
            if states is not None:
                miss = alone.mean("x")[:, 0] - states[replicate]
                expected["x.mse"] = (miss**2).mean()
                expected["x.coverage"] = (np.abs(miss) <= 2 * alone.sd("x")[:, 0]).mean()
                miss = alone.mean("theta")[-1] - THETA
                expected["theta.mse"] = (miss**2).mean()
                expected["theta.coverage"] = (np.abs(miss) <= 2 * alone.sd("theta")[-1]).mean()
            for name, value in expected.items():
                np.testing.assert_allclose(row[name], value, rtol=tolerance, atol=1e-11, err_msg=name)
            assert row["status"] == "done"
            assert row["version"] == package_version()


def test_a_sweep_equals_a_loop_over_settings_and_replicates():
    """Shapes and numbers vary; two data sets with true states for each, and one constant truth."""
    states = np.stack([STATES, STATES + 0.1])
    study = sweep(truth={"x": states, "theta": THETA})
    assert study.counts == {"open": 0, "done": 16, "diverged": 0, "failed": 0}
    against_a_loop(study, product(GRID), TWICE, states)


def test_one_truth_for_all_replicates():
    study = sweep({"kappa": [0.5]}, truth={"x": STATES, "theta": THETA})
    against_a_loop(study, [{"kappa": 0.5}], TWICE, np.stack([STATES, STATES]))


@pytest.mark.slow  # the interrupted sweep below compares the numbers of two processes with those of one, too
def test_two_processes_give_the_same_bits_as_one(monkeypatch):
    monkeypatch.setattr(sweeps, "MAX_BATCH", 4)
    same(sweep(truth={"x": STATES, "theta": THETA}, processes=2), sweep(truth={"x": STATES, "theta": THETA}))


def test_a_list_of_settings_in_any_order():
    settings = [*product(GRID), {"kappa": 0.7, "every": 4, "orders": 3}]
    random.Random(1).shuffle(settings)
    against_a_loop(sweep(settings), settings, TWICE)
    against_a_loop(sweep(iter(settings + settings)), settings, TWICE)  # the same twice is once


def test_settings_may_differ_in_their_keys():
    study = sweep([{"kappa": 0.5}, {"every": 7}, {}], SEEN)
    table = study.to_dataframe()
    for row, each in ((0, {"kappa": 0.5}), (1, {"every": 7}), (2, {})):
        graph, schedule = build(**each)
        np.testing.assert_allclose(table["free_action"].iloc[row], graph.run(SEEN, schedule).free_action, rtol=1e-12)
    assert len(study.probabilities()) == 3


@pytest.mark.parametrize(
    "values",
    [np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), (1.0, 0.5), (k for k in (1.0, 0.5)), list(np.float64([1.0, 0.5]))],
    ids=["numpy", "torch", "tuple", "generator", "numpy scalars"],
)
def test_values_of_any_kind(values):
    study = sweep({"kappa": values}, SEEN)
    assert study.to_dataframe()["kappa"].tolist() == [1.0, 0.5]
    against_a_loop(study, product({"kappa": [1.0, 0.5]}), [SEEN])


@pytest.mark.parametrize(
    "seen",
    [
        WORLD.observations,
        SEEN.tolist(),
        SEEN[None],
        {"y": SEEN},
        pd.DataFrame(SEEN),
        WORLD.observations.clone().requires_grad_(),
    ],
    ids=["torch", "list", "a replicate", "mapping", "table", "with gradient"],
)
def test_observations_of_any_kind(seen):
    against_a_loop(sweep({"kappa": [0.5]}, seen), [{"kappa": 0.5}], [SEEN])


def test_the_schedule_is_odem_unless_build_returns_one():
    study = sweep({"kappa": [0.5]}, SEEN, build=lambda kappa: build(kappa).graph)
    expected = build(0.5).graph.run(SEEN, schedule=pc.odem()).free_action
    np.testing.assert_allclose(study.to_dataframe()["free_action"], expected, rtol=1e-12)


def test_several_sensors():
    def two(kappa):
        graph = pc.Graph()
        for i in (0, 1):
            x = GeneralisedStateNode(
                f"x{i}",
                dim=1,
                orders=2,
                flow=flows.linear(torch.eye(1)),
                integrator=pc.integrators.LocalLinearisation(kappa),
            )
            y = SensoryNode(f"y{i}", dim=1, orders=1)
            graph.predicts(x, y)
            graph.weighs(PrecisionNode(f"nx{i}", prior_precision=3.0, sd=0.5, correlation_time=0.7), x)
            graph.weighs(PrecisionNode(f"ny{i}", prior_precision=3.0, sd=0.5, correlation_time=0.7), y)
        return graph

    seen = {"y0": SEEN[:, :1], "y1": SEEN[:, 1:2]}
    study = sweep({"kappa": [1.0, 0.5]}, seen, build=two)
    expected = [two(kappa).run(seen).free_action for kappa in (1.0, 0.5)]
    np.testing.assert_allclose(study.to_dataframe()["free_action"], expected, rtol=1e-12)
    with pytest.raises(StudyError, match="'y0', 'y1'"):
        sweep({"kappa": [1.0]}, SEEN, build=two)


# --- divergence --------------------------------------------------------------------------------------------------
WAVES = 3 * np.sin(np.arange(60.0) / 10)[:, None] * np.ones(3)


def runaway(rate):
    return odem(rate=rate).graph, pc.odem(every=1)


def test_divergence_is_an_outcome_and_does_not_affect_others():
    rates = [1e-4, 1.0, 0.3, 100.0, 10.0]
    table = sweep({"rate": rates}, WAVES, build=runaway, truth={"x": WAVES, "theta": THETA}).to_dataframe()
    assert table["status"].tolist() == ["done", "diverged", "done", "diverged", "diverged"]
    for (_, row), rate in zip(table.iterrows(), rates, strict=True):
        graph, schedule = runaway(rate)
        if row["status"] == "done":
            alone = graph.run(WAVES, schedule=schedule)
            np.testing.assert_allclose(row["free_action"], alone.free_action, rtol=1e-12)
            np.testing.assert_allclose(row["x.mse"], ((alone.mean("x")[:, 0] - WAVES) ** 2).mean(), rtol=1e-11)
            continue
        with pytest.raises(DivergenceError) as caught:
            graph.run(WAVES, schedule=schedule)
        assert f"Node '{row['diverged_node']}' " in str(caught.value)
        assert f"observation {int(row['diverged_at'])}" in str(caught.value)
        assert row[["free_action", "accuracy", "complexity", "x.mse", "theta.mse", "x.mean[0,0]"]].isna().all()


def test_others_have_the_same_bits_without_the_diverging_inversion():
    """The same batch with one inversion replaced by one that diverges."""
    fine = sweep({"rate": [1e-4, 0.2, 0.3]}, WAVES, build=runaway).to_dataframe().set_index("rate")
    lost = sweep({"rate": [1e-4, 10.0, 0.3]}, WAVES, build=runaway).to_dataframe().set_index("rate")
    for rate in (1e-4, 0.3):
        np.testing.assert_allclose(lost.loc[rate, "free_action"], fine.loc[rate, "free_action"], rtol=1e-13)


def test_a_batch_in_which_everything_diverges(capsys):
    """It ends early with a full progress bar, and there is no best model."""
    study = sweep({"rate": [1.0, 10.0]}, WAVES, build=runaway, truth={"x": WAVES, "theta": THETA}, progress=True)
    assert study.counts == {"open": 0, "done": 0, "diverged": 2, "failed": 0}
    assert "100%" in capsys.readouterr().err
    with pytest.raises(StudyError, match="all of them diverged"):
        study.best()
    with pytest.raises(StudyError, match="all of them diverged"):
        study.probabilities()


# --- files and what is in them -----------------------------------------------------------------------------------
def content(path):
    """All that is in a study's file but when it was made, straight from SQLite."""
    connection = sqlite3.connect(path)
    try:
        table = pd.read_sql("SELECT * FROM inversions ORDER BY id", connection)
    finally:
        connection.close()
    return table


def same(one, other):
    """Digit for digit, but for the time it took."""
    pd.testing.assert_frame_equal(
        one.to_dataframe().drop(columns="seconds"), other.to_dataframe().drop(columns="seconds"), check_exact=True
    )


def test_finished_inversions_are_not_repeated(tmp_path):
    path = tmp_path / "study.db"
    first = sweep(file=path)
    before = content(path)
    calls = []

    def counted(**settings):
        calls.append(settings)
        return build(**settings)

    again = sweep(file=path, build=counted)
    pd.testing.assert_frame_equal(content(path), before, check_exact=True)
    same(first, again)
    assert set(before["status"]) == {"done"}


def test_a_larger_grid_adds_what_is_new(tmp_path):
    path = tmp_path / "study.db"
    sweep({"kappa": [1.0, 0.5], "orders": [2, 3]}, file=path)
    before = content(path)
    larger = {"orders": [3, 2], "kappa": [0.5, 0.25, 1.0]}
    study = sweep(larger, file=path)
    after = content(path)
    pd.testing.assert_frame_equal(after.iloc[: len(before)], before, check_exact=True)
    assert len(after) == 12
    assert set(study.to_dataframe()["kappa"].iloc[8:]) == {0.25}
    against_a_loop(study, product(larger), TWICE)


def test_a_file_of_another_study_is_rejected_and_unchanged(tmp_path):
    path = tmp_path / "study.db"
    sweep({"kappa": [1.0]}, file=path, truth={"theta": THETA})
    before = path.read_bytes()
    for options, words in (
        ({"observations": TWICE + 1e-12, "truth": {"theta": THETA}}, "other observations"),
        ({"observations": TWICE[:1], "truth": {"theta": THETA}}, "other observations"),
        ({"truth": {"theta": [0.0, 0.0, 0.0]}}, "another truth"),
        ({}, "another truth"),
        ({"build": lambda kappa: build(kappa, every=5), "truth": {"theta": THETA}}, "another model of .*kappa"),
    ):
        with pytest.raises(StudyError, match=words):
            sweep({"kappa": [1.0]}, file=path, **options)
        assert path.read_bytes() == before


def test_unfinished_inversions_need_the_same_build(tmp_path, monkeypatch):
    path = tmp_path / "study.db"
    monkeypatch.setattr(sweeps, "MAX_BATCH", 1)
    interrupt_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        sweep({"kappa": [1.0, 0.5, 0.25, 0.75]}, SEEN, path)
    monkeypatch.undo()
    assert Study.open(path).counts == {"open": 2, "done": 2, "diverged": 0, "failed": 0}
    with pytest.raises(StudyError, match="another model"):
        sweep({"kappa": [0.1]}, SEEN, path, build=lambda kappa: build(kappa, every=5))
    study = sweep({"kappa": [0.1]}, SEEN, path)
    against_a_loop(study, product({"kappa": [1.0, 0.5, 0.25, 0.75, 0.1]}), [SEEN])


def interrupt_after(batches, monkeypatch):
    """Ctrl-C comes while a later batch is at work."""
    calls = itertools.count()
    invert = workers.invert

    def stops(task, report):
        if next(calls) == batches:
            raise KeyboardInterrupt
        return invert(task, report)

    monkeypatch.setattr(workers, "invert", stops)


def test_an_interrupted_sweep_can_be_resumed(tmp_path, monkeypatch):
    path, whole = tmp_path / "study.db", tmp_path / "whole.db"
    monkeypatch.setattr(sweeps, "MAX_BATCH", 3)
    sweep(file=whole)
    for done in (0, 1, 3):
        with monkeypatch.context() as patch:
            interrupt_after(done, patch)
            with pytest.raises(KeyboardInterrupt):
                sweep(file=path)
    assert Study.open(path).counts["open"] > 0
    finished = content(path).query("status == 'done'")
    assert len(finished) > 3
    study = sweep(file=path)
    pd.testing.assert_frame_equal(content(path).loc[finished.index], finished, check_exact=True)
    same(study, Study.open(whole))


def test_a_study_may_have_been_begun_by_another_version(tmp_path, monkeypatch):
    path = tmp_path / "study.db"
    monkeypatch.setattr(sweeps, "package_version", lambda: "0.0.7")
    sweep({"kappa": [1.0]}, file=path)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=r"started by pcnet 0\.0\.7"):
        sweep({"kappa": [1.0, 0.5]}, file=path)


def test_one_file_under_two_names_is_one_file(tmp_path):
    (tmp_path / "real.db").touch()
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    with sweeps._exclusive(tmp_path / "real.db"), pytest.raises(StudyError, match="another process is working"):
        sweep({"kappa": [1.0]}, file=tmp_path / "link.db")
    assert sweep({"kappa": [1.0]}, file=tmp_path / "link.db").counts["done"] == 2


# --- killed, again and again -------------------------------------------------------------------------------------
SCRIPT = """
import os, sys, time
import pcnet as pc
from pcnet.graphs import odem
from pcnet.sweeps import sweep as sweeps

gate, choose = os.environ.get("GATE"), sweeps.choose_workers

def armed(*arguments):
    open(gate, "w").close()
    return choose(*arguments)

def held(settings):  # once work has begun, the last settings wait: the sweep cannot end before its interrupt
    if gate:
        open(f"at_work_{os.getpid()}", "w").close()
    while gate and settings["kappa"] == 1.0 and settings["orders"] == 2 and os.path.exists(gate):
        time.sleep(0.01)

sweeps.MAX_BATCH = 3
if gate:
    sweeps.choose_workers = armed
seen = pc.simulate.glv_process(samples=60, noise="white", seed=1).observations
grid = {"kappa": [0.4, 0.6, 0.8, 1.0], "every": [8, 16], "orders": [3, 2], "rate": [1e-4, 1e6]}
pc.sweep(lambda **settings: held(settings) or odem(**settings), grid, seen, sys.argv[1], processes=int(sys.argv[2]))
"""  # as a beginner writes it: no guard, a lambda, everything in __main__
BEFORE_GATE = 27
"""Inversions, of 32, that do not wait at the gate: 4 do, and one is in a batch with the first of them."""


class Script:
    """That sweep in a process of its own, in 12 batches."""

    def __init__(self, folder, path, processes):
        self.path = path
        (folder / "script.py").write_text(SCRIPT)
        (folder / "gate").unlink(missing_ok=True)
        self.folder, self.processes = folder, processes
        for mark in folder.glob("at_work_*"):
            mark.unlink()
        self.process = subprocess.Popen(
            [sys.executable, "script.py", str(path), str(processes)],
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder), "GATE": str(folder / "gate")},  # a killed process cannot clean up
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stderr.close()

    def wait_for(self, done):
        """Wait until this many inversions are finished and all worker processes are at work.

        A worker ignores Ctrl-C once it is at work, but not while it imports its modules.
        """

        def reached():
            assert self.process.poll() is None, self.process.stderr.read()
            workers = {int(mark.name.rpartition("_")[2]) for mark in self.folder.glob("at_work_*")}
            if len(workers - {self.process.pid}) < (self.processes if self.processes > 1 else 0):
                return False
            if not self.path.exists() or not self.path.stat().st_size:
                return False
            counts = Study.open(self.path).counts
            return counts["done"] + counts["diverged"] >= done

        wait_until(reached, f"{done} finished inversions")
        return Study.open(self.path)

    def interrupt(self, how):
        """Kill it, or interrupt it by Ctrl-C, which reaches its whole process group; its children must end too.

        Returns:
            The number of children, and what was printed to standard error.
        """
        children = psutil.Process(self.process.pid).children(recursive=True)
        if how is signal.SIGINT:
            os.killpg(self.process.pid, how)
        else:
            self.process.send_signal(how)
        assert self.process.wait(PATIENCE) != 0
        assert not psutil.wait_procs(children, timeout=PATIENCE)[1]
        return len(children), self.process.stderr.read()


@pytest.mark.parametrize(
    "ends",
    [
        ((2, signal.SIGKILL), (2, signal.SIGINT)),
        pytest.param(((1, signal.SIGKILL), (1, signal.SIGINT), (2, signal.SIGKILL)), marks=pytest.mark.slow),
    ],
    ids=["two processes", "one process first"],
)
def test_a_sweep_interrupted_at_any_moment_resumes_without_loss(ends, tmp_path, monkeypatch):
    """Killed at a random moment and stopped by Ctrl-C; then finished by one process, bit for bit the same."""
    monkeypatch.setattr(sweeps, "MAX_BATCH", 3)
    path = tmp_path / "killed.db"
    random_ = random.Random(7)
    finished = None
    for processes, how in ends:
        with Script(tmp_path, path, processes) as script:
            study = script.wait_for(min(BEFORE_GATE, 2 if finished is None else len(finished) + 2))
            assert study.counts["open"] > 0
            assert study.to_dataframe()["status"].isin(["done", "diverged"]).any()
            with pytest.raises(StudyError, match=r"another process is working on .*Study\.open"):
                sweep(file=path)
            time.sleep(random_.uniform(0.0, 0.3))
            children, said = script.interrupt(how)
            assert (children >= 2) == (processes == 2)
            if how is signal.SIGINT:
                assert said.count("Traceback") == said.count("\nKeyboardInterrupt") == 1
        now = content(path)
        if finished is not None:
            pd.testing.assert_frame_equal(now.loc[finished.index], finished, check_exact=True)
        finished = now.query("status != 'open'")
        assert 0 < len(finished) < 32
    for file in (path, tmp_path / "whole.db"):
        monkeypatch.setattr(sys, "argv", ["script.py", str(file), "1"])
        exec(SCRIPT, {})
    now = content(path)
    pd.testing.assert_frame_equal(now.loc[finished.index], finished, check_exact=True)
    assert now.groupby("batch").size().max() == 3
    assert set(now["status"]) == {"done", "diverged"}
    same(Study.open(path), Study.open(tmp_path / "whole.db"))


# --- memory ------------------------------------------------------------------------------------------------------
def sizes(study):
    rows = study._store._connection.execute("SELECT count(*) FROM inversions GROUP BY batch ORDER BY batch")
    return [size for (size,) in rows]


@pytest.mark.parametrize(("processes", "share"), [(1, 1), (1, 5), (1, 1000), (2, 5), (2, 7)])
def test_batches_keep_to_the_memory_budget(processes, share, monkeypatch):
    """All batches at work together stay within the budget, and no batch is smaller than needed."""
    grid = {"kappa": np.linspace(0.5, 1.0, 20).tolist()}
    seen = SEEN[:2]
    monkeypatch.setattr(sweeps, "choose_workers", lambda *_: workers.run_here)  # what is meant is how they are cut
    one = dry_run(build(), parse_data(seen, {}, build()))
    found = sizes(sweep(grid, seen, memory=one * share, processes=processes))
    fits = max(1, share // processes)
    assert sum(found) == 20
    assert max(found) <= fits
    assert len(found) == -(-20 // fits)
    assert max(found) - min(found) <= 1


def test_models_are_batched_by_shape_and_large_batches_are_split(monkeypatch):
    monkeypatch.setattr(sweeps, "MAX_BATCH", 5)
    grid = {"kappa": np.linspace(0.5, 1.0, 12).tolist(), "orders": [2, 3]}
    study = sweep(grid, SEEN[:2])
    assert sizes(study) == [4] * 6
    batches = study._store._connection.execute("SELECT batch, settings FROM inversions")
    orders = pd.DataFrame([(batch, json.loads(text)["orders"]) for batch, text in batches])
    assert (orders.groupby(0)[1].nunique() == 1).all()


MEASURE = """
import gc
from pathlib import Path
import numpy as np
import pcnet as pc
from pcnet.sweeps import sweep as sweeps
from pcnet.graphs import odem

def memory(what):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return 1024 * int(line.split()[1])

sweeps.MAX_BATCH = 10**9
seen = pc.simulate.glv_process(samples=4, noise="white", seed=1).observations.numpy()
grid = {"kappa": [1.0, 0.5], "every": [2]}
pc.sweep(odem, grid, seen, processes=1)
gc.collect()  # garbage that is still there would make room for what is measured
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = memory("VmRSS")
study = pc.sweep(odem, grid, np.broadcast_to(seen, (1000, *seen.shape)), processes=1, memory="15 MB")
print(memory("VmHWM") - before, study.counts["done"])
"""


@pytest.mark.usefixtures("eager")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to measure")
def test_memory_stays_within_about_the_budget():
    """The 2000 inversions at once would take 46 MB."""
    found = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    grown, done = map(int, found.stdout.split())
    assert done == 2000
    assert 5e6 < grown < 30e6


# --- a newcomer's mistakes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"grid": {"kappa": 1.0}}, StudyError, "kappa = 1.0; give a list of values"),
        ({"grid": {"model": "glv"}}, StudyError, "model = 'glv'; give a list of values"),
        ({"grid": {"kappa": []}}, StudyError, "the grid is empty"),
        ({"grid": []}, StudyError, "the grid is empty"),
        ({"grid": [1.0, 2.0]}, StudyError, "list of mappings"),
        ({"grid": 5}, StudyError, "list of mappings"),
        ({"grid": {"kappa": [np.nan]}}, StudyError, "finite numbers"),
        ({"grid": {"kappa": [object()]}}, StudyError, "settings must be .* look it up in build"),
        ({"grid": {"status": [1]}}, StudyError, "cannot be called 'status'"),
        ({"grid": {"x.y": [1]}}, StudyError, r"cannot be called 'x\.y'"),
        ({"grid": {"kapa": [1.0]}}, SettingError, "kapa"),
        ({"grid": {"kappa": [-1.0]}}, SettingError, "kappa"),
        ({"build": lambda **_: None}, StudyError, "build must return a model.*it returned None"),
        ({"build": lambda **_: (build().graph, "odem")}, StudyError, "a graph and a schedule"),
        ({"build": lambda **_: build(kappa=[1.0, 0.5])}, StudyError, r"batch dimensions \(2,\).*single numbers"),
        ({"build": build()}, StudyError, "build must be a function of settings, not Model"),
        ({"observations": SEEN[:, 0]}, StudyError, r"\(T, dim\) or \(replicates, T, dim\)"),
        ({"observations": SEEN[:, :2]}, ObservationError, "dim = 3"),
        ({"observations": SEEN * np.nan}, StudyError, "finite"),
        ({"observations": SEEN * 1j}, StudyError, "real numbers"),
        ({"observations": [[1.0], [1.0, 2.0]]}, StudyError, "rectangular"),
        ({"observations": {"z": SEEN}}, ObservationError, "'z'"),
        ({"observations": None}, StudyError, "observations of 'y'"),
        ({"truth": {"z": SEEN}}, GraphError, "no node 'z'; nodes: x, y"),
        ({"truth": {"y": SEEN}}, ScheduleError, "'y' has no 'mean'"),
        ({"truth": {"x": SEEN[:, :2]}}, StudyError, "truth of 'x' has 2 dimensions and its belief 3"),
        ({"truth": {"x": SEEN[:9]}}, StudyError, r"\(9, 3\).*2 replicates and T = 25"),
        ({"truth": {"theta": [1.0]}}, StudyError, "truth of 'theta' has 1 dimensions and its belief 3"),
        ({"truth": SEEN}, StudyError, "truth must be a mapping"),
        ({"processes": 0}, StudyError, "processes must be"),
        ({"processes": 1.5}, StudyError, "processes must be"),
        ({"memory": "lots"}, StudyError, "'2 GB', not 'lots'"),
        ({"scheduler": "nowhere"}, StudyError, "no Dask scheduler at 'nowhere'"),
    ],
)
def test_invalid_arguments_are_rejected_and_leave_the_file_usable(options, error, words, tmp_path):
    path = tmp_path / "study.db"
    if "scheduler" in options:
        pytest.importorskip("distributed")
    with pytest.raises(error, match=words):
        sweep(**{"grid": {"kappa": [1.0, 0.5]}, **options}, file=path)
    if path.exists():
        assert sweep({"kappa": [1.0]}, file=path).counts["open"] == 0


def picky(kappa):
    if kappa < 1:
        raise RuntimeError("no such pendulum")
    return build(kappa)


def test_settings_for_which_build_raises_are_recorded_and_the_others_run(tmp_path):
    path, grid = tmp_path / "study.db", {"kappa": [0.5, 1.0, 0.25]}
    with pytest.warns(UserWarning, match=r"build failed for 4 inversions, first for .*0.5.*no such pendulum"):
        study = sweep(grid, file=path, build=picky)
    assert study.counts == {"open": 0, "done": 2, "diverged": 0, "failed": 4}
    table = Study.open(path).to_dataframe()
    assert table[table.status == "failed"].error.unique().tolist() == ["RuntimeError: no such pendulum"]
    alone = sweep({"kappa": [1.0]}).to_dataframe()
    assert table[table.kappa == 1.0].free_action.tolist() == alone.free_action.tolist()
    assert study.probabilities(where={"replicate": 0})["probability"].tolist() == [1.0]
    against_a_loop(sweep(grid, file=path), product(grid), TWICE)  # another sweep tries them again


def test_if_build_raises_for_all_settings_so_does_the_sweep(tmp_path):
    with pytest.raises(RuntimeError, match="no such pendulum") as caught:
        sweep({"kappa": [0.5, 0.25]}, build=picky)
    assert caught.value.__notes__ == ["build was called with {'kappa': 0.5}"]


def test_a_build_that_hangs_has_failed():
    gate = threading.Event()

    def hanging(kappa):
        if kappa == 0.5:
            gate.wait()
        return build(kappa)

    with pytest.warns(UserWarning, match=r"did not return within 0.2 s for .*0.5"):
        study = sweep({"kappa": [1.0, 0.5]}, build=hanging, build_limit=0.2)
    gate.set()
    assert study.counts == {"open": 0, "done": 2, "diverged": 0, "failed": 2}
    with pytest.raises(StudyError, match="build_limit must be a number of seconds, not 0"):
        sweep({"kappa": [1.0]}, build_limit=0)


def test_an_error_in_a_worker_ends_the_sweep_with_that_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "MAX_BATCH", 2)
    here = os.getpid()

    def elsewhere(kappa):
        if os.getpid() != here:
            raise RuntimeError("no such pendulum")
        return build(kappa)

    with pytest.raises(RuntimeError, match="no such pendulum"):
        sweep({"kappa": [1.0, 0.5, 0.25]}, file=tmp_path / "study.db", build=elsewhere, processes=2)
    study = sweep({"kappa": [1.0, 0.5, 0.25]}, file=tmp_path / "study.db")
    against_a_loop(study, product({"kappa": [1.0, 0.5, 0.25]}), TWICE)


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(StudyError, match="there is no folder"):
        sweep({"kappa": [1.0]}, file=tmp_path / "none" / "study.db")
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that not even the superuser may write to")
def test_an_unwritable_folder_is_an_error():
    with pytest.raises(StudyError, match=r"study\.db. cannot be written: "):
        sweep({"kappa": [1.0]}, file=Path("/sys/study.db"))


def flowing(rate):
    x = GeneralisedStateNode("x", dim=3, orders=2, flow=flows.linear(-rate * torch.eye(3)))
    y = SensoryNode("y", dim=3, orders=1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("nx", prior_precision=3.0, sd=0.5, correlation_time=0.7), x)
    graph.weighs(PrecisionNode("ny", prior_precision=3.0, sd=0.5, correlation_time=0.7), y)
    return graph, pc.states_only()


def test_a_flow_created_for_each_model_is_warned_about():
    grid = {"rate": np.linspace(0.1, 1.0, 17).tolist()}
    with pytest.warns(UserWarning, match="17 batches, which is slow: .*define it once, outside of build"):
        study = sweep(grid, SEEN[:2], build=flowing)
    expected = [float(graph.run(SEEN[:2], schedule).free_action) for graph, schedule in map(flowing, grid["rate"])]
    np.testing.assert_allclose(study.to_dataframe()["free_action"], expected, rtol=1e-12)


def test_a_small_budget_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep({"kappa": np.linspace(0.5, 1.0, 20).tolist()}, SEEN[:1], memory=1)


def test_the_progress_bar_shows_the_remaining_time(capsys):
    sweep({"kappa": [1.0, 0.5]}, progress=True)
    shown = capsys.readouterr().err
    assert "sweep: 100%" in shown
    assert "100/100" in shown  # two settings, two replicates, 25 observations
    sweep({"kappa": [1.0, 0.5]}, progress=False)
    assert not capsys.readouterr().err
