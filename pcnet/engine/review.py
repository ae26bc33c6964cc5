"""Reviews of a bank of hypotheses: which of its rows are dropped, merged, divided, restarted and added.

Arrays are (K, B): K rows for each of B batch elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcnet.engine.bank import Array, Bank, Indices, log_sum_exp, normalise
from pcnet.model.hypotheses import Hypotheses
from pcnet.numerics.mixtures import WEIGHTS

CAPACITIES = (4, 8, 16)
"""Numbers of rows that a bank shrinks to; more are kept as they are, because binding anew costs more than they do."""
MANY = 16
"""Batch elements from which a bank shrinks to any number of rows, because each is worth binding anew."""
FIRST_REVIEWS = (4, 8, 16, 32, 64, 128, 256)
"""Observations at which rows are reviewed first, because a review costs as much as some fifty observations."""
PERIODS = ((256, 8), (2048, 64), (math.inf, 256))
"""Until so many observations, the share of walks is for every so many; after FIRST_REVIEWS, that is once a review."""
DIVIDED_AT, BENT, MOST_DIVIDED = (4, 8, 16, 32), 0.1, 12
"""Observations at which rows whose belief is bent by more than so much are divided, the best ones, at most so many."""
DROP_FROM = 8  # observation from which rows are dropped
MERGE_FROM = 16  # observation from which rows are merged
SETTLED, MERGED_WITHIN = 1024, 0.5
"""From this observation on, levels that data do not tell apart are no reason to keep two rows: they may differ by this
share of their standard deviation."""
PAIRS = 2**16  # pairs of rows that are compared at once
RESTART_AFTER, RESTART_BELOW = 64, 0.01
"""A row with parameters that stand still restarts at the best row after so many observations below this weight."""


class Traits(NamedTuple):
    """What rows are compared by: log-levels (K, B, l) and means (K, B, q), with their standard deviations."""

    levels: Array
    level_sds: Array
    means: Array
    sds: Array


class Review(NamedTuple):
    """A bank after a review.

    source: the row (K, B) of the bank before from which each of its rows continues. copy_of: the row (K, B) that each
    is a copy of: itself, or the best one if it is not in use.
    """

    bank: Bank
    source: Indices
    copy_of: Indices


def next_review(tick: int) -> int:
    """The number of observations after which rows are reviewed next."""
    if tick < FIRST_REVIEWS[-1]:
        return next(each for each in FIRST_REVIEWS if each > tick)
    return (tick // period(tick) + 1) * period(tick)


def period(tick: int) -> int:
    """The number of observations, after `tick` of them, for which walks get one share."""
    return next(every for until, every in PERIODS if tick < until)


def review(
    hypotheses: Hypotheses,
    bank: Bank,
    evidence: Array,
    traits: Callable[[], Traits],
    tick: int,
    passed: int,
    walks: bool,
) -> Review:
    """Drop, merge, restart and add rows.

    Args:
        hypotheses: The rules.
        bank: The bank at the last review.
        evidence: Sums of log-evidence now, (K, B); NaN for rows that have stopped.
        traits: Gives what rows are compared by, if it is needed.
        tick: Number of observations.
        passed: Number of observations since the last review.
        walks: Whether there are parameters that can walk.
    """
    weight, in_use = bank.now(evidence), np.isfinite(bank.log_weight)
    source = np.repeat(np.arange(bank.rows)[:, None], weight.shape[1], 1)
    bank = bank._replace(log_weight=weight, evidence=evidence, age=bank.age + passed)
    kinds = range(len(hypotheses.walks) + 1) if walks and tick > hypotheses.walk_start else range(1)
    if len(kinds) > 1:
        weight = _share(weight, bank.walk, kinds, hypotheses.walk_share * passed / period(tick - 1))
    robust = bool((bank.robust[np.isfinite(weight)] > 0).any())
    if robust and tick > hypotheses.walk_start:  # outliers may come after many observations without one
        weight = _share(weight, bank.robust, range(2), hypotheses.walk_share * passed / period(tick - 1))
    top = weight.max(0)
    keep = weight > top - hypotheses.drop - 1e-9 if tick >= DROP_FROM else np.isfinite(weight)
    if len(kinds) > 1:
        outliers = bank.robust == bank.robust[weight.argmax(0), np.arange(weight.shape[1])]  # as the best row has them
        for kind in kinds:
            mine = np.isfinite(weight) & (bank.walk == kind)
            keep |= _best(weight, np.where((mine & outliers).any(0), mine & outliers, mine))
    if robust:
        keep |= _best(weight, bank.robust > 0)
    if tick >= MERGE_FROM:
        within = MERGED_WITHIN if tick >= SETTLED else 0.0
        weight, keep = _merge(hypotheses.merge, within, bank._replace(log_weight=weight), traits, keep)
    bank = bank._replace(log_weight=np.where(keep, weight, -np.inf))
    if len(kinds) > 1:
        bank, source = _restart(bank, source, top)
    if walks and hypotheses.walks and tick - passed < hypotheses.walk_start <= tick:
        bank, source = _add_walks(hypotheses, bank, source)
    return _pack(bank, source, in_use)


def _best(weight: Array, mine: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The best of these rows, (K, B)."""
    mine = mine & np.isfinite(weight)
    own: Array = np.where(mine, weight, -np.inf)
    found: NDArray[np.bool_] = mine & (own == own.max(0))
    return found


