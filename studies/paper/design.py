"""Design of the paper's study: the process, the two models, and the grids of settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pcnet.graphs import odem
from pcnet.model.model import Model
from pcnet.simulate import Simulation, glv_process

DataName = Literal["authors", "smooth", "white"]
GridName = Literal["paper", "full", "small"]
Conventions = Literal["authors", "paper"]

FIRST_SEED = 42
"""Seed of the first replicate; with the authors' noise it gives the authors' own observations."""
MODELS = {"lorenz": "Lorenz", "glv": "GLV"}
"""Generative models: one of a different form than the process, one of the same form."""
SCENARIOS = {"lorenz": "scenario-different", "glv": "scenario-same"}
PARAMETERS = {"lorenz": ("ρ",), "glv": ("a₁₂", "a₁₃", "a₂₃")}
NOISES = {
    "authors": "white, with one seed for both (observation noise is twice the state noise), as in the authors' program",
    "smooth": "smooth, independent for states and observations",
    "white": "white, independent for states and observations",
}
"""Description of the noise of the process by name."""
RATIOS = (1 / 50, 1 / 25, 1 / 10, 1.0, 10.0, 25.0, 50.0)
"""Prior precision ratios C = E_Πy / E_Πx of the paper."""
EXPECTED_STATE_PRECISION = 500.0
"""E_Πx of the paper, the same at every ratio."""
SETTINGS = ("kappa", "every", "beta_lambda", "beta_theta", "sd_lambda_x", "sd_lambda_y")
"""Settings over which the free action is minimised within a cell."""

_CELLS: Mapping[str, list[Any]] = {"model": list(MODELS), "orders": [2, 3], "ratio": list(RATIOS)}
_TUNING: Mapping[str, list[Any]] = {
    "kappa": [1.0, 0.5, 0.25],
    "every": [64, 128, 256, 512],
    "beta_lambda": [0.0, 0.1, 0.2],
    "beta_theta": [0.0, 0.1, 0.2],
}
_ONE_SD: Mapping[str, list[Any]] = {"sd_lambda_x": [0.1], "sd_lambda_y": [0.1]}

GRIDS: Mapping[str, Mapping[str, list[Any]]] = {
    "paper": {**_CELLS, **_TUNING, **_ONE_SD},
    "full": {**_CELLS, **_TUNING, "sd_lambda_x": [0.1, 0.5], "sd_lambda_y": [0.1, 0.5]},
    "small": {**_CELLS, **{name: values[:1] for name, values in _TUNING.items()}, **_ONE_SD},
}
"""Grids by name: 1512 settings per model as in the paper; 6048 with all prior standard deviations of the log-precisions
of the authors' program; 14 as a test."""


class Cell(NamedTuple):
    """A condition that the paper reports separately: model, orders of motion k_x, and ratio C."""

    model: str
    orders: int
    ratio: float

    def __str__(self) -> str:
        return f"{MODELS[self.model]}, {self.orders} orders, C = {ratio_name(self.ratio)}"


def ratio_name(ratio: float) -> str:
    """1/50, …, 1, …, 50."""
    return f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}"


def build(model: Literal["glv", "lorenz"], orders: int, ratio: float, conventions: Conventions, **tuning: Any) -> Model:
    """The paper's graph under one setting of the grid."""
    return odem(
        model,
        orders,
        expected_precision_x=EXPECTED_STATE_PRECISION,
        expected_precision_y=EXPECTED_STATE_PRECISION * ratio,
        conventions=conventions,
        **tuning,
    )


def realisations(data: DataName, replicates: int, observations: int) -> tuple[Simulation, ...]:
    """Realisations of the generative process, one per replicate."""
    return tuple(
        glv_process(samples=observations, noise=data, seed=FIRST_SEED + replicate) for replicate in range(replicates)
    )
