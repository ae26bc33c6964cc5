"""Kalman states, against the Kalman filter, brute-force Gaussians and numerical derivatives."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.linalg import block_diag

import pcnet as pc
from pcnet import graphs
from pcnet.errors import DivergenceError, GraphError, ScheduleError, SettingError
from pcnet.functions.closed_form import Linear
from pcnet.model.schedule import LevelNodes, act, adaptive_filtering
from pcnet.nodes import GeneralisedStateNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton
from pcnet.numerics.kernels import White
from support.filters import single_filter
from support.kalman import (
    BENT_FLOW,
    BENT_MAPPING,
    DT,
    FIRST,
    FLOW,
    GAIN,
    NOISE_VARIANCE,
    OBSERVATIONS,
    STATE_VARIANCE,
    STILL,
    Kalman,
    central_differences,
    exact_transition,
    in_steps,
    kalman,
    linear_graph,
    one_pass,
    transition,
)


@pytest.mark.parametrize("process_noise", ["diffusion", "held"])
@pytest.mark.parametrize("integrator", ["rk4", "local_linearisation", "euler"])
@pytest.mark.parametrize("learn_noise", [False, True])
def test_a_linear_model_equals_the_kalman_filter(learn_noise, integrator, process_noise):
    """Mean, covariance and evidence to machine precision, with the covariance as a whole and by source."""
    scheme = {"integrator": integrator, "process_noise": process_noise}
    graph, oracle = linear_graph(learn_noise, **scheme), kalman(**scheme)
    result = graph.run(OBSERVATIONS, STILL, record=["mean", "covariance", "energy"])
    for t, y in enumerate(OBSERVATIONS):
        oracle.step(y)
        np.testing.assert_allclose(result.mean("x")[t, 0], oracle.mean, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(result.covariance("x")[t], oracle.covariance, rtol=1e-11, atol=1e-14)
    assert result.accuracy.sum() == pytest.approx(oracle.log_evidence, rel=1e-11)


def test_points_and_derivatives_agree_on_a_linear_model():
    """A flow and a mapping that are not known to be linear, by regression on points: the Kalman filter, but for the
    relative variance of 1e-9 that is added before a covariance is factorised."""
    flow, gain = torch.from_numpy(FLOW), torch.from_numpy(GAIN)
    x = KalmanStateNode(
        "x", dim=2, flow=lambda x, _: x @ flow.mT, initial_mean=FIRST, initial_sd=0.9, learn_noise=False
    )
    y = SensoryNode("y", dim=3, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=lambda x, _: x @ gain.mT)
    graph.weighs(PrecisionNode("noise_x", mean=-math.log(STATE_VARIANCE), sd=1.0, kernel=White(), channels="shared"), x)
    graph.weighs(PrecisionNode("noise_y", mean=-np.log(NOISE_VARIANCE), sd=1.0, kernel=White()), y)
    oracle, result = kalman(), graph.run(OBSERVATIONS, STILL, record=["mean", "covariance", "energy"])
    for t, seen in enumerate(OBSERVATIONS):
        oracle.step(seen)
        np.testing.assert_allclose(result.mean("x")[t, 0], oracle.mean, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(result.covariance("x")[t], oracle.covariance, rtol=1e-11, atol=1e-14)
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
        return single_filter(
            flow, 2, DT, parameter_mean=[1.0], parameter_sd=0.3, mapping=gain, channels=len(rows), **options
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
    other.weighs(PrecisionNode("noise_z", mean=0.0, sd=1.0, kernel=White()), other["z"])
    silent = other.start(schedule).run({"y": y[:, rows]})
    for name in ("x", "theta", *(each for each in small.nodes if each.startswith(("noise_x", "model_error")))):
        for session in (found, silent):
            # smooth noise is ill-conditioned: rounding of observations moves it by 1e-8
            torch.testing.assert_close(session.mean(name), expected.mean(name), rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(session.sd(name), expected.sd(name), rtol=1e-7, atol=1e-9)
    seen = rows if options["noise_per_channel"] else [0]
    torch.testing.assert_close(found.mean("noise_y")[seen], expected.mean("noise_y"), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found.free_action, expected.free_action, rtol=1e-7, atol=1e-8)
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
    np.testing.assert_allclose(session.read("x", "covariance"), 0.81 * np.eye(2), rtol=1e-12)
    step, noise = transition(FLOW, STATE_VARIANCE, DT)
    session.step(None)
    np.testing.assert_allclose(session.read("x", "covariance"), 0.81 * step @ step.T + noise, rtol=1e-12)


@pytest.mark.parametrize("given", [True, False])
def test_the_first_belief_has_the_given_standard_deviation(given):
    """The first observation has mean 3 and sd 0.4, the first belief sd 0.5 about its mean, given or found from it."""
    x = KalmanStateNode(
        "x", dim=1, flow=pc.systems.linear([[-1.0]]), initial_mean=[3.0] if given else None, initial_sd=0.5
    )
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y)
    for node, sd in ((x, 1.0), (y, 0.4)):
        graph.weighs(PrecisionNode(f"noise_{node.name}", prior_precision=sd**-2, sd=1e-9, kernel=White()), node)
    session = graph.start(STILL).step([3.0])
    assert float(session.mean("x")) == pytest.approx(3.0)
    assert float(session.sd("x")) == pytest.approx((0.5**-2 + 0.4**-2) ** -0.5, rel=1e-8)


def test_time_is_kept_in_double_precision():
    """After a pause of 10⁵ time units, where a sampling interval is below the spacing of floats."""
    y = np.random.default_rng(1).standard_normal(300)
    graph, schedule = single_filter(lambda x, theta: -1e-6 * x, 1, 0.003)
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
    f, q = transition(FLOW, STATE_VARIANCE, DT)
    # x_t = F^t x_0 + Σ F^(t−s) z_s, s = 1 … t
    power = [np.linalg.matrix_power(f, k) for k in range(steps)]
    of_states = np.zeros((2 * steps, 2 * steps))
    for t in range(steps):
        for k in range(t + 1):
            of_states[2 * t : 2 * t + 2, 2 * k : 2 * k + 2] = power[t - k]
    source = block_diag(0.81 * np.eye(2), *[q] * (steps - 1))
    mean = of_states @ np.r_[FIRST, np.zeros(2 * steps - 2)]
    covariance = of_states @ source @ of_states.T
    gain = np.kron(np.eye(steps), GAIN)
    s = gain @ covariance @ gain.T + np.kron(np.eye(steps), np.diag(NOISE_VARIANCE))
    k = covariance @ gain.T @ np.linalg.inv(s)
    posterior = mean + k @ (OBSERVATIONS[:steps].ravel() - gain @ mean)
    left = covariance - k @ gain @ covariance
    result = linear_graph().run(OBSERVATIONS[:steps], STILL, record=["mean", "covariance"])
    np.testing.assert_allclose(result.mean("x")[-1, 0], posterior[-2:], rtol=1e-10)
    np.testing.assert_allclose(result.covariance("x")[-1], left[-2:, -2:], rtol=1e-9)


@pytest.mark.parametrize(("integrator", "order"), [("euler", 1), ("rk4", 4)])
def test_substeps_converge_to_the_exact_discretisation(integrator, order):
    """The error against the exact transition and its noise falls by 2^order with each doubling."""
    exact = kalman()
    exact.f, exact.q = exact_transition(FLOW, STATE_VARIANCE, DT)
    for y in OBSERVATIONS:
        exact.step(y)

    def error(substeps: int) -> float:
        graph = linear_graph(integrator=integrator, substeps=substeps)
        session = graph.start(STILL, record=()).run(OBSERVATIONS)
        return float(np.abs(session.read("x", "covariance").numpy() - exact.covariance).max())

    coarse, fine = error(1), error(4)
    assert fine < 1.5 * coarse / 4**order
    assert order == 1 or coarse < 2e-7


def test_irregular_times_equal_the_kalman_filter():
    times = np.cumsum([0.1, 0.1, 0.3, 0.05, 0.2])
    oracle = kalman()
    session = linear_graph().start(STILL, record=())
    for t, (time, y) in enumerate(zip(times, OBSERVATIONS, strict=False)):
        oracle.f, oracle.q = in_steps(FLOW, STATE_VARIANCE, time - times[max(t - 1, 0)])
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
    session = one_pass(bent_graph(**still, initial_sd=1e-4), truth)
    found = -session.context(node).state.accumulated.gradient[0].numpy()

    def evidence(value):
        run = bent_graph(**{**still, node: value}, initial_sd=1e-4).run(truth, STILL, record=["energy"])
        return run.accuracy.sum()

    expected = central_differences(evidence, np.array(still[node]), 1e-7)
    np.testing.assert_allclose(found, expected, rtol=0.1)


def test_the_score_of_smooth_noise_is_the_gradient_of_the_log_evidence():
    """Exact for a linear model with the coordinates of the noise in its state."""

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
    session = one_pass(graph(point), OBSERVATIONS)
    assert session.context("x").state.belief.mean.shape[1] == 2 + 2 * (session.graph["x"].orders - 1)
    expected = central_differences(
        lambda log: graph(log).run(OBSERVATIONS, STILL, record=["energy"]).accuracy.sum(), point, 1e-5
    )
    np.testing.assert_allclose(-session.context("noise_x").state.accumulated.gradient[0].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("node", ["noise_x", "noise_y"])
def test_the_score_of_log_precisions_of_a_linear_model_is_exact(node):
    session = one_pass(linear_graph(learn_noise=True), OBSERVATIONS)
    found = -session.context(node).state.accumulated.gradient[0].numpy()

    def evidence(log_x: float, log_y: np.ndarray) -> float:
        oracle = kalman()
        oracle.q, oracle.r = transition(FLOW, math.exp(-log_x), DT)[1], np.diag(np.exp(-log_y))
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
    """One observation of x₀ + dt θ + z + w, all four normal: the log-evidence in closed form."""
    first, drift, sd, log_x, log_y, seen = 0.4, 0.5, 0.05, -1.0, 5.0, 0.9
    graph = pc.Graph()
    x = KalmanStateNode("x", dim=1, flow=lambda x, theta: theta + 0 * x, initial_mean=[first], initial_sd=sd)
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph.predicts(x, y)
    graph.parametrises(ParameterNode("theta", mean=drift, sd=unsure), x)
    for name, log, child in (("noise_x", log_x, x), ("noise_y", log_y, y)):
        graph.weighs(PrecisionNode(name, mean=log, sd=1.0, kernel=White(), estimator=Newton()), child)
    learn = adaptive_filtering(levels=(LevelNodes(precisions=()),))
    schedule = dataclasses.replace(learn, acts=(*learn.acts, act("accumulate", "precision")))
    session = graph.start(schedule, record=()).run([[math.nan], [seen]])

    def evidence(logs: np.ndarray) -> float:
        variance = sd**2 + DT**2 * unsure**2 + DT * math.exp(-logs[0]) + math.exp(-logs[1])
        error = seen - first - DT * drift
        return -0.5 * (math.log(2 * math.pi * variance) + error**2 / variance)

    expected = central_differences(evidence, np.array([log_x, log_y]), 1e-5)
    found = [-session.context(name).state.accumulated.gradient.item() for name in ("noise_x", "noise_y")]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert float(session.total_accuracy) == pytest.approx(evidence(np.array([log_x, log_y])), rel=1e-9)


@pytest.mark.parametrize("estimator", [None, Newton()], ids=["joint", "scored"])
def test_parameters_of_a_linear_mapping_equal_least_squares(estimator):
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
    graph.parametrises(ParameterNode("theta", mean=[0.1, 0.2], sd=[1.0, 0.5], estimator=estimator), x, of=y)
    graph.weighs(PrecisionNode("noise_x", mean=40.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=math.log(4.0), sd=1.0, kernel=White()), y)
    data = 1.0 + 0.5 * np.random.default_rng(1).standard_normal((30, 1))
    level = LevelNodes(precisions=())
    result = graph.run(data, adaptive_filtering(levels=(level,), learn_every=10), record=["mean", "covariance"])
    prior, row = np.diag([1.0, 4.0]), np.array([2.0, -1.0])
    precision = prior + 30 * 4.0 * np.outer(row, row)
    mean = np.linalg.solve(precision, prior @ [0.1, 0.2] + 4.0 * row * data.sum())
    np.testing.assert_allclose(result.mean("theta")[-1], mean, rtol=1e-6)
    np.testing.assert_allclose(result.covariance("theta")[-1], np.linalg.inv(precision), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("estimator", [None, Newton()], ids=["joint", "scored"])
@pytest.mark.parametrize("linearisation", ["unscented", "taylor"])
def test_states_and_parameters_equal_the_joint_kalman_filter(estimator, linearisation):
    """x' = θ with θ unknown is linear in both, so a Kalman filter of (x, θ) is exact."""
    x = KalmanStateNode(
        "x",
        dim=1,
        flow=pc.TracedFunction(lambda x, theta: theta + 0.0 * x),
        initial_mean=[0.0],
        initial_sd=0.5,
        learn_noise=False,
        linearisation=linearisation,
    )
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(ParameterNode("theta", mean=[0.0], sd=2.0, estimator=estimator), x)
    graph.weighs(PrecisionNode("noise_x", mean=0.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=1.0, sd=1.0, kernel=White()), y)
    data = 0.7 * DT * np.arange(40)[:, None] + 0.3 * np.random.default_rng(2).standard_normal((40, 1))
    oracle = Kalman(
        np.array([[1.0, DT], [0.0, 1.0]]),
        np.diag([DT, 0.0]),
        np.array([[1.0, 0.0]]),
        np.array([[math.exp(-1.0)]]),
        np.zeros(2),
        np.diag([0.25, 4.0]),
    )
    result = graph.run(
        data, adaptive_filtering(levels=(LevelNodes(precisions=()),)), record=["mean", "covariance", "energy"]
    )
    for t, value in enumerate(data):
        oracle.step(value)
        np.testing.assert_allclose(result.mean("theta")[t], oracle.mean[1:], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(result.mean("x")[t, 0], oracle.mean[:1], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(result.covariance("theta")[t], oracle.covariance[1:, 1:], rtol=1e-10)
        np.testing.assert_allclose(result.covariance("x")[t], oracle.covariance[:1, :1], rtol=1e-10)
    if estimator is None:
        assert result.accuracy.sum() == pytest.approx(oracle.log_evidence, rel=1e-10)
        assert float(result.free_action) == pytest.approx(-oracle.log_evidence, rel=1e-10)


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
        np.diag([DT, 0.0]),
        np.array([[1.0, 0.0]]),
        np.array([[math.exp(-1.0)]]),
        np.zeros(2),
        np.diag([0.25, 1e8]),
    )
    result = graph.run(data, adaptive_filtering(levels=(LevelNodes(precisions=()),)), record=["mean"])
    for t, value in enumerate(data):
        oracle.step(value)
        np.testing.assert_allclose(result.mean("x")[t, 0], oracle.mean[:1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result.mean("theta")[t], oracle.mean[1:], rtol=1e-5, atol=1e-6)
        oracle.covariance[1, 1] /= 1 - share


# --- nonlinear flows -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flow", [pc.systems.lorenz, pc.TracedFunction(pc.systems.lorenz.__call__, parameters=1)])
@pytest.mark.parametrize("linearisation", ["unscented", "taylor"])
def test_points_predict_the_mean_of_a_quadratic_flow(flow, linearisation):
    """E f(x) of x ~ N(m, P) by the closed form for quadratic functions; f(m) by derivatives."""
    x = KalmanStateNode(
        "x",
        dim=3,
        flow=flow,
        initial_mean=[1.0, 2.0, 20.0],
        initial_sd=[1.0, 2.0, 3.0],
        integrator="euler",
        linearisation=linearisation,
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
    bends = [torch.func.hessian(lambda value, i=i: f(value, theta)[i])(mean) for i in range(3)]
    second = 0.5 * torch.stack([(bend * covariance).sum() for bend in bends])
    assert second.abs().max() > 1e-3
    drift = f(mean, theta) + (second if linearisation == "unscented" else 0.0)
    # a relative variance of 1e-9 is added to the covariance before it is factorised
    rtol = 1e-10 if linearisation == "unscented" else 1e-12
    np.testing.assert_allclose(session.mean("x")[0], mean + DT * drift, rtol=rtol)


# --- smooth noise ----------------------------------------------------------------------------------------------------


def test_smooth_observation_noise_equals_a_gaussian_process_posterior():
    """A constant state under noise with covariance exp(−h²/2w²), over six lengthscales: variance 1/(1ᵀS⁻¹1 + prior).

    Five coordinates and the white rest are close to it; white noise of the same variance would give an eighth.
    """
    width, steps, sd = 0.5, 60, 0.3
    x = KalmanStateNode("x", dim=1, flow=Linear([[0.0]]), initial_mean=[0.0], initial_sd=2.0, learn_noise=False)
    y = SensoryNode("y", dim=1, orders=1, dt=0.05)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("noise_x", mean=40.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=-2 * math.log(sd), sd=1.0, correlation_time=width), y)
    rest = 8.5e-4 * width / 0.05
    noise = pc.simulate.smooth_noise(steps, 1, sd=sd, width=width / math.sqrt(2), dt=0.05, seed=4)
    result = graph.run(1.0 + noise, STILL, record=["mean", "sd"])
    times = 0.05 * np.arange(steps)
    s = sd**2 * (np.exp(-((times[:, None] - times) ** 2) / (2 * width**2)) + rest * np.eye(steps))
    weights = np.linalg.solve(s, np.ones(steps))
    precision = weights.sum() + 0.25
    assert result.sd("x")[-1, 0, 0] == pytest.approx(precision**-0.5, rel=0.1)
    assert result.mean("x")[-1, 0, 0] == pytest.approx(weights @ (1.0 + noise.numpy()[:, 0]) / precision, abs=0.04)
    assert sd / math.sqrt(steps) < 0.4 * precision**-0.5


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
        if t:
            oracle.predict()
        before = oracle.mean
        oracle.update(y)
        np.testing.assert_allclose(result.get("x", "error")[t, 0], oracle.mean - before, rtol=1e-9, atol=1e-12)


# --- what it refuses -------------------------------------------------------------------------------------------------
def test_invalid_settings_and_links_are_rejected():
    x = KalmanStateNode("x", dim=2, flow=Linear(FLOW))
    graph = pc.Graph()
    with pytest.raises(GraphError, match="give 'y' one order, orders=1"):
        graph.predicts(x, SensoryNode("y", dim=2, orders=2, dt=0.1))
    with pytest.raises(GraphError, match="cannot be the child in 'v' drives 'x'; use a GeneralisedStateNode"):
        graph.drives(pc.CauseNode("v", dim=1, orders=1), x)
    with pytest.raises(SettingError, match="orders"):
        KalmanStateNode("x", dim=2, flow=Linear(FLOW), orders=1)
    with pytest.raises(SettingError, match="integrator"):
        KalmanStateNode("x", dim=2, flow=Linear(FLOW), integrator="heun")
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


@pytest.mark.usefixtures("as_users_run")
def test_the_adaptive_filter_recovers_noise_levels_from_wrong_guesses():
    """An oscillator of unknown stiffness with white noise, precisions guessed 50 times too low or high, seven seeds."""
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
    wrong = torch.tensor([1 / 50, 50.0]).sqrt()[:, None]
    model = single_filter(
        flow,
        2,
        dt,
        parameter_mean=[1.0],
        parameter_sd=0.5,
        integrator="euler",
        process_noise="held",
        noise_per_channel=False,
        process_noise_sd=(1.0 * wrong)[..., None],
        observation_noise_sd=(0.2 * wrong)[..., None],
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
def test_divergence_at_the_second_observation_does_not_affect_other_elements(policy):

    def graph(mean):
        return single_filter(
            lambda x, theta: theta * x, 1, DT, parameter_mean=mean, parameter_sd=1.0, initial_mean=[1.0]
        ).graph

    lost, alone = np.array([[1e200], [0.0]]), np.array([0.0])
    data = OBSERVATIONS[:6, :1]
    result = graph(lost).run(data, adaptive_filtering(), on_divergence=policy)
    np.testing.assert_allclose(result.mean("x")[1], graph(alone).run(data, adaptive_filtering()).mean("x"), rtol=1e-12)
    assert (result.diverged.at == ([1, -1] if policy == "stop" else [-1, -1])).all()


@pytest.mark.parametrize("options", [{}, {"correlation_time": 0.3}, {"model_error_time": 2.0}], ids=str)
def test_a_reset_within_a_gap_equals_a_new_run(options):
    def graph():
        return single_filter(
            lambda x, theta: -theta * x, 3, DT, parameter_mean=[0.4, 0.5, 0.6], parameter_sd=0.2, **options
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
    graph, schedule = single_filter(
        pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25
    )
    session = graph.start(schedule, on_divergence=policy)
    for k in range(20):
        session.step(np.full(3, size) if k == 9 else 1 + 0.1 * OBSERVATIONS[k])
        for name in ("x", "theta", "noise_x", "noise_y"):
            assert torch.isfinite(session.mean(name)).all(), (k, name)
            assert torch.isfinite(session.sd(name)).all(), (k, name)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, True),
        ({"integrator": "euler"}, True),
        ({"substeps": 20}, False),
        ({"integrator": "local_linearisation"}, False),
    ],
)
def test_steps_that_are_too_long_for_a_flow_are_named(options, warned, recwarn):
    """ẋ = −400x in steps of 0.1: |hλ| = 40 is beyond the limits 8 · 2.78 of divided RK4 steps and 2 of Euler's."""
    model = single_filter(lambda x, _: -400.0 * x, 1, 0.1, initial_mean=[0.0], **options)
    model.run(np.zeros((3, 1)))
    texts = [str(each.message) for each in recwarn if "changes too fast" in str(each.message)]
    assert len(texts) == warned
    assert not warned or "|λ|dt = 40" in texts[0]


@pytest.mark.parametrize(
    ("speed", "options", "warned"),
    [(1.0, {}, False), (100.0, {}, True), (100.0, {"initial_mean": [0.0, 0.0]}, False)],
)
def test_hidden_states_far_from_the_default_first_belief_are_named(speed, options, warned, recwarn):
    """A position that is seen every 0.1 and moves at a constant speed: elements at the defaults start at 0 ± 1."""
    flow, seen = pc.systems.linear([[0.0, 1.0], [0.0, 0.0]]), pc.systems.linear([[1.0, 0.0]])
    model = single_filter(flow, 2, 0.1, mapping=seen, channels=1, process_noise_sd=[0.1, 1e3], **options)
    mean = model.run(speed * 0.1 * np.arange(50.0)[:, None]).mean("x")[-1, 0]
    assert mean == pytest.approx([4.9 * speed, speed], rel=0.05)
    texts = [str(each.message) for each in recwarn if "believed to start at 0 ± 1" in str(each.message)]
    assert len(texts) == warned
    assert not warned or "element 1, which is not observed, is 1e+02" in texts[0]


def test_a_divergence_at_the_start_leads_to_the_first_belief():
    """A neuron in volts, scaled by 10⁻⁶: from sigma points at 1, the default, its cubic flow grows without bound."""

    def neuron(x, _):
        v, w = (1e6 * x).unbind(-1)
        return 1e-6 * torch.stack([v - v**3 / 3 - w + 0.5, 0.08 * (v + 0.7 - 0.8 * w)], -1)

    model = graphs.adaptive_filter(neuron, 2, 0.1, mapping=pc.systems.linear([[1.0, 0.0]]), channels=1)
    words = r"'x' start with a standard deviation of 1.*initial_mean and initial_sd"
    with pytest.raises(DivergenceError, match=words):
        model.run(1e-6 * np.sin(np.arange(30.0))[:, None])


@pytest.mark.parametrize("rate", [1.0, 15.0, 40.0, 90.0])
def test_steps_are_divided_where_a_flow_changes_fast(rate):
    """ẋ = −kx + ω in steps of 0.1: x(t) = e^(−kt) x(0), Var x(t) = e^(−2kt) P + q(1 − e^(−2kt))/2k."""
    rates = torch.tensor([[rate], [2.0]], dtype=torch.float64)

    def decay(x, theta):
        return -theta * x

    def follow(rates):
        options = {"parameter_mean": rates, "parameter_sd": 1e-6, "initial_mean": [1.0], "initial_sd": 0.5}
        session = single_filter(decay, 1, 0.1, process_noise_sd=0.3, **options).start()
        found = [(session.mean("x"), session.sd("x")) for _ in range(3) if session.step(None)]
        means, sds = (torch.stack(each).squeeze(-2).numpy() for each in zip(*found, strict=True))
        return means[..., 0], sds[..., 0]

    (means, sds), (mean, sd) = follow(rates), follow(rates[0])
    times = 0.1 * np.arange(3)
    np.testing.assert_allclose(mean, np.exp(-rate * times), atol=0.02)
    variance = 0.25 * np.exp(-2 * rate * times) + 0.09 * (1 - np.exp(-2 * rate * times)) / (2 * rate)
    np.testing.assert_allclose(sd, np.sqrt(variance), rtol=0.06)
    np.testing.assert_array_equal(means[:, 0], mean)  # whatever the other batch element needs
    np.testing.assert_array_equal(sds[:, 0], sd)


@pytest.mark.parametrize("noise_sd", [0.3, 1.0, 3.0])
def test_the_uncertainty_of_a_learned_noise_level_is_part_of_the_belief(noise_sd):
    """A random walk whose level is learned: E P(l) + Var m(l) over l, with exact filters of fixed l."""
    model = single_filter(
        lambda x, _: 0 * x,
        1,
        1.0,
        process_noise_sd=0.5,
        observation_noise_sd=noise_sd,
        initial_mean=[0.0],
        initial_sd=1.0,
    )
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    weights = weights / weights.sum()
    ratios = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        observed = rng.normal(size=20).cumsum() + noise_sd * rng.normal(size=20)
        session = model.start()
        for y in observed:
            session.step([y])
        level, sd = -float(session.mean("noise_x")[0]), float(session.sd("noise_x")[0])
        assert sd > 0.3
        walk, noise = np.exp(level + sd * nodes), np.exp(-float(session.mean("noise_y")[0]))
        mean, variance = np.zeros(41), np.ones(41) - walk
        for y in observed:
            variance = variance + walk
            gain = variance / (variance + noise)
            mean, variance = mean + gain * (y - mean), (1 - gain) * variance
        exact = weights @ variance + weights @ (mean - weights @ mean) ** 2
        ratios.append(float(session.sd("x").squeeze()) ** 2 / exact)
        ahead = session.forecast(3.0).sd("x")[:, 0] ** 2  # E e^l = e^(m + V/2) for the noise to come
        np.testing.assert_allclose(np.diff(ahead), np.exp(level + sd**2 / 2), rtol=1e-6)
    np.testing.assert_allclose(ratios, 1.0, atol=0.13)


@pytest.mark.parametrize(
    ("linearisation", "bend"), [("taylor", 0.0), ("cubature", 0.0), ("unscented", 1.0), ("second_order", 1.0)]
)
def test_an_update_through_a_square(linearisation, bend):
    """y = x² + w, x ~ N(m, P): E y = m² + P (m² by "taylor"), S = 4m²P + R + 2P² bend, K = 2mP/S."""
    m, p, r, y = 1.5, 0.49, 0.04, 3.0
    model = single_filter(
        lambda x, _: 0.0 * x,
        1,
        1.0,
        mapping=lambda x, _: x**2,
        process_noise_sd=1e-9,
        observation_noise_sd=r**0.5,
        noise_sd=1e-6,
        initial_mean=[m],
        initial_sd=p**0.5,
        linearisation=linearisation,
    )
    session = model.start().step([y])
    expected, spread = m**2 + (p if linearisation != "taylor" else 0.0), 4 * m**2 * p + r + 2 * p**2 * bend
    gain = 2 * m * p / spread
    assert float(session.mean("x").squeeze()) == pytest.approx(m + gain * (y - expected), rel=1e-6)
    assert float(session.sd("x").squeeze()) ** 2 == pytest.approx(p - gain**2 * spread, rel=1e-5)


@pytest.mark.parametrize(
    ("mapping", "value"),
    [
        (lambda x: x.log(), 12.0),
        (lambda x: x.abs().sqrt(), 30.0),
        (lambda x: x**2, 3.0),
        (lambda x: x.abs().clamp_min(1e-3).log(), 0.05),
        (lambda x: x.exp(), -2.0),
        (lambda x: x / (1 + x.abs()), 4.0),
    ],
)
def test_the_first_value_is_found_through_a_mapping_that_is_not_linear(mapping, value):
    """The state that is seen is the inverse of the mapping at the observation; the hidden one stays at 0."""
    seen = mapping(torch.tensor([value], dtype=torch.float64))
    flow = pc.systems.linear([[0.0, 0.0], [0.0, 0.0]])
    options = {"mapping": lambda x, _: mapping(x[..., :1]), "linearisation": "taylor", "initial_sd": 0.1}
    session = single_filter(flow, 2, 0.1, **options).start().step(seen)
    np.testing.assert_allclose(session.mean("x")[0], [value, 0.0], rtol=1e-3, atol=1e-6)
