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


@pytest.mark.parametrize("q", [1, 2, 3, 6])
def test_value_and_slope_of_quadratic_functions_are_exact(q):
    """Of a + Bs + ½sᵀHs the mean is that of m plus ½tr(HP), and the regression slope is the mean derivative B + Hm."""
    mean, covariance = gaussian(q)
    generator = torch.Generator().manual_seed(100 + q)
    a, b, h = (torch.randn(4, *(q,) * k, generator=generator, dtype=F64) for k in range(3))
    h = 0.5 * (h + h.mT)

    def function(points):
        return a + points @ b.T + 0.5 * torch.einsum("bki,dij,bkj->bkd", points, h, points)

    found = regress(function, mean, covariance)
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


def test_the_residual_of_a_quadratic_function_of_one_number_is_its_variance():
    """Var ½H(s − m)² = ½H²P²."""
    mean, covariance = gaussian(1)
    found = regress(lambda points: 0.5 * 3.0 * points**2, mean, covariance)
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
