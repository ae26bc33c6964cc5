"""One step of a flow ẋ = f(x, θ) over a time h, with its tangent and the noise that it gathers on the way.

A step is x⁺ = φ_h(x, θ), with F = ∂φ/∂x, G = ∂φ/∂θ, and M ≈ ∂φ_{h/2}/∂x over its second half. Diffusion of density T
adds the covariance ∫Φ T Φᵀ ds, with Φ the tangent from s to the end; by Simpson's rule h/6 (T + 4 MTMᵀ + FTFᵀ).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.symmetric import plus_product

IntegratorName = Literal["rk4", "local_linearisation", "euler"]
DOUBLINGS, TERMS = 10, 9  # of the matrix exponential: to rounding where ‖hJ‖ is below some hundred


class FlowAt(NamedTuple):
    """A flow and its derivatives at one point."""

    velocity: Tensor  # f, (B, d)
    jacobian: Tensor  # ∂f/∂x, (B, d, d)
    parameter_jacobian: Tensor  # ∂f/∂θ, (B, d, p)


class FlowStep(NamedTuple):
    """The end of a step, with its derivatives."""

    value: Tensor  # x⁺, (B, d)
    jacobian: Tensor  # F, (B, d, d)
    parameter_jacobian: Tensor  # G, (B, d, p)
    second_half: (
        Tensor | None
    )  # M, (B, d, d); None for a step so crude that what is added on the way is added at its end
    time: Tensor  # h, (B,)
    drift: Tensor | None = None  # hJ of a step that is exact for the flow linearised there, (B, d, d)

    def regressed(self, value: Tensor, jacobian: Tensor) -> FlowStep:
        """The same step with an end and a Jacobian that were found in another way."""
        if self.second_half is None or self.drift is not None:
            return self._replace(value=value, jacobian=jacobian)
        return self._replace(value=value, jacobian=jacobian, second_half=square_root_near_one(jacobian))

    def integrate(self, first: Tensor, middle: Tensor, last: Tensor) -> Tensor:
        """∫Φ u ds of an input u (B, d, k), given at the beginning, the middle and the end of the step."""
        h = self.time[:, None, None]
        if self.second_half is None:
            return h * first
        return h / 6 * (self.jacobian @ first + 4 * self.second_half @ middle + last)

    def diffuse(self, density: Tensor) -> Tensor:
        """∫Φ T Φᵀ ds of diffusions T with these diagonals (B, k, d); (B, k, d, d)."""
        h = self.time[:, None, None, None]
        if self.second_half is None:
            return h * density.diag_embed()
        if self.drift is not None:
            return _diffuse_exactly(self.drift, self.time, density)
        weight = h[..., 0] / 6 * density
        found = weight.diag_embed()
        for tangent, share in ((self.jacobian, weight), (self.second_half, 4 * weight)):
            found = plus_product(found, tangent[:, None] * share[:, :, None], tangent.mT)
        return found


def flow_step(flow: Callable[[Tensor], FlowAt], x: Tensor, h: Tensor, integrator: IntegratorName) -> FlowStep:
    """A step from x (B, d) over h (B,), by one of the integrators."""
    return STEPS[integrator](flow, x, h)


def known_step(value: Tensor, jacobian: Tensor, h: Tensor, integrator: IntegratorName) -> FlowStep:
    """A step of "rk4" or "euler" whose end and Jacobian were found in another way, without derivatives by θ."""
    half = None if integrator == "euler" else square_root_near_one(jacobian)
    return FlowStep(value, jacobian, jacobian[..., :0], half, h)


def advance(
    velocity: Callable[[Tensor], Tensor], x: Tensor, h: Tensor, integrator: IntegratorName, jacobian: Tensor | None
) -> Tensor:
    """The ends of steps from many points x (B, k, d), without derivatives.

    By local linearisation, all points of a batch element use the Jacobian (B, d, d) of one of them.
    """
    column = h[:, None, None]
    first = velocity(x)
    if integrator == "euler":
        return x + column * first
    if jacobian is not None:
        d = x.shape[-1]
        matrix = torch.constant_pad_nd(column * jacobian, (0, d, 0, d))
        matrix[:, :d, d:].diagonal(dim1=-2, dim2=-1).add_(h[:, None])
        return x + first @ exponential_minus_one(matrix)[1][:, :d, d:].mT
    second = velocity(torch.addcmul(x, 0.5 * column, first))
    third = velocity(torch.addcmul(x, 0.5 * column, second))
    fourth = velocity(torch.addcmul(x, column, third))
    total = (first + fourth).add(second, alpha=2).add(third, alpha=2)
    return torch.addcmul(x, column / 6, total)


def euler(flow: Callable[[Tensor], FlowAt], x: Tensor, h: Tensor) -> FlowStep:
    """x + h f(x)."""
    now, matrix = flow(x), h[:, None, None]
    return FlowStep(
        x + h[:, None] * now.velocity, _eye(x) + matrix * now.jacobian, matrix * now.parameter_jacobian, None, h
    )


def rk4(flow: Callable[[Tensor], FlowAt], x: Tensor, h: Tensor) -> FlowStep:
    """The classical fourth-order method of Runge and Kutta, and its exact tangent."""
    column, matrix = h[:, None], h[:, None, None]
    value, jacobian, parameter_jacobian = x, _eye(x), None
    slopes: FlowAt | None = None
    for share, weight in ((0.0, 1 / 6), (0.5, 1 / 3), (0.5, 1 / 3), (1.0, 1 / 6)):
        if slopes is None:
            slopes = flow(x)
        else:
            now = flow(torch.addcmul(x, share * column, slopes.velocity))
            inner = share * matrix * now.jacobian
            slopes = FlowAt(
                now.velocity,
                torch.baddbmm(now.jacobian, inner, slopes.jacobian),
                torch.baddbmm(now.parameter_jacobian, inner, slopes.parameter_jacobian),
            )
        value = torch.addcmul(value, weight * column, slopes.velocity)
        jacobian = torch.addcmul(jacobian, weight * matrix, slopes.jacobian)
        if parameter_jacobian is None:
            parameter_jacobian = weight * matrix * slopes.parameter_jacobian
        else:
            parameter_jacobian = torch.addcmul(parameter_jacobian, weight * matrix, slopes.parameter_jacobian)
    assert parameter_jacobian is not None
    return FlowStep(value, jacobian, parameter_jacobian, square_root_near_one(jacobian), h)


def local_linearisation(flow: Callable[[Tensor], FlowAt], x: Tensor, h: Tensor) -> FlowStep:
    """The exact step of the flow linearised at x: x + hφ₁(hJ) f, for stiff flows."""
    now = flow(x)
    batch, d, p = now.parameter_jacobian.shape
    matrix = x.new_zeros(batch, d + 1 + p, d + 1 + p)
    matrix[:, :d] = h[:, None, None] * torch.cat([now.jacobian, now.velocity[..., None], now.parameter_jacobian], -1)
    half, whole = exponential_minus_one(matrix)
    eye = _eye(x)
    value, jacobian, slope = x + whole[:, :d, d], eye + whole[:, :d, :d], whole[:, :d, d + 1 :]
    return FlowStep(value, jacobian, slope, eye + half[:, :d, :d], h, matrix[:, :d, :d])


def _diffuse_exactly(drift: Tensor, time: Tensor, density: Tensor) -> Tensor:
    """∫exp(Js) T exp(Jᵀs) ds over a step, by Q(2t) = Q(t) + exp(Jt) Q(t) exp(Jᵀt); hJ (B, d, d), T (B, k, d)."""
    small = drift * 0.5**DOUBLINGS
    half, whole = exponential_minus_one(small)
    eye = torch.eye(drift.shape[-1], dtype=drift.dtype, device=drift.device)
    moved = [((eye + each)[:, None] * density[:, :, None]) @ (eye + each).mT[:, None] for each in (half, whole)]
    covariance = density.diag_embed() + 4 * moved[0] + moved[1]
    covariance = 0.5**DOUBLINGS / 6 * time[:, None, None, None] * covariance
    for _ in range(DOUBLINGS):
        covariance = covariance + (eye + whole)[:, None] @ covariance @ (eye + whole).mT[:, None]
        whole = 2 * whole + whole @ whole
    return covariance


def exponential_minus_one(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """exp(M/2) − I and exp(M) − I of matrices (B, n, n), by a Taylor series and doublings that lose no digits."""
    small = matrix * 0.5**DOUBLINGS
    grown = small / TERMS
    for k in range(TERMS - 1, 0, -1):
        grown = (small + small @ grown) / k
    half = grown
    for _ in range(DOUBLINGS):
        half, grown = grown, 2 * grown + grown @ grown
    return half, grown


def square_root_near_one(matrix: Tensor) -> Tensor:
    """A square root of matrices (B, n, n) near the identity, to third order."""
    apart = matrix - torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    squared = apart @ apart
    return torch.baddbmm(matrix.add(apart, alpha=-0.5).add(squared, alpha=-0.125), 0.0625 * squared, apart)


def _eye(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


STEPS = {"rk4": rk4, "local_linearisation": local_linearisation, "euler": euler}
