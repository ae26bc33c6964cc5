"""Downsampling of long series to the minimum and maximum of each bin, which keeps every extreme value."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Ranges(NamedTuple):
    """Minimum and maximum of each bin, (bins,) each; NaN where a bin holds no number."""

    low: Array
    high: Array


def ranges(values: Array, bin_size: int) -> Ranges:
    """Minimum and maximum of consecutive bins of a series (T,), without NaN; the last bin may be shorter."""
    rows = _rows(values, bin_size)
    return Ranges(np.fmin.reduce(rows, axis=1), np.fmax.reduce(rows, axis=1))


def means(values: Array, bin_size: int) -> Array:
    """Mean of consecutive bins of a series (T,); an incomplete last bin is left out."""
    mean: Array = whole_bins(values, bin_size).mean(1)
    return mean


def line_bins(count: int, bins: int = 250) -> int:
    """Bin size by which a line of `count` points is drawn: 1, or for long ones that of about so many bins."""
    return count // bins if count > 4 * bins else 1


def whole_bins(values: Array, bin_size: int) -> Array:
    """A series (T,) as (bins, bin_size); an incomplete last bin is left out."""
    return values[: len(values) // bin_size * bin_size].reshape(-1, bin_size)


def extremes(values: Array, points: int = 2000) -> Array:
    """Indices of both ends of a series and of the minimum and maximum of points/2 bins; all indices if T ≤ 2 points."""
    count = len(values)
    if count <= 2 * points:
        return np.arange(count)
    rows = _rows(values, -(-count // (points // 2)))
    starts = np.arange(len(rows)) * rows.shape[1]
    low = starts + np.where(np.isnan(rows), np.inf, rows).argmin(1)
    high = starts + np.where(np.isnan(rows), -np.inf, rows).argmax(1)
    kept: Array = np.unique(np.concatenate([[0, count - 1], low, high]))
    return kept[kept < count]


def _rows(values: Array, bin_size: int) -> Array:
    """A series (T,) as (bins, bin_size), the last bin padded with NaN."""
    padded = np.full(-(-len(values) // bin_size) * bin_size, np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, bin_size)
