"""Forecasts, against closed forms of linear systems and samples of nonlinear ones."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.integrate import dblquad

import pcnet as pc
from pcnet.errors import DivergenceError, ObservationError, ResultError, SettingError
from pcnet.graphs import Level, adaptive_filter, hierarchy, odem
from pcnet.nodes import GeneralisedStateNode, InputNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.kernels import Matern
from support.filters import single_filter

A = np.array([[-0.5, 1.0], [-1.0, -0.2]])
DT = 0.05


def linear(width=0.2, kernel=None, precision=(4.0, 9.0), dt=DT):
    x = GeneralisedStateNode("x", dim=2, orders=2, flow=pc.systems.linear(A), initial_mean=[[1.0, -0.5], [0.0, 0.0]])
    y = SensoryNode("y", dim=1, orders=1, dt=dt)
    graph = pc.Graph()
    graph.predicts(x, y, via=pc.systems.linear([[1.0, 2.0]]))
    noise = {"correlation_time": width} if kernel is None else {"kernel": kernel}
    graph.weighs(PrecisionNode("nx", prior_precision=list(precision), sd=1e-6, **noise), x)
    graph.weighs(PrecisionNode("ny", prior_precision=25.0, sd=1e-6, correlation_time=0.3), y)
    return graph


def believed(session, name="x"):
    mean = session.mean(name).numpy()
    covariance = session.read(name, "covariance").numpy()
    return (mean[0], covariance[:2, :2]) if mean.ndim == 2 else (mean, covariance)


@pytest.mark.parametrize("width", [0.02, 0.2, 1.0])
def test_a_linear_system_in_closed_form(width):
    """Mean e^{At}m; covariance e^{At}P e^{Aᵀt} + ∫∫ e^{A(t−s)} Q e^{Aᵀ(t−r)} κ(s − r) ds dr, by quadrature."""
    session = linear(width).start(pc.states_only()).step([0.3]).step([0.2])
    mean, covariance = believed(session)
    found = session.forecast(1.0)
    np.testing.assert_allclose(found.times, DT * np.arange(2, 22))
    t = 1.0
    move = scipy.linalg.expm(A * t)
    np.testing.assert_allclose(found.mean("x")[-1], move @ mean, rtol=1e-6)
    grid, h = np.linspace(0, t, 601, retstep=True)
    weight = np.full(len(grid), h)
    weight[[0, -1]] /= 2
    reach = scipy.linalg.expm(A * (t - grid)[:, None, None])
    smooth = np.exp(-((grid[:, None] - grid) ** 2) / (2 * width**2)) * weight[:, None] * weight
    pushed = np.tensordot(smooth, reach * [1 / 4.0, 1 / 9.0], 1)
    noise = np.einsum("sij,skj->ik", pushed, reach)
    expected = move @ covariance @ move.T + noise
    np.testing.assert_allclose(found.sd("x")[-1], np.sqrt(np.diag(expected)), rtol=2e-4)
    seen = np.array([[1.0, 2.0]])
    np.testing.assert_allclose(found.mean("y")[-1], seen @ move @ mean, rtol=1e-6)
    np.testing.assert_allclose(found.sd("y")[-1], np.sqrt(seen @ expected @ seen.T + 1 / 25)[0], rtol=2e-4)


def test_an_unstable_system_with_matern_noise():
    """Matérn noise of ν = 3/2 through ẋ = x/2, against an independent double integral."""
    kernel = pc.kernels.Matern(0.3, smoothness=1.5)
    graph = linear(kernel=kernel)
    x = GeneralisedStateNode(
        "x", dim=2, orders=2, flow=pc.systems.linear([[0.5, 0.0], [0.0, -2.0]]), initial_mean=np.zeros((2, 2))
    )
    graph = graph.with_nodes(dict(graph.nodes) | {"x": x})
    session = graph.start(pc.states_only()).step([0.1])
    _, covariance = believed(session)
    found = session.forecast(2.0).sd("x")[-1]

    def correlation(s, r):
        z = math.sqrt(3) * abs(s - r) / 0.3
        return (1 + z) * math.exp(-z)

    for i, (rate, precision) in enumerate(((0.5, 4.0), (-2.0, 9.0))):
        half = dblquad(
            lambda s, r, a=rate: math.exp(a * (4 - s - r)) * correlation(s, r), 0, 2, 0, lambda r: r, epsabs=1e-8
        )[0]
        expected = math.exp(2 * rate * 2) * covariance[i, i] + 2 * half / precision
        np.testing.assert_allclose(found[i], math.sqrt(expected), rtol=5e-4)


def test_uncertainty_of_parameters_widens_the_forecast():
    """ẋ = θ with θ ~ N(m, s²): after a time t the variance has grown by t²s²."""
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, theta: theta + 0.0 * x, initial_mean=[[0.0]])
    y = SensoryNode("y", dim=1, orders=1, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(ParameterNode("theta", mean=[2.0], sd=0.5), x)
    graph.weighs(PrecisionNode("nx", prior_precision=1e12, sd=1e-6, correlation_time=0.1), x)
    graph.weighs(PrecisionNode("ny", prior_precision=4.0, sd=1e-6, correlation_time=0.1), y)
    session = graph.start(pc.states_only()).step([0.0])
    base = float(session.sd("x"))
    start = float(session.mean("x"))
    wide, narrow = session.forecast(3.0), session.forecast(3.0, parameters=False)
    np.testing.assert_allclose(wide.mean("x")[:, 0], start + 2.0 * 0.1 * np.arange(1, 31), rtol=1e-9)
    np.testing.assert_allclose(wide.sd("x")[-1, 0], math.sqrt(base**2 + 9 * 0.25), rtol=1e-6)
    np.testing.assert_allclose(narrow.sd("x")[-1, 0], base, rtol=1e-4)
    assert (np.diff(wide.sd("x")[:, 0]) > 0).all()
    low, high = wide.interval("x", 0.9)
    np.testing.assert_allclose(high - low, 2 * 1.6448536269514722 * wide.sd("x"))


def test_samples_have_the_moments_of_the_forecast():
    session = linear(0.2).start(pc.states_only()).step([0.3])
    expected = session.forecast(1.5, 0.1)
    draws = session.sample(1.5, 4000, every=0.1, seed=3)
    assert draws.values["x"].shape == (4000, 15, 2)
    np.testing.assert_array_equal(draws.times, expected.times)
    for name in ("x", "y"):
        sd = expected.sd(name)
        np.testing.assert_allclose(draws.values[name].mean(0), expected.mean(name), atol=float(4 * sd.max() / 63))
        np.testing.assert_allclose(draws.values[name].std(0), sd, rtol=0.06)
    again = session.sample(1.5, 4000, every=0.1, seed=3)
    np.testing.assert_array_equal(draws.values["y"], again.values["y"])
    assert (session.sample(1.5, 2, every=0.1, seed=4).values["y"] != draws.values["y"][:2]).all()


def test_a_forecast_does_not_change_the_session():
    graph, schedule = odem()
    y = 1 + 0.1 * np.random.default_rng(0).normal(size=(4, 3))
    session, reference = graph.start(schedule), graph.start(schedule)
    for k in range(4):
        session.step(y[k])
        session.forecast(0.05)
        session.sample(0.05, 2, seed=k)
        session.innovation(y[k])
        reference.step(y[k])
    assert torch.equal(session.mean("x"), reference.mean("x"))
    assert torch.equal(session.free_action, reference.free_action)


def test_a_batched_forecast_equals_single_ones():
    graph, schedule = odem(kappa=[1.0, 0.5], smoothness=[0.005, 0.01])
    y = 1 + 0.1 * np.random.default_rng(0).normal(size=(5, 3))
    together = graph.start(schedule).run(y)
    both = together.forecast(0.1)
    assert both.mean("x").shape == (2, 10, 3)
    for i, (kappa, width) in enumerate(((1.0, 0.005), (0.5, 0.01))):
        graph, schedule = odem(kappa=kappa, smoothness=width)
        alone = graph.start(schedule).run(y).forecast(0.1)
        for name in ("x", "y"):
            np.testing.assert_allclose(both.mean(name)[i], alone.mean(name), rtol=1e-9)
            np.testing.assert_allclose(both.sd(name)[i], alone.sd(name), rtol=1e-7)
    assert together.sample(0.1, 3, seed=0).values["x"].shape == (3, 2, 10, 3)
    table = both.to_dataframe()
    assert list(table.columns) == ["time", "node", "dimension", "batch_0", "mean", "sd"]
    assert len(table) == 2 * 2 * 10 * 3


def test_causes_follow_their_predictions():
    """ẋ = v − x with v from an input of 3: x(t) = 3 + (x₀ − 3)e^{−t}, and the variance of v is propagated."""
    x = GeneralisedStateNode("x", dim=1, orders=2, flow=lambda x, v, theta: v - x, initial_mean=[[1.0], [0.0]])
    v = pc.CauseNode("v", dim=1, orders=1)
    graph = pc.Graph()
    graph.predicts(x, SensoryNode("y", dim=1, orders=1, dt=0.02))
    graph.drives(v, x)
    graph.predicts(InputNode("u", dim=1, orders=1), v)
    for name, expected in (("x", 1e12), ("y", 4.0), ("v", 16.0)):
        graph.weighs(PrecisionNode(f"n{name}", prior_precision=expected, sd=1e-6, correlation_time=0.5), graph[name])
    session = graph.start(pc.states_only()).step({"y": [1.0], "u": [3.0]})
    start, base = float(session.mean("x")[0, 0]), float(session.sd("x")[0, 0])
    found = session.forecast(1.0)
    np.testing.assert_allclose(found.mean("x")[-1, 0], 3 + (start - 3) * math.exp(-1), rtol=1e-6)
    grid, h = np.linspace(0, 1, 2001, retstep=True)
    weight = np.exp(grid - 1) * h
    weight[[0, -1]] /= 2
    noise = weight @ np.exp(-((grid[:, None] - grid) ** 2) / 0.5) @ weight / 16
    np.testing.assert_allclose(found.sd("x")[-1, 0], math.sqrt(math.exp(-2) * base**2 + noise), rtol=1e-4)


def test_innovations():
    session = linear().start(pc.states_only()).step([0.3])
    mean, _ = believed(session)
    found = session.innovation({"y": [5.0]}, t=0.25)["y"]
    expected = np.array([1.0, 2.0]) @ scipy.linalg.expm(A * 0.25) @ mean
    np.testing.assert_allclose(found.error, [5.0 - expected], rtol=1e-6)
    np.testing.assert_allclose(found.sd, session.forecast(0.25, 0.25).sd("y")[0], rtol=1e-9)
    missing = session.innovation(None)["y"]
    assert np.isnan(missing.error).all()
    assert np.isnan(missing.sd).all()


def test_innovations_are_calibrated():
    """On data sampled from the model itself."""
    graph = linear(0.1)
    draws = graph.start(pc.states_only()).step([0.3]).sample(DT, 200, seed=1)
    error, sd = graph.start(pc.states_only()).step(np.full((200, 1), 0.3)).innovation(draws.values["y"][:, 0])["y"]
    scores = (error / sd)[:, 0]
    assert scores.shape == (200,)
    assert abs(np.mean(scores)) < 4 / math.sqrt(200)
    assert abs(np.std(scores) - 1) < 4 / math.sqrt(400)


@pytest.mark.parametrize("horizon", [0, -1, math.nan, math.inf, "soon", True, 1e-9, 1e300])
def test_invalid_horizons_are_rejected(horizon):
    session = linear().start(pc.states_only()).step([0.3])
    with pytest.raises(SettingError, match="horizon"):
        session.forecast(horizon)


def test_forecasts_that_are_not_possible_are_rejected():
    graph = linear()
    session = graph.start(pc.states_only())
    with pytest.raises(ObservationError, match="before the first observation"):
        session.forecast(1.0)
    session.step([0.3])
    with pytest.raises(SettingError, match="draws"):
        session.sample(1.0, 0, seed=1)
    with pytest.raises(SettingError, match="too many"):
        session.sample(1e3, 1, seed=1)
    with pytest.raises(ResultError, match="no forecast of 'z'"):
        session.forecast(1.0).mean("z")
    with pytest.raises(ObservationError, match="not after"):
        session.innovation([1.0], t=0.0)


def test_a_diverging_forecast_names_the_flow():
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, theta: x**3, initial_mean=[[3.0]])
    graph = pc.Graph()
    graph.predicts(x, SensoryNode("y", dim=1, orders=1, dt=0.1))
    graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, correlation_time=0.1), x)
    graph.weighs(PrecisionNode("ny", prior_precision=1.0, sd=0.1, correlation_time=0.1), graph["y"])
    session = graph.start(pc.states_only()).step([3.0])
    with pytest.raises(DivergenceError, match="forecast of x is not finite"):
        session.forecast(10.0)


def test_predicted_parameters_move_with_the_state_above():
    """ẋ = θ, θ = x₂ + e, ẋ₂ = c: θ(t) = θ₀ + ct, so x(t) = x₀ + θ₀t + ct²/2 with variance P + t²Σ_θ.

    The uncertainty of x₂ does not count: θ has its own belief, and only the motion of x₂ enters.
    """
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, theta: theta + 0.0 * x, initial_mean=[[0.0]])
    above = GeneralisedStateNode("above", dim=1, orders=1, flow=lambda x, theta: 0.7 + 0.0 * x, initial_mean=[[5.0]])
    theta = ParameterNode("theta", mean=[2.0], sd=0.5)
    graph = pc.Graph()
    graph.predicts(x, SensoryNode("y", dim=1, orders=1, dt=0.1))
    graph.parametrises(theta, x)
    graph.predicts(above, theta)
    for name in ("x", "above", "y"):
        graph.weighs(PrecisionNode(f"n {name}", prior_precision=1e12, sd=1e-6, correlation_time=0.1), graph[name])
    session = graph.start(pc.states_only()).step([0.0])
    start, base = float(session.mean("x")), float(session.sd("x"))
    found, t = session.forecast(2.0), 0.1 * np.arange(1, 21)
    np.testing.assert_allclose(found.mean("x")[:, 0], start + 2.0 * t + 0.7 * t**2 / 2, rtol=1e-8)
    np.testing.assert_allclose(found.sd("x")[-1, 0], math.sqrt(base**2 + 4 * 0.25), rtol=1e-5)
    draws = session.sample(2.0, 2000, seed=0).values["x"][:, -1, 0]
    np.testing.assert_allclose(draws.std(), found.sd("x")[-1, 0], rtol=0.06)


def test_white_noise_of_a_slow_level_is_a_diffusion():
    """The variance of a drifting state on a slower clock grows by D² per time unit."""
    every, dt, noise = 4, 0.05, 0.14
    above = Level(lambda x, theta: 0.0 * x, 1, process_noise_sd=noise, initial_mean=[1.0], initial_sd=0.1)
    below = Level(lambda x, k: -k * x, 1, parameter_mean=[1.0], parameter_sd=0.01, initial_mean=[1.0])
    graph, schedule = hierarchy(below, above, dt=dt, every=every, learn_noise_y=False)
    session = graph.start(schedule).run(np.ones((2 * every, 1)))
    base = float(session.sd("x2"))
    found = session.forecast(2.0).sd("x2")[-1, 0]
    np.testing.assert_allclose(found, math.sqrt(base**2 + 2.0 * noise**2), rtol=1e-8)


def test_batches_with_different_sampling_intervals():
    graph, schedule = odem(dt=[0.01, 0.02])
    y = 1 + 0.1 * np.random.default_rng(0).normal(size=(5, 3))
    session = graph.start(schedule).run(y)
    for ask in (lambda: session.forecast(1.0), lambda: session.innovation(y[0]), lambda: session.sample(1.0, seed=0)):
        with pytest.raises(SettingError, match="intervals of their own"):
            ask()
    both = session.forecast(0.1, 0.05)
    for i, dt in enumerate((0.01, 0.02)):
        graph, schedule = odem(dt=dt)
        alone = graph.start(schedule).run(y).forecast(0.1, 0.05)
        for name in ("x", "y"):
            np.testing.assert_allclose(both.mean(name)[i], alone.mean(name), rtol=1e-6)
            np.testing.assert_allclose(both.sd(name)[i], alone.sd(name), rtol=1e-4)


def test_samples_of_a_singular_covariance():
    """It has no Cholesky factor; the rest must still be sampled."""
    graph, schedule = single_filter(
        lambda x, theta: 0.0 * x, 2, 0.1, initial_mean=[1.0, 2.0], initial_sd=[1e-170, 0.5], process_noise_sd=1e-100
    )
    draws = graph.start(schedule).step(None).sample(0.1, 4000, seed=0).values["x"][:, 0]
    np.testing.assert_allclose(draws.mean(0), [1.0, 2.0], atol=0.04)
    np.testing.assert_allclose(draws.std(0), [0.0, 0.5], atol=0.03)


def test_a_forecast_does_not_depend_on_the_last_gap():
    """Far ahead, the noise of an observation has its variance and the white rest that goes with the interval."""
    graph, _ = single_filter(lambda x, theta: 0.0 * x, 1, 0.1, correlation_time_y=Matern(0.3, 1.5), initial_mean=[0.0])
    regular, late = (graph.start(pc.states_only()).step([0.0], t=0.0).step([0.0], t=t) for t in (0.1, 0.9))
    for session in (regular, late):
        found = session.forecast(8.0)
        noise = found.sd("y")[-1, 0] ** 2 - found.sd("x")[-1, 0] ** 2
        np.testing.assert_allclose(noise, 1.0 + 1e-5 * 0.3 / 0.1, rtol=1e-9)


@pytest.mark.parametrize("process_noise", ["diffusion", "held"])
def test_draws_of_a_kalman_state_have_the_moments_of_its_forecast(process_noise):
    """A diffusion of density D² grows by D²t; noise that is held over an interval h by D²ht."""
    graph, schedule = single_filter(
        lambda x, theta: 0.0 * x, 1, 0.1, process_noise_sd=0.5, process_noise=process_noise, initial_mean=[0.0]
    )
    session = graph.start(schedule).step([0.0])
    base, grown = float(session.sd("x")), 0.25 * (1.0 if process_noise == "diffusion" else 0.1)
    found, draws = session.forecast(2.0), session.sample(2.0, 4000, seed=0).values["x"][:, -1, 0]
    expected = math.sqrt(base**2 + 2.0 * grown)
    np.testing.assert_allclose(found.sd("x")[-1, 0], expected, rtol=1e-8)
    np.testing.assert_allclose(draws.std(), expected, rtol=0.06)


def test_a_forecast_of_a_bent_belief_is_that_of_an_ensemble():
    """A double well from its saddle: moments by the Fokker–Planck equation on a grid, with an implicit scheme."""
    noise, t = 0.3, 3.0
    graph, schedule = single_filter(
        lambda x, theta: x - x**3, 1, 0.1, process_noise_sd=noise, initial_mean=[0.0], initial_sd=0.2
    )
    session = graph.start(schedule).step(None)
    grid, h = np.linspace(-2.5, 2.5, 501, retstep=True)
    drift, count = grid - grid**3, len(grid)
    generator = np.zeros((count, count))  # of a jump process between neighbours with this drift and diffusion
    for i in range(count):
        for j, sign in ((i - 1, -1), (i + 1, 1)):
            if 0 <= j < count:
                rate = 0.5 * noise**2 / h**2 + sign * drift[i] / (2 * h)
                generator[i, i], generator[j, i] = generator[i, i] - rate, generator[j, i] + rate
    density = np.exp(-0.5 * (grid / 0.2) ** 2)
    density = scipy.linalg.expm(generator * t) @ (density / density.sum())
    expected = math.sqrt(density @ grid**2)
    found = session.forecast(t)
    np.testing.assert_allclose(found.mean("x")[-1, 0], 0.0, atol=0.05)
    np.testing.assert_allclose(found.sd("x")[-1, 0], expected, rtol=0.05)
    np.testing.assert_allclose(found.sd("y")[-1, 0], math.hypot(expected, 1.0), rtol=0.05)
    draws = session.sample(t, 2000, seed=0).values["x"][:, -1, 0]
    np.testing.assert_allclose(draws.std(), expected, rtol=0.05)
    np.testing.assert_allclose(np.abs(draws).mean(), density @ np.abs(grid), rtol=0.05)


def test_coloured_process_noise_acts_within_a_step():
    """ẋ = −0.1x + ω with Matérn-1/2 noise ω: the covariance of (x, ω) by the matrix exponential of Van Loan."""
    graph, schedule = single_filter(
        pc.systems.linear([[-0.1]]),
        1,
        0.1,
        initial_mean=[0.0],
        initial_sd=0.1,
        correlation_time=Matern(0.5, 0.5),
        correlation_time_y=pc.kernels.White(),
    )
    session = graph.start(schedule).step(None)
    drift, diffusion = np.array([[-0.1, 1.0], [0.0, -2.0]]), np.diag([0.0, 4.0])
    block = scipy.linalg.expm(np.block([[-drift, diffusion], [np.zeros((2, 2)), drift.T]]))
    move = block[2:, 2:].T
    expected = math.sqrt((move @ np.diag([0.01, 1.0]) @ move.T + move @ block[:2, 2:])[0, 0])
    np.testing.assert_allclose(session.forecast(1.0).sd("x")[-1, 0], expected, rtol=0.005)
    np.testing.assert_allclose(session.sample(1.0, 4000, seed=0).values["x"][:, -1, 0].std(), expected, rtol=0.04)


def test_draws_keep_the_present_value_of_coloured_noise():
    """Observation noise decays from its present value, as in the Gaussian forecast."""
    graph, schedule = single_filter(
        pc.systems.linear([[-0.1]]),
        1,
        0.1,
        initial_mean=[0.0],
        initial_sd=0.1,
        observation_noise_sd=0.3,
        correlation_time_y=Matern(0.5, 0.5),
    )
    session = graph.start(schedule).run(np.linspace(0.0, 2.0, 20)[:, None])
    found, draws = session.forecast(1.0), session.sample(1.0, 4000, seed=2).values
    for node in ("x", "y"):
        np.testing.assert_allclose(draws[node].mean(0), found.mean(node), atol=0.06 * found.sd(node).max())
        np.testing.assert_allclose(draws[node].std(0), found.sd(node), rtol=0.06)


def filtered(**options):
    """A damped spring whose stiffness is learned."""

    def spring(x, k):
        return torch.stack([x[..., 1], -k[..., 0] * x[..., 0] - 0.1 * x[..., 1]], -1)

    rest = {"parameter_mean": [1.0], "parameter_sd": 0.3, "process_noise_sd": 0.1, "observation_noise_sd": 0.1}
    return adaptive_filter(
        spring, 2, DT, mapping=lambda x, _: x[..., :1], channels=1, hypotheses=None, **rest, **options
    )


def batched():
    return filtered(initial_mean=torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))


def smooth():
    """A state in generalised coordinates, with noise that lasts."""
    return pc.Model(linear(), pc.states_only())


def stacked():
    below = Level(lambda x, k: -k * x, 1, parameter_mean=[1.0], parameter_sd=0.1, process_noise_sd=0.1)
    return hierarchy(below, Level(lambda x, _: -0.1 * x, 1, process_noise_sd=0.1, initial_mean=[1.0]), dt=DT)


@pytest.mark.parametrize("make", [filtered, batched, smooth, stacked])
def test_compiled_forecasts_and_draws_equal_eager_ones(make, monkeypatch):
    model = make()
    y = np.sin(DT * np.arange(40))[:, None]
    found = {}
    for engine in ("eager", "compiled"):
        monkeypatch.setenv("PCNET_ENGINE", engine)
        session = model.start().run(y)
        forecasts = [session.forecast(8 * DT), session.forecast(8 * DT, 4 * DT, parameters=False)]
        ahead = session.innovation([0.5], t=session.time + 1.5 * DT)
        found[engine] = *forecasts, session.sample(4 * DT, 3, seed=1), ahead
    compiled = [each.all for key, each in model.compiled.items() if key[0] == "future"]
    assert len(compiled) >= 3
    assert all(compiled)
    for one, other in zip(found["eager"][:2], found["compiled"][:2], strict=True):
        for node in one.nodes:
            np.testing.assert_allclose(other.mean(node), one.mean(node), rtol=1e-9, atol=1e-10)
            np.testing.assert_allclose(other.sd(node), one.sd(node), rtol=1e-9, atol=1e-10)
    for node, value in found["eager"][2].values.items():
        np.testing.assert_allclose(found["compiled"][2].values[node], value, rtol=1e-9, atol=1e-10)
    for node, (error, sd) in found["eager"][3].items():
        np.testing.assert_allclose(found["compiled"][3][node], (error, sd), rtol=1e-9)


def test_the_work_of_a_forecast_is_bounded():
    """Far ahead, steps are as long as the sampling interval, and there are not more than a limit."""
    session = filtered().start().run(np.zeros((3, 1)))
    with pytest.raises(SettingError, match="integration steps"):
        session.forecast(1e6, 1e6)
    session = linear().start(pc.states_only(), engine="compiled").run(np.ones((5, 1)))
    near, far = session.forecast(200 * DT), session.forecast(1000 * DT, 500 * DT)
    np.testing.assert_allclose(far.mean("x")[1], 0.0, atol=1e-6)  # it has decayed
    np.testing.assert_allclose(far.sd("x")[0], near.sd("x")[-1], rtol=0.01)  # steps of an interval are as good
    np.testing.assert_allclose(far.sd("x")[1], far.sd("x")[0], rtol=1e-6)


def test_rows_of_a_bank_that_run_away_are_left_out_of_its_forecast():
    """ẋ = x³ leaves all bounds from where a row with far too much noise is; the other row alone is the oracle."""

    def cubic(x, _):
        return 0.5 * x**3

    observations = 0.1 * torch.randn(5, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    told = {"process_noise_sd": 0.02, "observation_noise_sd": 0.1, "noise_sd": 1e-3}
    settings = {"initial_mean": [0.0], "initial_sd": 0.1, **told}
    factors = {"process_factors": (1.0, 1e4), "observation_factors": (1.0,), "contrast": 1.0}
    two = pc.Hypotheses(**factors, outliers=0.0, drop=1e9, merge=0.0)
    bank = adaptive_filter(cubic, 1, 0.1, hypotheses=two, **settings).start()
    alone = adaptive_filter(cubic, 1, 0.1, hypotheses=None, **settings).start()
    for session in (bank, alone):
        session.run(observations, progress=False)
    assert bank.weights[1] > 1e-6  # the other row is still in use
    found, expected = bank.forecast(horizon=3.0), alone.forecast(horizon=3.0)
    np.testing.assert_allclose(found.mean("x")[-1], expected.mean("x")[-1], atol=1e-3)
    np.testing.assert_allclose(found.sd("x")[-1], expected.sd("x")[-1], rtol=0.02)


def test_a_model_of_euler_steps_forecasts_by_these():
    """Points that are drawn take the steps of the process, x + h f(x), and no finer ones."""

    def flow(x, _):
        return torch.stack([x[..., 1], 2.0 * (1 - x[..., 0] ** 2) * x[..., 1] - x[..., 0]], -1)

    noise = {"process_noise_sd": 1e-5, "observation_noise_sd": 1e-5, "noise_sd": 1e-3, "hypotheses": None}
    start = {"initial_mean": [1.0, 0.5], "initial_sd": 1e-5}
    model = adaptive_filter(flow, 2, 0.1, integrator="euler", process_noise="held", **noise, **start)
    session = model.start().run(torch.tensor([[1.0, 0.5]]), progress=False)
    paths = {}
    for steps in (1, 2):  # in an interval
        x, h = torch.tensor([1.0, 0.5], dtype=torch.float64), 0.1 / steps
        paths[steps] = []
        for _ in range(40):
            for _ in range(steps):
                x = x + h * flow(x, None)
            paths[steps].append(x.numpy())
    found = session.forecast(horizon=4.0)
    np.testing.assert_allclose(found.mean("x"), paths[1], atol=1e-3)
    assert np.abs(np.subtract(paths[1], paths[2])).max() > 0.1
    np.testing.assert_allclose(session.sample(4.0, 20, seed=1).values["x"].mean(0), paths[1], atol=1e-3)
