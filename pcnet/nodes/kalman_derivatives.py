"""Velocity and acceleration of a Kalman state, with their uncertainty."""

from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.nodes.augmented_layout import repeat_per_channel
from pcnet.nodes.kalman_belief import Context
from pcnet.nodes.kalman_functions import arguments, joint_jacobian, known_arguments, parameters_of
from pcnet.nodes.kalman_noises import present_model
from pcnet.nodes.kalman_parameters import scored_covariance, with_uncertain_levels


class Derivatives(NamedTuple):
    """Means (B, d) and covariances (B, d, d) of x′ and x″."""

    velocity: Tensor
    velocity_covariance: Tensor
    acceleration: Tensor
    acceleration_covariance: Tensor


def derivatives(ctx: Context) -> Derivatives:
    """The belief about x′ = f(x, u, θ) + ω, and about x″ = (∂f/∂x) x′ + ω′.

    ω is the sum of the smooth process noises; white noise has no value at a time, and no part in it. As in the paper, f
    counts as locally linear.
    """
    layout, motion, belief = ctx.bound.layout, ctx.bound.motion, with_uncertain_levels(ctx).belief
    d, flow, mean = motion.dim, motion.flow, belief.mean
    start, theta = arguments(ctx, flow, mean, known_arguments(ctx))[:, None], parameters_of(ctx, None, mean)
    found = flow.linearise(start, theta, 1)
    jacobian = found.jacobian.expand(len(mean), d, start.shape[-1])
    by_parameters = mean.new_zeros(len(mean), d, 0)
    if theta.shape[-1]:
        by_parameters = flow.parameter_slope(start, theta, 1)[:, 0]
    slope = torch.cat([by_parameters, jacobian[..., d:]], -1)
    whole = joint_jacobian(ctx, None, jacobian[..., :d], slope)
    first = torch.constant_pad_nd(whole, (0, layout.size - whole.shape[-1]))
    value, second = found.value[:, 0], torch.zeros_like(first)
    for block in layout.own.values():
        if not block.model.is_white:
            drift = present_model(ctx, block).drift
            eye = torch.eye(block.model.n_latents, dtype=mean.dtype, device=mean.device)[:1].expand(len(mean), 1, -1)
            channels = block.elements.stop - block.elements.start
            first[:, block.elements, block.latents] += repeat_per_channel(eye, channels)
            now = mean[:, block.latents][:, :channels]
            value = value + torch.constant_pad_nd(now, (block.elements.start, d - block.elements.stop))
            if block.model.n_latents > 1:  # else the noise has no derivative
                second[:, block.elements, block.latents] += repeat_per_channel(drift[:, :1], channels)
    square = jacobian[..., :d]
    turn = torch.bmm(square, value[..., None])[..., 0] + torch.bmm(second, mean[..., None])[..., 0]
    second = second + square @ first
    direct = torch.zeros_like(belief.dmean_dtheta[:, :d])
    for each in layout.parameters[None]:
        if not each.is_joint:
            direct[..., each.sensitivities] = by_parameters[..., each.columns]

    def spread(by_state: Tensor, beside: Tensor) -> Tensor:
        total = by_state @ belief.covariance @ by_state.mT
        if layout.n_scored:
            through = by_state @ belief.dmean_dtheta + beside
            total = total + through @ scored_covariance(ctx) @ through.mT
        return total

    return Derivatives(value, spread(first, direct), turn, spread(second, square @ direct))
