"""Switching states: hidden states whose flow depends on a category, by interacting multiple models."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from pcnet.errors import GraphError
from pcnet.model.context import Neighbours
from pcnet.model.links import AnyLink, Drives
from pcnet.model.messages import CategoryPosterior, CategoryPrediction
from pcnet.model.node import BatchSpec
from pcnet.nodes.categorical import CategoricalNode
from pcnet.nodes.input import InputNode
from pcnet.nodes.kalman_inputs import InputSpec
from pcnet.nodes.kalman_state import KalmanStateNode
from pcnet.nodes.mixture_state import Context, MixtureStateNode
from pcnet.nodes.modes import mixed, transition_of
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
            raise GraphError(f"{self.title} can be driven by a category and by inputs, not by {link.parent.name!r}")
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
        modes = state.modes._replace(belief=mixed(state.modes.belief, weight))
        return self._outer(ctx, KalmanStateNode.predict(self, self._inner(ctx, modes)), probability)

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
