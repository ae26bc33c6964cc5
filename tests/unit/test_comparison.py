"""Posterior model probabilities, families and model averages, against mixtures by hand and by scipy."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import integrate, stats

from pcnet.errors import StudyError
from pcnet.sweeps import comparison

actions = arrays(float, st.integers(1, 6), elements=st.floats(-50, 50))


@given(actions, st.data())
def test_probabilities_are_bayes_rule(free_actions, data):
    prior = data.draw(arrays(float, len(free_actions), elements=st.floats(0.01, 5)))
    joint = prior * np.exp(-free_actions)
    np.testing.assert_allclose(comparison.probabilities(free_actions, prior), joint / joint.sum(), rtol=1e-12)
    even = np.exp(-free_actions)
    np.testing.assert_allclose(comparison.probabilities(free_actions), even / even.sum(), rtol=1e-12)


def test_probabilities_by_hand():
    """Evidences of 1, 2 and 5: probabilities of 1/8, 2/8 and 5/8."""
    free_actions = -np.log([1.0, 2.0, 5.0])
    np.testing.assert_allclose(comparison.probabilities(free_actions), [0.125, 0.25, 0.625], rtol=1e-14)
    weighed = comparison.probabilities(free_actions, np.array([5.0, 5.0, 2.0]))
    np.testing.assert_allclose(weighed, [0.2, 0.4, 0.4], rtol=1e-14)


@pytest.mark.parametrize("level", [0.0, 1e6, -1e6, 1e15])
def test_only_differences_of_free_actions_count(level):
    """exp(±1e6) overflows; three nats are a factor of e³ at any offset."""
    found = comparison.probabilities(np.array([level, level + 3.0, level + 1e6]))
    np.testing.assert_allclose(found, [1 / (1 + math.exp(-3)), 1 / (1 + math.exp(3)), 0], rtol=1e-12)
    assert np.isfinite(found).all()


def test_extreme_priors():
    """exp(−700) of a prior against 690 nats of evidence, against 50 digits."""
    prior = np.array([1.0, 1e-304])
    with mpmath.workdps(50):
        ratio = mpmath.mpf(1e-304) * mpmath.exp(690)
        expected = [float(1 / (1 + ratio)), float(ratio / (1 + ratio))]
    np.testing.assert_allclose(comparison.probabilities(np.array([690.0, 0.0]), prior), expected, rtol=1e-12)


def test_diverged_models_have_probability_zero():
    found = comparison.probabilities(np.array([np.nan, 1.0, 1.0, np.nan]))
    np.testing.assert_array_equal(found, [0, 0.5, 0.5, 0])
    found = comparison.probabilities(np.array([0.0, 5.0, 5.0]), np.array([0.0, 1.0, 3.0]))
    np.testing.assert_allclose(found, [0, 0.25, 0.75], rtol=1e-14)
    for none in ([np.nan, np.nan], []):
        with pytest.raises(StudyError, match="diverged"):
            comparison.probabilities(np.array(none))
    with pytest.raises(StudyError, match="diverged or have a prior probability of 0"):
        comparison.probabilities(np.array([np.nan, 1.0]), np.array([1.0, 0.0]))


@pytest.mark.parametrize("prior", [[1.0], [1.0, -0.1], [0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [[0.5, 0.5]]])
def test_invalid_priors_are_rejected(prior):
    with pytest.raises(StudyError, match="2 finite numbers"):
        comparison.probabilities(np.zeros(2), np.array(prior))


@given(actions, st.data())
def test_the_evidence_of_a_family_is_the_mean_over_its_models(free_actions, data):
    """Families are equally likely a priori."""
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=len(free_actions), max_size=len(free_actions)))
    evidence = {}
    for name in names:
        evidence[name] = np.mean([math.exp(-f) for f, n in zip(free_actions, names, strict=True) if n == name])
    found = comparison.families(free_actions, names)
    assert [family.name for family in found] == list(dict.fromkeys(names))
    for family in found:
        assert family.models == names.count(family.name)
        np.testing.assert_allclose(family.log_evidence, math.log(evidence[family.name]), rtol=1e-9, atol=1e-12)
        expected = evidence[family.name] / sum(evidence.values())
        np.testing.assert_allclose(family.probability, expected, rtol=1e-9)


def test_the_size_of_a_family_does_not_count():
    """Equal evidences: 1 model against 99 is 50 : 50, and a family with a diverged half has half the evidence."""
    small, large = comparison.families(np.full(100, 7.0), ["small"] + ["large"] * 99)
    assert small.probability == pytest.approx(0.5, rel=1e-12)
    assert large.log_evidence == pytest.approx(-7.0, rel=1e-12)
    whole, half = comparison.families(np.array([2.0, 2.0, 2.0, np.nan]), ["whole", "whole", "half", "half"])
    assert whole.probability == pytest.approx(2 / 3, rel=1e-12)
    assert half.log_evidence == pytest.approx(-2.0 - math.log(2), rel=1e-12)
    assert half.models == 2


def test_families_a_million_nats_apart():
    one, two, lost = comparison.families(np.array([1e6, 1e6 + 1, 5e6, np.nan]), ["one", "one", "two", "lost"])
    assert one.log_evidence == pytest.approx(-1e6 + math.log((1 + math.exp(-1)) / 2), rel=1e-15)
    assert (one.probability, two.probability, lost.probability) == (1.0, 0.0, 0.0)
    assert lost.log_evidence == -np.inf


def test_average_by_hand():
    """¼ N(0, 1) + ¾ N(4, 2²): mean 3; variance ¼(1 + 9) + ¾(4 + 1) = 6¼."""
    mean, variance = Fraction(3), Fraction(1, 4) * 10 + Fraction(3, 4) * 5
    found = comparison.average(np.array([[0.0], [4.0]]), np.array([[1.0], [2.0]]), np.array([0.25, 0.75]))
    np.testing.assert_allclose(found.mean, [float(mean)], rtol=1e-14)
    np.testing.assert_allclose(found.sd, [math.sqrt(variance)], rtol=1e-14)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.3, 3), st.floats(0.05, 1)), min_size=1, max_size=4))
def test_average_is_the_mixture(parts):
    """Moments of the mixture density by numerical integration."""
    means, sds, weights = (np.array(column) for column in zip(*parts, strict=True))
    weights = weights / weights.sum()

    def density(x):
        return sum(w * stats.norm.pdf(x, m, s) for m, s, w in zip(means, sds, weights, strict=True))

    x = np.linspace(-40, 40, 8001)
    mean = integrate.simpson(x * density(x), x=x)
    variance = integrate.simpson((x - mean) ** 2 * density(x), x=x)
    shape = (len(means), 1, 1)
    found = comparison.average(means.reshape(shape), sds.reshape(shape), weights)
    assert found.mean.shape == found.sd.shape == (1, 1)
    np.testing.assert_allclose(found.mean[0, 0], mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.sd[0, 0], np.sqrt(variance), rtol=1e-8)
