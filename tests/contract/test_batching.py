"""Models of the same form run in one batch exactly as alone; digests identify models, also across processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pcnet as pc
from pcnet.functions import systems as flows
from pcnet.functions.base import Function
from pcnet.functions.closed_form import Quadratic
from pcnet.graphs import odem
from pcnet.model.digest import digest
from pcnet.model.model import Model
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Exponential, RobbinsMonro, WindowMean
from pcnet.numerics.integrators import ExplicitEuler, LocalLinearisation
from pcnet.numerics.kernels import SquaredExponential
from pcnet.sweeps.batching import batch_key, stack_models
from support.models import WAVY, bent
from support.waiting import PATIENCE

SEEN = torch.randn(7, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def decay(x, parameters):
    return -0.5 * x + parameters.sum(-1, keepdim=True)


def growth(x, parameters):
    return 0.1 * x - parameters.sum(-1, keepdim=True)


def model(
    *,
    flow=WAVY,
    dim=2,
    orders=2,
    dt=0.2,
    kappa=0.5,
    time=0.1,
    mean_x=3.0,
    sd_x=0.5,
    expected_y=5.0,
    sd_y=0.5,
    smoothness=0.7,
    width=0.9,
    rate=0.01,
    beta=0.3,
    theta=(0.4, -0.2),
    sd_theta=0.7,
    phi=0.3,
    initial=None,
    every=3,
    period=2,
    curvature="gauss-newton",
    last_error="keep",
    channels="each",
    accumulate=None,
    integrator=None,
    backwards=True,
):
    """A graph with settings of every kind: of nodes, integrators, kernels and clocks, scalar and by channel."""
    slow = RobbinsMonro(rate, 1.0, 0.5, accumulate or Exponential(beta))
    x = GeneralisedStateNode(
        "x",
        dim=dim,
        orders=orders,
        flow=flow,
        initial_mean=initial,
        integrator=integrator or LocalLinearisation(kappa, step_size=time),
        curvature=curvature,
        last_error=last_error,
    )
    y = SensoryNode("y", dim=2, orders=orders - 1 or 1, dt=dt)
    a = ParameterNode("a", mean=theta, sd=sd_theta, estimator=slow, curvature=curvature)
    b = ParameterNode("b", mean=[0.1], sd=0.2, estimator=slow)
    c = ParameterNode("c", mean=phi, sd=0.4, estimator=slow)
    graph = pc.Graph()
    noise_y = PrecisionNode(
        "noise_y", prior_precision=expected_y, sd=sd_y, kernel=SquaredExponential(width), channels=channels
    )
    graph.weighs(noise_y, y)  # precisions before what they weigh, parameters in no order
    graph.predicts(x, y, via=bent(2))
    graph.parametrises(c, x, of=y)
    for each in (b, a) if backwards else (a, b):
        graph.parametrises(each, x)
    graph.weighs(PrecisionNode("noise_x", mean=mean_x, sd=sd_x, correlation_time=smoothness, estimator=slow), x)
    return Model(graph, pc.odem(every=every, periods={"noise_y": period}))


def agree(models, seen=SEEN):
    """Beliefs, predictions and free energies of the batch against those of a loop."""
    assert len({batch_key(each) for each in models}) == 1
    made = stack_models(models)
    batch = made.graph.run(seen.expand(len(models), *seen.shape), schedule=made.schedule)
    assert batch.batch_shape == (len(models),)
    for i, (graph, schedule) in enumerate(models):
        alone = graph.run(seen, schedule=schedule)
        assert alone.traces.keys() == batch.traces.keys()
        for key, trace in alone.traces.items():
            np.testing.assert_allclose(batch.traces[key].values[i], trace.values, rtol=1e-9, atol=1e-12, err_msg=key)
        np.testing.assert_allclose(batch.free_action[i], alone.free_action, rtol=1e-9, atol=1e-9)  # a sum that cancels
    return batch


positive = st.floats(0.1, 2.0)
by_channel = st.tuples(positive, positive)
NUMBERS = {
    "dt": positive,
    "kappa": positive,
    "time": st.floats(0.01, 0.3),
    "mean_x": st.floats(-1.0, 4.0),
    "sd_x": positive,
    "expected_y": positive,
    "sd_y": positive,
    "smoothness": st.floats(0.5, 2.0),
    "width": st.floats(0.5, 2.0),
    "rate": st.floats(1e-3, 0.02),
    "beta": st.floats(0.0, 0.9),
    "theta": st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    "sd_theta": positive,
    "phi": st.floats(-1, 1),
    "every": st.integers(1, 5),
    "period": st.integers(1, 5),
}
CHANNELS = dict.fromkeys(("mean_x", "sd_x", "expected_y", "sd_y", "sd_theta"), by_channel)


@settings(max_examples=10)
@given(
    varied=st.sets(st.sampled_from(sorted(NUMBERS)), min_size=1),
    channels=st.sets(st.sampled_from(sorted(CHANNELS))),
    initial=st.booleans(),
    data=st.data(),
)
def test_a_batch_equals_a_loop_over_its_models(varied, channels, initial, data):
    """Any settings vary, each a scalar or one value per channel; the rest are constant."""
    kinds = NUMBERS | {name: CHANNELS[name] for name in channels}
    if initial:
        kinds["initial"] = st.lists(st.lists(st.floats(-1, 1), min_size=2, max_size=2), min_size=2, max_size=2)
        varied = varied | {"initial"}
    fixed = {name: data.draw(kinds[name]) for name in sorted(channels - varied)}
    chosen = [{name: data.draw(kinds[name]) for name in sorted(varied)} for _ in range(3)]
    agree([model(**fixed, **each) for each in chosen])


@pytest.mark.parametrize(
    "options",
    [
        {"channels": "shared"},
        {"accumulate": WindowMean()},
        {"orders": 1, "dt": None},
        {"flow": decay},
        {"backwards": False},
    ],
)
def test_a_batch_equals_a_loop_under_every_option(options):
    agree([model(kappa=k, theta=[k, -0.2], every=n, **options) for k, n in ((0.5, 2), (0.3, 3), (0.7, 5))])


def test_integrators_and_estimators_are_batched():
    agree([model(integrator=ExplicitEuler(step_size=t, kappa=0.1)) for t in (0.01, 0.02)])
    agree([model(integrator=LocalLinearisation(log_step_size=nu)) for nu in (-4.0, -3.0)])
    kinds = [
        model(integrator=ExplicitEuler(step_size=0.1)),
        model(integrator=LocalLinearisation(step_size=0.1)),
        model(integrator=LocalLinearisation()),
    ]
    assert len({batch_key(each) for each in kinds}) == 3


def test_axes_are_not_confused_when_their_sizes_agree():
    """As many models as channels, parameters and orders: a wrong axis would not raise."""
    agree([model(sd_theta=s, sd_x=s, expected_y=e, mean_x=(1.0, e)) for s, e in ((0.5, 2.0), (0.7, 1.0))])


def test_identical_models_in_a_batch():
    batch = agree([model(), model()])
    assert batch.free_action[0] == batch.free_action[1]


def test_a_batch_of_one_model():
    agree([model(kappa=0.3)])


def test_batches_of_the_paper_s_models():
    """Three orders; under the authors' conventions with exact curvatures and shared precisions."""
    seen = torch.linspace(0.5, 2.0, 30, dtype=torch.float64).reshape(10, 3)
    for conventions in ("paper", "authors"):
        options = [{"kappa": k, "every": n, "theta_mean": [0.3, -0.2, n / 10]} for k, n in ((1.0, 2), (0.5, 3))]
        agree([odem(conventions=conventions, **each) for each in options], seen)


