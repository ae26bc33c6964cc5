"""Categories: one of several values at a time, which predicts parameters below and now and then becomes another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pcnet.carrying import Expected
from pcnet.errors import GraphError, SettingError
from pcnet.functions import Identity
from pcnet.linalg import deviations
from pcnet.messages import Prediction
from pcnet.node import Energy, ErrorShape, Instant, Link, Local, Node, Quantity, Start
from pcnet.settings import Fraction, Matrix, settings


class CategoricalBelief(NamedTuple):
    """The probability of each category (B, k).

    What is expected of the parameters below (B, p), with its covariance, their own freedom included, and the covariance
    with what had been expected before (B, p, p).
    """

    probability: Tensor
    expected: Tensor
    expected_covariance: Tensor
    between: Tensor


class CategoricalRule(NamedTuple):
    """The values (B, k, p) and the probabilities of passing from one category to another (B, k, k)."""

    values: Tensor
    transition: Tensor


@settings
class CategoricalNode(Node):
    """One of k categories at a time, each of which stands for values of the parameters below.

    Asked to `carry`, it passes on: with probability `stay` it stays what it is, else it becomes any of the others.
    Asked to `move`, it weighs the categories by what the parameters below have found. Downwards it sends the mean and
    covariance of their values, which is all that a normal distribution can say of them.

    values: (..., k, p). stay: for one step of its own clock.
    """

    _: KW_ONLY
    values: Matrix
    stay: Fraction
    role: ClassVar[str] = "state"
    sure: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("carry", "move")

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if self.values.dim() < 2 or self.values.shape[-2] < 2:
            raise SettingError(
                f"{self.title}: values must end in (categories, parameters), with two categories or more: "
                "[[0.2], [0.35]] are two of one parameter"
            )

    # --- composing ---------------------------------------------------------------------------------------------
    @property
    def error_shape(self) -> ErrorShape:
        """Of what it predicts."""
        return ErrorShape(1, self.values.shape[-1])

    def describe(self) -> str:
        return f"{self.values.shape[-2]} categories"

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
    def begin(self, local: Local, start: Start) -> None:
        values, stay = start.fill(self.values, 2), start.fill(self.stay, 0)
        batch, k, p = values.shape
        eye = torch.eye(k).to(values)
        others = (1 - eye) / (k - 1)
        local.rule = CategoricalRule(values, stay[:, None, None] * eye + (1 - stay)[:, None, None] * others)
        none = values.new_zeros(batch, p, p)
        local.belief = CategoricalBelief(values.new_full((batch, k), 1 / k), values.mean(1), none, none)

    def orient(self, local: Local) -> None:
        """Expect what all categories together say."""
        self._expect(local, local.belief.probability, torch.zeros_like(local.belief.between))

    def predict(self, local: Local, link: Link) -> Prediction[Tensor]:
        belief = local.belief
        batch, p = belief.expected.shape
        none = belief.expected.new_zeros
        expected = Expected(belief.expected, belief.expected_covariance, none(batch, p, 0), none(batch, 0, p, p))
        return Prediction(belief.expected[:, None], expected=expected, between=belief.between)

    def move(self, local: Local) -> None:
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
        local.belief = belief._replace(probability=(belief.probability.log() + fit).softmax(-1))

    def carry(self, local: Local) -> None:
        """Pass on to what may be next, and expect that."""
        before, (values, transition) = local.belief.probability, local.rule
        after = torch.bmm(before[:, None], transition)[:, 0]
        joint = before[..., None] * transition
        first, then = (torch.bmm(p[:, None], values)[:, 0] for p in (before, after))
        between = values.mT @ joint @ values - first[..., None] * then[:, None]
        self._expect(local, after, between)

    def _expect(self, local: Local, probability: Tensor, between: Tensor) -> None:
        values = local.rule.values
        mean = torch.bmm(probability[:, None], values)[:, 0]
        away = values - mean[:, None]
        covariance = away.mT @ (probability[..., None] * away) + self._freedom(local)
        local.belief = CategoricalBelief(probability, mean, covariance, between)

    def _freedom(self, local: Local) -> Tensor:
        """How far the parameters may be from any of the values, (B, p, p)."""
        (link,) = local.below
        noise = local.error(link).noise
        assert noise is not None
        return noise.variance.diag_embed()

    def foresee(self, local: Local, link: Link, now: Instant) -> Tensor:
        """What is expected now, as if it stayed what it is."""
        return now.spread(local.belief.expected)

    def energy(self, local: Local) -> Energy:
        """None of its own: the parameters below say how far they are from what is expected of them."""
        return Energy()

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        return {
            "probability": Quantity(("category",), lambda local: local.belief.probability),
            "mean": Quantity(("dimension",), lambda local: local.belief.expected),
            "sd": Quantity(("dimension",), lambda local: local.belief.expected_covariance, deviations),
        }