class Division(NamedTuple):
    """A bank in which some rows have become three, the row (K, B) of the bank before that each continues from, and the
    part of its belief that it has: −1, 0 or 1, and 2 for the whole, (K, B)."""

    bank: Bank
    source: Indices
    place: Array


def divide(bank: Bank, bent: Array) -> Division | None:
    """Divide the best of those rows whose beliefs are bent too much; None if there are none.

    bent: how much, (K, B).
    """
    weight, columns = bank.log_weight, np.arange(bent.shape[1])
    due = np.where(bent > BENT, weight, -np.inf)
    count = min(MOST_DIVIDED, int(np.isfinite(due).sum(0).max()))
    if not count:
        return None
    chosen = np.argsort(-due, 0, kind="stable")[:count]
    valid = np.isfinite(due[chosen, columns])
    all_rows = np.repeat(np.arange(bank.rows)[:, None], bent.shape[1], 1)
    source = np.concatenate([all_rows, chosen, chosen])
    place = np.concatenate([np.full(weight.shape, 2.0), np.where(valid, -1.0, 2.0), np.where(valid, 1.0, 2.0)])
    grown = Bank(*(each[source, columns] for each in bank))
    log_weight = grown.log_weight.copy()
    log_weight[bank.rows :] = np.where(np.tile(valid, (2, 1)), log_weight[bank.rows :] + math.log(WEIGHTS[0]), -np.inf)
    centre = np.where(valid, math.log(WEIGHTS[1]), 0.0)
    for row, more, here in zip(chosen, centre, valid, strict=True):
        log_weight[row, columns] += more
        place[row, columns] = np.where(here, 0.0, place[row, columns])
    return Division(grown._replace(log_weight=normalise(log_weight)), source, place)


def _share(weight: Array, walk: Indices, kinds: range, share: float) -> Array:
    """Log-weights after each kind of walk got a share of all."""
    for kind in kinds:
        mine = walk == kind
        own = log_sum_exp(np.where(mine, weight, -np.inf))
        with np.errstate(invalid="ignore"):  # of elements without a row of this kind
            gain = np.logaddexp(own, math.log(share)) - own
            weight = np.where(mine & np.isfinite(own), weight + gain, weight)
    return weight


def _merge(
    limit: float, within: float, bank: Bank, traits_of_rows: Callable[[], Traits], keep: NDArray[np.bool_]
) -> tuple[Array, NDArray[np.bool_]]:
    """Let the better of two rows that have become equal take the weight of the other."""
    weight, keep = bank.log_weight.copy(), keep.copy()
    columns, most = np.arange(weight.shape[1]), int(keep.sum(0).max())
    if most < 2:
        return weight, keep
    order = np.argsort(-np.where(keep, weight, -np.inf), 0, kind="stable")[:most]
    traits, kind = traits_of_rows(), 1 + bank.robust + 2 * bank.walk  # 0 is the kind of those that are not kept
    ordered = Traits(*(each[order, columns] for each in traits))
    alike = _alike(limit, within, np.where(keep, kind, 0)[order, columns], ordered)
    for j in np.flatnonzero(alike.any((0, 2))):
        close = alike[:j, j] & keep[order[:j], columns] & keep[order[j], columns]
        found = np.flatnonzero(close.any(0))
        better, worse = order[close.argmax(0)[found], found], order[j, found]
        weight[better, found] = np.logaddexp(weight[better, found], weight[worse, found])
        keep[worse, found] = False
    return weight, keep


