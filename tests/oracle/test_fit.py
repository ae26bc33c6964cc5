"""Fits to recorded data, against the maximum of an exact likelihood without messages."""

import functools
import math

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import DivergenceError, GraphError, ObservationError, ResultError, ScheduleError, SettingError
from pcnet.graphs import Level, hierarchy, odem
from pcnet.model.schedule import LevelNodes
from pcnet.model.specification import to_spec
from pcnet.nodes import GeneralisedStateNode, KalmanStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Newton, NoiseScoring
from pcnet.numerics.kernels import White
from support.filters import single_filter

pytestmark = pytest.mark.usefixtures("as_users_run")

DT, SAMPLES = 0.1, 25
FLOW = torch.tensor([[-0.4, 1.0], [-1.2, -0.1]], dtype=torch.float64)
START, START_SD = torch.tensor([1.0, 0.0], dtype=torch.float64), 0.5
PRIOR, PRIOR_SD = torch.tensor([0.0, 0.1], dtype=torch.float64), 1.0
LEVELS, LEVEL_SD = torch.tensor([0.0, 3.0], dtype=torch.float64), 2.0
"""What the log-precisions of states and observations are expected to be."""


def pushed(x, theta):
    """A constant push: the parameters change the mean of what is observed, and nothing else."""
    return x @ FLOW.T.to(x) + theta


def spring(x, theta):
    """Stiffness and damping: the parameters change covariances too."""
    return torch.stack([x[..., 1], -(1.3 + theta[..., 0]) * x[..., 0] - theta[..., 1] * x[..., 1]], -1)


FLOWS = {"pushed": pc.TracedFunction(pushed), "spring": pc.TracedFunction(spring)}
"""Shared, so that each is traced once for each shape."""


@functools.cache
def record(seed: int, holes: bool = False) -> np.ndarray:
    rng, x, seen = np.random.default_rng(seed), START.numpy().copy(), []
    for _ in range(SAMPLES):
        drift = spring(torch.as_tensor(x), torch.tensor([0.3, 0.3])).numpy() + np.array([0.4, 0.0])
        x = x + DT * (drift + 0.8 * rng.standard_normal(2))
        seen.append(x[:1] + 0.2 * rng.standard_normal(1))
    data = np.array(seen)
    if holes:
        data[[3, 7, 8, 9, 20]] = np.nan
    return data


def model(kind: str, **options) -> pc.Graph:
    return single_filter(
        FLOWS[kind],
        2,
        DT,
        parameter_mean=PRIOR,
        parameter_sd=PRIOR_SD,
        mapping=pc.systems.linear([[1.0, 0.0]]),
        channels=1,
        process_noise_sd=math.exp(-0.5 * LEVELS[0]),
        observation_noise_sd=math.exp(-0.5 * LEVELS[1]),
        noise_sd=LEVEL_SD,
        noise_per_channel=False,
        initial_mean=START,
        initial_sd=START_SD,
        **options,
    ).graph


def surprise(kind: str, data: np.ndarray):
    """−log p(y, θ, λ) but for the constant of the prior, by the textbook's Kalman filter: a function of (θ, λ)."""

    def compute(values: torch.Tensor) -> torch.Tensor:
        theta, levels = values[:2], values[2:]
        one = torch.eye(2, dtype=torch.float64)
        at = [spring(one[i], theta) if kind == "spring" else one[i] @ FLOW.T for i in range(2)]
        a = DT * torch.stack(at, 1)
        reach = one + a @ (one / 2 + a @ (one / 6 + a / 24))  # a step by Runge and Kutta: x + h(I + a/2 + …)ẋ
        apart = a @ reach
        f, push = one + apart, DT * reach @ theta if kind == "pushed" else torch.zeros(2).to(theta)
        half = one + apart / 2 - apart @ apart / 8 + apart @ apart @ apart / 16
        q = DT / 6 * (-levels[0]).exp() * (one + 4 * half @ half.T + f @ f.T)
        mean, covariance, total = START, START_SD**2 * one, torch.zeros((), dtype=torch.float64)
        for t, (y,) in enumerate(torch.as_tensor(data)):
            if t:
                mean, covariance = f @ mean + push, f @ covariance @ f.T + q
            if torch.isnan(y):
                continue
            s, e = covariance[0, 0] + (-levels[1]).exp(), y - mean[0]
            total = total + 0.5 * (e**2 / s + (2 * math.pi * s).log())
            gain = covariance[:, 0] / s
            mean, covariance = mean + gain * e, covariance - torch.outer(gain, covariance[0])
        prior = ((theta - PRIOR) / PRIOR_SD).square().sum() + ((levels - LEVELS) / LEVEL_SD).square().sum()
        return total + 0.5 * prior

    return compute


