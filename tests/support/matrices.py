"""Matrices with given eigenvalues, and determinants in many digits."""

import mpmath
import numpy as np


def rotated(values: list[float]) -> np.ndarray:
    """A symmetric matrix with these eigenvalues."""
    q, _ = np.linalg.qr(np.random.default_rng(len(values)).standard_normal((len(values), len(values))))
    return (q * np.array(values)) @ q.T


def log_det(matrix: np.ndarray) -> float:
    """log|det| in 60 digits."""
    with mpmath.workdps(60):
        return float(mpmath.log(abs(mpmath.det(mpmath.matrix(matrix.tolist())))))
