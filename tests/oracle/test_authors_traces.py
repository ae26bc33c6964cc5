"""With the authors' conventions, every number agrees with their published program."""

import json

import numpy as np
import pytest

from pcnet import Record
from pcnet.graphs import odem
from support.paths import DATA

TRACES = [
    f"{model}_k{orders}_{kind}" for model in ("glv", "lorenz") for orders in (2, 3) for kind in ("plain", "smoothed")
]
SETTINGS = [
    "dt",
    "expected_precision_x",
    "expected_precision_y",
    "sd_lambda_x",
    "sd_lambda_y",
    "kappa",
    "every",
    "beta_lambda",
    "beta_theta",
    "smoothness",
    "nu",
    "rate",
    "t0",
    "gamma",
]
EVERYTHING = Record(("mean", "covariance", "observation", "prediction", "energy"))


def inversion(trace, conventions="authors"):
    settings = json.loads(str(trace["settings"]))
    return odem(
        model=settings["model"],
        orders=settings["orders_x"],
        conventions=conventions,
        initial_mean=trace["initial_mean"],
        **{name: settings[name] for name in SETTINGS},
    )


def distance(found, expected):
    """The largest deviation, relative to the largest value of the trace."""
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.fixture(scope="module", params=TRACES)
def pair(request):
    trace = np.load(DATA / f"{request.param}.npz")
    graph, schedule = inversion(trace)
    return graph.run(trace["observations"], schedule=schedule, record=EVERYTHING), trace


def test_means(pair):
    result, trace = pair
    assert distance(result.mean("x"), trace["mean"]) < 1e-7
    # order by order within the 1e-9 that the program adds to J₀ before it inverts it, which pcnet does not
    for order in range(trace["mean"].shape[1]):
        assert distance(result.mean("x")[:, order], trace["mean"][:, order]) < 2e-7


@pytest.mark.parametrize("name", ["theta", "lambda_x", "lambda_y"])
def test_context(pair, name):
    result, trace = pair
    assert distance(result.mean(name), trace[name][1:]) < 1e-7
    assert distance(result.covariance(name), trace[f"cov_{name}"][1:]) < 1e-7


def test_generalised_observations(pair):
    result, trace = pair
    assert distance(result.observation("y"), trace["generalised_observations"]) < 1e-12
    assert distance(result.prediction("y"), trace["predictions"]) < 1e-7


@pytest.mark.parametrize("name", ["free_energy", "accuracy", "complexity"])
def test_energies(pair, name):
    result, trace = pair
    found = getattr(result, name)
    assert (np.abs(found - trace[name]) / np.abs(trace[name])).max() < 1e-7


def test_totals(pair):
    result, trace = pair
    assert np.abs(result.free_action / trace["free_action"] - 1) < 1e-7
    error = ((result.mean("x")[:, 0] - trace["states"]) ** 2).mean()
    assert np.abs(error / trace["mse"] - 1) < 1e-7
    # shares of the nodes add up to the whole
    shares = sum(result.free_energy_of(name) for name in result.roles)
    np.testing.assert_allclose(shares, result.free_energy, rtol=1e-12)


def test_a_batch_of_all_settings_equals_the_traces_one_by_one():
    """Each element has its own clock."""
    traces = [np.load(DATA / f"glv_k3_{kind}.npz") for kind in ("plain", "smoothed")]
    every = [json.loads(str(trace["settings"])) for trace in traces]
    graph, schedule = odem(
        model="glv",
        orders=3,
        conventions="authors",
        initial_mean=traces[0]["initial_mean"],
        **{name: np.array([settings[name] for settings in every]) for name in SETTINGS},
    )
    result = graph.run(traces[0]["observations"], schedule=schedule, record=EVERYTHING)
    for i, trace in enumerate(traces):
        assert distance(result.mean("x")[i], trace["mean"]) < 1e-7
        assert distance(result.mean("theta")[i], trace["theta"][1:]) < 1e-7
        assert distance(result.covariance("theta")[i], trace["cov_theta"][1:]) < 1e-7
        assert distance(result.free_energy[i], trace["free_energy"]) < 1e-7
