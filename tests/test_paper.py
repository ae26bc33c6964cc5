"""The paper's models, on 10,000 observations of the authors' process, track as measured with the authors' program."""

import numpy as np
import pytest
import torch

from pcnet import simulate
from pcnet.errors import SettingError
from pcnet.graphs import paper

# MSE to the true states of the setting with the lowest free action at expected precisions 500 and 500
MEASURED = {("lorenz", 2): 3.81, ("lorenz", 3): 1.24, ("glv", 2): 0.137, ("glv", 3): 0.0021}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "orders"), MEASURED)
def test_lowest_free_action_at_equal_precisions(model, orders):
    """The best of the 108 settings at C = 1: κ × period × both forgetting rates."""
    grid = torch.cartesian_prod(
        torch.tensor([1.0, 0.5, 0.25]),
        torch.tensor([64.0, 128, 256, 512]),
        torch.tensor([0.0, 0.1, 0.2]),
        torch.tensor([0.0, 0.1, 0.2]),
    ).double()
    names = ("kappa", "every", "beta_lambda", "beta_theta")
    world = simulate.glv_process(noise="authors")
    start = np.load(__file__.replace("test_paper.py", f"data/{model}_k{orders}_plain.npz"))["initial_mean"]
    graph, schedule = paper.odem(
        model=model,
        orders=orders,
        conventions="authors",
        initial_mean=start,
        **{n: grid[:, i] for i, n in enumerate(names)},
    )
    live = graph.start(schedule, record=())
    squared = torch.zeros(len(grid), dtype=torch.float64)
    for y, x in zip(world.observations, world.states, strict=True):
        live.step(y)
        squared += ((live.mean("x")[:, 0] - x) ** 2).mean(-1)
    error = squared / len(world.states)
    best = int(live.free_action.argmin())
    assert error[best].item() == pytest.approx(MEASURED[model, orders], rel=0.02)


@pytest.mark.parametrize("conventions", ["paper", "authors"])
def test_the_right_model_beats_the_wrong_one(conventions):
    """Scenario-same against scenario-different on the same data: less error, and a lower free action."""
    world = simulate.glv_process(samples=1500, noise="authors")
    found = {}
    for model in ("glv", "lorenz"):
        graph, schedule = paper.odem(model=model, orders=3, conventions=conventions)
        result = graph.run(world.observations, schedule=schedule, record=("mean",))
        error = ((result.mean("x")[:, 0] - world.states.numpy()) ** 2).mean()
        found[model] = error, float(result.free_action)
    assert found["glv"][0] < found["lorenz"][0] / 10
    assert found["glv"][1] < found["lorenz"][1]
    raw = ((world.observations - world.states) ** 2).mean()
    assert found["glv"][0] < raw


def test_conventions_are_ordinary_options():
    """The graph of the authors' program differs from the paper's in settings only."""
    ours, _ = paper.odem(conventions="paper")
    theirs, _ = paper.odem(conventions="authors")
    assert ours["lambda_x"].sd.item() == pytest.approx(0.1)
    assert theirs["lambda_x"].sd.item() == pytest.approx(0.01)
    assert (ours["lambda_x"].shared, theirs["lambda_x"].shared) == (False, True)
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
def test_bad_settings(options, words):
    with pytest.raises(SettingError, match=words):
        paper.odem(**options)
