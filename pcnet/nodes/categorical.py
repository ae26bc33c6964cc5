"""Categories: one of several values at a time, which predicts parameters below and now and then becomes another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import AfterValidator
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.closed_form import Identity
from pcnet.model.messages import Prediction
from pcnet.model.node import BatchSpec, Energy, ErrorShape, ForecastContext, Link, Node, NodeContext, Recordable
from pcnet.numerics.dwell_time import DwellTime
from pcnet.numerics.kalman import PredictiveDistribution
from pcnet.numerics.laplace import standard_deviations
from pcnet.settings import Fraction, Matrix, Vector, not_negative, settings

ROUNDED = 1e-6
"""By how much the sum of probabilities may differ from 1, since they were rounded."""


class CategoricalBelief(NamedTuple):
    """The probability of each stage of each category (B, k, s).

    What is expected of the parameters below (B, p), with its covariance, their own freedom included, and the covariance
    with what had been expected before (B, p, p).
    """

    probability: Tensor
    expected: Tensor
    expected_covariance: Tensor
    between: Tensor


class CategoricalRule(NamedTuple):
    """The values (B, k, p) and the probabilities of passing from one stage to another (B, ks, ks)."""

    values: Tensor
    transition: Tensor


@settings
class CategoricalNode(Node):
    """One of k categories at a time, each of which stands for values of the parameters below.

    Asked to `carry`, it passes on to what may be next: p ← pT. Asked to `move`, it weighs the categories by what the
    parameters below have found. Downwards it sends the mean and covariance of their values, which is all that a normal
    distribution can say of them.

    values: (..., k, p). How it passes on in one step of its own clock is one of three:
    stay: the probability of staying what it is; else it becomes any of the others.
    dwell: how long it lasts, and which comes next; see `Dwelling`.
    transition: T itself, (..., n, n), from rows to columns. If n is a multiple of k, each category has n/k stages with
    the same values, those of the first category first.
    first: the probabilities of the categories, or of all n stages, before anything is seen; all alike unless given.
    """

    _: KW_ONLY
    values: Matrix
    stay: Fraction | None = None
    dwell: DwellTime | None = None
    transition: Annotated[Matrix, AfterValidator(not_negative)] | None = None
    first: Annotated[Vector, AfterValidator(not_negative)] | None = None
    role: ClassVar[str] = "state"
    sure: ClassVar[bool] = True
    required_actions: ClassVar[tuple[str, ...]] = ("predict", "update")

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if self.values.dim() < 2 or self.values.shape[-2] < 2:
            raise SettingError(
                f"{self.title}: values must end in (categories, parameters), with two categories or more: "
                "[[0.2], [0.35]] are two of one parameter"
            )
        if sum(part is not None for part in (self.stay, self.dwell, self.transition)) != 1:
            raise SettingError(
                f"{self.title}: give one of stay=0.9, dwell=Dwelling(mean=..., sd=...) and transition=[[...]]"
            )
        k, t = self.categories, self.transition
        if t is not None and (t.dim() < 2 or t.shape[-1] != t.shape[-2] or t.shape[-1] % k):
            raise SettingError(
                f"{self.title}: transition must end in ({k}, {k}), one row for each category, or in a multiple of it "
                f"for stages of them, not in {tuple(t.shape)[-2:]}"
            )
        if t is not None:
            self._sums_to_one(t, "each row of transition, which says what comes next,")
        try:
            n = k * self.stages
        except SettingError as error:
            raise SettingError(f"{self.title}: {error}") from None
        if self.first is not None:
            if self.first.dim() == 0 or self.first.shape[-1] not in (k, n):
                stages = f", or in {n}, one for each stage" if n > k else ""
                raise SettingError(f"{self.title}: first must end in {k}, one for each category{stages}")
            self._sums_to_one(self.first, "first")

    def _sums_to_one(self, probabilities: Tensor, what: str) -> None:
        sums = probabilities.sum(-1)
        off = (sums - 1).abs() > ROUNDED
        if bool(off.any()):
            raise SettingError(f"{self.title}: {what} must sum to 1, not to {sums[off][0].item():g}")

    @property
    def categories(self) -> int:
        """k."""
        return self.values.shape[-2]

    @property
    def stages(self) -> int:
        """How many of them each category has."""
        if self.dwell is not None:
            return self.dwell.stages(self.categories)
        return 1 if self.transition is None else self.transition.shape[-1] // self.categories

    # --- composing ---------------------------------------------------------------------------------------------
    @property
    def error_shape(self) -> ErrorShape:
        """Of what it predicts."""
        return ErrorShape(1, self.values.shape[-1])

    def describe(self) -> str:
        return f"{self.categories} categories" + (f" of {self.stages} stages" if self.stages > 1 else "")

    def as_parent(self, link: Link) -> None:
        shape = link.child.error_shape
        if link.kind != "predicts" or link.child.observes or shape is None:
            raise GraphError(f"{self.title} predicts parameters: graph.predicts({self.name}, ParameterNode(...))")
        if shape != self.error_shape:
            raise GraphError(
                f"{self.title} has values of {self.values.shape[-1]} parameters, {link.child.name!r} others"
            )
        if not isinstance(link.function, Identity):
            raise GraphError(f"{self.title} predicts its values themselves; leave out via")

    def check(self, above: tuple[Link, ...], below: tuple[Link, ...], like: Tensor) -> None:
        if len(below) != 1:
            raise GraphError(f"{self.title} must predict one node: graph.predicts({self.name}, parameters)")

    # --- running -----------------------------------------------------------------------------------------------
    def begin(self, local: NodeContext, start: BatchSpec) -> None:
        values, k, s = start.fill(self.values, 2), self.categories, self.stages
        batch, p = len(values), values.shape[-1]
        local.rule = CategoricalRule(values, start.fill(self._passing(), 2))
        first = torch.full((k,), 1 / k, dtype=torch.float64) if self.first is None else self.first
        if first.shape[-1] == k:
            first = first.repeat_interleave(s, -1) / s
        probability = start.fill(first, 1).view(batch, k, s)
        none = values.new_zeros(batch, p, p)
        local.belief = CategoricalBelief(probability, values.mean(1), none, none)

    def _passing(self) -> Tensor:
        """T, (..., ks, ks)."""
        if self.dwell is not None:
            return self.dwell.transition(self.categories)
        if self.transition is not None:
            return self.transition / self.transition.sum(-1, keepdim=True)  # however it was rounded
        assert self.stay is not None
        eye, stay = torch.eye(self.categories).to(self.stay), self.stay[..., None, None]
        return stay * eye + (1 - stay) * (1 - eye) / (self.categories - 1)

    def initialise(self, local: NodeContext) -> None:
        """Expect what all categories together say."""
        self._expect(local, local.belief.probability, torch.zeros_like(local.belief.between))

    def prediction(self, local: NodeContext, link: Link) -> Prediction[Tensor]:
        belief = local.belief
        batch, p = belief.expected.shape
        none = belief.expected.new_zeros
        expected = PredictiveDistribution(
            belief.expected, belief.expected_covariance, none(batch, p, 0), none(batch, 0, p, p)
        )
        return Prediction(belief.expected[:, None], expected=expected, between=belief.between)

    def update(self, local: NodeContext) -> None:
        """p_k ∝ p_k exp(bᵀδ − ½δᵀAδ) with δ the value less what was expected.

        ξ and Ω of the error below are b and A, what was found there of its own, seen through the covariance v that was
        expected: b = (I − vΩ)⁻¹ξ, A = Ω(I − vΩ)⁻¹. The parameters' own freedom R comes between: A ← A(I + RA)⁻¹.
        """
        (link,) = local.below
        error, belief = local.error(link).eliminated, local.belief
        weighted, precision = error.weighted[:, 0, :, None], error.precision.matrix
        eye = torch.eye(precision.shape[-1]).to(precision)
        through = eye - precision @ belief.expected_covariance
        found = torch.linalg.solve(through, torch.cat([weighted, precision], -1))
        freedom = self._freedom(local)
        found = torch.linalg.solve(eye + found[..., 1:] @ freedom, found)
        away = local.rule.values - belief.expected[:, None]
        fit = (away @ found[..., :1])[..., 0] - 0.5 * (away * (away @ found[..., 1:].mT)).sum(-1)
        weighed = (belief.probability.log() + fit[..., None]).flatten(1).softmax(-1)
        local.belief = belief._replace(probability=weighed.view_as(belief.probability))

    def predict(self, local: NodeContext) -> None:
        """Pass on to what may be next, and expect that."""
        before, (values, transition) = local.belief.probability, local.rule
        joint = before.flatten(1)[..., None] * transition
        after = joint.sum(1).view_as(before)
        # of what was expected before and what is now, stages do not matter
        joint = joint.view(*before.shape, *before.shape[1:]).sum((2, 4))
        first, then = (torch.bmm(p.sum(-1)[:, None], values)[:, 0] for p in (before, after))
        between = values.mT @ joint @ values - first[..., None] * then[:, None]
        self._expect(local, after, between)

    def _expect(self, local: NodeContext, probability: Tensor, between: Tensor) -> None:
        values, of_values = local.rule.values, probability.sum(-1)
        mean = torch.bmm(of_values[:, None], values)[:, 0]
        away = values - mean[:, None]
        covariance = away.mT @ (of_values[..., None] * away) + self._freedom(local)
        local.belief = CategoricalBelief(probability, mean, covariance, between)

    def _freedom(self, local: NodeContext) -> Tensor:
        """How far the parameters may be from any of the values, (B, p, p)."""
        (link,) = local.below
        noise = local.error(link).noise
        assert noise is not None
        return noise.variance.diag_embed()

    def forecast_message(self, local: NodeContext, link: Link, now: ForecastContext) -> Tensor:
        """What is expected now, as if it stayed what it is."""
        return now.spread(local.belief.expected)

    def energy(self, local: NodeContext) -> Energy:
        """None of its own: the parameters below say how far they are from what is expected of them."""
        return Energy()

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        return {
            "probability": Recordable(("category",), lambda local: local.belief.probability.sum(-1)),
            "stage": Recordable(("category", "stage"), lambda local: local.belief.probability),
            "mean": Recordable(("order", "dimension"), lambda local: local.belief.expected[:, None]),
            "sd": Recordable(
                ("order", "dimension"),
                lambda local: local.belief.expected_covariance,
                lambda found: standard_deviations(found)[..., None, :],
            ),
        }
