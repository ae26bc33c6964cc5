"""Switching states against interacting multiple models (IMM) in numpy."""

import math

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import GraphError
from pcnet.graphs import adaptive_filter
from pcnet.nodes import (
    CategoricalNode,
    KalmanStateNode,
    ParameterNode,
    PrecisionNode,
    SensoryNode,
    SwitchingStateNode,
)
from pcnet.numerics.dwell_time import DwellTime
from pcnet.numerics.kernels import White
from support.kalman import STILL, transition

DT, RATES = 1.0, (0.0, 0.15, -0.15)
DIFFUSION = np.array([1e-4, 0.05, 1e-4, 0.05]) ** 2
SEES = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0]])
START = np.array([0.0, 1.0, 0.0, 0.0])
CHAIN = np.array([[0.95, 0.025, 0.025], [0.05, 0.95, 0.0], [0.05, 0.0, 0.95]])


def turn(x, v, theta):
    """A target (x, ẋ, y, ẏ) that turns at the rate v."""
    return torch.stack([x[..., 1], -v[..., 0] * x[..., 3], x[..., 3], v[..., 0] * x[..., 1]], -1)


def matrices(rate):
    flow = np.array([[0, 1, 0, 0], [0, 0, 0, -rate], [0, 0, 0, 1], [0, rate, 0, 0]])
    return transition(flow, DIFFUSION, DT)


def world(samples, seed=0):
    rng, mode, x, found = np.random.default_rng(seed), 0, START, []
    for k in range(samples):
        if k:
            mode = rng.choice(3, p=CHAIN[mode])
            f, q = matrices(RATES[mode])
            x = f @ x + np.linalg.cholesky(q) @ rng.standard_normal(4)
        found.append((x, SEES @ x + rng.standard_normal(2), mode))
    return [np.array(each) for each in zip(*found, strict=True)]


class Imm:
    """Means, covariances and stage probabilities of interacting multiple models with s stages for each mode."""

    def __init__(self, chain=CHAIN, sees=SEES, noise=(1.0, 1.0)):
        self.chain, self.sees, self.noise = chain, sees, np.asarray(noise)
        self.stages = len(chain) // 3
        self.mean, self.cov = [START] * 3, [np.eye(4)] * 3
        self.p, self.log_evidence, self.begun = np.full(len(chain), 1 / len(chain)), 0.0, False

    def predict(self):
        joint = self.p[:, None] * self.chain
        pairs = joint.reshape(3, self.stages, 3, self.stages).sum((1, 3))
        weight, mean, cov = pairs / pairs.sum(0), [], []
        for j in range(3):
            f, q = matrices(RATES[j])
            m = sum(weight[i, j] * self.mean[i] for i in range(3))
            p = sum(weight[i, j] * (self.cov[i] + np.outer(self.mean[i] - m, self.mean[i] - m)) for i in range(3))
            mean.append(f @ m)
            cov.append(f @ p @ f.T + q)
        self.mean, self.cov, self.p = mean, cov, joint.sum(0)

    def step(self, y):
        if self.begun:
            self.predict()
        self.begun, seen, fits = True, np.isfinite(y), np.zeros(3)
        g, r, y = self.sees[seen], np.diag(self.noise[seen]), y[seen]
        if len(y):
            for j in range(3):
                s, e = g @ self.cov[j] @ g.T + r, y - g @ self.mean[j]
                gain = self.cov[j] @ g.T @ np.linalg.inv(s)
                fits[j] = -0.5 * (e @ np.linalg.solve(s, e) + np.linalg.slogdet(2 * np.pi * s)[1])
                self.mean[j], self.cov[j] = self.mean[j] + gain @ e, self.cov[j] - gain @ s @ gain.T
        logs = np.log(self.p) + np.repeat(fits, self.stages)
        total = np.logaddexp.reduce(logs)
        self.log_evidence, self.p = self.log_evidence + total, np.exp(logs - total)
        return self.moments()

    @property
    def weight(self):
        return self.p.reshape(3, -1).sum(1)

    def moments(self):
        m = sum(w * mean for w, mean in zip(self.weight, self.mean, strict=True))
        parts = zip(self.weight, self.mean, self.cov, strict=True)
        return m, sum(w * (cov + np.outer(mean - m, mean - m)) for w, mean, cov in parts)


