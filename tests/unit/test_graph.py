"""Graphs are checked as they are composed; every error names the node and the remedy."""

import pytest
import torch

import pcnet as pc
from pcnet.errors import GraphError, SettingError
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode


def state(name="x", dim=3, orders=3, **options):
    return GeneralisedStateNode(name, dim=dim, orders=orders, **{"flow": pc.systems.lotka_volterra, **options})


def noise(name, **options):
    return PrecisionNode(name, **{"prior_precision": 10.0, "sd": 0.1, "correlation_time": 0.1, **options})


def whole(x=None, y=None, **options):
    graph = pc.Graph()
    x, y = x or state(), y or SensoryNode("y", dim=3, orders=2, dt=0.1)
    graph.predicts(x, y, **options)
    graph.parametrises(ParameterNode("a", mean=[0.3, -0.2, 0.3], sd=0.25), x)
    graph.weighs(noise("noise_x"), x)
    graph.weighs(noise("noise_y"), y)
    return graph


class Forgetful(SensoryNode):
    """A user's own kind, whose author forgot the decorator."""

    memory: int = 0


def refusal(*words, error=GraphError):
    """Expect an error whose text contains all these words."""
    return pytest.raises(error, match="".join(f"(?=[\\s\\S]*{word})" for word in words))


def test_a_complete_graph_is_accepted_and_prints_a_summary():
    graph = whole()
    graph.check()
    text = str(graph)
    for word in (
        "x",
        "y",
        "a",
        "noise_x",
        "noise_y",
        "GeneralisedStateNode",
        "predicts y",
        "parametrises x",
        "weighs y",
        "lotka_volterra",
    ):
        assert word in text
    assert set(graph.network) == {"x", "y", "a", "noise_x", "noise_y"}
    assert graph.network.number_of_edges() == 4


def test_mapping_to_the_wrong_dimension():
    with refusal("mapping from 'x' to 'y'", "identity", "3 dimensions into 2", "via="):
        whole(y=SensoryNode("y", dim=2, orders=2, dt=0.1)).check()


def test_more_orders_than_the_state_has():
    with refusal("'x'", "3 orders", "4", "'y'"):
        whole(y=SensoryNode("y", dim=3, orders=4, dt=0.1))


def test_missing_precision_of_a_state():
    graph = pc.Graph()
    x, y = state(), SensoryNode("y", dim=3, orders=2, dt=0.1)
    graph.predicts(x, y)
    graph.weighs(noise("noise_y"), y)
    with refusal("GeneralisedStateNode 'x' has no precision", "graph.weighs"):
        graph.check()


def test_missing_precision_of_a_sensory_node():
    graph = pc.Graph()
    x, y = state(), SensoryNode("y", dim=3, orders=2, dt=0.1)
    graph.predicts(x, y)
    graph.weighs(noise("noise_x"), x)
    graph.parametrises(ParameterNode("a", mean=[0.3, -0.2, 0.3], sd=0.25), x)
    with refusal("SensoryNode 'y' has no precision", "graph.weighs"):
        graph.check()


def test_doubled_precision():
    graph = whole()
    with refusal("'x' already has the precision 'noise_x'", "exactly one"):
        graph.weighs(noise("another"), graph["x"])


def test_duplicate_name():
    graph = whole()
    with refusal("two nodes are called 'y'"):
        graph.predicts(graph["x"], SensoryNode("y", dim=3, orders=2, dt=0.1))
    with refusal("two nodes are called 'z'"):
        pc.Graph().predicts(state("z"), SensoryNode("z", dim=3, orders=2, dt=0.1))


def test_duplicate_links():
    graph = whole()
    with refusal("'x' already predicts 'y'"):
        graph.predicts(graph["x"], graph["y"])
    with refusal("'a' already parametrises 'x'"):
        graph.parametrises(graph["a"], graph["x"])


