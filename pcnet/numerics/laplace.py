"""Laplace approximation: posterior precisions and covariances from curvatures."""

from typing import NamedTuple

import torch
from torch import Tensor


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
    if not info.any():
        return Posterior(curvature, log_det, None)
    regularised = (info != 0) & torch.isfinite(curvature).all(-1).all(-1)
    if not regularised.any():
        return Posterior(curvature, log_det, None)
    symmetric = 0.5 * (curvature[regularised] + curvature[regularised].mT)
    values, vectors = torch.linalg.eigh(symmetric)
    relative = max(1e-12, 10 * torch.finfo(values.dtype).eps)
    floor = (relative * values.abs().amax(-1, keepdim=True)).clamp_min(1e-9)
    clamped = torch.maximum(values, floor)
    curvature, log_det = curvature.clone(), log_det.clone()
    curvature[regularised] = (vectors * clamped[:, None, :]) @ vectors.mT
    log_det[regularised] = -clamped.log().sum(-1)
    return Posterior(curvature, log_det, regularised)


def standard_deviations(covariance: Tensor) -> Tensor:
    """Standard deviations (B, n) of a covariance (B, n, n)."""
    return covariance.diagonal(dim1=-2, dim2=-1).sqrt()


def covariance_of(precision: Tensor) -> Tensor:
    """The inverse of a precision (B, n, n): a pseudo-inverse if it is singular, NaN if it is not finite."""
    factor, info = torch.linalg.cholesky_ex(precision)
    if not info.any():
        return torch.cholesky_inverse(factor)
    covariance = torch.full_like(precision, torch.nan)
    good, finite = info == 0, torch.isfinite(precision).all(-1).all(-1)
    covariance[good] = torch.cholesky_inverse(factor[good])
    singular = ~good & finite  # rounding may push clamped eigenvalues below zero again
    covariance[singular] = torch.linalg.pinv(precision[singular], hermitian=True)
    return covariance
