"""Gaussian-sum states: hidden states whose belief may have several peaks."""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from pcnet.model.context import Neighbours
from pcnet.model.node import Recordable
from pcnet.nodes.kalman_belief import KalmanState
from pcnet.nodes.kalman_bending import flow_bends, mappings_bend
from pcnet.nodes.kalman_parameters import state_covariance
from pcnet.nodes.kalman_predictions import predict_children
from pcnet.nodes.kalman_state import KalmanStateNode
from pcnet.nodes.mixture_smoothing import TimeUpdates, pairs_of_parts, parts_before
from pcnet.nodes.mixture_state import Context, MixtureStateNode
from pcnet.nodes.modes import inwards, outwards
from pcnet.numerics.branching import holds
from pcnet.numerics.gaussian_sums import GaussianSum, divide, reduce
from pcnet.numerics.mixture_smoothing import Conditioned, Pairs, SmoothedMixture, by_points
from pcnet.numerics.sigma_points import covariance_root
from pcnet.numerics.trees import select
from pcnet.settings import settings

BENT = 0.05  # a Gaussian is divided where nonlinear terms have more than this share of the linear variance
LEAST = 1e-4  # weight of Gaussians that are worth dividing
PASSES = 2  # how often Gaussians are divided in a row


@settings
class GaussianSumStateNode(MixtureStateNode):
    """A hidden state whose belief is a sum of Gaussians: it may have several peaks, or any other shape.

    In `predict` Gaussians over which the flow or a mapping bends are divided into three narrower ones, and the nearest
    are merged so that at most `peaks` are left, with the same mean and covariance.

    Args:
        peaks: Largest number of Gaussians.
    """

    peaks: int = Field(default=12, ge=2, le=64)

    @property
    def alternative(self) -> str:
        return ""

    def describe(self) -> str:
        return f"{super().describe()}, at most {self.peaks} peaks"

    def counts(self, links: Neighbours) -> tuple[int, int]:
        return self.peaks, 1

    def first_probability(self, ctx: Context) -> Tensor:
        first = torch.zeros_like(ctx.state.probability)
        first[:, 0] = 1.0
        return first

    def predict(self, ctx: Context) -> Any:
        """Time update of each Gaussian, with divisions before it for the flow and after it for mappings."""
        ctx.propose(self._started(ctx))
        k = ctx.bound.k
        probability = ctx.state.probability[..., 0]
        state, probability = self._divided(ctx, inwards(ctx.state.modes), probability, mappings=False)
        if ctx.bound.modes.smooth:
            joint = probability[..., None].expand(-1, -1, k)
            ctx.propose(ctx.state._replace(before=parts_before(outwards(state, k).belief, joint)))
        state = KalmanStateNode.predict(self, self._inner(ctx, outwards(state, k)))
        before = state.belief
        state, probability = self._divided(ctx, state, probability, mappings=True)
        if state.belief is not before:
            none = [each.lagged_covariance for each in state.sent]
            state = state._replace(sent=predict_children(self._inner(ctx, outwards(state, k)), state, none))
        return self._outer(ctx, state, probability[..., None])

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        """Those of a state, and the weights, means and standard deviations of its Gaussians."""
        here, by_peak = slice(self.dim), ("peak", "dimension")

        def sds(ctx: Context) -> Tensor:
            covariance = outwards(state_covariance(self._inner(ctx)), ctx.bound.k)
            variance: Tensor = covariance[..., here, here].diagonal(dim1=-2, dim2=-1)
            return variance.clamp_min(0).sqrt()

        return {
            **super().quantities,
            "peak_weight": Recordable(("peak",), self._weight),
            "peak_mean": Recordable(by_peak, lambda ctx: ctx.state.modes.belief.mean[..., here]),
            "peak_sd": Recordable(by_peak, sds),
        }

    def pairs(self, updates: TimeUpdates) -> Pairs:
        return pairs_of_parts(updates)

    def condition(self, after: SmoothedMixture, pairs: Pairs, joint: Tensor) -> Conditioned:
        return by_points(after, pairs, joint)

    def stays_gaussian(self, ctx: Context) -> bool:
        return False

    def _divided(self, ctx: Context, state: KalmanState, weight: Tensor, mappings: bool) -> tuple[KalmanState, Tensor]:
        """The state, of k·B elements, with Gaussians divided where the flow or mappings bend, and weights (B, k)."""
        k = ctx.bound.k
        for i in range(PASSES):
            inner = self._inner(ctx, outwards(state, k))
            root = covariance_root(state.belief.covariance)
            bent = outwards((mappings_bend if mappings else flow_bends)(inner, root), k)
            due = ((bent.amax(-1) > BENT) & (weight > LEAST)).any(1)
            if not i and not holds(due.any()):
                break
            old = GaussianSum(weight, outwards(state.belief, k))
            new = reduce(divide(old, outwards(root, k), bent, BENT, LEAST), k)
            weight = torch.where(due[:, None], new.weight, weight)
            state = state._replace(belief=inwards(select(due, new.parts, old.parts)))
        return state, weight
