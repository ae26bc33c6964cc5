"""Weights of hypotheses, and which rows are dropped, merged, restarted and added, in cases that can be worked out."""

import math

import numpy as np
import pytest

import pcnet as pc
from pcnet.engine import bank as banks
from pcnet.engine import review as reviews
from pcnet.engine.bank import Bank
from pcnet.engine.review import Traits


def make(weights, walk=None, robust=None, age=0):
    weight = np.log(np.array(weights, dtype=float))[:, None]
    zero = np.zeros(weight.shape, dtype=np.int64)
    walk, robust = (zero if each is None else np.array(each)[:, None] for each in (walk, robust))
    return Bank(banks.normalise(weight), np.zeros_like(weight), walk, robust, zero + age)


def apart(rows):
    """Rows that differ in everything."""
    levels = 10.0 * np.arange(rows)[:, None, None]
    return Traits(levels, np.ones((rows, 1, 1)), levels, np.ones((rows, 1, 1)))


def test_weights_follow_bayes_rule():
    bank = make([0.5, 0.3, 0.2])
    evidence = np.array([[-1.0], [0.5], [2.0]])
    expected = np.array([0.5, 0.3, 0.2]) * np.exp([-1.0, 0.5, 2.0])
    np.testing.assert_allclose(np.exp(bank.now(evidence))[:, 0], expected / expected.sum())


def test_rows_that_fail_have_no_weight_and_without_rows_there_is_none():
    bank = make([0.5, 0.5])
    np.testing.assert_array_equal(np.exp(bank.now(np.array([[np.nan], [3.0]])))[:, 0], [0.0, 1.0])
    np.testing.assert_array_equal(np.exp(bank.now(np.array([[np.nan], [np.nan]])))[:, 0], [0.0, 0.0])


def test_the_first_bank_is_a_grid_with_tilted_weights():
    factors = {"process_factors": (1.0, 4.0), "observation_factors": (1.0, 9.0)}
    hypotheses = pc.Hypotheses(**factors, process_tilt=0.2, observation_tilt=1.0, outliers=0.1)
    bank, (process, observation, _) = banks.start(hypotheses, 3, np.ones(1))
    assert bank.rows == 8
    weight = 4.0**0.2 * 9.0**1.0  # of the largest factors against the smallest
    ratio = np.exp(bank.log_weight[-1] - bank.log_weight[0])
    np.testing.assert_allclose(ratio, weight)
    assert sorted(set(np.exp(process).round(6))) == [1.0, 4.0]
    assert sorted(set(np.exp(observation).round(6))) == [1.0, 9.0]
    np.testing.assert_array_equal(bank.robust[:, 0], [0, 1] * 4)


def test_a_contrast_adds_rows_in_which_one_element_differs_from_the_others():
    hypotheses = pc.Hypotheses(process_factors=(1e-4, 1.0, 4.0), observation_factors=(1.0, 9.0), contrast=3.0)
    bank, levels = banks.start(hypotheses, 1, np.array([0.3, 0.7]), elements=3)
    assert bank.rows == len(levels.contrast) == 2 * (3 * 2 * 2 + 3 * 2 * 2)  # a grid, and three elements at two factors
    alike = (levels.contrast == 0.0).all(1)
    assert alike.sum() == 24
    found = {tuple(row) for row in np.exp(levels.contrast[~alike]).round(6)}
    assert found == {(3.0, 0.333333, 0.333333), (0.333333, 3.0, 0.333333), (0.333333, 0.333333, 3.0)}
    assert set(np.exp(levels.process[~alike]).round(6)) == {1.0, 4.0}
    np.testing.assert_array_equal(levels.observation[~alike], 0.0)
    weight = np.exp(bank.log_weight[:, 0])
    np.testing.assert_allclose(weight[1::2] / weight[::2], 0.7 / 0.3)  # of the peaks, which are neighbours


