"""Coloured noise and learned correlation times, against Kalman filters of the augmented state and numerical
derivatives.
"""

import math

import numpy as np
import pytest
import torch
from scipy.linalg import block_diag, expm

import pcnet as pc
from pcnet.errors import GraphError, SettingError
from pcnet.functions.closed_form import Linear
from pcnet.nodes import GeneralisedStateNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.nodes.precision import precision_score
from pcnet.numerics.coloured_noise import NoiseSpec, noise_model
from pcnet.numerics.estimators import Newton, NoiseScoring
from pcnet.numerics.generalised import temporal_precision
from pcnet.numerics.kernels import Autocorrelation, Matern, SquaredExponential, White
from pcnet.numerics.precision import Precision
from support.filters import single_filter
from support.kalman import (
    DT,
    FIRST,
    FLOW,
    GAIN,
    NOISE_VARIANCE,
    OBSERVATIONS,
    STILL,
    Kalman,
    central_differences,
    one_pass,
    step_matrices,
    transition,
)

LAST_X, LAST_Y, WIDTH = 0.7, 0.25, 0.35
"""How long noises last that do, and how wide the smooth ones are."""


def noise(name: str, log, kernel, **options) -> PrecisionNode:
    return PrecisionNode(name, mean=log, sd=1.0, kernel=kernel, estimator=Newton(), **options)


def graph_of(own: list[PrecisionNode], theirs: PrecisionNode, **options) -> pc.Graph:
    x = KalmanStateNode("x", dim=2, flow=Linear(FLOW), initial_mean=FIRST, initial_sd=0.9, **options)
    y = SensoryNode("y", dim=3, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=Linear(GAIN))
    for each in own:
        graph.weighs(each, x)
    graph.weighs(theirs, y)
    return graph


# --- noises that last, and several of them ---------------------------------------------------------------------------
LOGS = {"white_x": np.array([0.4]), "drift": np.array([0.9, 0.2]), "noise_y": np.array([1.1])}
DATA = np.where(np.random.default_rng(3).uniform(size=OBSERVATIONS.shape) < 0.1, np.nan, OBSERVATIONS)


EULER = {"integrator": "euler", "process_noise": "held"}


def lasting_graph(logs, **scheme) -> pc.Graph:
    """A state with white and Ornstein–Uhlenbeck noise, observed with Ornstein–Uhlenbeck noise."""
    own = [
        noise("white_x", logs["white_x"], White(), channels="shared"),
        noise("drift", logs["drift"], Matern(LAST_X, 0.5)),
    ]
    return graph_of(own, noise("noise_y", logs["noise_y"], Matern(LAST_Y, 0.5), channels="shared"), **scheme)


def lasting_kalman(logs, **scheme) -> Kalman:
    """The textbook's filter of (x, drift, noise of y).

    The drift enters the state by Simpson's rule, h/6 (F + 4e^(−h/2τ) M + e^(−h/τ) I), by Euler's method hI. Its new
    noise enters by h/2 of its value at the end, by Euler's method not before the next step. Beside its noise an
    observation has a white variance, a share of the first guess that is not learned.
    """
    keep_x, keep_y = math.exp(-DT / LAST_X), math.exp(-DT / LAST_Y)
    white, drift, of_y = (
        np.exp(-np.broadcast_to(logs[n], d)) for n, d in (("white_x", 2), ("drift", 2), ("noise_y", 3))
    )
    f_x, q_x = transition(FLOW, white, DT, **scheme)
    enters = DT * np.eye(2)
    if scheme != EULER:
        moved, half = step_matrices(FLOW, DT)
        enters = DT / 6 * (moved + 4 * math.sqrt(keep_x) * half + keep_x * np.eye(2))
    f = np.block(
        [
            [f_x, enters, np.zeros((2, 3))],
            [np.zeros((2, 2)), keep_x * np.eye(2), np.zeros((2, 3))],
            [np.zeros((3, 4)), keep_y * np.eye(3)],
        ]
    )
    q = block_diag(q_x, np.zeros((2, 2)), np.diag(of_y * (1 - keep_y**2)))
    new = np.vstack([(0.0 if scheme == EULER else DT / 2) * np.eye(2), np.eye(2)])
    q[:4, :4] += new @ np.diag(drift * (1 - keep_x**2)) @ new.T
    first = np.diag(np.concatenate([[0.81, 0.81], drift, of_y]))
    mean = np.concatenate([FIRST, np.zeros(5)])
    rest = 1e-5 * LAST_Y / DT * np.exp(-LOGS["noise_y"]) * np.eye(3)
    return Kalman(f, q, np.hstack([GAIN, np.zeros((3, 2)), np.eye(3)]), rest, mean, first)