def minimum(energy, free: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where an energy of four numbers has its minimum in some of them, by Newton's method, and its curvature there."""
    values = torch.cat([PRIOR, LEVELS])
    for _ in range(60):
        slope = torch.autograd.functional.jacobian(energy, values)[free]
        curvature = torch.autograd.functional.hessian(energy, values)[free][:, free]
        size, axes = torch.linalg.eigh(curvature)
        step = -(axes / size.abs().clamp_min(1e-3)) @ axes.T @ slope
        values = values.index_add(0, torch.tensor(free), step.clamp(-0.5, 0.5))
        if float(step.abs().max()) < 1e-9:
            return values, curvature
    raise AssertionError("the oracle found no minimum")


@functools.cache
def exact(kind: str, seed: int, holes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters and log-precisions at the maximum, and the curvature there."""
    return minimum(surprise(kind, record(seed, holes)), [0, 1, 2, 3])


@pytest.mark.parametrize("kind", ["pushed", "spring"])
def test_parameters_and_noise_levels_are_the_exact_maximum(kind):
    energy = surprise(kind, record(1))
    found, _ = exact(kind, 1)
    fit = model(kind).fit(record(1), tolerance=1e-9)
    assert fit.converged
    np.testing.assert_allclose(fit.mean("theta"), found[:2], atol=1e-6)
    np.testing.assert_allclose([*fit.mean("noise_x"), *fit.mean("noise_y")], found[2:], atol=1e-6)
    assert fit.free_actions[0] == pytest.approx(energy(torch.cat([PRIOR, LEVELS])).item(), abs=1e-9)
    assert fit.free_actions[-1] == pytest.approx(energy(found).item(), abs=1e-9)


def test_slopes_from_messages_find_the_maximum_where_they_are_exact():
    """Parameters that change means only, and noise levels; others are off by less than a standard deviation."""
    found, _ = exact("pushed", 1)
    fit = model("pushed").fit(record(1), tolerance=1e-10, slopes="messages")
    np.testing.assert_allclose(fit.mean("theta"), found[:2], atol=1e-5)
    np.testing.assert_allclose([*fit.mean("noise_x"), *fit.mean("noise_y")], found[2:], atol=1e-5)
    found, curvature = exact("spring", 1)
    fit = model("spring").fit(record(1), slopes="messages")
    sd = torch.linalg.inv(curvature).diagonal().sqrt()
    assert (abs(torch.as_tensor(fit.mean("theta")) - found[:2]) < sd[:2]).all()


def test_the_posterior_of_a_linear_model_is_exact():
    """With given noise levels −log p(y | θ) is quadratic in θ, and Σ is its inverse curvature."""
    energy = surprise("pushed", record(2))
    found, curvature = minimum(energy, [0, 1])
    fit = model("pushed").fit(record(2), pc.batch("parameter"), tolerance=1e-9)
    covariance = torch.linalg.inv(curvature)
    np.testing.assert_allclose(fit.mean("theta"), found[:2], atol=1e-8)
    np.testing.assert_allclose(fit.covariance("theta"), covariance, rtol=1e-7)
    np.testing.assert_allclose(fit.sd("theta"), covariance.diagonal().sqrt(), rtol=1e-7)
    upper = found[:2] + 1.959963984540054 * covariance.diagonal().sqrt()
    np.testing.assert_allclose(fit.interval("theta").upper, upper, atol=1e-7)
    # −log p(y) of a linear model: the minimum, with the volume of prior and posterior
    evidence = energy(found) + 0.5 * (curvature.logdet() + 2 * math.log(PRIOR_SD**2))
    assert float(fit.result.free_action) == pytest.approx(evidence.item(), abs=1e-8)
    assert fit.result.free_energy.sum() == pytest.approx(float(fit.result.free_action), abs=1e-9)
    assert fit.iterations <= 4


def test_the_last_pass_is_a_filter_at_the_maximum():
    """States are those of a Kalman filter at the maximum, with the parameters' uncertainty added."""
    data = record(2)
    fit = model("pushed").fit(data, pc.batch("parameter"), tolerance=1e-9, record=["mean", "sd"])
    fitted = model("pushed").with_nodes(
        model("pushed").nodes | {"theta": ParameterNode("theta", mean=fit.mean("theta"), sd=1e-9, estimator=Newton())}
    )
    still = fitted.run(
        data, pc.adaptive_filtering(levels=[LevelNodes(precisions=(), parameters=())]), record=["mean", "sd"]
    )
    np.testing.assert_allclose(fit.result.mean("x"), still.mean("x"), atol=1e-7)
    assert (fit.result.sd("x") >= still.sd("x")).all()
    np.testing.assert_allclose(fit.result.mean("theta"), np.tile(fit.mean("theta"), (SAMPLES, 1)))


def test_missing_observations_in_a_fit():
    found, _ = exact("spring", 3, holes=True)
    fit = model("spring").fit(record(3, holes=True), tolerance=1e-9)
    np.testing.assert_allclose(fit.mean("theta"), found[:2], atol=1e-5)
    np.testing.assert_allclose([*fit.mean("noise_x"), *fit.mean("noise_y")], found[2:], atol=1e-5)


def test_an_implausible_observation_counts_in_a_fit():
    """The slopes of a fit come from passes that do not raise; they take in what its other passes take in."""
    data = record(1).copy()
    data[20] += 50.0
    energy = surprise("pushed", data)
    for policy in ("raise", "stop"):
        fit = model("pushed").fit(data, max_iterations=1, on_divergence=policy)
        assert fit.free_actions[0] == pytest.approx(energy(torch.cat([PRIOR, LEVELS])).item(), rel=1e-9)


def test_a_batched_fit_equals_single_fits():
    data = np.stack([record(1), record(2), 5 * record(3)])
    graph = model("spring")
    together = graph.fit(data, tolerance=1e-8, engine="compiled")
    assert together.converged.all()
    assert (np.diff(together.free_actions) <= 0).all()
    assert len(set(together.iterations.tolist())) > 1  # each settles at its own time
    for i, each in enumerate(data):
        alone = graph.fit(each, tolerance=1e-8, engine="compiled")
        assert alone.iterations == together.iterations[i]
        np.testing.assert_allclose(together.free_actions[i, : alone.iterations], alone.free_actions, rtol=1e-7)
        np.testing.assert_allclose(together.mean("theta")[i], alone.mean("theta"), atol=1e-5)
        np.testing.assert_allclose(together.result.mean("x")[i], alone.result.mean("x"), atol=1e-5)


def test_steps_that_raise_the_free_action_are_undone():
    """Log-precisions that start far too high make Newton steps far too long; the free action never rises."""
    graph = model("spring")
    far = {
        name: PrecisionNode(name, mean=[level], sd=20.0, kernel=White(), channels="shared", estimator=Newton())
        for name, level in (("noise_x", 8.0), ("noise_y", 7.0))
    }
    fit = graph.with_nodes(graph.nodes | far).fit(record(1), max_iterations=12)
    assert fit.backtracks > 0
    assert (np.diff(fit.free_actions) <= 0).all()
    assert fit.free_actions[-1] < fit.free_actions[0] - 100


def test_a_fit_of_generalised_states_is_a_minimum():
    """The free action is higher at nearby parameters, by runs that learn nothing."""
    world = pc.simulate.simulate(
        pc.systems.linear([[-0.5, 1.0], [-1.0, -0.2]]),
        initial=[1.0, 0.0],
        samples=20,
        dt=DT,
        state_sd=0.1,
        observation_sd=0.1,
        width=0.2,
        seed=0,
    )

    def graph(theta, levels, sd) -> pc.Graph:
        x = GeneralisedStateNode(
            "x", dim=2, orders=3, flow=turning, integrator=pc.integrators.ImplicitEuler(step_size=DT)
        )
        y = SensoryNode("y", dim=2, orders=2, dt=DT)
        made = pc.Graph()
        made.predicts(x, y)
        made.parametrises(ParameterNode("theta", mean=theta, sd=sd, estimator=Newton()), x)
        for node, level in zip((x, y), levels, strict=True):
            name, rule = f"noise_{node.name}", NoiseScoring()
            made.weighs(
                PrecisionNode(name, mean=[level], sd=sd, correlation_time=0.2, channels="shared", estimator=rule), node
            )
        return made

    fit = graph([0.7], [3.0, 3.0], 1.0).fit(world.observations, tolerance=1e-6)
    assert fit.converged
    assert (np.diff(fit.free_actions) <= 0).all()
    best = np.array([*fit.mean("theta"), *fit.mean("noise_x"), *fit.mean("noise_y")])

    def total(theta, *levels) -> float:
        run = graph([theta], levels, 1.0).run(world.observations, pc.states_only(), record=())
        moved = np.array([theta - 0.7, levels[0] - 3.0, levels[1] - 3.0])
        return float(run.free_action) + 0.5 * float(moved @ moved)

    assert total(*best) == pytest.approx(fit.free_actions[-1], abs=1e-6)
    for i in range(3):
        for by in (-0.01, 0.01):
            assert total(*(best + by * np.eye(3)[i])) > total(*best)


@pc.TracedFunction
def turning(x, theta):
    return torch.stack([-0.5 * x[..., 0] + theta[..., 0] * x[..., 1], -x[..., 0] - 0.2 * x[..., 1]], -1)


@pytest.mark.parametrize("samples", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_fit_and_an_online_run_recover_the_parameters(samples):
    """Three species, six realisations, default noise guesses: within the intervals of the fit."""
    world = pc.simulate.glv_process(samples, noise="white", clamp_observations=False, seed=list(range(11, 17)))
    graph, schedule = single_filter(
        pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25
    )
    truth = np.array([0.2, -0.4, 0.1])
    online = graph.start(schedule, record=(), engine="compiled").run(world.observations, progress=False)
    fit = graph.fit(world.observations, tolerance=0.05, record=(), engine="compiled")
    assert fit.converged.all()
    assert fit.result.traces == {}

    def error(mean) -> float:
        return float(np.mean(((mean - truth) / fit.sd("theta")) ** 2))

    assert error(fit.mean("theta")) < 1.93  # χ² of 18 numbers, one in a hundred is larger
    assert error(online.mean("theta").numpy()) < 1.93


# --- asking for the impossible ---------------------------------------------------------------------------------------
def test_iterators_are_rejected_since_passes_repeat():
    graph = model("pushed")
    with pytest.raises(ObservationError, match=r"read only once.*list\(observations\)"):
        graph.fit(iter(record(1)))
    with pytest.raises(ObservationError, match="no observations"):
        graph.fit(np.zeros((0, 1)))

    class Lines:
        def __iter__(self):
            return iter(record(1))

    again = graph.fit(Lines(), pc.batch("theta"), tolerance=1e-9)
    whole = graph.fit(record(1), pc.batch("theta"), tolerance=1e-9, times=(DT * t for t in range(SAMPLES)))
    np.testing.assert_allclose(again.mean("theta"), whole.mean("theta"), atol=1e-8)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_iterations": 0}, SettingError, "max_iterations must be a whole number, 1 or more, not 0"),
        ({"max_iterations": 2.5}, SettingError, "max_iterations must be a whole number"),
        ({"tolerance": -1.0}, SettingError, "tolerance must be 0 or more"),
        ({"tolerance": math.nan}, SettingError, "tolerance must be 0 or more"),
        ({"slopes": "steep"}, SettingError, "'exact' or 'messages'"),
        ({"on_divergence": "hold"}, SettingError, "'raise' or 'stop'"),
        ({"screen": True}, SettingError, "takes in all observations"),
        ({"estimator": "Newton"}, SettingError, r"pcnet.estimators.Newton\(\)"),
        (
            {"estimator": pc.estimators.RobbinsMonro()},
            SettingError,
            "'theta' steps by RobbinsMonro.*estimator=pcnet.estimators.Newton",
        ),
        ({"schedule": pc.adaptive_filtering()}, ScheduleError, r"nothing is updated after a pass.*pcnet.batch\(\)"),
        ({"schedule": "batch"}, ScheduleError, "schedule must be a Schedule"),
        ({"schedule": pc.batch("thetta")}, ScheduleError, "no node or role 'thetta'; nodes: x, y, theta"),
        ({"schedule": pc.batch("state")}, ScheduleError, "'x' takes 'update' within a pass and is updated after it"),
    ],
)
def test_invalid_options_are_rejected(options, error, words):
    with pytest.raises(error, match=words):
        model("pushed").fit(record(1), **options)


def changed(acts=None, on_end=None) -> pc.Schedule:
    usual = pc.batch("theta")
    return pc.Schedule(acts=acts or usual.acts, on_start=usual.on_start, on_end=on_end or usual.on_end)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (changed(on_end=(pc.act("update", "theta"),)), "add act\\('update_covariance', 'theta'\\) to on_end"),
        (changed(on_end=(*pc.batch("theta").on_end, pc.act("renew_prior", "theta"))), "would count twice"),
        (changed(acts=pc.batch("noise_y").acts), "'theta' accumulates nothing"),
    ],
)
def test_custom_schedules_for_fits_are_checked(schedule, words):
    with pytest.raises(ScheduleError, match=words):
        model("pushed").fit(record(1), schedule)


