"""Dwell times of categories: moments and probabilities of the chain, against closed forms."""

import math

import numpy as np
import pytest

from pcnet.errors import SettingError
from pcnet.nodes import CategoricalNode
from pcnet.numerics.dwell_time import DwellTime


def dwell_probabilities(dwell: DwellTime, categories: int, which: int, before: int, most: int) -> np.ndarray:
    """The probability that a category that was just entered lasts for 1, 2, … steps, by following the chain."""
    s = dwell.stages(categories)
    t = dwell.transition(categories).numpy().reshape(categories, s, categories, s)
    now = t[before, :, which].sum(0)
    now, found = now / now.sum(), []
    for _ in range(most):
        after = now @ t[which, :, which]
        found.append(now.sum() - after.sum())
        now = after
    return np.array(found)


@pytest.mark.parametrize(
    ("mean", "sd"), [(39.0, 4.0), (2.5, 1.0), (2.5, 0.5), (5.0, 0.0), (1.0, 0.0), (3.3, 1.2), (4.0, math.sqrt(12))]
)
@pytest.mark.parametrize("order", ["cycle", "any"])
def test_the_chain_has_the_given_mean_and_sd(mean, sd, order):
    found = dwell_probabilities(DwellTime(mean=mean, sd=sd, order=order), 3, which=1, before=0, most=400)
    n = np.arange(1, 401)
    assert found.sum() == pytest.approx(1, abs=1e-9)
    assert found @ n == pytest.approx(mean, rel=1e-9)
    assert math.sqrt(max(found @ n**2 - mean**2, 0)) == pytest.approx(sd, rel=1e-6, abs=1e-6)


def test_whole_stages_are_a_negative_binomial_distribution():
    """r = 4 stages that are left with p = 1/3: mean 12, variance r(1 − p)/p² = 24."""
    found = dwell_probabilities(DwellTime(mean=12.0, sd=math.sqrt(24.0)), 2, which=0, before=1, most=60)
    n = np.arange(1, 61)
    closed = [math.comb(k - 1, 3) * (1 / 3) ** 4 * (2 / 3) ** (k - 4) if k >= 4 else 0.0 for k in n]
    np.testing.assert_allclose(found, closed, atol=1e-12)


def test_each_category_may_have_its_own_dwell_time():
    dwell = DwellTime(mean=[6.0, 20.0], sd=[2.0, 3.0], order="cycle")
    n = np.arange(1, 301)
    for which, (mean, sd) in enumerate([(6.0, 2.0), (20.0, 3.0)]):
        found = dwell_probabilities(dwell, 2, which, 1 - which, 300)
        assert found @ n == pytest.approx(mean)
        assert found @ n**2 - mean**2 == pytest.approx(sd**2)


def test_a_batch_has_a_chain_for_each_of_its_elements():
    dwell = DwellTime(mean=[[6.0], [20.0]], sd=[[2.0], [3.0]], order="cycle")
    t, s = dwell.transition(3), dwell.stages(3)
    assert t.shape == (2, 3 * s, 3 * s)
    np.testing.assert_allclose(t.sum(-1), 1)
    shorter = DwellTime(mean=6.0, sd=2.0, order="cycle").transition(3)
    used = shorter.shape[-1] // 3
    last = [s * i + j for i in range(3) for j in range(s - used, s)]
    np.testing.assert_allclose(t[0][last][:, last], shorter)


def test_the_order_determines_the_next_category():
    """Dwell times of one step: a permutation, or a uniform choice."""
    np.testing.assert_allclose(
        DwellTime(mean=1.0, sd=0.0, order="cycle").transition(3), [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    )
    half = 0.5
    np.testing.assert_allclose(
        DwellTime(mean=1.0, sd=0.0, order="any").transition(3), [[0, half, half], [half, 0, half], [half, half, 0]]
    )


def test_one_stage_is_memoryless():
    """A geometric distribution of mean 10 has variance 90 and stays with probability 0.9."""
    eye = np.eye(4)
    found = DwellTime(mean=10.0, sd=math.sqrt(90.0)).transition(4)
    np.testing.assert_allclose(found, 0.9 * eye + 0.1 / 3 * (1 - eye), atol=1e-9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DwellTime(mean=0.5, sd=0.0), "must be at least 1 step, not 0.5"),
        (lambda: DwellTime(mean=2.5, sd=0.1), "the sd must be from 0.5 to 1.94"),
        (lambda: DwellTime(mean=4.0, sd=5.0), r"without memory, CategoricalNode\(stay=0.75\)"),
        (lambda: DwellTime(mean=[3.0, 4.0], sd=[1.0, 1.0, 1.0]), "do not fit together"),
        (lambda: DwellTime(mean=3.0, sd=-1.0), "'sd': must not be negative"),
        (lambda: DwellTime(mean=3.0, sd=1.0, order="random"), "'cycle' or 'any'"),
        (lambda: DwellTime(mean=3.0), "'sd' is required"),
        (
            lambda: CategoricalNode("c", values=[[0.1], [0.2]], dwell=DwellTime(mean=[3.0, 4.0, 5.0], sd=1.0)),
            "CategoricalNode 'c': DwellTime: mean and sd must be one number or end in 2",
        ),
    ],
)
def test_invalid_dwell_times_are_rejected(make, words):
    with pytest.raises(SettingError, match=words):
        make()
