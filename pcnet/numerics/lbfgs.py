"""Downhill over passes: where a pass stood and what it led to, and which step is tried next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.trees import select

HALVINGS = 16
"""A step that does not lower the free action is halved so many times before it is given up."""
MEMORY = 8
"""How many of the last steps tell how slopes change."""
NEAR = 0.5
"""By how much the logarithm of a precision may differ where they tell it."""


class Stand(NamedTuple):
    """Where a pass stood: its free action (B,), and what stood still, one after the other, (B, n).

    What it led to: the step from there (B, n), which batch elements can take it (B,), and the beliefs by node. The
    slopes there (B, n) and the precision of all beliefs (B, n, n), by which the step was found.
    """

    action: Tensor
    mean: Tensor
    step: Tensor
    able: Tensor
    slope: Tensor
    precision: Tensor
    beliefs: Mapping[str, Any]

    def where(self, chosen: Tensor, other: Stand) -> Stand:
        """This one for the chosen batch elements (B,), and the other for the rest."""
        beliefs = {name: select(chosen, belief, other.beliefs[name]) for name, belief in self.beliefs.items()}
        return Stand(
            torch.where(chosen, self.action, other.action),
            torch.where(chosen[:, None], self.mean, other.mean),
            torch.where(chosen[:, None], self.step, other.step),
            torch.where(chosen, self.able, other.able),
            torch.where(chosen[:, None], self.slope, other.slope),
            torch.where(chosen[:, None, None], self.precision, other.precision),
            beliefs,
        )


class Pair(NamedTuple):
    """A step that was taken, and by how much the slopes changed with it; (B, n) each, 0 where none was taken.

    How precise beliefs were before it (B, n): where they are far more or less so now, it tells nothing of here.
    """

    step: Tensor
    change: Tensor
    precision: Tensor


class Descent(NamedTuple):
    """How far a descent has got: the best stand, and for each batch element what is to come, (B,) each.

    share: of the step from there, to be tried next. going: whether there is a next. settled: whether the free action
    is hardly changed by it. passes: how many there were. halved: how often a step was taken back. pairs: the last
    steps, if they are to tell how slopes change (limited-memory BFGS, on top of what the beliefs say of that).
    """

    best: Stand
    share: Tensor
    going: Tensor
    converged: Tensor
    passes: Tensor
    backtracks: Tensor
    pairs: tuple[Pair, ...] = ()

    @classmethod
    def begin(cls, first: Stand) -> Descent:
        one, going = torch.ones_like(first.action), first.able & torch.isfinite(first.action)
        return cls(first, one, going, torch.zeros_like(going), one, torch.zeros_like(one))

    @property
    def next(self) -> Tensor:
        """Where the next pass is to stand, (B, n)."""
        return self.best.mean + torch.where(self.going[:, None], self.share[:, None] * self._step(), 0.0)

    def _step(self) -> Tensor:
        """The step from the best stand, (B, n): that of the movers, corrected by what the last steps have shown."""
        if not self.pairs:
            return self.best.step
        slope, shares, now = self.best.slope, [], self.best.precision.diagonal(dim1=-2, dim2=-1)
        for step, change, precision in reversed(self.pairs):
            curvature = (step * change).sum(1, keepdim=True)
            near = (now / precision).log().abs().amax(1, keepdim=True) < NEAR
            weight = torch.where(near & (curvature > 0), 1 / curvature, 0.0)
            shares.append((weight, weight * (step * slope).sum(1, keepdim=True)))
            slope = slope - shares[-1][1] * change
        found = self._uncorrected(slope)
        for (step, change, _), (weight, share) in zip(self.pairs, reversed(shares), strict=True):
            found = found + step * (share - weight * (change * found).sum(1, keepdim=True))
        return -found

    def _uncorrected(self, slope: Tensor) -> Tensor:
        """Λ⁻¹ slope with Λ the precision of the beliefs, as much less as movers have shortened their steps; (B, n)."""
        whole = torch.linalg.solve(self.best.precision, self.best.slope)
        less = torch.where(whole == 0, 1.0, (self.best.step / whole).abs()).clamp(0.0, 1.0).sqrt()
        found: Tensor = less * torch.linalg.solve(self.best.precision, less * slope)
        return found

    def judge(self, tried: Stand, tolerance: float, *, remember: bool) -> Descent:
        """Keep the step where it has lowered the free action, take it back and halve it where it has not.

        A small share changes little, which does not mean that the free action has settled.
        """
        change = tried.action - self.best.action
        better = self.going & (change < 0)  # what is not finite is no better
        worse = self.going & ~better
        converged = self.going & (change.abs() <= tolerance * self.share)
        best = tried.where(better, self.best)
        share = torch.where(better, (2 * self.share).clamp_max(1.0), self.share / 2)
        given_up = worse & (share < 0.5**HALVINGS)
        precision = self.best.precision.diagonal(dim1=-2, dim2=-1)
        pair = Pair(best.mean - self.best.mean, best.slope - self.best.slope, precision)
        return Descent(
            best,
            torch.where(self.going, share, self.share),
            self.going & ~converged & ~given_up & best.able,
            self.converged | converged,
            self.passes + self.going,
            self.backtracks + (worse & ~converged),
            (*self.pairs, pair)[-MEMORY:] if remember else (),
        )