def test_schedules_for_fits_cannot_run_online():
    graph = model("pushed")
    for use in (lambda: graph.run(record(1), pc.batch()), lambda: graph.start(pc.batch())):
        with pytest.raises(ScheduleError, match=r"use model.fit\(observations\)"):
            use()
    with pytest.raises(SettingError, match="actions in on_end are taken once; remove their `every`"):
        pc.Schedule(acts=(pc.act("observe", "sensory"),), on_end=(pc.act("update", "parameter", every=3),))
    assert "on end: precision, parameter: update" in str(pc.batch())


def test_online_estimators_are_rejected_or_replaced():
    graph, _ = odem("glv", 2)
    data = pc.simulate.glv_process(samples=30, noise="white", seed=1).observations
    with pytest.raises(SettingError, match=r"lambda_x|theta.*RobbinsMonro.*estimator=pcnet.estimators.Newton\(\)"):
        graph.fit(data)
    assert graph.fit(data, estimator=Newton(), max_iterations=3).free_actions.shape == (3,)


def test_predicted_parameters_cannot_be_fitted_after_a_pass():
    spring_ = pc.TracedFunction(lambda x, k: torch.stack([x[..., 1], -k[..., 0] * x[..., 0]], -1))
    above = Level(lambda x, theta: -0.01 * x, 1, process_noise_sd=0.1, initial_mean=[1.0])
    stack, _ = hierarchy(Level(spring_, 2, parameter_mean=[1.0], parameter_sd=0.01, learn_noise=True), above, dt=0.05)
    with pytest.raises((GraphError, ScheduleError), match="predicted from above"):
        stack.fit(np.zeros((4, 2)))


