"""Comparisons of results."""

import numpy as np


def same(a, b, tolerance=0.0):
    assert a.traces.keys() == b.traces.keys()
    for key in a.traces:
        np.testing.assert_allclose(a.traces[key].values, b.traces[key].values, rtol=tolerance, atol=tolerance)
