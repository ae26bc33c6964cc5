"""Steps of flows: against automatic derivatives, matrix exponentials and quadrature."""

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from pcnet.numerics.transitions import (
    FlowAt,
    advance,
    exponential_minus_one,
    flow_step,
    known_step,
    local_linearisation,
    rk4,
    square_root_near_one,
)
from support.kalman import FLOW, exact_transition

F64 = torch.float64
X, THETA = torch.tensor([[0.3, -0.7, 0.5]], dtype=F64), torch.tensor([[0.8, -0.4]], dtype=F64)
H = torch.tensor([0.3], dtype=F64)
PUSH = np.array([[0.5, 0.0], [0.2, -1.0]])


def bent(x, theta):
    return torch.sin(x.roll(1, -1) * theta[..., :1]) - theta[..., 1:] * x**2 + 0.1 * x.prod(-1, keepdim=True)


def with_derivatives(function, theta):
    """A flow (B, d) with its derivatives, by automatic differentiation."""

    def at(x):
        by_state = torch.func.vmap(torch.func.jacrev(function, 0))(x, theta)
        by_theta = torch.func.vmap(torch.func.jacrev(function, 1))(x, theta)
        return FlowAt(function(x, theta), by_state, by_theta)

    return at


def linear(theta):
    """ẋ = Ax + Bθ."""
    a, b = torch.from_numpy(FLOW)[None], torch.from_numpy(PUSH)[None]
    return lambda x: FlowAt(x @ a[0].T + theta @ b[0].T, a, b)


