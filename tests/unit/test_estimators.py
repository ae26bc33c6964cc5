"""Estimators of parameters and precisions, each against its closed form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pcnet.model.node import BatchSpec
from pcnet.numerics.estimators import Exponential, GradientAccumulator, Newton, NoiseScoring, RobbinsMonro, WindowMean

F64, F32 = torch.float64, torch.float32


def laid_out(rule, batch: int, dtype: torch.dtype = F64):
    """A rule as a run lays it out."""
    return BatchSpec(batch, dtype, torch.device("cpu"), torch.Size([batch])).expand_to_batch(rule)


def tensor(values, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype)


gradients = hnp.arrays(float, st.tuples(st.integers(1, 12), st.just(2), st.just(3)), elements=st.floats(-1e3, 1e3))


def gather_all(rule: RobbinsMonro, rows: np.ndarray, dtype: torch.dtype = F64) -> GradientAccumulator:
    gathered = GradientAccumulator.zeros(torch.zeros(rows.shape[1:], dtype=dtype))
    for row in rows:
        gathered = rule.accumulate(gathered, tensor(row, dtype))
    return gathered


@hypothesis_settings(max_examples=40, deadline=None)
@given(rows=gradients, beta=st.floats(0.0, 0.999))
def test_exponential_averaging(rows, beta):
    """(1 − β) Σ β^(k−i) ∇_i."""
    rule = laid_out(RobbinsMonro(averaging=Exponential(beta=beta)), 2)
    gathered = gather_all(rule, rows)
    weights = (1 - beta) * beta ** np.arange(len(rows) - 1, -1, -1.0)
    expected = np.einsum("k,kbn->bn", weights, rows)
    np.testing.assert_allclose(rule.averaging.read(gathered).numpy(), expected, rtol=1e-10, atol=1e-9)
    assert gathered.observations.tolist() == [len(rows)] * 2
    assert gathered.steps.tolist() == [0, 0]


def test_exponential_averaging_of_each_batch_element():
    rows = np.random.default_rng(0).standard_normal((5, 2, 3))
    rule = laid_out(RobbinsMonro(averaging=Exponential(beta=[0.0, 0.9])), 2)
    found = rule.averaging.read(gather_all(rule, rows)).numpy()
    np.testing.assert_array_equal(found[0], rows[-1, 0])  # β = 0: the last observation alone
    np.testing.assert_allclose(found[1], 0.1 * sum(0.9 ** (4 - i) * rows[i, 1] for i in range(5)), rtol=1e-13)


@hypothesis_settings(max_examples=40, deadline=None)
@given(rows=gradients)
def test_window_mean_is_the_mean(rows):
    rule = laid_out(RobbinsMonro(averaging=WindowMean()), 2)
    found = rule.averaging.read(gather_all(rule, rows)).numpy()
    np.testing.assert_allclose(found, rows.mean(0), rtol=1e-10, atol=1e-10)


def test_without_gradients_there_is_no_step():
    for accumulate in (WindowMean(), Exponential(beta=0.5)):
        rule = laid_out(RobbinsMonro(averaging=accumulate), 2)
        change, _ = rule.step(GradientAccumulator.zeros(torch.zeros(2, 3, dtype=F64)))
        assert (change == 0).all()


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("accumulate", [Exponential(beta=0.6), WindowMean()], ids=["exponential", "mean"])
@pytest.mark.parametrize(
    ("rate", "t0", "gamma"), [(1e-2, 10.0, 0.3), (0.5, 0.0, 1.0), ([0.1, 0.2], [0.0, 5.0], [0.5, 0.9]), (1.0, 3.0, 0.0)]
)
def test_robbins_monro(rate, t0, gamma, accumulate, dtype):
    """−α/(j + t₀)^γ times the average since the previous step, for j = 1, 2, …"""
    rng = np.random.default_rng(1)
    rule = laid_out(RobbinsMonro(rate=rate, t0=t0, gamma=gamma, averaging=accumulate), 2, dtype)
    gathered = GradientAccumulator.zeros(torch.zeros(2, 3, dtype=dtype))
    close = {"rtol": 1e-12} if dtype == F64 else {"rtol": 1e-5, "atol": 1e-6}
    for j, count in enumerate([1, 4, 2, 3, 1], start=1):
        rows = rng.standard_normal((count, 2, 3))
        for row in rows:
            gathered = rule.accumulate(gathered, tensor(row, dtype))
        change, gathered = rule.step(gathered)
        if isinstance(accumulate, WindowMean):
            total = rows.mean(0)
        else:
            total = 0.4 * sum(0.6 ** (count - 1 - i) * rows[i] for i in range(count))
        alpha = np.broadcast_to(np.asarray(rate) / (j + np.asarray(t0)) ** np.asarray(gamma), 2)
        assert change.dtype == dtype
        np.testing.assert_allclose(change.numpy(), -alpha[:, None] * total, **close)
        assert gathered.steps.tolist() == [j, j]
        assert not gathered.observations.any()
        assert not gathered.gradient.any()


def test_robbins_monro_counts_the_steps_of_each_batch_element():
    """Elements with more steps move less."""
    rule = laid_out(RobbinsMonro(rate=2.0, t0=1.0, gamma=0.5), 2)
    gathered = GradientAccumulator.zeros(torch.ones(2, 3, dtype=F64))._replace(
        gradient=torch.ones(2, 3, dtype=F64), observations=torch.ones(2, dtype=F64), steps=tensor([0.0, 7.0])
    )
    change, after = rule.step(gathered)
    np.testing.assert_allclose(change[:, 0].numpy(), [-2 / math.sqrt(2), -2 / 3], rtol=1e-14)
    assert after.steps.tolist() == [1.0, 8.0]


def test_defaults_of_robbins_monro():
    gathered = GradientAccumulator.zeros(torch.ones(1, 1, dtype=F64))
    change, _ = RobbinsMonro().step(gathered._replace(gradient=torch.ones(1, 1, dtype=F64)))
    assert change.item() == pytest.approx(-1e-4 / 11**0.3, rel=1e-14)


class Regression:
    """Two batch elements of thirty observations each, of three parameters."""

    def __init__(self, prior: float = 2.0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.inputs = rng.standard_normal((30, 2, 3))
        self.targets = np.einsum("tbn,bn->tb", self.inputs, rng.standard_normal((2, 3))) + rng.standard_normal((30, 2))
        self.mean = rng.standard_normal((2, 3))
        self.prior = np.broadcast_to(np.diag([1.0, 2.0, 3.0]) * prior, (2, 3, 3)).copy()

    def posterior(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and precision by weighted least squares on the first observations, with the prior as it is."""
        x, y = self.inputs[: len(weights)], self.targets[: len(weights)]
        precision = self.prior + np.einsum("t,tbn,tbm->bnm", weights, x, x)
        pull = np.einsum("bnm,bm->bn", self.prior, self.mean) + np.einsum("t,tbn,tb->bn", weights, x, y)
        return np.linalg.solve(precision, pull[..., None])[..., 0], precision

    def learn(self, rule: Newton, windows: list[int], dtype: torch.dtype = F64):
        """Mean, and the precision that is left, after every window."""
        mean = tensor(self.mean, dtype)
        gathered, first = rule.init(mean, tensor(self.prior, dtype)), 0
        for count in windows:
            for t in range(first, first + count):
                x, y = tensor(self.inputs[t], dtype), tensor(self.targets[t], dtype)
                error = y - (x * mean).sum(-1)
                gathered = rule.accumulate(gathered, -error[:, None] * x, x[:, :, None] * x[:, None, :])
            change, gathered = rule.step(gathered)
            gathered = rule.forget(gathered)
            assert not gathered.gradient.any()
            assert not gathered.observations.any()
            mean, first = mean + change, first + count
            yield mean.numpy(), gathered.precision.numpy()


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("windows", [[30], [1] * 30, [7, 1, 12, 10]])
def test_newton_is_recursive_least_squares(windows, dtype):
    """For any division into windows, each step ends at the least squares of all observations so far."""
    problem = Regression()
    close = {"rtol": 1e-11, "atol": 1e-11} if dtype == F64 else {"rtol": 1e-4, "atol": 1e-4}
    found = problem.learn(laid_out(Newton(), 2, dtype), windows, dtype)
    for (mean, precision), seen in zip(found, np.cumsum(windows), strict=True):
        expected = problem.posterior(np.ones(seen))
        assert mean.dtype == np.dtype(str(dtype).removeprefix("torch."))
        np.testing.assert_allclose(mean, expected[0], **close)
        np.testing.assert_allclose(precision, expected[1], **close)


