"""The paper's models and the conventions of its authors' program."""

import numpy as np
import pytest

from pcnet import simulate
from pcnet.errors import SettingError
from pcnet.graphs import odem
from support.paths import DATA


@pytest.mark.parametrize("model", ["glv", "lorenz"])
@pytest.mark.parametrize("orders", [2, 3])
def test_the_first_states_of_the_authors(model, orders):
    graph, _ = odem(model, orders, conventions="authors")
    measured = np.load(DATA / f"{model}_k{orders}_plain.npz")["initial_mean"]
    np.testing.assert_allclose(graph["x"].initial_mean, measured, rtol=1e-7)


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize("conventions", ["paper", "authors"])
def test_the_right_model_has_less_error_and_lower_free_action(conventions):
    """Scenario-same against scenario-different on the same data."""
    world = simulate.glv_process(samples=800, noise="authors")
    found = {}
    for model in ("glv", "lorenz"):
        graph, schedule = odem(model=model, orders=3, conventions=conventions)
        result = graph.run(world.observations, schedule=schedule, record=("mean",))
        error = ((result.mean("x")[:, 0] - world.states.numpy()) ** 2).mean()
        found[model] = error, float(result.free_action)
    assert found["glv"][0] < found["lorenz"][0] / 10
    assert found["glv"][1] < found["lorenz"][1]
    raw = ((world.observations - world.states) ** 2).mean()
    assert found["glv"][0] < raw


def test_the_conventions_of_the_authors_are_settings():
    ours, _ = odem(conventions="paper")
    theirs, _ = odem(conventions="authors")
    assert ours["lambda_x"].sd.item() == pytest.approx(0.1)
    assert theirs["lambda_x"].sd.item() == pytest.approx(0.01)
    assert (ours["lambda_x"].channels, theirs["lambda_x"].channels) == ("each", "shared")
    assert (ours["x"].curvature, theirs["x"].curvature) == ("gauss-newton", "exact")
    expected = np.log(500) - 0.1**2 / 2
    assert ours["lambda_x"].prior_mean.item() == pytest.approx(expected)
    assert theirs["lambda_x"].prior_mean.item() == pytest.approx(expected)
    assert {type(node) for node in ours.nodes.values()} == {type(node) for node in theirs.nodes.values()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "rossler"}, "no model 'rossler'; models: lorenz, glv"),
        ({"conventions": "spm"}, "no conventions 'spm'"),
        ({"orders": 1}, "orders must be 2 or more"),
        ({"expected_precision_y": -5.0}, "expected_precision_y must be positive"),
        ({"dt": 0.0}, "dt"),
        ({"kappa": "high"}, "kappa"),
        ({"beta_theta": 1.0}, "beta"),
    ],
)
def test_invalid_settings_are_rejected(options, words):
    with pytest.raises(SettingError, match=words):
        odem(**options)
