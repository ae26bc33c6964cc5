"""Stacks of Kalman levels and categories, against Kalman filters of the joint state and sums over all paths."""

import itertools
import math

import jsonschema
import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import GraphError, SettingError
from pcnet.functions.closed_form import Linear
from pcnet.graphs import Level, hierarchy
from pcnet.io import strict_yaml
from pcnet.io.model_files import json_schema
from pcnet.model.schedule import LevelNodes, adaptive_filtering
from pcnet.nodes import CategoricalNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.dwell_time import DwellTime
from pcnet.numerics.estimators import Newton, RobbinsMonro
from pcnet.numerics.kernels import SquaredExponential, White
from support.kalman import DT, STILL, Kalman, transition
from support.levels import CRUISE, OBSERVATIONS, STAY, VALUES, switching
from support.paths import DATA


def velocity_stack(*above: Level, every: int = 5) -> pc.Model:
    """A position whose velocity the levels above predict, with all noises known."""
    lowest = Level(
        CRUISE, 1, parameter_mean=[0.0], parameter_sd=1e-7, process_noise_sd=0.5, initial_mean=[0.0], initial_sd=0.5
    )
    return hierarchy(lowest, *above, dt=DT, observation_noise_sd=math.exp(-0.5), learn_noise_y=False, every=every)


def filter_of_both(matrix: np.ndarray, variance, first: np.ndarray, every: int = 5, noise: float = 1.0):
    """Mean, covariance and log-evidence of position and velocity (and what moves it), which change after each window.

    noise: factor of the variance of the observations.
    """
    n = len(matrix)
    f = np.eye(1 + n)
    f[0, 1] = DT
    q, g = np.zeros((1 + n, 1 + n)), np.eye(1, 1 + n)
    q[0, 0] = 0.25 * DT
    mean, covariance = np.zeros(1 + n), np.zeros((1 + n, 1 + n))
    covariance[0, 0], covariance[1:, 1:] = 0.25, first
    oracle = Kalman(f, q, g, np.array([[noise * math.exp(-1.0)]]), mean, covariance)
    last = 0
    for t, y in enumerate(OBSERVATIONS):
        oracle.step(y)
        if (t + 1) % every == 0:
            window, added = np.eye(1 + n), np.zeros((1 + n, 1 + n))
            window[1:, 1:], added[1:, 1:] = transition(matrix, variance, DT * (t - last))
            oracle.mean, oracle.covariance = window @ oracle.mean, window @ oracle.covariance @ window.T + added
            last = t
        yield oracle.mean.copy(), oracle.covariance.copy(), oracle.log_evidence


