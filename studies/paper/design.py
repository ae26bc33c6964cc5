"""What the paper's study consists of: its process, its two models and the grids of settings they are inverted under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pcnet.graphs import odem
from pcnet.model.model import Model
from pcnet.simulate import Simulation, glv_process
from studies.paper.findings import EXPECTED_STATE_PRECISION, MODELS, RATIOS

Data = Literal["authors", "smooth", "white"]
GridName = Literal["paper", "full", "small"]
Conventions = Literal["authors", "paper"]

FIRST_SEED = 42
"""The seed of the first replicate; with the authors' noise it gives the authors' own observations."""

_SAME_FOR_ALL: Mapping[str, list[Any]] = {"model": list(MODELS), "orders": [2, 3], "ratio": list(RATIOS)}
_TUNING: Mapping[str, list[Any]] = {
    "kappa": [1.0, 0.5, 0.25],
    "every": [64, 128, 256, 512],
    "beta_lambda": [0.0, 0.1, 0.2],
    "beta_theta": [0.0, 0.1, 0.2],
}

GRIDS: Mapping[str, Mapping[str, list[Any]]] = {
    "paper": {**_SAME_FOR_ALL, **_TUNING, "sd_lambda_x": [0.1], "sd_lambda_y": [0.1]},
    "full": {**_SAME_FOR_ALL, **_TUNING, "sd_lambda_x": [0.1, 0.5], "sd_lambda_y": [0.1, 0.5]},
    "small": {
        **_SAME_FOR_ALL,
        **{name: values[:1] for name, values in _TUNING.items()},
        "sd_lambda_x": [0.1],
        "sd_lambda_y": [0.1],
    },
}
"""Settings for each model, by the name of the grid: 1512 as the paper counts them, 6048 with all four combinations of
the log-precisions' prior deviations as its authors' program has them, and 14 for a first look."""


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


def worlds(data: Data, replicates: int, observations: int) -> tuple[Simulation, ...]:
    """Realisations of the generative process, one a replicate."""
    return tuple(
        glv_process(samples=observations, noise=data, seed=FIRST_SEED + replicate) for replicate in range(replicates)
    )
