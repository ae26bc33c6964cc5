"""Irregular times, and observations from any kind of stream."""

import asyncio
import math

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import ObservationError
from pcnet.graphs import odem
from pcnet.nodes import GeneralisedStateNode, PrecisionNode, SensoryNode
from pcnet.numerics.integrators import ExplicitEuler, ImplicitEuler, LocalLinearisation
from support.compare import same
from support.models import build


@pc.TracedFunction
def swing(x, theta):
    return torch.stack([x[..., 1], -torch.sin(x[..., 0])], -1)


def swinging(integrator, dt):
    x = GeneralisedStateNode("x", dim=2, orders=2, flow=swing, integrator=integrator)
    y = SensoryNode("y", dim=2, orders=1, dt=dt)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("nx", prior_precision=10.0, sd=0.1, correlation_time=0.5), x)
    graph.weighs(PrecisionNode("ny", prior_precision=10.0, sd=0.1, correlation_time=0.5), y)
    return graph


@pytest.mark.parametrize(
    "integrator",
    [
        lambda time: LocalLinearisation(0.5, step_size=time),
        lambda time: ExplicitEuler(0.1 * time, kappa=0.5),
        lambda time: ImplicitEuler(time, kappa=0.5),
    ],
)
def test_an_integrator_uses_the_elapsed_time(integrator):
    """Every third observation equals a model of three times the sampling interval."""
    y = np.random.default_rng(0).normal(size=(6, 2))
    short = swinging(integrator(0.1), 0.1).run(y, schedule=pc.states_only(), times=0.3 * np.arange(6))
    long = swinging(integrator(torch.tensor(0.1 * 3, dtype=torch.float64)), 0.3).run(y, schedule=pc.states_only())
    later = slice(1, None)  # the first one comes after one interval
    first = long.mean("x")[0] - short.mean("x")[0]
    assert np.abs(first).max() > 0
    from_first = swinging(integrator(0.3), 0.3)
    session = from_first.start(pc.states_only()).step(y[0])
    with torch.inference_mode():
        state = session.state.nodes["x"]
        session.replace_nodes({"x": state._replace(mean=torch.as_tensor(short.mean("x")[0])[None])})
    for t in range(1, 6):
        session.step(y[t])
    np.testing.assert_allclose(session.result().mean("x")[later][-1], short.mean("x")[-1], rtol=1e-9)