def test_a_cycle_is_rejected():
    """The shipped kinds cannot form one; a custom kind might."""

    class Agreeable(GeneralisedStateNode):
        def check_as_child(self, link):
            pass

    a, b, c = (Agreeable(name, dim=3, orders=3, flow=pc.systems.lotka_volterra) for name in "abc")
    graph = pc.Graph()
    graph.predicts(a, b)
    graph.predicts(b, c)
    with refusal("'c' predicts 'a' would close a cycle"):
        graph.predicts(c, a)
    with refusal("cycle"):
        graph.predicts(a, a)
    assert len(graph.links) == 2


def test_a_state_that_predicts_nothing_is_rejected():
    graph = pc.Graph()
    x, y = state(), SensoryNode("y", dim=3, orders=2, dt=0.1)
    graph.weighs(noise("noise_y"), y)
    graph.weighs(noise("noise_x"), x)
    graph.parametrises(ParameterNode("a", mean=[0.3, -0.2, 0.3], sd=0.25), x)
    with refusal("SensoryNode 'y' is predicted by nothing", "graph.predicts"):
        graph.check()
    alone = pc.Graph()
    alone.weighs(noise("noise_x"), x)
    alone.parametrises(ParameterNode("a", mean=[0.3, -0.2, 0.3], sd=0.25), x)
    with refusal("GeneralisedStateNode 'x' predicts nothing", "graph.predicts"):
        alone.check()


def test_an_empty_graph():
    with refusal("empty"):
        pc.Graph().check()


@pytest.mark.parametrize(
    ("flow", "words"),
    [
        (lambda x, p: x[..., :2], [r"flow of GeneralisedStateNode 'x'", r"\(4, 3\)", r"returned \(4, 2\)"]),
        (lambda x, p: x.sum(), [r"flow of GeneralisedStateNode 'x'", r"returned \(\)"]),
        (lambda x, p: "x", [r"flow of GeneralisedStateNode 'x'", "returned str"]),
        (lambda x: x, [r"flow of GeneralisedStateNode 'x' failed", "TypeError"]),
        (lambda x, p: x + x.mean(0), [r"flow of GeneralisedStateNode 'x'", "mixes batch elements"]),
        (lambda x, p: x[0] * x, [r"flow of GeneralisedStateNode 'x'", "mixes batch elements"]),
        (
            lambda x, p: x * p[..., :9].sum(-1, keepdim=True),
            [r"takes \[\.\.\., :9\] of a value of size", "give as many"],
        ),
        (lambda x, p: x[:, -4:], [r"takes \[\.\.\., -4:\] of a value of size 3"]),
    ],
)
def test_a_flow_that_returns_the_wrong_shape_or_type_is_rejected(flow, words):
    with refusal(*words):
        whole(x=state(flow=flow)).check()


def test_a_flow_that_is_not_a_function_is_rejected():
    with refusal("function of", "3", error=SettingError):
        state(flow=3)


def test_wrong_number_of_parameters():
    graph = pc.Graph()
    x, y = state(), SensoryNode("y", dim=3, orders=2, dt=0.1)
    graph.predicts(x, y)
    graph.weighs(noise("noise_x"), x)
    graph.weighs(noise("noise_y"), y)
    with refusal("flow of GeneralisedStateNode 'x' takes 3 parameters and is given 0"):
        graph.check()


def test_invalid_links_are_rejected():
    graph = whole()
    with refusal("ParameterNode 'b' cannot be the parent in 'b' predicts 'y'", "predicts"):
        graph.predicts(ParameterNode("b", mean=0.0, sd=1.0), graph["y"])
    with refusal("'y'", "parametrises"):
        graph.parametrises(graph["a"], graph["y"])
    with refusal("SensoryNode 'z' cannot"):
        graph.predicts(SensoryNode("z", dim=3, orders=1, dt=0.1), SensoryNode("w", dim=3, orders=1, dt=0.1))
    with refusal("not a node"):
        graph.predicts("x", graph["y"])
    with refusal("'y' is not a node"):
        graph.parametrises(graph["a"], graph["x"], of="y")
    with refusal("GeneralisedStateNode 'x' cannot be the child in 'y' predicts 'x'"):
        graph.predicts(graph["y"], graph["x"])
    with refusal("ParameterNode 'b' cannot be the child in 'n' weighs 'b'"):
        graph.weighs(noise("n"), ParameterNode("b", mean=0.0, sd=1.0))
    with refusal("'x' does not predict 'z'", "graph.predicts"):
        graph.parametrises(graph["a"], graph["x"], of=SensoryNode("z", dim=3, orders=1, dt=0.1))


