"""Sessions under several hypotheses: mixtures of ordinary runs, with everything that a session can do."""

import copy
import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.engine import review as reviews
from pcnet.engine import rows
from pcnet.engine.compiled.run import CompiledRun
from pcnet.errors import DivergenceError, SettingError
from pcnet.graphs import adaptive_filter
from pcnet.model.digest import digest
from pcnet.model.specification import from_spec, to_spec
from pcnet.numerics.mixtures import WIDEST
from support.kalman import Kalman, exact_transition

DT = 0.1
PROCESS = (0.25, 4.0)
OBSERVATION = (0.5, 1.0, 3.0)
FEW = pc.Hypotheses(
    process_factors=PROCESS,
    observation_factors=OBSERVATION,
    contrast=1.0,
    process_tilt=0.3,
    observation_tilt=0.7,
    outliers=0.0,
    walks=(),
    drop=1e9,
    merge=0.0,
)
"""Six rows that are never dropped nor merged."""


def oscillator(x, theta):
    return torch.stack([x[..., 1], -theta[..., 0] * torch.sin(x[..., 0]) - 0.2 * x[..., 1]], -1)


def model(hypotheses=FEW, process=1.0, observation=1.0, **options):
    settings = {"process_noise_sd": 0.3 * process**0.5, "observation_noise_sd": 0.2 * observation**0.5} | options
    settings |= {"parameter_mean": [1.5], "parameter_sd": 0.5, "initial_mean": [1.0, 0.0]}
    return adaptive_filter(oscillator, 2, DT, hypotheses=hypotheses, **settings)


def data(samples=120, seed=0, elements=()):
    rng = np.random.default_rng(seed)
    x, rows = np.ones((*elements, 2)) * [1.0, 0.0], []
    for _ in range(samples):
        rows.append(x + 0.2 * rng.normal(size=x.shape))
        for _ in range(10):
            velocity = np.stack([x[..., 1], -2.0 * np.sin(x[..., 0]) - 0.2 * x[..., 1]], -1)
            x = x + DT / 10 * velocity + 0.3 * (DT / 10) ** 0.5 * rng.normal(size=x.shape)
    return np.stack(rows, -2)


