"""Recorders: values transformed block by block equal those transformed one by one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import SettingError
from pcnet.graphs import odem
from pcnet.model.node import Recordable
from pcnet.results import recorder as record
from pcnet.results.recorder import Column, Recorder


class Counter:
    """A quantity (B,) that is tick + element/10, with its square as transform, and the lengths it was asked for."""

    def __init__(self, batch: int = 2) -> None:
        self.tick, self.batch, self.asked = 0, batch, []

    def raw(self) -> torch.Tensor:
        self.tick += 1
        return self.tick + torch.arange(self.batch, dtype=torch.float64) / 10

    def transform(self, values: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(values))
        return torch.stack([values, values**2], -1)

    def recorder(self) -> Recorder:
        return Recorder({"n": Column(("n",), self.raw, self.transform)})


def add(recorder: Recorder, running=None) -> None:
    recorder.append(recorder.read(float(len(recorder)), running))


def expected(ticks: range, batch: int = 2) -> np.ndarray:
    values = np.array(ticks)[:, None] + np.arange(batch) / 10
    return np.stack([values, values**2], -1)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_transforms_of_a_block_are_those_of_its_values(length, monkeypatch):
    monkeypatch.setattr(record, "BLOCK", 4)
    counter = Counter()
    recorder = counter.recorder()
    assert recorder.tensor("n") is None
    for _ in range(length):
        add(recorder)
    assert counter.asked == [4 * 2] * ((length - 1) // 4)
    for _ in range(2):  # reading changes nothing
        np.testing.assert_allclose(recorder.tensor("n"), expected(range(1, length + 1)), rtol=1e-15)
    assert recorder.times == list(range(length))


def test_large_values_are_transformed_early(monkeypatch):
    monkeypatch.setattr(record, "BLOCK_BYTES", 3 * 100 * 8 + 1)
    counter = Counter(100)
    recorder = counter.recorder()
    for _ in range(10):
        add(recorder)
    assert counter.asked == [3 * 100] * 3
    np.testing.assert_allclose(recorder.tensor("n"), expected(range(1, 11), 100), rtol=1e-15)


def test_stopped_elements_are_nan():
    recorder = Counter().recorder()
    for running in (None, None, torch.tensor([True, False])):
        add(recorder, running)
    wanted = expected(range(1, 4))
    wanted[2, 1] = np.nan
    np.testing.assert_allclose(recorder.tensor("n"), wanted, rtol=1e-15)


@pytest.mark.parametrize("before", [0, 3, 20])
def test_old_blocks_are_dropped_within_the_limit(before, monkeypatch):
    monkeypatch.setattr(record, "BLOCK", 4)
    recorder = Recorder({"n": Column((), Counter().raw)})
    if before:
        recorder.restore([0.0] * before, {"n": torch.zeros(before, 2, dtype=torch.float64)}, {}, None)
    for tick in range(1, 31):
        add(recorder)
        recorder.keep_last(6)
        held = recorder.tensor("n")
        assert min(6, tick + before) <= len(held) < 6 + max(4, before) + 1
        own = min(6, tick)
        np.testing.assert_allclose(held[-own:, 0], np.arange(tick - own + 1, tick + 1))


def test_recorded_standard_deviations_are_those_of_each_tick(monkeypatch):
    """√diag Π⁻¹ by numpy, tick by tick."""
    monkeypatch.setattr(record, "BLOCK", 7)
    graph, schedule = odem(orders=2, every=3)
    session = graph.start(schedule, record=("mean", "sd", "covariance"))
    draw, wanted = np.random.default_rng(0), {name: [] for name in ("x", "theta")}
    for y in 1.5 + 0.1 * draw.normal(size=(20, 3)):
        session.step(y)
        for name, values in wanted.items():
            values.append(np.linalg.inv(session.state.nodes[name].precision[0].numpy()))
    result = session.result()
    for name, values in wanted.items():
        deviations = np.sqrt(np.diagonal(values, axis1=1, axis2=2))
        np.testing.assert_allclose(result.sd(name).reshape(20, -1), deviations, rtol=1e-9)
        np.testing.assert_allclose(result.traces[f"{name}.covariance"].values, values, rtol=1e-8, atol=1e-14)


def test_a_quantity_is_read_raw_and_then_transformed():
    quantity = Recordable(("n",), lambda ctx: ctx.state, torch.sqrt)
    assert quantity.read(SimpleNamespace(state=torch.tensor([4.0, 9.0]))).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("every", [0, -1, 10**30])
def test_a_period_that_no_run_has_is_rejected(every):
    with pytest.raises(SettingError, match="every"):
        pc.Record(every=every)
