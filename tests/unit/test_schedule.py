"""Schedules: which nodes take which action at which observation."""

from collections import Counter

import pytest
import torch

import pcnet as pc
from pcnet.errors import ScheduleError, SettingError
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode
from support.models import build


def counted(monkeypatch, schedule, ticks=12, **options):
    """How often each node took each action."""
    done = Counter()
    for kind in (GeneralisedStateNode, ParameterNode, PrecisionNode):
        for action in ("update", "accumulate", "update_covariance", "renew_prior", "initialise"):

            def spy(self, local, action=action, act=getattr(kind, action)):
                done[self.name, action] += 1
                return act(self, local)

            monkeypatch.setattr(kind, action, spy)
    model = build(samples=ticks, **options)
    model.graph.run(model.observations, schedule=schedule, record=())
    return done


def test_odem(monkeypatch):
    done = counted(monkeypatch, pc.odem(every=4))
    assert done["x0", "update"] == done["x0", "update_covariance"] == 12
    for name in ("theta00", "noise_x0", "noise_y0"):
        assert done[name, "accumulate"] == 12
        assert done[name, "update"] == done[name, "update_covariance"] == done[name, "renew_prior"] == 3


def test_generalised_filtering(monkeypatch):
    done = counted(monkeypatch, pc.generalised_filtering())
    assert {done[name, "update"] for name in ("x0", "theta00", "noise_x0", "noise_y0")} == {12}


def test_states_only(monkeypatch):
    done = counted(monkeypatch, pc.states_only())
    assert done["x0", "update"] == 12
    assert not any(count for (name, _), count in done.items() if name != "x0")


def test_a_period_for_each_node(monkeypatch):
    done = counted(monkeypatch, pc.odem(every=4, periods={"noise_y0": 6, "theta00": 3}))
    assert done["noise_x0", "update"] == 3
    assert done["noise_y0", "update"] == 2
    assert done["theta00", "update"] == 4


def test_a_period_for_a_state(monkeypatch):
    done = counted(monkeypatch, pc.odem(every=4, periods={"x0": 3}))
    assert done["x0", "update"] == done["x0", "update_covariance"] == 4


def test_a_custom_schedule(monkeypatch):
    schedule = pc.Schedule(
        acts=(
            pc.act("observe", "sensory"),
            pc.act("update", "x0", repeats=2),
            pc.act("accumulate", "theta00"),
            pc.act("update", "theta00", every=5),
        )
    )
    done = counted(monkeypatch, schedule)
    assert done == {("x0", "update"): 24, ("theta00", "accumulate"): 12, ("theta00", "update"): 2}


def test_slow_ticks_are_at_the_end_of_each_period():
    """(t + 1) mod N == 0, as the authors' program has it."""
    model = build(samples=9)
    result = model.graph.run(model.observations, schedule=pc.odem(every=4))
    theta = torch.as_tensor(result.mean("theta00"))
    changed = [t for t in range(1, 9) if not torch.equal(theta[t], theta[t - 1])]
    assert changed == [3, 7]


def test_a_clock_for_each_batch_element():
    model = build(samples=12)
    periods = torch.tensor([2, 3, 12, 5])
    together = model.graph.run(model.observations, schedule=pc.odem(every=periods), record=("mean", "sd", "energy"))
    for i, period in enumerate(periods):
        alone = model.graph.run(
            model.observations, schedule=pc.odem(every=int(period)), record=("mean", "sd", "energy")
        )
        for key, trace in alone.traces.items():
            found = torch.as_tensor(together.traces[key].values[i])
            torch.testing.assert_close(found, torch.as_tensor(trace.values), rtol=1e-10, atol=1e-10)


def test_a_schedule_prints_its_actions():
    text = str(pc.odem(every=torch.tensor([64, 512])))
    assert "state: update" in text
    assert "every 64 to 512" in text


@pytest.mark.parametrize("who", ["y", "sensor"])
def test_unknown_names_are_rejected(who):
    model = build()
    with pytest.raises(ScheduleError, match=f"no node or role '{who}'"):
        model.graph.start(pc.Schedule(acts=(pc.act("observe", "sensory"), pc.act("update", who))))


def test_a_schedule_without_observe_is_rejected():
    with pytest.raises(ScheduleError, match="'y0' never takes the action 'observe'"):
        build().graph.start(pc.Schedule(acts=(pc.act("update", "state"),)))


@pytest.mark.parametrize("every", [0, 2.5, -1])
def test_periods_must_be_whole_numbers(every):
    with pytest.raises(SettingError, match="whole numbers"):
        pc.odem(every=every)


def test_actions_on_start_have_no_period():
    with pytest.raises(SettingError, match="remove their `every`"):
        pc.Schedule(acts=(pc.act("observe", "sensory"),), on_start=(pc.act("initialise", "state", every=3),))


def test_an_act_without_nodes_is_rejected():
    with pytest.raises(SettingError, match="needs nodes or roles"):
        pc.Schedule(acts=(pc.act("observe", "sensory"), pc.act("update")))


def test_a_node_named_like_a_role_is_rejected():
    graph = pc.Graph()
    x = GeneralisedStateNode("x", dim=1, orders=1, flow=lambda x, p: -x)
    y = pc.SensoryNode("y", dim=1, orders=1)
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("state", prior_precision=1.0, sd=0.1, correlation_time=1.0), x)
    graph.weighs(PrecisionNode("noise", prior_precision=1.0, sd=0.1, correlation_time=1.0), y)
    with pytest.raises(ScheduleError, match="the node name 'state' is also a role"):
        graph.start()


def test_unknown_actions_are_rejected():
    with pytest.raises(SettingError, match="action"):
        pc.act("jump", "state")
