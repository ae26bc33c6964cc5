"""Noise over time, for beliefs that are carried: white, lasting, or made of shocks, each in the form of a bell."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.numerics import kalman as carrying
from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.kernels import Kernel, Matern, SquaredExponential, lengthscale_of

SPACING = 1.2
"""The time between two shocks, in widths of the bell: by not having more of them 0.2 % of the variance is lost."""
REST = 1e-3
"""The share of the variance left to what a handful of shocks cannot say, in the mean over their distance."""


class Noise(NamedTuple):
    """A noise of so much variance in each channel (B, dim), with its autocorrelation, laid out for the batch.

    levels: how many log-variances there are to be learned: one for each channel, one for all, or none. learned_width:
    whether the width of the kernel is to be learned as well.
    """

    variance: Tensor
    kernel: Kernel
    levels: int
    learned_width: bool = False


class NoiseModel(ABC):
    """How a noise of unit variance goes on in time: as so many `numbers` in each channel, and what is new each time.

    width: its time scale, (B,). phase: how far its numbers are on their way, (B,), between 0 and 1 or so.
    """

    numbers: int = 0

    def __init__(self, width: Tensor) -> None:
        self.width = width

    def with_lengthscale(self, width: Tensor) -> NoiseModel:
        """The same with another time scale."""
        return type(self)(width)

    def lengthscale_of(self, kernel: Kernel) -> Tensor:
        """The time scale that a kernel has here."""
        return lengthscale_of(kernel)

    def fresh(self, elapsed: Tensor) -> Tensor:
        """The variance of what is another at each observation, one every `elapsed` (B,); (B,)."""
        return torch.zeros_like(elapsed)

    def rest(self, elapsed: Tensor) -> Tensor:
        """The variance at each observation of what its numbers cannot say, (B,)."""
        return torch.zeros_like(elapsed)

    @abstractmethod
    def loads(self, phase: Tensor) -> Tensor:
        """What each of the numbers, of unit variance, contributes now; (B, numbers)."""

    def go_on(
        self, carried: GaussianWithSensitivities, place: slice, noise: Tensor, phase: Tensor, elapsed: Tensor
    ) -> tuple[GaussianWithSensitivities, Tensor]:
        """The numbers at a `place` of what is carried after some time, and their phase; noise: (B, 1 + s, channels)."""
        return carried, phase


class WhiteEquivalent(NoiseModel):
    """White noise that is as strong at low frequencies as noise of the duration ∫κ(h)dh: its width is that."""

    def lengthscale_of(self, kernel: Kernel) -> Tensor:
        return kernel.correlation_integral

    def fresh(self, elapsed: Tensor) -> Tensor:
        return (self.width / elapsed).clamp_min(1.0)

    def loads(self, phase: Tensor) -> Tensor:
        return phase.new_zeros(len(phase), 0)


class OrnsteinUhlenbeck(NoiseModel):
    """κ(h) = exp(−|h|/width): a number in each channel that decays, and is fed."""

    numbers = 1

    def loads(self, phase: Tensor) -> Tensor:
        return torch.ones_like(phase)[:, None]

    def go_on(
        self, carried: GaussianWithSensitivities, place: slice, noise: Tensor, phase: Tensor, elapsed: Tensor
    ) -> tuple[GaussianWithSensitivities, Tensor]:
        keep = (-elapsed / self.width).exp()
        return carrying.relax(carried, place, keep, (1 - keep**2)[:, None, None] * noise), phase


class GaussianPulses(NoiseModel):
    """κ(h) = exp(−h²/2width²): a handful of shocks, the oldest first, `SPACING` bells apart.

    phase: how far time is past the middle one of them, in distances between two.
    """

    def __init__(self, width: Tensor, n_pulses: int) -> None:
        super().__init__(width)
        self.numbers = n_pulses

    def with_lengthscale(self, width: Tensor) -> GaussianPulses:
        return GaussianPulses(width, self.numbers)

    @property
    def spacing(self) -> Tensor:
        """The time between two shocks, (B,); a bell is narrower than the autocorrelation of a sum of them, by √2."""
        return SPACING * self.width / math.sqrt(2)

    def rest(self, elapsed: Tensor) -> Tensor:
        return (REST * self.spacing / elapsed).clamp_max(0.2)

    def loads(self, phase: Tensor) -> Tensor:
        place = torch.arange(self.numbers, dtype=phase.dtype, device=phase.device) - (self.numbers - 1) / 2
        height = math.sqrt(SPACING / math.sqrt(math.pi))
        return height * (-0.5 * (SPACING * (place - phase[:, None])) ** 2).exp()

    def go_on(
        self, carried: GaussianWithSensitivities, place: slice, noise: Tensor, phase: Tensor, elapsed: Tensor
    ) -> tuple[GaussianWithSensitivities, Tensor]:
        """Drop the oldest shocks for new ones, where time is nearer to the next one than to the middle."""
        phase = phase + elapsed / self.spacing
        if not bool((phase >= 0.5).any()):
            return carried, phase
        channels = noise.shape[-1]
        forward = torch.arange(carried.mean.shape[1])
        forward[place] = forward[place].roll(-channels)
        begin = torch.arange(place.stop - channels, place.stop)
        for _ in range(self.numbers):
            due = phase >= 0.5
            if not bool(due.any()):
                break
            carried = carrying.renew(carried, forward, begin, noise, due)
            phase = torch.where(due, phase - 1, phase)
        return carried, phase.clamp_max(0.5)  # after a long pause all of them are new


def colour_of(noise: Noise, elapsed: Tensor, n_pulses: int) -> NoiseModel:
    """The colour of a noise, for as many batch elements as `elapsed` (B,) has.

    Only squared exponentials have a bell for a shock. Where shocks are closer than observations, all of them are new at
    each one: that is white noise.
    """
    kernel = noise.kernel
    if n_pulses and isinstance(kernel, SquaredExponential):
        return GaussianPulses(kernel.lengthscale.to(elapsed).expand_as(elapsed), n_pulses)
    if isinstance(kernel, Matern) and bool((kernel.smoothness == 0.5).all()):
        return OrnsteinUhlenbeck(kernel.lengthscale.to(elapsed).expand_as(elapsed))
    return WhiteEquivalent(kernel.correlation_integral.to(elapsed).expand_as(elapsed))
