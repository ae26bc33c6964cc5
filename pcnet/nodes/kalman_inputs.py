"""Known inputs of a Kalman state: arguments u of its flow f(x, u, θ, t) and of its mappings g(x, u, θ, t).

An input u_k comes with observation k. It holds from there to the next observation, or is interpolated between the two.
An input that is known up to an error has an unknown deviation δ ~ N(0, sd²), constant from one observation to the next.
The deviation is an element of the augmented state, so that its effect on states and on observations is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.functions.base import Function
from pcnet.model.context import NodeContext
from pcnet.model.links import Drives
from pcnet.model.messages import ScoreError
from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.transitions import FlowAt, FlowStep


class InputSpec(NamedTuple):
    """What a Kalman state needs to know of one of its inputs."""

    dim: int
    is_interpolated: bool
    variance: Tensor | None  # of its deviation, (B, dim); None if it is known exactly


class InputBlock(NamedTuple):
    """One known input of a Kalman state."""

    link: Drives
    columns: slice  # among all inputs
    elements: slice  # of its deviation in the augmented state; empty if it is known exactly
    spec: InputSpec

    @property
    def is_uncertain(self) -> bool:
        return self.spec.variance is not None


class InputPath(NamedTuple):
    """All inputs and, last, the time, over one integration step: u(s) = value + s · velocity."""

    value: Tensor  # (B, m + 1)
    velocity: Tensor  # (B, m + 1)

    def after(self, dt: Tensor) -> InputPath:
        """The path from a time (B,) later on."""
        return self._replace(value=self.value + dt[:, None] * self.velocity)


def no_error(ctx: NodeContext[Any, Any], link: Drives) -> ScoreError:
    """The error that a known input receives: none, (B, dim)."""
    none = torch.zeros_like(ctx.message(link).value).flatten(1)
    return ScoreError(none, lambda: none)


def input_blocks(specs: Iterable[tuple[Drives, InputSpec]], first: int) -> tuple[InputBlock, ...]:
    """The blocks of inputs; first: where their deviations start in the augmented state."""
    found, column = [], 0
    for link, spec in specs:
        elements = slice(first, first + (0 if spec.variance is None else spec.dim))
        found.append(InputBlock(link, slice(column, column + spec.dim), elements, spec))
        column, first = column + spec.dim, elements.stop
    return tuple(found)


def present_inputs(ctx: NodeContext[Any, Any], blocks: Iterable[InputBlock], like: Tensor) -> Tensor:
    """All inputs of the present observation, (B, m)."""
    found = [ctx.message(block.link).value[:, 0] for block in blocks]
    return torch.cat(found, -1) if found else like.new_zeros(len(like), 0)


def input_path(blocks: Iterable[InputBlock], before: Tensor, now: Tensor, start: Tensor, elapsed: Tensor) -> InputPath:
    """The inputs from one observation to the next.

    Args:
        blocks: All inputs.
        before: Their values at the last observation, (B, m).
        now: Those at the present one, (B, m).
        start: Time of the last observation, (B,).
        elapsed: Time between the two, (B,).
    """
    rate, interpolated = now - before, [block.spec.is_interpolated for block in blocks for _ in range(block.spec.dim)]
    if interpolated:
        rate = rate / torch.where(elapsed > 0, elapsed, 1.0)[:, None] * rate.new_tensor(interpolated)
    time = start.to(before)[:, None]
    return InputPath(torch.cat([before, time], 1), torch.cat([rate, torch.ones_like(time)], 1))


def arguments_of(function: Function, blocks: Iterable[InputBlock], dim: int, points: Tensor, known: Tensor) -> Tensor:
    """The state, and what else the function takes of inputs and time, in one vector (B, ..., d + k).

    Args:
        function: A flow or mapping.
        blocks: All inputs.
        dim: d, the dimension of the state.
        points: Points of the augmented state, (B, ..., n).
        known: Inputs without their deviations and, last, the time, (B, m + 1).
    """
    x = points[..., :dim]
    taken = further_arguments(function, known)
    if not taken.shape[-1]:
        return x
    taken = taken.view(len(taken), *(1,) * (points.dim() - 2), -1).expand(*points.shape[:-1], -1)
    uncertain = [block for block in blocks if block.is_uncertain]
    if uncertain:
        taken = taken.clone()
        for block in uncertain:
            taken[..., block.columns] += points[..., block.elements]
    return torch.cat([x, taken], -1)


def further_arguments(function: Function, values: Tensor) -> Tensor:
    """The columns that a function takes of values (B, m + 1) of all inputs and, last, the time."""
    if function.takes_time:
        return values
    return values[..., : values.shape[-1] - 1 if function.takes_causes else 0]


def with_input_motion(flow: FlowAt, velocity: Tensor) -> FlowAt:
    """The flow of (x, u) from that of x, given as a function of (x, u), and the motion of u, (B, k)."""
    k = velocity.shape[-1]
    if not k:
        return flow
    return FlowAt(
        torch.cat([flow.velocity, velocity], -1),
        torch.constant_pad_nd(flow.jacobian, (0, 0, 0, k)),
        torch.constant_pad_nd(flow.parameter_jacobian, (0, 0, 0, k)),
    )


def of_state(step: FlowStep, dim: int) -> FlowStep:
    """The part of x of a step of (x, u); derivatives by u follow those by parameters."""
    if step.value.shape[-1] == dim:
        return step
    x = slice(dim)
    return FlowStep(
        step.value[:, x],
        step.jacobian[:, x, x],
        torch.cat([step.parameter_jacobian[:, x], step.jacobian[:, x, dim:]], -1),
        None if step.second_half is None else step.second_half[:, x, x],
        step.time,
        None if step.drift is None else step.drift[:, x, x],
    )


def with_new_deviations(belief: GaussianWithSensitivities, blocks: Iterable[InputBlock]) -> GaussianWithSensitivities:
    """The belief with new deviations of uncertain inputs, independent of everything before."""
    uncertain = [block for block in blocks if block.is_uncertain]
    if not uncertain:
        return belief
    mean, parts, dtheta, dlogvar = (each.clone() for each in belief)
    for block in uncertain:
        place = block.elements
        mean[:, place], dtheta[:, place], dlogvar[:, place] = 0.0, 0.0, 0.0
        parts[:, :, place], parts[..., place] = 0.0, 0.0
        assert block.spec.variance is not None
        parts[:, 0, place, place] = block.spec.variance.diag_embed()
    return GaussianWithSensitivities(mean, parts, dtheta, dlogvar)
