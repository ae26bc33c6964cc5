"""Smoothed Gaussian sums and switching states, against exact smoothers: on a grid, and over all paths of categories."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

import pcnet as pc
from pcnet.nodes import (
    CategoricalNode,
    GaussianSumStateNode,
    KalmanStateNode,
    ParameterNode,
    PrecisionNode,
    SensoryNode,
    SwitchingStateNode,
)
from pcnet.numerics.dwell_time import DwellTime
from pcnet.numerics.kernels import White
from support.grids import path, switching_grid, well_grid
from support.kalman import STILL, transition

DT = 0.1
SPRING = np.array([[0.0, 1.0], [-2.0, -0.3]])


def white(name, sd):
    return PrecisionNode(name, mean=-2 * math.log(sd), sd=1.0, kernel=White())


def graph_of(x, via, noise, category=None):
    graph, y = pc.Graph(), SensoryNode("y", dim=1, orders=1, dt=DT)
    graph.predicts(x, y, via=via)
    graph.weighs(white("noise_x", 0.6), x)
    graph.weighs(white("noise_y", noise), y)
    if category is not None:
        graph.drives(category, x)
    return graph


def wells(x, theta):
    return 2 * x * (1 - x**2)


def pulled(x, v, theta):
    return 4 * (v - x)


GIVEN = {"initial_mean": [0.0], "initial_sd": 1.0, "learn_noise": False}


def scalar(kind, noise):
    """A model of one state and its grid: wells seen by a square, or a state that is pulled to one of two levels."""
    if kind == "wells":
        x = GaussianSumStateNode("x", dim=1, flow=wells, **GIVEN)
        return pc.Model(graph_of(x, lambda x, theta: x**2, noise), STILL), well_grid(DT), lambda x: x**2
    chain, levels = np.array([[0.95, 0.05], [0.1, 0.9]]), (-1.0, 1.5)
    x = SwitchingStateNode("x", dim=1, flow=pulled, **GIVEN)
    category = CategoricalNode("mode", values=[[v] for v in levels], transition=chain)
    via = pc.systems.linear([[1.0]])
    return pc.Model(graph_of(x, via, noise, category), STILL), switching_grid(DT, chain, levels), lambda x: x


def exact(grid, seen, mapping, noise):
    """Smoothed densities on a grid."""
    fits = [0.0 * grid.x if np.isnan(y) else stats.norm.logpdf(y, mapping(grid.x), noise) for y in seen]
    return grid.smoothed(*grid.run(fits)[:2])


@pytest.mark.parametrize(
    ("kind", "noise", "mean_off", "sd_off"), [("wells", 0.2, 0.03, 0.03), ("levels", 0.5, 0.1, 0.05)]
)
def test_it_is_nearly_the_exact_smoother(kind, noise, mean_off, sd_off):
    """Means to a share of the standard deviation, and standard deviations."""
    model, grid, mapping = scalar(kind, noise)
    off, errors = [], []
    for seed in range(2):
        x, rng = path(grid, 50, seed), np.random.default_rng(seed)
        seen = mapping(x) + noise * rng.standard_normal(len(x))
        seen[25:30] = np.nan
        density = exact(grid, seen, mapping, noise)
        mean, sd = grid.moments(density)
        result = model.run(seen[:, None], smooth=True, engine="eager")
        found = result.smoothed("x")
        off.append(
            (((found.mean[:, 0] - mean) ** 2).mean() / (sd**2).mean(), np.abs(np.log(found.sd[:, 0] / sd)).mean())
        )
        errors.append([((each - x) ** 2).mean() for each in (found.mean[:, 0], mean, result.mean("x").ravel())])
        if kind == "levels":
            assert np.abs(result.smoothed("mode").mean - density.sum(2)).mean() < 0.03
    assert (np.mean(off, 0) < (mean_off**2, sd_off)).all()
    ours, least, filtered = np.mean(errors, 0)
    assert ours < 1.05 * least
    if kind == "levels":
        assert ours < 0.8 * filtered


def two_springs(sees=((1.0, 0.0),), stiff=9.0):
    def flow(x, v, theta):
        return torch.stack([x[..., 1], -v[..., 0] * x[..., 0] - 0.3 * x[..., 1]], -1)

    x = SwitchingStateNode(
        "x", dim=2, flow=flow, initial_mean=[1.0, 0.0], initial_sd=0.5, linearisation="taylor", learn_noise=False
    )
    category = CategoricalNode("mode", values=[[1.0], [stiff]], transition=[[0.8, 0.2], [0.3, 0.7]])
    return graph_of(x, pc.systems.linear(sees), 0.1, category)


def all_paths(seen, stiff=9.0):
    """Smoothed means, covariances and probabilities of two springs, over all paths of categories, in numpy."""
    steps = [transition(np.array([[0, 1], [-k, -0.3]]), np.array([0.36, 0.36]), DT) for k in (1.0, stiff)]
    chain, see, count = np.array([[0.8, 0.2], [0.3, 0.7]]), np.array([[1.0, 0.0]]), len(seen)
    logs, means, covariances, paths = [], [], [], list(itertools.product((0, 1), repeat=count))
    for modes in paths:
        log, m, p, kept = math.log(0.5), np.array([1.0, 0.0]), 0.25 * np.eye(2), []
        for k, y in enumerate(seen):
            before = m, p
            if k:
                f, q = steps[modes[k]]
                m, p, log = f @ m, f @ p @ f.T + q, log + math.log(chain[modes[k - 1], modes[k]])
                gain = before[1] @ f.T @ np.linalg.inv(p)
                kept[-1] += (gain, m, p)
            s = float((see @ p @ see.T)[0, 0]) + 0.01
            log += -0.5 * ((y - m[0]) ** 2 / s + math.log(2 * math.pi * s))
            g = p @ see.T / s
            m, p = m + g[:, 0] * (y - m[0]), p - g @ see @ p
            kept.append((m, p))
        smooth = [(m, p)]
        for m, p, gain, ahead, spread in kept[-2::-1]:
            later = smooth[-1]
            smooth.append((m + gain @ (later[0] - ahead), p + gain @ (later[1] - spread) @ gain.T))
        logs.append(log)
        means.append([each[0] for each in smooth[::-1]])
        covariances.append([each[1] for each in smooth[::-1]])
    weight = np.exp(np.array(logs) - np.logaddexp.reduce(logs))
    means = np.array(means)
    mean = np.einsum("p,ptn->tn", weight, means)
    away = means - mean
    whole = np.einsum("p,ptnm->tnm", weight, np.array(covariances) + away[..., :, None] * away[..., None, :])
    return mean, whole, np.einsum("p,pt->t", weight, np.array(paths, float))


@pytest.mark.parametrize(("stiff", "off"), [(1.01, 1e-4), (2.0, 0.005), (9.0, 0.1)])
def test_it_is_nearly_the_sum_over_all_paths_of_categories(stiff, off):
    """The nearer, the more alike categories are: what is lost is the shape of merged Gaussians."""
    rng = np.random.default_rng(3)
    seen = np.cos(np.arange(9) * 0.5) + 0.1 * rng.standard_normal(9)
    mean, covariance, second = all_paths(seen, stiff)
    result = two_springs(stiff=stiff).run(seen[:, None], schedule=STILL, smooth=True, engine="eager")
    found, sd = result.smoothed("x"), np.sqrt(np.einsum("tnn->tn", covariance))
    assert (np.abs(found.mean - mean) / sd).max() < off
    assert np.abs(np.log(found.sd / sd)).max() < off
    assert np.abs(result.smoothed("mode").mean[:, 1] - second).max() < 0.02


def linear(kind, category=None, **settings):
    flow = pc.systems.linear(SPRING) if category is None else lambda x, v, theta: x @ torch.tensor(SPRING).mT
    graph = graph_of(
        kind("x", dim=2, flow=flow, learn_noise=False, **settings), pc.systems.linear([[1.0, 0.0]]), 0.3, category
    )
    return pc.Model(graph, STILL)


@pytest.mark.parametrize("kind", ["peaks", "categories", "stages"])
def test_for_linear_models_of_one_kind_it_is_the_smoother_of_a_kalman_state(kind):
    seen = np.random.default_rng(0).standard_normal((25, 1)).cumsum(0)
    seen[8:12] = np.nan
    values, dwell = [[0.0], [1.0]], DwellTime(mean=6.0, sd=3.0)
    model = {
        "peaks": lambda: linear(GaussianSumStateNode, peaks=3),
        "categories": lambda: linear(SwitchingStateNode, CategoricalNode("mode", values=values, stay=0.8)),
        "stages": lambda: linear(SwitchingStateNode, CategoricalNode("mode", values=values, dwell=dwell)),
    }[kind]()
    one, several = (
        each.run(seen, smooth=True, engine="eager").smoothed("x") for each in (linear(KalmanStateNode), model)
    )
    np.testing.assert_allclose(several.mean, one.mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(several.covariance, one.covariance, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["wells", "levels"])
def test_lags_files_engines_and_batches(kind, tmp_path):
    """A lag is the whole run so far; compiled, saved and in a batch the digits are those of the eager engine alone."""
    model, grid, mapping = scalar(kind, 0.3)
    seen = np.stack([mapping(path(grid, 24, seed)) for seed in (5, 6)])[..., None]
    whole = model.run(seen, smooth=True, engine="eager").smoothed("x")
    alone = model.run(seen[1], smooth=True, engine="eager").smoothed("x")
    np.testing.assert_allclose(whole.mean[1], alone.mean, rtol=1e-7, atol=1e-9)
    compiled = model.run(seen[1], smooth=True, engine="compiled").smoothed("x")
    np.testing.assert_allclose(compiled.mean, alone.mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(compiled.sd, alone.sd, rtol=1e-6, atol=1e-8)
    session = model.start(smooth=6, engine="eager").run(seen[:, :12])
    session.save(tmp_path / "half")
    session = pc.resume(tmp_path / "half", model).run(seen[:, 12:])
    for lag in (0, 3, 6):
        found = session.smoothed(lag)["x"]
        np.testing.assert_allclose(found.mean, whole.mean[:, -1 - lag], rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(found.sd, whole.sd[:, -1 - lag], rtol=1e-7, atol=1e-9)
    lagged = model.start(smooth=6, engine="compiled").run(seen).smoothed(6)
    np.testing.assert_allclose(lagged["x"].mean, whole.mean[:, -7], rtol=1e-6, atol=1e-8)
    assert all(each.covariance.shape == (2, *each.mean.shape[1:] * 2) for each in lagged.values())


def test_parameters_and_hypotheses_are_smoothed_along():
    """An unknown level, and rows of a bank: the smoothed parameter is the last one, since it stands still."""
    x = SwitchingStateNode("x", dim=1, flow=lambda x, v, theta: 4 * (theta * v - x), initial_mean=[0.0])
    category = CategoricalNode("mode", values=[[-1.0], [1.0]], stay=0.9)
    graph = graph_of(x, pc.systems.linear([[1.0]]), 0.3, category)
    graph.parametrises(ParameterNode("theta", mean=[1.0], sd=0.5), x)
    factors = {"process_factors": (0.2, 5.0), "observation_factors": (1.0,), "contrast": 1.0}
    few = pc.Hypotheses(**factors, outliers=0.0, walks=())
    model = pc.Model(graph, pc.adaptive_filtering(), few)
    rng = np.random.default_rng(0)
    seen = 1.5 * np.repeat([1.0, -1.0, 1.0], 12)[:, None] + 0.3 * rng.standard_normal((36, 1))
    result = model.run(seen, smooth=True, engine="eager")
    smoothed = result.smoothed("theta")
    np.testing.assert_allclose(smoothed.mean[5:], result.mean("theta")[-1] + 0 * smoothed.mean[5:], atol=0.1)
    assert result.smoothed("mode").mean[18, 0] > 0.9
    assert (result.smoothed("x").sd > 0).all()
