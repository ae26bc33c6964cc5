"""Precisions as Kronecker products, dense or not, against dense matrices and autograd."""

from types import SimpleNamespace

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
from pcnet.numerics.precision import CholeskyPrecision, Precision, weighted_squares

EPS = np.finfo(float).eps
RNG = np.random.default_rng(20)


def tensor(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


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
    """As sent by a precision node, for a batch of lengthscales."""
    mean = np.linspace(-2.0, 3.0, 2 * dim).reshape(2, dim)
    node = PrecisionNode("noise", mean=mean, sd=1.0, correlation_time=[0.5, 1.5])
    link = Weighs(node, SimpleNamespace(name="child", shape=ErrorShape(rows, dim)))
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
def test_score_and_information_of_a_coupled_precision(rows, dim):
    """Gradient and curvature by autograd; the expected curvature is that at the expected moment, rows · Π⁻¹."""
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


def test_the_score_vanishes_at_the_maximum_likelihood_precision():
    """At Π = rows · M⁻¹, for any order of the channels."""
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
