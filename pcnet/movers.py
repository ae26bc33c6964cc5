"""How a node moves: swappable rules that turn gradients and curvatures into steps.

A run works with rules that `pcnet.node.Start.lay_out` has laid out for its batch, dtype and device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.linalg import exponential_step, log_abs_det, posterior
from pcnet.settings import Fraction, NotNegative, Numbers, Positive, number, settings


def column(value: Tensor, trailing: int) -> Tensor:
    """A laid-out setting, one number or one for each batch element, shaped to multiply (B, *trailing)."""
    return value if value.dim() == 0 else value.view(-1, *(1,) * trailing)


# --- fast: generalised states -------------------------------------------------------------------------------------
class Evidence(NamedTuple):
    """What a state moves by: its mean x̃ (B, n), its own motion Dx̃ (B, n) and the matrix D, gradient and curvature.

    The curvature is None for a rule that does not need it. pace: how many sampling intervals have passed, (B,); None is
    one, as ever.
    """

    mean: Tensor
    motion: Tensor
    shift: Tensor
    gradient: Tensor
    curvature: Tensor | None
    pace: Tensor | None = None

    def paced(self, time: Tensor) -> Tensor:
        """The time of a step for as many sampling intervals as have passed; (), or (B,)."""
        return time if self.pace is None else time * self.pace


class StateMover(ABC):
    """A rule that moves a generalised state."""

    needs_curvature: bool = True
    implicit: bool = False
    """Whether the step is an implicit one, so that it can be taken jointly with those of the neighbours."""

    @abstractmethod
    def step(self, evidence: Evidence) -> Tensor:
        """The change of the mean, (B, n)."""


@settings
class Ozaki(StateMover):
    """Local linearisation: Δμ̃ = J₀⁻¹(exp(J₀Δs) − I)h with h = Dμ̃ − κ∇ and J₀ = D − κH.

    `time` is Δs. "curvature" takes Δs = exp(ν)/|det J₀|^(1/n), kept within [1e-6, 1]; a number (such as the sampling
    interval dt) is for one sampling interval, and as many times that if more of it has passed.
    """

    kappa: Positive = number(1.0)
    time: Literal["curvature"] | Positive = "curvature"
    nu: Numbers = number(-4.0)

    def step(self, evidence: Evidence) -> Tensor:
        assert evidence.curvature is not None
        kappa = column(self.kappa, 1)
        flow = torch.addcmul(evidence.motion, kappa, evidence.gradient, value=-1)
        jacobian = torch.addcmul(evidence.shift, column(self.kappa, 2), evidence.curvature, value=-1)
        if isinstance(self.time, str):
            time = (self.nu - log_abs_det(jacobian) / flow.shape[-1]).exp().clamp(1e-6, 1.0)
        else:
            time = evidence.paced(self.time).expand(flow.shape[0])
        return exponential_step(jacobian, flow, time)


@settings
class GradientFlow(StateMover):
    """One Euler step of the gradient flow: Δμ̃ = Δs (Dμ̃ − κ∇), with `time` for Δs."""

    time: Positive
    kappa: Positive = number(1.0)
    needs_curvature = False

    def step(self, evidence: Evidence) -> Tensor:
        time, kappa = (column(v, 1) for v in (evidence.paced(self.time), self.kappa))
        return time * (evidence.motion - kappa * evidence.gradient)


class Following(NamedTuple):
    """The step (B, n) that a state is about to take, and by how much less it is with a neighbour's δp; (B, n, p)."""

    step: Tensor
    following: Tensor


