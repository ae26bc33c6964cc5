"""Laplace posteriors: covariances from curvatures, also indefinite ones, against numpy."""

import math

import numpy as np
import pytest
import torch

from pcnet.numerics.laplace import covariance_of, laplace_posterior
from support.matrices import log_det, rotated

EPS = np.finfo(float).eps
RNG = np.random.default_rng(20)


def tensor(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def definite(n: int, spread: float) -> np.ndarray:
    return rotated(list(10.0 ** np.linspace(-spread, spread, n)))


@pytest.mark.parametrize("n", [1, 2, 6, 9])
def test_a_definite_curvature_is_unchanged(n):
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
def test_an_indefinite_curvature_is_clamped(values):
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


def test_only_indefinite_elements_are_regularised():
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


def test_the_argument_is_not_modified():
    curvature = tensor(np.stack([np.diag([-1.0, 2.0]), np.eye(2)]))
    before = curvature.clone()
    laplace_posterior(curvature)
    assert torch.equal(curvature, before)


def test_non_finite_elements_do_not_affect_other_covariances():
    good = definite(3, 1.0)
    flat, lost = np.diag([1.0, 2.0, 0.0]), np.full((3, 3), np.nan)
    found = covariance_of(tensor(np.stack([good, flat, lost, good])))
    alone = covariance_of(tensor(good[None]))[0]
    assert torch.equal(found[0], alone)
    assert torch.equal(found[3], alone)
    np.testing.assert_allclose(found[1].numpy(), np.diag([1.0, 0.5, 0.0]), atol=1e-12)


def test_non_finite_curvatures_stay_non_finite():
    curvatures = tensor(np.stack([np.eye(2), np.full((2, 2), np.nan), np.array([[np.inf, 0], [0, 1.0]])]))
    found = laplace_posterior(curvatures)
    assert found.regularised is None
    assert found.log_det_covariance[0].item() == 0.0
    assert not found.log_det_covariance[1:].isfinite().any()
