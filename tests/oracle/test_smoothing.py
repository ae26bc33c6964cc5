"""Smoothing, against the joint Gaussian of all states and observations, and against smoothers written in numpy."""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import expm
from typer.testing import CliRunner

import pcnet as pc
from pcnet.engine.smooth import Trail
from pcnet.errors import GraphError, ObservationError, ResultError, SettingError
from pcnet.functions.closed_form import Linear
from pcnet.graphs import adaptive_filter, odem
from pcnet.io.command_line import app
from pcnet.nodes import InputNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.kernels import White
from pcnet.numerics.smoothing import FilteredRows, smooth, smooth_first
from support.filters import single_filter
from support.kalman import STILL
from support.smoothers import rts, simulate

A, B, C = np.array([[-0.4, 1.0], [-1.2, -0.1]]), np.array([[0.3], [1.0]]), np.array([[1.0, 0.2]])
DT, Q, R, INPUT_SD, FIRST, FIRST_SD = 0.1, 0.5, 0.2, 0.5, np.array([0.3, -0.2]), 0.9
PUSH, PUSH_SD = np.array([0.4]), 0.7
T = 20
RNG = np.random.default_rng(5)
Y, U = RNG.standard_normal((2, T, 1))
Y[[4, 5, 9]] = np.nan
TIMES = np.cumsum([0.0, *RNG.choice([DT, 0.5 * DT, 1.4 * DT], T - 1)])


def build() -> pc.Model:
    """A linear state with an input of unknown deviation, and a parameter: a constant push."""
    a, b = torch.tensor(A), torch.tensor(B)
    x = KalmanStateNode(
        "x",
        dim=2,
        flow=lambda x, u, theta: x @ a.T + u @ b.T + torch.cat([theta, 0 * theta], -1),
        initial_mean=FIRST,
        initial_sd=FIRST_SD,
        integrator="local_linearisation",
    )
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=Linear(C))
    graph.drives(InputNode("u", dim=1, sd=INPUT_SD), x)
    graph.parametrises(ParameterNode("theta", mean=PUSH, sd=PUSH_SD), x)
    graph.weighs(PrecisionNode("noise_x", mean=-math.log(Q), sd=1.0, kernel=White()), x)
    graph.weighs(PrecisionNode("noise_y", mean=-math.log(R), sd=1.0, kernel=White()), y)
    return pc.Model(graph, STILL_WITH_PARAMETERS)


STILL_WITH_PARAMETERS = pc.adaptive_filtering(levels=(pc.model.schedule.LevelNodes(precisions=()),))


