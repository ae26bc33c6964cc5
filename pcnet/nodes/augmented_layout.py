"""The layout of the augmented state of a Kalman state: which elements belong to which part of the model.

The belief is one joint Gaussian over blocks: the state itself, parameters that are learned with it at every
observation, deviations of inputs that are not known exactly, and the coordinates of each coloured noise.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.errors import SettingError
from pcnet.model.links import AnyLink, Drives, Parametrises, Predicts, Weighs
from pcnet.model.node import AnyNode
from pcnet.nodes.kalman_inputs import InputBlock, InputSpec, input_blocks
from pcnet.numerics.coloured_noise import NoiseModel, NoiseSpec, noise_model
from pcnet.numerics.low_rank import is_wide
from pcnet.numerics.trees import spans

MOST_LATENTS = 512
"""Most coordinates of the smooth noise of one node; an observation then takes seconds."""


class NoiseBlock(NamedTuple):
    """One noise of the augmented state."""

    place: int  # among all noises
    channels: slice  # among all channels
    elements: slice  # of the state, on which a process noise acts; of an observation noise, its channels
    latents: slice  # its coordinates in the augmented state
    levels: slice  # its log-variances among all
    model: NoiseModel
    learned_lengthscale: bool  # whether its lengthscale changes during a run; else it is that of the model
    is_wide: bool  # whether it has so many channels that their covariance is kept as low-rank plus diagonal


class ParameterBlock(NamedTuple):
    """The parameters of one link: either elements of the augmented state, or with sensitivities beside it."""

    link: Parametrises
    columns: slice  # among the parameters of their function
    elements: slice  # in the augmented state; empty if they are not part of it
    sensitivities: slice  # among all sensitivities; empty if they are part of the state

    @property
    def is_joint(self) -> bool:
        return bool(self.elements.stop > self.elements.start)


class AugmentedStateLayout(NamedTuple):
    """Blocks of the augmented state, and the places of parameters and log-variances."""

    own: Mapping[Weighs, NoiseBlock]  # noises of the state
    below: Mapping[Predicts, NoiseBlock]  # observation noises of the nodes below
    parameters: Mapping[AnyNode | None, tuple[ParameterBlock, ...]]  # of the flow (None), and of mappings by child
    inputs: tuple[InputBlock, ...]
    size: int  # n, elements of the augmented state
    joint: slice  # elements of the state, of parameters that are part of the belief, and of deviations of inputs
    n_scored: int  # p, number of parameters with sensitivities
    level_channels: Tensor  # which channels share a log-variance, (s, all channels), one or zero
    level_shares: Tensor  # the share of each channel in a mean over those of a log-variance, (all channels, s)
    source_channels: Tensor  # the same after a row of the channels without one, (1 + s, all channels)

    @property
    def noises(self) -> tuple[NoiseBlock, ...]:
        return (*self.own.values(), *self.below.values())

    @property
    def all_parameters(self) -> tuple[ParameterBlock, ...]:
        return tuple(block for blocks in self.parameters.values() for block in blocks)

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
        return variance[:, None] * self.source_channels[:, block.channels]

    def noise_levels(self, block: NoiseBlock, like: Tensor) -> Tensor:
        """The log-variances that the noise of wide observations belongs to, (B, s), one or zero."""
        found = like.new_zeros(len(like), self.n_levels)
        found[:, block.levels] = 1.0
        return found

    def coordinates_by_source(self, block: NoiseBlock, variance: Tensor, matrix: Tensor) -> Tensor:
        """Covariance of the coordinates of a noise, by source: `matrix` (B, n, n) for each channel of unit variance."""
        by_source = self.by_source(block, variance)
        (batch, sources, channels), n = by_source.shape, matrix.shape[-1]
        each = by_source.diag_embed()[:, :, None, :, None]  # (B, 1 + s, 1, c, 1, c)
        return (matrix[:, None, :, None, :, None] * each).reshape(batch, sources, n * channels, n * channels)


class Noises(NamedTuple):
    """All noises around a state, and what is to be learned of them."""

    own: Mapping[Weighs, NoiseSpec]
    places: Mapping[Weighs, slice]  # elements of the state that each of these acts on
    below: Mapping[Predicts, NoiseSpec]
    orders: int  # orders of motion of smooth noise
    learned: bool  # whether their levels are learned
    low_rank: bool  # whether many channels are kept in low-rank form


def make_layout(
    dim: int,
    noises: Noises,
    parameters: Mapping[AnyNode | None, tuple[Parametrises, ...]],
    inputs: Mapping[Drives, InputSpec],
    joint: frozenset[AnyLink],
    like: Tensor,
) -> AugmentedStateLayout:
    """The layout for a state of dimension `dim`.

    parameters: links of the flow (None) and of mappings, by child. joint: those whose parameters are part of the
    belief. like: any tensor (B,).
    """
    specs: list[tuple[AnyLink, NoiseSpec]] = [*noises.own.items(), *noises.below.items()]
    level_channels: list[Tensor] = []
    blocks: dict[AnyLink, NoiseBlock] = {}
    size, n_scored = dim, 0
    of: dict[AnyNode | None, tuple[ParameterBlock, ...]] = {}
    for node, links in parameters.items():
        found: list[ParameterBlock] = []
        for to, columns in zip(links, spans(to.parent.n_parameters for to in links), strict=True):
            p = columns.stop - columns.start
            p_joint, p_scored = (p, 0) if to in joint else (0, p)
            elements, sensitivities = slice(size, size + p_joint), slice(n_scored, n_scored + p_scored)
            found.append(ParameterBlock(to, columns, elements, sensitivities))
            size, n_scored = size + p_joint, n_scored + p_scored
        of[node] = tuple(found)
    known = input_blocks(inputs.items(), size)
    size = known[-1].elements.stop if known else size
    channels, level, belief = 0, 0, slice(size)
    for link, spec in specs:
        model = noise_model(spec, like, noises.orders)
        wide = noises.low_rank and link.child.takes_low_rank and model.is_white and is_wide(spec.channels, dim)
        levels = min(spec.levels, 1 if wide else spec.levels) if noises.learned else 0
        latents = spec.channels * model.n_latents
        if latents > MOST_LATENTS:
            raise SettingError(
                f"the smooth noise of {link.child.name!r} would add {latents} elements to the belief, "
                f"{model.n_latents} for each of {spec.channels} channels; more than {MOST_LATENTS} take too long. Use "
                "white noise (without a correlation time) and observations that are a correlation time apart, "
                "a Matern kernel of smoothness 0.5, or fewer channels, such as averages of neighbours"
            )
        starts = ((channels, spec.channels), (size, latents), (level, levels))
        here = [slice(first, first + count) for first, count in starts]
        acts_on = noises.places[link] if isinstance(link, Weighs) else slice(spec.channels)
        places = here[0], acts_on, here[1], here[2]
        blocks[link] = NoiseBlock(len(blocks), *places, model, spec.learned_lengthscale, wide)
        one, each = like.new_ones(1, spec.channels), like.new_ones(spec.channels).diag()
        level_channels.append(one[:levels] if levels <= 1 else each[:levels])
        channels, level, size = channels + spec.channels, level + levels, size + latents
    stacked: Tensor = torch.block_diag(*level_channels)  # type: ignore[no-untyped-call]
    return AugmentedStateLayout(
        {link: blocks[link] for link in noises.own},
        {link: blocks[link] for link in noises.below},
        of,
        known,
        size,
        belief,
        n_scored,
        stacked,
        stacked.mT / stacked.sum(1),
        torch.cat([(stacked.sum(0, keepdim=True) == 0).to(stacked), stacked]),
    )


def repeat_per_channel(matrix: Tensor, channels: int) -> Tensor:
    """A matrix (B, m, n) of the coordinates of one channel as one for all, (B, m · channels, n · channels)."""
    eye = torch.eye(channels, dtype=matrix.dtype, device=matrix.device)
    batch, m, n = matrix.shape
    return (matrix[:, :, None, :, None] * eye[:, None, :]).reshape(batch, m * channels, n * channels)
