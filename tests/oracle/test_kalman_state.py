"""Kalman states, against the Kalman filter, brute-force Gaussians and numerical derivatives."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import GraphError, ScheduleError, SettingError
from pcnet.functions.closed_form import Linear
from pcnet.graphs import adaptive_filter
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import GeneralisedStateNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton
from pcnet.numerics.kernels import White
from support.kalman import (
    BENT_FLOW,
    BENT_MAPPING,
    DT,
    FIRST,
    FLOW,
    GAIN,
    GATHER,
    NOISE_VARIANCE,
    OBSERVATIONS,
    STATE_VARIANCE,
    STILL,
    Kalman,
    central_differences,
    kalman,
    linear_graph,
)


@pytest.mark.parametrize("learn_noise", [False, True])
def test_a_linear_model_equals_the_kalman_filter(learn_noise):
    """Mean, covariance and evidence to machine precision, with and without sensitivities."""
    oracle, result = (
        kalman(),
        linear_graph(learn_noise).run(OBSERVATIONS, STILL, record=["mean", "covariance", "energy"]),
    )
    if learn_noise:
        session = linear_graph(learn_noise).start(STILL).run(OBSERVATIONS)
        result_shares = session.context("x").state.belief.covariance[0].numpy()
    for t, y in enumerate(OBSERVATIONS):
        oracle.step(y)
        np.testing.assert_allclose(result.mean("x")[t, 0], oracle.mean, rtol=1e-11, atol=1e-13)
        if not learn_noise:
            np.testing.assert_allclose(result.covariance("x")[t], oracle.covariance, rtol=1e-11, atol=1e-14)
    if learn_noise:
        np.testing.assert_allclose(result_shares, oracle.covariance, rtol=1e-11, atol=1e-14)
    assert result.accuracy.sum() == pytest.approx(oracle.log_evidence, rel=1e-11)


def test_missing_observations_equal_the_kalman_filter():
    holes = OBSERVATIONS.copy()
    holes[3, 1] = holes[8] = holes[9, :2] = np.nan
    oracle, result = kalman(), linear_graph().run(holes, STILL, record=["mean", "sd", "energy"])
    for t, y in enumerate(holes):
        oracle.step(y)
        np.testing.assert_allclose(result.mean("x")[t, 0], oracle.mean, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(result.sd("x")[t, 0], np.sqrt(np.diag(oracle.covariance)), rtol=1e-11)
    assert result.accuracy.sum() == pytest.approx(oracle.log_evidence, rel=1e-11)
    assert (result.sd("x")[8] > result.sd("x")[7]).all()  # a pause makes less sure


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"correlation_time": 0.3},
        {"correlation_time": 0.3, "correlation_time_sd": 0.5},
        {"model_error_time": 2.0},
        {"noise_per_channel": False},
    ],
    ids=str,
)
def test_a_missing_channel_or_sensor_equals_a_model_without_it(options):
    """States, parameters and noise levels are the same."""
    flow = pc.TracedFunction(lambda x, k: torch.stack([x[..., 1], -k[..., 0] * x[..., 0]], -1))
    rows = [0, 2]
    options = {"noise_per_channel": True} | options

    def model(rows):
        gain = Linear(GAIN[rows])
        return adaptive_filter(
            flow, 2, DT, parameter_mean=[1.0], parameter_sd=0.3, mapping=gain, channels=len(rows), every=4, **options
        )

    y = np.random.default_rng(3).standard_normal((40, 3)).cumsum(0)
    holey = np.where([True, False, True], y, math.nan)
    (graph, schedule), (small, _) = model([0, 1, 2]), model(rows)
    found, expected = graph.start(schedule).run(holey), small.start(schedule).run(y[:, rows])
    other = pc.Graph()  # the same, with another sensor that never speaks
    for link in small.links:
        if link.key == "predicts":
            other.predicts(link.parent, link.child, via=link.function)
        else:
            getattr(other, link.key)(link.parent, link.child)
    other.predicts(small["x"], SensoryNode("z", dim=1, orders=1, dt=DT), via=Linear(GAIN[1:2]))
    other.weighs(
        PrecisionNode("noise_z", mean=0.0, sd=1.0, kernel=White(), estimator=Newton(covariance_reset=True)), other["z"]
    )
    silent = other.start(schedule).run({"y": y[:, rows]})
    for name in ("x", "theta", *(each for each in small.nodes if each.startswith(("noise_x", "model_error")))):
        for session in (found, silent):
            torch.testing.assert_close(session.mean(name), expected.mean(name), rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(session.sd(name), expected.sd(name), rtol=1e-9, atol=1e-10)
    seen = rows if options["noise_per_channel"] else [0]
    torch.testing.assert_close(found.mean("noise_y")[seen], expected.mean("noise_y"), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.free_action, expected.free_action, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(silent.mean("noise_z"), torch.zeros(1, dtype=torch.float64))


def test_a_gap_at_the_start_equals_the_kalman_filter():
    session, reference = linear_graph().start(STILL), kalman()
    for k in range(8):
        y = OBSERVATIONS[k] if k > 3 else np.full(3, np.nan)
        session.step(y)
        reference.step(y)
        np.testing.assert_allclose(session.mean("x")[0], reference.mean, rtol=1e-12)
        np.testing.assert_allclose(session.read("x", "covariance"), reference.covariance, rtol=1e-11)
    free = dataclasses.replace(linear_graph()["x"], initial_mean=None)
    session = linear_graph().with_nodes(dict(linear_graph().nodes) | {"x": free}).start(STILL).step(None)
    step = np.eye(2) + DT * FLOW
    expected = 0.81 * step @ step.T + STATE_VARIANCE * DT**2 * np.eye(2)
    np.testing.assert_allclose(session.read("x", "covariance"), expected, rtol=1e-12)


def test_time_is_kept_in_double_precision():
    """After a pause of 10⁵ time units, where a sampling interval is below the spacing of floats."""
    y = np.random.default_rng(1).standard_normal(300)
    graph, schedule = adaptive_filter(lambda x, theta: -0.1 * x, 1, 0.003, every=8)
    single, double = (graph.start(schedule, dtype=dtype) for dtype in (torch.float32, torch.float64))
    for session in (single, double):
        session.step([0.1], t=0.0).step([0.2], t=1e5)
        for value in y:
            session.step([value])
    np.testing.assert_allclose(single.mean("x"), double.mean("x"), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(single.sd("x"), double.sd("x"), rtol=1e-3)


def test_a_linear_model_equals_the_joint_gaussian():
    """Without recursion: x(0), all noises and all observations as one Gaussian, conditioned once."""
    steps = 6
    f, q = np.eye(2) + DT * FLOW, STATE_VARIANCE * DT**2
    # x_t = F^(t+1) x_0 + Σ F^(t−s) z_s
    power = [np.linalg.matrix_power(f, k) for k in range(steps + 1)]
    of_states = np.zeros((2 * steps, 2 + 2 * steps))
    for t in range(steps):
        of_states[2 * t : 2 * t + 2, :2] = power[t + 1]
        for s in range(t + 1):
            of_states[2 * t : 2 * t + 2, 2 + 2 * s : 4 + 2 * s] = power[t - s]
    source = np.diag(np.r_[0.81, 0.81, np.full(2 * steps, q)])
    mean = of_states @ np.r_[FIRST, np.zeros(2 * steps)]
    covariance = of_states @ source @ of_states.T
    gain = np.kron(np.eye(steps), GAIN)
    s = gain @ covariance @ gain.T + np.kron(np.eye(steps), np.diag(NOISE_VARIANCE))
    k = covariance @ gain.T @ np.linalg.inv(s)
    posterior = mean + k @ (OBSERVATIONS[:steps].ravel() - gain @ mean)
    left = covariance - k @ gain @ covariance
    result = linear_graph().run(OBSERVATIONS[:steps], STILL, record=["mean", "covariance"])
    np.testing.assert_allclose(result.mean("x")[-1, 0], posterior[-2:], rtol=1e-10)
    np.testing.assert_allclose(result.covariance("x")[-1], left[-2:, -2:], rtol=1e-9)


def test_substeps_converge_to_the_exact_discretisation():
    """The error against the exact transition falls with the number of substeps."""
    from scipy.linalg import expm

    exact = expm(FLOW * DT)

    def error(substeps: int) -> float:
        graph = linear_graph(substeps=substeps)
        oracle = kalman()
        oracle.f = exact
        # noise that stays for DT/substeps each: its covariance over DT as a sum of those of the parts
        part = np.eye(2) + DT / substeps * FLOW
        power = [np.linalg.matrix_power(part, k) for k in range(substeps)]
        oracle.q = sum(STATE_VARIANCE * (DT / substeps) ** 2 * p @ p.T for p in power)
        result = graph.run(OBSERVATIONS, STILL, record=["mean"])
        for y in OBSERVATIONS:
            oracle.step(y)
        return float(np.abs(result.mean("x")[-1, 0] - oracle.mean).max())

    coarse, fine = error(8), error(64)
    assert fine < coarse / 3


def test_irregular_times_equal_the_kalman_filter():
    times = np.cumsum([0.1, 0.1, 0.3, 0.05, 0.2])
    oracle = kalman()
    session = linear_graph().start(STILL, record=())
    for t, (time, y) in enumerate(zip(times, OBSERVATIONS, strict=False)):
        gap = DT if t == 0 else time - times[t - 1]
        oracle.f, oracle.q = np.eye(2) + gap * FLOW, STATE_VARIANCE * gap**2 * np.eye(2)
        oracle.step(y)
        session.step(y, t=time)
        np.testing.assert_allclose(session.mean("x")[0], oracle.mean, rtol=1e-10)


def test_two_sensors_equal_one_with_all_channels():
    """Sequential updates equal the joint one."""
    x = KalmanStateNode("x", dim=2, flow=Linear(FLOW), initial_mean=FIRST, initial_sd=0.9, learn_noise=False)
    a, b = SensoryNode("a", dim=1, orders=1, dt=DT), SensoryNode("b", dim=2, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, a, via=Linear(GAIN[:1]))
    graph.predicts(x, b, via=Linear(GAIN[1:]))
    graph.weighs(PrecisionNode("noise_x", mean=-math.log(STATE_VARIANCE), sd=1.0, kernel=White(), channels="shared"), x)
    graph.weighs(PrecisionNode("noise_a", mean=-np.log(NOISE_VARIANCE[:1]), sd=1.0, kernel=White()), a)
    graph.weighs(PrecisionNode("noise_b", mean=-np.log(NOISE_VARIANCE[1:]), sd=1.0, kernel=White()), b)
    both = graph.run({"a": OBSERVATIONS[:, :1], "b": OBSERVATIONS[:, 1:]}, STILL, record=["mean", "sd", "energy"])
    one = linear_graph().run(OBSERVATIONS, STILL, record=["mean", "sd", "energy"])
    np.testing.assert_allclose(both.mean("x"), one.mean("x"), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(both.sd("x"), one.sd("x"), rtol=1e-10)
    np.testing.assert_allclose(both.accuracy, one.accuracy, rtol=1e-9)


# --- gradients of parameters and precisions --------------------------------------------------------------------------


def bent_graph(theta, gain, log_x, log_y, initial_sd=0.5) -> pc.Graph:
    x = KalmanStateNode("x", dim=2, flow=BENT_FLOW, initial_mean=[0.4, -0.6], initial_sd=initial_sd)
    y = SensoryNode("y", dim=3, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=BENT_MAPPING)
    graph.parametrises(ParameterNode("theta", mean=theta, sd=1.0, estimator=Newton()), x)
    graph.parametrises(ParameterNode("gain", mean=gain, sd=1.0, estimator=Newton()), x, of=y)
    for name, log, child in (("noise_x", log_x, x), ("noise_y", log_y, y)):
        graph.weighs(PrecisionNode(name, mean=log, sd=1.0, kernel=White(), estimator=Newton()), child)
    return graph


POINT = {
    "theta": [0.8, 0.3],
    "gain": [1.1],
    "log_x": [-1.0, -0.5],
    "log_y": [0.7, 1.2, 0.3],
}


@pytest.mark.parametrize("node", ["theta", "gain"])
def test_the_score_of_parameters_is_the_gradient_of_the_log_evidence(node):
    """Against differences of whole runs, for a nonlinear flow and mapping at low noise.

    The dependence of Jacobians, and so of the gain, on parameters is neglected: some per cent here.
    """
    truth = pc.simulate.simulate(
        BENT_FLOW,
        parameters=POINT["theta"],
        initial=[0.4, -0.6],
        samples=25,
        dt=DT,
        state_sd=1e-3,
        observation_sd=1e-4,
        mapping=BENT_MAPPING,
        mapping_parameters=POINT["gain"],
        seed=3,
    ).observations
    still = {**POINT, "log_x": [2 * math.log(1e3)] * 2, "log_y": [2 * math.log(1e4)] * 3}
    still[node] = [value + 1e-4 for value in POINT[node]]
    session = bent_graph(**still, initial_sd=1e-4).start(GATHER, record=()).run(truth)
    found = -session.context(node).state.accumulated.gradient[0].numpy()

    def evidence(value):
        run = bent_graph(**{**still, node: value}, initial_sd=1e-4).run(truth, GATHER, record=["energy"])
        return run.accuracy.sum()

    expected = central_differences(evidence, np.array(still[node]), 1e-7)
    np.testing.assert_allclose(found, expected, rtol=0.1)


def test_the_score_of_smooth_noise_is_the_gradient_of_the_log_evidence():
    """Exact for a linear model with pulses in the state."""

    def graph(log) -> pc.Graph:
        x = KalmanStateNode("x", dim=2, flow=Linear(FLOW), initial_mean=FIRST, initial_sd=0.9)
        y = SensoryNode("y", dim=3, orders=1, dt=DT)
        made = pc.Graph()
        made.predicts(x, y, via=Linear(GAIN))
        made.weighs(PrecisionNode("noise_x", mean=log, sd=1.0, correlation_time=0.5, estimator=Newton()), x)
        made.weighs(
            PrecisionNode("noise_y", mean=-np.log(NOISE_VARIANCE), sd=1.0, kernel=White(), estimator=Newton()), y
        )
        return made

    point = np.array([0.3, -0.2])
    session = graph(point).start(GATHER, record=()).run(OBSERVATIONS)
    assert session.context("x").state.belief.mean.shape[1] == 2 + 2 * 5
    expected = central_differences(
        lambda log: graph(log).run(OBSERVATIONS, GATHER, record=["energy"]).accuracy.sum(), point, 1e-5
    )
    np.testing.assert_allclose(-session.context("noise_x").state.accumulated.gradient[0].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("node", ["noise_x", "noise_y"])
def test_the_score_of_log_precisions_of_a_linear_model_is_exact(node):
    session = linear_graph(learn_noise=True).start(GATHER, record=()).run(OBSERVATIONS)
    found = -session.context(node).state.accumulated.gradient[0].numpy()

    def evidence(log_x: float, log_y: np.ndarray) -> float:
        oracle = kalman()
        oracle.q, oracle.r = math.exp(-log_x) * DT**2 * np.eye(2), np.diag(np.exp(-log_y))
        for y in OBSERVATIONS:
            oracle.step(y)
        return oracle.log_evidence

    log_x, log_y = np.array([-math.log(STATE_VARIANCE)]), -np.log(NOISE_VARIANCE)
    if node == "noise_x":
        expected = central_differences(lambda log: evidence(log[0], log_y), log_x, 1e-5)
    else:
        expected = central_differences(lambda log: evidence(log_x[0], log), log_y, 1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("unsure", [1e-9, 3.0])
def test_uncertainty_of_parameters_is_not_attributed_to_noise(unsure):
    """One observation of x₀ + dt(θ + z) + w, all four normal: the log-evidence in closed form."""
    first, drift, sd, log_x, log_y, seen = 0.4, 0.5, 0.05, -1.0, 5.0, 0.9
    graph = pc.Graph()
    x = KalmanStateNode("x", dim=1, flow=lambda x, theta: theta + 0 * x, initial_mean=[first], initial_sd=sd)
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph.predicts(x, y)
    graph.parametrises(ParameterNode("theta", mean=drift, sd=unsure, estimator=Newton()), x)
    for name, log, child in (("noise_x", log_x, x), ("noise_y", log_y, y)):
        graph.weighs(PrecisionNode(name, mean=log, sd=1.0, kernel=White(), estimator=Newton()), child)
    session = graph.start(GATHER, record=()).run([[seen]])

    def evidence(logs: np.ndarray) -> float:
        variance = sd**2 + DT**2 * (unsure**2 + math.exp(-logs[0])) + math.exp(-logs[1])
        error = seen - first - DT * drift
        return -0.5 * (math.log(2 * math.pi * variance) + error**2 / variance)

    expected = central_differences(evidence, np.array([log_x, log_y]), 1e-5)
    found = [-session.context(name).state.accumulated.gradient.item() for name in ("noise_x", "noise_y")]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_parameters_of_a_linear_mapping_equal_least_squares():
    """A known constant state, y = θx + noise: the posterior of θ is that of linear regression."""
    x = KalmanStateNode(
        "x",
        dim=2,
        flow=Linear([[0.0, 0.0], [0.0, 0.0]]),
        initial_mean=[2.0, -1.0],
        initial_sd=1e-9,
        learn_noise=False,
    )
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=pc.TracedFunction(lambda x, theta: (x * theta).sum(-1, keepdim=True)))
    graph.parametrises(ParameterNode("theta", mean=[0.1, 0.2], sd=[1.0, 0.5], estimator=Newton()), x, of=y)
    graph.weighs(PrecisionNode("noise_x", mean=40.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=math.log(4.0), sd=1.0, kernel=White()), y)
    data = 1.0 + 0.5 * np.random.default_rng(1).standard_normal((30, 1))
    level = LevelNodes(precisions=())
    result = graph.run(data, adaptive_filtering(10, levels=(level,)), record=["mean", "covariance"])
    prior, row = np.diag([1.0, 4.0]), np.array([2.0, -1.0])
    precision = prior + 30 * 4.0 * np.outer(row, row)
    mean = np.linalg.solve(precision, prior @ [0.1, 0.2] + 4.0 * row * data.sum())
    np.testing.assert_allclose(result.mean("theta")[-1], mean, rtol=1e-6)
    np.testing.assert_allclose(result.covariance("theta")[-1], np.linalg.inv(precision), rtol=1e-6, atol=1e-9)


def test_states_and_parameters_equal_the_joint_kalman_filter():
    """x' = θ with θ unknown is linear in both, so a Kalman filter of (x, θ) is exact."""
    x = KalmanStateNode(
        "x",
        dim=1,
        flow=pc.TracedFunction(lambda x, theta: theta + 0.0 * x),
        initial_mean=[0.0],
        initial_sd=0.5,
        learn_noise=False,
    )
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(ParameterNode("theta", mean=[0.0], sd=2.0, estimator=Newton()), x)
    graph.weighs(PrecisionNode("noise_x", mean=0.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=1.0, sd=1.0, kernel=White()), y)
    data = 0.7 * DT * np.arange(40)[:, None] + 0.3 * np.random.default_rng(2).standard_normal((40, 1))
    oracle = Kalman(
        np.array([[1.0, DT], [0.0, 1.0]]),
        np.diag([DT**2, 0.0]),
        np.array([[1.0, 0.0]]),
        np.array([[math.exp(-1.0)]]),
        np.zeros(2),
        np.diag([0.25, 4.0]),
    )
    result = graph.run(data, adaptive_filtering(1, levels=(LevelNodes(precisions=()),)), record=["mean", "sd"])
    for t, value in enumerate(data):
        oracle.step(value)
        np.testing.assert_allclose(result.mean("theta")[t], oracle.mean[1:], rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(result.mean("x")[t, 0], oracle.mean[:1], rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(result.sd("theta")[t], np.sqrt(oracle.covariance[1:, 1]), rtol=1e-9)
        np.testing.assert_allclose(result.sd("x")[t, 0], np.sqrt(oracle.covariance[:1, 0]), rtol=1e-9)


def test_forgetting_is_a_random_walk_of_the_parameters():
    """Keeping 1 − φ of the information is a step of θ with variance φ/(1 − φ) times its own."""
    share = 0.2
    x = KalmanStateNode(
        "x",
        dim=1,
        flow=pc.TracedFunction(lambda x, theta: theta + 0.0 * x),
        initial_mean=[0.0],
        initial_sd=0.5,
        learn_noise=False,
    )
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(ParameterNode("theta", mean=[0.0], sd=1e4, estimator=Newton(forgetting_factor=share)), x)
    graph.weighs(PrecisionNode("noise_x", mean=0.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=1.0, sd=1.0, kernel=White()), y)
    data = np.sin(0.3 * np.arange(30))[:, None]
    oracle = Kalman(
        np.array([[1.0, DT], [0.0, 1.0]]),
        np.diag([DT**2, 0.0]),
        np.array([[1.0, 0.0]]),
        np.array([[math.exp(-1.0)]]),
        np.zeros(2),
        np.diag([0.25, 1e8]),
    )
    result = graph.run(data, adaptive_filtering(1, levels=(LevelNodes(precisions=()),)), record=["mean"])
    for t, value in enumerate(data):
        oracle.step(value)
        np.testing.assert_allclose(result.mean("x")[t, 0], oracle.mean[:1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result.mean("theta")[t], oracle.mean[1:], rtol=1e-5, atol=1e-6)
        oracle.covariance[1, 1] /= 1 - share


# --- nonlinear flows, to second order --------------------------------------------------------------------------------
@pytest.mark.parametrize("flow", [pc.systems.lorenz, pc.TracedFunction(pc.systems.lorenz.__call__, parameters=1)])
@pytest.mark.parametrize("second_order", [True, False])
def test_second_order_predicts_the_mean_of_a_quadratic_flow(flow, second_order):
    """E f(x) of x ~ N(m, P), exact by points at m ± √3 times columns of a root of P; f(m) if not second_order."""
    x = KalmanStateNode(
        "x", dim=3, flow=flow, initial_mean=[1.0, 2.0, 20.0], initial_sd=[1.0, 2.0, 3.0], second_order=second_order
    )
    y = SensoryNode("y", dim=3, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(ParameterNode("theta", mean=[28.0], sd=1.0, estimator=Newton()), x)
    graph.weighs(PrecisionNode("noise_x", mean=0.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=1.0, sd=1.0, kernel=White()), y)
    session = graph.start(STILL)
    session.run(np.array([[1.0, 2.5, 19.0], [1.3, 2.0, 19.5]]))
    mean, covariance = session.mean("x")[0], session.context("x").state.belief.covariance[0, :3, :3]
    session.step(np.full(3, np.nan))
    theta, f = torch.tensor([28.0], dtype=torch.float64), pc.systems.lorenz
    points = math.sqrt(3) * torch.linalg.cholesky(covariance).mT
    ends = torch.cat([mean + points, mean - points])
    second = (f(ends, theta.expand(6, 1)) - f(mean, theta)).sum(0) / 6
    assert second.abs().max() > 1e-3
    drift = f(mean, theta) + (second if second_order else 0.0)
    np.testing.assert_allclose(session.mean("x")[0], mean + DT * drift, rtol=1e-12)


# --- smooth noise ----------------------------------------------------------------------------------------------------


def test_smooth_observation_noise_equals_a_gaussian_process_posterior():
    """A constant state under noise with covariance exp(−h²/2w²), over six lengthscales: variance 1/(1ᵀS⁻¹1 + prior).

    Five pulses and the white rest are close to it; white noise of the same variance would give an eighth.
    """
    width, steps, sd = 0.5, 60, 0.3
    x = KalmanStateNode("x", dim=1, flow=Linear([[0.0]]), initial_mean=[0.0], initial_sd=2.0, learn_noise=False)
    y = SensoryNode("y", dim=1, orders=1, dt=0.05)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("noise_x", mean=40.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=-2 * math.log(sd), sd=1.0, correlation_time=width), y)
    noise = pc.simulate.smooth_noise(steps, 1, sd=sd, width=width / math.sqrt(2), dt=0.05, seed=4)
    result = graph.run(1.0 + noise, STILL, record=["mean", "sd"])
    times = 0.05 * np.arange(steps)
    s = sd**2 * (np.exp(-((times[:, None] - times) ** 2) / (2 * width**2)) + 0.01 * np.eye(steps))
    weights = np.linalg.solve(s, np.ones(steps))
    precision = weights.sum() + 0.25
    assert result.sd("x")[-1, 0, 0] == pytest.approx(precision**-0.5, rel=0.1)
    assert result.mean("x")[-1, 0, 0] == pytest.approx(weights @ (1.0 + noise.numpy()[:, 0]) / precision, abs=0.04)
    assert sd / math.sqrt(steps) < 0.4 * precision**-0.5


def test_without_pulses_smooth_noise_is_equivalent_white_noise():
    """The Kalman filter with the variance times ∫κ/dt."""
    width = 0.3
    result = {}
    for n_pulses in (0, 5):
        x = KalmanStateNode(
            "x",
            dim=2,
            flow=Linear(FLOW),
            initial_mean=FIRST,
            initial_sd=0.9,
            learn_noise=False,
            n_pulses=n_pulses,
        )
        y = SensoryNode("y", dim=3, orders=1, dt=DT)
        graph = pc.Graph()
        graph.predicts(x, y, via=Linear(GAIN))
        graph.weighs(
            PrecisionNode("a", mean=-math.log(STATE_VARIANCE), sd=1.0, correlation_time=width, channels="shared"), x
        )
        graph.weighs(PrecisionNode("b", mean=-np.log(NOISE_VARIANCE), sd=1.0, correlation_time=width), y)
        result[n_pulses] = graph.run(OBSERVATIONS, STILL, record=["mean", "sd"])
    oracle = kalman()
    more = math.sqrt(2 * math.pi) * width / DT
    oracle.q, oracle.r = oracle.q * more, oracle.r * more
    for t, y in enumerate(OBSERVATIONS):
        oracle.step(y)
        np.testing.assert_allclose(result[0].mean("x")[t, 0], oracle.mean, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(result[0].sd("x")[t, 0], np.sqrt(np.diag(oracle.covariance)), rtol=1e-10)
    assert not np.allclose(result[0].mean("x"), result[5].mean("x"))


# --- the contract, batches, files ------------------------------------------------------------------------------------


def test_forecasts_equal_the_kalman_filter_without_observations():
    session = linear_graph().start(STILL, record=()).run(OBSERVATIONS)
    forecast = session.forecast(40 * DT)
    oracle = kalman()
    for y in OBSERVATIONS:
        oracle.step(y)
    for k in range(40):
        oracle.step(np.full(3, np.nan))
        np.testing.assert_allclose(forecast.mean("x")[k], oracle.mean, rtol=1e-9)
        np.testing.assert_allclose(forecast.sd("x")[k], np.sqrt(np.diag(oracle.covariance)), rtol=1e-9)


def test_the_error_of_a_kalman_state_is_its_correction():
    result = linear_graph().run(OBSERVATIONS, STILL, record=pc.Record.flow())
    assert result.error_flow().surprise("x").shape == (25,)
    oracle = kalman()
    for t, y in enumerate(OBSERVATIONS):
        before = oracle.f @ oracle.mean
        oracle.step(y)
        np.testing.assert_allclose(result.get("x", "error")[t, 0], oracle.mean - before, rtol=1e-9, atol=1e-12)


# --- what it refuses -------------------------------------------------------------------------------------------------
def test_invalid_settings_and_links_are_rejected():
    x = KalmanStateNode("x", dim=2, flow=Linear(FLOW))
    graph = pc.Graph()
    with pytest.raises(GraphError, match="give 'y' one order, orders=1"):
        graph.predicts(x, SensoryNode("y", dim=2, orders=2, dt=0.1))
    with pytest.raises(GraphError, match="cannot be the child in 'v' drives 'x'; use a GeneralisedStateNode"):
        graph.drives(pc.CauseNode("v", dim=1, orders=1), x)
    with pytest.raises(SettingError, match="needs n_pulses=3 or more"):
        KalmanStateNode("x", dim=2, flow=Linear(FLOW), n_pulses=2)
    with pytest.raises(SettingError, match="orders"):
        KalmanStateNode("x", dim=2, flow=Linear(FLOW), orders=3)
    with pytest.raises(SettingError, match="initial_sd must be one number or end in 2"):
        KalmanStateNode("x", dim=2, flow=Linear(FLOW), initial_sd=[1.0, 2.0, 3.0])
    y, other = (
        SensoryNode("y", dim=2, orders=1, dt=0.1),
        GeneralisedStateNode("other", dim=2, orders=1, flow=Linear(FLOW)),
    )
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.predicts(other, y)
    for node in (x, other, y):
        graph.weighs(PrecisionNode(f"noise_{node.name}", prior_precision=1.0, sd=1.0, kernel=White()), node)
    with pytest.raises(GraphError, match="join them into one state"):
        graph.run(OBSERVATIONS[:, :2], STILL)


def test_a_schedule_without_predict_is_rejected():
    """The belief would never be moved to the time of the observation."""
    with pytest.raises(
        ScheduleError, match=r"KalmanStateNode 'x' never takes the action 'predict'; .*pcnet.adaptive_filtering\(\)"
    ):
        linear_graph().run(OBSERVATIONS, pc.odem())


def test_coupled_precisions_are_rejected():
    x, y = KalmanStateNode("x", dim=2, flow=Linear(FLOW)), SensoryNode("y", dim=2, orders=1, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("noise_x", prior_precision=1.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", prior_precision=1.0, sd=1.0, kernel=White(), channels="full"), y)
    with pytest.raises(GraphError, match="'y' couples channels"):
        graph.run(OBSERVATIONS[:, :2], STILL)


def test_the_adaptive_filter_recovers_noise_levels_from_wrong_guesses():
    """An oscillator of unknown stiffness with white noise, guesses wrong by 50 either way, seven seeds."""
    truth, dt, samples, seeds = 1.7, 0.05, 1500, list(range(7))

    def oscillator(x, theta):
        return torch.stack([x[..., 1], -theta[..., 0] * x[..., 0] - 0.2 * x[..., 1]], -1)

    flow = pc.TracedFunction(oscillator)
    data = pc.simulate.simulate(
        flow,
        parameters=[truth],
        initial=[1.0, 0.0],
        samples=samples,
        dt=dt,
        state_sd=1.0,
        observation_sd=0.2,
        seed=seeds,
    )
    wrong = torch.tensor([1 / 50, 50.0])[:, None]
    model = adaptive_filter(
        flow,
        2,
        dt,
        parameter_mean=[1.0],
        parameter_sd=0.5,
        every=20,
        expected_precision_x=(1.0 * wrong)[..., None],
        expected_precision_y=(25 * wrong)[..., None],
    )
    result = model.graph.run(data.observations, model.schedule, record=["mean", "sd"])
    assert np.abs(result.mean("noise_y")[..., -1, 0] - math.log(25.0)).max() < math.log(1.2)
    assert np.abs(result.mean("noise_x")[..., -1, 0]).max() < math.log(2)
    found, sd = result.mean("theta")[..., -1, 0], result.sd("theta")[..., -1, 0]
    assert np.abs(found - truth).max() < 4 * sd.max()
    inside = (
        np.abs(result.mean("x")[..., 750:, 0, :] - data.states.numpy()[:, 750:]) < 2 * result.sd("x")[..., 750:, 0, :]
    )
    assert 0.90 < inside.mean() < 0.99


@pytest.mark.parametrize("policy", ["stop", "hold", "reset"])
def test_divergence_at_the_first_observation_does_not_affect_other_elements(policy):

    def graph(mean):
        return adaptive_filter(
            lambda x, theta: theta * x, 1, DT, parameter_mean=mean, parameter_sd=1.0, initial_mean=[1.0]
        ).graph

    lost, alone = np.array([[1e200], [0.0]]), np.array([0.0])
    data = OBSERVATIONS[:6, :1]
    result = graph(lost).run(data, adaptive_filtering(), on_divergence=policy)
    np.testing.assert_allclose(result.mean("x")[1], graph(alone).run(data, adaptive_filtering()).mean("x"), rtol=1e-12)
    assert (result.diverged.at == ([0, -1] if policy == "stop" else [-1, -1])).all()


@pytest.mark.parametrize("options", [{}, {"correlation_time": 0.3}, {"model_error_time": 2.0}], ids=str)
def test_a_reset_within_a_gap_equals_a_new_run(options):
    def graph():
        return adaptive_filter(
            lambda x, theta: -theta * x, 3, DT, parameter_mean=[0.4, 0.5, 0.6], parameter_sd=0.2, every=4, **options
        )

    y = np.stack([OBSERVATIONS, OBSERVATIONS[::-1]])
    y[1, 5] = 1e300
    y[1, 6:15] = math.nan
    found = graph().graph.start(graph().schedule, on_divergence="reset").run(y)
    fresh = graph().start().prepare(y[1])
    fresh._run.now = fresh._run.now._replace(tick=6)  # so that its slow clocks tick with the other's
    fresh.run(y[1, 6:])
    assert found.fallbacks["reset"].tolist() == [0, 1]
    for name in ("x", "theta", "noise_x", "noise_y"):
        torch.testing.assert_close(found.mean(name)[1], fresh.mean(name), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.sd(name)[1], fresh.sd(name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1e30, 1e100, 1e150, 1e154, 1e300])
@pytest.mark.parametrize("policy", ["hold", "reset"])
def test_huge_observations_never_leave_non_finite_beliefs(size, policy):
    graph, schedule = adaptive_filter(
        pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25, every=4
    )
    session = graph.start(schedule, on_divergence=policy)
    for k in range(20):
        session.step(np.full(3, size) if k == 9 else 1 + 0.1 * OBSERVATIONS[k])
        for name in ("x", "theta", "noise_x", "noise_y"):
            assert torch.isfinite(session.mean(name)).all(), (k, name)
            assert torch.isfinite(session.sd(name)).all(), (k, name)


# --- beginning to learn ----------------------------------------------------------------------------------------------
def test_learned_noise_levels_start_inflated():
    """By two prior sds for observations and half an sd for states; given levels start as given."""
    options = {"expected_precision_x": 4.0, "expected_precision_y": 9.0, "sd_lambda": 1.5}
    graph, _ = adaptive_filter(lambda x, theta: -x, 2, DT, **options)
    given = graph.start(STILL, record=()).step([1.0, 0.5])
    assert given.mean("noise_x").item() == pytest.approx(math.log(4.0))
    assert given.mean("noise_y").item() == pytest.approx(math.log(9.0))
    session = graph.start(adaptive_filtering(), record=()).step([1.0, 0.5])
    assert session.mean("noise_x").item() == pytest.approx(math.log(4.0) - 0.5 * 1.5)
    assert session.mean("noise_y").item() == pytest.approx(math.log(9.0) - 2.0 * 1.5)
