"""Symmetric matrices, against numpy."""

import numpy as np
import torch

from pcnet.numerics.symmetric import mirrored, plus_product


def test_the_upper_triangle_is_that_of_the_lower():
    matrix = torch.arange(18.0).view(2, 3, 3)
    matrix[0, 0, 2] = torch.nan  # above the diagonal nothing counts
    found = mirrored(matrix).numpy()
    lower = np.tril(matrix.numpy())
    np.testing.assert_array_equal(found, lower + np.tril(lower, -1).swapaxes(-1, -2))


def test_a_sum_with_a_product_that_sources_share():
    rng = np.random.default_rng(1)
    start, left, right = rng.normal(size=(2, 4, 3, 3)), rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 4, 5, 3))
    found = plus_product(*map(torch.as_tensor, (start, left, right)))
    np.testing.assert_allclose(found, start + left[:, None] @ right, rtol=1e-13)
    found = plus_product(*map(torch.as_tensor, (start, right.swapaxes(-1, -2), left.swapaxes(-1, -2))))
    np.testing.assert_allclose(found, start + right.swapaxes(-1, -2) @ left.swapaxes(-1, -2)[:, None], rtol=1e-13)