def test_a_mixture_is_the_average_of_separate_filters_by_their_evidence():
    """Bayesian model averaging: moments of six filters that run alone, weighed by prior tilt and evidence."""
    y = data(50)
    quantities = ["mean", "sd", "covariance", "energy"]
    found = model().run(y, record=quantities)
    alone, tilt = [], []
    for a in PROCESS:
        for b in OBSERVATION:
            alone.append(model(None, a, b).run(y, record=quantities))
            tilt.append(0.3 * np.log(a) + 0.7 * np.log(b))
    evidence = np.array(tilt)[:, None] + np.cumsum([each.accuracy for each in alone], 1)
    start = np.logaddexp.reduce(tilt)
    total = np.logaddexp.reduce(evidence, 0)
    np.testing.assert_allclose(found.accuracy, np.diff(total, prepend=start), rtol=1e-8, atol=1e-9)
    assert found.free_action == pytest.approx(start - total[-1], rel=1e-9)
    weight = np.exp(evidence - total)
    for node in ("x", "theta"):
        means = np.stack([each.mean(node).reshape(len(y), -1) for each in alone])
        covariances = np.stack([each.covariance(node) for each in alone])
        mean = np.einsum("kt,ktn->tn", weight, means)
        away = means - mean
        covariance = np.einsum("kt,ktnm->tnm", weight, covariances + away[..., :, None] * away[..., None, :])
        np.testing.assert_allclose(found.mean(node).reshape(len(y), -1), mean, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(found.covariance(node), covariance, rtol=1e-7, atol=1e-11)
        sd = np.sqrt(np.einsum("tnn->tn", covariance))
        np.testing.assert_allclose(found.sd(node).reshape(len(y), -1), sd, rtol=1e-7, atol=1e-10)


def test_velocities_are_those_of_all_hypotheses_together():
    """Mean and spread of a mixture, from six filters that run alone."""
    y, names = data(25), ["velocity", "velocity_sd"]
    session = model().start(record=names).run(y)
    weight = session.weights.numpy()[:, None]
    rows = [model(None, a, b).start(record=names).run(y) for a in PROCESS for b in OBSERVATION]
    mean, sd = (np.stack([each.read("x", name).numpy() for each in rows]) for name in names)
    centre = (weight * mean).sum(0)
    spread = np.sqrt((weight * (sd**2 + (mean - centre) ** 2)).sum(0))
    result = session.result()
    np.testing.assert_allclose(result.get("x", "velocity")[-1], centre, rtol=1e-8)
    np.testing.assert_allclose(result.get("x", "velocity_sd")[-1], spread, rtol=1e-8)


def test_forecasts_are_those_of_all_hypotheses_together():
    y = data(25)
    session = model().start().run(y)
    weight = session.weights.numpy()
    found = session.forecast(1.0)
    alone = [model(None, a, b).start().run(y).forecast(1.0) for a in PROCESS for b in OBSERVATION]
    for name in ("x", "y"):
        mean = sum(w * each.mean(name) for w, each in zip(weight, alone, strict=True))
        second = sum(w * (each.sd(name) ** 2 + each.mean(name) ** 2) for w, each in zip(weight, alone, strict=True))
        np.testing.assert_allclose(found.mean(name), mean, rtol=1e-8)
        np.testing.assert_allclose(found.sd(name), np.sqrt(second - mean**2), rtol=1e-6)


@pytest.mark.parametrize(("factors", "rows_of"), [(None, 25 + 2 * 3), (PROCESS, 10 + 2 * 2), ((1.0,), 5)])
def test_elements_of_the_process_noise_are_contrasted_where_its_level_is_uncertain(factors, rows_of):
    """Five levels of observation noise each; two elements at the process factors near the guess; none if it is sure."""
    bank = pc.Hypotheses(process_factors=factors, outliers=0.0, walks=())
    session = model(bank).start(engine="eager").run(data(2))
    assert len(session.weights) == rows_of
    precision = np.exp(session.context("noise_x").state.mean.numpy())
    ratio = precision[:, 0] / precision[:, 1]
    assert (np.abs(np.log(ratio)) > np.log(5.0)).sum() == rows_of - 5 * (5 if factors is None else len(factors))


def test_batch_elements_that_have_stopped_leave_the_forecasts_of_the_others():
    """Those that run have the forecasts of a run without the stopped one; when all have stopped, there is none."""
    y = data(25, elements=(3,))
    bad = y.copy()
    bad[1, 15:] = 1e200
    session = model().start(on_divergence="stop", screen=False).run(bad)
    found, alone = session.forecast(0.5), model().start().run(y[[0, 2]]).forecast(0.5)
    for name in ("x", "y"):
        np.testing.assert_allclose(found.mean(name)[[0, 2]], alone.mean(name), rtol=1e-9)
        np.testing.assert_allclose(found.sd(name)[[0, 2]], alone.sd(name), rtol=1e-9)
        assert np.isnan(found.mean(name)[1]).all()
    stopped = model().start(on_divergence="stop", screen=False).run(bad[1])
    with pytest.raises(DivergenceError, match="the forecast of x is not finite"):
        stopped.forecast(0.5)


def test_a_row_that_knows_nothing_widens_a_forecast_by_a_bounded_amount():
    """Two rows at hand: the second has 10⁴ times the process variance, and (WIDEST / r)² of its weight counts."""
    wide = dataclasses.replace(FEW, process_factors=(1.0, 1e4), observation_factors=(1.0,), process_tilt=0.0)
    y = data(2)
    session = model(wide).start(engine="eager").run(y)
    found = session.forecast(0.3)
    narrow, wild = (model(None, a).start(engine="eager").run(y).forecast(0.3) for a in (1.0, 1e4))
    weight = session.weights.numpy()
    assert 0.0005 < weight[1] < 0.5
    share = np.minimum(1.0, (WIDEST / (wild.sd("x") / narrow.sd("x")).max(-1)) ** 2)
    share = weight[1] * share / (weight[0] + weight[1] * share)
    for name in ("x", "y"):
        mean = narrow.mean(name) + share[:, None] * (wild.mean(name) - narrow.mean(name))
        parts = [each.sd(name) ** 2 + (each.mean(name) - mean) ** 2 for each in (narrow, wild)]
        variance = parts[0] + share[:, None] * (parts[1] - parts[0])
        np.testing.assert_allclose(found.mean(name), mean, rtol=1e-8)
        np.testing.assert_allclose(found.sd(name), np.sqrt(variance), rtol=1e-6)
    assert (found.sd("x") < 1.05 * narrow.sd("x")).all()


@pytest.mark.parametrize("cut", [5, 16, 40])
def test_a_saved_or_copied_session_goes_on_to_the_same_digits(cut, tmp_path):
    """Also within the first observations, from which guesses are found, and between two reviews."""
    y, made = data(60), model(pc.Hypotheses(), process_noise_sd=None, observation_noise_sd=None)
    whole = made.run(y)
    session = made.start().run(y[:cut])
    path = session.save(tmp_path / "session.pcnet")
    copied = copy.deepcopy(session)
    for other in (session, copied, pc.resume(path, made)):
        result = other.run(y[cut:]).result()
        for node in ("x", "theta", "noise_x"):
            np.testing.assert_array_equal(result.mean(node), whole.mean(node))
            np.testing.assert_array_equal(result.sd(node), whole.sd(node))
        assert result.free_action == whole.free_action


@pytest.mark.parametrize("engine", [pytest.param("eager", marks=pytest.mark.slow), "compiled"])
def test_single_steps_give_the_digits_of_a_run(engine):
    """Also when few rows are left, so that compiled steps take a shorter way."""
    y, made = data(200), model(pc.Hypotheses(drop=2.0), process_noise_sd=None, observation_noise_sd=None)
    session, whole = made.start(engine=engine), made.start(engine=engine).run(y)
    for value in y:
        session.step(value)
    assert len(session.weights) == len(whole.weights) == 4
    np.testing.assert_array_equal(session.weights, whole.weights)
    np.testing.assert_array_equal(session.result().mean("x"), whole.result().mean("x"))
    np.testing.assert_allclose(session.mean("x"), session.result().mean("x")[-1], rtol=1e-12)
    np.testing.assert_allclose(session.free_energy, -session.result().accuracy[-1], rtol=1e-9)


def test_memory_of_rows_that_are_left_behind_is_free_at_once(monkeypatch):
    """With a large batch, memory that waits for the garbage collector is gigabytes."""
    filtered, begin, made, held = model(pc.Hypotheses()), CompiledRun.__init__, [], weakref.WeakSet()
    filtered.run(data(40), engine="compiled")  # compiles, which holds frames until they are collected

    def remember(run, *given):
        begin(run, *given)
        made.append(run.batch)
        held.add(run)

    monkeypatch.setattr(CompiledRun, "__init__", remember)
    session = filtered.start(engine="compiled")
    gc.collect()
    gc.disable()
    try:
        session.run(data(300), progress=False)
    finally:
        gc.enable()
    assert len(made) > 2
    assert len(held) == 1


@pytest.mark.parametrize("gaps", [False, True])
def test_compiled_mixtures_equal_eager_ones(gaps):
    y, made = data(60), model(pc.Hypotheses(), process_noise_sd=None, observation_noise_sd=None)
    if gaps:
        y[np.random.default_rng(1).random(y.shape) < 0.2] = np.nan
    eager, compiled = (made.run(y, engine=engine) for engine in ("eager", "compiled"))
    assert compiled.engine == "compiled"
    for node in ("x", "theta", "noise_x", "noise_y"):
        np.testing.assert_allclose(compiled.mean(node), eager.mean(node), rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(compiled.sd(node), eager.sd(node), rtol=1e-6, atol=1e-9)


def test_elements_of_a_batch_do_not_affect_each_other():
    y, made = data(40, elements=(3,)), model(pc.Hypotheses(), process_noise_sd=None, observation_noise_sd=None)
    together = made.run(y)
    for i in (0, 2):
        alone = made.run(y[i])
        np.testing.assert_allclose(together.mean("x")[i], alone.mean("x"), rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(together.sd("theta")[i], alone.sd("theta"), rtol=1e-9)
        assert together.free_action[i] == pytest.approx(alone.free_action, rel=1e-9)


def test_rows_that_are_not_in_use_are_not_run():
    """Elements of a batch need different numbers of rows; those of all of them are as many as one of them needs."""
    y, made = data(70, elements=(16,)), model(pc.Hypotheses())
    y[0, :5] += 4.0  # needs other rows than the others
    session = made.start(engine="compiled")
    session.run(y, progress=False)
    run, spec = session._engine.lead.engine.run, session.program.spec
    in_use = np.isfinite(session._bank.log_weight)
    assert in_use.sum() < spec.batch
    assert run.batch == in_use.sum()
    result, alone = session.result(), [made.run(y[i], engine="compiled") for i in (0, 5)]
    for i, each in zip((0, 5), alone, strict=True):
        np.testing.assert_allclose(result.mean("x")[i], each.mean("x"), rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(result.sd("theta")[i], each.sd("theta"), rtol=1e-9)
    tensors = session._bound.now.state.tensors().values()
    whole = torch.cat([each.reshape(*in_use.shape, -1).double().nan_to_num() for each in tensors], -1)
    for row, element in zip(*np.nonzero(~in_use), strict=True):  # the others are copies of one that is
        equal = (whole[:, element] == whole[row, element]).all(1).numpy()
        assert (equal & in_use[:, element]).any()


def test_noises_are_tied_to_their_levels_after_an_element_has_stopped():
    made = adaptive_filter(
        lambda x, theta: x**3,
        1,
        DT,
        initial_mean=[[1e60], [0.1]],
        correlation_time=0.3,
        process_noise_sd=0.1,
        observation_noise_sd=0.1,
    )
    y = 0.1 * np.random.default_rng(0).normal(size=(2, 150, 1))
    found = [made.run(y, on_divergence="stop", engine=engine) for engine in ("eager", "compiled")]
    for result in found:
        assert np.isnan(result.mean("x")[0, -1]).all()
        np.testing.assert_allclose(result.mean("x")[1], found[0].mean("x")[1], rtol=1e-7, atol=1e-9)


def test_no_first_guess_is_needed_whatever_the_units():
    """The same data in other units give the same beliefs in those units, from guesses found in the data."""
    y = data(200)

    def run(unit):
        made = adaptive_filter(
            lambda x, theta: torch.stack([x[..., 1], -theta[..., 0] * x[..., 0]], -1),
            2,
            DT,
            parameter_mean=[1.5],
            parameter_sd=0.5,
            initial_sd=unit,
        )
        return made.run(unit * y)

    one, other = run(1.0), run(1000.0)
    np.testing.assert_allclose(other.mean("x"), 1000.0 * one.mean("x"), rtol=1e-6, atol=1e-3)
    np.testing.assert_allclose(other.mean("theta"), one.mean("theta"), rtol=1e-6)


def test_draws_have_the_moments_of_the_forecast():
    session = model().start().run(data(60))
    forecast, draws = session.forecast(0.5), session.sample(0.5, draws=2000, seed=1)
    values = draws.values["x"][:, -1]
    assert draws.values["x"].shape == (2000, 5, 2)
    np.testing.assert_allclose(values.mean(0), forecast.mean("x")[-1], atol=4 * forecast.sd("x")[-1].max() / 2000**0.5)
    np.testing.assert_allclose(values.std(0), forecast.sd("x")[-1], rtol=0.15)


def test_error_flow_and_messages_can_be_recorded():
    result = model().run(data(40), record=pc.Record.flow())
    assert result.error_flow().surprise("y").shape == (40,)
    assert np.isfinite(result.traces["x to theta.error"].values).all()


def test_a_specification_holds_the_hypotheses():
    name = "tests.contract.test_mixture.oscillator"
    pc.register(name)(oscillator)
    made = model(dataclasses.replace(FEW, guess=("noise_x",)))
    again = from_spec(to_spec(made))
    assert digest(again) == digest(made)
    assert again.hypotheses.observation_factors == OBSERVATION
    assert digest(model(None)) != digest(made)


def test_a_model_with_hypotheses_does_not_unpack_into_a_graph_and_a_schedule():
    with pytest.raises(SettingError, match=r"use model\.graph and model\.schedule"):
        _, _ = model()


def test_hypotheses_that_cannot_take_an_observation_lose_their_weight():
    """One huge value: rows hold or not, but the mixture goes on, and recovers."""
    y = data(120)
    y[60] = 1e200
    session = model(pc.Hypotheses()).start(on_divergence="hold").run(y)
    result = session.result()
    assert np.isfinite(result.mean("x")).all()
    clean = model(pc.Hypotheses()).run(np.where(np.abs(y) > 1e100, np.nan, y))
    np.testing.assert_allclose(result.mean("x")[-1], clean.mean("x")[-1], atol=0.3)


def test_a_first_belief_with_two_peaks_is_divided():
    """A pendulum seen through a sine starts beyond the vertical: half of the first belief is on the wrong side."""

    def pendulum(x, _):
        return torch.stack([x[..., 1], -4.0 * x[..., 0].sin() - 0.1 * x[..., 1]], -1)

    rng = np.random.default_rng(5)  # one of those that are lost if it is not divided
    x, states = np.array([2.2, 1.0]), []
    for _ in range(300):
        states.append(x)
        for _ in range(10):
            x = x + 0.005 * np.array([x[1], -4.0 * np.sin(x[0]) - 0.1 * x[1]])
            x = x + 0.005**0.5 * np.array([0.02, 0.4]) * rng.normal(size=2)
    truth = np.stack(states)
    y = np.sin(truth[:, :1]) + 0.1 * rng.normal(size=(300, 1))
    made = adaptive_filter(
        pendulum, 2, 0.05, mapping=lambda x, _: x[..., :1].sin(), initial_mean=[1.5, 0.0], initial_sd=0.5
    )
    found = made.run(y).mean("x")[100:, 0]
    assert np.square(found - truth[100:]).mean(0) == pytest.approx(np.zeros(2), abs=0.15)


def test_rows_that_stop_leave_the_record_to_the_others():
    """What is recorded equals what is read after each observation, although a row overflows."""

    def neuron(x, _):
        v, w = x[..., 0], x[..., 1]
        return torch.stack([v - v**3 / 3 - w + 0.5, 0.08 * (v + 0.7 - 0.8 * w)], -1)

    made = adaptive_filter(
        neuron,
        2,
        0.2,
        mapping=lambda x, _: x[..., :1],
        process_noise_sd=0.05,
        observation_noise_sd=0.2,
        initial_mean=[0.0, 0.0],
        hypotheses=dataclasses.replace(FEW, process_factors=(1.0, 3e5), observation_factors=(1.0, 3e4)),
    )
    y = np.random.default_rng(0).normal(size=(12, 1))
    session, read = made.start(), []
    for value in y:
        session.step(value)
        read.append(session.mean("x").numpy())
    stopped = {event.element for event in session.divergence_events}
    assert 0 < len(stopped) < 4
    # after a division, at the fourth, rows are read as three, of which those with next to no weight do not count
    others = np.arange(len(y)) != 3
    np.testing.assert_allclose(session.result().mean("x")[others], np.stack(read)[others], rtol=1e-7)
    np.testing.assert_allclose(session.result().mean("x"), np.stack(read), rtol=1e-4)
    np.testing.assert_allclose(made.run(y).mean("x"), session.result().mean("x"), rtol=1e-7)


def test_an_error_says_when_all_hypotheses_have_diverged():
    made = adaptive_filter(
        lambda x, theta: 50 * x**3, 1, DT, initial_mean=[1.0], process_noise_sd=0.1, observation_noise_sd=0.1
    )
    with pytest.raises(DivergenceError, match="all hypotheses have diverged"):
        made.run(np.ones((40, 1)))


def test_hypotheses_need_kalman_states_and_known_names():
    graph = pc.graphs.odem().graph
    with pytest.raises(SettingError, match="needs Kalman states; GeneralisedStateNode 'x' is none"):
        pc.Model(graph, hypotheses=pc.Hypotheses())
    with pytest.raises(SettingError, match="no precision node 'noise'"):
        pc.Model(model(None).graph, hypotheses=pc.Hypotheses(guess=("noise",)))


def test_stopped_elements_are_not_a_number():
    """One of two batch elements explodes under all hypotheses, and the other goes on."""
    made = adaptive_filter(
        lambda x, theta: x**3, 1, DT, initial_mean=[[1e60], [0.1]], process_noise_sd=0.1, observation_noise_sd=0.1
    )
    result = made.run(0.1 * np.ones((2, 20, 1)), on_divergence="stop")
    assert np.isnan(result.mean("x")[0, -1]).all()
    assert np.isfinite(result.mean("x")[1]).all()
    assert result.diverged.at[0] >= 0
    assert result.diverged.at[1] == -1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pc.Hypotheses(process_factors=()), "process_factors must be positive numbers"),
        (lambda: pc.Hypotheses(observation_factors=(1.0, -2.0)), "observation_factors must be positive numbers"),
        (lambda: model("many"), r"hypotheses must be pcnet.Hypotheses\(...\) or None, not 'many'"),
        (lambda: model(process_noise_sd=-1.0), "process_noise_sd is a standard deviation, .* must be positive"),
        (lambda: model(observation_noise_sd=[0.1, 0.0]), "observation_noise_sd is a standard deviation"),
    ],
)
def test_invalid_hypotheses_and_guesses_are_rejected(make, message):
    with pytest.raises(SettingError, match=message):
        make()


@pytest.mark.parametrize("engine", [pytest.param("eager", marks=pytest.mark.slow), "compiled"])
def test_first_guesses_wait_until_something_is_observed(engine):
    """Nothing is observed at first: the states are found as well as if the run had begun later, noise of 0.2 too."""
    y = data(200, seed=4)[:, :1]
    late = np.concatenate([np.full((50, 1), np.nan), y])

    def run(values):
        options = {"mapping": lambda x, _: x[..., :1], "initial_mean": [1.0, 0.0], "initial_sd": 0.3}
        made = adaptive_filter(oscillator, 2, DT, parameter_mean=[1.5], parameter_sd=0.5, **options)
        return made.run(values, engine=engine)

    expected, found = run(y), run(late)
    away = np.abs(found.mean("x")[-100:] - expected.mean("x")[-100:])
    assert (away < found.sd("x")[-100:]).mean() > 0.95
    np.testing.assert_allclose(np.exp(-0.5 * found.mean("noise_y")[-1]), 0.2, rtol=0.25)


def test_hidden_states_in_other_units_are_not_thrown_about_before_the_noise_is_known():
    """Position in millimetres and velocity in metres: at most twice the error of a Kalman filter that is told all."""
    matrix, dt, first_sd, sd_x, sd_y = np.array([[0.0, 1e3], [-4e-3, -0.2]]), 0.05, [20.0, 0.05], [0.0, 0.02], 3.0
    step, noise = exact_transition(matrix, np.square(sd_x), dt)
    rng = np.random.default_rng(0)
    x = [np.array([50.0, 0.0]) + first_sd * rng.normal(size=(20, 2))]
    root = np.linalg.cholesky(noise)
    for _ in range(15):
        x.append(x[-1] @ step.T + rng.normal(size=(20, 2)) @ root.T)
    states = np.stack(x, 1)
    y = states[..., :1] + sd_y * rng.normal(size=(20, 16, 1))
    options = {"mapping": lambda x, _: x[..., :1], "initial_mean": [50.0, 0.0], "initial_sd": first_sd}
    found = adaptive_filter(pc.systems.linear(matrix.tolist()), 2, dt, **options).run(y, engine="eager")
    told = np.empty_like(states)
    for i, series in enumerate(y):
        seen = Kalman(step, noise, np.eye(1, 2), np.eye(1) * sd_y**2, np.array([50.0, 0.0]), np.diag(first_sd) ** 2)
        for k, value in enumerate(series):
            seen.step(value)
            told[i, k] = seen.mean
    error, best = (np.square(each - states)[..., 1].mean() for each in (found.mean("x")[:, :, 0], told))
    assert error < 2 * best


def test_divided_rows_are_the_same_mixture():
    """Three parts have the mean and covariance of the whole, by their weights; others stay as they are."""
    model = adaptive_filter(lambda x, p: p * x**2, 1, 0.1, parameter_mean=[0.5], parameter_sd=0.5, initial_mean=[1.0])
    session = model.start(engine="eager").run(torch.ones(3, 1) + 0.1 * torch.arange(3.0)[:, None])
    before = session.context("x").state.belief
    bent = np.zeros(session._bank.log_weight.shape)
    bent[[1, 7]] = 1.0
    division = reviews.divide(session._bank, bent)
    context = session.context("x")
    index, place = torch.as_tensor(division.source[:, 0]), torch.as_tensor(division.place[:, 0])
    copied, bends = (rows.picked(each, index) for each in (context.state, session.graph["x"].bends(context)))
    after = session.graph["x"].part(copied, bends, place).belief
    weight = torch.as_tensor(np.exp(division.bank.log_weight[:, 0]))
    assert len(place) == session._bank.rows + 4
    assert weight.sum() == pytest.approx(1.0)
    for row in (1, 7):
        mine = index == row
        share = weight[mine] / weight[mine].sum()
        mean = (share[:, None] * after.mean[mine]).sum(0)
        away = after.mean[mine] - mean
        covariance = (share[:, None, None] * (after.covariance[mine] + away[:, :, None] * away[:, None])).sum(0)
        torch.testing.assert_close(mean, before.mean[row])
        torch.testing.assert_close(covariance, before.covariance[row], rtol=1e-6, atol=1e-9)
        assert weight[mine].sum() == pytest.approx(float(np.exp(session._bank.log_weight[row, 0])))
    alone = torch.tensor([i for i in range(session._bank.rows) if i not in (1, 7)])
    torch.testing.assert_close(after.mean[alone], before.mean[alone])


def test_a_parameter_keeps_both_signs_while_nothing_tells_them_apart():
    """Of a drift θ² only the size of θ is seen."""
    known = {"parameter_mean": [0.1], "parameter_sd": 1.0, "initial_mean": [0.0]}
    model = adaptive_filter(lambda x, p: p**2 + 0 * x, 1, 0.1, **known)
    seen = 0.225 * torch.arange(150.0, dtype=torch.float64)[:, None]
    noises = [
        torch.randn(seen.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(8)
    ]
    seen = seen + 0.1 * torch.stack(noises)
    session = model.start(engine="eager").run(seen)
    mean, sd = session.read("theta", "mean")[:, 0], session.read("theta", "sd")[:, 0]
    torch.testing.assert_close(mean**2 + sd**2, torch.full_like(sd, 1.5**2), rtol=0.1, atol=0.0)  # the square is known
    assert (sd > 0.5).sum() >= 2  # a single sign has an sd of about 0.05; by chance, one often falls behind


def begins_at_zero(samples=12, elements=12):
    """A sine with noise, whose first observation happens to be nearly zero; but not in the last element."""
    rng = np.random.default_rng(11)
    truth = np.sin(0.1 * np.arange(samples))
    y = truth + 0.1 * rng.normal(size=(elements, samples))
    y[:-1, 0] = 1e-6
    y[-1, 0] = 1.0
    return truth, y[..., None]


def wave():
    return adaptive_filter(
        pc.systems.linear([[0.0, 1.0], [-1.0, 0.0]]), 2, 0.1, mapping=pc.systems.linear([[1.0, 0.0]])
    )


def test_a_first_observation_near_zero_does_not_make_beliefs_too_sure():
    """Before there are enough observations for a guess of the noise, intervals contain the truth all the same."""
    truth, y = begins_at_zero()
    result = wave().run(y, engine="eager")
    z = (result.mean("x")[..., 0, 0] - truth) / result.sd("x")[..., 0, 0]
    assert (np.abs(z[:-1, 1:]) < 2).mean() > 0.85


def test_elements_with_such_a_beginning_and_others_do_not_affect_each_other(tmp_path):
    _, y = begins_at_zero(10, 3)
    together = wave().start(engine="eager").run(y)
    for i, each in enumerate(y):
        alone = wave().start(engine="eager")
        for k, value in enumerate(each):
            alone.step(value)
            if k in (0, 2):
                alone = pc.resume(alone.save(tmp_path / "run"), wave())
        np.testing.assert_allclose(alone.mean("x").reshape(-1), together.mean("x")[i].reshape(-1), rtol=1e-9)
        np.testing.assert_allclose(alone.sd("x").reshape(-1), together.sd("x")[i].reshape(-1), rtol=1e-9)