@pytest.mark.parametrize("scheme", [{}, EULER], ids=["rk4", "euler"])
def test_ornstein_uhlenbeck_noise_is_filtered_as_an_augmented_state(scheme):
    session, oracle = lasting_graph(LOGS, **scheme).start(STILL, record=()), lasting_kalman(LOGS, **scheme)
    for y in DATA:
        session.step(y)
        oracle.step(y)
        np.testing.assert_allclose(session.mean("x")[0].numpy(), oracle.mean[:2], rtol=1e-9, atol=1e-11)
        belief = session.context("x").state.belief
        np.testing.assert_allclose(belief.mean[0].numpy(), oracle.mean, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(belief.covariance[0].numpy(), oracle.covariance, rtol=1e-8, atol=1e-11)
    assert float(session.total_accuracy) == pytest.approx(oracle.log_evidence, rel=1e-9)


def test_forecasts_include_ornstein_uhlenbeck_noise():
    """Equal to the Kalman filter without further observations."""
    session, oracle = lasting_graph(LOGS).start(STILL, record=()), lasting_kalman(LOGS)
    for y in DATA:
        session.step(y)
        oracle.step(y)
    before = session.mean("x")
    coming = session.forecast(1.0, 2 * DT, parameters=False)
    for k in range(5):
        for _ in range(2):
            oracle.step(np.full(3, np.nan))
        np.testing.assert_allclose(coming.mean("x")[k], oracle.mean[:2], rtol=1e-9)
        np.testing.assert_allclose(coming.sd("x")[k], np.sqrt(np.diag(oracle.covariance)[:2]), rtol=1e-9)
        np.testing.assert_allclose(coming.mean("y")[k], oracle.g @ oracle.mean, rtol=1e-9)
        spread = oracle.g @ oracle.covariance @ oracle.g.T + oracle.r
        np.testing.assert_allclose(coming.sd("y")[k], np.sqrt(np.diag(spread)), rtol=1e-9)
    assert torch.equal(session.mean("x"), before)


def test_forecasts_include_the_uncertainty_of_parameters():
    """A known state moves by dt θ in each step and is observed times θ': jointly normal in θ."""
    x = KalmanStateNode(
        "x", dim=1, flow=pc.TracedFunction(lambda x, theta: 0 * x + theta), initial_mean=[2.0], initial_sd=1e-9
    )
    y = SensoryNode("y", dim=1, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=pc.TracedFunction(lambda x, theta: x * theta))
    graph.parametrises(ParameterNode("theta", mean=[0.5], sd=0.3, estimator=Newton()), x)
    graph.parametrises(ParameterNode("gain", mean=[1.5], sd=0.2, estimator=Newton()), x, of=y)
    graph.weighs(noise("noise_x", 60.0, White()), x)
    graph.weighs(noise("noise_y", math.log(4.0), White()), y)
    session = graph.start(STILL, record=()).step([np.nan])
    for parameters in (True, False):
        coming = session.forecast(3 * DT, DT, parameters=parameters)
        reached = float(session.mean("x")) + 0.5 * DT * np.arange(1, 4)
        moved = 0.3 * DT * np.arange(1, 4) * parameters
        np.testing.assert_allclose(coming.mean("x")[:, 0], reached, rtol=1e-9)
        np.testing.assert_allclose(coming.sd("x")[:, 0], moved, rtol=1e-6, atol=1e-8)
        seen = np.sqrt((1.5 * moved) ** 2 + (0.2 * reached) ** 2 * parameters + 0.25)
        np.testing.assert_allclose(coming.sd("y")[:, 0], seen, rtol=1e-6)


@pytest.mark.parametrize("correlation_time", [0.3, Matern(0.3, 0.5)])
def test_initialisation_with_coloured_noise(correlation_time):
    model = single_filter(lambda x, _: -x, 2, DT, correlation_time=correlation_time)
    session = model.graph.start(model.schedule).step([3.0, -1.0])
    np.testing.assert_allclose(session.mean("x")[0].numpy(), [3.0, -1.0], rtol=0.2)


def test_a_reset_after_a_long_pause():
    model = single_filter(lambda x, _: -x, 1, 0.01, correlation_time=0.1)
    session = model.graph.start(model.schedule, on_divergence="reset", screen=False)
    for i in range(20):
        session.step([1.0], t=0.01 * i)
    session.step([1e200], t=1.0).step([1.0], t=1.01).step([1.0], t=1.02)
    assert float(session.fallbacks["reset"]) == 1
    assert float(session.mean("x")) == pytest.approx(1.0, abs=0.1)


def test_given_noise_levels_stay_constant():
    x = KalmanStateNode("x", dim=2, flow=Linear(FLOW), initial_mean=FIRST, learn_noise=False)
    y = SensoryNode("y", dim=3, orders=1, dt=DT)
    graph = pc.Graph()
    graph.predicts(x, y, via=Linear(GAIN))
    graph.weighs(noise("noise_x", [0.5, 0.2], White()), x)
    graph.weighs(noise("noise_y", [0.1, 0.2, 0.3], White()), y)
    session = graph.start(pc.adaptive_filtering(), record=()).run(OBSERVATIONS)
    assert session.mean("noise_x").tolist() == pytest.approx([0.5, 0.2])
    assert session.mean("noise_y").tolist() == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_error_time": 0.0}, "adaptive_filter: model_error_time must be positive"),
        ({"correlation_time_sd": 1.0}, "correlation_time_sd needs"),
    ],
)
def test_invalid_noise_settings_are_rejected(options, message):
    with pytest.raises(SettingError, match=message):
        single_filter(lambda x, _: -x, 1, 0.01, **options)


