"""Functions of generalised states, with the derivatives that inference needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

from torch import Tensor

from pcnet.functions.linearisation import Linearisation

Plain = Callable[[Tensor, Tensor], Tensor]
"""A function of (state, parameters), batched over leading dimensions."""


class Function(ABC):
    """A function of a generalised state and parameters. Shapes: x̃ (B, orders, dim), θ (B, p), ξ (B, rows, out)."""

    parameters: int | None = None
    """How many parameters it takes, if it knows."""
    caused: bool = False
    """Whether x is a state followed by the causes that drive it, in one vector."""

    @property
    def identity_key(self) -> Hashable:
        """What makes two functions the same: it is equal only where they are. Identity, unless more is known."""
        return self

    @abstractmethod
    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        """f(x, θ), batched over leading dimensions."""

    @abstractmethod
    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        """f̃ in its first `rows` orders, and ∂f̃/∂x̃."""

    @abstractmethod
    def contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        """Σ ξ ∂²f̃/∂x̃² as its first block column (B, rows, dim, dim), or None where f is linear in x.

        f̃ is linear in all orders but the value, so that the rest is that column's transpose, and zero.
        """

    @abstractmethod
    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        """∂f̃/∂θ; (B, rows, out, p)."""

    @abstractmethod
    def parameter_contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        """Σ ξ ∂²f̃/∂θ²; (B, p, p), or None where f is linear in θ."""


def subtract_contracted_hessian(curvature: Tensor, contracted_hessian: Tensor) -> Tensor:
    """A curvature (B, n, n) less Σ ξ ∂²f̃/∂x̃², which is given by its first block column (B, rows, dim, dim)."""
    batch, n, _ = curvature.shape
    rows, dim = contracted_hessian.shape[1:3]
    blocks = curvature.clone().view(batch, n // dim, dim, n // dim, dim)
    blocks[:, 0, :, :rows] -= contracted_hessian.transpose(1, 2)
    blocks[:, 1:rows, :, 0] -= contracted_hessian[:, 1:]
    return blocks.view(batch, n, n)