def _alike(limit: float, within: float, kind: Indices, traits: Traits) -> NDArray[np.bool_]:
    """Which rows j are like a better row i, (K, K, B), of rows that are ordered.

    Args:
        limit: How far apart their levels may be,
        within: or in standard deviations of the better row.
        kind: Kind of each row, (K, B); 0 for none.
        traits: Of the rows.
    """
    rows, batch = kind.shape
    found = np.zeros((rows, rows, batch), dtype=bool)
    size = max(1, PAIRS // (rows * rows))
    for first in range(0, batch, size):
        part = slice(first, first + size)
        levels, level_sds, means, sds = (each[:, part] for each in traits)
        close = (kind[:, None, part] == kind[None, :, part]) & (kind[:, None, part] > 0)
        close &= (np.abs(levels[:, None] - levels) < np.maximum(limit, within * level_sds[:, None])).all(-1)
        close &= (np.abs(means[:, None] - means) < 0.5 * sds[:, None]).all(-1)
        found[:, :, part] = close
    found[np.tril_indices(rows)] = False
    return found


def _restart(bank: Bank, source: Indices, top: Array) -> tuple[Bank, Indices]:
    """Let rows whose parameters stand still, but are far behind a walk, continue from the best row.

    So do walks that expect outliers if the data have none, and those that expect none if the data have some.
    """
    columns = np.arange(source.shape[1])
    best = bank.log_weight.argmax(0)
    behind = (bank.walk == 0) & np.isfinite(bank.log_weight) & (bank.log_weight < top + math.log(RESTART_BELOW))
    alike = bank.robust == bank.robust[best, columns]
    others = ~(behind & alike).any(0)  # the only rows, which then take over the outliers of the best one
    due = behind & (alike | others) & (bank.walk[best, columns] > 0)
    unlike = log_sum_exp(np.where(alike, -np.inf, bank.log_weight))  # of all rows with other outliers than the best one
    due |= (bank.walk > 0) & ~alike & np.isfinite(bank.log_weight) & (unlike < top + math.log(RESTART_BELOW))
    due &= bank.age >= RESTART_AFTER
    source = np.where(due, best, source)
    robust = np.where(due, bank.robust[best, columns], bank.robust)
    evidence = np.where(due, bank.evidence[best, columns], bank.evidence)
    return bank._replace(age=np.where(due, 0, bank.age), robust=robust, evidence=evidence), source


def _add_walks(hypotheses: Hypotheses, bank: Bank, source: Indices) -> tuple[Bank, Indices]:
    """Add a copy of the best row with each kind of walk."""
    columns = np.arange(source.shape[1])
    best = bank.log_weight.argmax(0)
    added = []
    for kind in range(1, len(hypotheses.walks) + 1):
        weight = bank.log_weight[best, columns] - hypotheses.walk_cost
        fields = (weight, bank.evidence[best, columns], np.full_like(best, kind), bank.robust[best, columns], 0 * best)
        added.append((fields, source[best, columns]))
    grown = [np.concatenate([old, *(fields[i][None] for fields, _ in added)]) for i, old in enumerate(bank)]
    return Bank(*grown), np.concatenate([source, *(rows[None] for _, rows in added)])


def _pack(bank: Bank, source: Indices, in_use: NDArray[np.bool_]) -> Review:
    """As few rows as the next capacity has, those that are needed first; others are copies of the best row.

    in_use: which rows were needed before. If nothing else changes, every row stays at its place.
    """
    needed = np.isfinite(bank.log_weight)
    most, columns = int(needed.sum(0).max()), np.arange(source.shape[1])
    capacity = most if len(columns) >= MANY else next((each for each in CAPACITIES if each >= most), most)
    best = bank.log_weight.argmax(0)
    if capacity >= len(in_use) == bank.rows:
        order = np.where(in_use & ~needed, best, np.arange(bank.rows)[:, None])
        spare = ~needed
    else:
        order = np.argsort(~needed, 0, kind="stable")[:capacity]
        order = np.concatenate([order, np.repeat(order[:1], capacity - len(order), 0)])
        spare = np.arange(capacity)[:, None] >= needed.sum(0)
        order = np.where(spare, best, order)
    packed = Bank(*(each[order, columns] for each in bank))  # type: ignore[arg-type]
    weight = np.where(spare, -np.inf, packed.log_weight)
    copy_of = np.where(spare, weight.argmax(0), np.arange(len(order))[:, None])
    return Review(packed._replace(log_weight=normalise(weight)), source[order, columns], copy_of)