@pytest.mark.parametrize("node", LOGS)
def test_each_noise_gets_its_own_gradient_of_the_log_evidence(node):
    session = one_pass(lasting_graph(LOGS), DATA)

    def evidence(log) -> float:
        oracle = lasting_kalman({**LOGS, node: log})
        for y in DATA:
            oracle.step(y)
        return oracle.log_evidence

    expected = central_differences(evidence, LOGS[node], 1e-5)
    np.testing.assert_allclose(
        -session.context(node).state.accumulated.gradient[0].numpy(), expected, rtol=1e-6, atol=1e-8
    )


def test_only_kalman_states_may_have_several_noises():
    graph = lasting_graph(LOGS)
    with pytest.raises(GraphError, match="'y' already has the precision 'noise_y'"):
        graph.weighs(noise("more", 0.0, White()), graph["y"])
    with pytest.raises(GraphError, match="'drift' already weighs 'x'"):
        graph.weighs(graph["drift"], graph["x"])
    graph.weighs(noise("third", 0.0, White()), graph["x"])


# --- widths of noises that are filtered ------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_correlation_time_wrong_by_a_factor_of_three_is_recovered():
    """Too short and too long, a slow oscillator with smooth observation noise, 20 seeds: within 20 % and three sds."""
    width, dt, flow = 0.1, 0.01, Linear([[-0.1, 1.0], [-1.0, -0.1]])
    world = pc.simulate.simulate(
        flow,
        parameters=[],
        initial=[1.0, 0.0],
        samples=1000,
        dt=dt,
        state_sd=0.05,
        observation_sd=0.1,
        width=width / math.sqrt(2),
        seed=list(range(20)),
    )
    model = single_filter(
        flow,
        2,
        dt,
        process_noise_sd=0.05,
        observation_noise_sd=0.1,
        correlation_time=width * torch.tensor([[1 / 3], [3.0]], dtype=torch.float64),
        correlation_time_sd=1.0,
    )
    result = model.graph.run(world.observations, model.schedule, record=["correlation_time", "log_correlation_time_sd"])
    apart = np.log(result.traces["noise_y.correlation_time"].values[..., -1, 0] / width)
    assert apart.shape == (2, 20)
    assert np.abs(apart).max() < math.log(1.2)
    assert (np.abs(apart) < 3 * result.traces["noise_y.log_correlation_time_sd"].values[..., -1, 0]).all()


