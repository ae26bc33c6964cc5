"""Autocorrelation functions of stationary noise."""

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from pydantic import SkipValidation
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.settings import Positive, number, settings


class Kernel(ABC):
    """Autocorrelation κ(h) of a stationary noise, with κ(0) = 1. Lags and lengthscales are in time units."""

    @abstractmethod
    def derivative_at_zero(self, n: int) -> Tensor:
        """κ^(n)(0), with the batch shape of the settings; NaN if the derivative does not exist."""

    @abstractmethod
    def correlation(self, h: Tensor) -> Tensor:
        """κ(h) at lags h."""

    @property
    def correlation_integral(self) -> Tensor:
        """∫κ(h)dh: the spectral density at frequency 0 of noise with unit variance. Here by quadrature in log h."""
        u = torch.linspace(-16, 16, 8001, dtype=torch.float64)
        return 2 * (self.correlation(u.exp()) * u.exp()).sum(-1) * (u[1] - u[0])

    def with_lengthscale(self, lengthscale: Tensor) -> Self:
        """A copy with another lengthscale."""
        other = copy.copy(self)
        object.__setattr__(other, "lengthscale", lengthscale)
        return other

    def __repr__(self) -> str:
        fields: tuple[Any, ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        return f"{type(self).__name__}({', '.join(_field(field.name, getattr(self, field.name)) for field in fields)})"


@settings
class White(Kernel):
    """White noise, κ(h) = 1 at h = 0 and 0 elsewhere; held constant between observations (zero-order hold)."""

    def derivative_at_zero(self, n: int) -> Tensor:
        return number(1.0 if n == 0 else math.nan)

    def correlation(self, h: Tensor) -> Tensor:
        return (h == 0).to(h)

    @property
    def correlation_integral(self) -> Tensor:
        return number(0.0)


@settings
class SquaredExponential(Kernel):
    """κ(h) = exp(−h²/2ℓ²) with the lengthscale ℓ."""

    lengthscale: Positive

    def derivative_at_zero(self, n: int) -> Tensor:
        if n % 2:
            return self.lengthscale * 0.0
        half = n // 2
        factor: float = (-1.0) ** half * math.factorial(n) / (math.factorial(half) * 2**half)
        return torch.pow(self.lengthscale, -n) * float(factor)

    def correlation(self, h: Tensor) -> Tensor:
        return (-(h**2) / (2 * self.lengthscale**2)).exp()

    @property
    def correlation_integral(self) -> Tensor:
        return self.lengthscale * math.sqrt(2 * math.pi)


@settings
class Matern(Kernel):
    """κ(h) = 2^(1−ν)/Γ(ν) z^ν K_ν(z) with z = √(2ν)|h|/ℓ, lengthscale ℓ and smoothness ν.

    The noise has ⌈ν⌉ orders of motion: two for ν = 3/2, three for 5/2. ν → ∞ is `SquaredExponential`.
    """

    lengthscale: Positive
    smoothness: Positive

    def derivative_at_zero(self, n: int) -> Tensor:
        """κ^(2k)(0) = (−ν/ℓ²)^k Π_i (2i − 1)/(ν − i), i = 1 … k, for k < ν: moments of a Student t spectrum."""
        nu, half = self.smoothness, n // 2
        if n % 2:
            return torch.where(n < 2 * nu, self.lengthscale * 0.0, math.nan)
        value = (-nu / self.lengthscale**2) ** half
        for i in range(1, half + 1):
            value = value * (2 * i - 1) / (nu - i)
        return torch.where(half < nu, value, math.nan)

    def correlation(self, h: Tensor) -> Tensor:
        """E exp(−h²/2ℓ²u) over u ~ Gamma(ν, ν), by the trapezoidal rule in log u, accurate to rounding."""
        squared, nu = (h / self.lengthscale)[..., None] ** 2, self.smoothness[..., None]
        low, high = -(40 / nu + 9 / nu.sqrt()), 9 / nu.sqrt() + (1 + 40 / nu).log()  # the density beyond is below e⁻⁴⁰
        log_u = low + (high - low) * torch.linspace(0, 1, 1001, dtype=nu.dtype, device=nu.device)
        log_density = nu * (nu.log() + log_u - log_u.exp()) - torch.lgamma(nu)
        values = (log_density - 0.5 * squared * (-log_u).exp()).exp()
        step: Tensor = (high - low)[..., 0] / 1000
        return values.sum(-1) * step

    @property
    def correlation_integral(self) -> Tensor:
        """ℓ √(2π/ν) Γ(ν + ½)/Γ(ν)."""
        nu = self.smoothness
        ratio = (torch.lgamma(nu + 0.5) - torch.lgamma(nu)).exp()
        return self.lengthscale * (2 * math.pi / nu).sqrt() * ratio


@settings
class Autocorrelation(Kernel):
    """κ(h) = function(h/ℓ) with a lengthscale ℓ.

    Derivatives at zero are found by automatic differentiation. They are compared with those next to zero, because
    autograd does not see kinks such as that of |h|. For more than six orders write a `Kernel` instead.

    Args:
        function: An even function of one tensor with value 1 at 0, made of torch operations.
        lengthscale: ℓ, 1 by default.
    """

    function: SkipValidation[Callable[[Tensor], Tensor]]
    lengthscale: Positive = number(1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", torch.empty(0, 3, dtype=torch.float64))
        lags = torch.constant_pad_nd(torch.logspace(-3, 3, 61, dtype=torch.float64), (1, 0))
        before, after = self._call(-lags), self._call(lags)
        if not abs(float(after[0]) - 1) <= 1e-9:
            raise SettingError(f"{self!r} is {float(after[0]):g} at lag 0; an autocorrelation is 1 there")
        if not bool(torch.isfinite(after).all()):
            raise SettingError(f"{self!r} is not finite at lag {float(lags[~torch.isfinite(after)][0]):g}")
        if not torch.allclose(before, after, rtol=1e-6, atol=1e-9):
            lag = float(lags[(before - after).abs().argmax()])
            raise SettingError(f"{self!r} is not even: it differs between the lags {-lag:g} and {lag:g}")

    def _call(self, h: Tensor) -> Tensor:
        try:
            value: Any = self.function(h)
        except Exception as error:
            raise SettingError(f"{self!r} failed on a tensor of lags: {type(error).__name__}: {error}") from error
        if not isinstance(value, Tensor) or value.shape != h.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise SettingError(f"{self!r} must turn lags {tuple(h.shape)} into a tensor of that shape, not {got}")
        return value

    def derivative_at_zero(self, n: int) -> Tensor:
        known: Tensor = self._known  # type: ignore[attr-defined]
        if len(known) <= n:
            known = self._derivatives_near_zero(n + n % 2)
            object.__setattr__(self, "_known", known)
        size = known[:, 0].abs()
        if n % 2:  # zero at 0, and next to it bounded by the next derivative
            exists = (known[n].abs() <= 1e-3 * (size[n - 1] * size[n + 1]).sqrt()).all()
        else:
            exists = ((known[n] - known[n, 0]).abs() <= 1e-3 * size[n]).all()
        value = known[n, 0] * (1 - n % 2)
        return torch.where(exists, value, math.nan) * self.lengthscale**-n

    def correlation(self, h: Tensor) -> Tensor:
        return self._call(h / self.lengthscale)

    def _derivatives_near_zero(self, n: int) -> Tensor:
        """Derivatives 0 … n of the function at 0 and at ± 1e-6 of its width, (n + 1, 3)."""
        curvature = float(derivatives(self._call, torch.zeros(1, dtype=torch.float64), 2)[2, 0])
        beside = 1e-6 / math.sqrt(-curvature) if -math.inf < curvature < 0 else 1e-6
        return derivatives(self._call, torch.tensor([0.0, beside, -beside], dtype=torch.float64), n)


def lengthscale_of(kernel: Kernel) -> Tensor:
    """The lengthscale of a kernel; SettingError if it has none."""
    if not isinstance(kernel, (SquaredExponential, Matern, Autocorrelation)):
        raise SettingError(f"{kernel!r} has no lengthscale")
    return kernel.lengthscale


def derivatives(function: Callable[[Tensor], Tensor], at: Tensor, n: int) -> Tensor:
    """Derivatives 0 … n of an elementwise function at points (m,), (n + 1, m)."""
    with torch.inference_mode(False), torch.enable_grad():
        h = at.clone().requires_grad_()
        found = [function(h)]
        for _ in range(n):
            last = found[-1]
            if last.requires_grad:
                (slope,) = torch.autograd.grad(last.sum(), h, create_graph=True, materialize_grads=True)
            else:
                slope = torch.zeros_like(at)  # polynomials have no graph left
            found.append(slope)
        return torch.stack(found).detach()


def _field(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(getattr(value, "__name__", type(value).__name__))
    return f"{name} {value.item():g}" if value.numel() == 1 else f"{value.numel()} values of {name}"
