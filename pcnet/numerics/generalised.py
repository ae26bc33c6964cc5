"""Generalised coordinates: shift operators, embeddings of samples, and covariances of smooth noise.

A generalised variable is a tensor (..., orders, dim): value, velocity, acceleration, and so on.
"""

import math

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.numerics.kernels import Kernel


def shift_matrix(orders: int, dim: int) -> Tensor:
    """D with (Dx̃)_i = x̃_{i+1}, and 0 for the last order; (orders·dim, orders·dim)."""
    return torch.eye(orders * dim, dtype=torch.float64).roll(dim, 1).triu(1)


def taylor_shift(time: Tensor, orders: int) -> Tensor:
    """exp(Dt) for one channel, which extrapolates a generalised variable by t; (...) → (..., orders, orders)."""
    matrix = time.new_zeros(*time.shape, orders, orders)
    for i in range(orders):
        for j in range(i, orders):
            matrix[..., i, j] = time ** (j - i) / math.factorial(j - i)
    return matrix


def temporal_covariance(kernel: Kernel, orders: int) -> Tensor:
    """Covariance of a noise and its derivatives, S[n,m] = (−1)^n κ^(n+m)(0); (..., orders, orders)."""
    slopes = [kernel.derivative_at_zero(n) for n in range(2 * orders - 1)]
    rows = [torch.stack([(-1) ** n * slopes[n + m] for m in range(orders)], -1) for n in range(orders)]
    return torch.stack(rows, -2)


def temporal_precision(kernel: Kernel, orders: int, ridge: float = 0.0) -> Tensor:
    """S⁻¹ of `temporal_covariance`, (..., orders, orders).

    `ridge` times the mean variance is added to the diagonal of S. For the inversion S is scaled to unit diagonal,
    because its elements differ by powers of the lengthscale.
    """
    scaled, scale = _standardised(kernel, orders, ridge)
    inverse: Tensor = torch.linalg.inv(scaled)
    return inverse * scale[..., :, None] * scale[..., None, :]


def check_smoothness(kernel: Kernel, orders: int, ridge: float = 0.0) -> None:
    """Raise SettingError if noise with this autocorrelation is not differentiable `orders` − 1 times."""
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
                f"noise of {kernel!r} has {few}: the covariance of the first {order + 1} is not positive definite. "
                "Use another kernel or fewer orders"
            )


def _standardised(kernel: Kernel, orders: int, ridge: float) -> tuple[Tensor, Tensor]:
    """S plus ridge, scaled to unit diagonal (..., orders, orders), and the scale (..., orders)."""
    covariance = temporal_covariance(kernel, orders)
    if ridge:
        mean_variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        eye = torch.eye(orders, dtype=covariance.dtype, device=covariance.device)
        covariance = covariance + ridge * mean_variance * eye
    scale = covariance.diagonal(dim1=-2, dim2=-1).rsqrt()
    return covariance * scale[..., :, None] * scale[..., None, :], scale


def backward_differences(y: Tensor, previous: Tensor, dt: Tensor) -> Tensor:
    """ỹ_0 = y, ỹ_i = (ỹ_{i−1} − previous ỹ_{i−1}) / dt; y (..., dim), previous and ỹ (..., orders, dim)."""
    rows = [y]
    for i in range(1, previous.shape[-2]):
        rows.append((rows[-1] - previous[..., i - 1, :]) / dt)
    return torch.stack(rows, -2)


def taylor_operator(ages: Tensor, orders: int) -> Tensor:
    """Matrix (..., orders, window) that maps past samples to the current value and derivatives, by least squares.

    A Taylor polynomial with `orders` terms is fitted, with fewer terms if there are fewer samples. ages (..., window)
    is the time since each sample, infinite for missing ones.
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
    """`taylor_embedding` at every sample, (..., T, dim) → (..., T, orders, dim).

    It looks ahead by about half of its orders. Flatten the last two dimensions for sensory nodes with
    derivatives="given".
    """
    return torch.stack([taylor_embedding(samples, orders, t, dt) for t in range(samples.shape[-2])], -3)


def taylor_embedding(samples: Tensor, orders: int, at: float, dt: float = 1.0) -> Tensor:
    """Derivatives (..., orders, dim) of the Taylor polynomial through the `orders` samples around a time.

    samples are (..., T, dim), the time `at` is in samples from 0. The window is centred on it, and looks ahead by about
    half of its length. Beyond either end of the data the last sample is repeated.
    """
    length = samples.shape[-2]
    if orders > length:
        raise SettingError(f"an embedding of {orders} orders needs at least {orders} samples; there are {length}")
    first = math.trunc(at + 1 - (orders + 1) / 2)  # rounds towards zero, so that the first windows look further ahead
    window = range(first, first + orders)
    powers = torch.tensor(
        [[(s - at) ** j / math.factorial(j) for j in range(orders)] for s in window], dtype=torch.float64
    )
    units = torch.tensor([dt**-j for j in range(orders)], dtype=torch.float64)
    operator: Tensor = (torch.linalg.inv(powers) * units[:, None]).to(samples)
    return operator @ samples[..., [min(max(s, 0), length - 1) for s in window], :]
