"""What the study found: every inversion in a table, and the beliefs of the selected ones over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from pcnet.results.result import Result
from pcnet.simulate import Simulation

MODELS = {"lorenz": "Lorenz", "glv": "GLV"}
"""The generative models: one of another form than the process (scenario-different), one of its own (scenario-same)."""

SCENARIOS = {"lorenz": "scenario-different", "glv": "scenario-same"}

PARAMETERS = {"lorenz": ("ρ",), "glv": ("a₁₂", "a₁₃", "a₂₃")}

NOISES = {
    "authors": "white, of one seed for both (observation noise is twice state noise), as in the authors' program",
    "smooth": "smooth, independent for states and observations",
    "white": "white, independent for states and observations",
}
"""What the noise of the process is like, by the name of the data."""

RATIOS = (1 / 50, 1 / 25, 1 / 10, 1.0, 10.0, 25.0, 50.0)
"""The prior precision ratios C = E_Πy / E_Πx of the paper."""

EXPECTED_STATE_PRECISION = 500.0
"""E_Πx of the paper, the same at every ratio."""

SETTINGS = ("kappa", "every", "beta_lambda", "beta_theta", "sd_lambda_x", "sd_lambda_y")
"""The columns over which the lowest free action is sought within a cell."""


class Cell(NamedTuple):
    """What the paper reports on separately: a model, its orders of motion k_x, and the ratio C."""

    model: str
    orders: int
    ratio: float

    def __str__(self) -> str:
        return f"{MODELS[self.model]}, {self.orders} orders, C = {ratio_name(self.ratio)}"


class Speed(NamedTuple):
    """What the study took. Rates are inversions × observations a second."""

    seconds: float
    """Of the whole study."""
    inversions: int
    observations: int
    """Of each inversion."""
    rate: float
    """While sweeping."""
    single_rate: float
    """The same for single runs one after another, in the same process."""
    processes: int
    peak_memory: int | None
    """Bytes, summed over the processes."""


class Findings(NamedTuple):
    """The whole study.

    data: the noise of the process: "authors", "smooth" or "white". grid: "paper", "full" or "small". conventions: as in
    `pcnet.graphs.paper`. worlds: one a replicate.

    table: a row for each inversion, with the columns model, orders, ratio, those of SETTINGS, replicate; diverged_at
    (the number of the observation, NaN where it did not) and diverged_node; free_action, accuracy and complexity (sums
    over the run); x.mse (to the true states), x.coverage (the share of times and channels with the truth within two
    sd); theta.mean[0], theta.sd[0], …, lambda_x.mean[0], …, lambda_y.mean[0], … (final beliefs).

    winners: the row with the lowest free action for each model, orders, ratio and replicate; none if all diverged.

    traces: the winner of replicate 0, recorded at every observation. slow: the winners of all replicates that have one,
    in the order of the replicates along one batch dimension: means and sds of theta, lambda_x and lambda_y, thinned.
    """

    data: str
    grid: str
    conventions: str
    worlds: tuple[Simulation, ...]
    table: pd.DataFrame
    winners: pd.DataFrame
    traces: Mapping[Cell, Result]
    slow: Mapping[Cell, Result]
    speed: Speed

    @property
    def ratios(self) -> list[float]:
        return sorted(float(ratio) for ratio in self.table["ratio"].unique())

    @property
    def orders(self) -> list[int]:
        return sorted(int(orders) for orders in self.table["orders"].unique())

    @property
    def models(self) -> list[str]:
        return [model for model in MODELS if bool((self.table["model"] == model).any())]

    @property
    def cells(self) -> list[Cell]:
        """All that were asked for, with or without a winner."""
        return [Cell(m, k, c) for m in self.models for k in self.orders for c in self.ratios]

    @property
    def state_variance(self) -> float:
        """What the best constant guess of each state would have as its MSE, on average over the replicates."""
        return sum(float(w.states.var(0, correction=0).mean()) for w in self.worlds) / len(self.worlds)

    @property
    def raw_mse(self) -> float:
        """The MSE of the observations, taken as they are, on average over the replicates."""
        errors = [float((w.observations - w.states).square().mean()) for w in self.worlds]
        return sum(errors) / len(errors)


def ratio_name(ratio: float) -> str:
    """1/50, …, 1, …, 50."""
    return f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}"
