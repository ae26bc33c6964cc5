"""The predictive distributions that a Kalman state sends to the nodes below it."""

import torch
from torch import Tensor

from pcnet.model.links import Predicts
from pcnet.model.messages import GaussianPrediction
from pcnet.nodes.kalman_belief import Context, KalmanState
from pcnet.nodes.kalman_functions import mapping_jacobian, regressed_mapping
from pcnet.nodes.kalman_noises import observation_noise
from pcnet.numerics import kalman
from pcnet.numerics.low_rank import LowRankDistribution


def predict_children(ctx: Context, state: KalmanState, lagged: list[Tensor]) -> tuple[GaussianPrediction, ...]:
    pairs = zip(ctx.below_of(Predicts), lagged, strict=True)
    return tuple(predict_child(ctx, state, link, each) for link, each in pairs)


def predict_child(ctx: Context, state: KalmanState, link: Predicts, lagged: Tensor) -> GaussianPrediction:
    """The predictive distribution of a node below, from this state."""
    belief, at = state.belief, ctx.at(state, ctx.now)
    block = ctx.bound.layout.below[link]
    mapping = regressed_mapping(at, belief, link)
    jacobian = mapping_jacobian(at, link, mapping)
    mean = mapping.value + torch.bmm(jacobian[..., block.latents], belief.mean[:, block.latents, None])[..., 0]
    if block.is_wide:
        layout, variance = ctx.bound.layout, at.state.reference.variance[:, block.channels]
        levels, (_, parts, _, slope) = layout.noise_levels(block, mean), belief
        return GaussianPrediction(LowRankDistribution(mean, jacobian, parts, variance, levels, slope), lagged)
    noise = observation_noise(at, block)
    return GaussianPrediction(kalman.predict_observation(belief, mean, jacobian, noise, mapping.residual), lagged)