def test_divergence_in_the_first_pass_is_reported_and_other_elements_continue(eager):
    def burst(x, theta):
        return theta[..., :1] * x**3

    def graph(means) -> pc.Graph:
        return single_filter(
            burst, 1, DT, parameter_mean=means, parameter_sd=1.0, initial_mean=[1.0], initial_sd=1e-3
        ).graph

    data = np.full((6, 1), 1.0)
    data[2:5] = np.nan
    with pytest.raises(DivergenceError, match="first pass"):
        graph([50.0]).fit(data)
    fit = graph(torch.tensor([[50.0], [0.0]])).fit(data, on_divergence="stop")
    assert fit.converged.tolist() == [False, True]
    assert np.isnan(fit.free_actions[0]).all()
    assert np.isfinite(fit.free_actions[1]).all()
    assert fit.result.diverged.at[1] == -1


def test_the_representation_of_a_fit(tmp_path):
    fit = model("pushed").fit(record(1), max_iterations=2)
    assert "in 2 passes, not converged" in repr(fit)
    assert "theta: " in repr(fit)
    with pytest.raises(ResultError, match="'x' was not fitted; fitted nodes: theta, noise_x, noise_y"):
        fit.mean("x")
    with pytest.raises(ResultError, match="between 0 and 1"):
        fit.interval("theta", 1.5)
    assert pc.Result.load(fit.result.save(tmp_path / "last.nc")).free_action == fit.result.free_action


def test_the_result_of_a_fit_is_saved_and_loaded(tmp_path):
    pc.save_model(tmp_path / "model.yaml", pc.Model(odem("glv", 2).graph, pc.batch(["theta"])))
    again = pc.load_model(tmp_path / "model.yaml").schedule
    assert str(again) == str(pc.batch(["theta"]))
    called = to_spec(odem("glv", 2)) | {"schedule": {"batch": {"nodes": ["theta"]}}}
    assert str(pc.load_model(called).schedule) == str(pc.batch(["theta"]))


def test_progress_is_shown_on_request(capfd):
    model("pushed").fit(record(1), max_iterations=2, progress=True)
    shown = capfd.readouterr().err
    for words in ("pass 1", "pass 2, free action", "last pass"):
        assert words in shown
    model("pushed").fit(record(1), max_iterations=1)
    assert capfd.readouterr().err == ""


def test_single_precision():
    found, _ = exact("pushed", 1)
    fit = model("pushed").fit(record(1), dtype=torch.float32, tolerance=1e-2)
    np.testing.assert_allclose(fit.mean("theta"), found[:2], atol=0.1)
    assert isinstance(model("pushed")["x"], KalmanStateNode)
