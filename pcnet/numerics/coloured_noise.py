"""Coloured noise for Kalman states: a noise and its motion, carried in whitened generalised coordinates.

A stationary noise ω with derivatives ω̃ = (ω, ω′, …) of covariance σ²S is carried as h = L⁻¹ω̃ with S = LLᵀ, so that h
has the covariance σ²I and its first element is ω itself. h follows dh = Fh dt + √(2γ) e dW with F antisymmetric and
tridiagonal but for −γ in its last element: F[k, k+1] = −F[k+1, k] = b_k = L[k+1, k+1]/L[k, k]. γ gives ω the spectral
density of the kernel at zero frequency. For a Matérn kernel of smoothness n − ½ this is the process itself, for
smoother kernels one with the same variances of n orders.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.numerics.generalised import temporal_covariance
from pcnet.numerics.kernels import Kernel, Matern, White, lengthscale_of
from pcnet.numerics.transitions import DOUBLINGS, exponential_minus_one

REST, REST_OF_EXACT = 8.5e-4, 1e-5
"""Share of an observation noise, per correlation time in intervals, that is left to white noise beside its coordinates:
of a noise that these approximate, and of one that they are."""
POINTS = ((-0.7745966692414834, 5 / 9), (0.0, 8 / 9), (0.7745966692414834, 5 / 9))
"""Gauss–Legendre points and weights on (−1, 1)."""


class NoiseSpec(NamedTuple):
    """What is known of a noise before a run."""

    kernel: Kernel  # its autocorrelation, expanded to the batch
    channels: int
    levels: int  # number of learned log-variances: one per channel, one for all, or none
    learned_lengthscale: bool = False  # whether the lengthscale of the kernel is learned too


class Noise(NamedTuple):
    """A noise during a run; see `NoiseSpec`."""

    variance: Tensor  # (B, channels)
    kernel: Kernel  # its present autocorrelation
    levels: int
    learned_lengthscale: bool = False
    first_guess: Tensor | None = None  # of the variance, (B, channels); None for the variance itself


class NoiseTransition(NamedTuple):
    """What becomes of the coordinates of a noise of unit variance in some time, and after half of it."""

    matrix: Tensor  # Φ, (B, n, n)
    covariance: Tensor  # Q, (B, n, n)
    half: Tensor  # Φ of half the time, (B, n, n)


class NoiseModel:
    """The coordinates of one channel of a noise of unit variance; none for white noise.

    drift: F, (B, n, n), for the lengthscale (B,) that it was made with. is_exact: whether the noise has no further
    orders of motion.
    """

    def __init__(self, drift: Tensor, lengthscale: Tensor, is_exact: bool = False) -> None:
        self.drift, self.lengthscale, self.is_exact = drift, lengthscale, is_exact

    @property
    def n_latents(self) -> int:
        """n, the number of coordinates."""
        return self.drift.shape[-1]

    @property
    def is_white(self) -> bool:
        return self.n_latents == 0

    def with_lengthscale(self, lengthscale: Tensor) -> NoiseModel:
        """The same noise with another lengthscale (B,)."""
        return NoiseModel(self.drift * (self.lengthscale / lengthscale)[:, None, None], lengthscale, self.is_exact)

    def rest(self, dt: Tensor) -> Tensor:
        """White variance that an observation needs beside the coordinates, relative to the scale of the noise, (B,)."""
        share = REST_OF_EXACT if self.is_exact else REST
        return torch.zeros_like(dt) if self.is_white else (share * self.lengthscale / dt).clamp_max(0.2)

    def transition(self, dt: Tensor) -> NoiseTransition:
        """Φ = exp(FΔ) and Q = ∫exp(Fs) B exp(Fᵀs) ds, exact for any Δ = dt (B,)."""
        drift = self.drift.double() * dt.double()[:, None, None]
        eye = torch.eye(self.n_latents, dtype=drift.dtype, device=drift.device)
        start = torch.zeros_like(drift)
        source = (-2 * drift[:, -1:, -1:]).sqrt() * eye[:, -1:]  # √(2γΔ) e, (B, n, 1)
        for place, weight in POINTS:
            moved = _small_exponential(drift, 0.5 * (place + 1) * 0.5**DOUBLINGS) @ source
            start = start + (0.5 * weight * 0.5**DOUBLINGS) * moved @ moved.mT
        covariance, grown = start, exponential_minus_one(drift * 0.5**DOUBLINGS)[1]
        for _ in range(DOUBLINGS):
            covariance = covariance + (eye + grown) @ covariance @ (eye + grown).mT
            grown = 2 * grown + grown @ grown
        half, whole = exponential_minus_one(drift)
        found = NoiseTransition(eye + whole, 0.5 * (covariance + covariance.mT), eye + half)
        return NoiseTransition(*(each.to(self.drift) for each in found))


def _small_exponential(matrix: Tensor, scale: float) -> Tensor:
    """exp(scale·M) of matrices (B, n, n) whose norm is far below 1/scale."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    power, total = scale * matrix, eye
    term = eye
    for k in range(1, 7):
        term = term @ power / k
        total = total + term
    return total


def noise_model(spec: NoiseSpec, like: Tensor, orders: int) -> NoiseModel:
    """The model of a noise, for as many batch elements as `like` (B,) has; orders: of motion, of smooth kernels."""
    kernel, batch = spec.kernel, len(like)
    if isinstance(kernel, White):
        return NoiseModel(like.new_zeros(batch, 0, 0), torch.ones_like(like))
    n = _coordinates(kernel, orders)
    scale = temporal_covariance(kernel, n).double()
    factor, info = torch.linalg.cholesky_ex(scale)
    if bool((info != 0).any()) or not bool(torch.isfinite(factor).all()):
        raise SettingError(
            f"noise of {kernel!r} is not smooth enough for {n} coordinates; give the Kalman state orders={n} or fewer"
        )
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    couplings = diagonal[..., 1:] / diagonal[..., :-1]
    damping = 2 / kernel.correlation_integral.double()
    for k in range(n - 1):
        damping = couplings[..., k] ** 2 / damping
    drift = couplings.new_zeros(*couplings.shape[:-1], n, n)
    for k in range(n - 1):
        drift[..., k, k + 1], drift[..., k + 1, k] = couplings[..., k], -couplings[..., k]
    drift[..., -1, -1] = -damping
    lengthscale = lengthscale_of(kernel).to(like).expand(batch)
    is_exact = isinstance(kernel, Matern)
    return NoiseModel(drift.to(like).expand(batch, n, n).contiguous(), lengthscale.contiguous(), is_exact)


def _coordinates(kernel: Kernel, orders: int) -> int:
    """The number of coordinates of a noise: as many as it has orders of motion, but at most orders − 1."""
    if not isinstance(kernel, Matern):
        return orders - 1
    twice = 2 * kernel.smoothness
    if bool((twice != twice.reshape(-1)[0]).any()) or float(twice.reshape(-1)[0]) % 2 != 1:
        raise SettingError(
            f"noise of {kernel!r} cannot be carried by a Kalman state; use the smoothness 1/2, 3/2, 5/2, …, the same "
            "for the whole batch, or a SquaredExponential kernel"
        )
    return int((float(twice.reshape(-1)[0]) + 1) / 2)
