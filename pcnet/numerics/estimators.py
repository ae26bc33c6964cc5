"""Estimators: how parameters and log-precisions are learned."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.numerics.integrators import column
from pcnet.numerics.laplace import posterior
from pcnet.settings import Fraction, NotNegative, Numbers, Positive, number, settings

# --- slow: parameters and precisions --------------------------------------------------------------------------------
NONE = torch.zeros(1, 0, 0)
"""No curvature, for rules that need none."""


class GradientAccumulator(NamedTuple):
    """What a slow node has gathered: gradient (B, n), of how many observations (B,), and how many steps it took (B,).

    mended: how often its posterior was mended (B,). For a rule that needs curvatures (B, n, n): that of the gradient,
    all that is known with what came before, and the prior's in the beginning; the gradient that steps have left over
    (B, n); and what the last few windows brought.
    """

    gradient: Tensor
    seen: Tensor
    steps: Tensor
    regularised: Tensor
    curvature: Tensor = NONE
    known: Tensor = NONE
    prior: Tensor = NONE
    unspent: Tensor = NONE
    recent_gradient: Tensor = NONE
    recent_curvature: Tensor = NONE

    @classmethod
    def nothing(cls, like: Tensor) -> GradientAccumulator:
        zero = like.new_zeros(like.shape[0])
        return cls(torch.zeros_like(like), zero, zero, zero, *([like.new_zeros(len(like), 0, 0)] * 6))


class Averaging(ABC):
    """How the gradients between two slow steps become one."""

    @abstractmethod
    def add(self, total: Tensor, gradient: Tensor) -> Tensor: ...

    @abstractmethod
    def read(self, gathered: GradientAccumulator) -> Tensor: ...


@settings
class Exponential(Averaging):
    """acc ← β acc + (1 − β)∇: the last few observations. β = 0 is the last one alone."""

    beta: Fraction = number(0.0)

    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        beta = column(self.beta, 1)
        return torch.lerp(gradient, total, beta)

    def read(self, gathered: GradientAccumulator) -> Tensor:
        return gathered.gradient


@settings
class WindowMean(Averaging):
    """The mean gradient of all observations since the last step."""

    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        return total + gradient

    def read(self, gathered: GradientAccumulator) -> Tensor:
        return gathered.gradient / gathered.seen.clamp_min(1)[:, None]


class ParameterEstimator(ABC):
    """A rule that moves parameters by what it gathers between two slow steps."""

    needs_curvature: bool = False
    """Whether it gathers gradient and curvature of the errors, and keeps the precision of the belief by itself.

    Otherwise it gathers the gradient of all of the free energy, prior included.
    """

    def begin(self, mean: Tensor, precision: Tensor) -> GradientAccumulator:
        """Nothing gathered yet, for a prior of this mean (B, n) and precision (B, n, n)."""
        nothing = GradientAccumulator.nothing(mean)
        if not self.needs_curvature:
            return nothing
        zero, none = torch.zeros_like(precision), nothing.gradient
        return nothing._replace(
            curvature=zero, known=precision, prior=precision, unspent=none, recent_gradient=none, recent_curvature=zero
        )

    def first(self, mean: Tensor, sd: Tensor) -> Tensor:
        """Where to begin to learn from, (B, n), with a prior of this mean and standard deviation."""
        return mean

    def warm_start(self, gathered: GradientAccumulator, pull: Tensor) -> GradientAccumulator:
        """For another pass over recorded data: nothing gathered yet but the pull of the prior (B, n)."""
        return gathered._replace(gradient=pull)

    @abstractmethod
    def accumulate(
        self, gathered: GradientAccumulator, gradient: Tensor, curvature: Tensor | None = None
    ) -> GradientAccumulator:
        """Add what one observation says."""

    @abstractmethod
    def step(self, gathered: GradientAccumulator) -> tuple[Tensor, GradientAccumulator]:
        """The change of the mean (B, n), and the accumulator with an empty gradient."""

    def forget(self, gathered: GradientAccumulator) -> GradientAccumulator:
        """What is left of it when the posterior becomes a prior."""
        return gathered

    def check_passes(self, whose: str) -> None:
        """Refuse to step once after a whole pass over recorded data, if that is not what it is made for."""
        if not self.needs_curvature:
            raise SettingError(
                f"{whose} steps by {type(self).__name__}, small steps that are made for online use; for recorded data "
                "give it estimator=pcnet.estimators.Newton(), or all at once: graph.fit(…, estimator=pcnet.estimators.Newton())"
            )


@settings
class RobbinsMonro(ParameterEstimator):
    """μ ← μ − α_j · accumulated ∇F with α_j = α/(j + t₀)^γ, j = 1, 2, … the number of this step."""

    rate: Positive = number(1e-4)
    t0: NotNegative = number(10.0)
    gamma: Numbers = number(0.3)
    averaging: Averaging = Exponential()

    def accumulate(
        self, gathered: GradientAccumulator, gradient: Tensor, curvature: Tensor | None = None
    ) -> GradientAccumulator:
        total = self.averaging.add(gathered.gradient, gradient)
        return gathered._replace(gradient=total, seen=gathered.seen + 1)

    def step(self, gathered: GradientAccumulator) -> tuple[Tensor, GradientAccumulator]:
        """The change of the mean (B, n), and the emptied accumulator."""
        steps = gathered.steps + 1
        change = -(self.rate / (steps + self.t0) ** self.gamma)[:, None] * self.averaging.read(gathered)
        return change, gathered._replace(
            gradient=torch.zeros_like(gathered.gradient), seen=torch.zeros_like(gathered.seen), steps=steps
        )


@settings
class Newton(ParameterEstimator):
    """μ ← μ − L⁻¹g, and when carried on L ← (1 − φ)L + φP: every observation counts, and the older ones less.

    g sums the gradients of the errors since the last step; L is the prior's precision P plus the curvatures of the
    errors of all observations, as far as they are not forgotten, and so the precision of the belief. With the
    Gauss–Newton curvature of errors that are linear in the parameters this is recursive least squares, or a Kalman
    filter of parameters that stand still. The prior bounds L from below, however long nothing is learned. By the errors
    of a `StateNode` states are taken as given, and the belief is too sure of itself; a `FilterNode` accounts for them.

    Over recorded data (`graph.fit`) each pass begins with L = P and g = P(μ − η), so that the step after it is that of
    Gauss and Newton on prior and observations; `forgetting`, `fading` and `reopening` do nothing there.

    forgetting: φ, the share of all knowledge that is given up after a step; a `fading` one besides, which is less with
    every step: fading/(j + 10) at the j-th.
    reopening: give up knowledge that the last few windows contradict. If their gradient is larger than one in a
    hundred should be, χ² = gᵀ(C + CL⁻¹C)⁻¹g with C their curvature, knowledge counts for that much less before the
    step is taken. So parameters that jump are found again, and so are those whose first observations were taken for
    too exact.
    """

    forgetting_factor: Fraction = number(0.0)
    decaying_forgetting: NotNegative = number(0.0)
    covariance_reset: bool = False
    needs_curvature = True

    def accumulate(
        self, gathered: GradientAccumulator, gradient: Tensor, curvature: Tensor | None = None
    ) -> GradientAccumulator:
        assert curvature is not None
        return gathered._replace(
            gradient=gathered.gradient + gradient, seen=gathered.seen + 1, curvature=gathered.curvature + curvature
        )

    def step(self, gathered: GradientAccumulator) -> tuple[Tensor, GradientAccumulator]:
        gathered = gathered._replace(
            recent_gradient=(1 - 1 / WINDOWS) * gathered.recent_gradient + gathered.gradient,
            recent_curvature=(1 - 1 / WINDOWS) * gathered.recent_curvature + gathered.curvature,
        )
        known = self._still_known(gathered) + gathered.curvature
        factor = torch.linalg.cholesky_ex(posterior(known).precision)[0]
        wanted = -torch.cholesky_solve((gathered.gradient + gathered.unspent)[..., None], factor)[..., 0]
        change, left = self._within_limits(wanted, known, gathered)
        return change, gathered._replace(
            gradient=torch.zeros_like(change),
            unspent=-torch.bmm(known, left[..., None])[..., 0],
            seen=torch.zeros_like(gathered.seen),
            steps=gathered.steps + 1,
            curvature=torch.zeros_like(known),
            known=known,
        )

    def forget(self, gathered: GradientAccumulator) -> GradientAccumulator:
        share = (self.forgetting_factor + self.decaying_forgetting / (gathered.steps + FADES_AFTER)).clamp_max(1.0)
        return gathered._replace(known=torch.lerp(gathered.known, gathered.prior, share[:, None, None]))

    def _still_known(self, gathered: GradientAccumulator) -> Tensor:
        """What is left of what was known before this window, (B, n, n)."""
        return (
            reopened(gathered, gathered.recent_gradient, ONE_IN_A_HUNDRED) if self.covariance_reset else gathered.known
        )

    def _within_limits(self, wanted: Tensor, known: Tensor, gathered: GradientAccumulator) -> tuple[Tensor, Tensor]:
        """As much of a change (B, n) as a step may be long, and what is left of it for the next one."""
        return wanted, torch.zeros_like(wanted)


@settings
class NoiseScoring(Newton):
    """`Newton` for log-precisions, which knows how noise levels differ from other parameters.

    A change by more than 1 counts by its logarithm: noise that is 50 times what it was taken for looks like 49 units,
    and is log 50 of them. No step is longer than `max_step`. What is too much for a step is left for the next ones, less
    of it each time: windows say more when they say "more noise" than when they say "less", and to cut off what they say
    would be to believe in too little noise.

    What windows say of a level depends on where it is believed to be, and far from there they seem to say more than
    they do: no more is taken for known than if all windows had said as much as the last few.

    step_limit_sd: for noise of states, of which little is heard at a time, and which parameters that have jumped look like. No
    step but the first is longer than so many times the step to be expected, 1/√(jL) at the j-th, and only windows that
    say "less noise" reopen what is known: these need to be no more surprising than one in twenty.

    caution: by how many prior standard deviations noise is taken for stronger than expected when learning begins, if
    the schedule asks the node to `orient`. Too much noise is unlearned within a few observations; who takes them for
    too exact becomes sure of what is wrong. Noise of states should not be taken for much stronger: with too much of it
    they follow whatever is observed, and nothing is learned of either noise.
    """

    covariance_reset: bool = True
    max_step: Positive = number(1.0)
    step_limit_sd: Positive | None = None
    initial_noise_inflation: NotNegative = number(0.0)

    def first(self, mean: Tensor, sd: Tensor) -> Tensor:
        return mean - column(self.initial_noise_inflation, 1) * sd

    def _still_known(self, gathered: GradientAccumulator) -> Tensor:
        before = gathered.known
        if self.covariance_reset and self.step_limit_sd is None:
            before = reopened(gathered, gathered.recent_gradient, ONE_IN_A_HUNDRED)
        elif self.covariance_reset:
            before = reopened(gathered, gathered.recent_gradient.clamp_max(0.0), ONE_IN_TWENTY)
        windows = WINDOWS * (1 - (1 - 1 / WINDOWS) ** (gathered.steps + 1))
        like_these = ((gathered.steps + 1) / windows)[:, None, None] * gathered.recent_curvature
        most = (gathered.prior + like_these).diagonal(dim1=-2, dim2=-1)
        by = (most / (before + gathered.curvature).diagonal(dim1=-2, dim2=-1)).clamp_max(1.0).sqrt()
        return by[:, :, None] * before * by[:, None]

    def _within_limits(self, wanted: Tensor, known: Tensor, gathered: GradientAccumulator) -> tuple[Tensor, Tensor]:
        bent = wanted.sign() * ((1 + wanted.abs()).log() + (1 - math.log(2)))
        wanted = torch.where(wanted.abs() > 1, bent, wanted)
        limit = column(self.max_step, 1)
        if self.step_limit_sd is not None:
            steps = gathered.steps[:, None]
            expected = 1 / ((steps + 1) * known.diagonal(dim1=-2, dim2=-1)).sqrt()
            limit = torch.where(steps > 0, torch.minimum(limit, column(self.step_limit_sd, 1) * expected), limit)
        change = torch.maximum(torch.minimum(wanted, limit), -limit)
        return change, LEFT * (wanted - change)


def reopened(gathered: GradientAccumulator, gradient: Tensor, rare: float) -> Tensor:
    """What is known (B, n, n), less of it where this gradient (B, n) of the last few windows contradicts it.

    rare: how far out in a normal distribution a contradiction begins, in standard deviations.
    """
    known, curvature = gathered.known, gathered.recent_curvature
    n = (curvature.diagonal(dim1=-2, dim2=-1) > 0).sum(-1).clamp_min(1)  # of the others nothing was heard
    expected = curvature + curvature @ torch.linalg.solve(known, curvature)
    scale = known.diagonal(dim1=-2, dim2=-1) * torch.finfo(known.dtype).eps ** 0.5  # for what nothing is learned of
    surprise = (gradient * torch.linalg.solve(expected + scale.diag_embed(), gradient)).sum(-1)
    limit = n * (1 - 2 / (9 * n) + rare * (2 / (9 * n)) ** 0.5) ** 3  # χ² by Wilson and Hilferty
    return torch.lerp(gathered.prior, known, (limit / surprise).clamp_max(1.0)[:, None, None])


FADES_AFTER = 10
"""So many steps are remembered alike before fading sets in."""


LEFT = 0.75
"""The share of what was too much for a step that is left for the next one."""


WINDOWS = 8
"""How many of the last windows a contradiction is looked for in, each counting less than the one after it."""


ONE_IN_A_HUNDRED, ONE_IN_TWENTY = 2.326, 1.645
"""The standard deviations beyond which so much of a normal distribution lies."""