def test_observations_estimate_the_correlation_time_by_their_derivatives():
    """Against log √5|ÿ/y⃛| by differences in numpy; after a gap there is no estimate until four observations."""
    y = np.random.default_rng(0).standard_normal((12, 3)).cumsum(0)
    y[5, 1] = np.nan
    first, second = math.log(WIDTH), 0.3
    own = noise("noise_x", 0.0, White())
    theirs = noise("noise_y", second, SquaredExponential(WIDTH), correlation_time_sd=1.0)
    session = one_pass(graph_of([own], theirs), y)
    bends, jerks = np.diff(y, 2, axis=0)[1:] / DT**2, np.diff(y, 3, axis=0) / DT**3
    z = np.log(np.sqrt(5) * np.abs(bends / jerks))
    weight = 4 / math.pi**2 * DT / (math.sqrt(math.pi) * WIDTH)
    gathered = session.context("noise_y").state.accumulated
    assert -gathered.gradient[0, -1].item() == pytest.approx(weight * np.nansum(z - first), rel=1e-9)
    assert gathered.curvature[0, -1, -1].item() == pytest.approx(weight * np.isfinite(z).sum(), rel=1e-9)


def test_a_kalman_state_uses_the_learned_correlation_time():
    """After retuning, its noise has the lengthscale of the precision node."""
    session = graph_of(
        [noise("noise_x", 0.0, White())],
        PrecisionNode("noise_y", mean=0.0, sd=1.0, correlation_time=WIDTH, correlation_time_sd=1.0, estimator=Newton()),
    ).start(pc.adaptive_filtering(learn_every=8), record=())
    session.run(np.random.default_rng(0).standard_normal((24, 3)).cumsum(0))
    learned = session.read("noise_y", "correlation_time").item()
    assert learned != WIDTH
    assert session.context("x").state.reference.lengthscale[0, 1].item() == pytest.approx(learned)


def test_a_correlation_time_cannot_be_fitted_in_passes():
    model = single_filter(lambda x, _: -x, 3, DT, correlation_time=WIDTH, correlation_time_sd=1.0)
    with pytest.raises(GraphError, match="learns a lengthscale"):
        model.graph.fit(OBSERVATIONS)


@pytest.mark.parametrize("width", [0.004, 0.05])
def test_batch_elements_with_different_correlation_times_equal_single_runs(width):
    """With noise that changes faster than observations come in some elements, and not in others."""
    data = np.random.default_rng(5).standard_normal((60, 1)).cumsum(0) / 10

    def run(smoothness):
        model = single_filter(lambda x, _: -x, 1, 0.01, correlation_time=smoothness)
        return model.graph.run(data, model.schedule, record=["mean"]).mean("x")

    both = run(torch.tensor([0.004, 0.05], dtype=torch.float64))
    np.testing.assert_allclose(both[[0.004, 0.05].index(width)], run(width), rtol=1e-9, atol=1e-12)


# --- widths of generalised errors -----------------------------------------------------------------------------------
def energy(parameters: torch.Tensor, moment: torch.Tensor, kernel) -> torch.Tensor:
    """½tr(Π̃M) − ½log|Π̃| of λ (2) and log w for a second moment M of errors, order by order and channel by channel."""
    temporal = temporal_precision(kernel.with_lengthscale(parameters[2].exp()), 3)
    full = torch.kron(temporal.contiguous(), parameters[:2].exp().diag().contiguous())
    return 0.5 * (full * moment).sum() - 0.5 * torch.logdet(full)


