"""Models of coloured noise for Kalman states: each adds latent elements to the augmented state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics import kalman
from pcnet.numerics.branching import holds
from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.kernels import Kernel, Matern, SquaredExponential, lengthscale_of

SPACING = 1.2  # distance of two pulses in widths of a pulse: leaves 0.2 % of the variance unexplained
WHITE_REMAINDER = 1e-3  # share of the variance, averaged over a spacing, that the pulse expansion leaves to white noise


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


class NoiseModel(ABC):
    """A stationary noise of unit variance as `n_latents` latent elements per channel plus white noise.

    lengthscale: its time scale, (B,). phase: position of the latents in time, (B,), for models that need one.
    """

    n_latents: int = 0

    def __init__(self, lengthscale: Tensor) -> None:
        self.lengthscale = lengthscale

    def with_lengthscale(self, lengthscale: Tensor) -> NoiseModel:
        """The same model with another time scale."""
        return type(self)(lengthscale)

    def lengthscale_of(self, kernel: Kernel) -> Tensor:
        """The time scale of a kernel, as this model measures it."""
        return lengthscale_of(kernel)

    def white_variance(self, dt: Tensor) -> Tensor:
        """Variance of the part that is independent at each observation, one every dt (B,); (B,)."""
        return torch.zeros_like(dt)

    def unexplained_variance(self, dt: Tensor) -> Tensor:
        """Variance at each observation that the latents cannot express, (B,)."""
        return torch.zeros_like(dt)

    @abstractmethod
    def loadings(self, phase: Tensor) -> Tensor:
        """Contribution of each latent of unit variance to the present value, (B, n_latents)."""

    def predict(
        self, belief: GaussianWithSensitivities, place: slice, noise: Tensor, phase: Tensor, dt: Tensor
    ) -> tuple[GaussianWithSensitivities, Tensor]:
        """Time update of the latents at `place`, and the new phase; noise: variance by source, (B, 1 + s, channels)."""
        return belief, phase


class WhiteEquivalent(NoiseModel):
    """White noise with the spectral density at zero frequency of a kernel: ∫κ(h)dh is its time scale."""

    def lengthscale_of(self, kernel: Kernel) -> Tensor:
        return kernel.correlation_integral

    def white_variance(self, dt: Tensor) -> Tensor:
        return (self.lengthscale / dt).clamp_min(1.0)

    def loadings(self, phase: Tensor) -> Tensor:
        return phase.new_zeros(len(phase), 0)


class OrnsteinUhlenbeck(NoiseModel):
    """Ornstein–Uhlenbeck noise, κ(h) = exp(−|h|/τ): one latent per channel."""

    n_latents = 1

    def loadings(self, phase: Tensor) -> Tensor:
        return torch.ones_like(phase)[:, None]

    def predict(
        self, belief: GaussianWithSensitivities, place: slice, noise: Tensor, phase: Tensor, dt: Tensor
    ) -> tuple[GaussianWithSensitivities, Tensor]:
        factor = (-dt / self.lengthscale).exp()
        return kalman.decay(belief, place, factor, (1 - factor**2)[:, None, None] * noise), phase


class GaussianPulses(NoiseModel):
    """Squared-exponential noise, κ(h) = exp(−h²/2ℓ²), as a sum of Gaussian pulses with random heights.

    The heights are the latents, the oldest pulse first. phase: time since the middle pulse, in spacings.
    """

    def __init__(self, lengthscale: Tensor, n_pulses: int) -> None:
        super().__init__(lengthscale)
        self.n_latents = n_pulses

    def with_lengthscale(self, lengthscale: Tensor) -> GaussianPulses:
        return GaussianPulses(lengthscale, self.n_latents)

    @property
    def spacing(self) -> Tensor:
        """Time between two pulses, (B,). A pulse is narrower than the kernel by √2."""
        return SPACING * self.lengthscale / math.sqrt(2)

    def unexplained_variance(self, dt: Tensor) -> Tensor:
        return (WHITE_REMAINDER * self.spacing / dt).clamp_max(0.2)

    def loadings(self, phase: Tensor) -> Tensor:
        place = torch.arange(self.n_latents, dtype=phase.dtype, device=phase.device) - (self.n_latents - 1) / 2
        height = math.sqrt(SPACING / math.sqrt(math.pi))
        return height * (-0.5 * (SPACING * (place - phase[:, None])) ** 2).exp()

    def predict(
        self, belief: GaussianWithSensitivities, place: slice, noise: Tensor, phase: Tensor, dt: Tensor
    ) -> tuple[GaussianWithSensitivities, Tensor]:
        """Replace the oldest pulses by new ones, where time is nearer to the next pulse than to the middle one."""
        phase = phase + dt / self.spacing
        if not holds((phase >= 0.5).any()):
            return belief, phase
        channels = noise.shape[-1]
        order = torch.arange(belief.mean.shape[1])
        order[place] = order[place].roll(-channels)
        fresh = torch.arange(place.stop - channels, place.stop)
        for _ in range(self.n_latents):
            due = phase >= 0.5
            if not holds(due.any()):
                break
            belief = kalman.shift_in(belief, order, fresh, noise, due)
            phase = torch.where(due, phase - 1, phase)
        return belief, phase.clamp_max(0.5)  # after a long gap all pulses are new


def noise_model(spec: NoiseSpec, like: Tensor, n_pulses: int) -> NoiseModel:
    """The model of a noise, for as many batch elements as `like` (B,) has.

    Squared-exponential kernels become pulses (n_pulses > 0), Matérn kernels of smoothness ½ Ornstein–Uhlenbeck noise;
    any other kernel becomes white noise of the same spectral density at zero frequency.
    """
    kernel = spec.kernel
    if n_pulses and isinstance(kernel, SquaredExponential):
        return GaussianPulses(kernel.lengthscale.to(like).expand_as(like), n_pulses)
    if isinstance(kernel, Matern) and bool((kernel.smoothness == 0.5).all()):
        return OrnsteinUhlenbeck(kernel.lengthscale.to(like).expand_as(like))
    return WhiteEquivalent(kernel.correlation_integral.to(like).expand_as(like))
