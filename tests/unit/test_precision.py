"""The linear algebra of a tick, against mpmath with many digits and against dense matrices."""

import math
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import Weighs
from pcnet.model.node import BatchSpec, ErrorShape
from pcnet.nodes.precision import PrecisionNode
from pcnet.numerics.laplace import covariance_of, laplace_posterior
from pcnet.numerics.matrix_exponential import exponential_step, log_abs_det
from pcnet.numerics.precision import CholeskyPrecision, Precision, weighted_squares

EPS = np.finfo(float).eps
RNG = np.random.default_rng(20)


def tensor(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


# --- the exponential step ---------------------------------------------------------------------------------------------
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


def rotated(values: list[float]) -> np.ndarray:
    """A symmetric matrix with these eigenvalues."""
    q, _ = np.linalg.qr(np.random.default_rng(len(values)).standard_normal((len(values), len(values))))
    return (q * np.array(values)) @ q.T


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
    """The whole batch is doubled as often as its stiffest element needs; no element notices."""
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
def test_step_of_no_flow_is_nothing(time):
    ours = exponential_step(tensor(JACOBIANS["stiff"])[None], torch.zeros(1, 4, dtype=torch.float64), tensor([time]))
    assert (ours == 0).all()


def test_step_of_no_flow_in_single_precision():
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


# --- posteriors -------------------------------------------------------------------------------------------------------
def log_det(matrix: np.ndarray) -> float:
    """log|det| in 60 digits."""
    with mpmath.workdps(60):
        return float(mpmath.log(abs(mpmath.det(mpmath.matrix(matrix.tolist())))))


def definite(n: int, spread: float) -> np.ndarray:
    return rotated(list(10.0 ** np.linspace(-spread, spread, n)))


@pytest.mark.parametrize("n", [1, 2, 6, 9])
def test_posterior_of_a_definite_curvature_is_left_alone(n):
    curvatures = np.stack([definite(n, spread) for spread in (0.0, 1.0, 3.0)])
    found = laplace_posterior(tensor(curvatures))
    assert found.regularised is None
    np.testing.assert_array_equal(found.precision.numpy(), curvatures)
    expected = np.array([-log_det(c) for c in curvatures])
    tolerance = 1e-14 + 4 * EPS * np.linalg.cond(curvatures)
    assert (np.abs(found.log_det_covariance.numpy() - expected) < tolerance).all()
    assert (np.abs(np.linalg.slogdet(curvatures)[1] + expected) < tolerance).all()


@pytest.mark.parametrize(
    "values",
    [
        [-2.0, 1.0, 3.0],  # one direction curves the wrong way; the floor is 1e-9
        [-5e6, 1.0, 4e5],  # the floor follows the largest in size, which is negative here: 5e-6
        [-1e-3, 1e5, 2e6],  # 2e-6
        [-1.0, -2.0, -3.0],
        [0.0, 0.0, 0.0],
        [-1e-12, 1e-10, 1e-3],  # positive, yet below the floor: lifted as well
    ],
)
def test_posterior_of_an_indefinite_curvature_is_clamped(values):
    curvature = np.diag(values)  # diagonal: its eigenvalues are exact
    turned = rotated(values)
    found = laplace_posterior(tensor(np.stack([curvature, turned])))
    floor = max(1e-9, 1e-12 * np.abs(values).max())
    lifted = np.maximum(values, floor)
    assert found.regularised is not None
    assert found.regularised.tolist() == [True, True]
    np.testing.assert_allclose(found.precision[0].numpy(), np.diag(lifted), rtol=1e-12, atol=0)
    np.testing.assert_allclose(found.log_det_covariance[0].item(), -np.log(lifted).sum(), rtol=1e-12)
    values_, vectors = np.linalg.eigh(turned)
    lifted = np.maximum(values_, max(1e-9, 1e-12 * np.abs(values_).max()))
    rounding = 1e-14 * np.abs(values_).max()
    np.testing.assert_allclose(found.precision[1].numpy(), (vectors * lifted) @ vectors.T, rtol=0, atol=rounding)
    slack = rounding / lifted.min() if (values_ > floor).all() else (rounding / lifted[values_ > floor]).sum()
    assert (
        abs(found.log_det_covariance[1].item() + np.log(lifted).sum()) <= slack + 1e-12 * np.abs(np.log(lifted)).sum()
    )


def test_posterior_mends_only_what_needs_it():
    good = [definite(4, 2.0), definite(4, 0.5)]
    bad = np.diag([-1.0, 2.0, 3.0, 4.0])
    broken = np.full((4, 4), np.nan)
    found = laplace_posterior(tensor(np.stack([good[0], bad, good[1], broken, bad])))
    assert found.regularised is not None
    assert found.regularised.tolist() == [False, True, False, False, True]
    for i, matrix in ((0, good[0]), (2, good[1])):
        np.testing.assert_array_equal(found.precision[i].numpy(), matrix)
        assert found.log_det_covariance[i].item() == pytest.approx(-log_det(matrix), rel=1e-11)
    assert found.precision[3].isnan().all()
    for i in (1, 4):
        np.testing.assert_allclose(found.precision[i].numpy(), np.diag([1e-9, 2.0, 3.0, 4.0]), rtol=1e-12)
        assert found.log_det_covariance[i].item() == pytest.approx(-math.log(24e-9), rel=1e-12)


def test_posterior_does_not_write_into_what_it_is_given():
    curvature = tensor(np.stack([np.diag([-1.0, 2.0]), np.eye(2)]))
    before = curvature.clone()
    laplace_posterior(curvature)
    assert torch.equal(curvature, before)


def test_covariance_of_broken_elements_leaves_their_neighbours_alone():
    good = definite(3, 1.0)
    flat, lost = np.diag([1.0, 2.0, 0.0]), np.full((3, 3), np.nan)
    found = covariance_of(tensor(np.stack([good, flat, lost, good])))
    alone = covariance_of(tensor(good[None]))[0]
    assert torch.equal(found[0], alone)
    assert torch.equal(found[3], alone)
    np.testing.assert_allclose(found[1].numpy(), np.diag([1.0, 0.5, 0.0]), atol=1e-12)


def test_posterior_leaves_what_is_not_finite_to_be_reported():
    curvatures = tensor(np.stack([np.eye(2), np.full((2, 2), np.nan), np.array([[np.inf, 0], [0, 1.0]])]))
    found = laplace_posterior(curvatures)
    assert found.regularised is None
    assert found.log_det_covariance[0].item() == 0.0
    assert not found.log_det_covariance[1:].isfinite().any()


# --- precisions, formed where they are small and not formed where they are large ---
sizes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))


