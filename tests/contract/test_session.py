"""Arrays, streams and single steps give the same numbers; recordings hold what was asked for."""

import gc
import sys
import threading

import numpy as np
import pandas as pd
import pytest
import torch

import pcnet as pc
from pcnet.errors import DivergenceError, GraphError, ObservationError, ScheduleError, SettingError
from pcnet.graphs import odem
from pcnet.nodes import GeneralisedStateNode, PrecisionNode, SensoryNode
from pcnet.numerics.integrators import StateIntegrator
from pcnet.numerics.kernels import SquaredExponential
from pcnet.settings import Positive, settings
from support.compare import same
from support.models import build

SCHEDULE = pc.odem(every=4)


@pytest.fixture
def model():
    return build(dims=(3, 3), orders=(2, 2), channels=(2, 1), samples=10)


@pytest.mark.usefixtures("eager")
def test_arrays_streams_and_steps_agree(model):
    whole = model.graph.run(model.observations, schedule=SCHEDULE)
    stream = ({name: y[t] for name, y in model.observations.items()} for t in range(10))
    same(whole, model.graph.run(stream, schedule=SCHEDULE))
    session = model.graph.start(SCHEDULE)
    for t in range(10):
        session.step({name: y[t].numpy() for name, y in model.observations.items()})
        torch.testing.assert_close(session.mean("x0"), torch.as_tensor(whole.mean("x0")[t]), rtol=0, atol=0)
        torch.testing.assert_close(session.sd("x0"), torch.as_tensor(whole.sd("x0")[t]), rtol=0, atol=0)
        assert float(session.free_energy) == whole.free_energy[t]
    same(whole, session.result())
    assert float(session.free_action) == float(whole.free_action)


def test_a_run_does_not_change_the_graph(model):
    same(model.graph.run(model.observations, schedule=SCHEDULE), model.graph.run(model.observations, schedule=SCHEDULE))