@settings
class Implicit(StateMover):
    """One implicit Euler step over `time`: (I/Δs − D + κH) Δμ̃ = Dμ̃ − κ∇, with H of Gauss and Newton.

    States and causes that move so do it jointly: from the top down, each node goes by errors in which the nodes below
    have answered already (elimination), and then these go by where it has gone (substitution). On a tree of linear
    functions that is the step of all of them together, exactly.
    """

    time: Positive
    kappa: Positive = number(1.0)
    implicit = True

    def step(self, evidence: Evidence) -> Tensor:
        matrix, flow = self._system(evidence)
        solved: Tensor = torch.linalg.solve(matrix, flow)
        return solved

    def answer(self, evidence: Evidence, cross: Tensor) -> Following:
        """The step, and −δμ̃/δp = κM⁻¹H_xp for a neighbour p whose cross curvature is H_xp (B, n, p)."""
        matrix, flow = self._system(evidence)
        solved = torch.linalg.solve(matrix, torch.cat([flow[..., None], column(self.kappa, 2) * cross], -1))
        return Following(solved[..., 0], solved[..., 1:])

    def _system(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        assert evidence.curvature is not None
        matrix = column(self.kappa, 2) * evidence.curvature - evidence.shift
        matrix.diagonal(dim1=-2, dim2=-1).add_(1 / column(evidence.paced(self.time), 1))
        return matrix, evidence.motion - column(self.kappa, 1) * evidence.gradient


# --- slow: parameters and precisions --------------------------------------------------------------------------------
NONE = torch.zeros(1, 0, 0)
"""No curvature, for rules that need none."""


class Gathered(NamedTuple):
    """What a slow node has gathered: gradient (B, n), of how many observations (B,), and how many steps it took (B,).

    mended: how often its posterior was mended (B,). For a rule that needs curvatures (B, n, n): that of the gradient,
    all that is known with what came before, and the prior's in the beginning; the gradient that steps have left over
    (B, n); and what the last few windows brought.
    """

    gradient: Tensor
    seen: Tensor
    steps: Tensor
    mended: Tensor
    curvature: Tensor = NONE
    known: Tensor = NONE
    prior: Tensor = NONE
    unspent: Tensor = NONE
    recent_gradient: Tensor = NONE
    recent_curvature: Tensor = NONE

    @classmethod
    def nothing(cls, like: Tensor) -> Gathered:
        zero = like.new_zeros(like.shape[0])
        return cls(torch.zeros_like(like), zero, zero, zero)


class Accumulator(ABC):
    """How the gradients between two slow steps become one."""

    @abstractmethod
    def add(self, total: Tensor, gradient: Tensor) -> Tensor: ...

    @abstractmethod
    def read(self, gathered: Gathered) -> Tensor: ...


@settings
class Exponential(Accumulator):
    """acc ← β acc + (1 − β)∇: the last few observations. β = 0 is the last one alone."""

    beta: Fraction = number(0.0)

    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        beta = column(self.beta, 1)
        return torch.lerp(gradient, total, beta)

    def read(self, gathered: Gathered) -> Tensor:
        return gathered.gradient


@settings
class WindowMean(Accumulator):
    """The mean gradient of all observations since the last step."""

    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        return total + gradient

    def read(self, gathered: Gathered) -> Tensor:
        return gathered.gradient / gathered.seen.clamp_min(1)[:, None]


class ParameterMover(ABC):
    """A rule that moves parameters by what it gathers between two slow steps."""

    needs_curvature: bool = False
    """Whether it gathers gradient and curvature of the errors, and keeps the precision of the belief by itself.

    Otherwise it gathers the gradient of all of the free energy, prior included.
    """

    def begin(self, mean: Tensor, precision: Tensor) -> Gathered:
        """Nothing gathered yet, for a prior of this mean (B, n) and precision (B, n, n)."""
        nothing = Gathered.nothing(mean)
        if not self.needs_curvature:
            return nothing
        zero, none = torch.zeros_like(precision), nothing.gradient
        return nothing._replace(
            curvature=zero, known=precision, prior=precision, unspent=none, recent_gradient=none, recent_curvature=zero
        )

    def first(self, mean: Tensor, sd: Tensor) -> Tensor:
        """Where to begin to learn from, (B, n), with a prior of this mean and standard deviation."""
        return mean

    def begin_again(self, gathered: Gathered, pull: Tensor) -> Gathered:
        """For another pass over recorded data: nothing gathered yet but the pull of the prior (B, n)."""
        return gathered._replace(gradient=pull)

    @abstractmethod
    def gather(self, gathered: Gathered, gradient: Tensor, curvature: Tensor | None = None) -> Gathered:
        """Add what one observation says."""

    @abstractmethod
    def step(self, gathered: Gathered) -> tuple[Tensor, Gathered]:
        """The change of the mean (B, n), and the accumulator with an empty gradient."""

    def forget(self, gathered: Gathered) -> Gathered:
        """What is left of it when the posterior becomes a prior."""
        return gathered

    def check_passes(self, whose: str) -> None:
        """Refuse to step once after a whole pass over recorded data, if that is not what it is made for."""
        if not self.needs_curvature:
            raise SettingError(
                f"{whose} steps by {type(self).__name__}, small steps that are made for online use; for recorded data "
                "give it mover=pcnet.movers.Newton(), or all at once: graph.fit(…, mover=pcnet.movers.Newton())"
            )


@settings
class RobbinsMonro(ParameterMover):
    """μ ← μ − α_j · accumulated ∇F with α_j = α/(j + t₀)^γ, j = 1, 2, … the number of this step."""

    rate: Positive = number(1e-4)
    t0: NotNegative = number(10.0)
    gamma: Numbers = number(0.3)
    accumulate: Accumulator = Exponential()

    def gather(self, gathered: Gathered, gradient: Tensor, curvature: Tensor | None = None) -> Gathered:
        total = self.accumulate.add(gathered.gradient, gradient)
        return gathered._replace(gradient=total, seen=gathered.seen + 1)

    def step(self, gathered: Gathered) -> tuple[Tensor, Gathered]:
        """The change of the mean (B, n), and the emptied accumulator."""
        steps = gathered.steps + 1
        change = -(self.rate / (steps + self.t0) ** self.gamma)[:, None] * self.accumulate.read(gathered)
        return change, gathered._replace(
            gradient=torch.zeros_like(gathered.gradient), seen=torch.zeros_like(gathered.seen), steps=steps
        )


@settings
class Newton(ParameterMover):
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

    forgetting: Fraction = number(0.0)
    fading: NotNegative = number(0.0)
    reopening: bool = False
    needs_curvature = True

    def gather(self, gathered: Gathered, gradient: Tensor, curvature: Tensor | None = None) -> Gathered:
        assert curvature is not None
        return gathered._replace(
            gradient=gathered.gradient + gradient, seen=gathered.seen + 1, curvature=gathered.curvature + curvature
        )

    def step(self, gathered: Gathered) -> tuple[Tensor, Gathered]:
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

    def forget(self, gathered: Gathered) -> Gathered:
        share = (self.forgetting + self.fading / (gathered.steps + FADES_AFTER)).clamp_max(1.0)
        return gathered._replace(known=torch.lerp(gathered.known, gathered.prior, share[:, None, None]))

    def _still_known(self, gathered: Gathered) -> Tensor:
        """What is left of what was known before this window, (B, n, n)."""
        return reopened(gathered, gathered.recent_gradient, ONE_IN_A_HUNDRED) if self.reopening else gathered.known

    def _within_limits(self, wanted: Tensor, known: Tensor, gathered: Gathered) -> tuple[Tensor, Tensor]:
        """As much of a change (B, n) as a step may be long, and what is left of it for the next one."""
        return wanted, torch.zeros_like(wanted)


@settings
class Scoring(Newton):
    """`Newton` for log-precisions, which knows how noise levels differ from other parameters.

    A change by more than 1 counts by its logarithm: noise that is 50 times what it was taken for looks like 49 units,
    and is log 50 of them. No step is longer than `largest`. What is too much for a step is left for the next ones, less
    of it each time: windows say more when they say "more noise" than when they say "less", and to cut off what they say
    would be to believe in too little noise.

    What windows say of a level depends on where it is believed to be, and far from there they seem to say more than
    they do: no more is taken for known than if all windows had said as much as the last few.

    steady: for noise of states, of which little is heard at a time, and which parameters that have jumped look like. No
    step but the first is longer than so many times the step to be expected, 1/√(jL) at the j-th, and only windows that
    say "less noise" reopen what is known: these need to be no more surprising than one in twenty.

    caution: by how many prior standard deviations noise is taken for stronger than expected when learning begins, if
    the schedule asks the node to `orient`. Too much noise is unlearned within a few observations; who takes them for
    too exact becomes sure of what is wrong. Noise of states should not be taken for much stronger: with too much of it
    they follow whatever is observed, and nothing is learned of either noise.
    """

    reopening: bool = True
    largest: Positive = number(1.0)
    steady: Positive | None = None
    caution: NotNegative = number(0.0)

    def first(self, mean: Tensor, sd: Tensor) -> Tensor:
        return mean - column(self.caution, 1) * sd

    def _still_known(self, gathered: Gathered) -> Tensor:
        before = gathered.known
        if self.reopening and self.steady is None:
            before = reopened(gathered, gathered.recent_gradient, ONE_IN_A_HUNDRED)
        elif self.reopening:
            before = reopened(gathered, gathered.recent_gradient.clamp_max(0.0), ONE_IN_TWENTY)
        windows = WINDOWS * (1 - (1 - 1 / WINDOWS) ** (gathered.steps + 1))
        like_these = ((gathered.steps + 1) / windows)[:, None, None] * gathered.recent_curvature
        most = (gathered.prior + like_these).diagonal(dim1=-2, dim2=-1)
        by = (most / (before + gathered.curvature).diagonal(dim1=-2, dim2=-1)).clamp_max(1.0).sqrt()
        return by[:, :, None] * before * by[:, None]

    def _within_limits(self, wanted: Tensor, known: Tensor, gathered: Gathered) -> tuple[Tensor, Tensor]:
        bent = wanted.sign() * ((1 + wanted.abs()).log() + (1 - math.log(2)))
        wanted = torch.where(wanted.abs() > 1, bent, wanted)
        limit = column(self.largest, 1)
        if self.steady is not None:
            steps = gathered.steps[:, None]
            expected = 1 / ((steps + 1) * known.diagonal(dim1=-2, dim2=-1)).sqrt()
            limit = torch.where(steps > 0, torch.minimum(limit, column(self.steady, 1) * expected), limit)
        change = torch.maximum(torch.minimum(wanted, limit), -limit)
        return change, LEFT * (wanted - change)


def reopened(gathered: Gathered, gradient: Tensor, rare: float) -> Tensor:
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