@hypothesis_settings(max_examples=40, deadline=None)
@given(sizes)
@example((4, 30, 2, 5, 1))
@example((2, 17, 1, 3, 2))
def test_precision_is_a_kronecker_product(shape):
    rows, dim, batch, n, seed = shape
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((batch, rows, rows))
    temporal, channel = a @ a.transpose(0, 2, 1) + np.eye(rows), np.exp(rng.standard_normal((batch, dim)))
    error, slope = rng.standard_normal((batch, rows, dim)), rng.standard_normal((batch, rows * dim, n))
    precision = Precision(tensor(temporal), tensor(channel), torch.zeros(batch, dtype=torch.float64))
    dense = np.stack([np.kron(t, np.diag(c)) for t, c in zip(temporal, channel, strict=True)])
    weighted = precision.weigh(tensor(error))
    expected = (dense @ error.reshape(batch, -1, 1)).reshape(batch, rows, dim)
    np.testing.assert_allclose(weighted.numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        precision.quadratic_form(tensor(slope)).numpy(),
        slope.transpose(0, 2, 1) @ dense @ slope,
        rtol=1e-11,
        atol=1e-11,
    )
    by_channel = weighted_squares(weighted, tensor(error)).numpy()
    whole = np.einsum("bi,bij,bj->b", error.reshape(batch, -1), dense, error.reshape(batch, -1))
    np.testing.assert_allclose(by_channel.sum(-1), whole, rtol=1e-11)
    for i in range(dim):  # a channel's share is that of its errors alone: temporal · e^λ
        own = channel[:, i] * np.einsum("bi,bij,bj->b", error[..., i], temporal, error[..., i])
        np.testing.assert_allclose(by_channel[:, i], own, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (1, 4), (3, 2), (4, 3)])
def test_log_det_of_a_precision_is_that_of_the_kronecker_product(rows, dim):
    """As a precision node sends it, for a batch of widths."""
    mean = np.linspace(-2.0, 3.0, 2 * dim).reshape(2, dim)
    node = PrecisionNode("noise", mean=mean, sd=1.0, correlation_time=[0.5, 1.5])
    link = Weighs(node, SimpleNamespace(name="child", error_shape=ErrorShape(rows, dim)))
    links, spec = Neighbours((), (link,)), BatchSpec(2, torch.float64, torch.device("cpu"), torch.Size([2]))
    bound = node.bind(links, spec)
    context = NodeContext("noise", links, bound, node.init(bound, spec), None)
    precision = node.prediction(context, link).value
    np.testing.assert_allclose(precision.channel.numpy(), np.exp(mean), rtol=1e-14)
    parts = (precision.temporal, precision.channel, precision.log_det)
    for temporal, channel, ours in zip(*(v.numpy() for v in parts), strict=True):
        sign, expected = np.linalg.slogdet(np.kron(temporal, np.diag(channel)))
        assert sign == 1
        np.testing.assert_allclose(ours, expected, rtol=1e-11, atol=1e-11)


