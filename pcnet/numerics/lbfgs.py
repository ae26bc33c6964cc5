"""Minimisation of the free action over passes: limited-memory BFGS around Newton steps, with backtracking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.numerics.trees import select

MAX_BACKTRACKS = 16  # a step that does not decrease the free action is halved this many times before the search ends
MEMORY = 8  # number of curvature pairs that are kept
MAX_LOG_RATIO = 0.5  # a curvature pair is used where the log of every precision has changed by less than this since


class Iterate(NamedTuple):
    """A point of the search, evaluated by one pass over the data."""

    free_action: Tensor  # what is minimised, (B,)
    mean: Tensor  # concatenated means of all learned nodes, (B, n)
    step: Tensor  # the step that the estimators propose, (B, n)
    feasible: Tensor  # which batch elements did not diverge, (B,)
    gradient: Tensor  # (B, n)
    precision: Tensor  # of the beliefs, block-diagonal over nodes, (B, n, n)
    states: Mapping[str, Any]  # of each learned node after the step


class CurvaturePair(NamedTuple):
    """A step and the change of the gradient along it, (B, n) each, and the precisions before it, (B, n)."""

    step: Tensor
    gradient_change: Tensor
    precision: Tensor


class LBFGS(NamedTuple):
    """State of the search; everything but `best` and `pairs` for each batch element, (B,)."""

    best: Iterate
    step_fraction: Tensor  # fraction of the next step that is tried
    active: Tensor  # whether the search goes on
    converged: Tensor  # whether the last step changed the free action by less than the tolerance
    iterations: Tensor  # number of passes
    backtracks: Tensor  # number of rejected steps
    pairs: tuple[CurvaturePair, ...] = ()  # the last ones, the oldest first; without any, steps are the estimators'

    @classmethod
    def init(cls, first: Iterate) -> LBFGS:
        one, active = torch.ones_like(first.free_action), first.feasible & torch.isfinite(first.free_action)
        return cls(first, one, active, torch.zeros_like(active), one, torch.zeros_like(one))

    @property
    def candidate(self) -> Tensor:
        """The mean to evaluate next, (B, n)."""
        return self.best.mean + torch.where(self.active[:, None], self.step_fraction[:, None] * self._step(), 0.0)

    def _step(self) -> Tensor:
        """The quasi-Newton step from the best iterate by the two-loop recursion, (B, n)."""
        if not self.pairs:
            return self.best.step
        direction, factors, now = self.best.gradient, [], self.best.precision.diagonal(dim1=-2, dim2=-1)
        for step, change, precision in reversed(self.pairs):
            curvature = (step * change).sum(1, keepdim=True)
            near = (now / precision).log().abs().amax(1, keepdim=True) < MAX_LOG_RATIO
            rho = torch.where(near & (curvature > 0), 1 / curvature, 0.0)
            factors.append((rho, rho * (step * direction).sum(1, keepdim=True)))
            direction = direction - factors[-1][1] * change
        direction = self._initial_inverse_hessian(direction)
        for (step, change, _), (rho, alpha) in zip(self.pairs, reversed(factors), strict=True):
            direction = direction + step * (alpha - rho * (change * direction).sum(1, keepdim=True))
        return -direction

    def _initial_inverse_hessian(self, vector: Tensor) -> Tensor:
        """Λ⁻¹ vector with the precision Λ of the beliefs, scaled down as much as the estimators limited their steps."""
        newton = torch.linalg.solve(self.best.precision, self.best.gradient)
        scale = torch.where(newton == 0, 1.0, (self.best.step / newton).abs()).clamp(0.0, 1.0).sqrt()
        found: Tensor = scale * torch.linalg.solve(self.best.precision, scale * vector)
        return found

    def update(self, tried: Iterate, tolerance: float, *, remember: bool) -> LBFGS:
        """Accept the evaluated candidate where it decreases the free action; elsewhere halve the next step.

        tolerance is the change that counts as converged, for a full step; remember keeps the curvature pair.
        """
        change = tried.free_action - self.best.free_action
        better = self.active & (change < 0)  # False where it is not finite
        worse = self.active & ~better
        converged = self.active & (change.abs() <= tolerance * self.step_fraction)
        states = {name: select(better, state, self.best.states[name]) for name, state in tried.states.items()}
        best = Iterate(*select(better, tried[:-1], self.best[:-1]), states)
        fraction = torch.where(better, (2 * self.step_fraction).clamp_max(1.0), self.step_fraction / 2)
        given_up = worse & (fraction < 0.5**MAX_BACKTRACKS)
        precision = self.best.precision.diagonal(dim1=-2, dim2=-1)
        pair = CurvaturePair(best.mean - self.best.mean, best.gradient - self.best.gradient, precision)
        return LBFGS(
            best,
            torch.where(self.active, fraction, self.step_fraction),
            self.active & ~converged & ~given_up & best.feasible,
            self.converged | converged,
            self.iterations + self.active,
            self.backtracks + (worse & ~converged),
            (*self.pairs, pair)[-MEMORY:] if remember else (),
        )
