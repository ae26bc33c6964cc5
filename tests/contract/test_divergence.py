"""Divergence is reported, counted and handled by the chosen policy; no run returns NaN without saying so."""

import math

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import DivergenceError, SettingError
from pcnet.graphs import odem
from pcnet.nodes import GeneralisedStateNode, PrecisionNode, SensoryNode
from pcnet.numerics.integrators import StateIntegrator
from pcnet.settings import settings


def walk(samples=40, seed=0):
    return 1 + 0.1 * np.random.default_rng(seed).normal(size=(samples, 3)).cumsum(0)


def small(orders=2, name="x"):
    x = GeneralisedStateNode(name, dim=3, orders=2, flow=pc.systems.lotka_volterra)
    y = SensoryNode("y", dim=3, orders=orders, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(pc.ParameterNode("theta", mean=[0.3, -0.2, 0.3], sd=0.1), x)
    graph.weighs(PrecisionNode("nx", prior_precision=10.0, sd=0.1, correlation_time=0.3), x)
    graph.weighs(PrecisionNode("ny", prior_precision=10.0, sd=0.1, correlation_time=0.3), y)
    return graph


def at_tick(session, tick, y):
    """A session that has taken in nothing, but counts from this tick, so that its slow clocks tick with another's."""
    session.prepare(y)
    session._run.now = session._run.now._replace(tick=tick)
    return session


def test_hold_treats_the_observation_as_missing():
    y = walk()
    wild, holey = y.copy(), y.copy()
    wild[[7, 20, 21]] = 1e300
    holey[[7, 20, 21]] = math.nan
    session = small().start(pc.odem(every=1000), on_divergence="hold", screen=False).run(wild)
    reference = small().start(pc.odem(every=1000))
    for k in range(40):
        if k in (7, 20, 21):  # in a missing tick states still follow the flow; when held they do not
            before = {name: reference.state.nodes[name] for name in ("x", "theta", "nx", "ny")}
            reference.step(holey[k])
            reference.replace_nodes(before)
        else:
            reference.step(holey[k])
    assert torch.equal(session.read("y", "observation"), reference.read("y", "observation"))
    torch.testing.assert_close(session.mean("x"), reference.mean("x"), rtol=1e-12, atol=1e-12)
    result = session.result()
    assert result.fallbacks["hold"] == 3
    assert [(i.observation, i.element) for i in session.divergence_events] == [(7, 0), (20, 0), (21, 0)]
    assert {i.node for i in session.divergence_events} <= {"x", "y"}
    assert all(i.why.endswith("is no longer finite") for i in session.divergence_events)
    assert np.isfinite(result.free_action)
    assert np.isnan(result.free_energy[[7, 20, 21]]).all()
    np.testing.assert_allclose(np.nansum(result.free_energy), result.free_action)
    assert np.isfinite(result.mean("x")).all()
    assert (result.diverged.at == -1).all()


def test_reset_starts_a_new_run():
    y = walk()
    y[9] = 1e300
    session = small().start(pc.odem(every=4), on_divergence="reset", screen=False).run(y)
    fresh = at_tick(small().start(pc.odem(every=4), record=("mean",)), 10, y)
    fresh.run(y[10:])
    result = session.result()
    np.testing.assert_array_equal(result.mean("x")[10:], fresh.result().mean("x"))
    np.testing.assert_array_equal(result.mean("theta")[10:], fresh.result().mean("theta"))
    assert result.fallbacks["reset"] == 1
    assert np.isfinite(result.free_action)


@pytest.mark.parametrize("policy", ["hold", "reset"])
def test_other_batch_elements_are_unchanged(policy):
    y = np.stack([walk(seed=1), walk(seed=2)])
    wild = y.copy()
    wild[1, 5] = 1e300
    together = small().run(wild, schedule=pc.odem(every=4), on_divergence=policy)
    alone = small().run(y[0], schedule=pc.odem(every=4))
    for key, trace in alone.traces.items():
        np.testing.assert_allclose(together.traces[key].values[0], trace.values, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(together.fallbacks[policy], [0, 1])


@pytest.mark.parametrize("policy", ["hold", "reset"])
@pytest.mark.parametrize("when", [[0], [0, 1, 2]])
def test_divergence_at_the_first_observation(policy, when):
    y = walk()
    y[when] = 1e300
    result = small().run(y, schedule=pc.odem(every=4), on_divergence=policy)
    last = when[-1] + 1
    fresh = at_tick(small().start(pc.odem(every=4)), last, y)
    fresh.run(y[last:])
    np.testing.assert_allclose(result.mean("x")[last:], fresh.result().mean("x"), rtol=1e-9)
    assert result.fallbacks[policy] == len(when)


@settings
class Singular(StateIntegrator):
    """Asks for the solution of a system that has none, once states are above 2."""

    def step(self, evidence):
        matrix = torch.eye(2).to(evidence.mean) * float(evidence.mean[0, 0] <= 2)
        return torch.linalg.solve(matrix[None], 0 * evidence.mean[:, :2]) + evidence.mean * 0.01


def test_a_singular_matrix_names_the_node():
    def graph():
        x = GeneralisedStateNode(
            "x", dim=1, orders=2, flow=lambda x, p: -x, integrator=Singular(), initial_mean=[[1.97], [0.0]]
        )
        made = pc.Graph()
        made.predicts(x, SensoryNode("y", dim=1, orders=1))
        for name in ("x", "y"):
            made.weighs(PrecisionNode(f"n{name}", prior_precision=1.0, sd=0.1, correlation_time=1.0), made[name])
        return made

    with pytest.raises(DivergenceError, match=r"GeneralisedStateNode 'x' at observation 2: .*singular"):
        graph().run(np.ones((5, 1)), schedule=pc.states_only())
    result = graph().run(np.ones((5, 1)), schedule=pc.states_only(), on_divergence="hold")
    assert result.fallbacks["hold"] == 3
    assert np.isfinite(result.mean("x")).all()
    stopped = graph().run(np.ones((5, 1)), schedule=pc.states_only(), on_divergence="stop")
    assert (stopped.diverged.at, stopped.diverged.node) == (2, "x")


def test_the_policy_is_part_of_a_checkpoint(tmp_path):
    y = walk()
    y[3] = 1e300
    result = small().run(y, schedule=pc.odem(every=4), on_divergence="hold")
    assert pc.Result.load(result.save(tmp_path / "held.nc")).fallbacks["hold"] == 1


def test_unknown_policies_are_rejected():
    with pytest.raises(SettingError, match="'hold' or 'reset', not 'ignore'"):
        odem().start(on_divergence="ignore")
    with pytest.raises(SettingError, match="the node name 'hold' is also a policy"):
        small(name="hold").start(on_divergence="hold")
