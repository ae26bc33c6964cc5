"""Parameter nodes: slow Gaussian beliefs that parametrise a flow or a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.model.messages import Error, ParameterTransition, Prediction
from pcnet.model.node import (
    INDEFINITE,
    BatchSpec,
    Energy,
    ErrorShape,
    ForecastContext,
    ForecastStart,
    Indefinite,
    Link,
    Node,
    NodeContext,
    Recordable,
)
from pcnet.numerics.coloured_noise import Noise
from pcnet.numerics.estimators import ParameterEstimator, RobbinsMonro
from pcnet.numerics.kernels import White
from pcnet.numerics.laplace import covariance_of, laplace_posterior, standard_deviations
from pcnet.numerics.precision import DenseCurvature
from pcnet.settings import PositiveVector, Vector, at_least_1d, broadcast, settings


class ParameterBelief(NamedTuple):
    """Mean (B, p), posterior precision (B, p, p) with log|Σ| (B,), and the same of the prior.

    How the belief before passed into this one, with what was forgotten, or by what a state above expects: see
    `Handover`.
    """

    mean: Tensor
    precision: Tensor
    log_det_covariance: Tensor
    prior_mean: Tensor
    prior_precision: Tensor
    prior_log_det_covariance: Tensor
    handed: Tensor
    handed_mean: Tensor
    handed_kept: Tensor
    handed_lost: Tensor


class ParameterRule(NamedTuple):
    """How θ moves, and the standard deviation (B, p) by which it may differ from what is expected of it."""

    mover: ParameterEstimator
    sd: Tensor
    recorded: bool = False
    """Whether it steps after passes over recorded data, so that no belief is handed on within them."""


@settings
class ParameterNode(Node):
    """A Gaussian belief over parameters θ with prior N(η, sd²). Local energy ½(θ − η)ᵀΠ_θ(θ − η).

    η is what the states above predict, added up; where there are none it is `mean`, and then carrying makes the
    posterior the prior.

    mean: (..., p) with leading batch dimensions; where the belief begins in any case. sd: one number or (..., p).
    mover: the paper's `RobbinsMonro`, or `Newton`, which learns far more from the same observations.
    """

    _: KW_ONLY
    mean: Vector
    sd: PositiveVector
    estimator: ParameterEstimator = RobbinsMonro()
    curvature: Literal["gauss-newton", "exact"] = "gauss-newton"
    indefinite: Indefinite = "clamp"
    role: ClassVar[str] = "parameter"

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if self.mean.dim() == 0:
            object.__setattr__(self, "mean", self.mean[None])
        if self.sd.dim() and self.sd.shape[-1] not in (1, self.width):
            raise SettingError(
                f"{self.title}: sd has {self.sd.shape[-1]} values in its last dimension, mean has {self.width}"
            )
        try:
            _ = broadcast(self.mean.shape, self.sd.shape)
        except RuntimeError:
            shapes = f"mean {tuple(self.mean.shape)} and sd {tuple(self.sd.shape)}"
            raise SettingError(f"{self.title}: the shapes of {shapes} do not fit together") from None

    @property
    def width(self) -> int:
        """How many parameters there are."""
        return self.mean.shape[-1]

    def describe(self) -> str:
        return f"{self.width} parameter{'s' if self.width > 1 else ''}"

    @property
    def error_shape(self) -> ErrorShape:
        """Of the error of what is predicted of it: values only, without motion."""
        return ErrorShape(1, self.width)

    def as_parent(self, link: Link) -> None:
        if link.kind != "parametrises":
            Node.as_parent(self, link)

    def as_child(self, link: Link) -> None:
        if link.kind != "predicts":
            Node.as_child(self, link)

    def check(self, above: tuple[Link, ...], below: tuple[Link, ...], like: Tensor) -> None:
        if not below:
            raise GraphError(f"{self.title} parametrises nothing: add graph.parametrises({self.name}, state)")
        states = [link.parent for link in above if link.kind == "predicts"]
        sure = [state for state in states if state.sure]
        if sure and len(states) > 1:
            raise GraphError(
                f"{self.title} is predicted by {states[0].name!r} and {states[1].name!r}, of which one carries its "
                "whole belief: make them one state"
            )
        if self.estimator.needs_curvature and states and not sure:
            raise GraphError(
                f"{self.title} is predicted from above, but {type(self.estimator).__name__} takes the prior it began with "
                "for good; use RobbinsMonro, or a FilterNode above"
            )
        if sure and not self.estimator.needs_curvature:
            raise GraphError(
                f"{self.title} is predicted by {sure[0].name!r}, which asks how sure it is; use the mover Newton()"
            )

    def check_batch(self, above: tuple[Link, ...]) -> None:
        self.estimator.check_batch(self.title)
        if any(link.kind == "predicts" for link in above):
            raise GraphError(
                f"{self.title} is predicted from above, so that it moves within a pass and not after it; name those "
                "that do: pcnet.batch(['noise_y', …])"
            )

    def begin(self, local: NodeContext, start: BatchSpec) -> None:
        mean = start.fill(self.mean, 1)
        sd = at_least_1d(self.sd)
        deviation = start.fill(sd.expand(*sd.shape[:-1], self.width), 1)
        local.rule = ParameterRule(start.lay_out(self.estimator), deviation)
        precision, log_det = (deviation**-2).diag_embed(), 2 * deviation.log().sum(-1)
        kept = torch.eye(self.width).to(mean).repeat(start.batch, 1, 1)
        handed = (torch.zeros_like(log_det), mean, kept, torch.zeros_like(kept))
        local.belief = ParameterBelief(mean, precision, log_det, mean, precision, log_det, *handed)
        local.memory = local.rule.mover.init(mean, precision)

    def warm_start(self, local: NodeContext, belief: ParameterBelief) -> None:
        """Gather anew, beginning with the pull of the prior; what earlier passes have said of the same is not added."""
        local.belief, local.rule = belief, local.rule._replace(recorded=True)
        pull = torch.bmm(belief.prior_precision, (belief.mean - belief.prior_mean)[..., None])[..., 0]
        local.memory = local.rule.mover.warm_start(local.memory, pull)

    def prediction(self, local: NodeContext, link: Link) -> Prediction[Tensor]:
        belief: ParameterBelief = local.belief
        online = local.rule.mover.needs_curvature and not local.rule.recorded
        handed = ParameterTransition(*belief[-4:]) if online else None
        return Prediction(belief.mean, covariance=partial(self._covariance, local), handover=handed)

    def error(self, local: NodeContext, link: Link) -> Error[DenseCurvature]:
        belief: ParameterBelief = local.belief
        prior = belief.prior_precision
        weighted = torch.bmm(prior, (belief.mean - self._expected(local))[..., None]).mT

        def answered() -> Error[DenseCurvature]:
            """Π − ΠΛ⁻¹Π: what the prior's precision leaves once the posterior is known."""
            left = prior - prior @ covariance_of(belief.precision) @ prior
            return Error(weighted, DenseCurvature(left), noise=noise)

        noise = Noise(local.rule.sd**2, White(), 0)
        return Error(weighted, DenseCurvature(prior), eliminated=answered if link.parent.sure else None, noise=noise)

    def _sure(self, local: NodeContext) -> bool:
        """Whether a state above says how sure it is of its prediction."""
        return any(link.parent.sure for link in local.links_above("predicts"))

    def _expected(self, local: NodeContext) -> Tensor:
        """η, (B, p)."""
        predicted: list[Tensor] = [local.prediction(link)[:, 0] for link in local.links_above("predicts")]
        return sum(predicted[1:], predicted[0]) if predicted else local.belief.prior_mean

    def update(self, local: NodeContext) -> None:
        change, local.memory = local.rule.mover.step(local.memory)
        local.belief = local.belief._replace(mean=local.belief.mean + change)

    def accumulate(self, local: NodeContext) -> None:
        if local.rule.mover.needs_curvature:
            gradient, curvature = (torch.zeros_like(part) for part in local.belief[:2])
            gradient, curvature = self._less_errors(local, gradient), self._with_evidence(local, curvature)
            local.memory = local.rule.mover.accumulate(local.memory, gradient, curvature)
        else:
            local.memory = local.rule.mover.accumulate(local.memory, self.gradient(local))

    def gradient(self, local: NodeContext) -> Tensor:
        belief = local.belief
        pull = torch.bmm(belief.prior_precision, (belief.mean - self._expected(local))[..., None])[..., 0]
        return self._less_errors(local, pull)

    def hessian(self, local: NodeContext) -> Tensor:
        return self._with_evidence(local, local.belief.prior_precision)

    def _less_errors(self, local: NodeContext, gradient: Tensor) -> Tensor:
        """A gradient (B, p) with that of the errors below."""
        for link in local.below:
            gradient = gradient - local.error(link).weighted
        return gradient

    def _with_evidence(self, local: NodeContext, curvature: Tensor) -> Tensor:
        """A curvature (B, p, p) with that of the errors below."""
        for link in local.below:
            error = local.error(link)
            curvature = curvature + error.precision
            if self.curvature == "exact" and error.remainder is not None:
                curvature = curvature + error.remainder
        return curvature

    def update_covariance(self, local: NodeContext) -> None:
        found = laplace_posterior(local.memory.precision if local.rule.mover.needs_curvature else self.hessian(local))
        if found.regularised is not None:
            if self.indefinite == "raise":
                local.fail(found.regularised, INDEFINITE)
            local.memory = local.memory._replace(regularised=local.memory.regularised + found.regularised)
        local.belief = local.belief._replace(precision=found.precision, log_det_covariance=found.log_det_covariance)

    def renew_prior(self, local: NodeContext) -> None:
        if self._sure(local):
            self._hand_over(local)
            return
        if local.links_above("predicts"):
            return  # the prior is for those above to say
        belief, rule = local.belief, local.rule.mover
        if not rule.needs_curvature:
            local.belief = belief._replace(
                prior_mean=belief.mean,
                prior_precision=belief.precision,
                prior_log_det_covariance=belief.log_det_covariance,
            )
            return
        local.memory = rule.forget(local.memory)
        left, before = laplace_posterior(local.memory.precision), covariance_of(belief.precision)
        kept = before @ left.precision
        local.belief = ParameterBelief(
            belief.mean,
            left.precision,
            left.log_det_covariance,
            belief.mean,
            left.precision,
            left.log_det_covariance,
            belief.handed + 1,
            belief.mean,
            kept,
            before - kept @ before,
        )

    def _hand_over(self, local: NodeContext) -> None:
        """Take what the state above expects for belief and prior, and remember what that owes to the belief before.

        With v₀ the covariance so far, v₁ the expected one and c the one between: kept = c v₁⁻¹, lost = v₀ − kept v₁
        keptᵀ.
        """
        (link,) = local.links_above("predicts")
        message, belief = local.message(link), local.belief
        assert message.expected is not None and message.between is not None
        v0, v1 = covariance_of(belief.precision), message.expected.covariance
        found = laplace_posterior(covariance_of(v1))
        kept = message.between @ found.precision
        explained = kept @ v1 @ kept.mT
        # where those above are no normal distribution, what they say may explain more than there was
        most = torch.linalg.eigvals(belief.precision @ explained).real.amax(-1).clamp_min(1.0)[:, None, None]
        kept, lost = kept / most.sqrt(), v0 - explained / most
        fresh = (message.expected.mean, found.precision, found.log_det_covariance)
        local.belief = ParameterBelief(*fresh, *fresh, belief.handed + 1, belief.mean, kept, lost)
        local.memory = local.memory._replace(precision=found.precision, prior_precision=found.precision)

    def initialise(self, local: NodeContext) -> None:
        """A first belief is what is expected from above."""
        if self._sure(local):
            self._hand_over(local)

    def energy(self, local: NodeContext) -> Energy:
        belief: ParameterBelief = local.belief
        expected = self._expected(local)

        def compute() -> Energy:
            moved = (belief.mean - expected)[:, None]
            fit = (moved @ belief.prior_precision @ moved.mT)[:, 0, 0]
            complexity = 0.5 * (fit + belief.prior_log_det_covariance - belief.log_det_covariance)
            return Energy(complexity=complexity)

        return local.once("energy", compute, belief, expected)

    # --- what is to come ---------------------------------------------------------------------------------------------
    def standing(self, local: NodeContext) -> ForecastStart:
        return ForecastStart(local.belief.mean, self._covariance(local))

    def origin(self, local: NodeContext, now: ForecastContext) -> Tensor:
        """How far they are from what the states above say, if there are any: that stays, while these go on."""
        return now.own - sum(now.of("predicts"), torch.zeros_like(now.own))

    def forecast_message(self, local: NodeContext, link: Link, now: ForecastContext) -> Tensor:
        return now.own + sum(now.of("predicts"), torch.zeros_like(now.own))

    def fallbacks(self, local: NodeContext) -> Tensor:
        regularised: Tensor = local.memory.regularised
        return regularised

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        return {
            "mean": Recordable(("dimension",), lambda local: local.belief.mean),
            "sd": Recordable(("dimension",), self._covariance, standard_deviations),
            "covariance": Recordable(("dimension", "dimension_"), self._covariance),
        }

    def _covariance(self, local: NodeContext) -> Tensor:
        precision: Tensor = local.belief.precision
        return local.once("covariance", lambda: covariance_of(precision), precision)
