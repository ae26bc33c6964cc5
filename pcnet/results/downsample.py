"""Long series by the least and greatest value of every stretch, so that no extreme disappears."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Ranges(NamedTuple):
    """The least and greatest value of each stretch, (S,) each; NaN where a stretch has no number."""

    low: Array
    high: Array


def ranges(values: Array, stretch: int) -> Ranges:
    """(T,) as ranges of stretches of so many values; the last one may be shorter. What is NaN is left out."""
    count = -(-len(values) // stretch)
    padded = np.full(count * stretch, np.nan)
    padded[: len(values)] = values
    rows = padded.reshape(count, stretch)
    none = np.isnan(rows).all(1)
    low = np.where(np.isnan(rows), np.inf, rows).min(1, initial=np.inf)
    high = np.where(np.isnan(rows), -np.inf, rows).max(1, initial=-np.inf)
    return Ranges(np.where(none, np.nan, low), np.where(none, np.nan, high))