def brute_force(until: int = T):
    """Means (T, 2) and covariances (T, 2, 2) of the states, mean and variance of θ, given y up to before `until`.

    Everything is a linear function of independent sources: the first state, θ, deviations of inputs, and noises.
    """
    sources = 2 + 1 + T + 2 * T
    mean, root = np.zeros((T, 2)), np.zeros((T, 2, sources))
    mean[0], root[0, :, :2] = FIRST, FIRST_SD * np.eye(2)
    constant = np.zeros((4, 4))
    constant[:2, :2], constant[:2, 2:3], constant[0, 3] = A, B, 1.0
    for k in range(1, T):
        dt = TIMES[k] - TIMES[k - 1]
        whole = expm(constant * dt)
        f, by_input, by_push = whole[:2, :2], whole[:2, 2], whole[:2, 3]
        van_loan = np.block([[-A, Q * np.eye(2)], [np.zeros((2, 2)), A.T]])
        noise = f @ expm(van_loan * dt)[:2, 2:]
        mean[k] = f @ mean[k - 1] + by_input * U[k - 1, 0] + by_push * PUSH[0]
        root[k] = f @ root[k - 1]
        root[k, :, 2] += by_push * PUSH_SD
        root[k, :, 3 + k - 1] += by_input * INPUT_SD
        root[k, :, 3 + T + 2 * k : 3 + T + 2 * k + 2] += np.linalg.cholesky(noise)
    seen = np.flatnonzero(np.isfinite(Y[:until, 0]))
    of_y = root[seen].transpose(0, 2, 1) @ C[0]
    gain = np.linalg.solve(of_y @ of_y.T + R * np.eye(len(seen)), of_y).T
    of_source = gain @ (Y[seen, 0] - mean[seen] @ C[0])
    left = np.eye(sources) - gain @ of_y
    return (
        mean + root @ of_source,
        root @ left @ root.transpose(0, 2, 1),
        PUSH[0] + PUSH_SD * of_source[2],
        PUSH_SD**2 * left[2, 2],
    )


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_whole_run_equals_the_joint_gaussian(engine):
    """With missing data, irregular times, an uncertain input, and a parameter in the belief."""
    result = build().run({"y": Y, "u": U}, times=TIMES, smooth=True, engine=engine)
    mean, covariance, push, variance = brute_force()
    found, theta = result.smoothed("x"), result.smoothed("theta")
    np.testing.assert_allclose(found.mean, mean, atol=1e-8)
    np.testing.assert_allclose(found.covariance, covariance, atol=1e-8)
    np.testing.assert_allclose(found.sd, np.sqrt(np.einsum("tii->ti", covariance)), atol=1e-8)
    np.testing.assert_allclose(theta.mean, np.full((T, 1), push), atol=1e-8)
    np.testing.assert_allclose(theta.covariance[:, 0, 0], variance, atol=1e-8)
    lower, upper = found.interval(0.9)
    np.testing.assert_allclose(0.5 * (lower + upper), mean, atol=1e-8)
    plain = build().run({"y": Y, "u": U}, times=TIMES, engine=engine)
    np.testing.assert_allclose(result.mean("x"), plain.mean("x"), atol=1e-12)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_fixed_lag_equals_the_joint_gaussian_of_what_was_seen(engine, tmp_path):
    """At every observation, also in a session that was saved and resumed, with memory for so many observations."""
    session, lag = build().start(smooth=3, record=(), engine=engine), 3
    for k in range(T):
        session.step({"y": Y[k], "u": U[k]}, t=float(TIMES[k]))
        if k == 11:
            session.save(tmp_path / "run.safetensors")
            session = pc.resume(tmp_path / "run.safetensors", session.model)
        if k >= lag:
            mean, covariance, push, _ = brute_force(k + 1)
            found = session.smoothed(lag)
            np.testing.assert_allclose(found["x"].mean, mean[k - lag], atol=1e-8)
            np.testing.assert_allclose(found["x"].covariance, covariance[k - lag], atol=1e-8)
            np.testing.assert_allclose(found["theta"].mean, [push], atol=1e-8)
    np.testing.assert_allclose(session.smoothed(0)["x"].mean, session.mean("x")[0], atol=1e-12)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_several_lags_can_be_read_at_any_observation(engine, every):
    """Of a batch that is longer than a group of lanes, some of it with other observations."""
    shift = np.arange(6.0)[:, None] * (np.arange(6) > 2)[:, None]  # the first three are alike
    session = build().start(smooth=7, record=(), engine=engine)
    for k in range(T):
        session.step({"y": Y[k] + shift, "u": U[k]}, t=float(TIMES[k]))
        for lag in (lag for lag in (1, 2, 7) if k >= lag and k % every == 0):
            mean, covariance, push, _ = brute_force(k + 1)
            found = session.smoothed(lag)
            assert found["x"].mean.shape == (6, 2)
            np.testing.assert_allclose(found["x"].mean[:3], np.tile(mean[k - lag], (3, 1)), atol=1e-8)
            np.testing.assert_allclose(found["x"].covariance, np.tile(covariance[k - lag], (6, 1, 1)), atol=1e-8)
            np.testing.assert_allclose(found["x"].sd[5] ** 2, np.diag(covariance[k - lag]), atol=1e-8)
            np.testing.assert_allclose(found["theta"].mean[:3], np.full((3, 1), push), atol=1e-8)


@pytest.mark.usefixtures("as_users_run")
def test_memory_of_a_fixed_lag_does_not_grow():
    session = pc.Model(walk().graph, STILL).start(smooth=4, record=())
    for _ in range(2):
        session.run(np.zeros((1000, 1)))
        for _ in range(80):
            session.step([0.0])
            assert len(session.smoothed(4)) == 1
        assert len(session._trail) + len(session._bound.recorder) <= 256 + 10