# --- precisions that couple channels ----------------------------------------------------------------------------------
def coupled(rows, dim, batch, seed):
    """A coupled precision, its temporal part, and its matrix Π = LLᵀ by numpy."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((batch, rows, rows))
    temporal, log_channel = a @ a.transpose(0, 2, 1) + np.eye(rows), rng.standard_normal((batch, dim))
    factor = np.tril(rng.standard_normal((batch, dim, dim)), -1) + np.eye(dim)
    root = factor.transpose(0, 2, 1) * np.exp(0.5 * log_channel)[:, None, :]
    matrix = root @ root.transpose(0, 2, 1)
    log_det = np.linalg.slogdet(np.stack([np.kron(t, m) for t, m in zip(temporal, matrix, strict=True)]))[1]
    return CholeskyPrecision(*map(tensor, (temporal, log_channel, factor, log_det))), temporal, matrix


@hypothesis_settings(max_examples=40, deadline=None)
@given(sizes)
@example((4, 30, 2, 5, 1))
@example((2, 17, 1, 3, 2))
def test_coupled_precision_is_a_kronecker_product(shape):
    rows, dim, batch, n, seed = shape
    precision, temporal, matrix = coupled(rows, dim, batch, seed)
    rng = np.random.default_rng(seed)
    error, slope = rng.standard_normal((batch, rows, dim)), rng.standard_normal((batch, rows * dim, n))
    dense = np.stack([np.kron(t, m) for t, m in zip(temporal, matrix, strict=True)])
    size = np.abs(dense).max()
    np.testing.assert_allclose(precision.channel.numpy(), matrix, rtol=1e-12, atol=1e-14 * size)
    np.testing.assert_allclose(precision.dense().numpy(), dense, rtol=1e-12, atol=1e-13 * size)
    expected = (dense @ error.reshape(batch, -1, 1)).reshape(batch, rows, dim)
    np.testing.assert_allclose(precision.weigh(tensor(error)).numpy(), expected, rtol=1e-11, atol=1e-12 * size)
    expected = slope.transpose(0, 2, 1) @ dense @ slope
    np.testing.assert_allclose(precision.quadratic_form(tensor(slope)).numpy(), expected, rtol=1e-11, atol=1e-11 * size)


def coupled_energy(parameters, moment, rows, dim):
    """½tr(ΠM) − ½rows log|Π|, by the definition of Π = TᵀΛT."""
    i, j = torch.tril_indices(dim, dim, -1)
    factor = torch.eye(dim, dtype=torch.float64).index_put((i, j), parameters[dim:])
    matrix = factor.T @ torch.diag(parameters[:dim].exp()) @ factor
    return 0.5 * (matrix * moment).sum() - 0.5 * rows * torch.logdet(matrix)


@pytest.mark.parametrize("dim", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_an_error_says_of_a_coupled_precision(rows, dim):
    """Slope and curvature by autograd; the expected curvature is the one at the expected moment, rows · Π⁻¹."""
    precision, temporal, matrix = coupled(rows, dim, 2, 5)
    error = tensor(np.random.default_rng(6).standard_normal((2, rows, dim)))
    weighted = precision.weigh(error)
    slope, curvature = precision.gradient(error, weighted), precision.curvature(error, weighted)
    i, j = torch.tril_indices(dim, dim, -1)
    for b in range(2):
        parameters = torch.cat([precision.log_channel[b], precision.factor[b, i, j]])
        moment = error[b].T @ tensor(temporal[b]) @ error[b]
        expected = torch.func.grad(coupled_energy)(parameters, moment, rows, dim)
        torch.testing.assert_close(slope[b], expected, rtol=1e-10, atol=1e-11)
        expected = torch.func.hessian(coupled_energy)(parameters, moment, rows, dim)
        torch.testing.assert_close(curvature[b], expected, rtol=1e-10, atol=1e-10)
        usual = rows * torch.linalg.inv(tensor(matrix[b]))
        expected = torch.func.hessian(coupled_energy)(parameters, usual, rows, dim)
        torch.testing.assert_close(precision.information()[b], expected, rtol=1e-10, atol=1e-10)
        assert torch.linalg.eigvalsh(precision.information()[b]).min() > 0


def test_an_error_is_content_with_the_precision_that_fits_it_best():
    """The slope vanishes where Π = rows · M⁻¹, in whatever order the channels are taken."""
    rng = np.random.default_rng(8)
    error = tensor(rng.standard_normal((1, 6, 3)))
    matrix = np.linalg.inv(error[0].T.numpy() @ error[0].numpy() / 6)
    root = np.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]  # upper triangular, Π = root rootᵀ
    scale = np.diag(root)
    precision = CholeskyPrecision(
        torch.eye(6, dtype=torch.float64)[None], tensor(2 * np.log(scale))[None], tensor((root / scale).T)[None], 0
    )
    np.testing.assert_allclose(precision.channel[0].numpy(), matrix, rtol=1e-12)
    assert precision.gradient(error, precision.weigh(error)).abs().max() < 1e-12


# --- determinants -----------------------------------------------------------------------------------------------------
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