def test_batched_observations_of_any_shape():
    model = build(samples=10)
    y = torch.stack([model.observations["y0"] * scale for scale in (0.5, 1.0, 1.5)] * 2).reshape(2, 3, 10, 2)
    result = model.graph.run(y, schedule=SCHEDULE)
    assert result.mean("x0").shape == (2, 3, 10, 3, 3)
    assert result.free_action.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            alone = model.graph.run(y[i, j], schedule=SCHEDULE)
            np.testing.assert_allclose(result.mean("x0")[i, j], alone.mean("x0"), rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(result.free_action[i, j], alone.free_action, rtol=1e-10)


def test_settings_and_observations_broadcast_together():
    y = build(samples=6).observations["y0"][:, :1].expand(6, 3) + torch.tensor([1.0, 2.0, 1.5])
    y = torch.stack([y, y * 1.1, y * 0.9])[:, None]  # (3, 1, 6, 3)
    kappa = torch.tensor([0.5, 1.0])
    graph, schedule = odem(model="glv", orders=2, kappa=kappa, every=torch.tensor([[2], [3], [4]]))
    result = graph.run(y, schedule=schedule)
    assert result.mean("theta").shape == (3, 2, 6, 3)
    graph, schedule = odem(model="glv", orders=2, kappa=1.0, every=3)
    alone = graph.run(y[1, 0], schedule=schedule)
    np.testing.assert_allclose(result.mean("x")[1, 1], alone.mean("x"), rtol=1e-10)


def test_every_setting_of_the_paper_may_be_batched():
    y = torch.linspace(0.5, 2.0, 30, dtype=torch.float64).reshape(10, 3)
    settings = {
        "dt": (0.01, 0.02),
        "expected_precision_x": (500.0, 100.0),
        "expected_precision_y": (500.0, 5000.0),
        "sd_lambda_x": (0.1, 0.5),
        "sd_lambda_y": (0.5, 0.1),
        "kappa": (1.0, 0.25),
        "every": (3, 4),
        "beta_lambda": (0.0, 0.1),
        "beta_theta": (0.2, 0.0),
        "smoothness": (0.005, 0.01),
        "nu": (-4.0, -5.0),
        "rate": (1e-4, 1e-3),
        "t0": (10.0, 5.0),
        "gamma": (0.3, 0.5),
        "theta_mean": ([0.3, -0.2, 0.3], [0.2, -0.1, 0.2]),
        "theta_sd": ([0.25, 0.25, 0.25], [0.1, 0.2, 0.3]),
        "initial_mean": (0.5 * np.ones((3, 3)), np.eye(3)),
    }
    for conventions in ("paper", "authors"):
        graph, schedule = odem(orders=3, conventions=conventions, **{k: np.array(v) for k, v in settings.items()})
        together = graph.run(y, schedule=schedule)
        for i in range(2):
            graph, schedule = odem(orders=3, conventions=conventions, **{k: v[i] for k, v in settings.items()})
            alone = graph.run(y, schedule=schedule)
            for key, trace in alone.traces.items():
                np.testing.assert_allclose(together.traces[key].values[i], trace.values, rtol=1e-10, atol=1e-10)


def test_record_selects_quantities_and_ticks(model):
    result = model.graph.run(model.observations, schedule=SCHEDULE, record=pc.Record(("mean",), nodes=("x0",), every=3))
    assert set(result.traces) == {"x0.mean"}
    assert result.mean("x0").shape == (3, 2, 3)
    whole = model.graph.run(model.observations, schedule=SCHEDULE)
    np.testing.assert_array_equal(result.mean("x0"), whole.mean("x0")[2::3])
    np.testing.assert_allclose(result.times, whole.times[2::3])
    with pytest.raises(ScheduleError, match="'meen'"):
        model.graph.run(model.observations, record=("meen",))


def test_messages_can_be_recorded(model):
    record = pc.Record(("mean", "prediction", "weighted_error"), messages=True)
    result = model.graph.run(model.observations, schedule=SCHEDULE, record=record)
    np.testing.assert_array_equal(result.message("x0", "y0"), result.prediction("y0").reshape(10, -1))
    np.testing.assert_array_equal(result.message("y0", "x0"), result.get("y0", "weighted_error").reshape(10, -1))
    np.testing.assert_array_equal(result.message("theta00", "x0"), result.mean("theta00"))
    np.testing.assert_allclose(result.message("noise_x0", "x0"), np.exp(result.mean("noise_x0")))


def test_memory_does_not_grow_when_nothing_is_recorded():
    graph, schedule = odem(model="glv", orders=2)
    session = graph.start(schedule, record=())
    y = torch.tensor([2.0, 1.0, 1.5], dtype=torch.float64)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    counts = []
    for _ in range(3):
        for _ in range(300):
            session.step(y)
        counts.append(tensors())
    assert counts[0] == counts[1] == counts[2]
    assert not len(session.recorder)
    assert session.result().traces == {}
    assert session.tick == 900


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes(dtype, model):
    result = model.graph.run(model.observations, schedule=SCHEDULE, dtype=dtype)
    exact = model.graph.run(model.observations, schedule=SCHEDULE)
    assert result.mean("x0").dtype == (np.float32 if dtype == torch.float32 else np.float64)
    np.testing.assert_allclose(result.mean("x0"), exact.mean("x0"), rtol=2e-3, atol=2e-3)


def test_a_module_must_have_the_dtype_of_the_run():
    """A float32 module runs in float32; in float64 the error names both dtypes."""
    torch.manual_seed(0)

    class Decay(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x, parameters):
            return torch.tanh(self.layer(x)) - x

    def graph():
        x = GeneralisedStateNode("x", dim=2, orders=2, flow=Decay())
        y = SensoryNode("y", dim=2, orders=1, dt=0.1)
        made = pc.Graph()
        made.predicts(x, y)
        made.weighs(PrecisionNode("nx", prior_precision=10.0, sd=0.1, correlation_time=0.5), x)
        made.weighs(PrecisionNode("ny", prior_precision=10.0, sd=0.1, correlation_time=0.5), y)
        return made

    result = graph().run(np.ones((5, 2)), schedule=pc.states_only(), dtype=torch.float32)
    assert result.mean("x").dtype == np.float32
    with pytest.raises(GraphError, match=r"flow of GeneralisedStateNode 'x' failed.*torch.float64"):
        graph().run(np.ones((5, 2)), schedule=pc.states_only())


def test_global_random_state_is_untouched(model):
    state = torch.get_rng_state()
    model.graph.run(model.observations, schedule=SCHEDULE)
    assert torch.equal(state, torch.get_rng_state())


def test_threads_are_limited_during_a_run_only(model):
    usual = torch.get_num_threads()
    seen = []

    def stream():
        for t in range(2):
            seen.append(torch.get_num_threads())
            yield {name: y[t] for name, y in model.observations.items()}

    torch.set_num_threads(2)
    try:
        model.graph.run(stream(), schedule=SCHEDULE)
        assert seen == [1, 1]
        assert torch.get_num_threads() == 2
        model.graph.run(stream(), schedule=SCHEDULE, threads=None)
        assert seen == [1, 1, 2, 2]
        with pytest.raises(ObservationError):
            model.graph.run(iter([np.zeros(7)]), schedule=SCHEDULE)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)


