"""Functions of a generalised state and parameters, with the derivatives that inference needs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

from torch import Tensor

from pcnet.functions.linearisation import Linearisation

PlainFunction = Callable[[Tensor, Tensor], Tensor]
"""A Python function of (state, parameters), batched over leading dimensions."""


class Function(ABC):
    """A flow or mapping f(x, θ) and its generalised form f̃ = (f(x), J x', J x'', …) with J = ∂f/∂x.

    Shapes: x̃ (B, orders, dim), θ (B, p), f̃ and its weights ξ (B, rows, out).
    """

    parameters: int | None = None  # number of parameters; None if unknown
    takes_causes: bool = False  # whether x is the concatenation of a state and the causes that drive it
    takes_time: bool = False  # whether x is that of a state, its causes (there may be none) and the time
    is_affine: bool = False  # whether it is known to be affine in x and to have no parameters

    @property
    def identity_key(self) -> Hashable:
        """Key that is equal for two functions only if they are the same function; the object itself by default."""
        return self

    @abstractmethod
    def __call__(self, x: Tensor, parameters: Tensor) -> Tensor:
        """f(x, θ), batched over leading dimensions."""

    @abstractmethod
    def linearise(self, x: Tensor, parameters: Tensor, rows: int) -> Linearisation:
        """The first `rows` orders of f̃, and ∂f̃/∂x̃."""

    @abstractmethod
    def contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        """First block column (B, rows, dim, dim) of Σ ξ ∂²f̃/∂x̃²; None if f is linear in x.

        f̃ is linear in all orders but the value, so the first block row is the transpose, and all other blocks are 0.
        """

    @abstractmethod
    def parameter_slope(self, x: Tensor, parameters: Tensor, rows: int) -> Tensor:
        """∂f̃/∂θ, (B, rows, out, p)."""

    @abstractmethod
    def parameter_contracted_hessian(self, x: Tensor, parameters: Tensor, weights: Tensor) -> Tensor | None:
        """Σ ξ ∂²f̃/∂θ², (B, p, p); None if f is linear in θ."""


def subtract_contracted_hessian(curvature: Tensor, contracted_hessian: Tensor) -> Tensor:
    """A curvature (B, n, n) minus Σ ξ ∂²f̃/∂x̃², given by its first block column (B, rows, dim, dim)."""
    batch, n, _ = curvature.shape
    rows, dim = contracted_hessian.shape[1:3]
    blocks = curvature.clone().view(batch, n // dim, dim, n // dim, dim)
    blocks[:, 0, :, :rows] -= contracted_hessian.transpose(1, 2)
    blocks[:, 1:rows, :, 0] -= contracted_hessian[:, 1:]
    return blocks.view(batch, n, n)
