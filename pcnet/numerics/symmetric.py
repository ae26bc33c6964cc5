"""Symmetric matrices."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pcnet.numerics.tracing import is_traced, kernel

SMALL = 16
"""Size up to which compiled code has a number for each element, and saves by symmetry more than a copy costs."""


@kernel
def mirrored(matrix: Tensor) -> Tensor:
    """Symmetric matrices (..., n, n) with the lower triangles of these.

    Compiled code then computes lower triangles only, and rounding does not make matrices less and less symmetric.
    """
    return torch.where(_lower(matrix.shape[-1], matrix.device), matrix, matrix.mT)


@cache
def _lower(n: int, device: torch.device) -> Tensor:
    """Which elements are not above the diagonal."""
    with torch.inference_mode(False):  # kept after the run, when autograd may need it
        return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def known_symmetric(matrix: Tensor) -> Tensor:
    """Matrices that are symmetric already, as they are; compiled code of small ones learns it by this."""
    return mirrored(matrix) if is_traced() and matrix.shape[-1] <= SMALL else matrix


def plus_product(start: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """C + A B for each source: C (B, k, n, m), A (B, n, d) or (B, k, n, d), and B (B, d, m) or (B, k, d, m)."""
    batch, k = start.shape[:2]
    pair = (each if each.dim() == 4 else each[:, None] for each in (left, right))
    a, b = (each.expand(batch, k, -1, -1).flatten(0, 1) for each in pair)
    return torch.baddbmm(start.flatten(0, 1), a, b).view(start.shape)
