"""Several sensors of one state in the adaptive filter."""

import math

import numpy as np
import pytest

import pcnet as pc
from pcnet.errors import ObservationError, SettingError
from pcnet.graphs import Sensor, adaptive_filter
from pcnet.model.schedule import LevelNodes
from support.kalman import Kalman

DT, EVERY, SDS = 0.05, 10, {"fast": 1.0, "slow": 0.05}
FLOW = np.array([[0.0, 1.0], [-1.0, -0.05]])
POSITION = pc.systems.linear([[1.0, 0.0]])


def world(samples: int, seed: int):
    """States (time, 2) of an oscillator with random forces, and observations of both sensors; NaN where missing."""
    rng = np.random.default_rng(seed)
    x = np.zeros((samples, 2))
    x[0] = 1, 0
    for k in range(1, samples):
        x[k] = x[k - 1] + DT * (FLOW @ x[k - 1]) + (0, math.sqrt(DT) * 0.3 * rng.normal())
    y = {name: x[:, :1] + sd * rng.normal(size=(samples, 1)) for name, sd in SDS.items()}
    y["slow"][np.arange(samples) % EVERY != 0] = np.nan
    return x, y


def sensors(**options):
    return {"fast": Sensor(mapping=POSITION, **options), "slow": Sensor(mapping=POSITION, every=EVERY, **options)}


def textbook(y, process_sd):
    """Means (time, 2) of the Kalman filter that is told everything."""
    f, q = np.eye(2) + DT * FLOW, DT * np.diag(np.square(process_sd))
    g, r = np.array([[1.0, 0.0], [1.0, 0.0]]), np.diag([SDS["fast"] ** 2, SDS["slow"] ** 2])
    kalman, means = Kalman(f, q, g, r, np.array([1.0, 0.0]), 0.01 * np.eye(2)), []
    for each in np.concatenate([y["fast"], y["slow"]], 1):
        kalman.step(each)
        means.append(kalman.mean)
    return np.array(means)


def test_told_everything_it_is_the_kalman_filter_of_both_sensors():
    _, y = world(60, 0)
    noise = {name: Sensor(mapping=POSITION, every=1 if name == "fast" else EVERY, noise_sd=SDS[name]) for name in SDS}
    graph, _ = adaptive_filter(
        pc.systems.linear(FLOW),
        2,
        DT,
        sensors=noise,
        process_noise_sd=[0.1, 0.3],
        initial_mean=[1.0, 0.0],
        initial_sd=0.1,
        integrator="euler",
        hypotheses=None,
    )
    still = pc.adaptive_filtering(levels=[LevelNodes(precisions=(), parameters=())])
    result = pc.Model(graph, still).run(y)
    np.testing.assert_allclose(result.mean("x")[:, 0], textbook(y, [0.1, 0.3]), atol=1e-10)


def test_told_nothing_it_is_nearly_as_good_as_the_filter_that_is_told_everything():
    """Noise levels that differ by a factor of 400 in variance, one sensor at every tenth tick only."""
    model = adaptive_filter(pc.systems.linear(FLOW), 2, DT, sensors=sensors())
    x, y = world(400, 1)
    result = model.run(y)
    later = slice(100, None)
    error = ((result.mean("x")[later, 0] - x[later]) ** 2).mean(0)
    told = ((textbook(y, [1e-6, 0.3])[later] - x[later]) ** 2).mean(0)
    assert np.all(error < 1.5 * told), error / told
    covered = np.abs(result.mean("x")[later, 0] - x[later]) < 2 * result.sd("x")[later, 0]
    assert np.all(covered.mean(0) > 0.85)
    assert np.exp(-0.5 * result.mean("noise_fast")[-1]) == pytest.approx(1.0, rel=0.15)


def test_a_slow_sensor_may_have_one_row_for_each_of_its_own_observations():
    _, y = world(35, 4)
    model = adaptive_filter(
        pc.systems.linear(FLOW), 2, DT, sensors=sensors(noise_sd=0.5), process_noise_sd=0.3, hypotheses=None
    )
    short = model.run({"fast": y["fast"], "slow": y["slow"][::EVERY]})
    np.testing.assert_array_equal(short.mean("x"), model.run(y).mean("x"))
    with pytest.raises(ObservationError, match="differ in length"):
        model.run({"fast": y["fast"], "slow": y["slow"][::5]})


def test_sensors_in_other_units_are_guessed_from_their_own_observations():
    """A sensor whose numbers are 1e5 times as large must not hide the noise of the other one."""
    rng, n = np.random.default_rng(2), 200
    x = np.cumsum(0.05 * rng.standard_normal((n, 1)), 0)
    y = {"a": x + 0.1 * rng.standard_normal((n, 1)), "b": 1e5 * (x + 0.1 * rng.standard_normal((n, 1)))}
    pair = {"a": Sensor(), "b": Sensor(mapping=lambda x, theta: 1e5 * x)}
    result = adaptive_filter(lambda x, theta: 0 * x, 1, 1.0, sensors=pair).run(y)
    assert np.exp(-0.5 * result.mean("noise_a")[-1]) == pytest.approx(0.1, rel=0.3)
    assert np.exp(-0.5 * result.mean("noise_b")[-1]) == pytest.approx(1e4, rel=0.3)


def test_a_session_with_several_sensors_can_be_saved_in_the_opening(tmp_path):
    model = adaptive_filter(pc.systems.linear(FLOW), 2, DT, sensors=sensors())
    _, y = world(40, 3)
    whole = model.run(y)
    session = model.start().run({name: each[:9] for name, each in y.items()})
    session.save(tmp_path / "run.safetensors")
    again = pc.resume(tmp_path / "run.safetensors", model).run({name: each[9:] for name, each in y.items()})
    np.testing.assert_allclose(again.result().mean("x"), whole.mean("x"), rtol=1e-9)


def test_errors_say_what_to_do_instead():
    flow = pc.systems.linear(FLOW)
    with pytest.raises(SettingError, match="give mapping of each of them"):
        adaptive_filter(flow, 2, DT, sensors=sensors(), mapping=POSITION)
    with pytest.raises(SettingError, match="sensors are Sensors by name"):
        adaptive_filter(flow, 2, DT, sensors={"gps": 2})
    with pytest.raises(SettingError, match="give that one every=1"):
        adaptive_filter(flow, 2, DT, sensors={"gps": Sensor(every=2)})
    with pytest.raises(SettingError, match="3 channels of a state of dimension 2 need a mapping"):
        adaptive_filter(flow, 2, DT, sensors={"gps": Sensor(channels=3)})
    with pytest.raises(SettingError, match="the mapping has 1 outputs, not 2 channels"):
        adaptive_filter(flow, 2, DT, sensors={"gps": Sensor(mapping=POSITION, channels=2)})
    with pytest.raises(SettingError, match="'x' is the name of another node"):
        adaptive_filter(flow, 2, DT, sensors={"x": Sensor()})
    with pytest.raises(SettingError, match="noise_sd of each sensor"):
        adaptive_filter(flow, 2, DT, sensors={"gps": Sensor()}, hypotheses=None)
