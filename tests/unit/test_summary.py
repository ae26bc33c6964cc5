"""Tables of a result: the summary in words and numbers, tidy frames, draws for ArviZ, and warnings of a run."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import ResultError
from pcnet.graphs import Sensor, adaptive_filter
from pcnet.results.result import Prior
from pcnet.results.summary import rounded
from support.recorded import paper_run, stack_run


def test_the_table_has_the_last_beliefs_and_their_distance_from_the_priors():
    result = paper_run()
    table = result.summary(0.9).to_dataframe()
    assert list(table.node.unique()) == ["x", "theta", "lambda_x", "lambda_y"]
    theta = table[table.node == "theta"]
    mean, sd = result.mean("theta"), result.sd("theta")
    np.testing.assert_array_equal(theta["mean"], mean[-1])
    np.testing.assert_allclose(theta["upper"] - theta["lower"], 2 * 1.6448536 * sd[-1], rtol=1e-6)
    prior = np.array([0.3, -0.2, 0.3])  # that of the paper's model, with its sd
    np.testing.assert_allclose(result.priors["theta"].mean, prior)
    np.testing.assert_allclose(theta["change"], (mean[-1] - prior) / result.priors["theta"].sd)
    np.testing.assert_allclose(theta["moved"], np.abs(mean[-1] - mean[-16]) / sd[-1])  # the last tenth of 150
    levels = table[table.node == "lambda_y"]
    np.testing.assert_allclose(levels["noise_sd"], np.exp(-0.5 * result.mean("lambda_y")[-1]))
    text = str(result.summary(0.9))
    assert "150 observations" in text
    assert "90 % interval" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("theta[0]"))
    assert row[1] == rounded(mean[-1, 0], sd[-1, 0])


def test_priors_are_in_the_file(tmp_path):
    result = paper_run()
    loaded = pc.Result.load(result.save(tmp_path / "run.nc"))
    assert str(loaded.summary()) == str(result.summary())


@pytest.mark.parametrize(
    ("value", "sd", "text"),
    [
        (0.123456, 0.0123, "0.123"),
        (-3.14159, 0.5, "-3.14"),
        (1234.5, 60, "1234"),
        (2.0, math.nan, "2"),
        (1e9, 1e7, "1e+09"),
    ],
)
def test_numbers_have_the_digits_that_are_known(value, sd, text):
    assert rounded(value, sd) == text


def test_notes_say_what_to_do():
    result = paper_run()
    sd = result.sd("theta")[-1]
    at_prior = dataclasses.replace(result, priors={"theta": Prior(result.mean("theta")[-1], sd)})
    assert "theta[0] is where its prior was (100 % of the prior sd is left)" in str(at_prior.summary())
    far = dataclasses.replace(result, priors={"theta": Prior(result.mean("theta")[-1] + 5 * sd, sd)})
    assert "theta[2] ended 5.0 prior sds from its prior mean" in str(far.summary())


def still(x, theta):
    return -x + 0.0 * theta


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_warns_of_a_parameter_without_effect_and_of_empty_data():
    model = adaptive_filter(
        *(still, 1, 0.1),
        **{"parameter_mean": [0.5], "parameter_sd": 1.0, "hypotheses": None},
        **{"process_noise_sd": 1.0, "observation_noise_sd": 1.0},
    )
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(200, 1, generator=generator)
    with pytest.warns(UserWarning, match="theta is where its prior was"):
        model.run(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.run(data[:199])  # too few to say so
    with pytest.warns(UserWarning, match="all values of 'y' are NaN"):
        model.run(torch.full((5, 1), torch.nan))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_warns_of_any_batch_element(recwarn):
    """Of two elements only the second is too fast, unseen, or far from its prior."""

    def run(rates, data):
        options = {"parameter_mean": rates, "parameter_sd": 1e-3, "hypotheses": None, "initial_mean": [1.0]}
        levels = {"process_noise_sd": 1.0, "observation_noise_sd": 1.0}
        adaptive_filter(lambda x, theta: -theta * x, 1, 0.1, **options, **levels).run(data)
        texts = [str(each.message) for each in recwarn]
        recwarn.clear()
        return "\n".join(texts)

    data = torch.randn(2, 200, 1, generator=torch.Generator().manual_seed(0))
    assert "|λ|dt = 40" in run([[0.5], [400.0]], data[:, :3])
    data[1] = torch.nan
    texts = run([[0.5], [0.6]], data)
    assert "all values of 'y' in 1 of 2 batch elements are NaN" in texts
    assert "(batch element 0; 2 of 2 in all)" in texts
    data[1] = 1e5 * 1.05 ** torch.arange(200)[:, None]  # it grows, so that its rate is negative
    texts = run([[0.5], [0.6]], data)
    assert "larger prior sd (parameter_sd of adaptive_filter, sd of a ParameterNode) (batch element 1; 1 of 2" in texts


def test_a_run_warns_of_a_sensor_without_data_and_of_times_in_other_units():
    levels = {"hypotheses": None, "process_noise_sd": 1.0}
    sensors = {"a": Sensor(noise_sd=1.0), "b": Sensor(noise_sd=1.0)}
    model = adaptive_filter(lambda x, _: -x, 1, 0.1, sensors=sensors, **levels)
    with pytest.warns(UserWarning, match="all values of 'b' are NaN, or were not given"):
        model.run({"a": np.zeros((12, 1))}, engine="eager")
    with pytest.warns(UserWarning, match="times are 100 apart, and dt is 0.1: give both in the same unit"):
        model.run({"a": np.zeros((12, 1)), "b": np.zeros((12, 1))}, times=100.0 * np.arange(12), engine="eager")


def test_a_tidy_table_has_one_row_for_each_variable_and_time():
    result = stack_run()
    table = result.to_dataframe()
    x = table[(table.node == "x1") & (table.order == 1) & (table.dimension == 0)]
    np.testing.assert_array_equal(x["mean"], result.mean("x1")[:, 1, 0])
    np.testing.assert_array_equal(x["sd"], result.sd("x1")[:, 1, 0])
    np.testing.assert_allclose(x["time"], result.times)
    y = table[(table.node == "y") & (table.order == 0) & (table.dimension == 1)]
    np.testing.assert_array_equal(y["observation"], result.observation("y")[:, 0, 1])
    assert not table.duplicated(["time", "node", "order", "dimension"]).any()


def test_draws_for_arviz_have_the_moments_of_the_beliefs():
    az = pytest.importorskip("arviz")
    result = paper_run()
    data = result.to_inference_data(draws=4000, chains=2, seed=1)
    table = az.summary(data, var_names=["theta"], round_to="none")
    mean, sd = result.mean("theta")[-1], result.sd("theta")[-1]
    np.testing.assert_allclose(table["mean"], mean, atol=4 * sd.max() / np.sqrt(8000))
    np.testing.assert_allclose(table["sd"], sd, rtol=0.05)
    np.testing.assert_allclose(data.prior["theta"].std(("chain", "draw")), result.priors["theta"].sd, rtol=0.05)
    assert data.observed_data["y"].shape == (150, 3)
    with pytest.raises(ResultError, match="draws must be a whole number"):
        result.to_inference_data(draws=0)


def test_a_forecast_is_drawn_after_what_was_observed():
    session = adaptive_filter(
        *(pc.systems.lotka_volterra, 3, 0.01),
        **{"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25, "hypotheses": None},
        **{"process_noise_sd": 0.05, "observation_noise_sd": 0.1},
    ).start()
    world = pc.simulate.glv_process(30, noise="white", seed=1)
    session.run(world.observations[:20])
    found = session.forecast(0.1)
    figure = found.plot(session.result(), nodes=["x"], truth={"x": world.states[20:]})
    assert [ax.get_ylabel() for ax in figure.axes] == ["x$_{1}$", "x$_{2}$", "x$_{3}$"]
    lines = figure.axes[1].lines
    np.testing.assert_allclose(lines[1].get_ydata(), found.mean("x")[:, 1])
    np.testing.assert_allclose(lines[2].get_ydata(), world.states[20:, 1])
    with pytest.raises(ResultError, match="truth is given for 'y'"):
        found.plot(nodes=["x"], truth={"y": world.states[20:]})
    with pytest.raises(ResultError, match="no batch element 3"):
        found.plot(element=3)


def test_parts_of_the_figure():
    result = paper_run()
    figure = result.plot(parts=["parameters", "free energy"])
    (column,) = figure.subfigs
    assert [ax.get_ylabel().split("\n")[0] for ax in column.axes] == ["parameter", "free energy (nats)"]
    with pytest.raises(ResultError, match="no part 'theta' of the figure; parts: states, causes"):
        result.plot(parts=["theta"])
