"""Ensembles: points of the belief of a single state that move side by side.

An ensemble stays right where a Gaussian belief would not: on limit cycles, near saddles and in chaos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.engine.future import Moving, PointsOfOne
from pcnet.engine.program import Program
from pcnet.engine.state import GraphState

SIZE = 256  # points of a forecast: the standard error of a standard deviation is 4 %
CONFIRMED = 0.3  # some standard errors of the moments
MOST_LOST = 0.01  # share of points that may run away
NUMBERS = 2_000_000  # normal numbers that are drawn at once

Advance = Callable[[Moving, Tensor], dict[str, Tensor]]


class Moments(NamedTuple):
    """Means and standard deviations (T, B, dim) by node, with observation noise."""

    means: dict[str, Tensor]
    sds: dict[str, Tensor]

    def unless_confirmed(self, gaussian: Moments) -> Moments:
        """The moments of a Gaussian belief for batch elements where these ones confirm them, and these elsewhere.

        Confirmed means: of all nodes at all times, means within CONFIRMED sds and sds within that share of each other.
        """
        near = []
        for name, mean in self.means.items():
            sd = self.sds[name]
            away = (gaussian.means[name] - mean).abs() / sd.clamp_min(torch.finfo(sd.dtype).tiny)
            wider = (gaussian.sds[name].clamp_min(1e-300) / sd.clamp_min(1e-300)).log().abs()
            near.append(((away < CONFIRMED) & (wider < CONFIRMED) | (sd == 0)).all(-1).all(0))
        confirmed = torch.stack(near).all(0)[:, None]
        return Moments(
            *(
                {k: torch.where(confirmed, theirs[k], own[k]) for k in own}
                for own, theirs in zip(self, gaussian, strict=True)
            )
        )


class Ensemble:
    """An ensemble of the present belief of a run.

    Args:
        program: The program of the run.
        state: Its state.
        seed: Of the noise.
        advance: What is shown of moving points (T, copies · B, dim) by name, given the noise of all steps.
        steps: Number of steps.
    """

    def __init__(self, program: Program, state: GraphState, seed: int, advance: Advance, steps: int) -> None:
        self.future = PointsOfOne(program, state)
        self.advance, self.steps, self.batch = advance, steps, program.spec.batch
        self.generator = torch.Generator().manual_seed(seed)
        self.noise = self.future.node.white_noise_below(self.future.context)

    def _normal(self, *shape: int, paired: bool) -> Tensor:
        """Standard normal numbers (..., copies, B, m) as (..., copies · B, m).

        paired: every other copy has the numbers of the one before with the opposite sign, so that means of linear
        functions are exact.
        """
        zeros = self.future.program.zeros
        draw = partial(torch.randn, generator=self.generator, dtype=zeros.dtype)
        if not paired:
            return draw(shape).to(zeros.device).flatten(-3, -2)
        half = draw((*shape[:-3], shape[-3] // 2, *shape[-2:]))
        return torch.stack([half, -half], -3).flatten(-4, -2).to(zeros.device)

    def parts(self, copies: int, paired: bool, parameters: bool) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Values of all copies, some at a time: their number, and (T, copies, B, dim) by name."""
        n, m = self.future.node.point_size(self.future.context)
        most = max(2, 2 * (NUMBERS // (2 * self.batch * self.steps * m)))
        for first in range(0, copies, most):
            count = min(most, copies - first)
            start = self.future.start(self._normal(count, self.batch, n, paired=paired), parameters)
            shown = self.advance(start, self._normal(self.steps, count, self.batch, m, paired=paired))
            yield (
                count,
                {
                    name.removeprefix("mean/"): value.reshape(len(value), count, self.batch, -1)
                    for name, value in shown.items()
                },
            )

    def moments(self, parameters: bool) -> Moments:
        """Moments of SIZE points.

        Points at which the flow is too stiff for the integrator run away. They are left out if they are fewer than
        MOST_LOST of all; otherwise the moments are NaN.
        """
        kept = self.future.program.zeros.clone()
        centre: dict[str, Tensor] = {}
        first: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {}
        for _, part in self.parts(SIZE, True, parameters):
            finite = torch.stack([torch.isfinite(value).all(-1).all(0) for value in part.values()]).all(0)
            kept = kept + finite.sum(0)
            for name, value in part.items():
                middle = centre.setdefault(name, value.nanmedian(1).values)
                away = torch.where(finite[..., None], value - middle[:, None], 0.0)  # so that no digits are lost
                first[name] = first.get(name, torch.zeros_like(middle)) + away.sum(1)
                second[name] = second.get(name, torch.zeros_like(middle)) + away.square().sum(1)
        count = torch.where(kept >= (1 - MOST_LOST) * SIZE, kept, torch.nan)[:, None]
        means = {name: centre[name] + first[name] / count for name in centre}
        variances = {name: (second[name] / count - (first[name] / count) ** 2).clamp_min(0) for name in centre}
        sds = {name: (each + self.noise.get(name, 0.0)).sqrt() for name, each in variances.items()}
        return Moments(means, sds)

    def draws(self, copies: int) -> dict[str, Tensor]:
        """Joint draws with observation noise, (T, copies · B, dim) by name."""
        found: dict[str, list[Tensor]] = {}
        for count, part in self.parts(copies, False, True):
            for name, value in part.items():
                if name in self.noise:
                    white = self._normal(len(value), count, *self.noise[name].shape, paired=False)
                    value = value + self.noise[name].sqrt() * white.reshape(value.shape)  # noqa: PLW2901
                found.setdefault(name, []).append(value)
        return {name: torch.cat(values, 1).flatten(1, 2) for name, values in found.items()}
