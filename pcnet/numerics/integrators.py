"""Integrators: how a generalised state moves along its flow and down the free-energy gradient."""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.matrix_exponential import exponential_step, log_abs_det
from pcnet.settings import Numbers, Positive, number, settings


def column(value: Tensor, trailing: int) -> Tensor:
    """A setting, () or (B,), shaped to multiply a tensor with `trailing` dimensions after the batch."""
    return value if value.dim() == 0 else value.view(-1, *(1,) * trailing)


class LocalQuadratic(NamedTuple):
    """Local quadratic model of the free energy F around a mean x̃."""

    mean: Tensor  # x̃, (B, n)
    motion: Tensor  # Dx̃, (B, n)
    shift: Tensor  # D, (n, n)
    gradient: Tensor  # ∇F, (B, n)
    curvature: Tensor | None  # H (B, n, n), None for integrators that do not need it
    relative_dt: Tensor | None = None  # elapsed time in sampling intervals, (B,); None for 1

    def scale_time(self, time: Tensor) -> Tensor:
        """A step size per sampling interval times the elapsed sampling intervals; () or (B,)."""
        return time if self.relative_dt is None else time * self.relative_dt


class JointStep(NamedTuple):
    """A step with the neighbour fixed, and how it depends on the neighbour's step δp."""

    step: Tensor  # (B, n)
    sensitivity: Tensor  # −δμ̃/δp, (B, n, p)


class StateIntegrator(ABC):
    """Update rule of a generalised state."""

    needs_curvature: bool = True
    implicit: bool = False  # whether steps are implicit, so that neighbouring nodes can take them jointly

    @abstractmethod
    def step(self, local: LocalQuadratic) -> Tensor:
        """The change of the mean, (B, n)."""

    def joint_step(self, local: LocalQuadratic, cross: Tensor) -> JointStep:
        """The step with its sensitivity to that of a neighbour; implicit integrators only."""
        raise NotImplementedError(f"{type(self).__name__} is not implicit")


@settings
class LocalLinearisation(StateIntegrator):
    """Local linearisation (Ozaki): Δμ̃ = J₀⁻¹(exp(J₀Δs) − I)h with h = Dμ̃ − κ∇F and J₀ = D − κH.

    Args:
        kappa: κ, the gain of the gradient.
        step_size: Δs per sampling interval, such as dt; or "curvature" for Δs = exp(ν)/|det J₀|^(1/n) within [1e-6, 1].
        log_step_size: ν, for step_size="curvature".
    """

    kappa: Positive = number(1.0)
    step_size: Literal["curvature"] | Positive = "curvature"
    log_step_size: Numbers = number(-4.0)

    def step(self, local: LocalQuadratic) -> Tensor:
        assert local.curvature is not None
        flow = torch.addcmul(local.motion, column(self.kappa, 1), local.gradient, value=-1)
        jacobian = torch.addcmul(local.shift, column(self.kappa, 2), local.curvature, value=-1)
        if isinstance(self.step_size, str):
            time = (self.log_step_size - log_abs_det(jacobian) / flow.shape[-1]).exp().clamp(1e-6, 1.0)
        else:
            time = local.scale_time(self.step_size).expand(flow.shape[0])
        return exponential_step(jacobian, flow, time)


@settings
class ExplicitEuler(StateIntegrator):
    """Explicit Euler step of the gradient flow, Δμ̃ = Δs (Dμ̃ − κ∇F), with Δs = step_size per sampling interval."""

    step_size: Positive
    kappa: Positive = number(1.0)
    needs_curvature = False

    def step(self, local: LocalQuadratic) -> Tensor:
        time, kappa = (column(v, 1) for v in (local.scale_time(self.step_size), self.kappa))
        return time * (local.motion - kappa * local.gradient)


@settings
class ImplicitEuler(StateIntegrator):
    """Implicit Euler step, (I/Δs − D + κH) Δμ̃ = Dμ̃ − κ∇F, with Δs = step_size per sampling interval.

    Neighbouring nodes with this integrator step jointly: parents use errors from which their children are eliminated,
    then children substitute the steps of their parents. On a tree of linear functions this is the exact joint step.
    The curvature H is that of Gauss and Newton.
    """

    step_size: Positive
    kappa: Positive = number(1.0)
    implicit = True

    def step(self, local: LocalQuadratic) -> Tensor:
        matrix, flow = self._system(local)
        solved: Tensor = torch.linalg.solve(matrix, flow)
        return solved

    def joint_step(self, local: LocalQuadratic, cross: Tensor) -> JointStep:
        """The step, and −δμ̃/δp = κM⁻¹H_xp for a neighbour p with the cross curvature H_xp (B, n, p)."""
        matrix, flow = self._system(local)
        solved = torch.linalg.solve(matrix, torch.cat([flow[..., None], column(self.kappa, 2) * cross], -1))
        return JointStep(solved[..., 0], solved[..., 1:])

    def _system(self, local: LocalQuadratic) -> tuple[Tensor, Tensor]:
        assert local.curvature is not None
        matrix = column(self.kappa, 2) * local.curvature - local.shift
        matrix.diagonal(dim1=-2, dim2=-1).add_(1 / column(local.scale_time(self.step_size), 1))
        return matrix, local.motion - column(self.kappa, 1) * local.gradient
