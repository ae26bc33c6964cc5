"""Many channels: memory is linear in their number, and results do not depend on how matrices are stored."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import pcnet as pc
from pcnet.nodes import GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.dispatch import DispatchMode


class Largest(DispatchMode):
    """Remembers the most numbers that any operation gave back."""

    numbers = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.element_size() for leaf in tree_leaves(result) if is_real(leaf)
        ]
        self.numbers = max([self.numbers, *sizes])
        return result


def is_real(leaf) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_meta


def weights(channels: int) -> Tensor:
    return torch.randn(channels, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Decoder(torch.nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(*w.T.shape, dtype=torch.float64)
        self.layer.weight.data, self.layer.bias.data = w.clone(), 0.1 * w[:, 0]

    def forward(self, x, theta):
        return torch.sigmoid(self.layer(x))


MAPPINGS = {
    "linear": pc.systems.linear,
    "function": lambda w: lambda x, theta: torch.tanh(x @ w.T.to(x)),
    "module": Decoder,
}


def build(mapping, channels: int, precisions: str = "each", curvature: str = "gauss-newton") -> pc.Graph:
    x = GeneralisedStateNode("x", dim=3, orders=3, flow=pc.systems.lotka_volterra, curvature=curvature)
    y = SensoryNode("y", dim=channels, orders=2, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y, via=mapping)
    graph.parametrises(ParameterNode("a", mean=[0.3, -0.2, 0.3], sd=0.25), x)
    graph.weighs(PrecisionNode("noise_x", prior_precision=4.0, sd=0.1, correlation_time=0.5), x)
    noise = PrecisionNode(
        "noise_y", prior_precision=2.0, sd=0.1, correlation_time=0.5, channels=precisions, curvature=curvature
    )
    graph.weighs(noise, y)
    return graph


def observations(channels: int, samples: int = 6) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return 0.5 + 0.1 * torch.randn(samples, channels, generator=draw, dtype=torch.float64)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", MAPPINGS)
def test_memory_is_linear_in_the_channels(kind):
    """At most rows · states numbers per channel, and never one per pair of channels."""
    channels = 3000
    session = build(MAPPINGS[kind](weights(channels)), channels).start(
        pc.odem(every=2), record=("mean", "sd", "energy")
    )
    seen = observations(channels)
    session.step(seen[0])
    with Largest() as largest:
        for y in seen[1:]:
            session.step(y)
    assert channels < largest.numbers <= 2 * 3 * 2 * channels


@pytest.mark.parametrize("curvature", ["gauss-newton", "exact"])
@pytest.mark.parametrize("precisions", ["each", "full"])
@pytest.mark.parametrize("kind", MAPPINGS)
def test_lazy_and_dense_matrices_give_the_same_run(kind, precisions, curvature, monkeypatch):
    """The same run with every slope and precision formed densely."""
    mapping, seen = MAPPINGS[kind](weights(24)), observations(24)
    wanted = ("mean", "covariance", "energy", "prediction")
    large = build(mapping, 24, precisions, curvature).run(seen, schedule=pc.odem(every=2), record=wanted)
    for module in ("functions.linearisation", "numerics.precision"):
        monkeypatch.setattr(f"pcnet.{module}.SMALL", 10**6)
    small = build(mapping, 24, precisions, curvature).run(seen, schedule=pc.odem(every=2), record=wanted)
    for key, trace in small.traces.items():
        np.testing.assert_allclose(large.traces[key].values, trace.values, rtol=1e-8, atol=1e-8, err_msg=key)
