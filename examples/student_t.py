"""A new kind of node in one file: a sensory node with heavy-tailed errors, so that outliers do not drag the states.

Run it:  python examples/student_t.py
It tracks a rotating state through observations of which one in twenty is wildly wrong, with Gaussian and with Student-t
errors, prints both errors, and writes output/student_t.png.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

import pcnet as pc
from pcnet.errors import GraphError
from pcnet.model.messages import Error
from pcnet.model.node import Energy, Link, NodeContext
from pcnet.nodes import PrecisionNode, SensoryNode
from pcnet.numerics.integrators import LocalLinearisation
from pcnet.numerics.precision import quadratic
from pcnet.settings import settings


@settings
class StudentTSensoryNode(SensoryNode):
    """A sensory node with Student-t errors of ν degrees of freedom, one distribution for each channel.

    With q = ε̃ᵀΠ̃ε̃ of a channel over k orders its energy is ½(ν + k) log(1 + q/ν) − ½log|Π̃|, so that an error counts
    with the weight w = (ν + k)/(ν + q): a large one counts little.
    """

    _: KW_ONLY
    degrees: float = Field(default=3.0, gt=0)

    def as_child(self, link: Link) -> None:
        super().as_child(link)
        if isinstance(link.parent, PrecisionNode) and link.parent.channels == "full":
            raise GraphError(
                f"the channels of {self.title} have distributions of their own; {link.parent.name!r} couples them"
            )

    def err(self, local: NodeContext, link: Link) -> Error[Any]:
        work = self.work(local)
        q = quadratic(work.weighted, work.error)
        nu, k = torch.as_tensor(self.degrees).to(q), local.belief.seen  # how many orders of each channel are there
        weight = (nu + k) / (nu + q)
        if link.kind == "weighs":
            excess = 0.5 * (weight * q - k)
            expected = 0.5 * k * nu / (nu + k + 2)  # the Fisher information of a log-scale
            exact = 0.5 * weight * q * nu / (nu + q)
            return Error(-excess, expected, exact - expected)

        def remainder() -> Tensor:
            pull = work.weighted * (weight * (2 / (nu + k)).sqrt())[:, None, :]
            outer = torch.einsum("bic,bjc->bicj", pull, pull)  # each channel by itself
            blocks = torch.diag_embed(outer.transpose(2, 3), dim1=2, dim2=4)
            size = self.orders * self.dim
            return -blocks.reshape(-1, size, size)

        return Error(work.weighted * weight[:, None, :], work.precision.scaled(weight), remainder)

    def energy(self, local: NodeContext) -> Energy:
        work = self.work(local)
        q = quadratic(work.weighted, work.error)
        nu, k = torch.as_tensor(self.degrees).to(q), local.belief.seen
        constant = torch.lgamma((nu + k) / 2) - torch.lgamma(nu / 2) - 0.5 * k * (nu * math.pi).log()
        tails = (constant - 0.5 * (nu + k) * (1 + q / nu).log()).sum(-1)
        return Energy(accuracy=tails + 0.5 * work.precision.log_det)


def track(observations: Tensor, sensor: SensoryNode) -> Tensor:
    """The mean of the state at each observation, (time, 2)."""
    x = pc.GeneralisedStateNode(
        "x", dim=2, orders=2, flow=pc.systems.linear(TURN), integrator=LocalLinearisation(kappa=0.3, step_size=0.05)
    )
    graph = pc.Graph()
    graph.predicts(x, sensor)
    graph.weighs(PrecisionNode("noise_x", prior_precision=4.0, sd=0.1, correlation_time=0.2), x)
    graph.weighs(PrecisionNode("noise_y", prior_precision=100.0, sd=0.1, correlation_time=0.2), sensor)
    result = graph.run(observations, schedule=pc.states_only())
    return torch.as_tensor(result.mean("x")[:, 0])


TURN = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)


def main() -> None:
    from matplotlib.figure import Figure

    generator = torch.Generator().manual_seed(1)
    times = torch.arange(600, dtype=torch.float64) * 0.05
    truth = torch.stack([times.sin(), times.cos()], -1)
    observations = truth + 0.1 * torch.randn(truth.shape, generator=generator, dtype=torch.float64)
    wild = torch.rand(600, generator=generator) < 0.05
    observations[wild] += 3.0 * torch.randn(int(wild.sum()), 2, generator=generator, dtype=torch.float64)
    tracks = {
        "Gaussian errors": track(observations, SensoryNode("y", dim=2, orders=1, dt=0.05)),
        "Student-t errors": track(observations, StudentTSensoryNode("y", dim=2, orders=1, dt=0.05)),
    }
    for name, mean in tracks.items():
        print(f"{name}: mean squared error {float(((mean - truth) ** 2).mean()):.4f}")

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(times, observations[:, 0], ".", color="0.75", label="observations")
    axes.plot(times, truth[:, 0], color="black", linewidth=1, label="truth")
    for (name, mean), colour in zip(tracks.items(), ("#D55E00", "#0072B2"), strict=True):
        axes.plot(times, mean[:, 0], color=colour, label=name)
    axes.set(xlabel="time", ylabel="first state", title="One observation in twenty is wildly wrong")
    axes.set_ylim(-2.5, 2.5)
    axes.legend(loc="lower right", ncols=2)
    path = Path("output") / "student_t.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