def test_regular_times_equal_no_times():
    model = build(samples=10)
    regular = model.graph.run(model.observations, schedule=pc.odem(every=3))
    timed = model.graph.run(model.observations, schedule=pc.odem(every=3), times=0.2 * np.arange(10))
    same(regular, timed)
    np.testing.assert_allclose(timed.times, regular.times)
    late = model.graph.run(model.observations, schedule=pc.odem(every=3), times=100 + 0.2 * np.arange(10))
    np.testing.assert_allclose(late.mean("x0"), regular.mean("x0"), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(late.times, regular.times + 100)


@pytest.mark.usefixtures("eager")
def test_all_nodes_see_the_elapsed_time():
    session = odem(dt=[0.25, 0.5]).graph.start(pc.states_only(), record=())
    session.step(np.ones(3), t=3.0)
    assert session.context("x").dt.tolist() == [0.25, 0.5]
    session.step(np.ones(3), t=4.0)
    for name in session.graph.nodes:
        assert session.context(name).dt.tolist() == [1.0, 1.0]
        assert session.context(name).relative_dt.tolist() == [4.0, 2.0]
    session.step(np.ones(3))
    assert session.context("x").dt.tolist() == [0.25, 0.5]
    assert session.context("x").relative_dt is None


def test_a_step_without_a_time_is_one_interval_later():
    graph, schedule = odem(dt=0.25)
    session = graph.start(schedule)
    for t in (10.0, None, 11.0, None):
        session.step(np.ones(3), t=t)
    np.testing.assert_array_equal(session.result().times, [10, 10.25, 11, 11.25])
    assert session.time == 11.25


@pytest.mark.parametrize(
    ("t", "words"),
    [
        (1.0, "observation 1 is at t = 1, the same as the previous one"),
        (0.5, "observation 1 is at t = 0.5, before the previous one at t = 1"),
        (math.nan, "finite number"),
        (math.inf, "finite number"),
        (10**400, "must be a number"),
        ("2", "finite number"),
        ("noon", "must be a number"),
        ([1, 2], "must be a number"),
    ],
)
def test_invalid_times_are_rejected(t, words):
    graph, schedule = odem()
    session = graph.start(schedule).step(np.ones(3), t=1.0)
    with pytest.raises(ObservationError, match=words):
        session.step(np.ones(3), t=t)
    assert (session.tick, session.time) == (1, 1.0)  # and goes on as if nothing had happened
    reference = graph.start(schedule).step(np.ones(3), t=1.0).step(np.ones(3), t=2.0)
    assert torch.equal(session.step(np.ones(3), t=2.0).mean("x"), reference.mean("x"))


@pytest.mark.parametrize("times", [[0.0, 1.0], [0.0, 1.0, 2.0, 3.0]])
def test_the_numbers_of_times_and_observations_must_agree(times):
    graph, schedule = odem()
    with pytest.raises(ObservationError, match="as many times as observations"):
        graph.run(np.ones((3, 3)), schedule=schedule, times=times)


def test_a_sample_with_two_times_is_rejected():
    graph, schedule = odem()
    with pytest.raises(ObservationError, match="two times"):
        graph.start(schedule).step(pc.Sample(np.ones(3), 1.0), t=1.0)


# --- streams ---
def test_all_streams_give_the_same_numbers():
    model = build(samples=10)
    y = model.observations["y0"]
    times = np.cumsum(np.random.default_rng(1).uniform(0.1, 0.4, size=10)).tolist()
    schedule = pc.odem(every=3)
    whole = model.graph.run(y, schedule=schedule, times=times)
    same(whole, model.graph.run(iter(y), schedule=schedule, times=iter(times)))
    same(whole, model.graph.run((pc.Sample(row, t) for row, t in zip(y, times, strict=True)), schedule=schedule))
    stepped = model.graph.start(schedule)
    for row, t in zip(y, times, strict=True):
        stepped.step({"y0": row}, t=t)
    same(whole, stepped.result())

    async def sensor():
        for row, t in zip(y, times, strict=True):
            await asyncio.sleep(0)
            yield pc.Sample(row, t)

    session = model.graph.start(schedule)
    asyncio.run(session.arun(sensor()))
    same(whole, session.result())


def test_invalid_streams_are_rejected():
    graph, schedule = odem()

    async def nothing():
        for item in ():
            yield item

    with pytest.raises(ObservationError, match="no observations"):
        asyncio.run(graph.start(schedule).arun(nothing()))
    with pytest.raises(ObservationError, match="asynchronous iterator, not list"):
        asyncio.run(graph.start(schedule).arun([np.ones(3)]))


def two_clocks(fast=True, slow=True):
    x = GeneralisedStateNode(
        "x", dim=1, orders=2, flow=pc.systems.linear([[-0.1]]), integrator=LocalLinearisation(step_size=0.1)
    )
    graph = pc.Graph()
    for name, dt, used in (("fast", 0.1, fast), ("slow", 0.5, slow)):
        if used:
            y = SensoryNode(name, dim=1, orders=2, dt=dt)
            graph.predicts(x, y)
            graph.weighs(PrecisionNode(f"n_{name}", prior_precision=10.0, sd=0.1, correlation_time=0.2), y)
    graph.weighs(PrecisionNode("nx", prior_precision=10.0, sd=0.1, correlation_time=0.2), x)
    return graph


def test_sensors_may_have_their_own_sampling_intervals():
    """A tick is that of the fastest; differences of the slow one are over its own intervals."""
    session = two_clocks().start(pc.states_only(), record=("observation", "mean"))
    for k in range(16):
        session.step({"fast": [0.1 * k], **({"slow": [0.2 * k]} if k % 5 == 0 else {})})
    result = session.result()
    np.testing.assert_allclose(result.times, 0.1 * np.arange(16))
    slow = result.observation("slow")[..., 0]
    np.testing.assert_allclose(slow[::5], [[0, 0], [1, 2], [2, 2], [3, 2]], atol=1e-12)
    assert np.isnan(np.delete(slow, np.arange(0, 16, 5), 0)).all()
    np.testing.assert_allclose(result.observation("fast")[1:, 1, 0], 1)


def test_a_sensor_without_observations_equals_a_model_without_it():
    y = np.random.default_rng(0).normal(size=(12, 1))
    alone = two_clocks(slow=False).run(y, schedule=pc.odem(every=4))
    both = two_clocks().run({"fast": y}, schedule=pc.odem(every=4))
    np.testing.assert_allclose(both.mean("x"), alone.mean("x"), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(both.free_action, alone.free_action, rtol=1e-10)


def test_missing_values_may_be_nan_none_or_masked():
    y = np.random.default_rng(2).standard_normal((12, 3))
    holey = y.copy()
    holey[4] = math.nan
    masked = np.ma.masked_array(y.copy(), mask=np.isnan(holey))
    masked.data[4] = 1e6
    model = odem("glv")
    reference = model.graph.run(holey, model.schedule)
    for given in ([None if k == 4 else list(row) for k, row in enumerate(y)], masked, iter(masked)):
        same(reference, model.graph.run(given, model.schedule))


@pytest.mark.parametrize("kind", ["mapping", "sample"])
def test_a_list_of_observations_equals_an_iterator(kind):
    """Lists of mappings or of samples, which are not arrays."""
    y = np.random.default_rng(2).standard_normal((12, 3))
    model = odem("glv")
    each = [{"y": row} if kind == "mapping" else pc.Sample(row, 0.01 * t) for t, row in enumerate(y)]
    whole, listed = (model.graph.run(given, model.schedule, progress=False) for given in (y, each))
    np.testing.assert_allclose(listed.mean("x"), whole.mean("x"), rtol=1e-9)
