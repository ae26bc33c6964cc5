"""The layout of the augmented state of a Kalman state: which elements belong to which part of the model.

The belief is one joint Gaussian over blocks: the state itself, and the latents of each coloured noise. Parameters,
causes and further states can join it as further blocks.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.model.links import AnyLink, Parametrises, Predicts, Weighs
from pcnet.numerics.coloured_noise import NoiseModel, NoiseSpec, noise_model
from pcnet.numerics.trees import spans


class NoiseBlock(NamedTuple):
    """One noise of the augmented state."""

    place: int  # among all noises
    channels: slice  # among all channels
    latents: slice  # in the augmented state
    levels: slice  # its log-variances among all
    model: NoiseModel
    learned_lengthscale: bool  # whether its lengthscale changes during a run; else it is that of the model


class AugmentedStateLayout(NamedTuple):
    """Blocks of the augmented state, and the places of parameters and log-variances."""

    own: Mapping[Weighs, NoiseBlock]  # noises of the state
    below: Mapping[Predicts, NoiseBlock]  # observation noises of the nodes below
    parameters: Mapping[Parametrises, slice]  # places of the parameters of each link
    size: int  # n, elements of the augmented state
    n_parameters: int  # p
    level_channels: Tensor  # which channels share a log-variance, (s, all channels), one or zero

    @property
    def noises(self) -> tuple[NoiseBlock, ...]:
        return (*self.own.values(), *self.below.values())

    @property
    def own_levels(self) -> slice:
        """The log-variances of the state's own noises among all."""
        return slice(max(block.levels.stop for block in self.own.values()))

    @property
    def n_levels(self) -> int:
        """s, the number of learned log-variances."""
        return len(self.level_channels)

    def by_source(self, block: NoiseBlock, variance: Tensor) -> Tensor:
        """A variance (B, channels of a noise) by the log-variance that it belongs to, (B, 1 + s, channels)."""
        known = self.level_channels[:, block.channels]
        rest = (known.sum(0) == 0).to(variance)
        return variance[:, None] * torch.cat([rest[None], known])


def make_layout(
    dim: int,
    own: Mapping[Weighs, NoiseSpec],
    below: Mapping[Predicts, NoiseSpec],
    parameters: Mapping[Parametrises, int],
    like: Tensor,
    n_pulses: int,
    learn_noise: bool,
) -> AugmentedStateLayout:
    """The layout for a state of dimension `dim` with these noises and numbers of parameters; like: any tensor (B,)."""
    specs: list[tuple[AnyLink, NoiseSpec]] = [*own.items(), *below.items()]
    level_channels: list[Tensor] = []
    blocks: dict[AnyLink, NoiseBlock] = {}
    channels, level, size = 0, 0, dim
    for link, spec in specs:
        levels = spec.levels if learn_noise else 0
        model = noise_model(spec, like, n_pulses)
        latents = spec.channels * model.n_latents
        starts = ((channels, spec.channels), (size, latents), (level, levels))
        here = [slice(first, first + count) for first, count in starts]
        blocks[link] = NoiseBlock(len(blocks), here[0], here[1], here[2], model, spec.learned_lengthscale)
        one, each = like.new_ones(1, spec.channels), like.new_ones(spec.channels).diag()
        level_channels.append(one[:levels] if levels <= 1 else each[:levels])
        channels, level, size = channels + spec.channels, level + levels, size + latents
    stacked: Tensor = torch.block_diag(*level_channels)  # type: ignore[no-untyped-call]
    of = dict(zip(parameters, spans(parameters.values()), strict=True))
    mine, theirs = {link: blocks[link] for link in own}, {link: blocks[link] for link in below}
    return AugmentedStateLayout(mine, theirs, of, size, sum(parameters.values()), stacked)


def repeat_per_channel(loadings: Tensor, channels: int) -> Tensor:
    """Loadings (B, latents) of one channel as a matrix for all, (B, channels, latents · channels)."""
    eye = torch.eye(channels, dtype=loadings.dtype, device=loadings.device)
    return (loadings[:, None, :, None] * eye[:, None, :]).flatten(2)
