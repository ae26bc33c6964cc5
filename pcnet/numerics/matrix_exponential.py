"""Exponential integrator step, and log-determinants."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pcnet.numerics.tracing import kernel

_SERIES = torch.tensor(
    [[1.0 / math.factorial(3 * row + i + 1) for i in range(3)] for row in (3, 2, 1, 0)], dtype=torch.float64
)
"""1/(i+1)! for i = 0 … 11 in rows of three, the highest first."""


@kernel
def exponential_step(jacobian: Tensor, flow: Tensor, time: Tensor) -> Tensor:
    """∫₀ᵗ exp(Js) ds · f = t φ₁(Jt) f, the exact step of a linear flow; J (B, n, n), f (B, n), t (B,) → (B, n).

    It is t times the last column of exp(M) − I with M = [[tJ, f], [0, 0]]: a Taylor series of M/2^s, then s doublings
    X(2t) = 2X + X², which unlike squaring exp(M) lose no digits.
    """
    batch, n = flow.shape
    # scale f to 1, because the result is linear in it
    size = flow.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(flow.dtype).tiny)
    side = max(n + 1, 8)  # torch multiplies batches of smaller matrices several times slower
    powers = jacobian.new_zeros(3, batch, side, side)  # I, M, M²
    powers[0].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    m = powers[1]
    torch.mul(jacobian, time[:, None, None], out=m[:, :n, :n])
    torch.div(flow, size, out=m[:, :n, n])
    norms = m.abs().sum(-1)
    largest = norms.nan_to_num_(0.0, posinf=0.0).amax().item()  # ignore diverged batch elements
    doublings = min(max(0, math.frexp(largest)[1] + 1), 60)
    m.mul_(0.5**doublings)
    m2 = torch.bmm(m, m, out=powers[2])
    m3 = torch.bmm(m2, m)
    # φ₁(M) = Σ Mⁱ/(i+1)! to twelve terms, as a polynomial in M³ with coefficients in I, M and M²
    series: Tensor | None = None
    for three in torch.mm(_SERIES.to(m), powers.view(3, -1)).view(4, batch, side, side):
        series = three if series is None else three.baddbmm_(m3, series)
    assert series is not None
    grown, spare = torch.bmm(m, series), m3
    for _ in range(doublings):
        grown, spare = torch.bmm(grown, grown, out=spare).add_(grown, alpha=2.0), grown
    return grown[:, :n, n] * (size * time[:, None])


def log_abs_det(matrix: Tensor) -> Tensor:
    """log|det| by LU; (B, n, n) → (B,)."""
    factor: Tensor = torch.linalg.lu_factor_ex(matrix)[0]
    return factor.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
