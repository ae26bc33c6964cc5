"""Integrators of generalised states, each against its closed form."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from pcnet.errors import SettingError
from pcnet.model.node import BatchSpec
from pcnet.numerics.estimators import Exponential, Newton, RobbinsMonro
from pcnet.numerics.generalised import shift_matrix
from pcnet.numerics.integrators import ExplicitEuler, LocalLinearisation, LocalQuadratic

F64, F32 = torch.float64, torch.float32


def laid_out(rule, batch: int, dtype: torch.dtype = F64):
    """A rule as a run lays it out."""
    return BatchSpec(batch, dtype, torch.device("cpu"), torch.Size([batch])).expand_to_batch(rule)


def tensor(values, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype)


# --- states: a quadratic energy ½(x̃ − m)ᵀP(x̃ − m), for which the flow is linear and local linearisation exact -------
class Problem:
    """Gradient P(x̃ − m) and curvature P for a batch of states of three orders and two dimensions."""

    def __init__(self, batch: int = 3, stiffness: float = 1.0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        a = rng.standard_normal((batch, 6, 6))
        self.precision = stiffness * (a @ a.transpose(0, 2, 1) + np.eye(6))
        self.target, self.mean = rng.standard_normal((2, batch, 6))
        self.shift = np.kron(np.eye(3, k=1), np.eye(2))

    def evidence(self, mean: np.ndarray | None = None, dtype: torch.dtype = F64) -> LocalQuadratic:
        mean = self.mean if mean is None else mean
        gradient = np.einsum("bij,bj->bi", self.precision, mean - self.target)
        parts = mean, mean @ self.shift.T, self.shift, gradient, self.precision
        return LocalQuadratic(*(tensor(part, dtype) for part in parts))

    def jacobian(self, kappa) -> np.ndarray:
        return self.shift - np.reshape(kappa, (-1, 1, 1)) * self.precision

    def after(self, kappa, time) -> np.ndarray:
        """x̃ after a time, (batch, 6): from the fixed point of dx̃/dt = Dx̃ − κP(x̃ − m) and the matrix exponential."""
        kappa, time = (np.broadcast_to(v, len(self.mean)) for v in (kappa, time))
        states = []
        for jacobian, pull, mean, t in zip(self.jacobian(kappa), self.pull(kappa), self.mean, time, strict=True):
            rest = -np.linalg.solve(jacobian, pull)
            states.append(rest + scipy.linalg.expm(jacobian * t) @ (mean - rest))
        return np.stack(states)

    def pull(self, kappa: np.ndarray) -> np.ndarray:
        return kappa[:, None] * np.einsum("bij,bj->bi", self.precision, self.target)


def test_the_shift_matrix_is_that_of_pcnet():
    np.testing.assert_array_equal(Problem().shift, shift_matrix(3, 2).numpy())


@pytest.mark.parametrize("time", [1e-3, 0.1, 1.0, 20.0])
@pytest.mark.parametrize("kappa", [0.1, 1.0, 8.0])
def test_local_linearisation_is_exact_for_a_linear_flow(kappa, time):
    problem = Problem()
    change = laid_out(LocalLinearisation(kappa=kappa, step_size=time), 3).step(problem.evidence())
    np.testing.assert_allclose(change.numpy(), problem.after(kappa, time) - problem.mean, rtol=1e-10, atol=1e-12)


def test_local_linearisation_with_a_setting_for_each_batch_element():
    problem, kappa, time = Problem(), [0.1, 1.0, 8.0], [0.3, 0.01, 1.0]
    change = laid_out(LocalLinearisation(kappa=kappa, step_size=time), 3).step(problem.evidence())
    np.testing.assert_allclose(change.numpy(), problem.after(kappa, time) - problem.mean, rtol=1e-10, atol=1e-12)


def test_two_half_steps_of_local_linearisation_equal_one():
    problem, rule = Problem(), laid_out(LocalLinearisation(step_size=0.25), 3)
    halfway = problem.mean + rule.step(problem.evidence()).numpy()
    there = halfway + rule.step(problem.evidence(halfway)).numpy()
    np.testing.assert_allclose(there, problem.after(1.0, 0.5), rtol=1e-10, atol=1e-12)


def test_local_linearisation_in_single_precision():
    problem = Problem()
    change = laid_out(LocalLinearisation(step_size=[0.1, 0.2, 0.3]), 3, F32).step(problem.evidence(dtype=F32))
    assert change.dtype == F32
    expected = problem.after(1.0, [0.1, 0.2, 0.3]) - problem.mean
    np.testing.assert_allclose(change.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nu", [-4.0, -1.0, 0.0, [-6.0, -4.0, -2.0]])
@pytest.mark.parametrize("kappa", [0.5, [1.0, 3.0, 9.0]])
def test_step_size_by_curvature(kappa, nu):
    """Δs = exp(ν)/|det J₀|^(1/n)."""
    problem = Problem(stiffness=20.0)
    time = np.exp(nu) / np.abs(np.linalg.det(problem.jacobian(kappa))) ** (1 / 6)
    assert ((time > 1e-6) & (time < 1.0)).all()
    change = laid_out(LocalLinearisation(kappa=kappa, log_step_size=nu), 3).step(problem.evidence())
    np.testing.assert_allclose(change.numpy(), problem.after(kappa, time) - problem.mean, rtol=1e-10, atol=1e-12)


def test_step_size_by_curvature_is_the_default_with_exp_minus_four():
    problem = Problem(batch=1)
    time = math.exp(-4) / abs(np.linalg.det(problem.jacobian(1.0)[0])) ** (1 / 6)
    change = LocalLinearisation().step(problem.evidence())
    np.testing.assert_allclose(change.numpy(), problem.after(1.0, time) - problem.mean, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("stiffness", "time"), [(1e-7, 1.0), (1e8, 1e-6)])
def test_step_size_by_curvature_is_bounded(stiffness, time):
    problem = Problem(stiffness=stiffness)
    free = math.exp(-4) / np.abs(np.linalg.det(problem.jacobian(1.0))) ** (1 / 6)
    assert ((free > 1.0) if time == 1.0 else (free < 1e-6)).all()
    change = laid_out(LocalLinearisation(), 3).step(problem.evidence()).numpy()
    expected = problem.after(1.0, time) - problem.mean
    np.testing.assert_allclose(change, expected, rtol=0, atol=1e-8 * np.abs(expected).max())


def test_step_size_of_a_singular_jacobian_is_the_largest():
    """|det J₀| = 0 gives Δs = 1: x̃ moves along D alone, as a Taylor series."""
    mean = np.array([[1.0, -2.0, 3.0]])
    shift = np.eye(3, k=1)
    parts = mean, mean @ shift.T, shift, np.zeros((1, 3)), np.zeros((1, 3, 3))
    change = LocalLinearisation().step(LocalQuadratic(*map(tensor, parts)))
    np.testing.assert_allclose(change.numpy(), [[-2.0 + 3.0 / 2, 3.0, 0.0]], rtol=1e-14)


def test_step_size_of_many_states_does_not_overflow():
    """det J₀ of a hundred states is 1e400, beyond the range of a double; its hundredth root is not."""
    n, size = 100, 1e4
    parts = np.ones((1, n)), np.zeros((1, n)), np.zeros((n, n)), np.full((1, n), size), size * np.eye(n)[None]
    change = LocalLinearisation(log_step_size=0.0).step(LocalQuadratic(*map(tensor, parts)))
    np.testing.assert_allclose(change.numpy(), np.full((1, n), math.expm1(-1.0)), rtol=1e-12)


@pytest.mark.parametrize("kappa", [1.0, [0.1, 1.0, 8.0]])
@pytest.mark.parametrize("time", [0.01, [0.3, 0.01, 1.0]])
def test_explicit_euler_is_one_euler_step(kappa, time):
    problem, rule = Problem(), laid_out(ExplicitEuler(step_size=time, kappa=kappa), 3)
    k, t = (np.broadcast_to(v, 3)[:, None] for v in (kappa, time))
    gradient = np.einsum("bij,bj->bi", problem.precision, problem.mean - problem.target)
    expected = t * (problem.mean @ problem.shift.T - k * gradient)
    np.testing.assert_allclose(rule.step(problem.evidence()).numpy(), expected, rtol=1e-12, atol=1e-13)


def test_explicit_euler_is_local_linearisation_for_a_short_time():
    problem = Problem()
    short = [
        laid_out(rule, 3).step(problem.evidence())
        for rule in (ExplicitEuler(step_size=1e-7), LocalLinearisation(step_size=1e-7))
    ]
    np.testing.assert_allclose(short[0].numpy(), problem.after(1.0, 1e-7) - problem.mean, rtol=1e-4, atol=1e-11)
    np.testing.assert_allclose(short[1].numpy(), problem.after(1.0, 1e-7) - problem.mean, rtol=1e-8, atol=1e-14)


def test_only_integrators_that_use_the_curvature_need_it():
    assert LocalLinearisation().needs_curvature
    assert not ExplicitEuler(step_size=0.1).needs_curvature
    problem = Problem()
    unknown = problem.evidence()._replace(curvature=torch.full((3, 6, 6), math.nan, dtype=F64))
    assert ExplicitEuler(step_size=0.1).step(unknown).isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalLinearisation(kappa=0.0), "kappa.*must be positive"),
        (lambda: LocalLinearisation(step_size=-1.0), "step_size"),
        (lambda: LocalLinearisation(step_size="dt"), "step_size"),
        (lambda: LocalLinearisation(log_step_size=math.inf), "log_step_size.*must be finite"),
        (lambda: LocalLinearisation(kapa=1.0), "unknown setting 'kapa'; did you mean 'kappa'"),
        (ExplicitEuler, "'step_size' is required"),
        (lambda: Exponential(beta=1.0), "beta.*below 1"),
        (lambda: RobbinsMonro(rate=0.0), "rate.*must be positive"),
        (lambda: Newton(forgetting_factor=1.0), "forgetting_factor.*below 1"),
    ],
)
def test_invalid_settings_are_rejected(make, message):
    with pytest.raises(SettingError, match=message):
        make()
