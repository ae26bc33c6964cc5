"""Counts, successes, choices and heavy tails, against quadrature on a grid and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit
from torch.func import grad, vmap

import pcnet as pc
from pcnet.errors import ObservationError, SettingError
from pcnet.graphs import Sensor, adaptive_filter
from pcnet.nodes import (
    BinomialNode,
    ChoiceNode,
    GeneralisedStateNode,
    KalmanStateNode,
    PoissonNode,
    PrecisionNode,
    StudentTNode,
)
from pcnet.numerics.kernels import White

GRID = np.linspace(-60, 60, 400_001)


def below(sensor, mean, sd, via=None, **options) -> pc.Model:
    """A random walk above a sensor; its first value has this mean and sd."""
    graph = pc.Graph()
    given = {"initial_mean": [mean], "initial_sd": sd, "learn_noise": False, "flow": lambda x, theta: 0 * x}
    x = KalmanStateNode("x", dim=1, **(given | options))
    graph.predicts(x, sensor, via=via)
    graph.weighs(PrecisionNode("noise_x", prior_precision=100.0, sd=1e-6, kernel=White()), x)
    return pc.Model(graph, pc.states_only())


def quadrature(log_likelihood, mean, sd):
    """Log-evidence, mean and variance of a normal variable times a likelihood, on a grid."""
    log = stats.norm.logpdf(GRID, mean, sd) + log_likelihood(GRID)
    weight = np.exp(log - log.max())
    total = weight.sum()
    centre = (weight * GRID).sum() / total
    step = GRID[1] - GRID[0]
    return log.max() + math.log(total * step), centre, (weight * (GRID - centre) ** 2).sum() / total


def poisson(y, rate):
    return y * np.log(np.maximum(rate, 1e-300)) - rate - math.lgamma(y + 1)


def log_rate(p):
    return np.exp(np.clip(p, -60, 30))


CASES = {
    **{f"poisson {y}": (PoissonNode("y", dim=1), y, lambda p, y=y: poisson(y, log_rate(p))) for y in (0, 1, 7, 2000)},
    **{
        f"softplus {y}": (
            PoissonNode("y", dim=1, link="softplus", exposure=2.0),
            y,
            lambda p, y=y: poisson(y, 2 * np.logaddexp(0, p)),
        )
        for y in (0, 5)
    },
    **{
        f"bernoulli {y}": (BinomialNode("y", dim=1), y, lambda p, y=y: -np.logaddexp(0, -(2 * y - 1) * p))
        for y in (0, 1)
    },
    "binomial 3 of 10": (BinomialNode("y", dim=1, trials=10), 3, lambda p: stats.binom.logpmf(3, 10, expit(p))),
    "probit 1": (BinomialNode("y", dim=1, link="probit"), 1, stats.norm.logcdf),
    **{
        f"student {nu} {y}": (
            StudentTNode("y", dim=1, degrees=nu, scale=0.3),
            y,
            lambda p, y=y, nu=nu: stats.t.logpdf(y, nu, p, 0.3),
        )
        for nu in (1.0, 4.0, 30.0)
        for y in (0.6, 3.0, 20.0)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_one_observation_is_taken_in_as_by_quadrature(case):
    """Means within 2 % of a standard deviation, variances and evidence within 2 %, from narrow and wide priors."""
    sensor, y, log_likelihood = CASES[case]
    for mean, sd in ((0.5, 0.2), (0.5, 1.5), (-2.0, 4.0)):
        result = below(sensor, mean, sd).run(np.array([[float(y)]]))
        evidence, centre, variance = quadrature(log_likelihood, mean, sd)
        assert abs(result.mean("x")[0, 0, 0] - centre) < 0.02 * math.sqrt(variance)
        assert result.sd("x")[0, 0, 0] ** 2 == pytest.approx(variance, rel=0.02)
        assert -float(result.free_action) == pytest.approx(evidence, abs=0.02)


SLOPES = np.array([[1.0], [0.5], [-1.0], [2.0], [1.5]])


@pytest.mark.parametrize("kind", ["poisson", "binomial"])
def test_several_channels_of_one_state_are_taken_in_together(kind):
    """Five channels, one of them missing, of a state of one dimension: still a quadrature over one variable."""
    y = {"poisson": [1.0, 4.0, np.nan, 9.0, 2.0], "binomial": [1.0, 0.0, np.nan, 1.0, 0.0]}[kind]

    def log_likelihood(p):
        each = []
        for value, slope in zip(y, SLOPES[:, 0], strict=True):
            if not np.isnan(value) and kind == "poisson":
                each.append(poisson(value, log_rate(slope * p)))
            elif not np.isnan(value):
                each.append(-np.logaddexp(0, -(2 * value - 1) * slope * p))
        return sum(each)

    sensor = PoissonNode("y", dim=5) if kind == "poisson" else BinomialNode("y", dim=5)
    result = below(sensor, 0.5, 1.5, via=pc.systems.linear(SLOPES)).run(np.array([y]))
    evidence, centre, variance = quadrature(log_likelihood, 0.5, 1.5)
    assert abs(result.mean("x")[0, 0, 0] - centre) < 0.02 * math.sqrt(variance)
    assert result.sd("x")[0, 0, 0] ** 2 == pytest.approx(variance, rel=0.02)
    assert -float(result.free_action) == pytest.approx(evidence, abs=0.02)


def test_a_choice_is_a_sequence_of_binary_choices():
    """Category 1 of 4: not 0, but 1; its posterior by quadrature, and probabilities that sum to 1."""
    sensor, via = ChoiceNode("y", dim=3), pc.systems.linear([[1.0], [-0.5], [2.0]])
    session = below(sensor, 0.3, 1.2, via=via).start().run(np.array([[1.0]]))
    evidence, centre, variance = quadrature(lambda p: -np.logaddexp(0, p) - np.logaddexp(0, 0.5 * p), 0.3, 1.2)
    assert abs(float(session.mean("x")) - centre) < 0.02 * math.sqrt(variance)
    assert float(session.sd("x")) ** 2 == pytest.approx(variance, rel=0.02)
    assert -float(session.free_action) == pytest.approx(evidence, abs=0.02)
    future = session.forecast(1.0)
    assert future.mean("y").shape == (1, 4)
    assert future.mean("y").sum() == pytest.approx(1.0)
    drawn = session.sample(1.0, 4000, seed=0).values["y"]
    assert set(np.unique(drawn)) <= {0.0, 1.0, 2.0, 3.0}
    shares = [(drawn == k).mean() for k in range(4)]
    # the forecast multiplies probabilities of binary choices as if their predictors were independent
    np.testing.assert_allclose(future.mean("y")[0], shares, atol=0.06)


def test_forecasts_and_draws_are_those_of_counts():
    """A log-normal rate: E y = exp(m + v/2), Var y = E y + (exp(v) − 1) exp(2m + v)."""
    session = below(PoissonNode("y", dim=1), 0.5, 0.4).start().run(np.array([[2.0]]))
    future = session.forecast(3.0)
    m, v = future.mean("x")[:, 0], future.sd("x")[:, 0] ** 2
    mean = np.exp(m + v / 2)
    np.testing.assert_allclose(future.mean("y")[:, 0], mean, rtol=1e-8)
    np.testing.assert_allclose(future.sd("y")[:, 0] ** 2, mean + (np.exp(v) - 1) * np.exp(2 * m + v), rtol=1e-8)
    drawn = session.sample(3.0, 6000, seed=1).values["y"]
    assert np.array_equal(drawn, drawn.round())
    np.testing.assert_allclose(drawn.mean(0)[:, 0], mean, rtol=0.06)
    np.testing.assert_allclose(drawn.var(0), future.sd("y") ** 2, rtol=0.15)
    innovation = session.innovation([3.0])["y"]
    assert innovation.error[0] == pytest.approx(3.0 - mean[0])


def test_a_student_t_forecast_has_the_variance_of_its_tails():
    session = below(StudentTNode("y", dim=1, degrees=5.0, scale=0.3), 0.0, 0.2).start().run(np.array([[0.1]]))
    future = session.forecast(1.0)
    np.testing.assert_allclose(future.sd("y") ** 2, future.sd("x") ** 2 + 0.09 * 5 / 3, rtol=1e-8)
    drawn = session.sample(1.0, 8000, seed=1).values["y"]
    assert drawn.var() == pytest.approx(float(future.sd("y")[0, 0]) ** 2, rel=0.15)


NODES = [
    PoissonNode("y", dim=1),
    PoissonNode("y", dim=1, link="softplus", exposure=0.5),
    BinomialNode("y", dim=1, trials=7),
    BinomialNode("y", dim=1, trials=7, link="probit"),
    StudentTNode("y", dim=1, degrees=3.0, scale=2.0),
]


@pytest.mark.parametrize("node", NODES)
def test_scores_are_the_slopes_of_the_log_likelihood_and_information_their_variance(node):
    """Slopes by autograd; the Fisher information is the expectation of the squared score."""
    p = torch.tensor([-1.0, 0.3, 2.0], dtype=torch.float64)
    y, level = torch.full_like(p, 2.0), torch.zeros_like(p)
    slope = vmap(grad(lambda q, value: node.log_likelihood(value, q, torch.zeros_like(q)).sum()))(p, y)
    np.testing.assert_allclose(node.score(y, p, level)[0], slope, rtol=1e-10)
    if isinstance(node, StudentTNode):
        values = torch.linspace(-2000, 2000, 2_000_001, dtype=torch.float64)
        mass = float(values[1] - values[0])
    else:
        values = torch.arange(0.0, 8.0 if isinstance(node, BinomialNode) else 200.0, dtype=torch.float64)
        mass = 1.0
    for i, each in enumerate(p):
        here = each.expand_as(values)
        probability = mass * node.log_likelihood(values, here, torch.zeros_like(here)).exp()
        expected = (probability * node.score(values, here, torch.zeros_like(here))[0] ** 2).sum()
        assert float(probability.sum()) == pytest.approx(1.0, abs=1e-4)
        assert float(node.score(y, p, level)[1][i]) == pytest.approx(float(expected), rel=1e-4)


def test_counts_below_a_generalised_state_find_the_rate():
    """The fixed point of the mean under constant data: the rate is the count, up to the pull of the flow."""
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, theta: 0 * x, initial_mean=[[0.0]])
    graph, y = pc.Graph(), PoissonNode("y", dim=1)
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("noise_x", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
    result = graph.run(np.full((300, 1), 6.0), pc.states_only())
    assert result.mean("x")[-1, 0, 0] == pytest.approx(math.log(6.0), abs=0.01)


@pytest.mark.parametrize("sensor", [PoissonNode("y", dim=1), StudentTNode("y", dim=1, scale=0.5)])
def test_engines_batches_smoothing_checkpoints_and_files(sensor, tmp_path):
    rng = np.random.default_rng(0)
    y = rng.poisson(2.0, (2, 30, 1)).astype(float)
    y[:, 7] = np.nan
    via = pc.systems.linear([[1.0]])
    model = below(sensor, 0.5, 1.0, via=via, flow=pc.systems.linear([[0.0]]))
    eager, compiled = (model.run(y, engine=engine, smooth=True) for engine in ("eager", "compiled"))
    np.testing.assert_allclose(compiled.mean("x"), eager.mean("x"), atol=1e-9)
    np.testing.assert_allclose(compiled.smoothed("x").mean, eager.smoothed("x").mean, atol=1e-9)
    np.testing.assert_allclose(model.run(y[1]).mean("x"), eager.mean("x")[1], atol=1e-9)
    session = model.start().run(y[0, :12])
    session.save(tmp_path / "run.safetensors")
    model.save(tmp_path / "model.yaml")
    again = pc.resume(tmp_path / "run.safetensors", pc.Model.load(tmp_path / "model.yaml")).run(y[0, 12:])
    np.testing.assert_allclose(again.mean("x"), eager.mean("x")[0, -1], atol=1e-9)


def test_heavy_tails_are_learned_with_their_level():
    """One observation in ten is an outlier; the level of a Student t is found, below a Kalman state."""
    rng, n = np.random.default_rng(5), 250
    x = np.cumsum(0.1 * rng.standard_normal((n, 1)), 0)
    y = x + 0.3 * rng.standard_t(3.0, (n, 1))
    sensors = {"y": Sensor(family="student_t", family_settings={"degrees": 3.0}, noise_sd=1.0)}
    told = {"process_noise_sd": 0.1, "hypotheses": None}
    robust = adaptive_filter(lambda x, theta: 0 * x, 1, 1.0, sensors=sensors, **told).run(y)
    gaussian = adaptive_filter(lambda x, theta: 0 * x, 1, 1.0, observation_noise_sd=1.0, **told).run(y)
    assert np.exp(-0.5 * robust.mean("noise_y")[-1, 0]) == pytest.approx(0.3, rel=0.3)
    errors = [((each.mean("x")[50:, 0] - x[50:]) ** 2).mean() for each in (robust, gaussian)]
    assert errors[0] < 0.9 * errors[1]


def test_mistakes_are_named():
    with pytest.raises(ObservationError, match="not one of 0, 1, 2"):
        below(PoissonNode("y", dim=1), 0.0, 1.0).run(np.array([[-1.0]]))
    with pytest.raises(ObservationError, match="numbers of the categories"):
        below(ChoiceNode("y", dim=2), 0.0, 1.0, via=pc.systems.linear([[1.0], [1.0]])).run(np.array([[3.0]]))
    with pytest.raises(SettingError, match="a choice is one trial"):
        ChoiceNode("y", dim=2, trials=3)
    with pytest.raises(SettingError, match="has no noise level"):
        Sensor(family="poisson", noise_sd=0.1)
    with pytest.raises(SettingError, match="other families"):
        Sensor(family_settings={"link": "log"})


def test_recorded_predictions_are_those_of_observations():
    """A rate of counts, a probability of success, times the number of trials; not the linear predictor."""
    counts = np.array([3.0, 0.0, 5.0, 2.0])
    for sensor, expected in (
        (PoissonNode("y", dim=1, exposure=2.0), lambda p: 2 * np.exp(p)),
        (PoissonNode("y", dim=1, link="softplus"), lambda p: np.log1p(np.exp(p))),
        (BinomialNode("y", dim=1, trials=6), lambda p: 6 * expit(p)),
        (StudentTNode("y", dim=1), lambda p: p),
    ):
        result = below(sensor, 0.3, 0.5).run(counts, record=["prediction", "observation", "error"])
        prediction = result.prediction("y")[:, 0, 0]
        assert prediction[0] == pytest.approx(expected(0.3))
        np.testing.assert_allclose(counts - prediction, result.get("y", "error")[:, 0, 0])
