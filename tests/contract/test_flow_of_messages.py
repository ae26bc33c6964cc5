"""What the error flow records: a belief that has moved has received an error, whatever its kind, schedule and clock."""

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.graphs import Cause, Level, adaptive_filter, hierarchy, odem
from support.recorded import stack

EVERY = 5


def spring(x, k):
    """Position and velocity; the parameter is the stiffness."""
    return torch.stack([x[..., 1], -k[..., 0] * x[..., 0]], -1)


def towards(x, theta):
    return theta[..., :1] - 0.1 * x


def fade(x, theta):
    return -0.01 * x


def motion(samples=61):
    generator = torch.Generator().manual_seed(4)
    times = 0.05 * torch.arange(samples).double()
    clean = torch.stack([torch.cos(1.4 * times), -1.4 * torch.sin(1.4 * times)], -1)
    return clean + 0.05 * torch.randn(samples, 2, generator=generator).double()


def bottom(**options):
    return Level(spring, 2, parameter_mean=[1.0], parameter_sd=0.3, process_noise_sd=0.1, learn_noise=True, **options)


def stacked(*above, every=EVERY):
    return hierarchy(bottom(), *above, dt=0.05, observation_noise_sd=0.05, every=every)


def separately():
    """Parameters and noise levels that are learned apart from the state, the former at their own clock."""
    x = pc.KalmanStateNode("x", dim=2, flow=spring, learn_noise=True)
    graph, y = pc.Graph(), pc.SensoryNode("y", dim=2, orders=1, dt=0.05)
    graph.predicts(x, y)
    theta = pc.ParameterNode("theta", mean=[1.0], sd=0.3, estimator=pc.estimators.Newton())
    graph.parametrises(theta, x)
    for name, node, sd in (("noise_x", x, 0.1), ("noise_y", y, 0.05)):
        graph.weighs(pc.PrecisionNode(name, mean=-2 * np.log(sd), sd=1.0, kernel=pc.kernels.White()), node)
    return pc.Model(graph, pc.adaptive_filtering(learn_every=EVERY))


def pushed(x, force, _):
    return torch.cat([x[..., 1:], force - x[..., :1]], -1)


def one_filter(flow, **options):
    given = {"process_noise_sd": 0.1, "observation_noise_sd": 0.05, "hypotheses": None}
    return adaptive_filter(flow, 2, 0.05, **(given | options))


MODELS = {
    "two levels": lambda: stacked(Level(fade, 1, process_noise_sd=0.3, learn_noise=True, initial_mean=[1.0])),
    "three levels": lambda: stacked(
        Level(towards, 1, parameter_mean=[0.1], parameter_sd=0.3, process_noise_sd=0.3, initial_mean=[1.0]),
        Level(fade, 1, process_noise_sd=0.3, initial_mean=[0.1]),
        every=3,
    ),
    "categories": lambda: stacked(pc.CategoricalNode("which", values=[[0.5], [2.0]], stay=0.9)),
    "bank": lambda: adaptive_filter(spring, 2, 0.05, parameter_mean=[1.0], parameter_sd=0.3),
    "one filter": lambda: one_filter(spring, parameter_mean=[1.0], parameter_sd=0.3),
    "hidden cause": lambda: one_filter(pushed, causes={"force": Cause(correlation_time=1.0)}),
    "switching": lambda: one_filter(
        pushed, switching=pc.CategoricalNode("push", values=[[0.0], [1.0]], stay=0.95), initial_mean=[1.0, 0.0]
    ),
    "several peaks": lambda: one_filter(spring, parameter_mean=[1.0], parameter_sd=0.3, peaks=3),
    "apart": separately,
    "causes": lambda: pc.Model(stack(), pc.odem(every=EVERY)),
    "causes, all at once": lambda: pc.Model(stack(), pc.generalised_filtering()),
    "states only": lambda: pc.Model(stack(), pc.states_only()),
    "paper": lambda: odem("glv", every=EVERY),
}


def data_for(name):
    if "causes" in name or name == "states only":
        return {"y": motion(), "u": torch.ones(61, 1).double()}
    return pc.simulate.glv_process(61, noise="white", seed=1).observations if name == "paper" else motion()


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_a_mean_that_has_moved_has_received_an_error(name, engine):
    if engine == "compiled" and name not in ("two levels", "categories"):
        pytest.skip("messages are read in the same way")
    result = MODELS[name]().run(data_for(name), record=pc.Record.flow(), engine=engine)
    links = result.structure.links
    moved = 0
    for node in result.structure.nodes:
        received = [link.channel("error") for link in links if link.parent == node.name]
        if node.kind in ("sensory", "input") or not received:
            continue
        mean = result.mean(node.name).reshape(len(result.times), -1)
        changed = np.flatnonzero(np.abs(np.diff(mean, axis=0)).max(1) > 1e-9) + 1
        size = np.max([np.abs(result.traces[channel].values).max(-1) for channel in received], axis=0)
        assert (size[changed] > 0).all(), node
        moved += len(changed)
        if node.name in result.error_flow().surprised:
            assert (result.error_flow().surprise(node.name)[changed] > 0).all(), node
    assert moved > 60


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_the_error_sent_up_a_stack_is_the_one_that_moved_the_level_above(engine):
    """A Kalman update with the message ξ: m ← m + P ξ (identity mapping), P as it was predicted at the last act."""
    record = pc.Record((*pc.Record.flow().quantities, "covariance"), messages=True)
    # without a noise level of its own that is uncertain, the covariance that is reported is the one that is used
    model = stacked(Level(fade, 1, process_noise_sd=0.3, initial_mean=[1.0]))
    result = model.run(motion(), record=record, engine=engine)
    sent = result.message("theta1", "x2")[:, 0]
    predicted = result.message("x2", "theta1")[:, 0]
    acts = np.arange(EVERY - 1, 61, EVERY)
    quiet = np.setdiff1d(np.arange(1, 61), acts)
    np.testing.assert_array_equal(sent[: EVERY - 1], 0.0)  # nothing was sent yet
    for trace in (sent, result.get("x2", "error")[:, 0, 0], result.get("x2", "weighted_error")[:, 0, 0]):
        np.testing.assert_array_equal(trace[quiet], trace[quiet - 1])  # held until the next act
    covariance = result.covariance("x2")[:, 0, 0]
    for act in acts[1:]:
        correction = covariance[act - 1] * sent[act]
        np.testing.assert_allclose(result.get("x2", "error")[act, 0, 0], correction, rtol=1e-9)
        after = np.exp(-0.01 * 0.05 * EVERY) * (predicted[act - 1] + correction)  # and then the flow
        np.testing.assert_allclose(result.mean("x2")[act, 0, 0], after, rtol=1e-9)


def test_the_surprise_of_a_bank_is_that_of_its_predictive_distribution():
    """Once the hypotheses that are left agree, the surprise is the innovation over its standard deviation."""
    session, expected = MODELS["bank"]().start(record=pc.Record.flow()), {}
    for k, y in enumerate(motion(200)):
        if k >= 150 and k % 10 == 0:
            innovation = session.innovation(y)["y"]
            expected[k] = np.sqrt(np.mean((innovation.error / innovation.sd) ** 2))
        session.step(y)
    found = session.result().error_flow().surprise("y")[list(expected)]
    np.testing.assert_allclose(found, list(expected.values()), rtol=0.02)
