"""Figures against the arrays they show: lines, bands, labels and limits."""

from statistics import NormalDist

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

import pcnet as pc
from pcnet.errors import ResultError
from pcnet.graphs import odem
from pcnet.results import plots as plotting
from pcnet.results.result import Result, Trace
from pcnet.simulate import GLV_PARAMETERS, glv_process

RNG = np.random.default_rng(0)
STATE, SENSE, SLOW, ENERGY = ("order", "dimension"), ("order", "dimension"), ("dimension",), ()


def result(batch=(), times=50, every=1, dt=0.1, dim=2, **changes):
    """A result of made-up numbers with one node of each kind; `changes` replaces traces."""

    def numbers(*own):
        return RNG.normal(size=(*batch, times, *own))

    traces = {
        "x.mean": Trace(numbers(2, dim), STATE),
        "x.sd": Trace(np.exp(numbers(2, dim)), STATE),
        "y.observation": Trace(numbers(1, dim), SENSE),
        "y.prediction": Trace(numbers(1, dim), SENSE),
        "a.mean": Trace(numbers(3), SLOW),
        "a.sd": Trace(np.exp(numbers(3)), SLOW),
        "noise.mean": Trace(numbers(1), SLOW),
        "noise.sd": Trace(np.exp(numbers(1)), SLOW),
        "accuracy": Trace(numbers(), ENERGY),
        "complexity": Trace(numbers(), ENERGY),
    }
    return Result(
        traces=traces | {key.replace("__", "."): value for key, value in changes.items()},
        batch_shape=batch,
        times=dt * (np.arange(times) * every + every - 1),
        free_action=RNG.normal(size=batch),
        fallbacks={},
        observations=times * every,
        roles={"x": "state", "y": "sensory", "a": "parameter", "noise": "precision"},
        graph="",
        schedule="",
    )


def lines(ax):
    return [np.asarray(line.get_ydata()) for line in ax.get_lines()]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def bands(ax):
    return [c.get_paths()[0].vertices for c in ax.collections if isinstance(c, PolyCollection)]


def all_axes(figure):
    return [ax for sub in figure.subfigs for ax in sub.axes]


@pytest.fixture(autouse=True)
def _nothing_global_is_touched():
    before = dict(mpl.rcParams)
    yield
    assert dict(mpl.rcParams) == before
    import matplotlib.pyplot as plt

    assert plt.get_fignums() == []


