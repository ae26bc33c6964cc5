"""Counts, successes, choices and heavy tails below Gaussian sums and switching states, against a grid."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit

import pcnet as pc
from pcnet.nodes import (
    BinomialNode,
    CategoricalNode,
    ChoiceNode,
    GaussianSumStateNode,
    PoissonNode,
    PrecisionNode,
    StudentTNode,
    SwitchingStateNode,
)
from pcnet.numerics.kernels import White
from support.grids import path, switching_grid, well_grid
from support.kalman import STILL

DT, CHAIN, LEVELS = 0.1, np.array([[0.95, 0.05], [0.1, 0.9]]), (-1.0, 1.5)


def wells(x, theta):
    return 2 * x * (1 - x**2)


def pulled(x, v, theta):
    return 4 * (v - x)


def model(kind, sensor, via, process=0.6, **settings):
    graph, given = pc.Graph(), {"dim": 1, "initial_mean": [0.0], "initial_sd": 1.0, "learn_noise": False}
    if kind is SwitchingStateNode:
        x = SwitchingStateNode("x", flow=pulled, **given)
        graph.drives(CategoricalNode("mode", values=[[v] for v in LEVELS], transition=CHAIN), x)
    else:
        x = kind("x", flow=wells, **given, **settings)
    graph.predicts(x, sensor, via=via)
    graph.weighs(PrecisionNode("noise_x", mean=-2 * math.log(process), sd=1.0, kernel=White()), x)
    return pc.Model(graph, STILL)


def choice(y, p):
    """Two binary choices one after the other, with predictors p and −p."""
    first, second = expit(p), expit(-p)
    return np.log(np.select([y == 0, y == 1], [first, (1 - first) * second], (1 - first) * (1 - second)))


FAMILIES = {
    "poisson": (
        PoissonNode("y", dim=1, dt=DT),
        lambda y, p: stats.poisson.logpmf(y, np.exp(p)),
        lambda rng, p: rng.poisson(np.exp(p)),
    ),
    "binomial": (
        BinomialNode("y", dim=1, trials=10, dt=DT),
        lambda y, p: stats.binom.logpmf(y, 10, expit(p)),
        lambda rng, p: rng.binomial(10, expit(p)),
    ),
    "student": (
        StudentTNode("y", dim=1, degrees=3.0, scale=0.2, dt=DT),
        lambda y, p: stats.t.logpdf(y, 3, p, 0.2),
        lambda rng, p: p + 0.2 * rng.standard_t(3, p.shape),
    ),
    "choice": (
        ChoiceNode("y", dim=2, dt=DT),
        choice,
        lambda rng, p: (rng.random(p.shape) > expit(p)) * (1 + (rng.random(p.shape) > expit(-p))),
    ),
}


def observed(kind, family, samples=50, seed=0, **settings):
    """A model, its grid, log-likelihoods on it and observations: a well seen by a square, or a state that switches."""
    sensor, likelihood, draw = FAMILIES[family]
    grid, squared = (switching_grid(DT, CHAIN, LEVELS), False) if kind is SwitchingStateNode else (well_grid(DT), True)

    def predictor(x):
        return x**2 - 0.5 if squared else x + 0.5

    def via(x, theta):
        p = predictor(x)
        return torch.cat([p, -p], -1) if family == "choice" else p

    y = draw(np.random.default_rng(seed), predictor(path(grid, samples, seed))).astype(float)
    y[20:24] = np.nan
    seen = [0.0 * grid.x if np.isnan(each) else likelihood(each, predictor(grid.x)) for each in y]
    return model(kind, sensor, via, **settings), grid, np.array(seen), y[:, None]


@pytest.mark.parametrize("kind", [GaussianSumStateNode, SwitchingStateNode])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_taken_in_as_on_a_grid(kind, family):
    """Means within 5 % of a standard deviation, standard deviations within 5 %, evidence within 0.01 nats."""
    of, grid, likelihoods, y = observed(kind, family)
    filtered, _, evidence = grid.run(likelihoods)
    mean, sd = grid.moments(filtered)
    switches = kind is SwitchingStateNode
    result = of.run(y, record=("mean", "sd", "energy", *(["probability"] if switches else [])), engine="eager")
    assert np.sqrt(np.mean((result.mean("x").ravel() - mean) ** 2)) < 0.05 * np.sqrt(np.mean(sd**2))
    assert np.abs(np.log(result.sd("x").ravel() / sd)).mean() < 0.05
    assert abs(np.mean(result.accuracy - evidence)) < 0.01
    if switches:
        assert np.abs(result.get("mode", "probability") - filtered.sum(2)).mean() < 0.02


@pytest.mark.parametrize(("kind", "family"), [(GaussianSumStateNode, "poisson"), (SwitchingStateNode, "student")])
def test_compiled_they_give_the_digits_of_the_eager_engine(kind, family):
    few = {"peaks": 3} if kind is GaussianSumStateNode else {}
    of, *_, y = observed(kind, family, samples=40, **few)
    eager, compiled = (of.run(y, record=("mean", "sd", "energy"), engine=engine) for engine in ("eager", "compiled"))
    assert compiled.eager_ticks < 10
    for each in ("mean", "sd"):
        np.testing.assert_allclose(compiled.get("x", each), eager.get("x", each), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(compiled.accuracy, eager.accuracy, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", [GaussianSumStateNode, SwitchingStateNode])
@pytest.mark.parametrize("family", ["poisson", "choice"])
def test_forecasts_are_those_of_the_observations(kind, family):
    """Means and standard deviations of counts, and probabilities of choices, from densities on the grid."""
    of, grid, likelihoods, y = observed(kind, family, samples=30)
    p = grid.run(likelihoods)[0][-1]
    found = of.start(engine="eager").run(y).forecast(5 * DT)
    predictor = grid.x + 0.5 if kind is SwitchingStateNode else grid.x**2 - 0.5
    for k in range(5):
        p = grid.moved(p)
        density = p.sum(0)
        if family == "poisson":
            mean = density @ np.exp(predictor)
            sd = math.sqrt(density @ (np.exp(predictor) + np.exp(2 * predictor)) - mean**2)
            assert found.mean("y")[k, 0] == pytest.approx(mean, rel=0.1)
            assert found.sd("y")[k, 0] == pytest.approx(sd, rel=0.15)
        else:
            expected = [density @ np.exp(choice(np.array(c), predictor)) for c in range(3)]
            np.testing.assert_allclose(found.mean("y")[k], expected, atol=0.04)
