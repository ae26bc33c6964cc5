"""Missing observations carry no evidence, and derivatives across gaps are correct."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from student_t import StudentTSensoryNode

import pcnet as pc
from pcnet.errors import ObservationError, SettingError
from pcnet.graphs import odem
from pcnet.model.links import Predicts
from pcnet.nodes import GeneralisedStateNode, InputNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.generalised import taylor_operator, temporal_covariance, temporal_precision
from pcnet.numerics.kernels import SquaredExponential
from pcnet.numerics.precision import CholeskyPrecision, Precision, leading_precisions

MIX = torch.tensor([[1.0, 0.3], [-0.2, 0.8], [0.5, 0.5], [1.0, -1.0]], dtype=torch.float64)
EXPECTED = torch.tensor([4.0, 9.0, 2.0, 6.0], dtype=torch.float64)


@pc.TracedFunction
def curl(x, theta):
    return torch.stack([x[..., 1] * theta[..., 0], -x[..., 0] + 0.1 * x[..., 1] ** 2], -1)


@functools.cache  # so that it is traced once
def bent(rows):
    matrix = MIX[list(rows)]
    return pc.TracedFunction(lambda x, theta: torch.tanh(x) @ matrix.to(x).T + 0.1 * x[..., :1] ** 2)


def graph_of(rows, *, orders=2, channels="each", sensor=SensoryNode, curvature="gauss-newton", dt=0.1, **options):
    """A state seen through some of four channels."""
    x = GeneralisedStateNode("x", dim=2, orders=3, flow=curl, initial_mean=[[0.5, -0.3], [0.2, 0.1], [0.0, 0.3]])
    y = sensor("y", dim=len(rows), orders=orders, dt=dt, **options)
    graph = pc.Graph()
    graph.predicts(x, y, via=bent(tuple(rows)))
    graph.parametrises(ParameterNode("theta", mean=[0.8], sd=0.4), x)
    graph.weighs(PrecisionNode("nx", prior_precision=5.0, sd=0.3, correlation_time=0.5), x)
    noise = PrecisionNode(
        "ny", prior_precision=EXPECTED[rows], sd=0.3, correlation_time=0.4, channels=channels, curvature=curvature
    )
    graph.weighs(noise, y)
    return graph


def scattered(dim=4, orders=2, seed=0):
    return torch.randn(orders, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=12)
@given(
    st.sets(st.integers(0, 3), min_size=1, max_size=3),
    st.sampled_from([SensoryNode, StudentTSensoryNode]),
    st.sampled_from(["gauss-newton", "exact"]),
)
def test_a_missing_channel_equals_a_model_without_it(seen, sensor, curvature):
    rows = sorted(seen)
    ys = scattered()
    holey = torch.full_like(ys, math.nan)
    holey[:, rows] = ys[:, rows]
    options = {"derivatives": "given", "sensor": sensor, "curvature": curvature}
    with_gaps = graph_of([0, 1, 2, 3], **options).start(pc.generalised_filtering()).step(holey.flatten())
    without = graph_of(rows, **options).start(pc.generalised_filtering()).step(ys[:, rows].flatten())
    for name in ("x", "theta", "nx"):
        torch.testing.assert_close(with_gaps.mean(name), without.mean(name), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(with_gaps.sd(name), without.sd(name), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(with_gaps.mean("ny")[rows], without.mean("ny"), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(with_gaps.sd("ny")[rows], without.sd("ny"), rtol=1e-11, atol=1e-12)
    rest = [i for i in range(4) if i not in rows]  # of these nothing is learned
    torch.testing.assert_close(with_gaps.mean("ny")[rest], EXPECTED[rest].log() - 0.3**2 / 2)
    torch.testing.assert_close(with_gaps.sd("ny")[rest], torch.full((len(rest),), 0.3, dtype=torch.float64))
    torch.testing.assert_close(with_gaps.free_energy, without.free_energy, rtol=1e-10, atol=1e-10)


def test_missing_last_channels_of_a_full_precision_equal_a_model_without_them():
    """Channel i is conditioned on those before it, so couplings of the first channels do not depend on the rest."""
    ys = scattered()
    holey = ys.clone()
    holey[:, 2:] = math.nan
    options = {"derivatives": "given", "channels": "full"}
    with_gaps = graph_of([0, 1, 2, 3], **options).start(pc.generalised_filtering()).step(holey.flatten())
    without = graph_of([0, 1], **options).start(pc.generalised_filtering()).step(ys[:, :2].flatten())
    for name in ("x", "theta", "nx"):
        torch.testing.assert_close(with_gaps.mean(name), without.mean(name), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(with_gaps.sd(name), without.sd(name), rtol=1e-9, atol=1e-10)
    same = [0, 1, 4]  # the two log-precisions, and the coupling of these channels
    torch.testing.assert_close(with_gaps.mean("ny")[same], without.mean("ny"), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(with_gaps.sd("ny")[same], without.sd("ny"), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(with_gaps.free_energy, without.free_energy, rtol=1e-9, atol=1e-9)


def test_only_the_first_orders_are_observed():
    kernel = SquaredExponential(0.3)
    covariance = temporal_covariance(kernel, 4)
    found, log_det = leading_precisions(temporal_precision(kernel, 4)[None])
    for r in range(1, 5):
        alone = torch.linalg.inv(covariance[:r, :r])
        torch.testing.assert_close(found[0, r, :r, :r], alone, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(log_det[0, r], torch.logdet(alone), rtol=1e-9, atol=1e-12)
        assert not found[0, r, r:].any()
        assert not found[0, r, :, r:].any()


@pytest.mark.parametrize("coupled", [False, True])
def test_the_precision_of_observed_entries_is_that_of_the_marginal(coupled):
    """Against the dense covariance restricted to observed entries, and derivatives by central differences."""
    rows, dim = 3, 4
    generator = torch.Generator().manual_seed(3)
    temporal = temporal_precision(SquaredExponential(0.6), rows)
    log_channel = torch.randn(dim, generator=generator, dtype=torch.float64)
    i, j = torch.tril_indices(dim, dim, -1)
    couplings = 0.7 * torch.randn(len(i), generator=generator, dtype=torch.float64)
    seen = torch.tensor([[3.0, 1.0, 0.0, 2.0]], dtype=torch.float64)
    error = torch.randn(1, rows, dim, generator=generator, dtype=torch.float64)
    there = (torch.arange(rows)[:, None] < seen).flatten()
    error = torch.where(there.view(1, rows, dim), error, 0.0)

    def dense(theta):
        factor = torch.eye(dim, dtype=torch.float64)
        if coupled:
            factor[i, j] = theta[dim:]
        channel = factor.T @ torch.diag(theta[:dim].exp()) @ factor
        covariance = torch.linalg.inv(torch.kron(temporal.contiguous(), channel.contiguous()))
        return torch.linalg.inv(covariance[there][:, there])

    def energy(theta):
        flat = error.flatten()[there]
        return 0.5 * (flat @ dense(theta) @ flat - torch.logdet(dense(theta)))

    theta = torch.cat([log_channel, couplings]) if coupled else log_channel
    factor = torch.eye(dim, dtype=torch.float64)
    factor[i, j] = couplings
    none = torch.zeros(1, dtype=torch.float64)
    whole = (
        CholeskyPrecision(temporal[None], log_channel[None], factor[None], none)
        if coupled
        else Precision(temporal[None], log_channel.exp()[None], none)
    )
    found = whole.observed(seen)
    expected = torch.zeros(rows * dim, rows * dim, dtype=torch.float64)
    expected[torch.outer(there, there)] = dense(theta).flatten()
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found.dense()[0], expected, **close)
    torch.testing.assert_close(found.log_det[0], torch.logdet(dense(theta)), **close)
    torch.testing.assert_close(found.weigh(error)[0].flatten(), expected @ error.flatten(), **close)
    left, right = (torch.randn(1, rows * dim, n, generator=generator, dtype=torch.float64) for n in (5, 40))
    torch.testing.assert_close(found.bilinear_form(left, right)[0], left[0].T @ expected @ right[0], **close)
    torch.testing.assert_close(found.quadratic_form(left)[0], left[0].T @ expected @ left[0], **close)

    def differences(function, at, h=1e-4):
        units = torch.eye(len(at), dtype=torch.float64) * h
        return torch.stack([(function(at + u) - function(at - u)) / (2 * h) for u in units], -1)

    slope = found.gradient(error, found.weigh(error))[0]
    torch.testing.assert_close(slope, differences(energy, theta), rtol=1e-5, atol=1e-5)
    curvature = found.curvature(error, found.weigh(error))[0]
    full = curvature if curvature.dim() == 2 else curvature.diag_embed()
    numeric = differences(lambda at: differences(energy, at), theta)
    torch.testing.assert_close(full, numeric, rtol=1e-4, atol=1e-4)
    by = differences(dense, theta)
    moved = torch.einsum("ij,jkp->pik", torch.linalg.inv(dense(theta)), by)
    information = 0.5 * torch.einsum("pik,qki->pq", moved, moved)
    said = found.information()[0]
    said = said if said.dim() == 2 else said.diag_embed()
    torch.testing.assert_close(said, information, rtol=1e-5, atol=1e-5)


def test_each_batch_element_has_its_own_gaps():
    y = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y[0, 3:7, 1] = math.nan
    y[0, 0] = math.nan  # its states find their beginning an observation later
    y[2, 5] = math.nan
    together = graph_of([0, 1, 2, 3]).run(y, schedule=pc.odem(every=3))
    for k in range(3):
        alone = graph_of([0, 1, 2, 3]).run(y[k], schedule=pc.odem(every=3))
        for key, trace in alone.traces.items():
            np.testing.assert_allclose(together.traces[key].values[k], trace.values, rtol=1e-9, atol=1e-9)
    assert np.isnan(together.observation("y")[0, 3:7, :, 1]).all()
    assert np.isfinite(together.mean("x")).all()


@pytest.mark.parametrize("nothing", [None, {}, {"y": None}, np.full(4, math.nan)])
def test_a_missing_observation(nothing):
    y = scattered(orders=6)
    session = graph_of([0, 1, 2, 3]).start(pc.odem(every=2))
    reference = graph_of([0, 1, 2, 3]).start(pc.odem(every=2))
    for t in range(6):
        session.step(nothing if t in (0, 3) else y[t])
        reference.step(np.full(4, math.nan) if t in (0, 3) else y[t].numpy())
    torch.testing.assert_close(session.mean("x"), reference.mean("x"), rtol=0, atol=0)
    torch.testing.assert_close(session.free_action, reference.free_action, rtol=0, atol=0)


def test_states_are_initialised_by_the_first_observation_that_is_not_missing():
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, theta: -0.0 * x)
    y = SensoryNode("y", dim=1, orders=1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
    graph.weighs(PrecisionNode("ny", prior_precision=1.0, sd=0.1, correlation_time=1.0), y)
    result = graph.run(iter([None, None, [7.0], None]), schedule=pc.states_only())
    np.testing.assert_allclose(result.mean("x")[:, 0, 0], [0, 0, 7, 7])


# --- derivatives ---
def sensed(values, times=None, **options):
    """The generalised observations that a sensory node makes of values of one channel, and which are seen."""
    sensor = SensoryNode("y", dim=1, **{"dt": 0.5, "orders": 2} | options)
    x = GeneralisedStateNode("x", dim=1, orders=sensor.orders, flow=pc.systems.linear([[-1.0]]))
    graph = pc.Graph()
    graph.predicts(x, sensor)
    graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
    graph.weighs(PrecisionNode("ny", prior_precision=1.0, sd=0.1, correlation_time=1.0), sensor)
    result = graph.run(np.asarray(values)[:, None], schedule=pc.states_only(), record=("observation",), times=times)
    return result.observation("y")[..., 0]


NAN = math.nan


def test_differences_span_short_gaps_and_restart_after_long_ones():
    y = [1.0, 2.0, NAN, 5.0, NAN, NAN, 4.0, 6.0, 7.0]
    expected = [[1, 0], [2, 2], [NAN, NAN], [5, 3], [NAN, NAN], [NAN, NAN], [4, NAN], [6, 4], [7, 2]]
    np.testing.assert_allclose(sensed(y), expected)
    expected[6] = [4, -2 / 3]
    np.testing.assert_allclose(sensed(y, max_gap=3.0), expected)


def test_derivative_init_seen_leaves_unknown_derivatives_missing():
    y = [1.0, 2.0, 5.0, 5.0, NAN, NAN, NAN, 3.0, 4.0]
    nothing = [NAN, NAN, NAN]
    expected = [[1, NAN, NAN], [2, 2, NAN], [5, 6, 8], [5, 0, -12], *[nothing] * 3, [3, NAN, NAN], [4, 2, NAN]]
    np.testing.assert_allclose(sensed(y, orders=3, derivative_init="seen"), expected)


def test_a_late_channel_follows_derivative_init():
    y = [NAN, NAN, NAN, 3.0, 4.0]
    nothing = [NAN, NAN]
    np.testing.assert_allclose(sensed(y), [*[nothing] * 3, [3, 0], [4, 2]])
    np.testing.assert_allclose(sensed(y, derivative_init="zeros"), [*[nothing] * 3, [3, 6], [4, 2]])
    np.testing.assert_allclose(sensed(y, derivative_init="seen"), [*[nothing] * 3, [3, NAN], [4, 2]])


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0.05, 0.9), min_size=6, max_size=12), st.sets(st.integers(0, 11), max_size=3))
def test_differences_use_the_times_of_observations(intervals, holes):
    """A parabola with missing samples, against numpy."""
    times = np.cumsum(intervals)
    y = 3 * times**2 - times
    there = np.array([k not in holes for k in range(len(times))])
    found = sensed(np.where(there, y, NAN), times, max_gap=100.0, derivative_init="seen")
    kept, at = y[there], times[there]
    np.testing.assert_allclose(found[there, 0], kept)
    np.testing.assert_allclose(found[there, 1][1:], np.diff(kept) / np.diff(at), rtol=1e-7, atol=1e-7)
    assert np.isnan(found[~there]).all()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0.2, 0.9), min_size=6, max_size=12), st.sets(st.integers(0, 11), max_size=3))
def test_a_fit_recovers_the_derivatives_of_a_parabola(intervals, holes):
    times = np.cumsum(intervals)
    y = 3 * times**2 - times + 1
    there = np.array([k not in holes for k in range(len(times))])
    found = sensed(
        np.where(there, y, NAN), times, orders=3, derivatives="fit", window=5, max_gap=100.0, derivative_init="seen"
    )
    enough = there & (np.cumsum(there) >= 3)
    window = np.array([there[max(0, k - 4) : k + 1].sum() for k in range(len(times))])
    enough &= window >= 3
    truth = np.stack([y, 6 * times - 1, np.full_like(times, 6)], -1)
    np.testing.assert_allclose(found[enough], truth[enough], rtol=1e-6, atol=1e-6)
    assert np.isnan(found[there & (np.cumsum(there) == 1)][:, 1:]).all()
    assert np.isnan(found[~there]).all()


def test_a_fit_recovers_after_a_gap():
    times = 0.5 * np.arange(30)
    y = 3 * times**2 - times + 1
    y[10:14] = NAN
    found = sensed(y, orders=3, derivatives="fit", window=4)
    truth = np.stack([y, 6 * times - 1, np.full_like(times, 6)], -1)
    np.testing.assert_allclose(found[20:], truth[20:], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found[4:10], truth[4:10], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found[0], [1, 0, 0], atol=1e-12)  # standing still before


def test_a_fit_smooths_noise_that_differences_amplify():
    generator = np.random.default_rng(0)
    times = 0.5 * np.arange(400)
    y = times + 0.1 * generator.normal(size=400)
    rough, smooth = (sensed(y, **options)[20:, 1] for options in ({}, {"derivatives": "fit", "window": 10}))
    # the variance of a least-squares slope over n samples is 12σ²/(dt²(n³ − n)), of a difference 2σ²/dt²
    np.testing.assert_allclose(smooth.var(), 12 * 0.01 / (0.25 * 990), rtol=0.3)
    np.testing.assert_allclose(rough.var(), 2 * 0.01 / 0.25, rtol=0.3)


def test_values_only():
    found = sensed([1.0, 2.0, NAN, 4.0], derivatives="none", dt=None)
    np.testing.assert_array_equal(found, [[1, NAN], [2, NAN], [NAN, NAN], [4, NAN]])


def test_the_taylor_operator_ignores_missing_samples():
    ages = torch.tensor([0.0, math.inf, 2.0, math.inf], dtype=torch.float64)
    operator = taylor_operator(ages, 3)
    samples = torch.tensor([5.0, 100.0, 1.0, 100.0], dtype=torch.float64)
    torch.testing.assert_close(operator @ samples, torch.tensor([5.0, 2.0, 0.0], dtype=torch.float64))


def test_invalid_settings_of_derivatives_are_rejected():
    with pytest.raises(SettingError, match="window is for"):
        SensoryNode("y", dim=1, orders=2, dt=0.1, window=4)
    with pytest.raises(SettingError, match="must be 3 or more"):
        SensoryNode("y", dim=1, orders=3, dt=0.1, derivatives="fit", window=2)
    with pytest.raises(SettingError, match="max_gap must be 1"):
        SensoryNode("y", dim=1, orders=3, dt=0.1, max_gap=0.5)
    with pytest.raises(SettingError, match="give dt"):
        SensoryNode("y", dim=1, orders=3, derivatives="fit")


# --- inputs ---
def test_a_missing_input_holds_its_value_at_rest():
    def graph():
        x = GeneralisedStateNode("x", dim=1, orders=2, flow=lambda x, v, theta: v - x)
        v = pc.CauseNode("v", dim=1, orders=2)
        made = pc.Graph()
        made.predicts(x, SensoryNode("y", dim=1, orders=1))
        made.drives(v, x)
        made.predicts(InputNode("u", dim=1, orders=2, dt=0.1), v)
        for name in ("x", "y", "v"):
            made.weighs(PrecisionNode(f"n{name}", prior_precision=10.0, sd=0.1, correlation_time=0.5), made[name])
        return made

    session = graph().start(pc.states_only(), record=())
    for value in (1.0, 2.0, None):
        session.step({"y": [0.0], "u": None if value is None else [value]})
    (link,) = session.context("v").above_of(Predicts)
    assert session.context("v").message(link).value[0, :, 0].tolist() == [2.0, 0.0]
    with pytest.raises(ObservationError, match="InputNode 'u' has no value yet"):
        graph().start(pc.states_only()).step({"y": [0.0]})


# --- sweeps ---
def test_a_sweep_over_observations_with_gaps(tmp_path):
    y = 1 + 0.1 * np.random.default_rng(0).normal(size=(40, 3))
    y[3:9, 1] = NAN
    y[20] = NAN

    def build(kappa):
        return odem(orders=2, kappa=kappa, every=8)

    study = pc.sweep(build, {"kappa": [1.0, 0.5]}, y, tmp_path / "study.db", processes=1)
    table = study.to_dataframe().set_index("kappa")
    for kappa in (1.0, 0.5):
        graph, schedule = build(kappa)
        np.testing.assert_allclose(table.free_action[kappa], graph.run(y, schedule=schedule).free_action, rtol=1e-9)
    with pytest.raises(pc.errors.StudyError, match="NaN where missing"):
        pc.sweep(build, {"kappa": [1.0]}, y * np.inf, tmp_path / "other.db")
