"""Noise over time, for beliefs that are carried: as white noise, or as shocks that each act in the form of a bell."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.kernels import Kernel, SquaredExponential

SPACING = 1.2
"""The time between two shocks, in widths of the bell: by not having more of them 0.2 % of the variance is lost."""
REST = 1e-3
"""The share of the variance left to what a handful of shocks cannot say, in the mean over their distance."""


class Noise(NamedTuple):
    """A noise of so much variance in each channel (B, dim), with its autocorrelation, laid out for the batch.

    levels: how many log-variances there are to be learned: one for each channel, one for all, or none.
    """

    variance: Tensor
    kernel: Kernel
    levels: int


class Colour(NamedTuple):
    """How a noise of unit variance goes on in time: white, or smooth with `spacing` (B,) between its shocks.

    duration: ∫κ(h)dh (B,), see `Kernel`; 0 for noise that is another at every observation.
    """

    duration: Tensor
    spacing: Tensor | None

    def strength(self, elapsed: Tensor) -> Tensor:
        """How many times its variance has white noise that is as strong, with one value in each `elapsed` (B,)."""
        return (self.duration / elapsed).clamp_min(1.0)

    def rest(self, elapsed: Tensor) -> Tensor:
        """The variance at each observation of what shocks cannot say, (B,)."""
        assert self.spacing is not None
        return (REST * self.spacing / elapsed).clamp_max(0.2)

    def bells(self, phase: Tensor, shocks: int, elapsed: Tensor) -> Tensor:
        """What each shock of unit variance, the oldest first, contributes now; (B, shocks)."""
        place = torch.arange(shocks, dtype=phase.dtype, device=phase.device) - (shocks - 1) / 2
        height = ((1 - self.rest(elapsed)) * SPACING / math.sqrt(math.pi)).sqrt()
        return height[:, None] * (-0.5 * (SPACING * (place - phase[:, None])) ** 2).exp()


def colour_of(kernel: Kernel, elapsed: Tensor, shocks: int) -> Colour:
    """The colour of noise of this kernel, with settings laid out for the batch, if it is seen every `elapsed` (B,).

    Only squared exponentials are smooth noise with a bell for a shock; and only where shocks are no closer than
    observations they are worth having.
    """
    duration = kernel.duration.to(elapsed).expand_as(elapsed)
    if shocks and isinstance(kernel, SquaredExponential):
        spacing = (SPACING * kernel.width / math.sqrt(2)).to(elapsed).expand_as(elapsed)
        if bool((spacing >= elapsed).all()):
            return Colour(duration, spacing)
    return Colour(duration, None)