@pytest.mark.parametrize("integrator", ["rk4", "euler"])
def test_tangents_of_steps_are_their_derivatives(integrator):
    step = flow_step(with_derivatives(bent, THETA), X, H, integrator)

    def end(x, theta):
        return advance(lambda points: bent(points, theta), x[:, None], H, integrator, None)[:, 0]

    torch.testing.assert_close(step.value, end(X, THETA), rtol=1e-14, atol=1e-15)
    by_state, by_theta = torch.func.jacrev(end, (0, 1))(X, THETA)
    torch.testing.assert_close(step.jacobian, by_state[:, :, 0], rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(step.parameter_jacobian, by_theta[:, :, 0], rtol=1e-13, atol=1e-15)


def test_rk4_has_the_fourth_order():
    def error(h):
        exact = solve_ivp(
            lambda _, x: bent(torch.from_numpy(x), THETA[0]).numpy(), (0, h), X[0].numpy(), rtol=1e-13, atol=1e-14
        ).y[:, -1]
        found = rk4(with_derivatives(bent, THETA), X, torch.tensor([h], dtype=F64)).value[0].numpy()
        return np.abs(found - exact).max()

    assert 25 < error(0.4) / error(0.2) < 40  # 2⁵ in one step


@pytest.mark.parametrize("h", [1e-3, 0.3, 5.0])
def test_local_linearisation_is_exact_for_linear_flows(h):
    """Against the matrix exponential of (x, θ) together."""
    theta = THETA
    step = local_linearisation(linear(theta), X[:, :2], torch.tensor([h], dtype=F64))
    whole = expm(h * np.block([[FLOW, PUSH], [np.zeros((2, 4))]]))
    np.testing.assert_allclose(step.jacobian[0], whole[:2, :2], rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(step.parameter_jacobian[0], whole[:2, 2:], rtol=1e-11, atol=1e-13)
    expected = whole[:2] @ np.r_[X[0, :2].numpy(), theta[0].numpy()]
    np.testing.assert_allclose(step.value[0], expected, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(step.second_half[0], expm(FLOW * h / 2), rtol=1e-11, atol=1e-13)


def test_many_points_advance_with_the_jacobian_of_one():
    """By local linearisation, all points of a linear flow end where each would alone."""
    points = torch.randn(1, 5, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    a = torch.from_numpy(FLOW)
    found = advance(lambda x: x @ a.T, points, H, "local_linearisation", a[None])
    np.testing.assert_allclose(found[0], points[0].numpy() @ expm(FLOW * 0.3).T, rtol=1e-12)


def diffused(h, integrator):
    density = np.array([0.7, 0.2])
    step = flow_step(linear(THETA), X[:, :2], torch.tensor([h], dtype=F64), integrator)
    return step.diffuse(torch.from_numpy(density)[None, None])[0, 0].numpy(), exact_transition(FLOW, density, h)[1]


def test_diffusions_gather_the_exact_covariance_to_fifth_order():
    """Against Van Loan's method: the error of a Runge–Kutta step falls by 2⁵ with half its length."""

    def error(h):
        found, exact = diffused(h, "rk4")
        return np.abs(found - exact).max()

    assert error(0.1) < 1e-6
    assert error(0.1) / error(0.05) > 20


@pytest.mark.parametrize("h", [0.05, 0.3, 3.0, 10.0])
def test_by_local_linearisation_diffusions_of_a_linear_flow_are_exact(h):
    found, exact = diffused(h, "local_linearisation")
    np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-10)  # the oracle loses digits over long times


@pytest.mark.parametrize("integrator", ["rk4", "local_linearisation"])
def test_inputs_are_integrated_along_the_flow(integrator):
    """∫exp(A(h − s)) (a + bs + cs²) ds, by the matrix exponential of an augmented system."""
    a, b, c = np.array([1.0, -0.5]), np.array([0.3, 2.0]), np.array([-1.0, 0.4])

    def error(h):
        # (x, u, u̇, ü) with ẋ = Ax + u
        whole, eye = np.zeros((8, 8)), np.eye(2)
        whole[:2, :2], whole[:2, 2:4], whole[2:4, 4:6], whole[4:6, 6:] = FLOW, eye, eye, eye
        expected = (expm(h * whole) @ np.r_[0, 0, a, b, 2 * c])[:2]
        step = flow_step(linear(THETA), X[:, :2], torch.tensor([h], dtype=F64), integrator)
        inputs = (torch.from_numpy(a + b * s + c * s**2)[None, :, None] for s in (0.0, h / 2, h))
        return np.abs(step.integrate(*inputs)[0, :, 0].numpy() - expected).max()

    assert error(0.1) < 1e-6
    assert error(0.1) / error(0.05) > 20


@pytest.mark.parametrize("integrator", ["rk4", "euler"])
def test_a_step_that_is_known_diffuses_as_one_that_is_computed(integrator):
    step = flow_step(with_derivatives(bent, THETA), X, H, integrator)
    known = known_step(step.value, step.jacobian, H, integrator)
    density = torch.tensor([[[0.7, 0.2, 0.1]]], dtype=F64).expand(len(X), 1, 3)[..., : X.shape[-1]]
    torch.testing.assert_close(known.diffuse(density), step.diffuse(density), rtol=1e-14, atol=0.0)


def test_an_euler_step_adds_everything_at_its_end():
    step = flow_step(linear(THETA), X[:, :2], H, "euler")
    assert step.second_half is None
    density = torch.tensor([[[0.7, 0.2]]], dtype=F64)
    torch.testing.assert_close(step.diffuse(density)[0, 0], 0.3 * torch.diag(density[0, 0]))
    assert step.regressed(step.value, step.jacobian).second_half is None


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 30.0, 200.0])
def test_the_exponential_minus_one_keeps_its_digits(size):
    matrix = size * np.array([[-0.4, 1.0, 0.2], [-1.2, -0.1, 0.0], [0.3, 0.1, -0.9]])
    half, whole = exponential_minus_one(torch.from_numpy(matrix)[None])
    series = sum(np.linalg.matrix_power(matrix, k) / np.prod(np.arange(1.0, k + 1)) for k in range(1, 9))
    expected = series if size <= 1e-3 else expm(matrix) - np.eye(3)
    np.testing.assert_allclose(whole[0], expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    if size > 1e-3:
        np.testing.assert_allclose(half[0], expm(matrix / 2) - np.eye(3), rtol=1e-9, atol=1e-9)


def test_square_roots_near_the_identity_have_the_third_order():
    def error(size):
        matrix = torch.from_numpy(np.eye(2) + size * FLOW)[None]
        root = square_root_near_one(matrix)
        return float((root @ root - matrix).abs().max())

    assert 12 < error(0.1) / error(0.05) < 20  # 2⁴