def test_newton_is_a_kalman_filter_of_constant_parameters():
    problem = Regression()
    mean, covariance = problem.mean.copy(), np.linalg.inv(problem.prior)
    for t, (found, precision) in enumerate(problem.learn(laid_out(Newton(), 2), [1] * 30)):
        for b, x in enumerate(problem.inputs[t]):
            gain = covariance[b] @ x / (x @ covariance[b] @ x + 1.0)
            mean[b] += gain * (problem.targets[t, b] - x @ mean[b])
            covariance[b] -= np.outer(gain, x) @ covariance[b]
        np.testing.assert_allclose(found, mean, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(np.linalg.inv(precision), covariance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("forgetting_factor", [0.2, [0.05, 0.3]])
def test_forgetting_is_exponentially_weighted_least_squares(forgetting_factor):
    """With a flat prior, an observation that is k steps old counts (1 − φ)^k."""
    problem, windows = Regression(prior=1e-9), [4] * 7
    *_, (mean, precision) = problem.learn(laid_out(Newton(forgetting_factor=forgetting_factor), 2), windows)
    for b, share in enumerate(np.broadcast_to(forgetting_factor, 2)):
        weights = (1 - share) ** np.repeat(np.arange(6, -1, -1.0), 4)
        expected = problem.posterior(weights)
        np.testing.assert_allclose(mean[b], expected[0][b], rtol=1e-6)
        np.testing.assert_allclose(precision[b], (1 - share) * expected[1][b], rtol=1e-6, atol=1e-6)


def test_forgetting_is_bounded_by_the_prior():
    problem, rule = Regression(), laid_out(Newton(forgetting_factor=0.5), 2)
    gathered = rule.init(tensor(problem.mean), tensor(problem.prior))
    extra = tensor(np.broadcast_to(np.eye(3), (2, 3, 3)))
    gathered = rule.accumulate(gathered, torch.ones(2, 3, dtype=F64), 8.0 * extra)
    for k in range(1, 60):
        change, gathered = rule.step(gathered)
        gathered = rule.forget(gathered)
        np.testing.assert_allclose(gathered.precision.numpy(), problem.prior + 8.0 * 0.5**k * extra.numpy(), rtol=1e-12)
        assert bool(change.any()) == (k == 1)


def test_newton_descends_where_the_curvature_is_indefinite():
    rule = laid_out(Newton(), 1)
    gathered = rule.init(tensor([[0.0, 0.0]]), tensor([np.eye(2)]))
    gathered = rule.accumulate(gathered, tensor([[3.0, 1.0]]), tensor([np.diag([1.0, -3.0])]))
    change, _ = rule.step(gathered)
    assert change[0, 0].item() == pytest.approx(-1.5)
    assert change[0, 1] < 0


def test_steps_of_noise_scoring_are_clipped():
    rule = laid_out(NoiseScoring(max_step=0.5, first=0), 1)
    gathered = rule.init(tensor([[0.0, 0.0]]), tensor([np.eye(2)]))
    change, _ = rule.step(rule.accumulate(gathered, tensor([[-3.0, 0.2]]), tensor([np.eye(2)])))
    assert change[0].tolist() == pytest.approx([0.5, -0.1])


@pytest.mark.parametrize("first", [0, 2, 5])
def test_noise_scoring_changes_nothing_at_first(first):
    rule = laid_out(NoiseScoring(first=first), 1)
    gathered = rule.init(torch.zeros(1, 1, dtype=F64), tensor([[[1.0]]]))
    moved = []
    for _ in range(8):
        change, gathered = rule.step(rule.accumulate(gathered, tensor([[0.1]]), tensor([[[1.0]]])))
        moved.append(bool(change.any()))
    assert moved == [j >= first for j in range(8)]


def test_noise_scoring_gives_late_observations_more_weight():
    """The kth of j quadratic terms ½(μ − y)² counts w = (k + 1)/(j + 1): the mean is Σwy/(P + Σw), P of the prior."""
    rule, prior, mean = laid_out(NoiseScoring(max_step=10.0, first=0), 1), 0.25, 0.0
    gathered = rule.init(torch.zeros(1, 1, dtype=F64), tensor([[[prior]]]))
    values = np.random.default_rng(1).normal(2.0, 1.0, size=30)
    for j, y in enumerate(values, start=1):
        change, gathered = rule.step(rule.accumulate(gathered, tensor([[mean - y]]), tensor([[[1.0]]])))
        mean += change.item()
        weights = np.arange(2, j + 2) / (j + 1)
        assert gathered.precision.item() == pytest.approx(prior + weights.sum(), rel=1e-12)
        assert mean == pytest.approx(weights @ values[:j] / (prior + weights.sum()), rel=1e-12)


def test_noise_scoring_does_not_count_steps_without_information():
    rule, sparse = laid_out(NoiseScoring(), 1), laid_out(NoiseScoring(), 1)
    one = other = rule.init(torch.zeros(1, 1, dtype=F64), tensor([[[1.0]]]))
    for j in range(40):
        if j % 4 == 0:
            _, one = rule.step(rule.accumulate(one, tensor([[0.3]]), tensor([[[2.0]]])))
            _, other = sparse.step(sparse.accumulate(other, tensor([[0.3]]), tensor([[[2.0]]])))
        else:
            change, other = sparse.step(sparse.accumulate(other, tensor([[0.0]]), tensor([[[0.0]]])))
            assert not change.any()
    assert other.steps.item() == one.steps.item() == 10
    torch.testing.assert_close(other.precision, one.precision)


def test_decaying_forgetting_has_the_expected_weights():
    """After step j the factor is 1 − a/(j + 10): window k of n counts Π_{j=k..n} of these."""
    problem, windows = Regression(prior=1e-9), [5] * 6
    *_, (mean, precision) = problem.learn(laid_out(Newton(decaying_forgetting=2.0), 2), windows)
    kept = 1 - 2.0 / (np.arange(1, 7) + 10)
    before = np.array([np.prod(kept[k:5]) for k in range(6)])
    expected = problem.posterior(np.repeat(before, 5))
    np.testing.assert_allclose(mean, expected[0], rtol=1e-6)
    np.testing.assert_allclose(precision, kept[-1] * expected[1], rtol=1e-6, atol=1e-6)