def test_only_models_with_the_same_functions_share_a_batch():
    assert batch_key(model(flow=decay)) == batch_key(model(flow=decay))
    assert batch_key(model(flow=decay)) != batch_key(model(flow=growth))
    assert batch_key(model(flow=lambda x, p: -x)) != batch_key(model(flow=lambda x, p: -2 * x))
    assert batch_key(model(flow=pc.TracedFunction(decay))) == batch_key(model(flow=pc.TracedFunction(decay)))
    assert batch_key(model(flow=pc.TracedFunction(decay, jacobian=growth))) != batch_key(model(flow=decay))
    assert batch_key(odem()) == batch_key(odem())
    assert batch_key(odem("glv")) != batch_key(odem("lorenz"))


def linear(matrix):
    graph = pc.Graph()
    x = GeneralisedStateNode("x", dim=2, orders=2, flow=flows.linear(torch.tensor(matrix)))
    y = SensoryNode("y", dim=2, orders=1)
    graph.predicts(x, y)
    graph.weighs(PrecisionNode("nx", prior_precision=3.0, sd=0.5, correlation_time=0.7), x)
    graph.weighs(PrecisionNode("ny", prior_precision=3.0, sd=0.5, correlation_time=0.7), y)
    return Model(graph, pc.states_only())


