"""Downhill over passes: where a pass stood and what it led to, and which step is tried next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.node import merge

GROWTH = 4.0
"""How many times longer a step may be than the one before it, in units of what its mover proposes."""
HALVINGS = 16
"""A step that does not lower the free action is halved so many times before it is given up."""


class Stand(NamedTuple):
    """Where a pass stood: its free action (B,), and what stood still, one after the other, (B, n).

    What it led to: the step from there (B, n), how fast the free action should fall along it at first (B,), which batch
    elements can take it (B,), and the beliefs by node.
    """

    action: Tensor
    mean: Tensor
    step: Tensor
    fall: Tensor
    able: Tensor
    beliefs: Mapping[str, Any]

    def where(self, chosen: Tensor, other: Stand) -> Stand:
        """This one for the chosen batch elements (B,), and the other for the rest."""
        return Stand(
            torch.where(chosen, self.action, other.action),
            torch.where(chosen[:, None], self.mean, other.mean),
            torch.where(chosen[:, None], self.step, other.step),
            torch.where(chosen, self.fall, other.fall),
            torch.where(chosen, self.able, other.able),
            {name: merge(chosen, belief, other.beliefs[name]) for name, belief in self.beliefs.items()},
        )


class Descent(NamedTuple):
    """How far a descent has got: the best stand, and for each batch element what is to come, (B,) each.

    share: of the step from there, to be tried next. going: whether there is a next. settled: whether the free action
    is hardly changed by it. passes: how many there were. halved: how often a step was taken back.
    """

    best: Stand
    share: Tensor
    going: Tensor
    settled: Tensor
    passes: Tensor
    halved: Tensor

    @classmethod
    def begin(cls, first: Stand) -> Descent:
        one, going = torch.ones_like(first.action), first.able & torch.isfinite(first.action)
        return cls(first, one, going, torch.zeros_like(going), one, torch.zeros_like(one))

    @property
    def next(self) -> Tensor:
        """Where the next pass is to stand, (B, n)."""
        return self.best.mean + torch.where(self.going, self.share, 0.0)[:, None] * self.best.step

    def judge(self, tried: Stand, tolerance: float) -> Descent:
        """Keep the step where it has lowered the free action, take it back and halve it where it has not.

        Where it was kept, the next one is as long as would have been best for this one, by the parabola through what
        was expected and what was found, but for no more than four times its share. A small share changes little, which
        does not mean that the free action has settled.
        """
        change = tried.action - self.best.action
        expected = self.share * self.best.fall
        best_share = self.share * expected / (2 * (change + expected)).clamp_min(expected / GROWTH / 2)
        better = self.going & (change < 0)  # what is not finite is no better
        worse = self.going & ~better
        settled = self.going & (change.abs() <= tolerance * self.share.clamp_max(1.0))
        best = tried.where(better, self.best)
        share = torch.where(better, torch.minimum(best_share, GROWTH * self.share), self.share / 2)
        given_up = worse & (share < 0.5**HALVINGS)
        return Descent(
            best,
            torch.where(self.going, share, self.share),
            self.going & ~settled & ~given_up & best.able,
            self.settled | settled,
            self.passes + self.going,
            self.halved + (worse & ~settled),
        )
