"""Laplace approximation: posterior precisions and covariances from curvatures."""

from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.branching import holds


class Posterior(NamedTuple):
    """A Gaussian posterior."""

    precision: Tensor  # (B, n, n)
    log_det_covariance: Tensor  # log|Σ|, (B,)
    regularised: Tensor | None  # which batch elements were regularised, (B,); None if none


def laplace_posterior(curvature: Tensor) -> Posterior:
    """The Laplace posterior of a curvature (B, n, n), regularised where it is not positive definite.

    Eigenvalues are clamped from below to max(1e-9, r·|largest|) with r = max(1e-12, 10 eps). Elements that are not
    finite are returned unchanged, for the run to report.
    """
    factor, info = torch.linalg.cholesky_ex(curvature)
    log_det = -2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    if not holds(info.any()):
        return Posterior(curvature, log_det, None)
    regularised = (info != 0) & torch.isfinite(curvature).all(-1).all(-1)
    if not holds(regularised.any()):
        return Posterior(curvature, log_det, None)
    values, vectors = _eigen(curvature, regularised)
    relative = max(1e-12, 10 * torch.finfo(values.dtype).eps)
    floor = (relative * values.abs().amax(-1, keepdim=True)).clamp_min(1e-9)
    clamped = torch.maximum(values, floor)
    here = regularised[:, None, None]
    curvature = torch.where(here, (vectors * clamped[:, None, :]) @ vectors.mT, curvature)
    return Posterior(curvature, torch.where(regularised, -clamped.log().sum(-1), log_det), regularised)


def _eigen(matrix: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (B, n) and eigenvectors (B, n, n) of symmetric matrices; those of the identity for other elements."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    values, vectors = torch.linalg.eigh(torch.where(where[:, None, None], 0.5 * (matrix + matrix.mT), eye))
    return values, vectors


def pseudo_inverse(matrix: Tensor, where: Tensor) -> Tensor:
    """The pseudo-inverse of symmetric matrices (B, n, n), for the batch elements `where` (B,); I for others."""
    values, vectors = _eigen(matrix, where)
    size = values.abs()
    kept = size > matrix.shape[-1] * torch.finfo(values.dtype).eps * size.amax(-1, keepdim=True)
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    return (vectors * inverse[:, None, :]) @ vectors.mT


def largest_eigenvalue(precision: Tensor, covariance: Tensor) -> Tensor:
    """The largest eigenvalue (B,) of ΠΣ, for a positive definite Π and a symmetric Σ, (B, n, n) each."""
    factor = torch.linalg.cholesky_ex(precision)[0]
    product = factor.mT @ covariance @ factor
    return _eigen(product, torch.isfinite(product).all(-1).all(-1))[0][:, -1]


def standard_deviations(covariance: Tensor) -> Tensor:
    """Standard deviations (B, n) of a covariance (B, n, n)."""
    return covariance.diagonal(dim1=-2, dim2=-1).sqrt()


def covariance_of(precision: Tensor) -> Tensor:
    """The inverse of a precision (B, n, n): a pseudo-inverse if it is singular, NaN if it is not finite."""
    factor, info = torch.linalg.cholesky_ex(precision)
    if not holds(info.any()):
        return torch.cholesky_inverse(factor)
    good, finite = (info == 0)[:, None, None], torch.isfinite(precision).all(-1).all(-1)
    singular = (info != 0) & finite  # rounding may push clamped eigenvalues below zero again
    inverse = torch.cholesky_inverse(
        torch.where(good, factor, torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device))
    )
    pseudo = torch.where(singular[:, None, None], pseudo_inverse(precision, singular), torch.nan)
    return torch.where(good, inverse, pseudo)
