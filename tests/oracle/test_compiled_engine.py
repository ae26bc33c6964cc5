"""The compiled engine against the eager one: every kind of model, of observation and of trouble."""

import copy
import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import pcnet as pc
from pcnet.engine.compiled import scalar_rules
from pcnet.errors import DivergenceError, ObservationError, SettingError
from pcnet.graphs import Level, hierarchy, odem
from pcnet.nodes import (
    CategoricalNode,
    CauseNode,
    GeneralisedStateNode,
    InputNode,
    ParameterNode,
    PrecisionNode,
    SensoryNode,
)
from pcnet.numerics.dwell_time import DwellTime
from pcnet.numerics.estimators import Newton
from pcnet.numerics.integrators import LocalLinearisation
from support.filters import single_filter

RECORD = ["mean", "sd", "covariance", "observation", "prediction", "error", "weighted_error", "energy"]
Y = pc.simulate.glv_process(samples=150, noise="white", seed=3).observations
DRAW = torch.Generator().manual_seed(5)
MISSING = torch.rand(150, generator=DRAW)
GAPS = Y.clone()  # each pattern of missing channels is a variant of its own: one channel, or all
GAPS[MISSING < 0.15, 1], GAPS[MISSING < 0.05] = torch.nan, torch.nan
TIMES = torch.cumsum(0.01 * (0.5 + torch.rand(150, generator=DRAW, dtype=torch.float64)), 0).tolist()


