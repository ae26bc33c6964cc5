"""Hidden causes and levels in one joint belief, against the Kalman filter of all levels together."""

import math

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import GraphError, SettingError
from pcnet.nodes import (
    GeneralisedStateNode,
    InputNode,
    KalmanCauseNode,
    KalmanStateNode,
    ParameterNode,
    PrecisionNode,
    SensoryNode,
)
from pcnet.numerics.kernels import White
from support.kalman import DT, STILL, Kalman, transition

LOW, MIDDLE = np.array([[-0.4, 1.0], [-1.2, -0.1]]), np.array([[-0.2, 0.7], [-0.7, -0.2]])
PUSH, LIFT = np.array([[0.0, 0.0], [1.0, 0.3]]), np.array([[0.5], [-0.2]])
TOP, NOISE, SEES = -0.1, 0.3, np.array([[1.0, 0.0], [0.5, -0.3]])
VARIANCES = {"x": 0.2, "v": 0.5, "w": 0.4}
FIRST = {"x": [0.3, -0.2], "v": [0.1, 0.0], "w": [0.5]}


def precision(name, variance, **options):
    return PrecisionNode(f"noise_{name}", mean=-math.log(variance), sd=1.0, kernel=White(), **options)


def stack(levels=3, learn=False):
    """A state x, driven by v, driven by w."""
    x = KalmanStateNode(
        "x", dim=2, flow=pc.systems.linear(LOW, causes=PUSH), initial_mean=FIRST["x"], learn_noise=learn
    )
    flow = pc.systems.linear(MIDDLE, causes=LIFT) if levels == 3 else pc.systems.linear(MIDDLE)
    v = KalmanCauseNode("v", dim=2, flow=flow, initial_mean=FIRST["v"], initial_sd=0.5, learn_noise=learn)
    y, graph = SensoryNode("y", dim=2, orders=1, dt=DT), pc.Graph()
    graph.predicts(x, y, via=pc.systems.linear(SEES))
    graph.weighs(precision("y", NOISE), y)
    graph.drives(v, x)
    for node in (x, v):
        graph.weighs(precision(node.name, VARIANCES[node.name], channels="shared"), node)
    if levels == 3:
        w = KalmanCauseNode(
            "w", dim=1, correlation_time=-1 / TOP, initial_mean=FIRST["w"], initial_sd=0.7, learn_noise=learn
        )
        graph.drives(w, v)
        graph.weighs(precision("w", VARIANCES["w"]), w)
    return graph


def textbook(levels=3):
    """The filter of all levels, whose flow is block triangular."""
    flow = np.zeros((5, 5))
    flow[:2, :2], flow[:2, 2:4], flow[2:4, 2:4], flow[2:4, 4:], flow[4, 4] = LOW, PUSH, MIDDLE, LIFT, TOP
    density = np.array([VARIANCES[name] for name in "xxvvw"])
    first, sds = np.concatenate(list(FIRST.values())), np.array([1.0, 1.0, 0.5, 0.5, 0.7])
    n = 5 if levels == 3 else 4
    f, q = transition(flow[:n, :n], density[:n], DT)
    sees = np.concatenate([SEES, np.zeros((2, n - 2))], 1)
    return Kalman(f, q, sees, NOISE * np.eye(2), first[:n], np.diag(sds[:n] ** 2))


OBSERVATIONS = np.random.default_rng(3).standard_normal((30, 2))
PLACES = {"x": slice(0, 2), "v": slice(2, 4), "w": slice(4, 5)}