def graph_of(sensors=None, learn=False, rates=RATES, **chain):
    x = SwitchingStateNode("x", dim=4, flow=turn, initial_mean=START, linearisation="taylor", learn_noise=learn)
    graph = pc.Graph()
    for name, (g, variance) in (sensors or {"y": (SEES, 1.0)}).items():
        y = SensoryNode(name, dim=len(g), orders=1, dt=DT)
        graph.predicts(x, y, via=pc.systems.linear(g))
        graph.weighs(PrecisionNode(f"noise_{name}", mean=-math.log(variance), sd=1.0, kernel=White()), y)
    chain = chain or {"transition": CHAIN}
    graph.drives(CategoricalNode("mode", values=[[rate] for rate in rates], **chain), x)
    graph.weighs(PrecisionNode("noise_x", mean=-np.log(DIFFUSION), sd=1.0, kernel=White()), x)
    return graph


@pytest.mark.parametrize(
    ("kind", "engine", "learn"), [("chain", "eager", False), ("dwell", "compiled", True), ("gaps", "eager", True)]
)
def test_it_is_the_interacting_multiple_model_filter(kind, engine, learn):
    """Moments, probabilities and evidence; with the covariance as a whole and by source."""
    _, seen, _ = world(40)
    chain, dwell = CHAIN, DwellTime(mean=12.0, sd=6.0)
    if kind == "gaps":
        seen[5:9], seen[20:23, 0] = np.nan, np.nan
    if kind == "dwell":
        chain = dwell.transition(3).numpy()
    model = graph_of(learn=learn, **({"dwell": dwell} if kind == "dwell" else {}))
    wanted = ("mean", "covariance", "energy", "probability")
    result, oracle = model.run(seen, schedule=STILL, record=wanted, engine=engine), Imm(chain)
    for k, y in enumerate(seen):
        mean, covariance = oracle.step(y)
        np.testing.assert_allclose(result.mean("x")[k, 0], mean, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(result.covariance("x")[k], covariance, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(result.get("mode", "probability")[k], oracle.weight, rtol=1e-8, atol=1e-10)
    assert result.accuracy.sum() == pytest.approx(oracle.log_evidence, rel=1e-10)


def test_several_sensors_are_one_with_all_channels():
    _, seen, _ = world(25)
    sensors = {"east": (SEES[:1], 1.0), "north": (SEES[1:], 1.0)}
    result = graph_of(sensors).run(
        {"east": seen[:, :1], "north": seen[:, 1:]}, schedule=STILL, record=("mean", "energy")
    )
    oracle = Imm()
    for k, y in enumerate(seen):
        # modes are updated sensor by sensor, which for Gaussians is the same as at once
        np.testing.assert_allclose(result.mean("x")[k, 0], oracle.step(y)[0], rtol=1e-8, atol=1e-8)
    assert result.accuracy.sum() == pytest.approx(oracle.log_evidence, rel=1e-9)


def test_forecasts_are_those_of_the_mixture():
    _, seen, _ = world(30)
    session, oracle = pc.Model(graph_of(), STILL).start().run(seen), Imm()
    for y in seen:
        oracle.step(y)
    ahead = session.forecast(5 * DT)
    for k in range(5):
        oracle.predict()
        mean, covariance = oracle.moments()
        np.testing.assert_allclose(ahead.mean("x")[k].ravel(), mean, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(ahead.sd("x")[k].ravel(), np.sqrt(np.diag(covariance)), rtol=1e-8)
        expected = np.sqrt(np.diag(SEES @ covariance @ SEES.T) + 1)
        np.testing.assert_allclose(ahead.sd("y")[k].ravel(), expected, rtol=1e-8)


@pytest.mark.parametrize(
    "guess", [{}, pytest.param({"process_noise_sd": 1.0, "observation_noise_sd": 0.1}, marks=pytest.mark.slow)]
)
def test_told_nothing_of_the_noise_it_is_nearly_as_good_as_the_filter_that_is_told_everything(guess):
    states, seen, _ = world(300, seed=3)
    category = CategoricalNode("mode", values=[[rate] for rate in RATES], transition=CHAIN)
    model = adaptive_filter(
        turn, 4, DT, mapping=pc.systems.linear(SEES), initial_mean=START, switching=category, **guess
    )
    result, oracle = model.run(seen, record=("mean", "sd")), Imm()
    told = np.array([oracle.step(y)[0] for y in seen])
    ours, theirs = (((each - states) ** 2).mean(0) for each in (result.mean("x")[:, 0], told))
    assert (ours < 1.2**2 * theirs).all()
    inside = np.abs(result.mean("x")[:, 0] - states) < 1.96 * result.sd("x")[:, 0]
    assert 0.88 < inside.mean() < 0.99


def test_a_parameter_of_the_modes_is_learned():
    """A turn rate that is not known: v is −1, 0 or 1, and θ its size."""
    _, seen, _ = world(400, seed=1)

    def scaled(x, v, theta):
        return turn(x, v * theta, theta)

    x = SwitchingStateNode("x", dim=4, flow=scaled, initial_mean=START, learn_noise=False)
    y = SensoryNode("y", dim=2, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=pc.systems.linear(SEES))
    graph.drives(CategoricalNode("mode", values=[[0.0], [1.0], [-1.0]], transition=CHAIN), x)
    graph.parametrises(ParameterNode("rate", mean=[0.3], sd=0.15), x)
    graph.weighs(PrecisionNode("noise_x", mean=-np.log(DIFFUSION), sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=0.0, sd=1.0, kernel=White()), y)
    result = graph.run(seen, schedule=pc.adaptive_filtering(), record=("mean", "sd"))
    off = abs(result.mean("rate")[-1, 0] - 0.15)
    assert off < 0.02
    assert off < 3 * result.sd("rate")[-1, 0] < 0.05


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_draws_of_the_future_switch(engine):
    """Modes last as the chain says, and the state spreads as its diffusion does; closed forms."""
    stay = 0.9
    chain = np.array([[stay, 1 - stay], [0.0, 1.0]])
    x = SwitchingStateNode("x", dim=1, flow=lambda x, v, theta: v + 0.0 * x, initial_mean=[0.0], learn_noise=False)
    graph, y = pc.Graph(), SensoryNode("y", dim=1, orders=1, dt=DT)
    graph.predicts(x, y, via=lambda x, v, theta: x + 100.0 * v)
    graph.drives(CategoricalNode("mode", values=[[0.0], [1.0]], transition=chain, first=[1.0, 0.0]), x)
    graph.weighs(PrecisionNode("noise_x", mean=-2 * math.log(0.1), sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=0.0, sd=1.0, kernel=White()), y)
    session = pc.Model(graph, STILL).start(engine=engine).run(np.zeros((3, 1)))
    drawn = session.sample(12 * DT, 4000, seed=0).values
    moved = drawn["y"][..., 0] > 50.0  # of paths (draws, time), those in the second mode
    assert (np.diff(moved.astype(int), axis=1) >= 0).all()
    left = float(session.read("mode", "probability")[0]) * stay ** np.arange(1, 13)
    np.testing.assert_allclose(1 - moved.mean(0), left, atol=0.025)
    since = np.where(moved.any(1), 12 - moved.sum(1), 12)[:, None]
    rest = (drawn["x"][..., 0] - np.maximum(np.arange(12) - since + 1, 0.0))[since[:, 0] > 0]  # without its drift
    first = float(session.read("x", "sd")) ** 2
    np.testing.assert_allclose(rest.var(0), first + 0.01 * np.arange(1, 13), rtol=0.1)
    forecast = session.forecast(12 * DT)
    np.testing.assert_allclose(drawn["x"].mean(0), forecast.mean("x"), atol=0.15)
    np.testing.assert_allclose(drawn["x"].std(0), forecast.sd("x"), rtol=0.06)


def test_what_makes_no_sense_says_what_to_take():
    category = CategoricalNode("mode", values=[[0.0], [1.0]], stay=0.9)
    graph, x = pc.Graph(), SwitchingStateNode("x", dim=4, flow=turn)
    with pytest.raises(GraphError, match="use a KalmanStateNode, with categories that predict its parameters"):
        graph.predicts(x, ParameterNode("theta", mean=[0.0] * 4, sd=1.0))
    with pytest.raises(GraphError, match="categories drive a SwitchingStateNode"):
        graph.drives(category, KalmanStateNode("k", dim=4, flow=turn))
    graph.predicts(x, SensoryNode("y", dim=4, orders=1, dt=DT))
    graph.weighs(PrecisionNode("noise_y", mean=0.0, sd=1.0, kernel=White()), graph["y"])
    graph.weighs(PrecisionNode("noise_x", mean=0.0, sd=1.0, kernel=White()), x)
    with pytest.raises(GraphError, match=r"graph.drives\(CategoricalNode\(...\), x\)"):
        graph.run(np.zeros((3, 4)), schedule=STILL)
