"""The adaptive filter: invariance to sampling, outliers and learned noise levels, against closed forms and scipy."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import block_diag, expm
from scipy.optimize import minimize

import pcnet as pc
from pcnet.errors import GraphError, SettingError
from pcnet.functions.closed_form import Linear
from pcnet.graphs import adaptive_filter
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import GeneralisedStateNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton
from pcnet.numerics.kernels import White
from support.filters import single_filter
from support.kalman import (
    FIRST,
    FLOW,
    GAIN,
    NOISE_VARIANCE,
    OBSERVATIONS,
    STATE_VARIANCE,
    STILL,
    Kalman,
    exact_transition,
)

JOINT = adaptive_filtering(levels=(LevelNodes(precisions=()),))
"""States and parameters are learned, noise levels stay."""


# --- sampling --------------------------------------------------------------------------------------------------------
def sampled(dt: float, **options) -> pc.Graph:
    x = KalmanStateNode("x", dim=2, flow=Linear(FLOW), initial_mean=FIRST, initial_sd=0.9, learn_noise=False, **options)
    y = SensoryNode("y", dim=3, orders=1, dt=dt)
    graph = pc.Graph()
    graph.predicts(x, y, via=Linear(GAIN))
    graph.weighs(PrecisionNode("noise_x", mean=-math.log(STATE_VARIANCE), sd=1.0, kernel=White(), channels="shared"), x)
    graph.weighs(PrecisionNode("noise_y", mean=-np.log(NOISE_VARIANCE), sd=1.0, kernel=White()), y)
    return graph


def exact(times: np.ndarray) -> Kalman:
    """The filter of all observations at these times, with the exact transitions between them."""
    oracle = Kalman(None, None, GAIN, np.diag(NOISE_VARIANCE), FIRST, 0.81 * np.eye(2))
    for k, y in enumerate(OBSERVATIONS):
        if k:
            oracle.f, oracle.q = exact_transition(FLOW, STATE_VARIANCE, times[k] - times[k - 1])
        oracle.step(y)
    return oracle


INTERVAL, EVERY = 0.004, 10
TIMES = INTERVAL * EVERY * np.arange(len(OBSERVATIONS))
SPARSE = np.full((EVERY * (len(OBSERVATIONS) - 1) + 1, 3), np.nan)
SPARSE[::EVERY] = OBSERVATIONS
WAYS = {
    "one late observation": lambda **options: (
        sampled(INTERVAL, **options).start(STILL, record=()).run(OBSERVATIONS, times=TIMES)
    ),
    "ten missing observations": lambda **options: sampled(INTERVAL, **options).start(STILL, record=()).run(SPARSE),
    "a longer interval": lambda **options: (
        sampled(INTERVAL * EVERY, **options).start(STILL, record=()).run(OBSERVATIONS)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("substeps", [1, 3])
@pytest.mark.parametrize("integrator", ["rk4", "local_linearisation"])
def test_beliefs_depend_neither_on_sampling_nor_on_substeps(way, substeps, integrator):
    """All equal the filter with exact discretisation, but for errors of the fourth order in a step of 0.04."""
    session, oracle = WAYS[way](integrator=integrator, substeps=substeps), exact(TIMES)
    np.testing.assert_allclose(session.mean("x")[0], oracle.mean, rtol=1e-6)
    np.testing.assert_allclose(session.read("x", "covariance"), oracle.covariance, rtol=1e-6)
    assert float(session.total_accuracy) == pytest.approx(oracle.log_evidence, rel=1e-6)


@pytest.mark.parametrize("walk_sd", [0.0, 0.4])
@pytest.mark.parametrize("gaps", [False, True])
def test_parameters_that_walk_equal_the_joint_kalman_filter(walk_sd, gaps):
    """ẋ = Ax + Bθ with a random walk of θ, of which each step takes effect from the next one on."""
    dt, push = 0.1, np.array([[1.0, 0.0, 0.3], [0.0, -0.5, 1.0]])
    by = torch.from_numpy(push)
    x = KalmanStateNode(
        "x",
        dim=2,
        flow=pc.TracedFunction(lambda x, theta: x @ torch.from_numpy(FLOW).T.to(x) + theta @ by.T.to(x)),
        initial_mean=FIRST,
        initial_sd=0.9,
        integrator="local_linearisation",
        learn_noise=False,
    )
    y = SensoryNode("y", dim=3, orders=1, dt=dt)
    graph = pc.Graph()
    graph.predicts(x, y, via=Linear(GAIN))
    theta = ParameterNode("theta", mean=[0.1, -0.2, 0.4], sd=[0.5, 1.0, 0.2], walk_sd=walk_sd)
    graph.parametrises(theta, x)
    graph.weighs(PrecisionNode("noise_x", mean=-math.log(STATE_VARIANCE), sd=1.0, kernel=White(), channels="shared"), x)
    graph.weighs(PrecisionNode("noise_y", mean=-np.log(NOISE_VARIANCE), sd=1.0, kernel=White()), y)
    data = OBSERVATIONS.copy()
    if gaps:
        data[4:7], data[12, 1] = np.nan, np.nan
    whole = np.zeros((5, 5))
    whole[:2, :2], whole[:2, 2:] = FLOW, push
    q = exact_transition(FLOW, STATE_VARIANCE, dt)[1]
    oracle = Kalman(
        expm(dt * whole),
        block_diag(q, walk_sd**2 * dt * np.eye(3)),
        np.hstack([GAIN, np.zeros((3, 3))]),
        np.diag(NOISE_VARIANCE),
        np.r_[FIRST, 0.1, -0.2, 0.4],
        np.diag([0.81, 0.81, 0.25, 1.0, 0.04]),
    )
    result = graph.run(data, JOINT, record=["mean", "covariance", "energy"])
    for t, value in enumerate(data):
        oracle.step(value)
        np.testing.assert_allclose(result.mean("x")[t, 0], oracle.mean[:2], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(result.mean("theta")[t], oracle.mean[2:], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(result.covariance("x")[t], oracle.covariance[:2, :2], rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(result.covariance("theta")[t], oracle.covariance[2:, 2:], rtol=1e-10, atol=1e-13)
    assert result.accuracy.sum() == pytest.approx(oracle.log_evidence, rel=1e-10)


def test_walks_are_rejected_where_they_cannot_be_carried():
    graph = single_filter(lambda x, theta: -theta * x, 1, 0.1, parameter_mean=[1.0], parameter_sd=0.1).graph
    theta = ParameterNode("theta", mean=[1.0], sd=0.1, walk_sd=0.1, estimator=Newton())
    with pytest.raises(GraphError, match="'theta' has a walk_sd, which is for parameters of one KalmanStateNode"):
        graph.with_nodes(dict(graph.nodes) | {"theta": theta}).start(adaptive_filtering())


# --- outliers --------------------------------------------------------------------------------------------------------
SHARE, NOISE, PRIOR = 0.05, np.array([0.04, 0.25]), np.array([0.3, 0.1])


def robust(share: float, learn_noise: bool = False) -> pc.Graph:
    x = KalmanStateNode(
        "x",
        dim=2,
        flow=Linear(np.zeros((2, 2))),
        initial_mean=[0.2, -0.1],
        initial_sd=np.sqrt(PRIOR),
        learn_noise=learn_noise,
    )
    y = SensoryNode("y", dim=2, orders=1, dt=0.1, outliers=share)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("noise_x", mean=0.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=-np.log(NOISE), sd=1.0, kernel=White()), y)
    return graph


def density(error, variance):
    return np.exp(-0.5 * error**2 / variance) / np.sqrt(2 * math.pi * variance)


@pytest.mark.parametrize("learn_noise", [False, True])
@pytest.mark.parametrize("seen", [[0.3, 0.1], [3.0, -0.4], [-40.0, 25.0], [1.1, math.nan]])
def test_one_observation_has_the_evidence_of_a_mixture(seen, learn_noise):
    """Each channel is usual or an outlier with 101 times the noise; its weight follows from the odds."""
    session = robust(SHARE, learn_noise).start(STILL, record=()).step(seen)
    error, s = np.array(seen) - [0.2, -0.1], PRIOR + NOISE
    usual, unusual = (1 - SHARE) * density(error, s), SHARE * density(error, s + 100 * NOISE)
    assert float(session.total_accuracy) == pytest.approx(np.nansum(np.log(usual + unusual)), rel=1e-11)
    r = unusual / (usual + unusual)
    noise = NOISE / (1 - r + r / 101)
    gain = np.where(np.isnan(error), 0.0, PRIOR / (PRIOR + noise))
    expected = np.array([0.2, -0.1]) + gain * np.nan_to_num(error)
    np.testing.assert_allclose(session.mean("x")[0], expected, rtol=1e-10)
    np.testing.assert_allclose(session.sd("x")[0] ** 2, (1 - gain) * PRIOR, rtol=1e-10)


def test_without_outliers_the_filter_is_the_usual_one():
    data = OBSERVATIONS[:, :2]
    results = [robust(share).run(data, STILL, record=["mean", "sd", "energy"]) for share in (0.0, 1e-300)]
    np.testing.assert_allclose(results[1].mean("x"), results[0].mean("x"), rtol=1e-12)
    np.testing.assert_allclose(results[1].sd("x"), results[0].sd("x"), rtol=1e-12)
    np.testing.assert_allclose(results[1].accuracy, results[0].accuracy, rtol=1e-12)


def test_outliers_are_rejected_where_they_have_no_meaning():
    with pytest.raises(SettingError, match=r"the share of outliers must be below 0\.5"):
        SensoryNode("y", dim=1, orders=1, dt=0.1, outliers=0.6)
    x, y = (
        GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, _: -x),
        SensoryNode("y", dim=1, orders=1, dt=0.1, outliers=0.1),
    )
    graph = pc.Graph()
    graph.predicts(x, y)
    for node in (x, y):
        graph.weighs(PrecisionNode(f"noise of {node.name}", prior_precision=1.0, sd=1.0, correlation_time=0.1), node)
    with pytest.raises(GraphError, match="'y' expects outliers, which needs a Kalman state"):
        graph.start()


# --- noise levels ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("guess", [0.2, 1.0, 5.0])
def test_noise_levels_reach_the_maximum_of_the_likelihood(guess):
    """A level that reverts to 0, observed with noise, 5,000 samples; guesses of both sds wrong by a factor."""
    decay, dt, process_sd, observation_sd, samples = 0.5, 0.1, 0.8, 0.3, 5000
    rng, keep = np.random.default_rng(6), math.exp(-decay * dt)
    grown = (1 - keep**2) / (2 * decay)
    x, data = 0.0, []
    for _ in range(samples):
        data.append(x + observation_sd * rng.standard_normal())
        x = keep * x + process_sd * math.sqrt(grown) * rng.standard_normal()

    def surprise(logs) -> float:
        q, r, mean, variance, total = grown * math.exp(logs[0]), math.exp(logs[1]), 0.0, 1.0, 0.0
        for t, value in enumerate(data):
            if t:
                mean, variance = keep * mean, keep**2 * variance + q
            s, e = variance + r, value - mean
            total += 0.5 * (e * e / s + math.log(s))
            mean, variance = mean + variance / s * e, variance * r / s
        return total

    best = minimize(surprise, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-6}).x
    model = single_filter(
        Linear([[-decay]]),
        1,
        dt,
        process_noise_sd=guess * process_sd,
        observation_noise_sd=guess * observation_sd,
        initial_mean=[0.0],
    )
    result = model.run(np.array(data)[:, None], engine="compiled", record=["mean"])
    found = [-result.mean(name)[-1, 0] for name in ("noise_x", "noise_y")]
    np.testing.assert_allclose(np.exp(0.5 * (np.array(found) - best)), 1.0, atol=0.05)


def kalman_without(y, wrong, dt, q, r):
    """The Kalman filter of position and velocity that is told the noise, and leaves out wrong readings."""
    F, Q = np.array([[1.0, dt], [0.0, 1.0]]), q**2 * np.array([[dt**3 / 3, dt**2 / 2], [dt**2 / 2, dt]])
    m, P, found = np.array([y[0], 0.0]), np.diag([r**2, 100.0]), []
    for k, value in enumerate(y):
        if k:
            m, P = F @ m, F @ P @ F.T + Q
        if not wrong[k]:
            gain = P[:, 0] / (P[0, 0] + r**2)
            m, P = m + gain * (value - m[0]), P - np.outer(gain, P[0])
        found.append(m[0])
    return np.array(found)


@pytest.mark.parametrize("seed", [0, 2])
def test_outliers_that_come_late_are_left_out(seed):
    """After 500 observations without an outlier, the error is about that of a filter without the outliers."""
    rng, n, dt, first = np.random.default_rng(seed), 900, 0.1, 500
    position = np.cumsum(5 + np.cumsum(0.5 * np.sqrt(dt) * rng.standard_normal(n))) * dt
    y = position + 0.5 * rng.standard_normal(n)
    wrong = (rng.random(n) < 0.05) & (np.arange(n) > first)
    y[wrong] += 15 * rng.standard_normal(wrong.sum())
    flow, mapping = pc.systems.linear([[0.0, 1.0], [0.0, 0.0]]), pc.systems.linear([[1.0, 0.0]])
    found = adaptive_filter(flow, 2, dt, mapping=mapping).run(y).mean("x")[:, 0, 0]
    best = kalman_without(y, wrong, dt, 0.5, 0.5)
    ours, theirs = (np.sqrt(np.mean((each - position)[first:] ** 2)) for each in (found, best))
    assert ours < 1.3 * theirs