def test_channels_of_a_precision():
    graph = pc.Graph()
    x, y = state(), SensoryNode("y", dim=3, orders=2, dt=0.1)
    graph.predicts(x, y)
    with refusal("'n' is given 5 channels", "'y' has 3", r"\[:, None\]"):
        graph.weighs(noise("n", prior_precision=torch.full((5,), 10.0)), y)
    graph.weighs(noise("m", prior_precision=[1.0, 2.0, 3.0]), y)


def test_incompatible_batch_shapes_are_rejected():
    graph = whole(x=state(initial_mean=torch.zeros(4, 3, 3)), y=SensoryNode("y", dim=3, orders=2, dt=[0.1, 0.2]))
    with refusal("batch dimensions", "'x': \\(4,\\)", "'y': \\(2,\\)"):
        graph.check()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: state(flwo=1), ["GeneralisedStateNode 'x'", "unknown setting 'flwo'", "did you mean 'flow'"]),
        (
            lambda: GeneralisedStateNode("x", dim=3, flow=pc.systems.lorenz),
            ["GeneralisedStateNode 'x'", "'orders' is required"],
        ),
        (lambda: state(dim=0), ["'dim'", "greater than or equal to 1"]),
        (lambda: state(dim="three"), ["'dim'", "integer"]),
        (lambda: state(initial_mean=torch.zeros(2, 3)), ["initial_mean", r"\(2, 3\)", r"\(3, 3\)"]),
        (lambda: state(initial_mean=[[float("nan")] * 3] * 3), ["initial_mean", "finite"]),
        (lambda: state(curvature="hessian"), ["curvature", "gauss-newton"]),
        (lambda: state(orders=1, last_error="drop"), ["last_error", "orders=2"]),
        (lambda: noise("n", prior_precision=-1.0), ["PrecisionNode 'n'", "'prior_precision", "positive"]),
        (lambda: noise("n", sd=0.0), ["'sd'", "positive"]),
        (lambda: noise("n", mean=1.0), ["either prior_precision", "or mean"]),
        (lambda: noise("n", correlation_time=None), ["either correlation_time", "kernel"]),
        (lambda: SensoryNode("y", dim=3, orders=2), ["SensoryNode 'y'", "give dt"]),
        (lambda: state(flow=None), ["GeneralisedStateNode 'x'", "give a flow"]),
        (lambda: state(name="a/b"), ["printable", "a/b"]),
        (lambda: noise("n", prior_precision=[1.0, 2.0], sd=[1.0, 2.0, 3.0]), ["'n'", "do not fit"]),
        (lambda: ParameterNode("a", mean=[[1.0]] * 4, sd=[[1.0]] * 5), ["'a'", "do not fit"]),
        (lambda: Forgetful("f", dim=1, orders=1, memory=3), ["decorate Forgetful"]),
        (lambda: pc.act("mvoe", "state"), ["^Act: setting 'action'"]),
        (lambda: SensoryNode("y", dim=3, orders=2, dt=0.0), ["SensoryNode 'y'", "'dt'", "positive"]),
        (lambda: SensoryNode("y", dim=3, orders=2, dt="fast"), ["'dt'", "number"]),
        (
            lambda: ParameterNode("a", mean=[1.0, 2.0], sd=[1.0, 2.0, 3.0]),
            ["'a'", "sd must be one number or end in 2, not in 3"],
        ),
        (lambda: ParameterNode("a", mean=[[1.0], [1.0, 2.0]], sd=1.0), ["'mean'", "rectangular"]),
    ],
)
def test_settings_are_validated(make, words):
    with refusal(*words, error=SettingError):
        make()


def test_settings_copy_their_arrays():
    given = torch.tensor([1.0, 2.0], dtype=torch.float64)
    node = ParameterNode("a", mean=given, sd=0.1)
    given.fill_(9.0)
    assert node.mean.tolist() == [1.0, 2.0]


def test_names():
    with refusal("printable", error=SettingError):
        state(name="")
