"""What a state with several beliefs keeps of each time update for a smoother."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.model.node import BatchSpec
from pcnet.model.protocols import SmoothingLayout
from pcnet.nodes.kalman_belief import KalmanState
from pcnet.nodes.kalman_smoothing import belief_of, continuity
from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.mixture_smoothing import MixtureRows, Pairs, Parts, SmoothedMixture
from pcnet.numerics.smoothing import right_divide
from pcnet.numerics.trees import spans


class PartsBefore(NamedTuple):
    """The beliefs that the last time update started from; n is 0 if nothing is kept."""

    mean: Tensor  # (B, k, n)
    covariance: Tensor  # (B, k, n, n)
    dmean_dtheta: Tensor  # (B, k, n, p)
    joint: Tensor  # probability of a stage before (first) and after (second) it, (B, ks, ks)


class TimeUpdates(NamedTuple):
    """Time updates of T rows: from which parts, and what they give of each; (T, B, k, ...)."""

    before: Parts
    joint: Tensor  # (T, B, ks, ks)
    after: Parts
    cross: Tensor  # covariance of a part after with that before, (T, B, k, n, n)


def no_parts_before(spec: BatchSpec, k: int, stages: int, n: int, p: int) -> PartsBefore:
    """Room for k parts of n elements with p parameters beside them."""
    zeros, c = spec.zeros, k * stages if n else 0
    return PartsBefore(zeros(k, n), zeros(k, n, n), zeros(k, n, p if n else 0), zeros(c, c))


def parts_before(belief: GaussianWithSensitivities, joint: Tensor) -> PartsBefore:
    """What is kept of beliefs (B, k, ...) before a time update, with these probabilities."""
    return PartsBefore(belief.mean, belief.covariance_by_source.sum(2), belief.dmean_dtheta, joint)


def pack(modes: KalmanState, probability: Tensor, before: PartsBefore, parameter_covariance: Tensor | None) -> Tensor:
    """All that a smoother needs of one observation as one row, (B, w); modes (B, k, ...)."""
    belief, update = modes.belief, modes.time_update
    parts = [update.number[:, :1], update.elapsed[:, :1], probability, belief.mean, belief.covariance_by_source.sum(2)]
    parts += [belief.dmean_dtheta, update.mean, update.covariance, update.dmean_dtheta, update.cross, *before]
    parts += [] if parameter_covariance is None else [parameter_covariance]
    return torch.cat([part.flatten(1) for part in parts], 1)


def unpack(rows: Tensor, layout: SmoothingLayout, pairs: Callable[[TimeUpdates], Pairs]) -> tuple[MixtureRows, Tensor]:
    """Rows (T, B, w) for a smoother, and the last covariance of the parameters beside the belief, (B, p, p).

    pairs: how the parts of a time update are predicted.
    """
    n, p, k, s = layout.size, layout.n_beside, layout.modes, layout.stages
    one, lead = belief_of(layout), rows.shape[:2]
    sizes = [1, 1, k * s, *(k * each for each in (*one, *one, n * n, *one)), (k * s) ** 2, p * p]
    number, elapsed, probability, *found = (rows[..., place] for place in spans(sizes))

    def parts(mean: Tensor, covariance: Tensor, slope: Tensor) -> Parts:
        columns = torch.cat([mean.reshape(*lead, k, n, 1), slope.reshape(*lead, k, n, p)], -1)
        return Parts(columns, covariance.reshape(*lead, k, n, n))

    joint = found[10].reshape(*lead, k * s, k * s)
    updates = TimeUpdates(parts(*found[7:10]), joint, parts(*found[3:6]), found[6].reshape(*lead, k, n, n))
    filtered, probability = parts(*found[:3]), probability.reshape(*lead, k, s)
    places = continuity(number, elapsed)
    made = MixtureRows(filtered, probability, updates.before, joint, pairs(updates), *places)
    return made, found[11][-1].reshape(rows.shape[1], p, p)


def pack_belief(belief: SmoothedMixture) -> Tensor:
    """A smoothed belief in the form of a row, (B, v)."""
    mean, covariance = belief.parts
    parts = belief.probability, mean[..., 0], covariance, mean[..., 1:]
    return torch.cat([part.flatten(1) for part in parts], 1)


def unpack_belief(belief: Tensor, layout: SmoothingLayout) -> SmoothedMixture:
    """The smoothed belief that `pack_belief` has packed."""
    n, p, k, s = layout.size, layout.n_beside, layout.modes, layout.stages
    sizes = [k * s, *(k * each for each in belief_of(layout))]
    probability, mean, covariance, slope = (belief[:, place] for place in spans(sizes))
    columns = torch.cat([mean.reshape(len(belief), k, n, 1), slope.reshape(len(belief), k, n, p)], -1)
    return SmoothedMixture(
        Parts(columns, covariance.reshape(len(belief), k, n, n)), probability.reshape(len(belief), k, s)
    )


def pairs_of_parts(updates: TimeUpdates) -> Pairs:
    """Each part is predicted by itself, whatever comes after."""
    return Pairs(
        updates.after.mean[:, :, :, None], updates.after.covariance[:, :, :, None], updates.cross[:, :, :, None]
    )


def pairs_of_categories(updates: TimeUpdates) -> Pairs:
    """Each part is predicted by the transition of each category, s⁻ = m⁻_j + F_j (s − m_j) + noise.

    The time update of category j started from the mixture N(m_j, P_j) of all parts, by their probability given j.
    F_j = C_j P_j⁻¹ with the covariance C_j between its end and its beginning.
    """
    before, after, k = updates.before, updates.after, updates.cross.shape[2]
    stages = updates.joint.shape[-1] // k
    joint = updates.joint.reshape(*updates.joint.shape[:2], k, stages, k, stages).sum((3, 5))
    total = joint.sum(2, keepdim=True)
    share = torch.where(total > 0, joint / torch.where(total > 0, total, 1.0), 1 / k)
    mean = torch.einsum("tbij,tbinp->tbjnp", share, before.mean)
    away = before.mean[:, :, :, None] - mean[:, :, None]  # (T, B, i, j, n, 1 + p)
    own = before.covariance[:, :, :, None]
    spread = own + away[..., :1] * away[..., 0][..., None, :]
    covariance = (share[..., None, None] * spread).sum(2)
    matrix = right_divide(updates.cross, covariance)[:, :, None]  # F_j
    predicted = after.mean[:, :, None] + matrix @ away
    rest = after.covariance[:, :, None] + matrix @ (own - covariance[:, :, None]) @ matrix.mT
    return Pairs(predicted, 0.5 * (rest + rest.mT), matrix @ own)
