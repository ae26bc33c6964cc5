"""Any input gives finite numbers or a clear error, never a silent NaN."""

import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pcnet as pc
from pcnet.errors import PcnetError
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode
from support.filters import single_filter

EXTREMES = [0.0, -0.0, 1.0, -3.5, 1e-300, 1e150, 1e155, 1e300, -1e300, 1.7e308, math.nan, math.inf, -math.inf]
FLOW = pc.systems.LotkaVolterra(2)


def graph(orders=2, derivatives="backward", channels="each", **options):
    x = GeneralisedStateNode("x", dim=2, orders=3, flow=FLOW)
    y = SensoryNode("y", dim=2, orders=orders, dt=0.1, derivatives=derivatives, **options)
    made = pc.Graph()
    made.predicts(x, y)
    made.parametrises(ParameterNode("theta", mean=[0.3], sd=0.2), x)
    made.weighs(PrecisionNode("nx", prior_precision=10.0, sd=0.1, correlation_time=0.3), x)
    made.weighs(PrecisionNode("ny", prior_precision=10.0, sd=0.1, correlation_time=0.3, channels=channels), y)
    return made


def filtered(**options):
    return single_filter(FLOW, 2, 0.1, parameter_mean=[0.3], parameter_sd=0.2, **options)


value = st.sampled_from(EXTREMES) | st.floats(-10, 10)
row = (
    st.none()
    | st.lists(value, min_size=2, max_size=2)
    | st.lists(value, max_size=4)
    | st.dictionaries(st.sampled_from(["y", "x", "z"]), st.none() | st.lists(value, min_size=2, max_size=2), max_size=2)
    | st.text(max_size=3)
    | st.lists(st.text(max_size=2), max_size=2)
    | st.binary(max_size=2)
    | st.integers()
    | st.lists(st.lists(value, min_size=2, max_size=2), max_size=2)
)

time = st.none() | st.floats() | st.sampled_from([0, 1, "1", [1.0], 10**400])


def sound(session):
    """All that can be read is finite, but for what is said to be missing."""
    for name in (name for name, node in session.graph.nodes.items() if "sd" in node.quantities):
        assert torch.isfinite(session.mean(name)).all(), name
        assert not torch.isnan(session.sd(name)).any(), name
    assert torch.isfinite(session.free_action).all()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(row, time), max_size=6),
    st.sampled_from(["raise", "hold", "reset"]),
    st.sampled_from(["backward", "fit", "none"]),
    st.sampled_from(["each", "full"]),
)
def test_any_stream_of_observations(stream, policy, derivatives, channels):
    take_in(graph(derivatives=derivatives, channels=channels).start(pc.odem(every=2), on_divergence=policy), stream)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(row, time), max_size=6),
    st.sampled_from(["raise", "hold", "reset"]),
    st.sampled_from(
        [
            {},
            {"correlation_time": 0.3},
            {"correlation_time": 0.3, "correlation_time_sd": 0.5},
            {"model_error_time": 1.0},
        ]
    ),
)
def test_any_stream_through_an_adaptive_filter(stream, policy, options):
    made, schedule = filtered(**options)
    take_in(made.start(schedule, on_divergence=policy), stream)


def take_in(session, stream):
    """Every observation is taken in or refused in words, and what can be read is sound at any time."""
    policy = session.on_divergence
    for observation, t in stream:
        tick = session.tick
        try:
            session.step(observation, t)
        except pc.errors.DivergenceError:
            assert policy == "raise"
            return
        except PcnetError:
            assert session.tick == tick
    if session.tick:
        sound(session)
        result = session.result()
        assert np.isfinite(result.mean("x")).all()
        held = np.isnan(result.free_energy).sum()
        assert held == sum(int(session.fallbacks[key].sum()) for key in ("hold", "reset") if key in session.fallbacks)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.floats(allow_infinity=False), min_size=2, max_size=2), min_size=1, max_size=6))
def test_with_hold_any_stream_runs_to_its_end(rows):
    """Any stream of real numbers and gaps, as an array or step by step."""
    made = graph()
    result = made.run(np.array(rows), schedule=pc.odem(every=2), on_divergence="hold")
    assert result.observations == len(rows)
    assert np.isfinite(result.mean("x")).all()
    assert np.isfinite(result.free_action)


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(
        st.sampled_from(
            ["dim", "orders", "dt", "max_gap", "window", "extrapolate", "derivative_init", "derivatives", "nonsense"]
        ),
        st.none() | st.integers(-2, 4) | st.sampled_from(EXTREMES) | st.text(max_size=4) | st.lists(value, max_size=2),
    )
)
def test_any_settings_of_a_sensor(options):
    try:
        node = SensoryNode("y", **{"dim": 1, "orders": 1} | options)
    except PcnetError:
        return
    assert node.orders >= 1
    assert node.dt is None or bool((node.dt > 0).all())


@settings(deadline=None, max_examples=100)
@given(st.floats() | st.integers() | st.text(max_size=2), st.none() | st.floats(), st.integers(-1, 3))
def test_any_horizon(horizon, every, draws):
    if isinstance(horizon, (int, float)) and horizon > 1:
        horizon = 1 / horizon  # or it takes long, and nothing else
    if every is not None and 0 < every < 0.01:
        every = 0.01 + every
    with contextlib.suppress(PcnetError):
        assert np.isfinite(BEGUN.forecast(horizon, every).mean("x")).all()
    with contextlib.suppress(PcnetError):
        assert np.isfinite(BEGUN.sample(horizon, draws, every=every, seed=0).values["x"]).all()


BEGUN = graph().start(pc.odem(every=2)).step([1.0, 2.0]).step([1.1, 1.9])


@pytest.mark.parametrize("size", [1e100, 1e200, 1e300])
def test_huge_but_finite_observations_are_reported(size):
    with pytest.raises(pc.errors.DivergenceError, match=r"Node '\w+' .*observation 1"):
        graph().run(np.array([[1.0, 1.0], [size, size]]), schedule=pc.states_only())
    with pytest.raises(pc.errors.DivergenceError):
        graph().run(np.array([[size, 1.0], [1.0, size], [1.0, 1.0]]), schedule=pc.states_only())


def test_one_observation_is_enough():
    for schedule in (pc.odem(every=1), pc.states_only(), pc.generalised_filtering()):
        sound(graph().start(schedule).step([1.0, 2.0]))
