"""The noises around a Kalman state: its own, and those of the observations below it."""

import torch
from torch import Tensor

from pcnet.model.links import Predicts, Weighs
from pcnet.nodes.augmented_layout import NoiseBlock
from pcnet.nodes.kalman_belief import Context
from pcnet.numerics.coloured_noise import Noise, NoiseModel
from pcnet.numerics.kernels import lengthscale_of


def present_model(ctx: Context, block: NoiseBlock) -> NoiseModel:
    lengthscale = ctx.state.reference.lengthscale[:, block.place]
    return block.model.with_lengthscale(lengthscale) if block.learned_lengthscale else block.model


def observation_noise(ctx: Context, block: NoiseBlock) -> Tensor:
    """Variance of the white part of an observation noise, by source; (B, 1 + s, d).

    What a coloured noise needs of it has no source, so that it is not mistaken for less noise.
    """
    layout, reference = ctx.bound.layout, ctx.state.reference
    variance = reference.variance[:, block.channels]
    if block.model.is_white:
        return layout.by_source(block, variance)
    rest = present_model(ctx, block).rest(ctx.dt)[:, None] * reference.scale[:, block.channels]
    return torch.constant_pad_nd(rest[:, None], (0, 0, 0, layout.n_levels))


def white_noise(ctx: Context) -> Tensor:
    """Variance of the white process noise by source, (B, 1 + s, dim)."""
    layout, variance = ctx.bound.layout, ctx.state.reference.variance
    found = variance.new_zeros(len(variance), 1 + layout.n_levels, ctx.bound.motion.dim)
    for block in layout.own.values():
        if block.model.is_white:
            found[..., block.elements] += layout.by_source(block, variance[:, block.channels])
    return found


def present_noises(ctx: Context) -> list[Noise]:
    """Own noises, then those of the nodes below."""
    found = [ctx.message(link).noise for link in ctx.above_of(Weighs)]
    found += [ctx.error(link).noise for link in ctx.below_of(Predicts)]
    return [noise for noise in found if noise is not None]


def variances(ctx: Context) -> Tensor:
    return torch.cat([noise.variance for noise in present_noises(ctx)], 1)


def lengthscales(ctx: Context) -> Tensor:
    """Present lengthscales of all noises, (B, noises); 1 for white ones."""
    like, found = ctx.state.reference.lengthscale, []
    for block, noise in zip(ctx.bound.layout.noises, present_noises(ctx), strict=True):
        white = block.model.is_white
        found.append(torch.ones_like(like[:, 0]) if white else lengthscale_of(noise.kernel).expand(len(like)))
    return torch.stack(found, 1)