@pytest.mark.parametrize("count", [1, 2, 3, 10, 26])
def test_blocks_of_rows_are_the_plain_recursion(count):
    """Also with rows that repeat the one before, and with rows that do not continue it."""
    rng = np.random.default_rng(count)
    m, m_ = rng.standard_normal((2, count, 2, 3, 1))
    root, root_ = rng.standard_normal((2, count, 2, 3, 3))
    p, p_ = root @ root.swapaxes(-1, -2), root_ @ root_.swapaxes(-1, -2) + 4 * np.eye(3)
    cross = 0.3 * rng.standard_normal((count, 2, 3, 3))
    kind = rng.choice(3, (count, 2), p=[0.7, 0.2, 0.1])
    arrays = (m, p, m_, p_, cross, kind == 0, kind == 1)
    found = smooth(FilteredRows(*(torch.tensor(each) for each in arrays)))
    for b in range(2):
        mean, covariance = m[-1, b], p[-1, b]
        for k in range(count - 1, -1, -1):
            if k < count - 1 and kind[k + 1, b] == 0:
                gain = cross[k + 1, b].T @ np.linalg.inv(p_[k + 1, b])
                mean = m[k, b] + gain @ (mean - m_[k + 1, b])
                covariance = p[k, b] + gain @ (covariance - p_[k + 1, b]) @ gain.T
            elif k < count - 1 and kind[k + 1, b] == 2:
                mean, covariance = m[k, b], p[k, b]
            np.testing.assert_allclose(found.mean[k, b], mean, atol=1e-9)
            np.testing.assert_allclose(found.covariance[k, b], covariance, atol=1e-9)
    first = smooth_first(FilteredRows(*(torch.tensor(each) for each in arrays)))
    np.testing.assert_allclose(first.mean[0], found.mean[0], atol=1e-9)
    np.testing.assert_allclose(first.covariance[0], found.covariance[0], atol=1e-9)


def test_a_state_that_is_known_exactly_in_some_direction_can_be_smoothed():
    """A singular predicted covariance: the conditional moments of a singular Gaussian."""
    v = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    p = (v @ v.T)[None, None].repeat(2, 1, 1, 1)
    m = torch.zeros(2, 1, 2, 1, dtype=torch.float64)
    m[1] = v  # s = v z with z ~ N(0, 1); then z = 1 is known up to a variance of 0.25
    p[1] *= 0.25
    yes = torch.ones(2, 1, dtype=torch.bool)
    before = (v @ v.T)[None, None].repeat(2, 1, 1, 1)
    found = smooth(FilteredRows(m, p, torch.zeros_like(m), before, before, yes, ~yes))
    np.testing.assert_allclose(found.mean[0, 0], v, atol=1e-12)
    np.testing.assert_allclose(found.covariance[0, 0], 0.25 * v @ v.T, atol=1e-12)


PROCESS = (0.5, 3.0)


def walk(factor: float = 1.0, hypotheses=None) -> pc.Model:
    made = {"process_noise_sd": 0.3 * math.sqrt(factor), "observation_noise_sd": 0.2, "noise_sd": 1e-6}
    return adaptive_filter(lambda x, theta: -0.2 * x, 1, 1.0, **made, initial_mean=[0.0], hypotheses=hypotheses)


def test_a_bank_is_smoothed_by_the_weights_of_all_observations():
    """The average of separate smoothers by their evidence; rows are reviewed and merged on the way."""
    y = np.cumsum(0.3 * np.random.default_rng(0).standard_normal((60, 1)), 0)
    y += 0.2 * np.random.default_rng(1).standard_normal(y.shape)
    bank = pc.Hypotheses(
        process_factors=PROCESS,
        observation_factors=(1.0,),
        contrast=1.0,
        process_tilt=0.0,
        outliers=0.0,
        walks=(),
        drop=50.0,
    )
    session = walk(hypotheses=bank).start(smooth=True).run(y)
    found = session.result().smoothed("x")
    alone = [walk(factor).run(y, smooth=True) for factor in PROCESS]
    evidence = np.array([-float(each.free_action) for each in alone])
    weight = np.exp(evidence - np.logaddexp.reduce(evidence))
    parts = [each.smoothed("x") for each in alone]
    mean = sum(w * each.mean for w, each in zip(weight, parts, strict=True))
    second = sum(w * (each.sd**2 + each.mean**2) for w, each in zip(weight, parts, strict=True))
    np.testing.assert_allclose(found.mean, mean, atol=1e-5)
    np.testing.assert_allclose(found.sd**2, second - mean**2, atol=1e-5)


