"""Ready-made flows f(x, θ)."""

from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.functions.closed_form import Linear, Quadratic
from pcnet.functions.traced import TracedFunction


class Lorenz(Quadratic):
    """The Lorenz flow ẋ = (σ(x₁ − x₀), x₀(ρ − x₂) − x₁, x₀x₁ − βx₂), with θ = (ρ,)."""

    def __init__(self, sigma: float = 10.0, beta: float = 8.0 / 3.0) -> None:
        self.sigma, self.beta = sigma, beta
        c = torch.zeros(3, 4, 4, 2, dtype=torch.float64)  # [output, z, z, w] with z = (1, x), w = (1, ρ)
        c[0, 0, 2, 0], c[0, 0, 1, 0] = sigma, -sigma
        c[1, 0, 1, 1], c[1, 1, 3, 0], c[1, 0, 2, 0] = 1.0, -1.0, -1.0
        c[2, 1, 2, 0], c[2, 0, 3, 0] = 1.0, -beta
        super().__init__(c)

    def __repr__(self) -> str:
        return "lorenz"


class LotkaVolterra(Quadratic):
    """The generalised Lotka–Volterra flow ẋ = x ⊙ (r + Ax) with antisymmetric A.

    θ holds the elements of A above the diagonal, row by row: (a₁₂, a₁₃, a₂₃) for three species.

    Args:
        species: Number of species, 2 or more.
        growth: Growth rates r, (species,); 0 by default.
    """

    def __init__(self, species: int = 3, growth: Tensor | None = None) -> None:
        if species < 2:
            raise SettingError(f"LotkaVolterra: species must be 2 or more, not {species}")
        self.species = species
        pairs = list(combinations(range(species), 2))
        c = torch.zeros(species, species + 1, species + 1, len(pairs) + 1, dtype=torch.float64)
        for q, (i, j) in enumerate(pairs):
            c[i, 1 + i, 1 + j, 1 + q] = 1.0
            c[j, 1 + j, 1 + i, 1 + q] = -1.0
        if growth is not None:
            rates = torch.as_tensor(growth, dtype=torch.float64).reshape(-1).tolist()
            if len(rates) != species:
                raise SettingError(f"LotkaVolterra: growth has {len(rates)} rates for {species} species; give one each")
            for i, rate in enumerate(rates):
                c[i, 0, 1 + i, 0] = rate
        super().__init__(c)

    def __repr__(self) -> str:
        return "lotka_volterra" if self.species == 3 else f"LotkaVolterra({self.species})"


lorenz = Lorenz()  # the Lorenz flow with σ = 10, β = 8/3 and θ = (ρ,)
lotka_volterra = LotkaVolterra()  # the generalised Lotka–Volterra flow of three species with θ = (a₁₂, a₁₃, a₂₃)


@partial(TracedFunction, parameters=1)
def van_der_pol(x: Tensor, parameters: Tensor) -> Tensor:
    """The van der Pol oscillator ẋ = (x₁, μ(1 − x₀²)x₁ − x₀), with θ = (μ,)."""
    position, velocity = x[..., 0], x[..., 1]
    return torch.stack([velocity, parameters[..., 0] * (1 - position**2) * velocity - position], -1)


@partial(TracedFunction, parameters=1)
def lorenz96(x: Tensor, parameters: Tensor) -> Tensor:
    """The Lorenz-96 flow ẋ_i = (x_{i+1} − x_{i−2}) x_{i−1} − x_i + F on a ring, with θ = (F,)."""
    return (x.roll(-1, -1) - x.roll(2, -1)) * x.roll(1, -1) - x + parameters[..., :1]


def linear(matrix: Tensor, offset: Tensor | None = None, causes: Tensor | None = None) -> Linear:
    """The linear flow ẋ = Ax + Bv + b with given A (n, n), b (n,) and, for causes v, B (n, m); no parameters."""
    return Linear(matrix, offset, causes=causes)


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module 'pcnet.systems' has no attribute {name!r}")
    raise AttributeError(
        f"there is no system {name!r}; there are lorenz (the one of 1963), lorenz96, lotka_volterra, van_der_pol and "
        "linear(matrix). Any function f(x, theta) of tensors is a flow"
    )
