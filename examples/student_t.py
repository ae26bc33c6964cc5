"""A new kind of node in one file: a sensory node with Student-t errors, which is robust to outliers.

Run:  python examples/student_t.py
One observation in twenty of a rotating state is an outlier. The example tracks the state with Gaussian and with
Student-t errors, prints the mean squared error of both, and writes output/student_t.png.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

import pcnet as pc
from pcnet.errors import GraphError
from pcnet.model.links import AnyLink, Weighs
from pcnet.model.messages import PredictionError, ScoreError
from pcnet.model.node import Energy
from pcnet.nodes import PrecisionNode, SensoryNode
from pcnet.nodes.sensory import Context
from pcnet.numerics.integrators import LocalLinearisation
from pcnet.numerics.precision import weighted_squares
from pcnet.settings import settings


@settings
class StudentTSensoryNode(SensoryNode):
    """A sensory node with Student-t errors, independent for each channel.

    The energy of a channel with q = ε̃ᵀΠ̃ε̃ over k orders is ½(ν + k) log(1 + q/ν) − ½log|Π̃|. An error is weighted by
    w = (ν + k)/(ν + q), so that large errors have little influence.

    Args:
        degrees: Degrees of freedom ν.
    """

    _: KW_ONLY
    degrees: float = Field(default=3.0, gt=0)

    def check_as_child(self, link: AnyLink) -> None:
        super().check_as_child(link)
        if isinstance(link.parent, PrecisionNode) and link.parent.channels == "full":
            raise GraphError(
                f"the channels of {self.title} are independent, but {link.parent.name!r} couples them; "
                "use channels='each' or channels='shared'"
            )

    def error(self, ctx: Context, link: AnyLink) -> PredictionError | ScoreError:
        found = self.sensory_errors(ctx)
        q = weighted_squares(found.weighted, found.error)
        nu, k = torch.as_tensor(self.degrees).to(q), ctx.state.seen  # k: observed orders of each channel
        weight = (nu + k) / (nu + q)
        if isinstance(link, Weighs):
            excess = 0.5 * (weight * q - k)
            expected = 0.5 * k * nu / (nu + k + 2)  # Fisher information of a log-scale
            exact = 0.5 * weight * q * nu / (nu + q)
            return ScoreError(-excess, lambda: expected, lambda: exact - expected)

        def remainder() -> Tensor:
            scaled = found.weighted * (weight * (2 / (nu + k)).sqrt())[:, None, :]
            outer = torch.einsum("bic,bjc->bicj", scaled, scaled)  # for each channel
            blocks = torch.diag_embed(outer.transpose(2, 3), dim1=2, dim2=4)
            size = self.orders * self.dim
            return -blocks.reshape(-1, size, size)

        weighted = found.weighted * weight[:, None, :]
        return PredictionError(weighted, lambda: found.precision.scaled(weight), remainder)

    def energy(self, ctx: Context) -> Energy:
        found = self.sensory_errors(ctx)
        q = weighted_squares(found.weighted, found.error)
        nu, k = torch.as_tensor(self.degrees).to(q), ctx.state.seen
        constant = torch.lgamma((nu + k) / 2) - torch.lgamma(nu / 2) - 0.5 * k * (nu * math.pi).log()
        tails = (constant - 0.5 * (nu + k) * (1 + q / nu).log()).sum(-1)
        return Energy(accuracy=tails + 0.5 * found.precision.log_det)


def track(observations: Tensor, sensor: SensoryNode) -> Tensor:
    """Posterior mean of the state at each observation, (time, 2)."""
    x = pc.GeneralisedStateNode(
        "x", dim=2, orders=2, flow=pc.systems.linear(ROTATION), integrator=LocalLinearisation(kappa=0.3, step_size=0.05)
    )
    graph = pc.Graph()
    graph.predicts(x, sensor)
    graph.weighs(PrecisionNode("noise_x", prior_precision=4.0, sd=0.1, correlation_time=0.2), x)
    graph.weighs(PrecisionNode("noise_y", prior_precision=100.0, sd=0.1, correlation_time=0.2), sensor)
    result = pc.Model(graph, pc.states_only()).run(observations)
    return torch.as_tensor(result.mean("x")[:, 0])


ROTATION = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)


def main() -> None:
    from matplotlib.figure import Figure

    generator = torch.Generator().manual_seed(1)
    times = torch.arange(600, dtype=torch.float64) * 0.05
    truth = torch.stack([times.sin(), times.cos()], -1)
    observations = truth + 0.1 * torch.randn(truth.shape, generator=generator, dtype=torch.float64)
    outlier = torch.rand(600, generator=generator) < 0.05
    observations[outlier] += 3.0 * torch.randn(int(outlier.sum()), 2, generator=generator, dtype=torch.float64)
    means = {
        "Gaussian errors": track(observations, SensoryNode("y", dim=2, orders=1, dt=0.05)),
        "Student-t errors": track(observations, StudentTSensoryNode("y", dim=2, orders=1, dt=0.05)),
    }
    for name, mean in means.items():
        print(f"{name}: mean squared error {float(((mean - truth) ** 2).mean()):.4f}")

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(times, observations[:, 0], ".", color="0.75", label="observations")
    axes.plot(times, truth[:, 0], color="black", linewidth=1, label="truth")
    for (name, mean), colour in zip(means.items(), ("#D55E00", "#0072B2"), strict=True):
        axes.plot(times, mean[:, 0], color=colour, label=name)
    axes.set(xlabel="time", ylabel="first state", title="One observation in twenty is an outlier")
    axes.set_ylim(-2.5, 2.5)
    axes.legend(loc="lower right", ncols=2)
    path = Path("output") / "student_t.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
