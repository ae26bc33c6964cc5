"""Downsampled series keep every extreme."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pcnet.results.downsample import ranges

NUMBERS = st.lists(st.floats(allow_infinity=False, width=32), min_size=1, max_size=80)


@given(values=NUMBERS, bin_size=st.integers(1, 30))
def test_ranges_contain_all_values_and_their_ends_are_values(values, bin_size):
    low, high = ranges(np.array(values), bin_size)
    assert len(low) == len(high) == math.ceil(len(values) / bin_size)
    for i, value in enumerate(values):
        if not math.isnan(value):
            assert low[i // bin_size] <= value <= high[i // bin_size]
    for i in range(len(low)):
        part = [v for v in values[i * bin_size : (i + 1) * bin_size] if not math.isnan(v)]
        if part:
            assert low[i] in part
            assert high[i] in part
        else:
            assert math.isnan(low[i])
            assert math.isnan(high[i])


@given(values=NUMBERS.filter(lambda v: not all(map(math.isnan, v))), bin_size=st.integers(1, 30))
def test_the_maximum_is_kept(values, bin_size):
    low, high = ranges(np.array(values), bin_size)
    numbers = [v for v in values if not math.isnan(v)]
    assert np.nanmax(high) == max(numbers)
    assert np.nanmin(low) == min(numbers)
