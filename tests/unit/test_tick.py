"""The tick is a pure function, and a session is a chain of ticks."""

import copy

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.engine.tick import Inputs, tick
from pcnet.errors import ScheduleError
from pcnet.graphs import odem
from pcnet.numerics.kernels import White
from pcnet.numerics.trees import flatten
from support.filters import single_filter

OBSERVATIONS = pc.simulate.glv_process(samples=40, noise="white", seed=2).observations
MODELS = {
    "odem": lambda: odem(orders=2, every=4),
    "adaptive filter": lambda: single_filter(
        pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25
    ),
}


def tensors(state):
    return {path: value for name, node in state.nodes.items() for path, value in flatten(node, name).items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_tick_changes_nothing_and_depends_on_nothing_but_its_arguments(name):
    """With a new workspace each time, and called twice, it gives the states of a session to the last digit."""
    session = MODELS[name]().start(record=())
    session.step(OBSERVATIONS[0])
    program, state = session.program, session.state
    with torch.inference_mode():
        for t in range(1, 12):
            before = {path: value.clone() for path, value in tensors(state).items()}
            inputs = Inputs({"y": OBSERVATIONS[t][None]}, program.interval, None, program.due(t), False)
            first, second = (tick(program, state, inputs)[0] for _ in range(2))
            for path, value in tensors(state).items():
                assert torch.equal(value.nan_to_num(), before[path].nan_to_num()), path
            session.step(OBSERVATIONS[t])
            reached = tensors(session.state)
            for found in (tensors(first), tensors(second)):
                assert all(torch.equal(value.nan_to_num(), reached[path].nan_to_num()) for path, value in found.items())
            state = session.state


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_of_a_session_goes_its_own_way(name):
    session = MODELS[name]().start()
    for y in OBSERVATIONS[:10]:
        session.step(y)
    other = copy.deepcopy(session)
    for y in OBSERVATIONS[10:20]:
        session.step(y)
    assert other.tick == 10
    for y in OBSERVATIONS[10:20]:
        other.step(y)
    np.testing.assert_array_equal(other.result().mean("x"), session.result().mean("x"))
    other.step(OBSERVATIONS[0])
    assert session.tick == 20


def kalman_graph(**options):
    x = pc.KalmanStateNode("x", dim=3, flow=pc.systems.lotka_volterra)
    y = pc.SensoryNode("y", dim=3, orders=1, dt=0.01)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(pc.ParameterNode("theta", mean=[0.3, -0.2, 0.3], sd=0.25, **options), x)
    graph.weighs(pc.PrecisionNode("noise_x", mean=[0.0], sd=1.2, kernel=White()), x)
    graph.weighs(pc.PrecisionNode("noise_y", mean=[0.0], sd=1.2, kernel=White()), y)
    return graph


def test_a_graph_made_by_hand_learns_as_the_ready_made_one():
    """Without a schedule and without estimators, a graph with a Kalman state is the adaptive filter."""
    made = kalman_graph().run(OBSERVATIONS)
    ready = single_filter(pc.systems.lotka_volterra, 3, 0.01, parameter_mean=[0.3, -0.2, 0.3], parameter_sd=0.25).run(
        OBSERVATIONS
    )
    for name in ("x", "theta", "noise_x", "noise_y"):
        np.testing.assert_array_equal(made.mean(name), ready.mean(name))


def test_states_of_two_kinds_need_a_schedule_of_their_own():
    graph = kalman_graph()
    z = pc.GeneralisedStateNode("z", dim=1, orders=2, flow=lambda x, theta: -x)
    graph.predicts(z, pc.SensoryNode("w", dim=1, orders=1, dt=0.01))
    with pytest.raises(ScheduleError, match="x carry their beliefs and z do not"):
        pc.Model(graph)


@pytest.mark.parametrize("series", [np.ones(30), torch.ones(30), [1.0] * 30])
def test_a_series_of_one_channel_needs_no_second_dimension(series):
    model = single_filter(lambda x, theta: -x, 1, 0.1)
    wanted = model.run(np.ones((30, 1)))
    np.testing.assert_array_equal(model.run(series).mean("x"), wanted.mean("x"))


def test_the_number_of_channels_follows_from_the_mapping():
    model = single_filter(lambda x, theta: -x, 3, 0.1, mapping=lambda x, theta: x[..., :2] ** 2)
    assert model.graph["y"].dim == 2