def tracking(**options):
    settings = {"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25} | options
    return single_filter(pc.systems.lotka_volterra, 3, 0.01, **settings)


def walking(**options):
    """The same with parameters that drift, or that are learned beside the state."""
    model = tracking()
    settings = options or {"walk_sd": 0.1}
    theta = ParameterNode("theta", mean=[0.3, -0.2, 0.3], sd=0.25, **settings)
    return pc.Model(model.graph.with_nodes(dict(model.graph.nodes) | {"theta": theta}), model.schedule)


def oscillator(x, theta):
    return torch.stack([x[..., 1], -theta[..., 0] * x[..., 0]], -1)


def two_levels(above=None):
    first = Level(oscillator, 2, parameter_mean=[1.0], parameter_sd=[0.2], process_noise_sd=0.1, learn_noise=True)
    second = Level(pc.systems.linear([[-0.1]]), 1, mapping=lambda x, _: 1.0 + x, process_noise_sd=0.14)
    return hierarchy(first, above or second, dt=0.05, every=16)


def with_input():
    step = LocalLinearisation(step_size=0.1)

    def flow(x, v, theta):
        return torch.stack([x[..., 1], -x[..., 0] + v[..., 0] + torch.tanh(theta[..., 0])], -1)

    x = GeneralisedStateNode("x", dim=2, orders=3, flow=flow, integrator=step)
    v, u = CauseNode("v", dim=1, orders=2, integrator=step), InputNode("u", dim=1, orders=2, dt=0.1)
    y = SensoryNode("y", dim=2, orders=2, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y, via=lambda x, _: torch.tanh(x))
    graph.drives(v, x)
    graph.predicts(u, v)
    graph.parametrises(ParameterNode("a", mean=[0.0], sd=0.1), x)
    for node, precision in ((y, 100.0), (x, 100.0), (v, 1.0)):
        graph.weighs(PrecisionNode(f"p {node.name}", prior_precision=precision, sd=0.1, correlation_time=0.2), node)
    return pc.Model(graph, pc.odem(every=8))


NETWORK = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
with torch.no_grad():
    for number, weights in enumerate(NETWORK.parameters()):
        weights.copy_(torch.linspace(-0.5, 0.5, weights.numel()).reshape(weights.shape) * (1 + number) / 4)

MODELS = {
    "odem glv": lambda: (odem(model="glv", orders=3, every=32), Y, {}),
    "odem lorenz": lambda: (odem(model="lorenz", orders=2, every=32, conventions="authors"), Y, {}),
    "odem batch": lambda: (odem(kappa=[1.0, 0.5, 0.25, 0.7, 1.0], every=[64, 128, 32, 16, 16]), Y, {}),
    "odem with gaps": lambda: (odem(orders=2), GAPS, {}),
    "odem at irregular times": lambda: (odem(orders=2), Y, {"times": TIMES}),
    "odem single precision": lambda: (odem(orders=2), Y, {"dtype": torch.float32}),
    "adaptive filter": lambda: (tracking(), Y, {}),
    "adaptive filter with gaps": lambda: (tracking(), GAPS, {}),
    "adaptive filter at irregular times": lambda: (tracking(), Y, {"times": TIMES}),
    "adaptive filter batch": lambda: (tracking(process_noise_sd=[[1.0], [0.1], [0.01]]), GAPS, {}),
    "adaptive filter, shared noise levels": lambda: (tracking(noise_per_channel=False), Y, {}),
    "adaptive filter, a batch of series": lambda: (tracking(), torch.stack([Y, Y.flip(-1)]), {}),
    "adaptive filter, a network as flow": lambda: (
        single_filter(lambda x, _: 0.1 * NETWORK(x), 3, 0.01), Y, {}
    ),
    "adaptive filter, outliers": lambda: (tracking(outliers=0.05), GAPS, {}),
    "adaptive filter by derivatives": lambda: (tracking(linearisation="taylor", substeps=2), GAPS, {}),
    "adaptive filter by local linearisation": lambda: (tracking(integrator="local_linearisation"), Y, {}),
    "adaptive filter by local linearisation and derivatives": lambda: (
        tracking(integrator="local_linearisation", linearisation="taylor"), Y, {"times": TIMES}
    ),
    "adaptive filter, noise that is held": lambda: (tracking(integrator="euler", process_noise="held"), Y, {}),
    "adaptive filter, model error": lambda: (tracking(model_error_time=1.0), Y, {}),
    "adaptive filter, Matérn noise": lambda: (tracking(correlation_time=pc.kernels.Matern(0.05, 1.5)), Y, {}),
    "adaptive filter, walking parameters": lambda: (walking(), Y, {}),
    "adaptive filter, parameters by Newton's method": lambda: (walking(estimator=Newton()), Y, {}),
    "smooth noise": lambda: (tracking(correlation_time=0.05), Y, {}),
    "two levels": lambda: (two_levels(), Y[:, :2], {}),
    "a category above": lambda: (
        two_levels(CategoricalNode("which", values=[[0.8], [1.4]], dwell=DwellTime(mean=5.0, sd=2.0))), Y[:, :2], {}
    ),
    "inputs and causes": lambda: (with_input(), {"y": Y[:, :2], "u": Y[:, 2:]}, {}),
}  # fmt: skip


def assert_equal(one, other, rtol=1e-9, share=1e-9):
    """Each recorded quantity agrees, relative to its own size and to the largest of its kind."""
    assert one.traces.keys() == other.traces.keys()
    np.testing.assert_array_equal(one.times, other.times)
    for name, trace in one.traces.items():
        wanted, found = trace.values, other.traces[name].values
        size = np.nanmax(np.abs(wanted), initial=1e-300)
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=share * size, err_msg=name)
    np.testing.assert_allclose(other.free_action, one.free_action, rtol=max(rtol, 1e-8))


REPEATED = {  # whose parts other models have too
    "odem at irregular times",
    "adaptive filter at irregular times",
    "adaptive filter, shared noise levels",
    "adaptive filter, a batch of series",
    "adaptive filter by local linearisation",
    "adaptive filter, model error",
    "smooth noise",
}


def slow_if(condition):
    return pytest.mark.slow if condition else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_if(name in REPEATED)) for name in MODELS])
def test_both_engines_agree(name):
    model, observations, options = MODELS[name]()
    eager = model.run(observations, record=RECORD, engine="eager", **options)
    found = model.run(observations, record=RECORD, engine="compiled", **options)
    assert (eager.engine, found.engine) == ("eager", "compiled")
    assert eager.eager_ticks == 150
    assert found.eager_ticks < 12
    tolerance = 1e-9 if "dtype" not in options else 2e-2
    if name == "odem with gaps":  # the curvature is singular at some observations
        eager.traces = {key: v for key, v in eager.traces.items() if key in ("x.mean", "theta.mean", "accuracy")}
        found.traces = {key: v for key, v in found.traces.items() if key in eager.traces}
        found.free_action = eager.free_action
    assert_equal(eager, found, tolerance, tolerance)


