"""No finite outlier does lasting harm, unless the policy is "raise".

The expectation is the same run without the outlier, and for the screen itself the values that were changed by hand.
"""

import copy
import math
import warnings

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.engine.rescue import IN_A_ROW, Rescue
from pcnet.engine.screen import AGREEING, FEW, ChannelScreen, Screen
from pcnet.graphs import odem
from support.compare import same
from support.filters import single_filter

WORLD = pc.simulate.glv_process(500, noise="white", clamp_observations=False, seed=3)
Y, X = WORLD.observations.numpy(), WORLD.states.numpy()


def kalman(**options):
    given = {"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25, "process_noise_sd": 0.1}
    return single_filter(pc.systems.lotka_volterra, 3, 0.01, **given, observation_noise_sd=0.1, **options)


MODELS = {
    "odem": lambda: odem(orders=2),
    "filter": kalman,
    "filter, model error": lambda: kalman(model_error_time=1.0),
    "bank": lambda: pc.graphs.adaptive_filter(
        pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25
    ),
}


def error_of(result):
    mean = result.mean("x")
    return (((mean[:, 0] if mean.ndim == 3 else mean) - X) ** 2).mean(-1)


@pytest.fixture(scope="module")
def usual():
    made = {name: build() for name, build in MODELS.items()}
    return {name: (model, error_of(model.run(Y, record=("mean",), engine="compiled"))) for name, model in made.items()}


@pytest.mark.parametrize("policy", ["hold", "reset", "stop"])
@pytest.mark.parametrize("size", [6.0, 1e3, -1e10, 1e30, 1e300])
@pytest.mark.parametrize("kind", MODELS)
def test_a_hundred_observations_after_an_outlier_the_error_is_the_usual_one(usual, kind, size, policy):
    if policy != "hold" and size not in (1e3, 1e30):
        pytest.skip("the others differ in what follows a divergence, and there is none")
    model, normal = usual[kind]
    y = Y.copy()
    y[200] = size
    session = model.start(on_divergence=policy, record=("mean",), engine="compiled").run(y)
    found = error_of(session.result())
    assert found[300:].mean() < 1.3 * normal[300:].mean() + 1e-6
    assert session.screened == 3


@pytest.mark.parametrize("at", [0, 4, FEW])
@pytest.mark.parametrize("kind", ["odem", "filter", "bank"])
def test_an_outlier_among_the_first_observations(usual, kind, at):
    model, normal = usual[kind]
    y = Y.copy()
    y[at] = 1e6
    session = model.start(on_divergence="hold", record=("mean",), engine="compiled").run(y)
    assert error_of(session.result())[110:].mean() < 2 * normal[110:].mean()


def dirty(samples=120):
    y = torch.tensor(Y[:samples]).clone()
    y[60], y[61, 1], y[90:95, 2] = 1e9, -1e5, 1e4
    y[30:34, 0] = math.nan
    return y


def nothing_foreseen():
    return {}


def test_a_series_is_judged_as_if_it_came_one_by_one():
    y, whole, screen = dirty(), Screen(), Screen()
    done, refused = 0, []
    while done < len(y):
        done += whole.clear({"y": y[done:]}, np.ones(len(y) - done))
        if done < len(y):
            refused.append(whole.one({"y": y[done]}, 1.0, nothing_foreseen)["y"])
            done += 1
    single = torch.stack([screen.one({"y": each}, 1.0, nothing_foreseen)["y"] for each in y])
    same_tensors(whole.tensors(), screen.tensors())
    changed = torch.isnan(single) & ~torch.isnan(y)
    wanted = torch.zeros_like(changed)
    wanted[60], wanted[61, 1], wanted[90:95, 2] = True, True, True
    assert torch.equal(changed, wanted)
    assert len(refused) == 7


def same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_steps_runs_and_resumptions_agree(engine, tmp_path):
    y, model = dirty().numpy(), odem(orders=2)
    options = {"on_divergence": "hold", "engine": engine}
    whole = model.start(**options).run(y)
    stepped = model.start(**options)
    for k, each in enumerate(y):
        stepped.step(each)
        if k in (3, 61, 92):
            stepped = pc.resume(stepped.save(tmp_path / "run"), model)
        if k == 70:
            stepped = copy.deepcopy(stepped)
    same(whole.result(), stepped.result())
    assert whole.screened == stepped.screened == 9


def refusals(y, screen=None):
    """Which values of one channel wait, if the model foresees none."""
    screen = screen or ChannelScreen((1,))
    return np.array([screen.judge(each, 1.0, screen.implausible(each, 1.0)) is not None for each in y[:, None]])


@pytest.mark.parametrize(("size", "most"), [(20.0, 1), (1e3, 4), (1e300, AGREEING)])
def test_a_jump_is_taken_in_once_the_next_values_agree(size, most):
    y = np.random.default_rng(0).normal(size=200)
    y[100:] += size
    found = np.flatnonzero(refusals(y)).tolist()
    assert found == list(range(100, 100 + len(found)))
    assert 1 <= len(found) <= most


def test_a_channel_that_becomes_wild_is_not_refused_for_good():
    y = np.random.default_rng(0).normal(size=600)
    y[200:] *= 1e4
    refused = refusals(y)
    assert not refused[:200].any()
    assert refused[200:].sum() <= 3 * AGREEING
    assert not refused[200 + 4 * AGREEING :].any()


@pytest.mark.parametrize("size", [12.0, 20.0, 100.0])
def test_many_outliers_of_one_size_do_not_hide_each_other(size):
    rng = np.random.default_rng(5)
    y = rng.normal(size=1000)
    hit = np.flatnonzero(rng.random(1000) < 0.03)
    hit = hit[(hit > 20) & (np.diff(hit, prepend=0) > 1)]
    y[hit] += size * rng.choice([-1, 1], size=len(hit))
    found = np.flatnonzero(refusals(y))
    assert len(set(hit) - set(found)) <= 0.1 * len(hit)
    assert len(set(found) - set(hit)) <= 1


def test_the_first_jump_waits_and_later_ones_do_not():
    """Levels 30 to 80 times the noise, within and outside of the range of earlier values."""
    levels = np.repeat([0.0, 40.0, -20.0, 20.0, 60.0, 0.0], 60)
    found = np.flatnonzero(refusals(levels + np.random.default_rng(2).normal(size=360)))
    assert found.tolist() == [60]


def spiking(pauses=(200, 350, 500), height=3.0, width=12):
    y = np.zeros(700)
    for start in pauses:
        y[start : start + width] = height * np.sin(np.pi * np.arange(1, width + 1) / (width + 1))
    return y


GOOD = {
    "spikes after silence": spiking(),
    "steps": np.repeat([0.0, 5.0, -5.0, 10.0, 0.0, 7.0, 0.0], 100),
    "bursts": np.where((np.arange(700) // 100) % 2, 3 * np.sin(0.9 * np.arange(700)), 0.0),
    "alternating": np.where(np.arange(700) > 300, 4.0 * (-1.0) ** np.arange(700), 0.0),
    "growth by decades": 10 ** (np.arange(700) / 70.0),
    "rise after silence": np.maximum(0.0, np.arange(700) - 350.0),
    "saw": (np.arange(700) % 100) / 10.0,
}


@pytest.mark.parametrize("kind", [*GOOD, "counts", "heavy tails"])
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_good_observations_are_not_lost(kind, noise):
    """All of these are good; at most a few of 700 wait, even if the model foresees none of them."""
    rng = np.random.default_rng(1)
    if kind == "counts":
        y = rng.poisson(np.where((np.arange(700) // 200) % 2, 40.0, 0.3)).astype(float)
    elif kind == "heavy tails":
        y = noise * rng.standard_t(3, size=700)
    else:
        y = GOOD[kind] + noise * np.maximum(1.0, 0.1 * np.abs(GOOD[kind])) * rng.normal(size=700)
    assert refusals(y).sum() <= AGREEING


def test_a_spike_that_the_model_foresees_is_taken_in_at_once(monkeypatch):
    """A filter whose noise allows for a step of ten loses nothing; one that does not, an observation."""
    y = np.random.default_rng(0).normal(size=(200, 1)) * 0.1
    y[100:] += 10.0
    flow = pc.systems.linear(torch.zeros(1, 1, dtype=torch.float64))
    for process, most in ((5.0, 0), (0.01, 3)):
        model = single_filter(flow, 1, 1.0, process_noise_sd=process, observation_noise_sd=0.1, noise_sd=0.001)
        session = model.start(on_divergence="hold").run(y)
        assert bool(most) <= session.screened <= most
        assert abs(float(session.mean("x")[0]) - 10.0) < 1.0 if process > 1 else True


def test_a_longer_gap_allows_a_larger_step():
    screen = ChannelScreen((1,))
    assert not refusals(np.linspace(0, 1, 50), screen).any()
    assert screen.implausible(np.array([3.0]), 1.0) is not None
    assert screen.implausible(np.array([3.0]), 100.0) is None


def test_the_default_policy_and_screen_false_change_nothing():
    y = Y[:60].copy()
    y[40] = 50.0
    model = odem(orders=2)
    plain = model.run(y)
    same(model.run(y, on_divergence="hold", screen=False), plain)
    assert model.run(y, on_divergence="hold").mean("x")[45, 0, 0] != plain.mean("x")[45, 0, 0]
    with pytest.raises(pc.errors.SettingError, match="screen must be True or False"):
        model.start(screen="yes")


def test_beliefs_that_take_in_nothing_more_are_set_back():
    """Without the screen, 1e30 is absorbed, and no good observation can be taken in any more."""
    model, y = odem(orders=2), Y.copy()
    y[200] = 1e30
    with pytest.warns(UserWarning, match=rf"{IN_A_ROW} observations in a row could not be taken in.*are set back"):
        found = model.start(on_divergence="hold", screen=False, engine="eager").run(y[:330])
    usual = model.run(Y[:330], engine="eager")
    assert error_of_part(found.result(), 310) < 1.5 * error_of_part(usual, 310) + 1e-3


def error_of_part(result, start):
    return float(((result.mean("x")[start:, 0] - X[start : len(result.times)]) ** 2).mean())


def test_earlier_states_come_first_and_the_start_last():
    def state(value):
        named = odem(orders=2).start().prepare(Y[:2]).state
        return named._replace(nodes={"x": (torch.full((1,), float(value)),)})

    rescue = Rescue()
    for tick in (64, 128, 192):
        rescue.keep(tick, state(tick))
    values = []
    now = state(-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tick in range(195, 195 + 4 * IN_A_ROW):
            now = rescue.after_loss(tick, [0], now, state(0))
            values.append(float(now.nodes["x"][0]))
    assert "set back to those after 128 observations" in str(caught[0].message)
    assert list(dict.fromkeys(values)) == [-1.0, 128.0, 64.0, 0.0]
