"""Networks whose weights are parameters, against autograd of the same network written by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import pcnet as pc
from pcnet.errors import GraphError, SettingError
from pcnet.functions.network import Network
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode
from support.derivatives import agree

F64, F32 = torch.float64, torch.float32


def perceptron(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))


def by_hand(x: Tensor, theta: Tensor) -> Tensor:
    """The same of one state: weights row by row, then biases, layer by layer."""
    first, bias, second, last = theta.split([10, 5, 15, 3])
    return second.view(3, 5) @ torch.tanh(first.view(5, 2) @ x + bias) + last


def inputs(parameters: int, dtype: torch.dtype = F64, batch: int = 3, rows: int = 1, seed: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = (batch, 3, 2), (batch, parameters), (batch, rows, 3)
    return [torch.randn(size, generator=random, dtype=F64).to(dtype) for size in sizes]


@pytest.mark.parametrize(("batch", "rows", "dtype"), [(3, 2, F64), (1, 1, F32)])
def test_all_derivatives_agree_with_autograd(batch, rows, dtype):
    """Every batch element has its own weights; a trace holds for other values."""
    network = Network(perceptron())
    assert network.parameters == 33
    for seed in range(3):
        agree(network, by_hand, *inputs(33, dtype, batch, rows, seed))


def test_a_known_part_is_added_and_its_parameters_come_first():
    def known(x, theta):
        return torch.stack([theta[..., 0] * x[..., 1], x[..., 0] * x[..., 1], theta[..., 1] ** 2 * x[..., 0]], -1)

    network = Network(perceptron(), known=pc.TracedFunction(known, parameters=2))
    assert network.parameters == 35
    assert len(network.initial) == 33
    agree(network, lambda x, theta: known(x, theta[:2]) + by_hand(x, theta[2:]), *inputs(35))


class Tied(nn.Module):
    """A module of one's own, that uses its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.again = self.layer
        self.gain = nn.Parameter(torch.tensor([0.5, 1.5, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.cat([self.again(torch.sin(self.layer(x))), x[..., :1] ** 2], -1)


def test_a_custom_module_with_tied_weights():
    def tied_by_hand(x: Tensor, theta: Tensor) -> Tensor:
        gain, matrix = theta[:3], theta[3:].view(2, 2)
        return gain * torch.cat([matrix @ torch.sin(matrix @ x), x[:1] ** 2])

    network = Network(Tied())
    assert network.parameters == 7
    agree(network, tied_by_hand, *inputs(7))


def test_frozen_weights_are_not_parameters():
    module = perceptron()
    module[0].requires_grad_(False)
    network = Network(module)
    assert network.parameters == 18
    fixed = parameters_to_vector(module[0].parameters()).to(F64)
    x, theta, _ = inputs(18)
    expected = torch.stack([by_hand(a, torch.cat([fixed, b])) for a, b in zip(x[:, 0], theta, strict=True)])
    torch.testing.assert_close(network(x[:, 0], theta), expected)
    assert [weight.requires_grad for weight in network.module_with(theta[0]).parameters()] == [False] * 2 + [True] * 2


def test_from_a_module_and_back():
    module = perceptron()
    network = Network(module)
    vector = parameters_to_vector(module.parameters()).detach()
    torch.testing.assert_close(network.initial, vector.to(F64), rtol=0, atol=0)
    assert network.initial.dtype == F64
    x, theta, _ = inputs(33)
    made = network.module_with(theta[1].to(F32))
    expected = by_hand(x[1, 0].to(F32), theta[1].to(F32))
    torch.testing.assert_close(made(x[1, 0].to(F32)), expected)
    torch.testing.assert_close(network.weights_of(made), theta[1].to(F32).to(F64), rtol=0, atol=0)
    torch.testing.assert_close(module(x[1, 0].to(F32)), by_hand(x[1, 0].to(F32), vector))  # left as it was


def test_training_the_module_elsewhere_has_no_effect():
    module = perceptron()
    network = Network(module)
    before = network.initial.clone()
    with torch.no_grad():
        module[0].weight.zero_()
    assert torch.equal(network.initial, before)
    assert torch.equal(network.weights_of(network.module), before)


@pytest.mark.parametrize("leading", [(), (4,), (2, 3)])
def test_a_plain_call_takes_any_leading_dimensions(leading):
    random = torch.Generator().manual_seed(1)
    x, theta = (torch.randn(*leading, n, generator=random, dtype=F64) for n in (2, 33))
    value = Network(perceptron())(x, theta)
    assert value.shape == (*leading, 3)
    expected = [by_hand(a, b) for a, b in zip(x.reshape(-1, 2), theta.reshape(-1, 33), strict=True)]
    torch.testing.assert_close(value.reshape(-1, 3), torch.stack(expected))


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + self.offset


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), r"1 \(BatchNorm1d\) has buffers"),
        (WithBuffer, "WithBuffer.*has buffers"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "at random; call module.eval"),
        (nn.Tanh, "Tanh has no weights to learn"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no weights to learn"),
        (lambda: torch.tanh, "give a torch.nn.Module"),
    ],
)
def test_invalid_modules_are_rejected(make, message):
    with pytest.raises(SettingError, match=message):
        Network(make())


def test_inactive_dropout_is_accepted():
    module = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)).eval()
    x, theta = torch.ones(1, 2, dtype=F64), torch.ones(1, 9, dtype=F64)
    assert Network(module)(x, theta).tolist() == [[3.0] * 3]


def test_vectors_of_the_wrong_length_are_rejected():
    network = Network(perceptron())
    with pytest.raises(GraphError, match="takes 33 parameters, not 32"):
        network(torch.ones(2), torch.ones(32))
    with pytest.raises(SettingError, match=r"weights of a module have shape \(33,\), not \(2, 33\)"):
        network.module_with(torch.ones(2, 33))


def graph_of(module: nn.Module, weights: int) -> pc.Graph:
    x, y = GeneralisedStateNode("x", dim=2, orders=2, flow=Network(module)), SensoryNode("y", dim=2, orders=1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.parametrises(ParameterNode("w", mean=torch.zeros(weights), sd=1.0), x)
    graph.weighs(PrecisionNode("noise_x", prior_precision=1.0, sd=0.1, correlation_time=0.5), x)
    graph.weighs(PrecisionNode("noise_y", prior_precision=1.0, sd=0.1, correlation_time=0.5), y)
    return graph


@pytest.mark.parametrize(
    ("module", "weights", "message"),
    [
        (nn.Linear(3, 2), 8, r"flow of GeneralisedStateNode 'x' failed when called with a state of shape \(3, 2\)"),
        (nn.Linear(2, 3), 9, r"must turn a batch of states \(3, 2\) into \(3, 2\), but it returned \(3, 3\)"),
        (nn.Linear(2, 2), 5, "takes 6 parameters and is given 5"),
    ],
)
def test_incompatible_sizes_are_rejected(module, weights, message):
    with pytest.raises(GraphError, match=message):
        graph_of(module, weights).start(pc.odem())


def test_a_graph_names_its_network():
    assert "Network(Linear, Tanh, Linear; 33 weights)" in repr(Network(perceptron()))
    assert repr(Network(perceptron(), known=pc.systems.lorenz)).startswith("lorenz + Network")