def test_initialisation_from_the_first_observation():
    """With an identity mapping the first state is the first observation, and its motion is given by the flow."""
    graph, schedule = odem(model="glv", orders=3)
    session = graph.start(pc.Schedule(acts=(pc.act("observe", "sensory"),), on_start=schedule.on_start), record=())
    y = torch.tensor([2.0, 1.0, 1.5], dtype=torch.float64)
    session.step(y)
    mean = session.mean("x")
    interaction = torch.tensor([[0.0, 0.3, -0.2], [-0.3, 0.0, 0.3], [0.2, -0.3, 0.0]], dtype=torch.float64)
    velocity = y * (interaction @ y)
    torch.testing.assert_close(mean, torch.stack([y, velocity, torch.zeros_like(y)]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(session.read("y", "observation"), torch.stack([y, torch.zeros(3, dtype=torch.float64)]))


@pytest.mark.parametrize(
    ("observations", "words"),
    [
        (np.zeros((5, 4)), "shape \\(5, 4\\); expected .*dim = 3"),
        (np.zeros(3), "expected"),
        (np.zeros((0, 3)), "no observations"),
        ([], "no observations"),
        (np.zeros((5, 3), dtype=complex), "real numbers"),
        (iter([]), "no observations"),
        ([["a", "b", "c"]], "numbers"),
        ([[1.0, 2.0], [1.0]], "rectangular"),
        (np.array([[1.0, np.inf, 1.0]]), "'y' at index \\[0, 1\\] is infinite"),
        ({"z": np.zeros((5, 3))}, "given for 'z'.*known: y"),
        (5, "array or an iterable"),
        (iter([np.zeros(2)]), "dim = 3"),
    ],
)
def test_invalid_observations_name_the_node(observations, words):
    graph, schedule = odem()
    with pytest.raises(ObservationError, match=words):
        graph.run(observations, schedule=schedule)


def test_several_sensors_need_names(model):
    with pytest.raises(ObservationError, match="'y0': …, 'y1'"):
        model.graph.run(np.zeros((5, 2)), schedule=SCHEDULE)
    with pytest.raises(ObservationError, match="differ in length"):
        model.graph.run({"y0": np.zeros((5, 2)), "y1": np.zeros((6, 1))}, schedule=SCHEDULE)


def test_incompatible_batch_shapes_are_rejected():
    graph, schedule = odem(kappa=torch.ones(4))
    with pytest.raises(ObservationError, match="do not fit"):
        graph.run(np.zeros((3, 5, 3)), schedule=schedule)


def test_divergence_names_the_node():
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, p: x**9, initial_mean=[[50.0]])
    y = SensoryNode("y", dim=1, orders=1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
    graph.weighs(PrecisionNode("ny", prior_precision=1e300, sd=0.1, correlation_time=1.0), y)
    with pytest.raises(DivergenceError, match=r"'[xy]' is no longer finite at observation"):
        graph.run(1e9 * np.ones((200, 1)), schedule=pc.states_only())


def test_a_diverging_log_precision_names_the_node():
    graph, _ = odem(rate=1.0)
    schedule = pc.odem(every=1)
    with pytest.raises(DivergenceError, match=r"PrecisionNode 'lambda_[xy]' at observation 1: a log-precision reached"):
        graph.run(1e6 * np.ones((20, 3)) * np.arange(20)[:, None], schedule=schedule)


# --- a batch in which some elements diverge ---
def runaway(rate, every=1):
    """A step far too long makes log-precisions run away; a batch element with a small one is fine."""
    graph, _ = odem(rate=rate)
    return graph, pc.odem(every=every), 3 * np.sin(np.arange(40.0) / 10)[:, None] * np.ones(3)


def test_a_diverging_element_stops_alone():
    rates = torch.tensor([1e-4, 1.0, 0.3, 100.0, 10.0], dtype=torch.float64)
    graph, schedule, seen = runaway(rates)
    result = graph.run(seen, schedule=schedule, on_divergence="stop")
    for i, rate in enumerate(rates.tolist()):
        graph, schedule, seen = runaway(rate)
        if rate < 1:
            alone = graph.run(seen, schedule=schedule)
            assert (result.diverged.at[i], result.diverged.node[i]) == (-1, "")
            np.testing.assert_allclose(result.free_action[i], alone.free_action, rtol=1e-12)
            for key, trace in alone.traces.items():
                np.testing.assert_allclose(result.traces[key].values[i], trace.values, rtol=1e-9, atol=1e-9)
            continue
        with pytest.raises(DivergenceError) as caught:
            graph.run(seen, schedule=schedule)
        at, node = result.diverged.at[i], result.diverged.node[i]
        assert f"Node '{node}' " in str(caught.value)
        assert f"observation {at}" in str(caught.value)
        assert np.isnan(result.free_action[i])
        for trace in result.traces.values():
            assert np.isfinite(trace.values[i, :at]).all()
            assert np.isnan(trace.values[i, at:]).all()


def test_a_non_finite_element_stops_alone():
    x = GeneralisedStateNode(
        "x", dim=1, orders=1, flow=lambda x, p: x**9, initial_mean=torch.tensor([1e-3, 50.0])[:, None, None]
    )
    y = SensoryNode("y", dim=1, orders=1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
    graph.weighs(PrecisionNode("ny", prior_precision=[[1.0], [1e300]], sd=0.1, correlation_time=1.0), y)
    seen = np.stack([np.zeros((200, 1)), 1e9 * np.ones((200, 1))])
    session = graph.start(pc.states_only(), on_divergence="stop").run(seen)
    assert session.diverged.at[0] == -1
    assert session.diverged.at[1] >= 0
    assert session.diverged.node[1] in ("x", "y")
    assert session.mean("x").isfinite().all()
    assert session.free_action[0].isfinite()


def test_a_run_in_which_all_elements_diverge_has_a_result(tmp_path):
    graph, schedule, seen = runaway(torch.tensor([1.0, 10.0]))
    result = graph.run(seen, schedule=schedule, on_divergence="stop")
    assert (result.diverged.at >= 0).all()
    again = pc.Result.load(result.save(tmp_path / "lost.nc"))
    np.testing.assert_array_equal(again.diverged.at, result.diverged.at)
    np.testing.assert_array_equal(again.diverged.node, result.diverged.node)


def test_unknown_divergence_policy():
    graph, schedule, _ = runaway(1.0)
    with pytest.raises(SettingError, match="'raise', 'stop', 'hold' or 'reset'"):
        graph.start(schedule, on_divergence="ignore")


def test_indefinite_curvature_is_clamped_and_counted_or_raised():
    """The exact curvature of a concave mapping is negative where −ξg'' outweighs g'²Π."""

    def graph(policy):
        x = GeneralisedStateNode(
            "x", dim=1, orders=1, flow=lambda x, p: 0 * x, initial_mean=[[0.1]], curvature="exact", indefinite=policy
        )
        y = SensoryNode("y", dim=1, orders=1)
        made = pc.Graph()
        made.predicts(x, y, via=lambda x, p: x**2)
        made.weighs(PrecisionNode("nx", prior_precision=1e-3, sd=0.1, correlation_time=1.0), x)
        made.weighs(PrecisionNode("ny", prior_precision=1.0, sd=0.1, correlation_time=1.0), y)
        return made

    stay = pc.Schedule(acts=(pc.act("observe", "sensory"), pc.act("update_covariance", "state")))
    result = graph("clamp").run(np.full((3, 1), 5.0), schedule=stay, record=("covariance",))
    assert result.fallbacks["x"] == 3
    np.testing.assert_allclose(result.covariance("x"), 1e9)  # the floor of the clamp, 1e-9
    with pytest.raises(DivergenceError, match=r"GeneralisedStateNode 'x' at observation 0.*indefinite='clamp'"):
        graph("raise").run(np.full((3, 1), 5.0), schedule=stay)


def test_a_data_frame_is_accepted():
    graph, schedule = odem()
    y = np.linspace(1.0, 2.0, 15).reshape(5, 3)
    same(graph.run(y, schedule=schedule), graph.run(pd.DataFrame(y, columns=list("abc")), schedule=schedule))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"schedule": pc.odem}, ScheduleError, "schedule must be a Schedule"),
        ({"dtype": torch.float16}, SettingError, "dtype must be"),
        ({"dtype": "float32"}, SettingError, "dtype must be"),
    ],
)
def test_bad_options(options, error, words):
    graph, schedule = odem()
    with pytest.raises(error, match=words):
        graph.run(np.ones((3, 3)), **({"schedule": schedule} | options))