@pytest.mark.parametrize("name", ["odem glv", "adaptive filter", pytest.param("odem batch", marks=pytest.mark.slow)])
def test_loops_agree_too(name, monkeypatch):
    """The form for large ticks, on small ones."""
    monkeypatch.setenv("PCNET_CACHE", "")
    monkeypatch.setattr(scalar_rules, "MAX_VALUES", 0)
    model, observations, _ = MODELS[name]()
    session = model.start(record=RECORD, engine="compiled")
    session.run(observations)
    assert "as loops" in session.engine_report
    assert_equal(model.run(observations, record=RECORD, engine="eager"), session.result())


BATCHES = {
    "odem": (odem, {"kappa": [1.0, 0.5, 0.25, 0.7, 0.9], "every": [64, 128, 32, 16, 16]}, Y),
    "adaptive filter": (tracking, {"process_noise_sd": [[1.0], [0.3], [0.1], [0.03], [0.01]]}, GAPS[:60]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_an_element_of_a_batch_has_the_digits_of_the_element_alone(name):
    build, settings, observations = BATCHES[name]
    together = build(**settings).run(observations, engine="compiled")
    assert together.eager_ticks <= 1
    for i in (0, 4):
        alone = build(**{key: values[i] for key, values in settings.items()}).run(observations, engine="compiled")
        for key, trace in alone.traces.items():
            np.testing.assert_array_equal(together.traces[key].values[i], trace.values, err_msg=key)


@pytest.mark.parametrize("name", ["adaptive filter with gaps", "odem batch"])
def test_steps_streams_and_arrays_have_the_same_digits(name):
    model, observations, _ = MODELS[name]()
    whole = model.run(observations, engine="compiled")
    session = model.start(engine="compiled")
    for y in observations:
        session.step(y.numpy())
    streamed = model.start(engine="compiled")
    streamed.run(y for y in observations)
    parts = model.start(engine="compiled")
    for start in range(0, 150, 37):
        parts.run(observations[start : start + 37])
        _ = parts.state, parts.mean("x")
    for other in (session, streamed, parts):
        assert other.tick == 150
        assert other.time == pytest.approx(1.49)
        for key, trace in whole.traces.items():
            np.testing.assert_array_equal(other.result().traces[key].values, trace.values, err_msg=key)
        torch.testing.assert_close(other.mean("x"), torch.as_tensor(whole.mean("x"))[..., -1, :, :], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["odem with gaps", "adaptive filter with gaps"])
def test_steps_may_alternate_with_runs_and_eager_ticks(name):
    """All variants are there from the start, so that nothing is laid out anew in between."""
    model, observations, _ = MODELS[name]()
    model = pc.Model(model.graph, pc.adaptive_filtering(every=4) if "filter" in name else pc.odem(every=4))
    observations = observations.clone()
    observations[77] = torch.nan  # left to the eager engine by a model whose curvature is then singular
    whole = model.run(observations, engine="compiled")
    for first in (1, 2, 3):
        session = model.start(engine="compiled")
        while session.tick < 150:
            for y in observations[session.tick : session.tick + first]:
                session.step(y)
            if session.tick < 150:
                session.run(observations[session.tick : session.tick + 4])
        for key, trace in whole.traces.items():
            np.testing.assert_array_equal(session.result().traces[key].values, trace.values, err_msg=key)


@pytest.mark.parametrize("name", ["odem glv", "adaptive filter with gaps", "odem batch"])
def test_a_resumed_session_goes_on_to_the_same_digits(name, tmp_path):
    model, observations, _ = MODELS[name]()
    session = model.start(engine="compiled")
    for y in observations[:70]:
        session.step(y)
    session.save(tmp_path / "half.pc")
    other = pc.resume(tmp_path / "half.pc", MODELS[name]()[0])
    copied = copy.deepcopy(session)
    eager = pc.resume(tmp_path / "half.pc", model, engine="eager")
    for each in (session, other, copied, eager):
        each.run(observations[70:])
    assert other.result().engine == copied.result().engine == "compiled"
    assert eager.result().engine == "eager"
    for key, trace in session.result().traces.items():
        np.testing.assert_array_equal(other.result().traces[key].values, trace.values, err_msg=key)
        np.testing.assert_array_equal(copied.result().traces[key].values, trace.values, err_msg=key)
    for path, value in session.state.tensors().items():
        torch.testing.assert_close(eager.state.tensors()[path], value, rtol=1e-8, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("policy", ["stop", pytest.param("hold", marks=pytest.mark.slow), "reset"])
def test_elements_that_diverge_are_handled_alike(policy):
    """One element of three diverges at an outlier of its own; others go on in compiled code."""
    wild = torch.stack([Y, Y, Y])[:, :80]
    wild[1, 60] = 1e200
    model = tracking()
    eager = model.run(wild, engine="eager", on_divergence=policy, screen=False)
    found = model.run(wild, engine="compiled", on_divergence=policy, screen=False)
    np.testing.assert_array_equal(found.diverged.at, eager.diverged.at)
    assert found.eager_ticks < 10
    for key, count in eager.fallbacks.items():
        np.testing.assert_array_equal(found.fallbacks[key], count)
    assert_equal(eager, found)
    session = model.start(engine="compiled", on_divergence=policy, screen=False)
    session.run(wild)
    assert [event[:3] for event in session.divergence_events] == [(60, "x", 1)]


def test_a_divergence_is_raised_at_its_observation_with_everything_before_it_recorded():
    wild = Y.clone()
    wild[60] = 1e200
    session = tracking().start(engine="compiled")
    with pytest.raises(DivergenceError, match="at observation 60"):
        session.run(wild)
    assert session.tick == 60
    assert len(session.result().times) == 60
    session.run(Y[61:])
    assert session.tick == 149


def test_bad_times_and_shapes_are_reported_where_they_are():
    session = odem(orders=2).start(engine="compiled")
    times = [0.01 * k for k in range(150)]
    times[80] = 0.01
    with pytest.raises(ObservationError, match=r"observation 80 is at t = 0\.01, before"):
        session.run(Y, times=times)
    assert session.tick == 80
    with pytest.raises(ObservationError, match=r"batch dimensions \(2,\)"):
        session.run(torch.stack([Y, Y]))
    with pytest.raises(ObservationError, match="shape"):
        session.step(np.ones(4))
    assert session.tick == 80


def test_what_cannot_be_compiled_runs_eagerly_or_is_refused(monkeypatch):
    monkeypatch.delenv("PCNET_ENGINE", raising=False)

    class Reads(SensoryNode):
        def error(self, ctx, link):
            made = super().error(ctx, link)
            assert math.isfinite(float(made.weighted.sum()))
            return made

    x = GeneralisedStateNode("x", dim=1, orders=2, flow=pc.systems.linear([[-1.0]]))
    y = Reads("y", dim=1, orders=2, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y)
    for node in (x, y):
        graph.weighs(PrecisionNode(f"p {node.name}", prior_precision=10.0, sd=0.1, correlation_time=0.2), node)
    model, seen = pc.Model(graph, pc.states_only()), np.sin(np.arange(120) / 10)
    session = model.start(engine="auto")
    session.step(seen[0])
    for value in seen[1:]:
        session.step(value)
    assert session.result().engine == "eager"
    assert "a number is read out of a tensor" in session.engine_report
    with pytest.raises(SettingError, match="a number is read out of a tensor"):
        model.run(seen, engine="compiled")
    with pytest.raises(SettingError, match="engine must be"):
        model.run(seen, engine="fast")


def test_auto_compiles_long_runs_and_says_so(monkeypatch):
    monkeypatch.delenv("PCNET_ENGINE", raising=False)
    model = odem(orders=2)
    assert model.run(torch.cat([Y, Y])).engine == "compiled"
    assert model.run(Y).engine == "eager"
    session = model.start()
    for y in Y:
        session.step(y)
    assert "engine: compiled, 150 observations; 0 were eager" in session.engine_report
    assert "variant 0" in session.engine_report


def test_fits_and_forecasts_agree():
    model = tracking(process_noise_sd=0.03, observation_noise_sd=0.03)
    eager, found = (model.fit(Y[:40], max_iterations=2, engine=engine) for engine in ("eager", "compiled"))
    assert found.result.engine == "compiled"
    np.testing.assert_allclose(found.free_actions, eager.free_actions, rtol=1e-6)
    np.testing.assert_allclose(found.mean("theta"), eager.mean("theta"), rtol=1e-6)
    one, other = (model.start(engine=engine) for engine in ("eager", "compiled"))
    for session in (one, other):
        session.run(Y[:40])
    np.testing.assert_allclose(other.forecast(0.2).sd("y"), one.forecast(0.2).sd("y"), rtol=1e-9)


def test_messages_are_recorded_alike():
    model = odem(orders=2)
    eager, found = (model.run(Y, record=pc.Record.flow(), engine=engine) for engine in ("eager", "compiled"))
    assert_equal(eager, found)


@st.composite
def models(draw):
    """A graph with random sizes, orders, links, schedule and missing observations."""
    dim = draw(st.integers(1, 3))
    kalman, orders = draw(st.booleans()), draw(st.integers(1, 3))
    channels = draw(st.integers(1, 3))
    matrix = -torch.eye(dim, dtype=torch.float64) + 0.3 * torch.tril(torch.ones(dim, dim, dtype=torch.float64), -1)
    mixing = torch.linspace(0.5, 1.5, channels * dim, dtype=torch.float64).reshape(channels, dim)
    learned, nonlinear = draw(st.booleans()), draw(st.booleans())

    def flow(x, theta):
        rate = theta[..., :1] if learned else 1.0
        return rate * (x @ matrix.mT) - (0.1 * x**3 if nonlinear else 0.0)

    def mapping(x, _):
        return torch.tanh(x @ mixing.mT) if nonlinear else x @ mixing.mT

    every = draw(st.sampled_from([1, 5, 16]))
    if kalman:
        settings = {"parameter_mean": [1.0], "parameter_sd": 0.2} if learned else {}
        model = single_filter(flow, dim, 0.1, mapping=mapping, channels=channels, **settings)
    else:
        step = LocalLinearisation(step_size=0.1)
        x = GeneralisedStateNode("x", dim=dim, orders=orders + 1, flow=flow, integrator=step)
        y = SensoryNode("y", dim=channels, orders=orders, dt=0.1)
        graph = pc.Graph()
        graph.predicts(x, y, via=mapping)
        if learned:
            graph.parametrises(ParameterNode("theta", mean=[1.0], sd=0.2), x)
        for node in (x, y):
            graph.weighs(PrecisionNode(f"p {node.name}", prior_precision=20.0, sd=0.2, correlation_time=0.2), node)
        model = pc.Model(graph, pc.odem(every=every))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    seen = torch.sin(torch.arange(30) / 8.0)[:, None] + 0.1 * torch.randn(30, channels, generator=generator)
    if draw(st.booleans()):
        seen[torch.rand(seen.shape, generator=generator) < 0.1] = torch.nan
    return model, seen.double()


@hypothesis.settings(max_examples=6)
@hypothesis.given(models())
def test_random_models_agree(case):
    model, seen = case
    try:
        eager = model.run(seen, engine="eager", record=["mean", "energy"])
    except DivergenceError:
        hypothesis.reject()
    assert_equal(eager, model.run(seen, engine="compiled", record=["mean", "energy"]), 1e-8, 1e-8)


@pytest.mark.parametrize("irregular", [True, False])
def test_steps_with_times_have_the_digits_of_a_run(irregular):
    """As samples and with t=, with beliefs read in between."""
    times = TIMES if irregular else [0.01 * k for k in range(150)]
    whole, session = tracking().run(Y, engine="compiled", times=times), tracking().start(engine="compiled")
    for k, (y, t) in enumerate(zip(Y, times, strict=True)):
        session.step(pc.Sample(y.numpy(), t)) if k % 2 else session.step(y, t=t)
        if k % 40 == 7:
            _ = session.mean("x"), session.state
    for key, trace in whole.traces.items():
        np.testing.assert_array_equal(session.result().traces[key].values, trace.values, err_msg=key)
    assert session.time == times[-1]
    with pytest.raises(ObservationError, match="times must increase"):
        session.step(Y[0], t=times[-1])
