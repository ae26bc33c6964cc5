"""Sensory nodes with a likelihood of one's own, against a filter on a grid and against the Gaussian sensory node."""

import math

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import GraphError, SettingError
from pcnet.nodes import GeneralisedStateNode, KalmanStateNode, LikelihoodNode, PrecisionNode, SensoryNode
from pcnet.numerics.kernels import White
from pcnet.settings import settings


@settings
class CountNode(LikelihoodNode):
    """Counts whose log-rate is predicted."""

    def log_likelihood(self, y, prediction, log_precision):
        return y * prediction - prediction.exp() - torch.lgamma(y + 1)


@settings
class NormalNode(LikelihoodNode):
    """The Gaussian likelihood, written out."""

    def log_likelihood(self, y, prediction, log_precision):
        squares = (y - prediction) ** 2 * log_precision.exp()
        return 0.5 * (log_precision - squares - math.log(2 * math.pi))


def walk(samples=150, seed=0):
    rng = np.random.default_rng(seed)
    log_rate = 1.5 + np.cumsum(0.1 * rng.normal(size=samples))
    return log_rate, rng.poisson(np.exp(log_rate)).astype(float)


def kalman_graph(sensor, weighed=False, **options):
    x = KalmanStateNode("x", dim=1, flow=lambda x, theta: 0 * x, learn_noise=False, **options)
    graph = pc.Graph()
    graph.predicts(x, sensor)
    graph.weighs(PrecisionNode("noise_x", prior_precision=100.0, sd=1e-6, kernel=White()), x)
    if weighed:
        graph.weighs(PrecisionNode("noise_y", prior_precision=4.0, sd=0.5, kernel=White()), sensor)
    return graph


def grid_filter(counts, mean, sd, step_sd):
    """Posterior means and the log-evidence of a random walk of the log-rate, by quadrature on a grid."""
    grid = np.linspace(-3, 6, 3001)
    p = np.exp(-0.5 * ((grid - mean) / sd) ** 2)
    p /= p.sum()
    kernel = np.exp(-0.5 * ((grid[:, None] - grid) / step_sd) ** 2)
    kernel /= kernel.sum(0)
    means, sds, evidence = [], [], 0.0
    for y in counts:
        p = kernel @ p
        joint = p * (1.0 if np.isnan(y) else np.exp(y * grid - np.exp(grid) - math.lgamma(y + 1)))
        evidence += math.log(joint.sum())
        p = joint / joint.sum()
        means.append((p * grid).sum())
        sds.append(math.sqrt((p * (grid - means[-1]) ** 2).sum()))
    return np.array(means), np.array(sds), evidence


def test_counts_below_a_kalman_state_are_filtered_as_on_a_grid():
    log_rate, counts = walk()
    counts[[20, 21, 22]] = np.nan
    graph = kalman_graph(CountNode("y", dim=1, orders=1, dt=1.0), initial_mean=[1.5], initial_sd=0.5)
    result = graph.run(counts, pc.states_only())
    means, sds, evidence = grid_filter(counts, 1.5, 0.5, 0.1)
    found, sd = result.mean("x")[:, 0, 0], result.sd("x")[:, 0, 0]
    assert (np.abs(found - means) < 0.35 * sds).all()  # mode and mean of a skewed posterior differ
    np.testing.assert_allclose(sd, sds, rtol=0.1)
    assert result.free_action == pytest.approx(-evidence, rel=3e-3)
    assert (np.abs(found - log_rate) < 2 * sd).mean() > 0.85