def test_reading_before_the_first_observation_is_an_error():
    graph, schedule = odem()
    session = graph.start(schedule)
    for look in (lambda: session.free_energy, lambda: session.free_action, lambda: session.mean("x"), session.result):
        with pytest.raises(ObservationError, match=r"call step\(y\) first"):
            look()


def test_a_batch_shape_that_changes_is_rejected():
    graph, schedule = odem()
    session = graph.start(schedule)
    session.step(np.ones(3))
    with pytest.raises(ObservationError, match=r"observation 1 of 'y' has batch dimensions \(2,\).*began with \(\)"):
        session.step(np.ones((2, 3)))


def test_batches_of_two_dimensions_with_correlation_times():
    graph, schedule = odem(kappa=[[1.0], [0.5]], smoothness=[0.005, 0.01, 0.02])
    y = np.linspace(1.0, 2.0, 15).reshape(5, 3)
    together = graph.run(y, schedule=schedule)
    graph, schedule = odem(kappa=0.5, smoothness=0.02)
    np.testing.assert_allclose(together.mean("x")[1, 2], graph.run(y, schedule=schedule).mean("x"), rtol=1e-10)


def test_batches_of_kernels_and_of_a_custom_integrator():
    @settings
    class Crawl(StateIntegrator):
        pace: Positive

        def step(self, evidence):
            return -self.pace[:, None] * evidence.gradient

    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, p: -x, integrator=Crawl([1e-3, 1e-2]))
    y = SensoryNode("y", dim=1, orders=1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, kernel=SquaredExponential([[0.1], [0.2], [0.3]])), x)
    graph.weighs(PrecisionNode("ny", prior_precision=1.0, sd=0.1, correlation_time=1.0), y)
    assert graph.run(np.ones((3, 1)), schedule=pc.states_only()).mean("x").shape == (3, 2, 3, 1, 1)


