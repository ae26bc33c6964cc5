"""The arena: its second version of each flow, its discrete models, its verdicts, and a tiny run."""

import importlib.util
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

from pcnet.errors import SettingError
from studies.arena.beliefs import Beliefs
from studies.arena.cells import Cell, code_of, effective_size, list_cells, run_cell, score
from studies.arena.likelihood import fit, search
from studies.arena.methods import METHODS
from studies.arena.model import DiscreteModel, Noise, Record, block_diagonal
from studies.arena.run import DEVELOPMENT, REPORTED, run_arena
from studies.arena.tasks import TASKS
from studies.arena.verdicts import interval, judge, losses, summarise
from studies.systems.design import HELD_OUT, simulate

RIVALS = [name for name in METHODS if name not in ("pcnet", "odem", "particles")]
LEVELS = Noise(np.array([0.2, 0.3, 0.5, 0.7]), np.array([0.5, 0.5]))


@pytest.mark.parametrize("name", TASKS)
def test_flows_of_numpy_are_those_of_torch(name):
    task = TASKS[name]
    rng = np.random.default_rng(0)
    x, theta = rng.normal(size=task.system.dim), np.array(task.system.parameters)
    wanted = task.system.flow(torch.as_tensor(x), torch.as_tensor(theta))
    np.testing.assert_allclose(task.flow(np, x, theta), wanted, atol=1e-12)
    np.testing.assert_allclose(task.observe(np, x), task.system.observe(torch.as_tensor(x)), atol=1e-12)


def test_process_noise_of_constant_velocity_is_that_of_the_textbook():
    """Q = ∫ e^(As) D² e^(Aᵀs) ds: variances q t³/3 + p t and q t, covariance q t²/2."""
    covariance = DiscreteModel(TASKS["tracking"], "everything").process_covariance(np, LEVELS, 2.0)
    assert covariance[0, 0] == pytest.approx(0.04 * 2 + 0.25 * 8 / 3)
    assert covariance[0, 2] == covariance[2, 0] == pytest.approx(0.25 * 2)
    assert covariance[3, 3] == pytest.approx(0.49 * 2)
    assert covariance[0, 1] == 0


def test_blocks_stand_on_the_diagonal():
    found = block_diagonal(np, [np.eye(2), 3 * np.ones((1, 1))])
    np.testing.assert_array_equal(found, np.diag([1.0, 1.0, 3.0]))


def test_fits_find_the_maximum_of_a_likelihood():
    """−200 |logs − best|² with a prior of width 3 has its maximum within 1/3600 of the way from best to start."""
    best, start = np.array([0.5, -1.2]), np.zeros(2)
    found = fit(lambda logs: (-200 * float((logs - best) @ (logs - best)), -400 * (logs - best)), start)
    np.testing.assert_allclose(found, best, atol=1e-3)
    nearest = search(lambda logs: -float((logs - best) @ (logs - best)), start, 1)
    np.testing.assert_array_equal(nearest, [0.0, -2.0])


def test_a_fit_passes_by_where_the_likelihood_is_not_finite():
    assert fit(lambda logs: (math.nan, logs), np.array([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_intervals_of_shares_are_those_of_wilson():
    """10 of 10: from 1 / (1 + z²/n) to 1."""
    low, high = interval(1.0, 10)
    assert low == pytest.approx(1 / (1 + 1.96**2 / 10))
    assert high == pytest.approx(1.0)


def test_repeated_values_count_once():
    values = (np.random.default_rng(0).random(400) < 0.5).astype(float)
    assert effective_size(values) == pytest.approx(400, rel=0.35)
    assert effective_size(np.repeat(values, 10)) == pytest.approx(400, rel=0.5)


def test_scores_of_the_truth():
    data = simulate(TASKS["tracking"].system, [1, 2])
    states = data.states[1].numpy()
    found = score("tracking", data, 1, Beliefs(states, np.ones_like(states), np.zeros(0), np.zeros(0), -1.0))
    assert (found["whole"], found["coverage"], found["lost"]) == (0.0, 1.0, 0.0)
    shifted = Beliefs(states + data.scale.numpy(), 0 * states, np.zeros(0), np.zeros(0), -1.0)
    assert score("tracking", data, 1, shifted)["whole"] == pytest.approx(1.0)
    assert score("tracking", data, 1, None) == {"lost": 1.0}


def cell(method, whole, coverage=0.95, lost=0.0, wanted=1):
    row = {"seed": 1, "seconds": 0.5, "first": 1.0, "failure": "", "lost": lost}
    if not lost:
        row |= {"whole": whole**2, "half": whole**2, "coverage": coverage, "effective": 1000.0, "log_score": 0.0}
    content = {"task": "tracking", "method": method, "information": "neither", "missing": None}
    return {**content, "rows": [row], "wanted": wanted}


def test_verdicts(tmp_path):
    contents = [
        cell("pcnet", 0.33),
        cell("dynamax-ekf", 0.30),
        cell("dynamax-ukf", 0.31),
        cell("filterpy", 0.10, coverage=0.5),
        cell("cuthbert", 0.0, lost=1.0),
        cell("odem", 0.20, wanted=2),
    ]
    cells = [Cell(each["task"], each["method"], each["information"]) for each in contents]
    for each, content in zip(cells, contents, strict=True):
        path = each.path(tmp_path, [1])
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**content, "code": code_of(each.method)}))
    table = judge(cells, [1], tmp_path)
    assert table["verdict"].tolist() == ["10 % behind", "best", "within 5 %", "overconfident", "diverged", "too slow"]
    lost = losses(table)
    assert len(lost) == 2
    assert "10 % behind" in lost[0]
    assert "best: dynamax EKF" in lost[0]
    assert "in the second half it is 1.10 times" in lost[0]
    assert summarise(contents[0])["microseconds"] == pytest.approx(0.5e6 / TASKS["tracking"].system.samples)


