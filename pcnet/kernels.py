"""Autocorrelation functions of smooth noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pcnet.settings import Positive, settings


class Kernel(ABC):
    """The autocorrelation κ(h) of a stationary noise, with κ(0) = 1."""

    @abstractmethod
    def derivative_at_zero(self, n: int) -> Tensor:
        """κ^(n)(0); one value for each batch element of the kernel's settings."""

    @abstractmethod
    def correlation(self, h: Tensor) -> Tensor:
        """κ(h) at lags h."""


@settings
class SquaredExponential(Kernel):
    """κ(h) = exp(−h²/2w²), with the width w in time units."""

    width: Positive

    def derivative_at_zero(self, n: int) -> Tensor:
        if n % 2:
            return self.width * 0.0
        half = n // 2
        factor: float = (-1.0) ** half * math.factorial(n) / (math.factorial(half) * 2**half)
        return torch.pow(self.width, -n) * float(factor)

    def correlation(self, h: Tensor) -> Tensor:
        return (-(h**2) / (2 * self.width**2)).exp()