@pytest.mark.parametrize(
    "kernel", [SquaredExponential(0.4), Matern(0.4, 3.5), Autocorrelation(lambda h: 1 / (1 + h**2), 0.4)]
)
def test_the_gradient_in_the_correlation_time_is_that_of_the_energy(kernel):
    point = torch.tensor([0.3, -0.5, math.log(0.4)], dtype=torch.float64)
    error = torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    temporal = temporal_precision(kernel, 3)[None]
    precision = Precision(temporal, point[None, :2].exp(), torch.zeros(1, dtype=torch.float64), learns_lengthscale=True)
    said = precision_score(precision, error, precision.weigh(error))
    flat = error.reshape(-1)
    slope = torch.func.grad(energy)(point, torch.outer(flat, flat), kernel)
    torch.testing.assert_close(-said.weighted[0], slope)
    # in the mean over errors of that precision, the curvature is that of the energy of their second moment
    expected = torch.func.hessian(energy)(point, torch.linalg.inv(precision.dense()[0]), kernel)
    torch.testing.assert_close(said.precision[0], expected)


def test_missing_orders_do_not_inform_the_correlation_time():
    """A channel with two of three orders has the gradient and curvature of these two; one with none has zero."""
    kernel = SquaredExponential(0.4)
    error = torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    error[:, 2:, 0], error[:, :, 1] = 0.0, 0.0
    level = torch.tensor([[2.0, 3.0]], dtype=torch.float64)
    nothing = torch.zeros(1, dtype=torch.float64)
    seen = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    some = Precision(temporal_precision(kernel, 3)[None], level, nothing, learns_lengthscale=True).observed(seen)
    alone = Precision(temporal_precision(kernel, 2)[None], level[:, :1], nothing, learns_lengthscale=True)
    heard = precision_score(some, error, some.weigh(error))
    expected = precision_score(alone, error[:, :2, :1], alone.weigh(error[:, :2, :1]))
    torch.testing.assert_close(heard.weighted[:, [0, 2]], expected.weighted)
    torch.testing.assert_close(heard.precision[:, [0, 2]][..., [0, 2]], expected.precision)
    assert not heard.precision[0, 1].any()


def test_a_precision_node_learns_the_correlation_time_of_generalised_errors():
    """Of a known constant state: within 20 % from a third and from three times the truth, in 20 seeds."""
    width, dt = 0.2, 0.01
    still = Linear([[0.0]])
    world = pc.simulate.simulate(
        still,
        parameters=[],
        initial=[0.0],
        samples=6000,
        dt=dt,
        state_sd=0.0,
        observation_sd=0.5,
        width=width / math.sqrt(2),
        seed=list(range(20)),
    )
    wrong = torch.tensor([1 / 3, 3.0], dtype=torch.float64)[:, None]
    x = GeneralisedStateNode("x", dim=1, orders=2, flow=still, initial_mean=[[0.0], [0.0]])
    y = SensoryNode("y", dim=1, orders=2, dt=dt)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("noise_x", mean=20.0, sd=0.1, correlation_time=width), x)
    rule = NoiseScoring()
    node = PrecisionNode(
        "noise_y", mean=0.0, sd=2.0, correlation_time=wrong * width, correlation_time_sd=1.0, estimator=rule
    )
    graph.weighs(node, y)
    schedule = pc.Schedule(
        name="noise of y alone",
        acts=(
            pc.act("observe", "sensory"),
            pc.act("accumulate", "noise_y"),
            *(pc.act(action, "noise_y", every=100) for action in ("update", "update_covariance", "renew_prior")),
        ),
    )
    result = graph.run(world.observations, schedule, record=["correlation_time", "log_correlation_time_sd", "mean"])
    names = ("correlation_time", "log_correlation_time_sd")
    found, sd = (result.traces[f"noise_y.{name}"].values[..., -1, 0] for name in names)
    assert found.shape == (2, 20)
    assert np.abs(np.log(found / width)).max() < math.log(1.2)
    assert result.traces["noise_y.mean"].values.shape[-1] == 1
    assert ((sd > 0) & (sd < 0.1)).all()