def test_seeds_of_reports_are_apart():
    assert DEVELOPMENT + 1000 < HELD_OUT < HELD_OUT + 1000 < REPORTED


def test_a_tiny_run_is_not_done_twice(tmp_path, monkeypatch):
    short = TASKS["tracking"].system._replace(samples=20)
    monkeypatch.setitem(TASKS, "tracking", TASKS["tracking"]._replace(system=short))
    settings = {"seeds": 1, "tasks": ["tracking"], "first_seed": DEVELOPMENT, "processes": 1}
    late = run_arena(tmp_path, methods=["pcnet"], minutes=0.0, **settings)
    assert late.left == 2
    assert "No cell has run yet" in late.markdown.read_text(encoding="utf-8")
    report = run_arena(tmp_path, methods=["pcnet"], **settings)
    text = report.markdown.read_text(encoding="utf-8")
    assert report.left == 0
    assert "Constant-velocity target" in text
    assert "Where pcnet loses" in report.html.read_text(encoding="utf-8")
    assert len(pd.read_csv(tmp_path / "cells.csv")) == 2
    first = list_cells(["tracking"], ["pcnet"])[0]
    before = first.path(tmp_path, [DEVELOPMENT]).stat().st_mtime_ns
    assert run_cell(first, [DEVELOPMENT], tmp_path, 0.0)
    assert first.path(tmp_path, [DEVELOPMENT]).stat().st_mtime_ns == before
    path = first.path(tmp_path, [DEVELOPMENT])
    path.write_text(path.read_text().replace(code_of("pcnet"), "older"))
    assert first.read(tmp_path, [DEVELOPMENT]) is None  # pcnet has changed since
    with pytest.raises(SettingError, match="there is no task 'trackin'"):
        run_arena(tmp_path, tasks=["trackin"])


def kalman(record: Record) -> tuple[np.ndarray, np.ndarray, float]:
    """The Kalman filter of the tracking task in closed form: means, standard deviations and log-evidence."""
    system = TASKS["tracking"].system
    mean, covariance = np.array(system.initial_mean), np.diag(np.square(system.initial_sd))
    H, means, sds, evidence = np.eye(2, 4), [], [], 0.0
    for t, y in zip(record.intervals, record.observations, strict=True):
        F = np.eye(4)
        F[0, 2] = F[1, 3] = t
        p, q = 0.02**2, 0.2**2
        one = np.array([[p * t + q * t**3 / 3, q * t**2 / 2], [q * t**2 / 2, q * t]])
        mean, covariance = F @ mean, F @ covariance @ F.T + np.kron(one, np.eye(2))
        S, error = covariance[:2, :2] + 0.25 * np.eye(2), y - mean[:2]
        evidence -= 0.5 * (error @ np.linalg.solve(S, error) + np.linalg.slogdet(2 * np.pi * S)[1])
        gain = covariance @ H.T @ np.linalg.inv(S)
        mean, covariance = mean + gain @ error, covariance - gain @ S @ gain.T
        means.append(mean)
        sds.append(np.sqrt(np.diag(covariance)))
    return np.array(means), np.array(sds), evidence / len(record.times)


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_are_kalman_filters_where_everything_is_linear(name):
    if METHODS[name].missing() or importlib.util.find_spec(METHODS[name].package) is None:
        pytest.skip(f"{METHODS[name].package} is not installed")
    task = TASKS["tracking"]._replace(gate=False)
    times = np.cumsum(np.array([0.0, 0.1, 0.3, 0.2, 2.0, 0.1, 0.2, 0.2]))
    y = np.random.default_rng(1).normal(size=(8, 2))
    record = Record(times, y, np.zeros((8, 0)), np.zeros((8, 2), bool))
    found, (means, sds, evidence) = METHODS[name].build(task, "everything")(record), kalman(record)
    np.testing.assert_allclose(found.mean, means, atol=1e-4)  # dynamax has weights of sigma points in single precision
    np.testing.assert_allclose(found.sd, sds, atol=1e-4)
    assert found.log_score == pytest.approx(evidence, abs=1e-4)
