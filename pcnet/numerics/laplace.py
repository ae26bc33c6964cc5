"""Laplace posteriors: precisions, covariances and their regularisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Posterior(NamedTuple):
    """A posterior precision (B, n, n), the log-determinant of its inverse (B,), and where it was mended (B,)."""

    precision: Tensor
    log_det_covariance: Tensor
    regularised: Tensor | None


def posterior(curvature: Tensor) -> Posterior:
    """The Laplace posterior of a curvature, mended where it is not positive definite.

    Mending lifts eigenvalues to max(1e-9, 1e-12·|largest|), or to ten rounding errors of a coarser dtype.
    """
    factor, info = torch.linalg.cholesky_ex(curvature)
    log_det = -2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    if not info.any():
        return Posterior(curvature, log_det, None)
    regularised = (info != 0) & torch.isfinite(curvature).all(-1).all(-1)
    if not regularised.any():  # not finite: left as it is, for the run to report by name
        return Posterior(curvature, log_det, None)
    symmetric = 0.5 * (curvature[regularised] + curvature[regularised].mT)
    values, vectors = torch.linalg.eigh(symmetric)
    relative = max(1e-12, 10 * torch.finfo(values.dtype).eps)
    floor = (relative * values.abs().amax(-1, keepdim=True)).clamp_min(1e-9)
    lifted = torch.maximum(values, floor)
    curvature, log_det = curvature.clone(), log_det.clone()
    curvature[regularised] = (vectors * lifted[:, None, :]) @ vectors.mT
    log_det[regularised] = -lifted.log().sum(-1)
    return Posterior(curvature, log_det, regularised)


def deviations(covariance: Tensor) -> Tensor:
    """Standard deviations (B, n) of a covariance (B, n, n)."""
    return covariance.diagonal(dim1=-2, dim2=-1).sqrt()


def covariance_of(precision: Tensor) -> Tensor:
    """Σ of a posterior precision (B, n, n)."""
    factor, info = torch.linalg.cholesky_ex(precision)
    if not info.any():
        return torch.cholesky_inverse(factor)
    covariance = torch.full_like(precision, torch.nan)
    good, finite = info == 0, torch.isfinite(precision).all(-1).all(-1)
    covariance[good] = torch.cholesky_inverse(factor[good])
    flat = ~good & finite  # clamped eigenvalues, which rounding may have pushed below zero again
    covariance[flat] = torch.linalg.pinv(precision[flat], hermitian=True)
    return covariance