def test_rows_far_behind_are_dropped():
    hypotheses = pc.Hypotheses(drop=3.0, walks=())
    bank = make([1.0, math.exp(-2.0), math.exp(-4.0)])
    found = reviews.review(hypotheses, bank, bank.evidence, lambda: apart(3), 8, 8, walks=False)
    weights = np.exp(found.bank.log_weight[:, 0])
    kept = np.array([1.0, math.exp(-2.0)])
    np.testing.assert_allclose(np.sort(weights[weights > 0])[::-1], kept / kept.sum())


def test_rows_that_agree_are_merged_and_others_are_not():
    hypotheses = pc.Hypotheses(drop=100.0, merge=0.25, walks=())
    levels = np.array([1.0, 1.2, 1.2, 5.0])[:, None, None]
    means = np.array([0.0, 0.3, 3.0, 0.0])[:, None, None]  # the third is more than half an sd away
    traits = Traits(levels, np.full((4, 1, 1), 1.0), means, np.ones((4, 1, 1)))
    bank = make([0.4, 0.3, 0.2, 0.1])
    found = reviews.review(hypotheses, bank, bank.evidence, lambda: traits, 16, 8, walks=False)
    np.testing.assert_allclose(np.exp(found.bank.log_weight[:, 0]), [0.7, 0.0, 0.2, 0.1], atol=1e-12)
    other = bank._replace(robust=np.array([[0], [1], [0], [0]]))  # another kind is not the same hypothesis
    found = reviews.review(hypotheses, other, bank.evidence, lambda: traits, 16, 8, walks=False)
    np.testing.assert_allclose(np.exp(found.bank.log_weight[:, 0]), [0.4, 0.3, 0.2, 0.1])


def test_levels_that_the_data_do_not_tell_apart_are_merged_in_time():
    """They are 0.6 or 0.7 apart: not within 0.25, but within half of a standard deviation of 1.5."""
    hypotheses = pc.Hypotheses(drop=100.0, merge=0.25, walks=())
    levels = np.array([1.0, 1.7, 2.3])[:, None, None]
    traits = Traits(levels, np.full((3, 1, 1), 1.5), np.zeros((3, 1, 1)), np.ones((3, 1, 1)))
    bank = make([0.5, 0.3, 0.2])
    for tick, expected in ((1023, [0.5, 0.3, 0.2]), (1024, [0.8, 0.0, 0.2])):
        found = reviews.review(hypotheses, bank, bank.evidence, lambda: traits, tick, 64, walks=False)
        np.testing.assert_allclose(np.exp(found.bank.log_weight[:, 0]), expected, atol=1e-12)


def test_walks_join_as_copies_of_the_best_row():
    hypotheses = pc.Hypotheses(walk_start=32, walk_cost=2.0, walks=(0.01, 0.1))
    bank = make([0.2, 0.8])
    found = reviews.review(hypotheses, bank, bank.evidence, lambda: apart(2), 32, 8, walks=True)
    used = np.isfinite(found.bank.log_weight[:, 0])
    assert sorted(found.bank.walk[used, 0]) == [0, 0, 1, 2]
    for kind in (1, 2):
        row = int(np.flatnonzero(found.bank.walk[:, 0] == kind)[0])
        assert found.source[row, 0] == 1
        best = found.bank.log_weight[:, 0].max()
        assert found.bank.log_weight[row, 0] == pytest.approx(best - 2.0)


def test_each_kind_of_walk_keeps_a_share_and_its_best_row():
    hypotheses = pc.Hypotheses(drop=3.0, walk_share=1e-4, walks=(0.01,))
    bank = make([1.0, 1e-9], walk=[0, 1])
    found = reviews.review(hypotheses, bank, bank.evidence, lambda: apart(2), 64, 8, walks=True)
    walking = found.bank.walk[:, 0] == 1
    assert np.exp(found.bank.log_weight[walking, 0]).max() == pytest.approx(1e-4, rel=1e-2)