def test_a_gaussian_likelihood_is_the_gaussian_node():
    """Below a Kalman state the Laplace update of a Gaussian likelihood is the Kalman update, and so is its evidence."""
    y = walk()[0]
    y[7] = np.nan
    results = [
        kalman_graph(kind("y", dim=1, orders=1, dt=1.0), weighed=True).run(y, pc.states_only())
        for kind in (NormalNode, SensoryNode)
    ]
    for quantity in ("mean", "sd"):
        ours, theirs = (result.get("x", quantity) for result in results)
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    assert results[0].free_action == pytest.approx(results[1].free_action, rel=1e-12)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_the_error_flow_of_a_gaussian_likelihood_is_that_of_the_gaussian_node(engine, tmp_path):
    """Its error is y − p, and its surprise |y − p| in standard deviations of the prediction."""
    y = walk()[0]
    y[7] = np.nan
    flows = []
    for kind in (NormalNode, SensoryNode):
        model = pc.Model(kalman_graph(kind("y", dim=1, orders=1, dt=1.0), weighed=True), pc.states_only())
        result = model.run(y, record=pc.Record.flow(), engine=engine)
        flows.append(result.error_flow())
        flows[-1].save(tmp_path / f"{kind.__name__}.html")
    for node in ("y", "x"):
        np.testing.assert_allclose(flows[0].surprise(node), flows[1].surprise(node), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(*(flow.result.get("y", "error") for flow in flows), rtol=1e-9, atol=1e-12)


@settings
class CauchyNode(LikelihoodNode):
    """Heavy tails: the log-likelihood is not concave far from the prediction."""

    def log_likelihood(self, y, prediction, log_precision):
        return -(1 + (y - prediction) ** 2).log() - math.log(math.pi)


def test_the_surprise_of_an_outlier_is_finite_where_the_likelihood_is_not_concave():
    y = walk()[0]
    y[30] += 50.0
    model = pc.Model(kalman_graph(CauchyNode("y", dim=1, orders=1, dt=1.0)), pc.states_only())
    flow = model.run(y, record=pc.Record.flow()).error_flow()
    assert np.isfinite(flow.surprise("y")).all()
    assert flow.deviation("y")[30] > 0


@pytest.mark.parametrize("node", ["x", "noise_y"])
def test_gradients_below_a_generalised_state_are_those_of_the_energy(node):
    """Central differences of the log-likelihood with respect to the prediction and the log-precision."""
    x = GeneralisedStateNode("x", dim=2, orders=1, flow=lambda x, theta: -x, initial_mean=[[0.3, -0.4]])
    sensor = NormalNode("y", dim=2, orders=1, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, sensor)
    graph.weighs(PrecisionNode("noise_x", prior_precision=3.0, sd=0.5, correlation_time=0.3), x)
    graph.weighs(PrecisionNode("noise_y", prior_precision=2.0, sd=0.5, kernel=White()), sensor)
    session = graph.start(pc.Schedule(acts=(pc.act("observe", "sensory"),)), record=())
    session.step([1.0, 0.5])

    def energy(mean):
        states = session.state.nodes
        session.replace_nodes({node: states[node]._replace(mean=mean)})
        total = sum(each.energy(session.context(name)).free or 0.0 for name, each in graph.nodes.items())
        session.replace_nodes(states)
        return float(total)

    with torch.inference_mode():
        mean = session.state.nodes[node].mean
        gradient = graph[node].gradient(session.context(node))[0]
        for i in range(len(gradient)):
            step = torch.zeros_like(mean)
            step.view(-1)[i] = 1e-5
            slope = (energy(mean + step) - energy(mean - step)) / 2e-5
            assert gradient[i].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.usefixtures("as_users_run")
def test_the_noise_level_of_a_likelihood_is_learned():
    """Below a generalised state that is pinned, the level of the noise is found."""
    rng = np.random.default_rng(1)
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, theta: -x, initial_mean=[[0.0]])
    sensor = NormalNode("y", dim=1, orders=1, dt=1.0)
    graph = pc.Graph()
    graph.predicts(x, sensor)
    graph.weighs(PrecisionNode("noise_x", prior_precision=1e8, sd=0.1, correlation_time=1.0), x)
    noise = PrecisionNode(
        "noise_y", prior_precision=1.0, sd=2.0, kernel=White(), estimator=pc.estimators.NoiseScoring()
    )
    graph.weighs(noise, sensor)
    result = graph.run(0.2 * rng.normal(size=1000), pc.odem(every=20))
    assert math.exp(-0.5 * result.mean("noise_y")[-1, 0]) == pytest.approx(0.2, rel=0.1)


def test_mistakes_are_named():
    with pytest.raises(SettingError, match="use orders=1"):
        CountNode("y", dim=1, orders=2, dt=1.0)
    graph = kalman_graph(CountNode("y", dim=2, orders=1, dt=1.0))
    with pytest.raises(GraphError, match="mapping from 'x' to 'y'"):
        graph.check()
