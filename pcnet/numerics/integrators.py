"""Integrators: how a generalised state moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.matrix_exponential import exponential_step, log_abs_det
from pcnet.settings import Numbers, Positive, number, settings


def column(value: Tensor, trailing: int) -> Tensor:
    """A laid-out setting, one number or one for each batch element, shaped to multiply (B, *trailing)."""
    return value if value.dim() == 0 else value.view(-1, *(1,) * trailing)


# --- fast: generalised states -------------------------------------------------------------------------------------
class LocalQuadratic(NamedTuple):
    """What a state moves by: its mean x̃ (B, n), its own motion Dx̃ (B, n) and the matrix D, gradient and curvature.

    The curvature is None for a rule that does not need it. pace: how many sampling intervals have passed, (B,); None is
    one, as ever.
    """

    mean: Tensor
    motion: Tensor
    shift: Tensor
    gradient: Tensor
    curvature: Tensor | None
    pace: Tensor | None = None

    def paced(self, time: Tensor) -> Tensor:
        """The time of a step for as many sampling intervals as have passed; (), or (B,)."""
        return time if self.pace is None else time * self.pace


class StateIntegrator(ABC):
    """A rule that moves a generalised state."""

    needs_curvature: bool = True
    implicit: bool = False
    """Whether the step is an implicit one, so that it can be taken jointly with those of the neighbours."""

    @abstractmethod
    def step(self, evidence: LocalQuadratic) -> Tensor:
        """The change of the mean, (B, n)."""

    def answer(self, evidence: LocalQuadratic, cross: Tensor) -> Following:
        """The step with its response to a neighbour; only implicit integrators have it."""
        raise NotImplementedError(f"{type(self).__name__} is not implicit")


@settings
class LocalLinearisation(StateIntegrator):
    """Local linearisation: Δμ̃ = J₀⁻¹(exp(J₀Δs) − I)h with h = Dμ̃ − κ∇ and J₀ = D − κH.

    `time` is Δs. "curvature" takes Δs = exp(ν)/|det J₀|^(1/n), kept within [1e-6, 1]; a number (such as the sampling
    interval dt) is for one sampling interval, and as many times that if more of it has passed.
    """

    kappa: Positive = number(1.0)
    step_size: Literal["curvature"] | Positive = "curvature"
    log_step_size: Numbers = number(-4.0)

    def step(self, evidence: LocalQuadratic) -> Tensor:
        assert evidence.curvature is not None
        kappa = column(self.kappa, 1)
        flow = torch.addcmul(evidence.motion, kappa, evidence.gradient, value=-1)
        jacobian = torch.addcmul(evidence.shift, column(self.kappa, 2), evidence.curvature, value=-1)
        if isinstance(self.step_size, str):
            time = (self.log_step_size - log_abs_det(jacobian) / flow.shape[-1]).exp().clamp(1e-6, 1.0)
        else:
            time = evidence.paced(self.step_size).expand(flow.shape[0])
        return exponential_step(jacobian, flow, time)


@settings
class ExplicitEuler(StateIntegrator):
    """One Euler step of the gradient flow: Δμ̃ = Δs (Dμ̃ − κ∇), with `time` for Δs."""

    step_size: Positive
    kappa: Positive = number(1.0)
    needs_curvature = False

    def step(self, evidence: LocalQuadratic) -> Tensor:
        time, kappa = (column(v, 1) for v in (evidence.paced(self.step_size), self.kappa))
        return time * (evidence.motion - kappa * evidence.gradient)


class Following(NamedTuple):
    """The step (B, n) that a state is about to take, and by how much less it is with a neighbour's δp; (B, n, p)."""

    step: Tensor
    following: Tensor


@settings
class ImplicitEuler(StateIntegrator):
    """One implicit Euler step over `time`: (I/Δs − D + κH) Δμ̃ = Dμ̃ − κ∇, with H of Gauss and Newton.

    States and causes that move so do it jointly: from the top down, each node goes by errors in which the nodes below
    have answered already (elimination), and then these go by where it has gone (substitution). On a tree of linear
    functions that is the step of all of them together, exactly.
    """

    step_size: Positive
    kappa: Positive = number(1.0)
    implicit = True

    def step(self, evidence: LocalQuadratic) -> Tensor:
        matrix, flow = self._system(evidence)
        solved: Tensor = torch.linalg.solve(matrix, flow)
        return solved

    def answer(self, evidence: LocalQuadratic, cross: Tensor) -> Following:
        """The step, and −δμ̃/δp = κM⁻¹H_xp for a neighbour p whose cross curvature is H_xp (B, n, p)."""
        matrix, flow = self._system(evidence)
        solved = torch.linalg.solve(matrix, torch.cat([flow[..., None], column(self.kappa, 2) * cross], -1))
        return Following(solved[..., 0], solved[..., 1:])

    def _system(self, evidence: LocalQuadratic) -> tuple[Tensor, Tensor]:
        assert evidence.curvature is not None
        matrix = column(self.kappa, 2) * evidence.curvature - evidence.shift
        matrix.diagonal(dim1=-2, dim2=-1).add_(1 / column(evidence.paced(self.step_size), 1))
        return matrix, evidence.motion - column(self.kappa, 1) * evidence.gradient