def test_a_random_walk_above_equals_the_joint_kalman_filter():
    """Exact, for every message of a window up and down."""
    walk = Level(Linear([[0.0]]), 1, process_noise_sd=0.3, initial_mean=[0.0], initial_sd=2.0)
    result = velocity_stack(walk).graph.run(OBSERVATIONS, velocity_stack(walk).schedule, record=["mean", "sd"])
    oracle = list(filter_of_both(np.zeros((1, 1)), 0.09, np.array([[4.0]])))
    for t in range(4, len(OBSERVATIONS), 5):
        mean, covariance, _ = oracle[t]
        np.testing.assert_allclose(result.mean("theta1")[t], mean[1:], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(result.sd("theta1")[t] ** 2, covariance[1:, 1], rtol=1e-6)
        np.testing.assert_allclose(result.mean("x1")[t, 0], mean[:1], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(result.sd("x1")[t, 0] ** 2, covariance[:1, 0], rtol=1e-6)


def test_hypotheses_about_the_observation_noise_are_those_of_joint_kalman_filters():
    """Two rows whose observation variances differ by 9: their evidence, and the mixture of two joint filters."""
    walk = Level(Linear([[0.0]]), 1, process_noise_sd=0.3, initial_mean=[0.0], initial_sd=2.0)
    lowest = Level(
        CRUISE, 1, parameter_mean=[0.0], parameter_sd=1e-7, process_noise_sd=0.5, initial_mean=[0.0], initial_sd=0.5
    )
    two = pc.Hypotheses(observation_factors=(1.0, 9.0), observation_tilt=0.0, outliers=0.0, drop=1e9, merge=0.0)
    model = hierarchy(lowest, walk, dt=DT, observation_noise_sd=math.exp(-0.5), every=5, noise_sd=1e-9, hypotheses=two)
    assert model.hypotheses.told == ("noise1", "noise2")
    result = model.run(OBSERVATIONS, record=["mean", "sd", "energy"])
    filters = [filter_of_both(np.zeros((1, 1)), 0.09, np.array([[4.0]]), noise=factor) for factor in (1.0, 9.0)]
    rows = [list(each) for each in filters]
    evidence = np.array([[moments[2] for moments in each] for each in rows])
    total = np.logaddexp.reduce(evidence, 0)
    np.testing.assert_allclose(result.accuracy.cumsum(), total - math.log(2), rtol=1e-6, atol=1e-6)
    weight = np.exp(evidence - total)
    for t in range(4, len(OBSERVATIONS), 5):
        means = np.array([each[t][0] for each in rows])
        mean = weight[:, t] @ means
        np.testing.assert_allclose(result.mean("theta1")[t], mean[1:], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(result.mean("x1")[t, 0], mean[:1], rtol=1e-6, atol=1e-7)


def spring(x, k):
    return torch.stack([x[..., 1], -k[..., 0] * x[..., 0] - 0.1 * x[..., 1]], -1)


def drifting(process, observation, learn=True, hypotheses=None):
    """A spring whose stiffness walks, seen in its position."""
    first = {"parameter_mean": [2.0], "parameter_sd": 0.02, "process_noise_sd": process, "learn_noise": learn}
    return hierarchy(
        Level(spring, 2, mapping=Linear([[1.0, 0.0]]), **first),
        Level(Linear([[0.0]]), 1, initial_mean=[2.0], initial_sd=0.5, process_noise_sd=0.15),
        dt=0.05,
        channels=1,
        observation_noise_sd=observation,
        learn_noise_y=learn,
        every=20,
        hypotheses=hypotheses,
    )


def test_no_first_guess_of_the_noise_is_needed():
    """Errors of states and stiffness are nearly those of a filter that is told all noise levels."""
    rng, x, k, rows = np.random.default_rng(3006), np.array([1.0, 0.0]), 2.0, []
    for t in range(450):
        rows.append([*x, k, x[0] + 0.1 * rng.standard_normal()])
        k += 0.15 * rng.standard_normal() * (t % 20 == 19)
        for _ in range(5):
            change = 0.01 * np.array([x[1], -k * x[0] - 0.1 * x[1]])
            x = x + change + 0.1 * np.array([0.05, 0.3]) * rng.standard_normal(2)
    truth, seen = np.array(rows)[:, :3], np.array(rows)[:, 3:]
    errors = []
    few = pc.Hypotheses(process_factors=(0.04, 1.0, 25.0), observation_factors=(0.04, 1.0, 25.0), outliers=0.0)
    for model in (drifting([0.05, 0.3], 0.1, learn=False), drifting(None, None, hypotheses=few)):
        result = model.run(seen, record=["mean"], engine="eager")
        found = np.concatenate([result.mean("x1")[:, 0], result.mean("x2")[:, 0]], 1)
        errors.append(np.square(found - truth)[200:].mean(0))
    told, without = errors
    assert (without < 1.25 * told).all()
    assert np.exp(-0.5 * result.mean("noise_y")[-1, 0]) == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("freedom", [1e-7, 0.3, 2.0])
def test_parameters_that_deviate_from_the_level_above_equal_the_joint_kalman_filter(freedom):
    """Position, θ = velocity above + deviation, and that velocity: exact in the first window and at its end."""
    lowest = Level(
        CRUISE,
        1,
        parameter_mean=[0.0],
        parameter_sd=freedom,
        process_noise_sd=0.5,
        initial_mean=[0.0],
        initial_sd=0.5,
    )
    walk = Level(Linear([[0.0]]), 1, process_noise_sd=0.3, initial_mean=[0.2], initial_sd=1.5)
    model = hierarchy(lowest, walk, dt=DT, observation_noise_sd=math.exp(-0.5), learn_noise_y=False, every=5)
    result = model.run(OBSERVATIONS[:5], record=["mean", "sd", "energy"])
    f, first = np.eye(3), np.zeros((3, 3))
    f[0, 1] = DT
    first[0, 0], first[1:, 1:] = 0.25, 2.25
    first[1, 1] += freedom**2
    q, r = np.diag([0.25 * DT, 0.0, 0.0]), np.array([[math.exp(-1.0)]])
    oracle = Kalman(f, q, np.eye(1, 3), r, np.array([0.0, 0.2, 0.2]), first)
    for t in range(5):
        oracle.step(OBSERVATIONS[t])
        if t == 4:  # the velocity moves, and the next θ deviates anew
            window = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
            oracle.mean, oracle.covariance = window @ oracle.mean, window @ oracle.covariance @ window.T
            oracle.covariance[1:, 1:] += 0.09 * 4 * DT
            oracle.covariance[1, 1] += freedom**2
        found = [result.mean("x1")[t, 0, 0], result.mean("theta1")[t, 0]]
        sd = [result.sd("x1")[t, 0, 0], result.sd("theta1")[t, 0]]
        np.testing.assert_allclose(found, oracle.mean[:2], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(sd, np.sqrt(np.diag(oracle.covariance)[:2]), rtol=1e-8)
    np.testing.assert_allclose(result.mean("x2")[-1, 0, 0], oracle.mean[2], rtol=1e-8)
    np.testing.assert_allclose(result.sd("x2")[-1, 0, 0], math.sqrt(oracle.covariance[2, 2]), rtol=1e-8)
    assert result.accuracy.sum() == pytest.approx(oracle.log_evidence, rel=1e-9)


def test_an_oscillator_above_is_close_to_the_joint_kalman_filter():
    """Exact in the first window.

    Then the correlation of the position with the hidden part of the oscillator is not passed on, which costs some
    certainty.
    """
    turn = np.array([[0.0, 1.3], [-1.3, 0.0]])
    above = Level(
        Linear(turn),
        2,
        mapping=Linear([[1.0, 0.0]]),
        process_noise_sd=[0.2, 50**-0.5],
        initial_mean=[0.0, 0.0],
        initial_sd=[0.7, 1.1],
    )
    model = velocity_stack(above)
    result = model.graph.run(OBSERVATIONS, model.schedule, record=["mean", "sd"])
    oracle = list(filter_of_both(turn, [1 / 25, 1 / 50], np.diag([0.49, 1.21])))
    for t in range(4, len(OBSERVATIONS), 5):
        mean, covariance, _ = oracle[t]
        sd = np.sqrt(np.diag(covariance))
        found, believed = (np.r_[of("x1")[t, 0], of("x2")[t, 0]] for of in (result.mean, result.sd))
        if t == 4:
            np.testing.assert_allclose(found, mean, rtol=1e-5)
            np.testing.assert_allclose(believed, sd, rtol=1e-5)
        assert (np.abs(found - mean) < 0.6 * sd).all()
        assert (believed > 0.85 * sd).all()
        assert (believed < 1.8 * sd).all()


def test_three_levels_have_three_clocks():
    """Clocks of 1, 4 and 16 observations."""
    middle = Level(CRUISE, 1, parameter_mean=[0.0], parameter_sd=0.1, process_noise_sd=0.1, initial_mean=[0.0])
    top = Level(Linear([[-0.1]]), 1, process_noise_sd=0.1, initial_mean=[0.0])
    model = velocity_stack(middle, top, every=4)
    assert set(model.graph.nodes) == {
        "x1",
        "x2",
        "x3",
        "y",
        "theta1",
        "theta2",
        "noise1",
        "noise2",
        "noise3",
        "noise_y",
    }
    result = model.graph.run(OBSERVATIONS, model.schedule, record=["mean"])
    moved = {name: np.flatnonzero(np.diff(result.mean(name).reshape(40, -1)[:, 0])) + 2 for name in ("x1", "x2", "x3")}
    assert (moved["x2"] % 4 == 0).all()
    assert (moved["x3"] % 16 == 0).all()
    assert len(moved["x1"]) == 39
    assert len(moved["x2"]) == 10
    assert len(moved["x3"]) == 2


def test_categories_on_top_of_a_hierarchy():
    """Equal to the same graph built by hand, and over two levels as over one."""
    data, above = OBSERVATIONS, CategoricalNode("which", values=VALUES, stay=STAY)
    by_hand = switching(5)
    expected = by_hand[0].run(data, by_hand[1], record=["probability"]).get("which", "probability")
    lowest = Level(
        CRUISE, 1, parameter_mean=[0.0], parameter_sd=1e-6, process_noise_sd=0.5, initial_mean=[0.0], initial_sd=0.5
    )
    model = hierarchy(lowest, above, dt=DT, observation_noise_sd=math.exp(-0.5), learn_noise_y=False, every=5)
    found = model.graph.run(data, model.schedule, record=["probability"]).get("which", "probability")
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    middle = Level(CRUISE, 1, parameter_mean=[0.0], parameter_sd=1e-6, process_noise_sd=0.5, initial_mean=[0.0])
    model = velocity_stack(middle, above, every=3)
    found = model.graph.run(data, model.schedule, record=["probability"]).get("which", "probability")
    assert (np.flatnonzero(np.diff(found[:, 0])) + 2).tolist() == [9, 18, 27, 36]  # on a clock of nine observations


def test_variances_before_the_first_observation():
    """The variance of the lowest state grows by its noise; those above keep their priors."""
    middle = Level(
        CRUISE, 1, parameter_mean=[0.0], parameter_sd=0.1, process_noise_sd=0.1, initial_mean=[0.0], initial_sd=0.7
    )
    top = Level(Linear([[-0.1]]), 1, process_noise_sd=0.1, initial_mean=[0.0], initial_sd=0.3)
    graph, schedule = velocity_stack(middle, top, every=4)
    data = OBSERVATIONS.copy()
    data[:3] = np.nan
    result = graph.run(data, schedule, record=["sd", "mean"])
    alone = np.sqrt(0.25 + 0.25 * DT * np.arange(3))
    np.testing.assert_allclose(result.sd("x1")[:3, 0, 0], alone, rtol=1e-5)
    np.testing.assert_allclose(result.sd("x2")[:3, 0, 0], 0.7)
    np.testing.assert_allclose(result.sd("x3")[:3, 0, 0], 0.3)
    assert np.isfinite(result.mean("x3")).all()


def test_a_hierarchy_with_categories_is_drawn():
    graph, schedule = switching(5)
    figure = graph.run(OBSERVATIONS, schedule).plot()
    assert "which" in {ax.get_ylabel() for sub in figure.subfigs for ax in sub.axes}


def test_a_hierarchy_without_parameters_below_is_rejected():
    with pytest.raises(SettingError, match="'which' has no parameters to predict; make it the last level"):
        velocity_stack(CategoricalNode("which", values=VALUES, stay=STAY), Level(CRUISE, 1))
    with pytest.raises(SettingError, match="level 1 has no parameters for level 2 to predict"):
        hierarchy(Level(Linear([[0.0]]), 1), Level(Linear([[0.0]]), 1), dt=0.1)
    with pytest.raises(SettingError, match="at least one Level"):
        hierarchy(dt=0.1)
    with pytest.raises(SettingError, match="both parameter_mean and parameter_sd"):
        Level(CRUISE, 1, parameter_mean=[0.0])


def test_parameters_below_a_kalman_state_need_newton():
    x, y = KalmanStateNode("x", dim=1, flow=CRUISE), SensoryNode("y", dim=1, orders=1, dt=0.1)
    a = ParameterNode("a", mean=[0.0], sd=1.0, estimator=RobbinsMonro())
    above = KalmanStateNode("above", dim=1, flow=Linear([[0.0]]))
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(a, x)
    graph.predicts(above, a)
    for node in (x, y, above):
        graph.weighs(PrecisionNode(f"noise of {node.name}", prior_precision=1.0, sd=1.0, kernel=White()), node)
    with pytest.raises(GraphError, match=r"use estimator=pcnet.estimators.Newton\(\)"):
        graph.run(OBSERVATIONS)


# --- categories ------------------------------------------------------------------------------------------------------


def evidence(value: float, data: np.ndarray) -> float:
    """The log-probability of the data under one velocity, by a Kalman filter of the position."""
    q, r = np.array([[0.25 * DT]]), np.array([[math.exp(-1.0)]])
    oracle = Kalman(np.eye(1), q, np.eye(1), r, np.zeros(1), np.array([[0.25]]))
    for t, y in enumerate(data):
        oracle.step(y - value * DT * t)
    return oracle.log_evidence


@pytest.mark.parametrize("estimator", [None, Newton()], ids=["joint", "scored"])
def test_categories_are_updated_by_bayes_and_then_by_transitions(estimator):
    """After one window: the evidence of each value, then the transition."""
    graph, schedule = switching(every=40, estimator=estimator)
    result = graph.run(OBSERVATIONS, schedule, record=["probability", "mean", "sd"])
    log = np.array([evidence(value, OBSERVATIONS) for (value,) in VALUES])
    posterior = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    assert posterior.max() < 0.999  # so that there is something to tell
    passed = posterior * STAY + (1 - posterior) * (1 - STAY) / 2
    np.testing.assert_allclose(result.get("which", "probability")[-1], passed, rtol=1e-4)
    values = np.array(VALUES)[:, 0]
    mean = passed @ values
    np.testing.assert_allclose(result.mean("a")[-1], [mean], rtol=1e-4)
    np.testing.assert_allclose(result.sd("a")[-1] ** 2, [passed @ (values - mean) ** 2], rtol=1e-3)


TINY = [[1.0], [-0.5]]
STAGES = np.array([[0.6, 0.3, 0.1, 0.0], [0.0, 0.7, 0.3, 0.0], [0.0, 0.0, 0.2, 0.8], [0.5, 0.0, 0.0, 0.5]])
"""Two stages of each of two categories."""


@pc.register("test: shifted")
def shifted(x, theta):
    return x + theta


def seen_directly(which: CategoricalNode) -> tuple[pc.Graph, pc.Schedule]:
    """y = θ + noise of sd 0.9: a state is there, but it is 0."""
    x = KalmanStateNode("x", dim=1, flow=Linear([[0.0]]), initial_mean=[0.0], initial_sd=1e-6, learn_noise=False)
    y, a = SensoryNode("y", dim=1, orders=1, dt=DT), ParameterNode("a", mean=[0.0], sd=1e-6, estimator=Newton())
    graph = pc.Graph()
    graph.predicts(x, y, via=shifted)
    graph.parametrises(a, x, of=y)
    graph.predicts(which, a)
    graph.weighs(PrecisionNode("noise_x", mean=30.0, sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=-2 * math.log(0.9), sd=1.0, kernel=White()), y)
    return graph, adaptive_filtering(2, levels=(LevelNodes(("x",), (), ("a",)), LevelNodes((which.name,), (), ())))


def by_enumeration(data: np.ndarray, first: np.ndarray, transition: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The probabilities of the stages after the data, by adding up all paths; a window has two observations."""
    windows, n = len(data) // 2, len(first)
    found = np.zeros(n)
    for path in itertools.product(range(n), repeat=windows):
        weight = first[path[0]] * np.prod([transition[a, b] for a, b in itertools.pairwise(path)])
        away = data - np.repeat(values[list(path)], 2)
        found += weight * np.exp(-0.5 * (away**2).sum() / 0.81) * transition[path[-1]]
    return found / found.sum()


@pytest.mark.parametrize("first", [None, [0.9, 0.1], [0.4, 0.3, 0.2, 0.1]])
def test_stages_equal_a_sum_over_all_paths(first):
    """Six windows, 4,096 paths."""
    data = np.random.default_rng(4).normal(size=12) + np.repeat([1.0, 1.0, -0.5, -0.5, -0.5, 1.0], 2)
    node = CategoricalNode("which", values=TINY, transition=STAGES, first=first)
    graph, schedule = seen_directly(node)
    result = graph.run(data[:, None], schedule, record=["probability", "stage", "mean"])
    start = {None: [0.25] * 4, 2: [0.45, 0.45, 0.05, 0.05], 4: first}[first and len(first)]
    expected = by_enumeration(data, np.array(start), STAGES, np.array([1.0, 1.0, -0.5, -0.5]))
    np.testing.assert_allclose(result.get("which", "stage")[-1].reshape(-1), expected, rtol=1e-4)
    by_value = expected.reshape(2, 2).sum(1)
    np.testing.assert_allclose(result.get("which", "probability")[-1], by_value, rtol=1e-4)
    np.testing.assert_allclose(result.mean("which")[-1, 0], by_value @ np.array(TINY), rtol=1e-4)


def test_dwelling_categories_equal_a_sum_over_all_paths():
    data = np.random.default_rng(5).normal(size=10) + np.repeat([1.0, 1.0, 1.0, -0.5, -0.5], 2)
    graph, schedule = seen_directly(CategoricalNode("which", values=TINY, dwell=DwellTime(mean=3.0, sd=0.0)))
    result = graph.run(data[:, None], schedule, record=["probability"])
    # three stages of one step each, and then the other
    cycle = np.roll(np.eye(6), 1, 1)
    expected = by_enumeration(data, np.full(6, 1 / 6), cycle, np.array([1.0, 1.0, 1.0, -0.5, -0.5, -0.5]))
    np.testing.assert_allclose(result.get("which", "probability")[-1], expected.reshape(2, 3).sum(1), rtol=1e-4)


def test_stay_is_a_transition_matrix():
    eye = np.eye(3)
    ways = {"stay": STAY, "transition": STAY * eye + (1 - STAY) / 2 * (1 - eye)}
    graph, schedule = switching(5)
    found = []
    for way, value in ways.items():
        node = CategoricalNode("which", values=VALUES, **{way: value})
        found.append(graph.with_nodes({**graph.nodes, "which": node}).run(OBSERVATIONS, schedule).mean("a"))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-10)


@pytest.mark.parametrize(
    "how",
    [
        {"stay": 0.9},
        {"transition": [[0.9, 0.1], [0.25, 0.75]], "first": [0.3, 0.7]},
        {"dwell": DwellTime(mean=[4.0, 6.0], sd=1.5, order="cycle")},
    ],
)
def test_categories_are_saved_and_loaded(how, tmp_path):
    graph, schedule = seen_directly(CategoricalNode("which", values=TINY, **how))
    data = np.random.default_rng(6).normal(size=(12, 1))
    before = graph.run(data, schedule, record=["stage"]).get("which", "stage")
    for ending in ("yaml", "json"):
        path = pc.save_model(tmp_path / f"model.{ending}", pc.Model(graph, schedule))
        jsonschema.validate(strict_yaml.read(path), json_schema())
        again = pc.load_model(path)
        np.testing.assert_array_equal(
            again.graph.run(data, again.schedule, record=["stage"]).get("which", "stage"), before
        )


def test_wide_parameter_priors_blur_the_categories():
    """With priors as wide as the distance of the values, the same data are less informative."""
    sharp, blurred = (
        switching(40, freedom)[0].run(OBSERVATIONS, switching(40, freedom)[1], record=["probability"])
        for freedom in (1e-6, 1.0)
    )
    assert blurred.get("which", "probability")[-1].max() < sharp.get("which", "probability")[-1].max()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CategoricalNode("c", values=[[0.1]], stay=0.9), "two categories or more"),
        (lambda: CategoricalNode("c", values=[[0.1], [0.2]], stay=1.0), "below 1"),
        (lambda: CategoricalNode("c", values=[[0.1], [0.2]]), "'c': give one of stay"),
        (lambda: CategoricalNode("c", values=[[0.1], [0.2]], stay=0.9, transition=np.eye(2)), "give one of stay"),
        (
            lambda: CategoricalNode("c", values=[[0.1], [0.2]], transition=np.eye(3)),
            r"end in \(2, 2\).*not in \(3, 3\)",
        ),
        (lambda: CategoricalNode("c", values=[[0.1], [0.2]], transition=0.9), r"end in \(2, 2\)"),
        (
            lambda: CategoricalNode("c", values=[[0.1], [0.2]], transition=[[0.9, 0.1], [0.1, 0.8]]),
            "'c': each row of transition must sum to 1, not to 0.9",
        ),
        (
            lambda: CategoricalNode("c", values=[[0.1], [0.2]], transition=[[1.5, -0.5], [0.0, 1.0]]),
            "'transition': must not be negative",
        ),
        (lambda: CategoricalNode("c", values=[[0.1], [0.2]], stay=0.9, first=[0.5, 0.4]), "first must sum to 1"),
        (lambda: CategoricalNode("c", values=[[0.1], [0.2]], stay=0.9, first=[1.0]), "first must end in 2"),
        (
            lambda: pc.Graph().predicts(
                CategoricalNode("c", values=[[0.1], [0.2]], stay=0.9), SensoryNode("y", dim=1, orders=1)
            ),
            "predicts parameters",
        ),
        (
            lambda: pc.Graph().predicts(
                CategoricalNode("c", values=[[0.1], [0.2]], stay=0.9), ParameterNode("a", mean=[0.0, 1.0], sd=1.0)
            ),
            "values of 1 parameters",
        ),
    ],
)
def test_invalid_categories_are_rejected(make, words):
    with pytest.raises((GraphError, SettingError), match=words):
        make()


# --- a cause, causally -----------------------------------------------------------------------------------------------
def test_a_convolution_is_inverted_causally():
    """SPM's convolution data without its look-ahead: each estimate uses past observations only.

    The cause is part of the state, with variance 0.3 and a correlation time of about three bins. SPM, which looks
    ahead, reaches 0.1448 for states and 0.1613 for the cause.
    """
    d = np.load(DATA / "spm_convolution.npz")
    lasts, variance, width = 3.0, 0.3, 0.5 * math.sqrt(2)
    flow = np.zeros((3, 3))
    flow[:2, :2], flow[:2, 2:], flow[2, 2] = d["M1_pE_f"], d["M1_pE_h"], -1 / lasts
    gain = np.concatenate([d["M1_pE_g"], np.zeros((4, 1))], 1)
    x = KalmanStateNode(
        "x",
        dim=3,
        flow=Linear(flow),
        initial_mean=np.zeros(3),
        initial_sd=[0.01, 0.01, 0.1],
        learn_noise=False,
    )
    y = SensoryNode("y", dim=4, orders=1, dt=1.0)
    graph = pc.Graph()
    graph.predicts(x, y, via=Linear(gain))
    # as strong as SPM's noise, and as what the cause asks for
    strength = SquaredExponential(width).correlation_integral.item() / d["M1_W"][0, 0]
    variances = np.array([strength, strength, 2 * variance / lasts])
    graph.weighs(PrecisionNode("noise_x", mean=-np.log(variances), sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=math.log(d["M1_V"][0, 0]), sd=1.0, correlation_time=width), y)
    result = graph.run(d["Y"].T, STILL, record=["mean"])
    found = result.mean("x")[:, 0]
    assert ((found[:, :2] - d["pU_x1"].T) ** 2).sum() <= 0.20
    assert ((found[:, 2:] - d["pU_v2"].T) ** 2).sum() <= 0.35
