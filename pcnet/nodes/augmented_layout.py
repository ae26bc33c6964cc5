"""Where everything is in a belief that is carried: states, the numbers that make up noises, parameters, levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.model.node import Link
from pcnet.numerics.coloured_noise import Noise, NoiseModel, colour_of


class Source(NamedTuple):
    """A noise, the place-th: its channels and its log-variances among all, and its numbers among all that is carried.

    learned_width: whether its width changes in a run; else it is that of the colour.
    """

    place: int
    channels: slice
    numbers: slice
    levels: slice
    colour: NoiseModel
    learned_width: bool


class Layout(NamedTuple):
    """The noises of a state itself and of the nodes below; the place of each link's parameters; and sizes.

    size: n, of all that is carried. width: p, of all parameters. of_level: which channels a log-variance is that of,
    (s, all channels).
    """

    own: Mapping[Link, Source]
    below: Mapping[Link, Source]
    parameters: Mapping[Link, slice]
    size: int
    width: int
    of_level: Tensor

    @property
    def sources(self) -> tuple[Source, ...]:
        return (*self.own.values(), *self.below.values())

    @property
    def own_levels(self) -> slice:
        """The log-variances of the state's own noises among all."""
        return slice(max(source.levels.stop for source in self.own.values()))

    @property
    def own_channels(self) -> int:
        return sum(source.channels.stop - source.channels.start for source in self.own.values())

    @property
    def channels(self) -> int:
        """d, of all nodes below."""
        return self.of_level.shape[1] - self.own_channels

    def seen(self, link: Link) -> slice:
        """The channels of a node below among those of all nodes below."""
        part = self.below[link].channels
        return slice(part.start - self.own_channels, part.stop - self.own_channels)

    def by_source(self, source: Source, variance: Tensor) -> Tensor:
        """A variance (B, channels of a noise) by what it is owed to: (B, 1 + s, channels)."""
        known = self.of_level[:, source.channels]
        nobody = (known.sum(0) == 0).to(variance)
        return variance[:, None] * torch.cat([nobody[None], known])


def lay_out(
    dim: int,
    own: Mapping[Link, Noise],
    below: Mapping[Link, Noise],
    parameters: Mapping[Link, int],
    elapsed: Tensor,
    *,
    n_pulses: int,
    learned: bool,
) -> Layout:
    """For a state of `dim` numbers with its noises, those of the nodes below, and so many parameters by link."""
    noises = {**own, **below}
    levels = {link: noise.levels if learned else 0 for link, noise in noises.items()}
    of_level: list[Tensor] = []
    sources: dict[Link, Source] = {}
    channels, level, size = 0, 0, dim
    for link, noise in noises.items():
        count, known = noise.variance.shape[1], levels[link]
        colour = colour_of(noise, elapsed, n_pulses)
        numbers = count * colour.numbers
        sources[link] = Source(
            len(sources),
            slice(channels, channels + count),
            slice(size, size + numbers),
            slice(level, level + known),
            colour,
            noise.learned_width,
        )
        rows = torch.ones(known, count) if known == 1 else torch.eye(count)[:known]
        of_level.append(rows.to(noise.variance))
        channels, level, size = channels + count, level + known, size + numbers
    stacked: Tensor = torch.block_diag(*of_level)  # type: ignore[no-untyped-call]
    places, first = {}, 0
    for link, count in parameters.items():
        places[link] = slice(first, first + count)
        first += count
    mine, theirs = ({link: sources[link] for link in links} for links in (own, below))
    return Layout(mine, theirs, places, size, first, stacked)


def each(loads: Tensor, channels: int) -> Tensor:
    """What numbers contribute to each of the channels: (B, numbers) → (B, channels, numbers · channels)."""
    eye = torch.eye(channels).to(loads)
    return (loads[:, None, :, None] * eye[:, None, :]).flatten(2)
