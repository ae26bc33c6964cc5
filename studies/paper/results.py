"""Results of the paper's study: a table of all inversions, and the beliefs of the selected ones over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from pcnet.results.result import Result
from pcnet.simulate import Simulation
from studies.paper.design import MODELS, Cell


class Speed(NamedTuple):
    """Computational cost of the study; rates are inversions × observations per second."""

    seconds: float
    """Duration of the whole study."""
    inversions: int
    observations: int
    """Observations per inversion."""
    rate: float
    """Rate of the sweep."""
    single_rate: float
    """Rate of single runs, one after another, in one process."""
    processes: int
    peak_memory: int | None
    """Bytes, summed over the processes."""


class StudyResults(NamedTuple):
    """All results of the study.

    Attributes:
        data: Noise of the process: "authors", "smooth" or "white".
        grid: "paper", "full" or "small".
        conventions: "authors" or "paper"; see `pcnet.graphs.odem`.
        realisations: One simulated process per replicate.
        table: One row per inversion. Columns: model, orders, ratio, SETTINGS, replicate; diverged_at (index of the
            observation, NaN if it did not diverge), diverged_node; free_action, accuracy, complexity (sums over the
            run); x.mse, x.coverage; final beliefs theta.mean[0], theta.sd[0], …, lambda_x.mean[0], …
        winners: Row with the lowest free action of each model, orders, ratio and replicate, if any did not diverge.
        traces: Winner of replicate 0 of each cell, recorded at every observation.
        slow: Winners of all replicates of each cell along one batch dimension, downsampled: means and standard
            deviations of theta, lambda_x and lambda_y.
        speed: Computational cost.
    """

    data: str
    grid: str
    conventions: str
    realisations: tuple[Simulation, ...]
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
        """All cells, with or without a winner."""
        return [Cell(m, k, c) for m in self.models for k in self.orders for c in self.ratios]

    @property
    def state_variances(self) -> list[float]:
        """Variance of the states of each replicate: the MSE of the best constant estimate."""
        return [float(each.states.var(0, correction=0).mean()) for each in self.realisations]

    @property
    def raw_mses(self) -> list[float]:
        """MSE of the raw observations of each replicate."""
        return [float((each.observations - each.states).square().mean()) for each in self.realisations]

    @property
    def state_variance(self) -> float:
        """Mean of `state_variances`."""
        return sum(self.state_variances) / len(self.realisations)

    @property
    def raw_mse(self) -> float:
        """Mean of `raw_mses`."""
        return sum(self.raw_mses) / len(self.realisations)
