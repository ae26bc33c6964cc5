"""Switching states: hidden states whose flow depends on a category, by interacting multiple models."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from pcnet.errors import GraphError
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Drives
from pcnet.model.messages import CategoryPosterior, CategoryPrediction, PointPrediction
from pcnet.model.node import BatchSpec
from pcnet.model.protocols import SmoothingLayout
from pcnet.nodes.categorical import CategoricalNode
from pcnet.nodes.input import InputNode
from pcnet.nodes.kalman_inputs import InputSpec
from pcnet.nodes.kalman_state import KalmanStateNode
from pcnet.nodes.mixture_smoothing import TimeUpdates, pairs_of_categories, parts_before
from pcnet.nodes.mixture_state import Context, MixtureStateNode
from pcnet.nodes.modes import choice_of, chosen_by, mixed, number_of, transition_of
from pcnet.numerics.mixture_smoothing import Conditioned, Pairs, SmoothedMixture, by_likelihoods
from pcnet.settings import settings


@settings
class SwitchingStateNode(MixtureStateNode):
    """A hidden state whose flow f(x, v, θ) depends on a category that switches: interacting multiple models.

    A `CategoricalNode` drives it, and has one value of v for each category. A belief is carried for each category. In
    `predict` each starts from the mixture of all, weighed by the probability of having been there, with the same
    moments; in `update` categories are weighed by their predictive likelihoods. Noise levels and parameters are learned
    as by a `KalmanStateNode`, whose settings it has.
    """

    switches: ClassVar[bool] = True

    @property
    def alternative(self) -> str:
        return ", with categories that predict its parameters"

    def check_as_child(self, link: AnyLink) -> None:
        if isinstance(link, Drives) and not isinstance(link.parent, (CategoricalNode, InputNode)):
            raise GraphError(
                f"{self.title} can be driven by a category and by inputs, not by {link.parent.name!r}; make a cause a "
                "further element of the state, with a flow of its own"
            )
        if not (isinstance(link, Drives) and isinstance(link.parent, CategoricalNode)):
            super().check_as_child(link)

    def check(self, links: Neighbours, like: Tensor) -> None:
        if len(_categories(links)) != 1:
            raise GraphError(f"{self.title} needs one category: graph.drives(CategoricalNode(...), {self.name})")
        super().check(links, like)

    def counts(self, links: Neighbours) -> tuple[int, int]:
        (category,) = _categories(links)
        return category.categories, category.stages

    def _input_spec(self, link: Drives, spec: BatchSpec) -> InputSpec:
        assert isinstance(link.parent, (InputNode, CategoricalNode))
        return link.parent.input_spec(spec)

    def first_probability(self, ctx: Context) -> Tensor:
        return _message(ctx).first

    def predict(self, ctx: Context) -> Any:
        """Mix the modes, and let each move by its own flow."""
        ctx.propose(self._started(ctx))
        state = ctx.state
        still = (ctx.time == state.modes.time[:, 0])[:, None, None]  # the first observation: nothing has moved yet
        probability, weight = transition_of(state.probability, _message(ctx).transition)
        probability = torch.where(still, state.probability, probability)
        weight = torch.where(still, torch.eye(ctx.bound.k, dtype=weight.dtype, device=weight.device), weight)
        if ctx.bound.modes.smooth:
            joint = state.probability.flatten(1)[..., None] * _message(ctx).transition
            ctx.propose(state._replace(before=parts_before(state.modes.belief, joint)))
        modes = state.modes._replace(belief=mixed(state.modes.belief, weight))
        return self._outer(ctx, KalmanStateNode.predict(self, self._inner(ctx, modes)), probability)

    def pairs(self, updates: TimeUpdates) -> Pairs:
        return pairs_of_categories(updates)

    def condition(self, after: SmoothedMixture, pairs: Pairs, joint: Tensor) -> Conditioned:
        return by_likelihoods(after, pairs, joint)

    def smoothing_layout(self, bound: Any) -> SmoothingLayout:
        """With the probabilities of the categories behind all elements."""
        layout = super().smoothing_layout(bound)
        (category,) = (each.link.parent for each in bound.modes.layout.inputs if not each.link.parent.is_input)
        return layout._replace(blocks={**layout.blocks, category.name: slice(layout.size, layout.size + bound.k)})

    def _moments(self, found: SmoothedMixture, beside: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = super()._moments(found, beside)
        probability = found.probability.sum(-1)
        k = probability.shape[-1]
        return torch.cat([mean, probability], -1), torch.constant_pad_nd(covariance, (0, k, 0, k))

    def point_size(self, ctx: Context) -> tuple[int, int]:
        """Each step needs one number more, which chooses the next stage."""
        n, m = super().point_size(ctx)
        return n, m + 1

    def move_points(self, ctx: Context, points: Tensor, normal: Tensor) -> Tensor:
        transition = _message(ctx).transition
        chosen = chosen_by(choice_of(points[..., -1:], transition.shape[-1]) @ transition, normal[..., -1:])
        now = torch.cat([points[..., :-1], number_of(chosen)], -1)
        normal = normal[..., :-1]
        moved = self._by_category(ctx, now, lambda at: {"": KalmanStateNode.move_points(self, at, now, normal)})
        return moved[""]

    def values_of(self, ctx: Context, points: Tensor) -> dict[str, Tensor]:
        return self._by_category(ctx, points, lambda at: KalmanStateNode.values_of(self, at, points))

    def _by_category(
        self, ctx: Context, points: Tensor, compute: Callable[[Context], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Values (B, c, ...) of points, each from the context of its own category."""
        k, one = ctx.bound.k, self._any(ctx)
        stage = choice_of(points[..., -1:], k * ctx.bound.stages)
        category = stage.view(*stage.shape[:2], k, -1).sum(-1)
        found: dict[str, Tensor] = {}
        for j in range(k):
            messages: dict[AnyLink, Any] = {
                link: self._of_category(ctx.message(link), j) for link in ctx.above_of(Drives)
            }
            values = compute(one.at(one.state, one.now, messages))
            here = category[..., j : j + 1] > 0
            found = {name: torch.where(here, each, found.get(name, each)) for name, each in values.items()}
        return found

    def _of_category(self, message: Any, j: int) -> Any:
        """What an input sends, or a category if it is the j-th."""
        return PointPrediction(message.values[:, j, None]) if isinstance(message, CategoryPrediction) else message

    def error(self, ctx: Context, link: AnyLink) -> Any:
        if isinstance(link, Drives) and not link.parent.is_input:
            return CategoryPosterior(ctx.state.probability, ctx.state.predicted_probability)
        return super().error(ctx, link)


def _categories(links: Neighbours) -> list[CategoricalNode]:
    """The categories that drive the state."""
    return [link.parent for link in links.above_of(Drives) if isinstance(link.parent, CategoricalNode)]


def _message(ctx: Context) -> CategoryPrediction:
    """What the category has sent."""
    (found,) = (ctx.message(link) for link in ctx.above_of(Drives) if isinstance(link.parent, CategoricalNode))
    assert isinstance(found, CategoryPrediction)
    return found
