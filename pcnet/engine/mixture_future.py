"""Forecasts and draws of a mixture, from those of its rows."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from pcnet.engine.forecast import Draws, Forecast
from pcnet.numerics.mixtures import bounded_weights, mix
from pcnet.results.downsample import Array


def mixed_forecast(rows: Forecast, weight: Tensor, shape: torch.Size, hidden: Collection[str]) -> Forecast:
    """Moments of the mixture, whose weights are bounded by the forecast states; see `bounded_weights`.

    Rows that run away have no weight from then on, unless they have most of it.

    Args:
        rows: Forecasts of all rows, (K, ..., T, n).
        weight: Weights of the rows, (K, B).
        shape: Batch dimensions of B elements.
        hidden: Names of the states.
    """
    weights = weight.double()[None].repeat(len(rows.times), 1, 1)

    def by_time(values: Array) -> Tensor:
        """(K, ..., T, n) as (T, K, B, n)."""
        return torch.as_tensor(np.moveaxis(values, -2, 0)).double().reshape(*weights.shape, -1)

    moments = [by_time(values(name)) for values in (rows.mean, rows.sd) for name in rows.nodes]
    finite = torch.isfinite(torch.cat(moments, -1)).all(-1).to(weights).cummin(0).values
    weights = weights * finite
    weights = weights / weights.sum(1, keepdim=True)
    states = [by_time(rows.sd(name)) for name in hidden]
    (weights,) = bounded_weights(weights, torch.cat(states, -1)) if states else (weights,)
    means: dict[str, Array] = {}
    sds: dict[str, Array] = {}
    for name in rows.nodes:
        of = {"mean": by_time(rows.mean(name)), "sd": by_time(rows.sd(name))}
        for quantity, found in (("mean", means), ("sd", sds)):
            value = mix(quantity, of.__getitem__, weights).movedim(0, 1)
            found[name] = value.reshape(*shape, *value.shape[1:]).numpy().astype(rows.mean(name).dtype)
    return Forecast(rows.times, means, sds)


def mixed_draws(rows: Draws, weight: Tensor, shape: torch.Size, seed: int) -> Draws:
    """Draws (draws, ..., T, n) of which each comes from one row of (draws, K, ..., T, n), by the weights (K, B)."""
    draws = len(next(iter(rows.values.values())))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.multinomial(weight.mT, draws, replacement=True, generator=generator).mT.numpy()
    values = {}
    for name, value in rows.values.items():
        flat = value.reshape(draws, *weight.shape, *value.shape[-2:])
        picked = flat[np.arange(draws)[:, None], chosen, np.arange(weight.shape[1])]
        values[name] = picked.reshape(draws, *shape, *value.shape[-2:])
    return Draws(rows.times, values)
