"""Known inputs and functions of time of Kalman states, against the Kalman filter with inputs and brute force."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm

import pcnet as pc
from pcnet.errors import GraphError, ObservationError, SettingError
from pcnet.functions.closed_form import Linear
from pcnet.graphs import Input, adaptive_filter
from pcnet.nodes import CauseNode, GeneralisedStateNode, InputNode, KalmanStateNode, PrecisionNode, SensoryNode
from pcnet.numerics.kernels import White
from support.kalman import STILL

A, B = np.array([[-0.4, 1.0], [-1.2, -0.1]]), np.array([[0.3], [1.0]])
C, D = np.array([[1.0, 0.2]]), np.array([[0.7]])
DT, Q, R, FIRST = 0.1, 0.5, 0.2, np.array([0.3, -0.2])
T = 24
Y, U = np.random.default_rng(0).standard_normal((2, T, 1))


def closed_form(traced: bool):
    """Flow and mapping of state and input."""
    if not traced:
        return Linear(A, causes=B), Linear(C, causes=D)
    a, b, c, d = (torch.tensor(each) for each in (A, B, C, D))
    return (lambda x, u, theta: x @ a.T + u @ b.T), (lambda x, u, theta: x @ c.T + u @ d.T)


def build(interpolation="hold", sd=None, traced=False, flow=None, mapping=None, **options) -> pc.Graph:
    known_flow, known_mapping = closed_form(traced)
    options = {"integrator": "local_linearisation", "initial_mean": FIRST, "initial_sd": 0.9} | options
    x = KalmanStateNode("x", dim=2, flow=flow or known_flow, **options)
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=mapping or known_mapping)
    graph.drives(InputNode("u", dim=1, interpolation=interpolation, sd=sd), x)
    graph.weighs(PrecisionNode("noise_x", mean=-math.log(Q), sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=-math.log(R), sd=1.0, kernel=White()), y)
    return graph


def transition(dt: float):
    """F, the effect of an input and of its slope, and the covariance of the diffusion, by matrix exponentials."""
    joint = np.zeros((4, 4))
    joint[:2, :2], joint[:2, 2:3], joint[2, 3] = A, B, 1.0
    whole = expm(joint * dt)
    van_loan = np.block([[-A, Q * np.eye(2)], [np.zeros((2, 2)), A.T]])
    return whole[:2, :2], whole[:2, 2:3], whole[:2, 3:4], whole[:2, :2] @ expm(van_loan * dt)[:2, 2:]


def kalman_filter(y, u, times, interpolation="hold", sd=0.0):
    """Means and variances (T, 2) of the Kalman filter of the state and the deviation of the input."""
    m, p = np.array([*FIRST, 0.0]), np.diag([0.81, 0.81, sd**2])
    h, means, variances = np.hstack([C, D]), [], []
    for k in range(len(y)):
        if k:
            dt = times[k] - times[k - 1]
            f, by_value, by_slope, noise = transition(dt)
            slope = (u[k] - u[k - 1]) / dt if interpolation == "linear" else np.zeros(1)
            j = np.hstack([f, by_value])
            m = np.array([*(f @ m[:2] + by_value @ (u[k - 1] + m[2:]) + by_slope @ slope), 0.0])
            p = np.block([[j @ p @ j.T + noise, np.zeros((2, 1))], [np.zeros((1, 2)), np.full((1, 1), sd**2)]])
        if np.isfinite(y[k, 0]):
            s = h @ p @ h.T + R
            gain = p @ h.T / s
            m, p = m + gain @ (y[k] - C @ m[:2] - D @ (u[k] + m[2:])), p - gain @ s @ gain.T
        means.append(m[:2])
        variances.append(np.diag(p)[:2])
    return np.array(means), np.array(variances)


CASES = [
    (interpolation, sd, linearisation, traced, "eager")
    for interpolation in ("hold", "linear")
    for sd in (None, 0.5)
    for linearisation, traced in (("taylor", False), ("taylor", True), ("unscented", True))
]
COMPILED = [("hold", 0.5, "unscented", True, "compiled"), ("linear", None, "taylor", False, "compiled")]


@pytest.mark.parametrize(("interpolation", "sd", "linearisation", "traced", "engine"), CASES + COMPILED)
def test_equals_the_kalman_filter_with_inputs(interpolation, sd, linearisation, traced, engine):
    """Inputs of flow and mapping, known exactly or up to a deviation, with missing data and irregular times."""
    times = np.cumsum([0.0, *np.random.default_rng(1).choice([DT, 0.5 * DT, 1.4 * DT], T - 1)])
    y = Y.copy()
    y[5:8] = np.nan
    graph = build(interpolation, sd, traced, linearisation=linearisation)
    result = pc.Model(graph, STILL).run({"y": y, "u": U}, times=times, engine=engine)
    means, variances = kalman_filter(y, U, times, interpolation, sd or 0.0)
    np.testing.assert_allclose(result.mean("x")[:, 0], means, atol=1e-10)
    np.testing.assert_allclose(result.sd("x")[:, 0] ** 2, variances, atol=1e-10)


def test_missing_inputs_keep_their_last_value():
    u = U.copy()
    u[4:9] = np.nan
    held = np.where(np.isnan(u), U[3], u)
    result = pc.Model(build(), STILL).run({"y": Y, "u": u})
    np.testing.assert_allclose(result.mean("x")[:, 0], kalman_filter(Y, held, DT * np.arange(T))[0], atol=1e-10)


def test_inputs_may_come_before_the_first_observation():
    """Inputs alone move a state that is given; one that is found from the first observation starts with that."""
    y, u = Y.copy(), U.copy()
    y[0], u[1] = np.nan, np.nan
    held = np.concatenate([U[:1], U[:1], U[2:]])
    result = pc.Model(build(), STILL).run({"y": y, "u": u})
    np.testing.assert_allclose(result.mean("x")[:, 0], kalman_filter(y, held, DT * np.arange(T))[0], atol=1e-10)
    model = pc.Model(build(initial_mean=None), STILL)
    late = model.run({"y": y, "u": u}).mean("x")[1:]
    np.testing.assert_allclose(late, model.run({"y": y[1:], "u": held[1:]}).mean("x"), atol=1e-12)
    with pytest.raises(ObservationError, match="no value yet"):
        model.run({"y": Y})


@pytest.mark.parametrize(
    ("linearisation", "origin", "engine"),
    [("taylor", 0.0, "eager"), ("unscented", 5.0, "eager"), ("unscented", 5.0, "compiled")],
)
def test_a_function_of_time_is_one_of_an_input_that_is_the_time(linearisation, origin, engine):
    """f(x, u, θ, t) with the times that are given: the same as the Kalman filter with input t, a straight line."""
    a, b, c, d = (torch.tensor(each) for each in (A, B, C, D))
    x = KalmanStateNode(
        "x",
        dim=2,
        flow=lambda x, u, theta, t: x @ a.T + t[..., None] @ b.T,
        integrator="local_linearisation",
        initial_mean=FIRST,
        initial_sd=0.9,
        linearisation=linearisation,
    )
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=lambda x, u, theta, t: x @ c.T + t[..., None] @ d.T)
    graph.weighs(PrecisionNode("noise_x", mean=-math.log(Q), sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=-math.log(R), sd=1.0, kernel=White()), y)
    times = origin + DT * np.arange(T)
    result = pc.Model(graph, STILL).run(Y, times=times if origin else None, engine=engine)
    means, variances = kalman_filter(Y, times[:, None], times, "linear")
    np.testing.assert_allclose(result.mean("x")[:, 0], means, atol=1e-9)
    np.testing.assert_allclose(result.sd("x")[:, 0] ** 2, variances, atol=1e-9)


def test_forecasts_hold_inputs_and_follow_the_time():
    """The forecast of a Kalman state: the filter without further observations, with the last input."""
    session = pc.Model(build(sd=0.5), STILL).start().run({"y": Y, "u": U})
    future = session.forecast(5 * DT)
    y, u = np.concatenate([Y, np.full((5, 1), np.nan)]), np.concatenate([U, np.repeat(U[-1:], 5, 0)])
    means, variances = kalman_filter(y, u, DT * np.arange(T + 5), sd=0.5)
    np.testing.assert_allclose(future.mean("x"), means[T:], atol=1e-10)
    np.testing.assert_allclose(future.sd("x") ** 2, variances[T:], atol=1e-10)
    drawn = session.sample(5 * DT, 4000, seed=0).values["x"]
    # the first interval of a draw has a new deviation of the input, and not the one that is partly known already
    np.testing.assert_allclose(drawn.mean(0), means[T:], atol=0.12)
    np.testing.assert_allclose(drawn.var(0), variances[T:], rtol=0.12)


@pytest.mark.parametrize("interpolation", ["hold", "linear"])
def test_forecasts_take_inputs_that_are_known_ahead(interpolation):
    """The Kalman filter without further observations; also in steps of two intervals, in draws, and in innovations."""
    session = pc.Model(build(interpolation), STILL).start().run({"y": Y[:20], "u": U[:20]})
    y = Y.copy()
    y[20:] = np.nan
    times = DT * np.arange(T)
    means, variances = kalman_filter(y, U, times, interpolation)
    future = session.forecast(4 * DT, inputs={"u": U[20:24]})
    np.testing.assert_allclose(future.mean("x"), means[20:], atol=1e-10)
    np.testing.assert_allclose(future.sd("x") ** 2, variances[20:], atol=1e-10)
    expected = means[20:] @ C.T + U[20:] @ D.T
    np.testing.assert_allclose(future.mean("y"), expected, atol=1e-10)
    drawn = session.sample(4 * DT, 3000, seed=2, inputs={"u": U[20:24]}).values
    np.testing.assert_allclose(drawn["x"].mean(0), means[20:], atol=0.06)
    np.testing.assert_allclose(drawn["y"].mean(0), expected, atol=0.1)
    innovation = session.innovation({"y": Y[20], "u": U[20]})["y"]
    np.testing.assert_allclose(innovation.error, Y[20] - expected[0], atol=1e-10)
    every_other = U[[21, 23]]
    coarse = U.copy()
    coarse[20] = U[19] if interpolation == "hold" else 0.5 * (U[19] + U[21])
    coarse[22] = U[21] if interpolation == "hold" else 0.5 * (U[21] + U[23])
    means, _ = kalman_filter(y, coarse, times, interpolation)
    found = session.forecast(4 * DT, 2 * DT, inputs={"u": every_other}).mean("x")
    np.testing.assert_allclose(found, means[[21, 23]], atol=1e-10)
    with pytest.raises(SettingError, match="has 3 rows"):
        session.forecast(4 * DT, inputs={"u": U[:3]})
    with pytest.raises(SettingError, match="'y' is not an input; inputs: u"):
        session.forecast(4 * DT, inputs={"y": U[:4]})


def test_sessions_that_smooth_and_others_share_a_model_and_its_draws():
    """Compiled draws of both are those of their own state."""
    model = pc.Model(build(), STILL)
    plain, smoothing = (model.start(**kind).run({"y": Y, "u": U}) for kind in ({}, {"smooth": 3}))
    one, other = (each.sample(300 * DT, 2, seed=0).values["x"] for each in (plain, smoothing))
    np.testing.assert_allclose(one, other, atol=1e-9)


def test_rk4_takes_inputs_within_a_step():
    """A nonlinear flow driven by a straight line, against a solver with small steps."""

    def flow(x, u, theta):
        return torch.stack([x[..., 1], -torch.sin(x[..., 0]) + u[..., 0]], -1)

    graph = build(
        "linear", flow=flow, mapping=Linear([[1.0, 0.0]]), integrator="rk4", initial_sd=1e-9, process_noise="held"
    )
    graph = graph.with_nodes({**graph.nodes, "noise_x": PrecisionNode("noise_x", mean=40.0, sd=1.0, kernel=White())})
    u = np.array([[0.0], [2.0]])
    mean = pc.Model(graph, STILL).run({"y": np.array([[0.3], [np.nan]]), "u": u}).mean("x")[1, 0]
    x, n = FIRST.copy(), 20000
    for i in range(n):  # the midpoint rule
        h, at = DT / n, lambda z, s: np.array([z[1], -np.sin(z[0]) + 2.0 * s])
        x = x + h * at(x + 0.5 * h * at(x, i / n), (i + 0.5) / n)
    np.testing.assert_allclose(mean, x, atol=4e-6)  # of its fifth order in the step


def test_batches_checkpoints_and_files(tmp_path):
    """A batch of input uncertainties is the separate runs; a saved session and a saved model continue them."""
    sds = torch.tensor([[0.1], [0.5]], dtype=torch.float64)
    both = pc.Model(build(sd=sds), STILL).run({"y": Y, "u": U})
    for i, sd in enumerate((0.1, 0.5)):
        alone = pc.Model(build(sd=sd), STILL).run({"y": Y, "u": U})
        np.testing.assert_allclose(both.mean("x")[i], alone.mean("x"), atol=1e-12)
    model = pc.Model(build("linear", sd=0.5), STILL)
    session = model.start().run({"y": Y[:10], "u": U[:10]})
    session.save(tmp_path / "run.safetensors")
    model.save(tmp_path / "model.yaml")
    again = pc.resume(tmp_path / "run.safetensors", pc.Model.load(tmp_path / "model.yaml"))
    again.run({"y": Y[10:], "u": U[10:]})
    means = kalman_filter(Y, U, DT * np.arange(T), "linear", 0.5)[0]
    np.testing.assert_allclose(again.mean("x")[0], means[-1], atol=1e-10)


def test_the_adaptive_filter_learns_the_effect_of_an_input():
    """A step response: gain and time constant of a first-order system, told nothing of the noise."""
    rng, n, dt = np.random.default_rng(3), 400, 0.1
    u = np.repeat(rng.standard_normal((n // 20, 1)), 20, 0)
    x = np.zeros((n, 1))
    for k in range(1, n):
        decay = math.exp(-0.8 * dt)
        x[k] = decay * x[k - 1] + 1.5 / 0.8 * (1 - decay) * u[k - 1] + 0.02 * rng.standard_normal(1)
    y = x + 0.05 * rng.standard_normal(x.shape)

    def flow(x, u, theta):
        return -theta[..., :1] * x + theta[..., 1:] * u

    model = adaptive_filter(flow, 1, dt, inputs={"u": 1}, parameter_mean=[0.3, 0.5], parameter_sd=1.0)
    result = model.run({"y": y, "u": u})
    error = result.mean("theta")[-1] - [0.8, 1.5]
    assert np.all(np.abs(error) < 4 * result.sd("theta")[-1])
    assert np.all(np.abs(error) < 0.15)
    assert ((result.mean("x")[50:, 0] - x[50:]) ** 2).mean() < 0.7 * 0.05**2


def test_errors_say_what_to_do_instead():
    u, y = InputNode("u", dim=1), SensoryNode("y", dim=1, orders=1, dt=DT)
    laplace = GeneralisedStateNode("x", dim=1, orders=2, flow=lambda x, v, theta: -x + v)
    with pytest.raises(GraphError, match="put a cause between them"):
        pc.Graph().drives(u, laplace)
    with pytest.raises(GraphError, match="drive it by an InputNode"):
        pc.Graph().drives(CauseNode("v", dim=1, orders=1), KalmanStateNode("x", dim=1, flow=lambda x, v, theta: -x + v))
    with pytest.raises(GraphError, match="use orders=1"):
        pc.Graph().drives(
            InputNode("u", dim=1, orders=2, dt=0.1), KalmanStateNode("x", dim=1, flow=lambda x, v, theta: -x + v)
        )
    with pytest.raises(GraphError, match="for inputs that drive a Kalman state"):
        pc.Graph().predicts(InputNode("u", dim=1, sd=0.1), CauseNode("v", dim=1, orders=1))
    graph = pc.Graph()
    x = GeneralisedStateNode("x", dim=1, orders=2, flow=lambda x, u, theta, t: -x + t[..., None])
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("noise_x", prior_precision=1.0, sd=1.0, correlation_time=1.0), x)
    graph.weighs(PrecisionNode("noise_y", prior_precision=1.0, sd=1.0, correlation_time=1.0), y)
    with pytest.raises(GraphError, match="is a function of time"):
        graph.check()
    with pytest.raises(SettingError, match="an input has no outliers"):
        InputNode("u", dim=1, outliers=0.1)
    with pytest.raises(SettingError, match="name of another node"):
        adaptive_filter(lambda x, u, theta: -x + u, 1, 0.1, inputs={"theta": Input()})
