"""Symmetric matrices."""

from __future__ import annotations

from torch import Tensor


def mirrored(matrix: Tensor) -> Tensor:
    """Symmetric matrices (..., n, n) with the lower triangles of these.

    Compiled code then computes lower triangles only, and rounding does not make matrices less and less symmetric.
    """
    lower = matrix.tril()
    return lower + lower.tril(-1).mT
