"""Small graphs that tests share, and independent oracles for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import jvp

import pcnet as pc
from pcnet.functions.traced import as_function
from pcnet.nodes import CauseNode, GeneralisedStateNode, ParameterNode, PrecisionNode, SensoryNode
from pcnet.numerics.estimators import Exponential, RobbinsMonro
from pcnet.numerics.generalised import temporal_precision
from pcnet.numerics.integrators import LocalLinearisation
from pcnet.numerics.kernels import SquaredExponential


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def wavy(x: Tensor, parameters: Tensor) -> Tensor:
    """A flow that is nonlinear in state and parameters, so that no derivative vanishes."""
    return torch.sin(x.roll(1, -1) * parameters.sum(-1, keepdim=True)) - 0.3 * x**3


@functools.cache
def bent(out: int) -> pc.TracedFunction:
    """A mapping to `out` channels that is nonlinear in state and parameters."""

    def mapping(x: Tensor, parameters: Tensor) -> Tensor:
        channels = torch.arange(1, out + 1, dtype=x.dtype)
        return torch.tanh(x.sum(-1, keepdim=True) * channels / out) * (1 + (parameters**2).sum(-1, keepdim=True))

    return pc.TracedFunction(mapping)


WAVY = pc.TracedFunction(wavy)  # shared, so that it is traced once for each shape in a test session


def generalise(function, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
    """f̃(x̃, θ) = (f(x), J x', …) of one state (orders, dim), straight from the definition."""
    values = [function(x[0][None], parameters[None])[0]]
    for i in range(1, rows):
        values.append(jvp(lambda v: function(v[None], parameters[None])[0], (x[0],), (x[i],))[1])
    return torch.stack(values)


def channel_precision(believed: Tensor, dim: int) -> Tensor:
    """Π (dim, dim) of a log-precision, of one for each channel, or of these followed by couplings."""
    factor = torch.eye(dim, dtype=torch.float64)
    if len(believed) > dim:
        place = iter(range(dim, len(believed)))
        rows = [torch.stack([believed[next(place)] if j < i else factor[i, j] for j in range(dim)]) for i in range(dim)]
        factor = torch.stack(rows)
    root = factor.T @ torch.diag((0.5 * believed[:dim].expand(dim)).exp())
    return root @ root.T


def gaussian_energy(error: Tensor, believed: Tensor, width: float) -> Tensor:
    """½ε̃ᵀΠ̃ε̃ − ½log|Π̃| with Π̃ formed densely; error (rows, dim)."""
    rows, dim = error.shape
    smooth = temporal_precision(SquaredExponential(width), rows)
    dense = torch.einsum("ij,kl->ikjl", smooth, channel_precision(believed, dim)).reshape(rows * dim, rows * dim)
    flat = error.reshape(-1)
    return 0.5 * flat @ dense @ flat - 0.5 * torch.linalg.slogdet(dense)[1]


@dataclass
class Model:
    """A graph, what it was built from, and some observations for it."""

    graph: pc.Graph
    observations: dict[str, Tensor]
    mappings: dict[tuple[str, str], object] = field(default_factory=dict)
    widths: dict[str, float] = field(default_factory=dict)

    def energy(self, means: dict[str, Tensor], observed: dict[str, Tensor]) -> Tensor:
        """The total energy −log p(ψ, ỹ), up to a constant, of one batch element, as one plain function of all means."""
        total = torch.zeros((), dtype=torch.float64)
        predictions: dict[str, Tensor] = {}
        nodes = self.graph.nodes

        def parameters(child, of) -> Tensor:
            links = [k for k in self.graph.links if k.key == "parametrises" and k.child is child and k.of is of]
            return torch.cat([means[k.parent.name] for k in links]) if links else torch.zeros(0, dtype=torch.float64)

        def weigh(name: str, error: Tensor) -> Tensor:
            (link,) = [k for k in self.graph.links if k.key == "weighs" and k.child.name == name]
            return gaussian_energy(error, means[link.parent.name], self.widths[link.parent.name])

        def argument(node, function) -> Tensor:
            """The state, and beside it the causes of a function that takes them."""
            x = means[node.name]
            parts = [x]
            for k in self.graph.links:
                if k.key == "drives" and k.child is node and function.takes_causes:
                    v = means[k.parent.name]
                    parts.append(torch.cat([v, v.new_zeros(len(x) - len(v), v.shape[1])]))
            return torch.cat(parts, 1)

        for link in self.graph.links:
            if link.key == "predicts":
                rows = link.child.error_shape.rows
                mapping = self.mappings[link.parent.name, link.child.name]
                if mapping:
                    x = argument(link.parent, mapping)
                    value = generalise(mapping, x, parameters(link.parent, link.child), rows)
                else:
                    value = means[link.parent.name][:rows]
                predictions[link.child.name] = predictions.get(link.child.name, 0) + value
        for name, node in nodes.items():
            if isinstance(node, GeneralisedStateNode):
                x, rows = means[name], node.rows
                moved = torch.cat([x[1:], torch.zeros_like(x[:1])])[:rows]
                flow = generalise(node.flow, argument(node, node.flow), parameters(node, None), rows)
                total = total + weigh(name, moved - flow)
            elif isinstance(node, CauseNode):
                v = means[name]
                constant = torch.cat([node.prior.expand(1, node.dim), torch.zeros(node.orders - 1, node.dim).double()])
                total = total + weigh(name, v - predictions.get(name, constant))
            elif isinstance(node, SensoryNode):
                total = total + weigh(name, observed[name] - predictions[name])
            elif isinstance(node, ParameterNode):
                expected = predictions[name][0] if name in predictions else node.mean
                total = total + (0.5 * ((means[name] - expected) / node.sd) ** 2).sum()
            elif isinstance(node, PrecisionNode):
                (link,) = self.graph.below(node)
                dim = 1 if node.channels == "shared" else link.child.error_shape.dim
                log_precision, couplings = means[name][:dim], means[name][dim:]
                eta = node.prior_mean.expand(dim)
                units = [((eta[j] - eta[i]) / 2).exp() for i in range(dim) for j in range(i)]
                total = total + (0.5 * ((log_precision - eta) / node.sd) ** 2).sum()
                for coupling, unit in zip(couplings, units, strict=node.channels == "full"):
                    total = total + 0.5 * (coupling / (node.coupling_sd * unit)) ** 2
        return total


def build(
    *,
    dims: tuple[int, ...] = (3,),
    orders: tuple[int, ...] = (3,),
    channels: tuple[int, ...] = (2,),
    parameters: tuple[int, ...] = (2,),
    mapping_parameters: int = 0,
    precisions: str = "each",
    last_error: str = "keep",
    curvature: str = "gauss-newton",
    fused: bool = False,
    samples: int = 12,
    seed: int = 0,
) -> Model:
    """A graph of as many states as `dims`, each with its own sensory node and precisions; all functions nonlinear.

    fused: the first state also predicts the second one's sensory node.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    graph, model = pc.Graph(), Model(pc.Graph(), {})
    graph = model.graph
    slow = RobbinsMonro(0.01, 1.0, 0.5, Exponential(0.3))
    states, sensors = [], []
    for i, (dim, k, out) in enumerate(zip(dims, orders, channels, strict=True)):
        x = GeneralisedStateNode(
            f"x{i}",
            dim=dim,
            orders=k,
            flow=WAVY,
            initial_mean=0.5 * draw(k, dim),
            integrator=LocalLinearisation(0.5, step_size=0.1),
            curvature=curvature,
            last_error=last_error,
        )
        y = SensoryNode(f"y{i}", dim=out, orders=k - 1, dt=0.2)
        mapping = bent(out)
        graph.predicts(x, y, via=mapping)
        model.mappings[x.name, y.name] = mapping
        for j, size in enumerate(parameters):
            theta = ParameterNode(f"theta{i}{j}", mean=draw(size), sd=0.7, estimator=slow, curvature=curvature)
            graph.parametrises(theta, x)
        if mapping_parameters:
            phi = ParameterNode(f"phi{i}", mean=draw(mapping_parameters), sd=0.4, estimator=slow, curvature=curvature)
            graph.parametrises(phi, x, of=y)
        for node, label in ((x, "x"), (y, "y")):
            width = 0.6 if label == "x" else 0.9
            noise = PrecisionNode(
                f"noise_{label}{i}",
                prior_precision=3.0 if label == "x" else 5.0 if precisions == "shared" else torch.linspace(3, 7, out),
                sd=0.5,
                correlation_time=width,
                channels=precisions,
                coupling_sd=0.7,
                estimator=slow,
                curvature=curvature,
            )
            model.widths[noise.name] = width
            graph.weighs(noise, node)
        states.append(x)
        sensors.append(y)
        model.observations[y.name] = draw(samples, out)
    if fused and len(states) > 1 and orders[0] >= orders[1]:
        mapping = bent(channels[1])
        graph.predicts(states[0], sensors[1], via=mapping)
        model.mappings[states[0].name, sensors[1].name] = mapping
    return model


def driven_flow(x, v, theta):
    return torch.sin(x.roll(1, -1) * theta.sum(-1, keepdim=True)) - 0.3 * x**3 + torch.tanh(v.sum(-1, keepdim=True) * x)


def driven_mapping(x, v, theta):
    return torch.stack([x.sum(-1) * v[..., 0], torch.cos(v).sum(-1) + x[..., 0] * theta.sum(-1)], -1)


FLOWS = {dim: as_function(driven_flow, dim) for dim in (1, 2)}


MAPPINGS = {dim: as_function(driven_mapping, dim) for dim in (1, 2)}
