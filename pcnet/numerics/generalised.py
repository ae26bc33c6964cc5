"""Generalised coordinates: shifting orders, embedding samples, and the covariance of smooth noise.

A generalised variable is a tensor (..., orders, dim): value, velocity, acceleration, and so on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.numerics.kernels import Kernel


def shift_matrix(orders: int, dim: int) -> Tensor:
    """D, which moves every order up by one: (Dx̃)_i = x̃_{i+1}, 0 beyond the last; (orders·dim, orders·dim)."""
    return torch.eye(orders * dim, dtype=torch.float64).roll(dim, 1).triu(1)


def taylor_shift(time: Tensor, orders: int) -> Tensor:
    """exp(D t) for one channel: where a generalised variable is a time t later; (...) → (..., orders, orders)."""
    matrix = time.new_zeros(*time.shape, orders, orders)
    for i in range(orders):
        for j in range(i, orders):
            matrix[..., i, j] = time ** (j - i) / math.factorial(j - i)
    return matrix


def temporal_covariance(kernel: Kernel, orders: int) -> Tensor:
    """Covariance among a smooth noise and its derivatives, S[n,m] = (−1)^n κ^(n+m)(0); (..., orders, orders)."""
    slopes = [kernel.derivative_at_zero(n) for n in range(2 * orders - 1)]
    rows = [torch.stack([(-1) ** n * slopes[n + m] for m in range(orders)], -1) for n in range(orders)]
    return torch.stack(rows, -2)


def temporal_precision(kernel: Kernel, orders: int, ridge: float = 0.0) -> Tensor:
    """S⁻¹ of `temporal_covariance`; (..., orders, orders).

    `ridge` times the mean variance is added to the diagonal of S before it is inverted. S is graded over
    many powers of the kernel width, so it is scaled to unit diagonal while it is inverted.
    """
    scaled, scale = _standardised(kernel, orders, ridge)
    inverse: Tensor = torch.linalg.inv(scaled)
    return inverse * scale[..., :, None] * scale[..., None, :]


def check_smoothness(kernel: Kernel, orders: int, ridge: float = 0.0) -> None:
    """Refuse, in words, a kernel whose noise does not have so many orders of motion."""
    for order in range(orders):
        scaled, _ = _standardised(kernel, order + 1, ridge)
        few = f"{order} order{'' if order == 1 else 's'} of motion, not {orders}"
        if not bool(torch.isfinite(scaled).all()):
            raise SettingError(
                f"noise of {kernel!r} has {few}: the variance of its derivative {order}, ±κ^({2 * order})(0), is not "
                "finite and positive. Use a smoother kernel or fewer orders"
            )
        smallest = torch.linalg.eigvalsh(scaled)[..., 0]
        if not bool((smallest > orders * torch.finfo(scaled.dtype).eps).all()):
            raise SettingError(
                f"noise of {kernel!r} has {few}: the covariance of the first {order + 1} is not positive definite, "
                "so that one follows from the others. Use another kernel or fewer orders"
            )


def _standardised(kernel: Kernel, orders: int, ridge: float) -> tuple[Tensor, Tensor]:
    """S with its ridge, scaled to unit diagonal, and what it was scaled by; (..., orders, orders), (..., orders)."""
    covariance = temporal_covariance(kernel, orders)
    if ridge:
        mean_variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        covariance = covariance + ridge * mean_variance * torch.eye(
            orders, dtype=covariance.dtype, device=covariance.device
        )
    scale = covariance.diagonal(dim1=-2, dim2=-1).rsqrt()
    return covariance * scale[..., :, None] * scale[..., None, :], scale


def backward_differences(y: Tensor, previous: Tensor, dt: Tensor) -> Tensor:
    """ỹ_0 = y, ỹ_i = (ỹ_{i−1} − previous ỹ_{i−1}) / dt; y (..., dim), previous and ỹ (..., orders, dim)."""
    rows = [y]
    for i in range(1, previous.shape[-2]):
        rows.append((rows[-1] - previous[..., i - 1, :]) / dt)
    return torch.stack(rows, -2)


def taylor_operator(ages: Tensor, orders: int) -> Tensor:
    """What makes value and derivatives, as they are now, of past samples: (..., window) → (..., orders, window).

    A polynomial of `orders` terms is fitted to the samples by least squares, of fewer terms where there are fewer
    samples. ages: how long each sample is ago, infinite where there is none.
    """
    there = torch.isfinite(ages)
    scale = torch.where(there, ages, 0.0).amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    place = torch.where(there, -ages / scale, 0.0)
    terms = torch.arange(orders, device=ages.device)
    possible = terms < there.sum(-1, keepdim=True)
    factorials = ages.new_tensor([math.factorial(j) for j in range(orders)])
    powers = place[..., :, None] ** terms / factorials * there[..., :, None] * possible[..., None, :]
    inverse: Tensor = torch.linalg.pinv(powers)
    return inverse * scale[..., None] ** -terms[:, None].to(ages)


def embed(samples: Tensor, orders: int, dt: float = 1.0) -> Tensor:
    """Generalised observations at every sample, looking ahead; (..., T, dim) → (..., T, orders, dim).

    Each is a `taylor_embedding`, so that it looks ahead by about half of its orders. For sensory nodes with
    derivatives="given", flatten the last two dimensions.
    """
    return torch.stack([taylor_embedding(samples, orders, t, dt) for t in range(samples.shape[-2])], -3)


def taylor_embedding(samples: Tensor, orders: int, at: float, dt: float = 1.0) -> Tensor:
    """Derivatives at time `at` (in samples, from 0) that make a Taylor series pass through `orders` nearby samples.

    The window is centred on `at`, so the estimate looks ahead by about half of it; beyond either end of the data the
    last sample is held. samples (..., time, dim) → (..., orders, dim).
    """
    length = samples.shape[-2]
    if orders > length:
        raise SettingError(f"an embedding of {orders} orders needs at least {orders} samples; there are {length}")
    first = math.trunc(at + 1 - (orders + 1) / 2)  # rounded towards zero: at the start it looks further ahead
    window = range(first, first + orders)
    powers = torch.tensor(
        [[(s - at) ** j / math.factorial(j) for j in range(orders)] for s in window], dtype=torch.float64
    )
    units = torch.tensor([dt**-j for j in range(orders)], dtype=torch.float64)
    operator: Tensor = (torch.linalg.inv(powers) * units[:, None]).to(samples)
    return operator @ samples[..., [min(max(s, 0), length - 1) for s in window], :]