def test_rows_of_a_bank_are_smoothed_along_their_ancestry(tmp_path):
    """Told nothing: rows are dropped, copied and replayed; errors fall, intervals hold, and files continue."""
    rng = np.random.default_rng(4)
    x = simulate(lambda x: np.array([x[1], -x[0]]), np.array([1.0, 0.0]), 160, 0.1, np.diag([0.0, 0.04]), rng)
    y = x[:, :1] + 0.3 * rng.standard_normal((160, 1))
    model = adaptive_filter(
        pc.systems.linear([[0.0, 1.0], [-1.0, 0.0]]), 2, 0.1, mapping=pc.systems.linear([[1.0, 0.0]])
    )
    result = model.run(y, smooth=True)
    found, later = result.smoothed("x"), slice(30, None)
    filtered = ((result.mean("x")[later, 0] - x[later]) ** 2).mean()
    assert ((found.mean[later] - x[later]) ** 2).mean() < 0.75 * filtered
    assert ((found.mean[:30] - x[:30]) ** 2).mean() < 0.6 * ((result.mean("x")[:30, 0] - x[:30]) ** 2).mean()
    assert (np.abs(found.mean - x) < 2 * found.sd).mean() > 0.9
    session = model.start(smooth=True).run(y[:70])
    session.save(tmp_path / "run.safetensors")
    again = pc.resume(tmp_path / "run.safetensors", model).run(y[70:])
    np.testing.assert_allclose(again.result().smoothed("x").mean, found.mean, atol=1e-7)
    np.testing.assert_allclose(again.smoothed(100)["x"].mean, found.mean[59], atol=1e-6)


def test_a_nonlinear_state_is_smoothed_as_well_as_by_an_unscented_smoother():
    """A pendulum seen through a sine."""
    rng, n, dt = np.random.default_rng(1), 150, 0.05
    q, r, first = np.diag([0.05**2, 0.3**2]), np.array([[0.04]]), np.array([1.3, 0.2])
    x = simulate(lambda x: np.array([x[1], -9.8 * np.sin(x[0])]), np.array([1.5, 0.0]), n, dt, q, rng)
    y = np.sin(x[:, :1]) + 0.2 * rng.standard_normal((n, 1))
    graph, _ = adaptive_filter(
        lambda x, theta: torch.stack([x[..., 1], -9.8 * torch.sin(x[..., 0])], -1),
        2,
        dt,
        mapping=lambda x, theta: torch.sin(x[..., :1]),
        process_noise_sd=[0.05, 0.3],
        observation_noise_sd=0.2,
        initial_mean=first,
        initial_sd=0.5,
        hypotheses=None,
    )
    found = pc.Model(graph, STILL).run(y, smooth=True).smoothed("x")
    flow = lambda x: np.array([x[1], -9.8 * np.sin(x[0])])  # noqa: E731
    _, theirs, _ = rts(flow, lambda x: np.sin(x[:1]), y, first, 0.25 * np.eye(2), q, r, dt, unscented=True)
    assert ((found.mean - x) ** 2).mean() < 1.05 * ((theirs - x) ** 2).mean()
    assert (np.abs(found.mean - x) < 2 * found.sd).mean() > 0.92


def test_fitted_noise_levels_are_those_of_the_expectation_of_the_smoother():
    """At the maximum of the likelihood, expectation maximisation stands still: R = E[(y − Cx)²] given all data."""
    rng, n = np.random.default_rng(2), 120
    x = simulate(lambda x: -0.3 * x, np.array([1.0]), n, DT, np.diag([0.6]), rng)
    y = x + 0.25 * rng.standard_normal((n, 1))
    model = single_filter(
        pc.systems.linear([[-0.3]]),
        1,
        DT,
        process_noise_sd=0.7,
        observation_noise_sd=0.3,
        noise_sd=30.0,
        initial_mean=[1.0],
        initial_sd=0.5,
        integrator="local_linearisation",
    )
    fit = model.fit(y, smooth=True)
    found = fit.result.smoothed("x")
    expected = ((y - found.mean) ** 2 + found.sd**2).mean()
    assert np.exp(-fit.mean("noise_y"))[0] == pytest.approx(expected, rel=5e-3)
    assert ((found.mean - x) ** 2).mean() < ((fit.result.mean("x")[:, 0] - x) ** 2).mean()


