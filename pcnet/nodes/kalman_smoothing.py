"""What a Kalman state keeps of each time update for a smoother."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.model.node import BatchSpec
from pcnet.model.protocols import SmoothingLayout
from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.smoothing import FilteredRows
from pcnet.numerics.trees import spans


class TimeUpdate(NamedTuple):
    """The last time update of an augmented state with n elements; n is 0 if nothing is kept."""

    number: Tensor  # how many there were since the state started, (B,)
    elapsed: Tensor  # time that it covers, 0 for the first one, (B,)
    mean: Tensor  # after it, (B, n)
    covariance: Tensor  # (B, n, n)
    dmean_dtheta: Tensor  # (B, n, p)
    cross: Tensor  # covariance of the state after it with that before, (B, n, n)


def no_time_update(spec: BatchSpec, n: int, p: int) -> TimeUpdate:
    """Room for time updates of n elements with p parameters beside them."""
    zeros = spec.zeros
    return TimeUpdate(zeros(), zeros(), zeros(n), zeros(n, n), zeros(n, p if n else 0), zeros(n, n))


def pack(belief: GaussianWithSensitivities, update: TimeUpdate, parameter_covariance: Tensor | None) -> Tensor:
    """All that a smoother needs of one observation as one row, (B, w).

    Args:
        belief: The filtered belief.
        update: The last time update.
        parameter_covariance: Of parameters beside the belief, (B, p, p).
    """
    parts = [update.number[:, None], update.elapsed[:, None], belief.mean, belief.covariance, belief.dmean_dtheta]
    parts += [update.mean, update.covariance, update.dmean_dtheta, update.cross]
    parts += [] if parameter_covariance is None else [parameter_covariance]
    return torch.cat([part.flatten(1) for part in parts], 1)


def belief_of(layout: SmoothingLayout) -> list[int]:
    """Sizes of the parts of a belief in a row: mean, covariance and sensitivities."""
    n, p = layout.size, layout.n_beside
    return [n, n * n, n * p]


def last_beside(row: Tensor, layout: SmoothingLayout) -> Tensor:
    """The covariance of the parameters beside the belief in a row (B, w), (B, p, p)."""
    p = layout.n_beside
    return row[:, row.shape[1] - p * p :].reshape(len(row), p, p)


def continuity(number: Tensor, elapsed: Tensor) -> tuple[Tensor, Tensor]:
    """Whether rows are predicted from the row before, and whether they are it, because nothing was taken in; (T, B).

    number, elapsed: as in `TimeUpdate`, (T, B, 1).
    """
    before = torch.cat([torch.full_like(number[:1], torch.nan), number[:-1]])
    continues, repeats = (number == before + 1) & (elapsed > 0), (number == before) & (number > 0)
    return continues[..., 0], repeats[..., 0]


def unpack(rows: Tensor, layout: SmoothingLayout) -> tuple[FilteredRows, Tensor]:
    """Rows (T, B, w) for a smoother, and the last covariance of the parameters beside the belief, (B, p, p)."""
    n, p = layout.size, layout.n_beside
    sizes = [1, 1, n, n * n, n * p, n, n * n, n * p, n * n, p * p]
    parts = (rows[..., place] for place in spans(sizes))
    number, elapsed, mean, covariance, slope, mean_, covariance_, slope_, cross, beside = parts

    def columns(value: Tensor, derivative: Tensor) -> Tensor:
        return torch.cat([value[..., None], derivative.reshape(*value.shape, p)], -1)

    def matrix(value: Tensor) -> Tensor:
        return value.reshape(*value.shape[:-1], n, n)

    found = FilteredRows(
        columns(mean, slope),
        matrix(covariance),
        columns(mean_, slope_),
        matrix(covariance_),
        matrix(cross),
        *continuity(number, elapsed),
    )
    return found, beside[-1].reshape(rows.shape[1], p, p)