def test_constants_of_a_flow_are_part_of_the_form():
    """A batch has one flow, so models with different constants in it cannot share one."""
    a, b = [[-1.0, 0.5], [0.0, -1.0]], [[-1.0, 0.6], [0.0, -1.0]]
    assert batch_key(linear(a)) == batch_key(linear(a))
    assert batch_key(linear(a)) != batch_key(linear(b))
    assert digest(linear(a)) == digest(linear(a))
    assert digest(linear(a)) != digest(linear(b))


FORMS = [
    {"orders": 3},
    {"dim": 3},
    {"curvature": "exact"},
    {"last_error": "drop"},
    {"channels": "shared"},
    {"accumulate": WindowMean()},
    {"flow": decay},
    {"initial": [[0.0, 0.0], [0.0, 0.0]]},
    {"backwards": False},
    {"time": "curvature"},
    {"theta": [0.4, -0.2, 0.0]},
]


@pytest.mark.parametrize("options", FORMS)
def test_non_numeric_settings_are_part_of_the_form(options):
    assert batch_key(model(**options)) == batch_key(model(**options))
    assert batch_key(model(**options)) != batch_key(model())
    assert digest(model(**options)) != digest(model())


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_numeric_settings_change_the_digest_but_not_the_form(name):
    usual = model.__kwdefaults__[name]
    other = (
        (0.4, -0.2000000001) if name == "theta" else usual + 1 if name in ("every", "period") else usual * (1 + 1e-15)
    )
    assert digest(model(**{name: usual})) == digest(model())
    assert digest(model(**{name: other})) != digest(model())
    assert batch_key(model(**{name: other})) == batch_key(model())


def test_an_initial_mean_changes_the_digest():
    assert digest(model(initial=[[0.0, 0.0], [0.0, 1.0]])) != digest(model(initial=[[0.0, 0.0], [0.0, 2.0]]))


class Net(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x, parameters):
        return -self.weight * x


class Own(Function):
    """A function that is defined by a user and has no registered name."""

    __call__ = linearise = contracted_hessian = parameter_slope = parameter_contracted_hessian = lambda self, *_: None


def shifted(by):
    return lambda x, p: x - by


def test_editing_a_function_changes_the_digest():
    """Otherwise a study resumed after its flow was edited would mix results of two models."""
    slow, quick = (eval(f"lambda x, p: -{rate} * x") for rate in (1, 2))  # as if the file had been edited
    assert digest(model(flow=slow)) != digest(model(flow=quick))
    assert digest(model(flow=slow)) == digest(model(flow=eval("lambda x, p: -1 * x")))
    assert digest(model(flow=eval("lambda x, p: x + 1"))) != digest(model(flow=eval("lambda x, p: x - 1")))
    assert digest(model(flow=shifted(1.0))) != digest(model(flow=shifted(2.0)))
    assert digest(model(flow=shifted(1.0))) == digest(model(flow=shifted(1.0)))
    assert digest(model(flow=Net(1.0))) != digest(model(flow=Net(2.0)))
    assert digest(model(flow=Net(1.0))) == digest(model(flow=Net(1.0)))
    assert digest(model(flow=Own())) == digest(model(flow=Own()))


def everything():
    """Models with functions of all kinds, for digests in another process."""
    own = [decay, shifted(1.0), Net(1.0), Own(), flows.van_der_pol, Quadratic(torch.ones(2, 3, 3, 4))]
    return {repr(type(flow)) + str(i): digest(model(flow=flow)) for i, flow in enumerate(own)} | {
        "paper": digest(odem("lorenz", conventions="authors"))
    }


def test_digests_are_the_same_in_another_process():
    code = "import json, sys; sys.path.insert(0, '..'); import test_batching as t; print(json.dumps(t.everything()))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == everything()