def test_batches_results_on_disk_and_the_command_line(tmp_path):
    y = np.random.default_rng(0).standard_normal((2, 30, 1))
    model = pc.Model(walk().graph, walk().schedule)
    result = model.run(y, smooth=True)
    for i in range(2):
        alone = model.run(y[i], smooth=True).smoothed("x")
        np.testing.assert_allclose(result.smoothed("x").mean[i], alone.mean, atol=1e-12)
    assert result.element(1).smoothed("x").mean.shape == (30, 1)
    read = pc.Result.load(result.save(tmp_path / "result.nc"))
    np.testing.assert_array_equal(read.smoothed("x").sd, result.smoothed("x").sd)
    graph, schedule = adaptive_filter(
        pc.systems.linear([[-0.2]]), 1, 1.0, process_noise_sd=0.3, observation_noise_sd=0.2, hypotheses=None
    )
    pc.Model(graph, schedule).save(tmp_path / "model.yaml")
    np.savetxt(tmp_path / "y.csv", y[0], header="y.0", comments="")
    files = ["--observations", str(tmp_path / "y.csv"), "--output", str(tmp_path / "out.nc")]
    done = CliRunner().invoke(app, ["run", str(tmp_path / "model.yaml"), *files, "--smooth"])
    assert done.exit_code == 0, done.output
    assert pc.Result.load(tmp_path / "out.nc").smoothed("x").mean.shape == (30, 1)


def test_a_lost_observation_is_smoothed_like_a_missing_one():
    """With on_divergence="hold", a state repeats at an observation that it cannot take in."""
    y = np.random.default_rng(3).standard_normal((30, 1))
    model = pc.Model(walk().graph, STILL)
    y[12] = 1e200  # its square overflows
    result = model.run(y, smooth=True, on_divergence="hold", screen=False)
    assert result.fallbacks["hold"] == 1
    missing = y.copy()
    missing[12] = np.nan
    other = model.run(missing, smooth=True).smoothed("x")
    keep = np.arange(30) != 12
    np.testing.assert_allclose(
        result.smoothed("x").mean[keep], other.mean[keep], atol=5e-4
    )  # one step of two intervals


def test_errors_say_what_to_do_instead():
    model = walk()
    with pytest.raises(SettingError, match=r"start it by model.start\(smooth=2\)"):
        model.start().run(np.zeros((5, 1))).smoothed(2)
    with pytest.raises(SettingError, match="from 0 to 3"):
        model.start(smooth=3).run(np.zeros((9, 1))).smoothed(4)
    with pytest.raises(ObservationError, match="there are 2"):
        model.start(smooth=3).run(np.zeros((2, 1))).smoothed(2)
    with pytest.raises(GraphError, match="one state, a KalmanStateNode"):
        odem().run(np.zeros((5, 3)), smooth=True)
    with pytest.raises(SettingError, match="smooth is True, or the largest lag"):
        model.start(smooth=0)
    with pytest.raises(SettingError, match="every observation"):
        model.run(np.zeros((5, 1)), smooth=True, record=pc.Record(every=2))
    with pytest.raises(ResultError, match="smooth=True"):
        model.run(np.zeros((5, 1))).smoothed("x")


def test_rows_that_are_copied_twice_between_observations_keep_their_past():
    """Elements of a bank are copied by a review and again by a division, and the last row is replaced."""
    trail = Trail(None)
    first = torch.arange(8.0).reshape(2, 4, 1)  # two observations, elements 0 to 3
    trail.add({"x": first})
    trail.branch(torch.tensor([2, 3, 1]))
    trail.branch(torch.tensor([0, 2, 2, 1]))
    trail.replace_last({"x": torch.tensor([[10.0], [11.0], [12.0], [13.0]])})
    trail.add({"x": torch.full((1, 4, 1), 20.0)})
    found = trail.rows()["x"][..., 0]
    torch.testing.assert_close(found[0], torch.tensor([2.0, 1.0, 1.0, 3.0]))
    torch.testing.assert_close(found[1], torch.tensor([10.0, 11.0, 12.0, 13.0]))
    trail.branch(torch.tensor([3, 0]))
    trail.replace_last({"x": torch.tensor([[30.0], [31.0]])})
    torch.testing.assert_close(trail.rows()["x"][..., 0], torch.tensor([[3.0, 2.0], [13.0, 10.0], [30.0, 31.0]]))
