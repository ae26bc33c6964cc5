"""Statistical linear regression of a function on points that represent a Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.branching import needed
from pcnet.numerics.symmetric import mirrored

JITTER = 1e-9  # relative variance that is added before a covariance is factorised


Points = Literal["unscented", "cubature", "second_order"]
"""Points that represent N(m, P) with q elements, at m ± √n times the columns of a root of P.

"unscented" has n = max(q, 3) and the mean itself, with a weight of 1 − q/n; "cubature" n = q and no mean;
"second_order" n = 3, and takes differences between the points for derivatives, as a filter of second order does.
"""


class Regression(NamedTuple):
    """A function of s ~ N(m, P) as value + jacobian (s − m), and the covariance of what that leaves out."""

    value: Tensor  # (B, d)
    jacobian: Tensor  # (B, d, q)
    residual: Tensor | None  # (B, d, d); None for a Taylor expansion


def covariance_root(covariance: Tensor) -> Tensor:
    """The lower triangular L with LLᵀ = P (B, q, q), of which single elements may have no variance."""
    padded = covariance.clone()
    padded.diagonal(dim1=-2, dim2=-1).mul_(1 + JITTER).add_(torch.finfo(covariance.dtype).tiny ** 0.5)
    root: Tensor = torch.linalg.cholesky_ex(padded)[0]
    return root


def regress(
    function: Callable[[Tensor], Tensor], mean: Tensor, covariance: Tensor, points: Points = "unscented"
) -> Regression:
    """The linear regression of a function on points that represent N(m, P).

    The value and the jacobian are exact for quadratic functions; the residual covers second-order terms, and is 0 for
    linear functions.

    Args:
        function: From points (B, k, q) to values (B, k, d).
        mean: m, (B, q).
        covariance: P, (B, q, q).
        points: Which points.
    """
    return _regress(function, mean, covariance, points)[0]


def _regress(
    function: Callable[[Tensor], Tensor], mean: Tensor, covariance: Tensor, kind: Points
) -> tuple[Regression, Tensor]:
    """The regression, and the variance (B, d) that it explains."""
    q = mean.shape[-1]
    n = {"unscented": max(float(q), 3.0), "cubature": float(q), "second_order": 3.0}[kind]
    weight, centre_weight = 0.5 / n, 1 - q / n
    root = covariance_root(covariance)
    away = math.sqrt(n)
    points = [mean[:, None].add(root.mT, alpha=away), mean[:, None].sub(root.mT, alpha=away)]
    if centre_weight or kind == "second_order":
        points.append(mean[:, None])
    values = function(torch.cat(points, 1))
    up, down, centre = values[:, :q], values[:, q : 2 * q], values[:, 2 * q :]
    both, slopes = up + down, (0.5 / away) * (up - down)  # these along the columns of the root, (B, q, d)
    value = weight * both.sum(1, keepdim=True)
    value = value + centre_weight * centre if centre_weight else value
    jacobian = torch.linalg.solve_triangular(root.mT, slopes, upper=True).mT
    if kind == "second_order":  # Σ_i Var ½f″_i s_i², with nf″_i the second difference along a column
        bend = both.sub(centre, alpha=2)
        residual = (0.5 / n**2) * (bend.mT @ bend)
    else:  # about the mean, of points that the regression would put at ± the same distance: only even terms are left
        bend = both.sub(value, alpha=2)
        residual = (0.5 * weight) * (bend.mT @ bend)
        if centre_weight:
            residual = residual + centre_weight * ((centre - value).mT @ (centre - value))
    return Regression(value[:, 0], jacobian, mirrored(residual)), (slopes.mT @ slopes).diagonal(dim1=-2, dim2=-1)


def regress_or_keep(
    function: Callable[[Tensor], Tensor],
    mean: Tensor,
    covariance: Tensor,
    taylor: Callable[[], Regression],
    points: Points = "unscented",
) -> Regression:
    """`regress`, or a Taylor expansion where a residual is larger than the variance that is explained.

    Then points are so far out that a step of an integrator from there says nothing about the flow.
    """
    found, explained = _regress(function, mean, covariance, points)
    assert found.residual is not None
    good = (found.residual.diagonal(dim1=-2, dim2=-1) <= explained).all(-1)
    if not needed(~good.all()):
        return found
    column, matrix, kept = good[:, None], good[:, None, None], taylor()
    return Regression(
        torch.where(column, found.value, kept.value),
        torch.where(matrix, found.jacobian, kept.jacobian),
        torch.where(matrix, found.residual, 0.0),
    )