# --- panels ----------------------------------------------------------------------------------------------------------
def test_states_are_drawn_with_their_intervals_and_the_truth():
    made, truth = result(), RNG.normal(size=(50, 2))
    ax = plotting.states(made, truth=truth, probability=0.9)
    drawn = lines(ax)
    assert [len(line) for line in drawn] == [50] * 4
    for i in range(2):
        np.testing.assert_array_equal(drawn[i], made.mean("x")[:, 0, i])
        np.testing.assert_array_equal(drawn[2 + i], truth[:, i])
    reach = NormalDist().inv_cdf(0.95)
    for i, outline in enumerate(bands(ax)):
        mean, sd = made.mean("x")[:, 0, i], made.sd("x")[:, 0, i]
        assert outline[:, 1].max() == pytest.approx((mean + reach * sd).max())
        assert outline[:, 1].min() == pytest.approx((mean - reach * sd).min())
    assert legend(ax) == ["x$_{1}$", "x$_{2}$", "90 % interval", "truth"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time", "state")


def test_velocities_are_the_second_order():
    made = result()
    ax = plotting.states(made, "x", order=1, dimensions=[1], labels=["speed"])
    (line,) = lines(ax)
    np.testing.assert_array_equal(line, made.mean("x")[:, 1, 1])
    assert legend(ax) == ["speed", "95 % interval"]
    assert ax.get_ylabel() == "state, derivative 1"


def test_observations_are_dots_and_predictions_lines():
    made = result()
    ax = plotting.sensations(made)
    dots = [line for line in ax.get_lines() if line.get_linestyle() == "None"]
    predicted = [line for line in ax.get_lines() if line.get_linestyle() == "-"]
    for i in range(2):
        np.testing.assert_array_equal(dots[i].get_ydata(), made.observation("y")[:, 0, i])
        np.testing.assert_array_equal(predicted[i].get_ydata(), made.prediction("y")[:, 0, i])
        assert dots[i].get_color() == predicted[i].get_color()
    assert legend(ax) == ["y$_{1}$", "y$_{2}$", "observed"]


def test_true_parameters_are_level_lines_in_the_colour_of_the_estimate():
    made = result()
    ax = plotting.parameters(made, truth=[0.2, -0.4, 0.1])
    believed, true = ax.get_lines()[:3], ax.get_lines()[3:]
    for estimate, level, value in zip(believed, true, [0.2, -0.4, 0.1], strict=True):
        assert set(level.get_ydata()) == {value}
        assert list(level.get_xdata()) == [made.times[0], made.times[-1]]
        assert level.get_color() == estimate.get_color()
    assert ax.get_ylabel() == "parameter"


def test_a_single_channel_has_the_name_of_its_node():
    ax = plotting.precisions(result(), truth={"noise": 2.0})
    assert legend(ax) == ["noise", "95 % interval", "truth"]
    assert ax.get_ylabel() == "log-precision"


def test_the_free_energy_is_drawn_with_its_parts():
    made = result()
    drawn = lines(plotting.free_energy(made))
    accuracy, complexity = made.traces["accuracy"].values, made.traces["complexity"].values
    for line, expected in zip(drawn, [-accuracy, complexity, complexity - accuracy], strict=True):
        np.testing.assert_allclose(line, expected)


def test_a_panel_uses_the_given_axes():
    ax = Figure().subplots()
    assert plotting.parameters(result(), ax=ax) is ax


# --- long runs -------------------------------------------------------------------------------------------------------
def test_long_lines_are_downsampled_and_keep_their_extremes():
    walk = RNG.normal(size=(60_000, 2, 1))
    walk[31_234, 0, 0], walk[7, 0, 0] = 9.0, -9.0
    made = result(times=60_000, dim=1, x__mean=Trace(walk, STATE))
    (line,) = plotting.states(made).get_lines()
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert len(y) < 5000
    assert (y.max(), y.min()) == (9.0, -9.0)
    assert x[y.argmax()] == made.times[31_234]
    assert (x[0], x[-1]) == (made.times[0], made.times[-1])
    steps = np.searchsorted(made.times, x)
    np.testing.assert_array_equal(y, walk[steps, 0, 0])
    for begin in range(0, 60_000, 1000):  # every interval keeps its own
        inside = (steps >= begin) & (steps < begin + 1000)
        assert y[inside].max() == walk[begin : begin + 1000, 0, 0].max()


def test_gaps_in_a_long_line_stay_gaps():
    walk = RNG.normal(size=(60_000, 2, 1))
    walk[20_000:30_000] = np.nan
    made = result(times=60_000, dim=1, x__mean=Trace(walk, STATE))
    (line,) = plotting.states(made).get_lines()
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    inside = (x > made.times[20_000]) & (x < made.times[29_999])
    assert inside.any()
    assert np.isnan(y[inside]).all()


def test_a_large_first_free_energy_is_cut_off_and_labelled():
    complexity = RNG.normal(size=2000)
    complexity[:5] = 1e7
    made = result(times=2000, complexity=Trace(complexity, ENERGY), accuracy=Trace(np.zeros(2000), ENERGY))
    ax = plotting.free_energy(made)
    low, high = ax.get_ylim()
    assert -20 < low < high < 20
    assert ax.get_ylabel() == "free energy (nats)\n0.25 % off the axis"


def test_nothing_is_cut_off_without_extremes():
    made = result()
    ax = plotting.states(made)
    low, high = ax.get_ylim()
    reach = NormalDist().inv_cdf(0.975) * made.sd("x")[:, 0]
    assert low < (made.mean("x")[:, 0] - reach).min()
    assert high > (made.mean("x")[:, 0] + reach).max()
    assert "off the axis" not in ax.get_ylabel()


def test_long_excursions_are_not_cut_off():
    complexity = np.zeros(2000)
    complexity[:100] = 1e7
    made = result(times=2000, complexity=Trace(complexity, ENERGY), accuracy=Trace(np.zeros(2000), ENERGY))
    assert plotting.free_energy(made).get_ylim()[1] > 1e7


def test_long_free_energies_are_drawn_by_means_and_extremes():
    complexity = RNG.normal(size=5000)
    made = result(times=5000, complexity=Trace(complexity, ENERGY), accuracy=Trace(np.zeros(5000), ENERGY))
    ax = plotting.free_energy(made)
    np.testing.assert_allclose(lines(ax)[-1], complexity.reshape(250, 20).mean(1))
    assert bands(ax)[-1][:, 1].max() == complexity.max()
    assert legend(ax)[-1] == "range of 20 observations"


# --- batches, truths, channels ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("element", "index"), [(0, (0, 0)), (4, (1, 1)), ((1, 2), (1, 2)), (-1, (1, 2))])
def test_an_element_of_a_batch_can_be_selected(element, index):
    made, truth = result(batch=(2, 3)), RNG.normal(size=(2, 3, 50, 2))
    drawn = lines(plotting.states(made, truth=truth, element=element))
    np.testing.assert_array_equal(drawn[0], made.mean("x")[(*index, slice(None), 0, 0)])
    np.testing.assert_array_equal(drawn[2], truth[(*index, slice(None), 0)])
    levels = RNG.normal(size=(2, 3, 3))
    assert lines(plotting.parameters(made, truth=levels, element=element))[3][0] == levels[index][0]


def test_a_truth_at_every_observation_is_drawn_at_its_own_times():
    made, truth = result(times=10, every=4, dt=0.5), torch.randn(40, 2, dtype=torch.float64)
    line = plotting.states(made, truth=truth).get_lines()[-1]
    np.testing.assert_allclose(line.get_xdata(), 0.5 * np.arange(40))
    np.testing.assert_array_equal(line.get_ydata(), truth[:, 1])


def test_the_number_of_channels_is_limited_and_labelled():
    ax = plotting.states(result(dim=9))
    assert len(ax.get_lines()) == len(set(plotting.COLOURS)) == 6
    assert ax.get_ylabel() == "state\n6 of 9"
    assert len({line.get_color() for line in ax.get_lines()}) == 6


# --- one page --------------------------------------------------------------------------------------------------------
def test_an_overview_has_a_panel_for_everything():
    made = result()
    figure = made.plot(truth=RNG.normal(size=(50, 2)), true_parameters=[1.0, 2.0, 3.0], title="A run")
    labels = [ax.get_ylabel() for ax in all_axes(figure)]
    assert labels == ["x$_{1}$", "x$_{2}$", "observation", "parameter", "log-precision", "free energy (nats)"]
    assert figure.get_suptitle() == "A run"
    bottoms = [sub.axes[-1].get_xlabel() for sub in figure.subfigs]
    assert bottoms == ["time", "time"]


def test_an_overview_takes_labels_by_node():
    figure = plotting.overview(result(dim=8), labels={"a": ["α", "β", "γ"], "x": list("ABCDEFGH")})
    states, _, parameters = all_axes(figure)[:3]
    assert set(legend(states)) == {*"ABCDEF", "95 % interval"}
    assert legend(parameters)[:3] == ["α", "β", "γ"]


def test_the_caption_has_the_free_action_of_the_element():
    made = result(batch=(3,))
    made.free_action = np.array([1.0, -1234.4, 2.0])
    assert made.plot(element=1).get_suptitle() == "50 observations, batch element 1: free action −1,234 nats"


def test_a_batched_run_is_saved_as_a_picture(tmp_path):
    process = glv_process(70, noise="white", seed=[0, 1])
    graph, schedule = odem(kappa=torch.tensor([1.0, 2.0]))
    made = graph.run(process.observations, schedule)
    figure = made.plot(truth=process.states, true_parameters=GLV_PARAMETERS, element=1)
    path = tmp_path / "run.png"
    figure.savefig(path, dpi=60)
    assert path.read_bytes().startswith(b"\x89PNG")
    labels = [ax.get_ylabel().splitlines()[0] for ax in all_axes(figure)]
    assert labels[:3] == ["x$_{1}$", "x$_{2}$", "x$_{3}$"]


def test_a_run_of_one_observation_can_be_drawn(tmp_path):
    graph, schedule = odem()
    graph.run(glv_process(1, seed=0).observations, schedule).plot().savefig(tmp_path / "one.png")


# --- what is refused -------------------------------------------------------------------------------------------------
def test_missing_recordings_are_named():
    graph, schedule = odem()
    made = graph.run(glv_process(3, seed=0).observations, schedule, record=["mean"])
    with pytest.raises(ResultError, match="'sd' of 'x' was not recorded"):
        plotting.states(made)
    with pytest.raises(ResultError, match="complexity was not recorded"):
        plotting.free_energy(made)
    with pytest.raises(ResultError, match="'observation' of 'y' was not recorded"):
        plotting.sensations(made)
    with pytest.raises(ResultError, match="not recorded"):
        made.plot()


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda r: plotting.states(r, "y"), "no state node 'y'; state nodes: x"),
        (lambda r: plotting.states(r, element=1), "no batch element 1"),
        (lambda r: plotting.states(r, order=2), "orders 0 to 1"),
        (lambda r: plotting.states(r, truth=np.zeros((7, 2))), "truth of 'x' has shape"),
        (lambda r: plotting.states(r, truth={"z": np.zeros((50, 2))}), "given for 'z'"),
        (lambda r: plotting.states(r, dimensions=[5]), "dimensions must be from 0 to 1"),
        (lambda r: plotting.states(r, labels=["one"]), "1 labels are given for 2 lines"),
        (lambda r: plotting.states(r, probability=1.5), "between 0 and 1"),
        (lambda r: plotting.parameters(r, truth=[1.0, 2.0]), "truth of 'a' has shape"),
    ],
)
def test_invalid_arguments_are_named(draw, words):
    with pytest.raises(ResultError, match=words):
        draw(result())


def test_a_role_without_nodes_is_omitted_from_the_overview_and_rejected_alone():
    made = result()
    made.roles = {"x": "state", "y": "sensory"}
    labels = [ax.get_ylabel() for ax in all_axes(plotting.overview(made))]
    assert labels == ["x$_{1}$", "x$_{2}$", "observation", "free energy (nats)"]
    with pytest.raises(ResultError, match="no parameter node"):
        plotting.parameters(made)


def test_a_record_of_few_observations_can_be_drawn():
    graph, schedule = odem()
    process = glv_process(30, seed=0)
    made = graph.run(process.observations, schedule, record=pc.Record(every=7))
    line = plotting.states(made, truth=process.states).get_lines()[-1]
    np.testing.assert_allclose(line.get_xdata(), process.times, atol=1e-12)
