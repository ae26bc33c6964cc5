"""Parameters and log-precisions learned by Newton steps, where the posterior has a closed form."""

import math

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.functions.closed_form import Linear
from pcnet.model.schedule import Schedule, act, slow_step
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton

STATE, PRECISION = np.array([1.5, -0.5]), 4.0
MEAN, SD = np.array([0.3, 1.0]), np.array([0.5, 2.0])
OBSERVATIONS = np.random.default_rng(0).standard_normal((12, 2)) + 1.0


def gains(x, parameters):
    return x * parameters


def graph_of(estimator: Newton, curvature: str = "gauss-newton") -> pc.Graph:
    """y = θ ⊙ x + noise, with x known."""
    start = torch.tensor(np.stack([STATE, np.zeros(2)]))
    x = GeneralisedStateNode("x", dim=2, orders=2, flow=pc.systems.linear(torch.zeros(2, 2)), initial_mean=start)
    y = SensoryNode("y", dim=2, orders=1)
    graph = pc.Graph()
    graph.predicts(x, y, via=gains)
    graph.parametrises(ParameterNode("gain", mean=MEAN, sd=SD, estimator=estimator, curvature=curvature), x, of=y)
    graph.weighs(PrecisionNode("noise_x", mean=0.0, sd=0.1, correlation_time=0.5), x)
    graph.weighs(PrecisionNode("noise_y", mean=math.log(PRECISION), sd=0.1, correlation_time=0.5), y)
    return graph


def learning(*actions: str, every) -> pc.Schedule:
    """Only the gains learn; the states stay where they are."""
    acts = [act("observe", "sensory"), act("accumulate", "gain")]
    return pc.Schedule(tuple(acts + [act(action, "gain", every=every) for action in actions]))


def expect(seen: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the gains after the first observations: a conjugate Gaussian for each."""
    precision = SD**-2 + seen * PRECISION * STATE**2
    mean = (MEAN / SD**2 + PRECISION * STATE * OBSERVATIONS[:seen].sum(0)) / precision
    return mean, precision**-0.5


@pytest.mark.parametrize("curvature", ["gauss-newton", "exact"])
@pytest.mark.parametrize(
    "actions",
    [
        ("update", "update_covariance", "renew_prior"),
        ("update", "update_covariance"),
        ("update_covariance", "update", "update_covariance"),
    ],
)
@pytest.mark.parametrize("every", [1, 5])
def test_the_posterior_of_a_linear_gain_is_exact(every, actions, curvature):
    """With and without making the posterior the next prior."""
    result = graph_of(Newton(), curvature).run(OBSERVATIONS, schedule=learning(*actions, every=every))
    for t in range(12):
        mean, sd = expect((t + 1) // every * every)
        np.testing.assert_allclose(result.mean("gain")[t], mean, rtol=1e-10)
        np.testing.assert_allclose(result.sd("gain")[t], sd, rtol=1e-10)


def test_every_batch_element_has_its_own_clock():
    schedule = learning("update", "update_covariance", "renew_prior", every=[2, 3])
    result = graph_of(Newton()).run(OBSERVATIONS, schedule=schedule)
    for t in range(12):
        for i, every in enumerate((2, 3)):
            mean, sd = expect((t + 1) // every * every)
            np.testing.assert_allclose(result.mean("gain")[i, t], mean, rtol=1e-10)
            np.testing.assert_allclose(result.sd("gain")[i, t], sd, rtol=1e-10)


def test_every_batch_element_has_its_own_forgetting_factor():
    """With a factor of a half, the last observations count 1, ½, ¼, …, and the prior always counts."""
    schedule = learning("update", "update_covariance", "renew_prior", every=1)
    result = graph_of(Newton(forgetting_factor=[0.0, 0.5])).run(OBSERVATIONS, schedule=schedule)
    np.testing.assert_allclose(result.mean("gain")[0, -1], expect(12)[0], rtol=1e-10)
    kept = 0.5 ** np.arange(1, 13)  # of each observation, newest first
    np.testing.assert_allclose(
        result.sd("gain")[1, -1], (SD**-2 + kept.sum() * PRECISION * STATE**2) ** -0.5, rtol=1e-10
    )


def test_the_complexity_is_the_kl_divergence_from_the_prior():
    """Without renewing the prior: ½(θ − η)ᵀP(θ − η) + ½log|L|/|P|."""
    graph = graph_of(Newton())
    session = graph.start(learning("update", "update_covariance", every=1)).run(OBSERVATIONS)
    mean, sd = expect(12)
    expected = (0.5 * ((mean - MEAN) / SD) ** 2 + np.log(SD / sd)).sum()
    found = graph["gain"].energy(session.context("gain"))
    assert found.accuracy is None
    assert found.complexity.item() == pytest.approx(expected, rel=1e-10)


def test_a_newton_step_of_a_log_precision():
    """λ moves by Σ½(1 − e^λ ε²)/(1/sd² + T/2)."""
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=Linear([[0.0]]), initial_mean=[[0.0]])
    y = SensoryNode("y", dim=1, orders=1)
    noise = PrecisionNode("noise", mean=1.0, sd=0.5, correlation_time=1.0, estimator=Newton())
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("still", prior_precision=1.0, sd=1.0, correlation_time=1.0), x)
    graph.weighs(noise, y)
    acts = (act("observe", "sensory"), act("accumulate", "noise"), *slow_step("noise", every=20))
    data = np.random.default_rng(3).standard_normal((20, 1))
    result = graph.run(torch.from_numpy(data), schedule=Schedule(acts))
    information = 4.0 + 10.0
    moved = 0.5 * (1 - np.e * data**2).sum() / information
    assert result.mean("noise")[-1, 0] == pytest.approx(1.0 + moved, rel=1e-10)
    assert result.sd("noise")[-1, 0] == pytest.approx(information**-0.5, rel=1e-10)
