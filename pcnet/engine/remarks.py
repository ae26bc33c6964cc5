"""What a run should warn of: data that fit the model, and yet are hardly what was meant."""

from collections.abc import Iterator, Mapping, Sized

import numpy as np
import torch
from torch import Tensor

from pcnet.model.node import AnyNode

UNUSUAL = 30.0  # times so many sampling intervals apart, or that many times closer, are taken for other units
ENOUGH = 10  # observations after which times are judged


def of_observations(nodes: Mapping[str, AnyNode], series: Mapping[str, Tensor]) -> Iterator[str]:
    """Sensors of which nothing was observed. series: observations (T, ..., n) by node, NaN if they were not given."""
    for name, values in series.items():
        empty = ~torch.isfinite(values).any(-1).any(0)
        if bool(empty.any()) and not nodes[name].is_input:
            where = "" if bool(empty.all()) else f" in {int(empty.sum())} of {empty.numel()} batch elements"
            yield (
                f"all values of {name!r}{where} are NaN, or were not given: nothing was observed, so that beliefs "
                "follow the flow and the priors; check how the data were read (missing single values may be NaN)"
            )


def of_times(times: object, intervals: Tensor) -> Iterator[str]:
    """Times in other units than the sampling interval. times: an iterator is not looked at. intervals: dt, (B,)."""
    if not isinstance(times, Sized) or len(times) < ENOUGH:
        return
    apart = float(np.median(np.diff(np.asarray(times, dtype=np.float64))))
    least, most = float(intervals.min()), float(intervals.max())
    if not least / UNUSUAL <= apart <= most * UNUSUAL:
        yield (
            f"times are {apart:.3g} apart, and dt is {least:.3g}: give both in the same unit, or another dt if the "
            "observations are meant to be so far apart"
        )
