"""Autocorrelation functions of smooth noise."""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from pydantic import SkipValidation
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.settings import Positive, number, settings


class Kernel(ABC):
    """The autocorrelation κ(h) of a stationary noise, with κ(0) = 1."""

    @abstractmethod
    def derivative_at_zero(self, n: int) -> Tensor:
        """κ^(n)(0), NaN where there is none; one value for each batch element of the kernel's settings."""

    @abstractmethod
    def correlation(self, h: Tensor) -> Tensor:
        """κ(h) at lags h."""

    @property
    def duration(self) -> Tensor:
        """∫κ(h)dh: white noise of that variance in a time unit is as strong at low frequencies; here by quadrature."""
        u = torch.linspace(-16, 16, 8001, dtype=torch.float64)
        return 2 * (self.correlation(u.exp()) * u.exp()).sum(-1) * (u[1] - u[0])

    def with_lengthscale(self, lengthscale: Tensor) -> Kernel:
        """The same with another lengthscale."""
        other = copy.copy(self)
        object.__setattr__(other, "lengthscale", lengthscale)
        return other

    def __repr__(self) -> str:
        fields: tuple[Any, ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        return f"{type(self).__name__}({', '.join(_said(field.name, getattr(self, field.name)) for field in fields)})"


@settings
class White(Kernel):
    """κ(h) = 0 but for h = 0: noise that is another with every observation, and stays what it is until the next."""

    def derivative_at_zero(self, n: int) -> Tensor:
        return number(1.0 if n == 0 else math.nan)

    def correlation(self, h: Tensor) -> Tensor:
        return (h == 0).to(h)

    @property
    def duration(self) -> Tensor:
        return number(0.0)


@settings
class SquaredExponential(Kernel):
    """κ(h) = exp(−h²/2w²), with the lengthscale w in time units."""

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
    def duration(self) -> Tensor:
        return self.lengthscale * math.sqrt(2 * math.pi)


@settings
class Matern(Kernel):
    """κ(h) = 2^(1−ν)/Γ(ν) z^ν K_ν(z) with z = √(2ν)|h|/w: noise of smoothness ν and lengthscale w.

    It has as many orders of motion as ν, rounded up: two for 3/2, three for 5/2. ν → ∞ is `SquaredExponential`.
    """

    lengthscale: Positive
    smoothness: Positive

    def derivative_at_zero(self, n: int) -> Tensor:
        """κ^(2k)(0) = (−ν/w²)^k Π_i (2i − 1)/(ν − i), i = 1 … k, for k < ν: moments of the spectrum, a Student t."""
        nu, half = self.smoothness, n // 2
        if n % 2:
            return torch.where(n < 2 * nu, self.lengthscale * 0.0, math.nan)
        value = (-nu / self.lengthscale**2) ** half
        for i in range(1, half + 1):
            value = value * (2 * i - 1) / (nu - i)
        return torch.where(half < nu, value, math.nan)

    def correlation(self, h: Tensor) -> Tensor:
        """E exp(−h²/2w²u) over u ~ Gamma(ν, ν), by the trapezoidal rule in log u, whose error is that of rounding."""
        squared, nu = (h / self.lengthscale)[..., None] ** 2, self.smoothness[..., None]
        low, high = -(40 / nu + 9 / nu.sqrt()), 9 / nu.sqrt() + (1 + 40 / nu).log()  # beyond, the density is below e⁻⁴⁰
        log_u = low + (high - low) * torch.linspace(0, 1, 1001, dtype=nu.dtype, device=nu.device)
        log_density = nu * (nu.log() + log_u - log_u.exp()) - torch.lgamma(nu)
        values = (log_density - 0.5 * squared * (-log_u).exp()).exp()
        step: Tensor = (high - low)[..., 0] / 1000
        return values.sum(-1) * step

    @property
    def duration(self) -> Tensor:
        """w √(2π/ν) Γ(ν + ½)/Γ(ν)."""
        nu = self.smoothness
        ratio = (torch.lgamma(nu + 0.5) - torch.lgamma(nu)).exp()
        return self.lengthscale * (2 * math.pi / nu).sqrt() * ratio


@settings
class Autocorrelation(Kernel):
    """κ(h) = function(h/w): any even function of one tensor with κ(0) = 1, made of torch operations.

    Its derivatives at zero are found once, by automatic differentiation, and do not count where those beside zero say
    otherwise: autograd sees no kink of |h|. A function worth more than six orders is better a `Kernel` of its own.
    """

    function: SkipValidation[Callable[[Tensor], Tensor]]
    lengthscale: Positive = number(1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", torch.empty(0, 3, dtype=torch.float64))
        lags = torch.cat([torch.zeros(1), torch.logspace(-3, 3, 61)]).double()
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
            known = self._derive(n + n % 2)
            object.__setattr__(self, "_known", known)
        size = known[:, 0].abs()
        if n % 2:  # vanishes at zero, and rises beside it no faster than the next derivative says
            exists = (known[n].abs() <= 1e-3 * (size[n - 1] * size[n + 1]).sqrt()).all()
        else:
            exists = ((known[n] - known[n, 0]).abs() <= 1e-3 * size[n]).all()
        value = known[n, 0] * (1 - n % 2)
        return torch.where(exists, value, math.nan) * self.lengthscale**-n

    def correlation(self, h: Tensor) -> Tensor:
        return self._call(h / self.lengthscale)

    def _derive(self, n: int) -> Tensor:
        """The derivatives 0 … n of the function at zero and a millionth of it to either side; (n + 1, 3)."""
        curvature = float(derivatives(self._call, torch.zeros(1, dtype=torch.float64), 2)[2, 0])
        beside = 1e-6 / math.sqrt(-curvature) if -math.inf < curvature < 0 else 1e-6
        return derivatives(self._call, torch.tensor([0.0, beside, -beside], dtype=torch.float64), n)


def lengthscale_of(kernel: Kernel) -> Tensor:
    """The lengthscale of a kernel that has one."""
    if not isinstance(kernel, (SquaredExponential, Matern, Autocorrelation)):
        raise SettingError(f"{kernel!r} has no lengthscale")
    return kernel.lengthscale


def derivatives(function: Callable[[Tensor], Tensor], at: Tensor, n: int) -> Tensor:
    """The derivatives 0 … n of an elementwise function at points (m,); (n + 1, m)."""
    with torch.inference_mode(False), torch.enable_grad():
        h = at.clone().requires_grad_()
        found = [function(h)]
        for _ in range(n):
            last = found[-1]
            if last.requires_grad:
                (slope,) = torch.autograd.grad(last.sum(), h, create_graph=True, materialize_grads=True)
            else:
                slope = torch.zeros_like(at)  # of a polynomial, after so many derivatives
            found.append(slope)
        return torch.stack(found).detach()


def _said(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(getattr(value, "__name__", type(value).__name__))
    return f"{name} {value.item():g}" if value.numel() == 1 else f"{value.numel()} values of {name}"
