"""Gaussians as mixtures of narrower ones, against closed forms."""

import numpy as np
import pytest
import torch

from pcnet.numerics.mixtures import WIDEST, bending, bounded_weights, mix, split_axes


def test_three_narrow_normals_are_nearly_one_wide():
    """Density and moments of the standard normal distribution, along each divided axis."""
    like = torch.zeros(3, dtype=torch.float64)
    peaks = split_axes([2, 0], like)
    assert peaks.offsets.shape == (9, 3)
    assert float(peaks.weights.sum()) == pytest.approx(1.0)
    assert peaks.narrowing[1] == 1.0
    assert not peaks.offsets[:, 1].any()
    at = np.linspace(-5, 5, 201)
    for axis in (0, 2):
        means, sd = peaks.offsets[:, axis].numpy(), float(peaks.narrowing[axis])
        density = np.exp(-0.5 * ((at[:, None] - means) / sd) ** 2) / sd @ peaks.weights.numpy()
        np.testing.assert_allclose(density, np.exp(-0.5 * at**2), atol=0.025)
        assert peaks.weights @ means**2 + sd**2 == pytest.approx(1.0)


def test_bending_is_the_share_of_second_order_variance():
    """f = x² + 3u at N(m, s²), N(0, 2²): second-order variance 2s⁴, linear variance 4m²s² + 36."""
    mean = torch.tensor([[0.5, 0.0], [2.0, 0.0]], dtype=torch.float64)
    sd = torch.tensor([[1.5, 2.0], [0.1, 2.0]], dtype=torch.float64)
    found = bending(lambda x: x[..., :1] ** 2 + 3 * x[..., 1:], mean, sd)
    s, m = sd[:, 0].numpy(), mean[:, 0].numpy()
    np.testing.assert_allclose(found[:, 0], 2 * s**4 / (4 * m**2 * s**2 + 36))
    np.testing.assert_allclose(found[:, 1], 0.0, atol=1e-12)


def test_a_row_that_knows_nothing_moves_moments_by_a_bounded_amount():
    """A row with 5 % of the weight, a thousand times as wide as the others and as far away: three Gaussians by hand."""
    weight = torch.tensor([0.6, 0.35, 0.05], dtype=torch.float64).reshape(1, 3, 1)
    mean = torch.tensor([1.0, 1.2, 1000.0], dtype=torch.float64).reshape(1, 3, 1, 1)
    sd = torch.tensor([1.0, 2.0, 1000.0], dtype=torch.float64).reshape(1, 3, 1, 1)
    rows = {"mean": mean, "sd": sd, "covariance": (sd**2)[..., None]}
    share = np.array([0.6, 0.35, 0.05 * (WIDEST / 1000.0) ** 2])
    share /= share.sum()
    expected = share @ mean.numpy().ravel()
    spread = share @ (sd.numpy().ravel() ** 2 + (mean.numpy().ravel() - expected) ** 2)
    assert expected < 1.1
    assert float(mix("mean", rows.__getitem__, weight, has_sd=True)) == pytest.approx(expected)
    assert float(mix("sd", rows.__getitem__, weight, has_sd=True)) == pytest.approx(spread**0.5)
    assert float(mix("covariance", rows.__getitem__, weight, has_sd=True)) == pytest.approx(spread)


def test_weights_of_rows_of_similar_width_are_kept():
    weight = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64).reshape(1, 4, 1)
    sd = torch.tensor([1.0, 3.0, 2.0, 1e9], dtype=torch.float64).reshape(1, 4, 1, 1)
    (found,) = bounded_weights(weight, sd)
    assert found is weight