def test_correlation_times_that_cannot_be_learned_are_rejected():
    with pytest.raises(SettingError, match=r"noise.*has no lengthscale to learn"):
        noise("noise", 0.0, White(), correlation_time_sd=1.0)
    with pytest.raises(SettingError, match="correlation_time_sd excludes channels='full'"):
        noise("noise", 0.0, SquaredExponential(1.0), correlation_time_sd=1.0, channels="full")
    own = noise("noise_x", 0.0, SquaredExponential(1.0), correlation_time_sd=1.0)
    graph = graph_of([own], noise("noise_y", -np.log(NOISE_VARIANCE), White()))
    with pytest.raises(GraphError, match="the correlation time of 'noise_x' cannot be learned"):
        graph.run(OBSERVATIONS, STILL)
    theirs = noise("noise_y", 0.0, Matern(1.0, 2.5), correlation_time_sd=1.0)
    with pytest.raises(GraphError, match="the correlation time of the noise of 'y' can be learned only"):
        graph_of([noise("noise_x", 0.0, White())], theirs).run(OBSERVATIONS, STILL)


# --- noises in generalised coordinates -------------------------------------------------------------------------------
def model_of(kernel, orders=6):
    return noise_model(NoiseSpec(kernel, 1, 1), torch.zeros(1, dtype=torch.float64), orders)


