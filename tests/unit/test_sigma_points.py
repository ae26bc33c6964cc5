"""Regression on points: against the moments of polynomials of Gaussians in closed form."""

import numpy as np
import pytest
import torch

from pcnet.numerics.sigma_points import regress

F64 = torch.float64


def gaussian(q, batch=2):
    generator = torch.Generator().manual_seed(q)
    root = torch.randn(batch, q, q, generator=generator, dtype=F64)
    return torch.randn(batch, q, generator=generator, dtype=F64), root @ root.mT + 0.1 * torch.eye(q, dtype=F64)


@pytest.mark.parametrize("points", ["unscented", "cubature", "second_order"])
@pytest.mark.parametrize("q", [1, 2, 3, 6])
def test_value_and_slope_of_quadratic_functions_are_exact(q, points):
    """Of a + Bs + ½sᵀHs the mean is that of m plus ½tr(HP), and the regression slope is the mean derivative B + Hm."""
    mean, covariance = gaussian(q)
    generator = torch.Generator().manual_seed(100 + q)
    a, b, h = (torch.randn(4, *(q,) * k, generator=generator, dtype=F64) for k in range(3))
    h = 0.5 * (h + h.mT)

    def function(at):
        return a + at @ b.T + 0.5 * torch.einsum("bki,dij,bkj->bkd", at, h, at)

    found = regress(function, mean, covariance, points)
    expected = function(mean[:, None])[:, 0] + 0.5 * torch.einsum("dij,bij->bd", h, covariance)
    # a relative variance of 1e-9 is added before the covariance is factorised
    torch.testing.assert_close(found.value, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.jacobian, b + torch.einsum("dij,bj->bdi", h, mean), rtol=1e-10, atol=1e-10)
    assert torch.linalg.eigvalsh(found.residual).min() > -1e-12


def test_linear_functions_leave_no_residual():
    mean, covariance = gaussian(3)
    slope = torch.tensor([[0.5, -1.0, 2.0], [0.1, 0.0, -0.3]], dtype=F64)
    found = regress(lambda points: 1.0 + points @ slope.T, mean, covariance)
    torch.testing.assert_close(found.value, 1.0 + mean @ slope.T)
    torch.testing.assert_close(found.jacobian, slope.expand(2, 2, 3))
    assert found.residual.abs().max() < 1e-25


@pytest.mark.parametrize("points", ["unscented", "second_order"])
def test_the_residual_of_a_quadratic_function_of_one_number_is_its_variance(points):
    """Var ½H(s − m)² = ½H²P²."""
    mean, covariance = gaussian(1)
    found = regress(lambda points: 0.5 * 3.0 * points**2, mean, covariance, points)
    np.testing.assert_allclose(found.residual, 0.5 * 9.0 * covariance**2, rtol=1e-8)


def test_slopes_of_smooth_functions_are_mean_derivatives():
    """For a narrow Gaussian they approach the derivative, with an error in proportion to the variance."""
    mean, covariance = gaussian(2)

    def error(scale):
        found = regress(torch.sin, mean, scale * covariance)
        return float((found.jacobian - mean.cos().diag_embed()).abs().max())

    assert error(1e-3) < 5e-3
    assert error(1e-3) / error(1e-4) == pytest.approx(10, rel=0.05)


def test_variables_that_are_known_exactly_have_finite_slopes():
    mean = torch.tensor([[0.5, 2.0]], dtype=F64)
    covariance = torch.tensor([[[0.0, 0.0], [0.0, 0.3]]], dtype=F64)
    found = regress(lambda points: points[..., :1] * points[..., 1:], mean, covariance)
    assert all(torch.isfinite(part).all() for part in found)
    assert found.value.item() == pytest.approx(1.0, rel=1e-9)
    assert found.jacobian[0, 0, 1].item() == pytest.approx(0.5, rel=1e-9)


def test_the_residual_of_second_order_is_that_of_a_sum_of_squares():
    """Var Σ ½h_i s_i² = Σ ½h_i²P_ii² for independent elements."""
    mean, variances = torch.zeros(1, 4, dtype=F64), torch.tensor([0.1, 0.5, 2.0, 1.0], dtype=F64)
    h = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=F64)
    found = regress(lambda at: 0.5 * (h * at**2).sum(-1, keepdim=True), mean, variances.diag()[None], "second_order")
    np.testing.assert_allclose(found.residual.squeeze(), (0.5 * h**2 * variances**2).sum(), rtol=1e-8)


def test_cubature_has_the_moments_of_its_points():
    """Third-degree cubature of Arasaratnam and Haykin: 2q points of equal weight at √q; moments of sin by numpy."""
    mean, covariance = gaussian(4, batch=1)
    root = np.linalg.cholesky(covariance[0].numpy())
    at = mean[0].numpy() + np.sqrt(4) * np.concatenate([root.T, -root.T])
    values = np.sin(at)
    found = regress(torch.sin, mean, covariance, "cubature")
    np.testing.assert_allclose(found.value[0], values.mean(0), rtol=1e-7)
    explained = found.jacobian[0] @ covariance[0] @ found.jacobian[0].mT + found.residual[0]
    np.testing.assert_allclose(explained, np.cov(values.T, bias=True), rtol=1e-6, atol=1e-7)