def test_a_row_that_stands_still_restarts_at_a_walk_that_leads():
    hypotheses = pc.Hypotheses(walks=(0.01,))
    bank = make([1e-4, 1.0], walk=[0, 1], robust=[0, 1], age=100)
    evidence = np.array([[5.0], [7.0]])
    found = reviews.review(
        hypotheses, bank._replace(evidence=evidence), evidence, lambda: apart(2), 512, 64, walks=True
    )
    still = int(np.flatnonzero((found.bank.walk[:, 0] == 0) & np.isfinite(found.bank.log_weight[:, 0]))[0])
    assert found.source[still, 0] == 1
    assert found.bank.robust[still, 0] == 1
    assert found.bank.evidence[still, 0] == 7.0
    assert found.bank.age[still, 0] == 0


def test_a_bank_shrinks_to_its_capacities_and_rows_in_use_stay_in_place():
    hypotheses = pc.Hypotheses(drop=3.0, walks=())
    bank = make([1.0, *[1e-9] * 18, 0.9])
    found = reviews.review(hypotheses, bank, bank.evidence, lambda: apart(20), 8, 8, walks=False)
    assert found.bank.rows == 4
    assert found.source[:, 0].tolist() == [0, 19, 0, 0]
    again = reviews.review(hypotheses, found.bank, found.bank.evidence, lambda: apart(4), 16, 8, walks=False)
    assert again.source[:, 0].tolist() == [0, 1, 2, 3]


def test_reviews_come_often_at_first():
    ticks, at = [], 0
    while at < 2500:
        at = reviews.next_review(at)
        ticks.append(at)
    assert ticks[:9] == [4, 8, 16, 32, 64, 128, 256, 320, 384]
    assert ticks[-3:] == [2048, 2304, 2560]


@pytest.mark.parametrize("walks", [False, True])
def test_the_best_row_that_expects_outliers_stays_and_keeps_a_share(walks):
    """Otherwise outliers that come after hundreds of observations without one are taken for a motion of the state."""
    hypotheses = pc.Hypotheses(drop=3.0, walk_share=1e-4, walks=(0.01,))
    bank = make([1.0, 1e-4, 1e-9, 1e-12], robust=[0, 0, 1, 1])
    found = reviews.review(hypotheses, bank, bank.evidence, lambda: apart(4), 64, 8, walks=walks)
    used = np.isfinite(found.bank.log_weight[:, 0])
    assert sorted(found.bank.robust[used, 0]) == [0, 1]
    robust = used & (found.bank.robust[:, 0] == 1)
    assert found.source[robust, 0].tolist() == [2]
    assert np.exp(found.bank.log_weight[robust, 0]).item() == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize(("leader", "restarts"), [(1e6, True), (3.0, False)])
def test_walks_expect_outliers_once_the_data_have_some(leader, restarts):
    """If rows without outliers have less than a hundredth of the weight together, walks restart at the best row."""
    hypotheses = pc.Hypotheses(walks=(0.01,))
    bank = make([leader, 1.0, 0.5], walk=[0, 1, 0], robust=[1, 0, 0], age=100)
    found = reviews.review(hypotheses, bank, bank.evidence, lambda: apart(3), 512, 64, walks=True)
    used = np.isfinite(found.bank.log_weight[:, 0])
    walking = int(np.flatnonzero(used & (found.bank.walk[:, 0] == 1))[0])
    assert found.source[walking, 0] == (0 if restarts else 1)
    assert found.bank.robust[walking, 0] == restarts
    assert (found.bank.age[walking, 0] == 0) == restarts


def test_a_row_that_expects_outliers_does_not_restart_as_one_that_does_not():
    hypotheses = pc.Hypotheses(walks=(0.01,))
    bank = make([1e-4, 1.0, 1e-4], walk=[0, 1, 0], robust=[0, 0, 1], age=100)
    found = reviews.review(hypotheses, bank, bank.evidence, lambda: apart(3), 512, 64, walks=True)
    used, still = np.isfinite(found.bank.log_weight[:, 0]), found.bank.walk[:, 0] == 0
    assert found.source[used & still, 0].tolist() == [1, 2]
    assert found.bank.robust[used & still, 0].tolist() == [0, 1]
