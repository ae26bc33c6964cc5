"""Downsampled series keep every extreme."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pcnet.results.downsample import ranges

NUMBERS = st.lists(st.floats(allow_infinity=False, width=32), min_size=1, max_size=80)


@given(values=NUMBERS, stretch=st.integers(1, 30))
def test_ranges_contain_all_values_and_their_ends_are_values(values, stretch):
    low, high = ranges(np.array(values), stretch)
    assert len(low) == len(high) == math.ceil(len(values) / stretch)
    for i, value in enumerate(values):
        if not math.isnan(value):
            assert low[i // stretch] <= value <= high[i // stretch]
    for i in range(len(low)):
        part = [v for v in values[i * stretch : (i + 1) * stretch] if not math.isnan(v)]
        if part:
            assert low[i] in part
            assert high[i] in part
        else:
            assert math.isnan(low[i])
            assert math.isnan(high[i])


@given(values=NUMBERS.filter(lambda v: not all(map(math.isnan, v))), stretch=st.integers(1, 30))
def test_the_maximum_is_kept(values, stretch):
    low, high = ranges(np.array(values), stretch)
    numbers = [v for v in values if not math.isnan(v)]
    assert np.nanmax(high) == max(numbers)
    assert np.nanmin(low) == min(numbers)