@pytest.mark.parametrize(
    ("mapping", "y", "first"),
    [
        (lambda x, p: x.exp(), 50.0, np.log(50.0)),
        (lambda x, p: x.exp(), 0.1, np.log(0.1)),
        (torch.Tensor.sinh, 30.0, np.arcsinh(30.0)),
    ],
)
def test_initialisation_through_a_nonlinear_mapping(mapping, y, first):
    """A Gauss–Newton step from 0 overshoots; the result solves g(x) = y."""
    bent = mapping if mapping is not torch.Tensor.sinh else lambda x, p: x.sinh()
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, p: -x)
    sensor = SensoryNode("y", dim=1, orders=1)
    graph = pc.Graph()
    graph.predicts(x, sensor, via=bent)
    graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
    graph.weighs(PrecisionNode("ny", prior_precision=1.0, sd=0.1, correlation_time=1.0), sensor)
    schedule = pc.Schedule(acts=(pc.act("observe", "sensory"),), on_start=(pc.act("initialise", "state", repeats=12),))
    session = graph.start(schedule).step([y])
    assert session.mean("x").item() == pytest.approx(first, rel=1e-6)


def test_a_flow_that_branches_on_values_is_rejected_with_the_remedy():
    x = GeneralisedStateNode("x", dim=1, orders=2, flow=lambda x, p: x if x.sum() > 0 else -x)
    y = SensoryNode("y", dim=1, orders=1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("nx", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
    graph.weighs(PrecisionNode("ny", prior_precision=1.0, sd=0.1, correlation_time=1.0), y)
    with pytest.raises(GraphError, match=r"torch\.where"):
        graph.run(np.ones((3, 1)), schedule=pc.states_only())


def test_progress_bar_is_silent_unless_asked(model, capsys):
    model.graph.run(model.observations, schedule=SCHEDULE)
    assert capsys.readouterr().err == ""
    model.graph.run(model.observations, schedule=SCHEDULE, progress=True)
    assert "10/10" in capsys.readouterr().err


def test_several_states_may_predict_one_sensory_node():
    """Two states that add up: the prediction of their sensory node is the sum."""
    model = build(dims=(2, 2), orders=(2, 2), channels=(2, 2), fused=True, samples=5)
    record = pc.Record(("mean", "prediction"), messages=True)
    result = model.graph.run(model.observations, schedule=SCHEDULE, record=record)
    expected = result.message("x0", "y1") + result.message("x1", "y1")
    np.testing.assert_allclose(result.prediction("y1").reshape(5, -1), expected, rtol=1e-14)


# --- time ---
@pytest.mark.usefixtures("eager")
def test_nodes_see_the_time_since_the_previous_observation():
    session = odem(dt=[0.25, 0.5]).graph.start(pc.states_only(), record=())
    session.step(np.ones(3)).step(np.ones(3))
    for name in session.graph.nodes:
        assert session.context(name).dt.tolist() == [0.25, 0.5]


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_threads_that_share_a_session_take_turns(engine):
    """All steps are taken, whoever takes them: the same digits as by one thread, since all observations are equal."""
    model, y, each = odem(orders=2), np.full(3, 1.5), 10 if engine == "eager" else 50
    alone, shared, errors = model.start(engine=engine), model.start(engine=engine), []
    for _ in range(4 * each):
        alone.step(y)

    def work():
        try:
            for _ in range(each):
                shared.step(y)
                shared.mean("x")
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert errors == []
    assert shared.tick == len(shared.result().times) == 4 * each
    assert torch.equal(shared.mean("x"), alone.mean("x"))
