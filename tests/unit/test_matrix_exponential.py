"""The exponential step and log|det| of small matrices, against mpmath in many digits."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pcnet.numerics.matrix_exponential import exponential_step, log_abs_det
from support.matrices import log_det, rotated

EPS = np.finfo(float).eps
RNG = np.random.default_rng(20)


def tensor(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def exact_step(jacobian: np.ndarray, flow: np.ndarray, time: float) -> np.ndarray:
    """The last column of exp(t[[J, f], [0, 0]]) in 80 digits, rounded once, at the end."""
    n = len(flow)
    with mpmath.workdps(80):
        m = mpmath.zeros(n + 1)
        for i in range(n):
            for j in range(n):
                m[i, j] = mpmath.mpf(float(jacobian[i, j])) * mpmath.mpf(float(time))
            m[i, n] = mpmath.mpf(float(flow[i])) * mpmath.mpf(float(time))
        grown = mpmath.expm(m, method="taylor")
        return np.array([float(grown[i, n]) for i in range(n)])


def skew(size: float) -> np.ndarray:
    a = RNG.standard_normal((4, 4))
    return size * (a - a.T)


JACOBIANS = {
    "ordinary": RNG.standard_normal((4, 4)),
    "zero": np.zeros((4, 4)),
    "tiny": 1e-12 * RNG.standard_normal((4, 4)),
    "subnormal": 1e-308 * RNG.standard_normal((4, 4)),
    "nilpotent": np.eye(4, k=1),
    "nilpotent, large": 1e3 * np.eye(4, k=1),
    "defective": -0.5 * np.eye(4) + np.eye(4, k=1),
    "defective, stiff": -500.0 * np.eye(4) + 300.0 * np.eye(4, k=1),
    "singular": rotated([-3.0, -1.0, 0.0, 0.0]),
    "singular, stiff": rotated([-1e5, -1.0, 0.0, 0.0]),
    "stiff": rotated([-1e6, -1e3, -1.0, -1e-3]),
    "stiff, graded": np.diag([-1e6, -1e2, -1.0, -1e-6]),
    "stiff, not normal": np.diag([-1e6, -1e3, -1.0, -0.1]) + np.triu(1e4 * RNG.standard_normal((4, 4)), 1),
    "rotation": skew(1.0),
    "rotation, fast": skew(1e4),
    "growing": rotated([20.0, 5.0, -1.0, -10.0]),
    "saddle, stiff": rotated([3.0, 0.5, -1e4, -1e6]),
    "huge": -1e6 * np.eye(4),
}


FLOWS = RNG.standard_normal((len(JACOBIANS), 4)) * 10.0 ** RNG.integers(-8, 8, (len(JACOBIANS), 1))


TIMES = [1e-6, 0.018, 1.0]


def step_tolerance(jacobian: np.ndarray, time: float) -> float:
    """Rounding the entries of J alone moves the answer by up to ‖Jt‖ eps."""
    return 1e-14 + EPS * np.abs(jacobian * time).sum(-1).max()


@pytest.mark.parametrize("time", TIMES)
def test_step_of_every_kind_in_one_batch(time):
    stacked = np.stack(list(JACOBIANS.values()))
    together = exponential_step(tensor(stacked), tensor(FLOWS), torch.full((len(FLOWS),), time, dtype=torch.float64))
    for ours, (name, jacobian), flow in zip(together.numpy(), JACOBIANS.items(), FLOWS, strict=True):
        expected = exact_step(jacobian, flow, time)
        deviation = np.abs(ours - expected).max() / np.abs(expected).max()
        assert deviation < step_tolerance(jacobian, time), name


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", JACOBIANS)
def test_step_does_not_depend_on_the_batch(name, time):
    """The number of doublings is that of the stiffest element, without effect on the others."""
    stacked, i = np.stack(list(JACOBIANS.values())), list(JACOBIANS).index(name)
    times = torch.full((len(FLOWS),), time, dtype=torch.float64)
    together = exponential_step(tensor(stacked), tensor(FLOWS), times)[i]
    alone = exponential_step(tensor(stacked[i : i + 1]), tensor(FLOWS[i : i + 1]), times[:1])[0]
    assert (together - alone).abs().max() <= max(1e-12, step_tolerance(stacked[i], time)) * alone.abs().max()


def test_step_of_a_mixed_batch_of_times():
    names = ["ordinary", "stiff", "defective", "huge"]
    jacobians, times = np.stack([JACOBIANS[name] for name in names]), np.array([3.0, 1e-3, 8.0, 0.5])
    together = exponential_step(tensor(jacobians), tensor(FLOWS[:4]), tensor(times)).numpy()
    for ours, jacobian, flow, time in zip(together, jacobians, FLOWS, times, strict=False):
        expected = exact_step(jacobian, flow, time)
        assert np.abs(ours - expected).max() < step_tolerance(jacobian, time) * np.abs(expected).max()


def test_slow_components_beside_fast_ones():
    """Diagonal, so that every component has its own closed form, over 12 powers of ten of speed: t φ₁(λt) f."""
    rates = -(10.0 ** np.arange(-6, 7))
    ours = exponential_step(tensor(np.diag(rates))[None], torch.ones(1, 13, dtype=torch.float64), tensor([1.0]))[0]
    np.testing.assert_allclose(ours.numpy(), np.expm1(rates) / rates, rtol=1e-13)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(st.floats(-1.0, 1.0, allow_subnormal=False), min_size=9, max_size=9),
    flow=st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=3, max_size=3),
    size=st.floats(-8.0, 2.0),
    time=st.floats(1e-6, 1.0),
)
def test_step_of_any_small_matrix(entries, flow, size, time):
    jacobian = np.reshape(entries, (3, 3)) * 10.0**size - 10.0**size * np.eye(3)
    flow = np.array(flow)
    ours = exponential_step(tensor(jacobian)[None], tensor(flow)[None], tensor([time]))[0].numpy()
    expected = exact_step(jacobian, flow, time)
    growth = np.linalg.norm(exact_growth(jacobian, time), 2) * time * np.abs(flow).max()
    assert np.abs(ours - expected).max() <= step_tolerance(jacobian, time) * 4 * growth


def exact_growth(jacobian: np.ndarray, time: float) -> np.ndarray:
    """φ₁(Jt), column by column."""
    return np.stack([exact_step(jacobian, unit, time) for unit in np.eye(len(jacobian))], -1) / time


@pytest.mark.parametrize("time", [0.0, 1e-300, 0.5])
def test_step_of_zero_flow_is_zero(time):
    ours = exponential_step(tensor(JACOBIANS["stiff"])[None], torch.zeros(1, 4, dtype=torch.float64), tensor([time]))
    assert (ours == 0).all()


def test_step_of_zero_flow_in_single_precision():
    ours = exponential_step(-torch.eye(3)[None], torch.zeros(1, 3), torch.ones(1))
    assert (ours == 0).all()


@pytest.mark.parametrize("scale", [1e-290, 1e-30, 1e30, 1e290])
def test_step_is_linear_in_the_flow(scale):
    jacobian, flow = JACOBIANS["ordinary"], FLOWS[0] / np.abs(FLOWS[0]).max()
    ours = exponential_step(tensor(jacobian)[None], tensor(flow * scale)[None], tensor([1.0]))[0].numpy()
    np.testing.assert_allclose(ours / scale, exact_step(jacobian, flow, 1.0), rtol=1e-13)


def test_step_in_single_precision():
    names = ["ordinary", "zero", "defective", "singular", "stiff", "rotation"]
    jacobians = np.stack([JACOBIANS[name] for name in names]).astype(np.float32)
    flows = (FLOWS[: len(names)] / np.abs(FLOWS[: len(names)]).max(-1, keepdims=True)).astype(np.float32)
    times = np.full(len(names), 0.25, dtype=np.float32)
    together = exponential_step(*map(torch.from_numpy, (jacobians, flows, times)))
    assert together.dtype == torch.float32
    for ours, jacobian, flow in zip(together.numpy(), jacobians, flows, strict=True):
        expected = exact_step(jacobian, flow, 0.25)
        tolerance = (2e-6 + 4 * np.finfo(np.float32).eps * np.abs(jacobian * 0.25).sum(-1).max()) * np.abs(
            expected
        ).max()
        assert np.abs(ours - expected).max() < tolerance


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_step_beside_an_element_that_is_not_finite(bad):
    jacobians = np.stack([JACOBIANS["singular, stiff"], np.full((4, 4), bad)])
    ours = exponential_step(tensor(jacobians), tensor(FLOWS[:2]), tensor([1.0, 1.0]))
    assert not ours[1].isfinite().all()
    expected = exact_step(jacobians[0], FLOWS[0], 1.0)
    assert np.abs(ours[0].numpy() - expected).max() < step_tolerance(jacobians[0], 1.0) * np.abs(expected).max()


def test_log_abs_det():
    ordinary = np.random.default_rng(6).standard_normal((6, 6))
    matrices = np.stack([ordinary, rotated([-1e6, -1.0, 1e-3, 2.0, 3.0, -4.0]), -np.eye(6)])
    deviation = np.abs(log_abs_det(tensor(matrices)).numpy() - [log_det(m) for m in matrices])
    assert (deviation < 1e-14 + 4 * EPS * np.linalg.cond(matrices)).all()


def test_log_abs_det_far_outside_the_range_of_a_double():
    ours = log_abs_det(tensor(np.stack([1e-80 * np.eye(6), 1e80 * np.eye(6)]))).numpy()
    np.testing.assert_allclose(ours, [-480 * math.log(10), 480 * math.log(10)], rtol=1e-13)


def test_log_abs_det_of_a_singular_matrix_is_minus_infinity():
    assert log_abs_det(tensor(np.stack([np.diag([1.0, 0.0]), np.eye(2)]))).tolist() == [-math.inf, 0.0]