def matern(smoothness: float, lag: float, lengthscale: float) -> float:
    """κ of Matérn noise, in closed form."""
    z = math.sqrt(2 * smoothness) * lag / lengthscale
    polynomial = {0.5: 1.0, 1.5: 1 + z, 2.5: 1 + z + z**2 / 3, 3.5: 1 + z + 2 * z**2 / 5 + z**3 / 15}
    return polynomial[smoothness] * math.exp(-z)


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5, 3.5])
@pytest.mark.parametrize("lag", [1e-6, 0.01, 0.3, 0.7, 2.0, 9.0])
def test_a_matern_noise_has_its_autocorrelation_at_all_lags(smoothness, lag):
    model = model_of(Matern(0.7, smoothness))
    assert model.n_latents == smoothness + 0.5
    moved = model.transition(torch.tensor([lag], dtype=torch.float64))
    assert moved.matrix[0, 0, 0].item() == pytest.approx(matern(smoothness, lag, 0.7), rel=1e-10, abs=1e-14)
    half = matern(smoothness, lag / 2, 0.7)
    assert moved.half[0, 0, 0].item() == pytest.approx(half, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("kernel", [Matern(0.7, 0.5), Matern(0.7, 2.5), SquaredExponential(0.7)], ids=repr)
@pytest.mark.parametrize("lag", [1e-4, 0.05, 0.7, 5.0])
def test_transitions_of_noises_are_exact(kernel, lag):
    """Φ = exp(FΔ) by scipy, and Q = I − ΦΦᵀ, because the coordinates are stationary with unit covariance."""
    model = model_of(kernel)
    moved = model.transition(torch.tensor([lag], dtype=torch.float64))
    drift = model.drift[0].numpy()
    expected = expm(drift * lag)
    np.testing.assert_allclose(moved.matrix[0], expected, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(moved.half[0], expm(drift * lag / 2), rtol=1e-11, atol=1e-13)
    stationary = np.eye(len(drift)) - expected @ expected.T
    np.testing.assert_allclose(moved.covariance[0], stationary, rtol=1e-9, atol=1e-12)
    source = np.zeros_like(drift)
    source[-1, -1] = -2 * drift[-1, -1]
    np.testing.assert_allclose(drift + drift.T, -source, atol=1e-13)


@pytest.mark.parametrize("orders", [2, 4, 6])
def test_smooth_noise_has_the_variances_of_its_motion(orders):
    """The derivatives of squared-exponential noise up to order n − 1, and its spectral density at frequency 0.

    Their covariances are (−1)^j κ^(i+j)(0), with κ^(2m)(0) = (−1)^m (2m − 1)!!/ℓ^2m. The density is ∫κ = √(2π)ℓ.
    """
    lengthscale, n = 0.7, orders - 1
    drift = model_of(SquaredExponential(lengthscale), orders).drift[0].numpy()
    rows = [np.eye(n)[0]]
    for _ in range(n - 1):
        rows.append(rows[-1] @ drift)
    found = np.array(rows) @ np.array(rows).T
    expected = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            m = (i + j) // 2
            if (i + j) % 2 == 0:
                expected[i, j] = (-1) ** (j + m) * math.prod(range(1, 2 * m, 2)) / lengthscale ** (2 * m)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-9)
    density = -2 * np.linalg.inv(drift)[0, 0]
    assert density == pytest.approx(math.sqrt(2 * math.pi) * lengthscale, rel=1e-10)


@pytest.mark.parametrize("kernel", [Matern(0.3, 1.0), Matern(0.3, 2.2)], ids=repr)
def test_matern_noises_that_are_no_filter_are_rejected(kernel):
    graph = graph_of([noise("noise_x", 0.0, kernel)], noise("noise_y", -np.log(NOISE_VARIANCE), White()))
    with pytest.raises(GraphError, match="use the smoothness 1/2, 3/2, 5/2"):
        graph.run(OBSERVATIONS, STILL)


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("where", ["process", "observation"])
def test_matern_noise_in_a_linear_model_equals_one_joint_gaussian(where, smoothness):
    """A level x with ẋ = −x/2 + ω and y = x + w at 40 times, conditioned once on all observations.

    Covariances of states are ∫∫e^(−(t − s + t′ − s′)/2) κ(s − s′) ds ds′, by quadrature on a fine grid.
    """
    steps, dt, decay, lengthscale, first, variance, seen = 40, 0.02, 0.5, 0.2, 0.3, 1.7, 0.05
    kernel = Matern(lengthscale, smoothness)

    def run(substeps: int):
        options = {"initial_mean": [0.4], "initial_sd": first, "learn_noise": False, "substeps": substeps}
        x = KalmanStateNode("x", dim=1, flow=Linear([[-decay]]), **options)
        y = SensoryNode("y", dim=1, orders=1, dt=dt)
        graph = pc.Graph()
        graph.predicts(x, y)
        graph.weighs(noise("noise_x", -math.log(variance), kernel if where == "process" else White()), x)
        graph.weighs(noise("noise_y", -math.log(seen), White() if where == "process" else kernel), y)
        found = graph.run(data[:, None], STILL, record=["mean", "covariance", "energy"])
        return np.array([found.mean("x")[-1, 0, 0], found.covariance("x")[-1, 0, 0], found.accuracy.sum()])

    times = dt * np.arange(steps)
    fall = np.exp(-decay * times)
    kappa = np.array([[matern(smoothness, abs(s - t), lengthscale) for s in times] for t in times])
    if where == "process":
        fine = 16
        grid = dt / fine * np.arange(fine * (steps - 1) + 1)
        lags = np.abs(grid[:, None] - grid)
        shape = np.vectorize(lambda lag: matern(smoothness, lag, lengthscale))(grid)
        weight = np.zeros((steps, len(grid)))
        for k in range(1, steps):
            n = fine * k
            rule = np.full(n + 1, 2.0)  # Simpson's
            rule[1::2], rule[0], rule[-1] = 4.0, 1.0, 1.0
            weight[k, : n + 1] = rule * dt / fine / 3 * np.exp(-decay * (times[k] - grid[: n + 1]))
        prior = variance * weight @ shape[np.rint(lags * fine / dt).astype(int)] @ weight.T
        s_noise = seen * np.eye(steps)
    else:
        prior = variance * (np.exp(-decay * np.abs(times[:, None] - times)) - np.outer(fall, fall)) / (2 * decay)
        s_noise = seen * (kappa + min(1e-5 * lengthscale / dt, 0.2) * np.eye(steps))
    prior = prior + first**2 * np.outer(fall, fall)
    data = np.sin(3 * times) + 0.1 * np.random.default_rng(5).standard_normal(steps)
    s = prior + s_noise
    gain = np.linalg.solve(s, prior).T
    mean, left = 0.4 * fall + gain @ (data - 0.4 * fall), prior - gain @ prior
    away = data - 0.4 * fall
    evidence = -0.5 * (away @ np.linalg.solve(s, away) + np.linalg.slogdet(2 * math.pi * s)[1])
    expected = np.array([mean[-1], left[-1, -1], evidence])
    if where == "observation":
        np.testing.assert_allclose(run(1), expected, rtol=1e-7)
        return
    # noise that is added within a step reaches the state only from the next one on
    coarse, fine = (np.abs(run(substeps) / expected - 1) for substeps in (2, 16))
    assert (fine < {0.5: 5e-3, 1.5: 1e-4, 2.5: 1e-5}[smoothness]).all()
    assert (fine < coarse / 4).all()


def test_velocity_and_acceleration_are_those_of_the_joint_kalman_filter():
    """x′ = Ax + ω with Matérn-3/2 noise ω: an exact Kalman filter of (x, ω, ω′) knows Ax + ω and its slope."""
    dt, time, level, noise = 0.05, 0.6, 0.8, 0.1
    flow = torch.tensor([[0.0, 1.0], [-2.0, -0.3]], dtype=torch.float64)
    rate = math.sqrt(3) / time
    drift = np.zeros((6, 6))  # x, v, then values and slopes of both noises
    drift[:2, :2], drift[:2, 2:4], drift[2:4, 4:] = flow.numpy(), np.eye(2), np.eye(2)
    drift[4:, 2:4], drift[4:, 4:] = -(rate**2) * np.eye(2), -2 * rate * np.eye(2)
    diffusion = np.zeros((6, 6))
    diffusion[4:, 4:] = 4 * rate**3 * level**2 * np.eye(2)
    block = expm(dt * np.block([[-drift, diffusion], [np.zeros((6, 6)), drift.T]]))
    move = block[6:, 6:].T
    added = move @ block[:6, 6:]
    first, second = np.zeros((2, 6)), np.zeros((2, 6))
    first[:, :2], first[:, 2:4] = flow.numpy(), np.eye(2)
    second[:] = flow.numpy() @ first
    second[:, 4:] += np.eye(2)
    mean, covariance = np.zeros(6), np.diag([1.0, 1.0, *[level**2] * 2, *[(rate * level) ** 2] * 2])
    observations = np.random.default_rng(1).normal(size=(40, 2)).cumsum(0) * 0.1
    model = single_filter(
        pc.systems.linear(flow),
        2,
        dt,
        process_noise_sd=level,
        observation_noise_sd=noise,
        noise_sd=1e-6,
        correlation_time=Matern(time, 1.5),
        correlation_time_y=White(),
        initial_mean=[0.0, 0.0],
    )
    session = model.start()
    for k, y in enumerate(observations):
        session.step(y)
        if k:
            mean, covariance = move @ mean, move @ covariance @ move.T + added
        gain = covariance[:, :2] @ np.linalg.inv(covariance[:2, :2] + noise**2 * np.eye(2))
        mean, covariance = mean + gain @ (y - mean[:2]), covariance - gain @ covariance[:2]
    for slope, name in ((first, "velocity"), (second, "acceleration")):
        sd = np.sqrt(np.diag(slope @ covariance @ slope.T))
        np.testing.assert_allclose(session.read("x", name), slope @ mean, atol=0.02 * sd.min())
        np.testing.assert_allclose(session.read("x", f"{name}_sd"), sd, rtol=0.01)