@pytest.mark.parametrize(
    ("levels", "engine", "learn"),
    [(2, "eager", False), (2, "compiled", True), (3, "compiled", False), (3, "eager", True)],
)
def test_a_linear_stack_is_the_joint_kalman_filter(levels, engine, learn):
    seen = OBSERVATIONS.copy()
    seen[4:6], seen[9, 0] = np.nan, np.nan
    wanted = ("mean", "covariance", "energy")
    result = stack(levels, learn).run(seen, schedule=STILL, record=wanted, engine=engine)
    oracle = textbook(levels)
    for k, y in enumerate(seen):
        oracle.step(y)
        for name in "xvw"[:levels]:
            place = PLACES[name]
            np.testing.assert_allclose(result.mean(name)[k, 0], oracle.mean[place], rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(result.covariance(name)[k], oracle.covariance[place, place], rtol=1e-8)
    assert result.accuracy.sum() == pytest.approx(oracle.log_evidence, rel=1e-10)


def test_forecasts_include_causes():
    session = pc.Model(stack(), STILL).start().run(OBSERVATIONS)
    oracle = textbook()
    for y in OBSERVATIONS:
        oracle.step(y)
    ahead = session.forecast(4 * DT)
    for k in range(4):
        oracle.predict()
        for name, place in PLACES.items():
            np.testing.assert_allclose(ahead.mean(name)[k].ravel(), oracle.mean[place], rtol=1e-8, atol=1e-10)
            sd = np.sqrt(np.diag(oracle.covariance)[place])
            np.testing.assert_allclose(ahead.sd(name)[k].ravel(), sd, rtol=1e-8)


def test_causes_are_smoothed_with_the_state():
    result = stack().run(OBSERVATIONS, schedule=STILL, record=("mean",), smooth=True)
    oracle, rows = textbook(), []
    for y in OBSERVATIONS:
        oracle.step(y)
        rows.append((oracle.mean, oracle.covariance))
    mean, covariance = rows[-1]
    for k in range(len(rows) - 2, -1, -1):  # Rauch, Tung and Striebel
        m, p = rows[k]
        ahead = oracle.f @ p @ oracle.f.T + oracle.q
        gain = p @ oracle.f.T @ np.linalg.inv(ahead)
        mean, covariance = m + gain @ (mean - oracle.f @ m), p + gain @ (covariance - ahead) @ gain.T
        for name, place in PLACES.items():
            np.testing.assert_allclose(result.smoothed(name).mean[k].ravel(), mean[place], rtol=1e-7, atol=1e-8)
            sd = np.sqrt(np.diag(covariance)[place])
            np.testing.assert_allclose(result.smoothed(name).sd[k].ravel(), sd, rtol=1e-7)


@pytest.mark.usefixtures("as_users_run")
def test_noise_levels_of_causes_are_learned():
    """A cause far noisier than guessed: its level approaches that of the process."""
    rng, flow = np.random.default_rng(0), np.array([[-0.5, 1.0], [0.0, -0.3]])
    f, q = transition(flow, np.array([1e-4, 1.0]), DT)
    x, seen, states = np.zeros(2), [], []
    for _ in range(1500):
        x = f @ x + np.linalg.cholesky(q) @ rng.standard_normal(2)
        seen.append(x[:1] + 0.05 * rng.standard_normal(1))
        states.append(x)
    state = KalmanStateNode("x", dim=1, flow=lambda x, v, theta: v - theta * x, initial_mean=[0.0])
    v, y, graph = (
        KalmanCauseNode("v", dim=1, correlation_time=1 / 0.3),
        SensoryNode("y", dim=1, orders=1, dt=DT),
        pc.Graph(),
    )
    graph.predicts(state, y)
    graph.drives(v, state)
    graph.parametrises(ParameterNode("rate", mean=[0.8], sd=0.5), state)
    for name, node, variance in (("x", state, 1e-4), ("v", v, 0.05), ("y", y, 0.01)):
        graph.weighs(precision(name, variance), node)
    result = graph.run(np.array(seen), schedule=pc.adaptive_filtering(), record=("mean", "sd"))
    assert -result.mean("noise_v")[-1, 0] == pytest.approx(0.0, abs=0.4)
    assert -result.mean("noise_y")[-1, 0] == pytest.approx(2 * math.log(0.05), abs=0.4)
    half, true = slice(750, None), np.array(states)
    inside = np.abs(result.mean("v")[half, 0, 0] - true[half, 1]) < 1.96 * result.sd("v")[half, 0, 0]
    assert 0.88 < inside.mean() < 0.99
    assert np.abs(result.mean("v")[half, 0, 0] - true[half, 1]).mean() < 0.5 * np.abs(true[half, 1]).mean()


def test_inputs_and_mappings_of_causes():
    """x' = v + u − x, v' = u, y = (x, v): as one state that is driven by u."""
    rng = np.random.default_rng(4)
    u, seen = rng.standard_normal((20, 1)), rng.standard_normal((20, 2))

    def finish(graph, x, more):
        y = SensoryNode("y", dim=2, orders=1, dt=DT)
        graph.predicts(x, y, via=more)
        graph.weighs(precision("y", NOISE), y)
        return graph.run({"y": seen, "u": u}, schedule=STILL, record=("mean", "energy"))

    whole = KalmanStateNode(
        "x", dim=2, flow=pc.systems.linear([[-1.0, 1.0], [0.0, 0.0]], causes=[[1.0], [1.0]]), initial_mean=[0.0, 0.0]
    )
    one = pc.Graph()
    one.drives(InputNode("u", dim=1), whole)
    one.weighs(precision("x", 0.3), whole)
    expected = finish(one, whole, None)
    x = KalmanStateNode("x", dim=1, flow=lambda x, c, theta: c.sum(-1, keepdim=True) - x, initial_mean=[0.0])
    v, two = KalmanCauseNode("v", dim=1, flow=lambda v, u, theta: u), pc.Graph()
    given = InputNode("u", dim=1)
    for parent, child in ((v, x), (given, x), (given, v)):
        two.drives(parent, child)
    two.weighs(precision("x", 0.3), x)
    two.weighs(precision("v", 0.3), v)
    found = finish(two, x, lambda x, c, theta: torch.cat([x, c[..., :1]], -1))
    np.testing.assert_allclose(found.mean("x")[:, 0, 0], expected.mean("x")[:, 0, 0], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.mean("v")[:, 0, 0], expected.mean("x")[:, 0, 1], rtol=1e-6, atol=1e-7)
    assert found.accuracy.sum() == pytest.approx(expected.accuracy.sum(), rel=1e-7)


def test_what_makes_no_sense_says_what_to_take():
    v = KalmanCauseNode("v", dim=1, correlation_time=1.0)
    with pytest.raises(SettingError, match="give either flow or correlation_time"):
        KalmanCauseNode("v", dim=1)
    state = GeneralisedStateNode("x", dim=1, orders=2, flow=lambda x, v, theta: v - x)
    with pytest.raises(GraphError, match="a CauseNode"):
        pc.Graph().drives(v, state)
    graph = pc.Graph()
    with pytest.raises(GraphError, match="an InputNode or a KalmanCauseNode"):
        graph.drives(
            KalmanStateNode("z", dim=1, flow=lambda x, theta: -x), KalmanStateNode("x", dim=1, flow=state.flow)
        )
