"""The time update of a Kalman state: integration steps of the state, its parameters and its noises."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from pcnet.nodes.augmented_layout import repeat_per_channel
from pcnet.nodes.kalman_belief import Context
from pcnet.nodes.kalman_functions import arguments, inputs_now, joint_jacobian, known_arguments, parameters_of
from pcnet.nodes.kalman_inputs import InputPath, further_arguments, input_path, of_state, with_input_motion
from pcnet.nodes.kalman_noises import present_model, white_noise
from pcnet.numerics import kalman
from pcnet.numerics.branching import holds
from pcnet.numerics.coloured_noise import NoiseTransition
from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.sigma_points import Regression, regress_or_keep
from pcnet.numerics.transitions import FlowAt, FlowStep, IntegratorName, advance, flow_step, known_step
from pcnet.numerics.trees import select

T = TypeVar("T", bound=tuple[Any, ...])
MAX_STEPS = 64  # how many times as many integration steps a gap may take
ACCURATE, MAX_FINER = 1.35, 8
"""Steps of "rk4" with |hλ| above this, half of what is stable, are divided into two, four, … up to so many."""


def n_steps(ctx: Context) -> int:
    """Number of integration steps: `substeps`, and in a gap twice as many, four times, …, so that none is long."""
    more = 1
    if ctx.relative_dt is not None:
        while more < MAX_STEPS and holds((ctx.relative_dt > 1.5 * more).any()):
            more *= 2
    return ctx.bound.motion.substeps * more


def move(ctx: Context, belief: GaussianWithSensitivities, elapsed: Tensor, steps: int) -> GaussianWithSensitivities:
    """The belief after a time (B,), in so many integration steps."""
    layout, d, dt = ctx.bound.layout, ctx.bound.motion.dim, elapsed / steps
    gain = None  # of white noise that is held constant over all steps
    coloured = [block for block in layout.noises if not block.model.is_white]
    transitions = {block.place: present_model(ctx, block).transition(dt) for block in coloured}
    state = ctx.state
    path = input_path(layout.inputs, state.inputs, inputs_now(ctx), state.time, elapsed)
    for _ in range(steps):
        belief, step = _step(ctx, belief, dt, transitions, path)
        path = path.after(dt)
        if ctx.bound.motion.process_noise == "held":
            eye = torch.eye(d, dtype=dt.dtype, device=dt.device)
            new = step.integrate(eye, eye, eye)
            gain = new if gain is None else step.jacobian @ gain + new
    if gain is not None:
        by_source = white_noise(ctx)
        parts = belief.covariance_by_source.clone()
        parts[..., :d, :d] += (gain[:, None] * by_source[:, :, None]) @ gain.mT[:, None]
        belief = belief._replace(covariance_by_source=parts)
    return belief


def move_by_need(ctx: Context, belief: GaussianWithSensitivities, elapsed: Tensor) -> GaussianWithSensitivities:
    """The belief after a time (B,), in more integration steps for batch elements where the flow changes fast."""
    steps = n_steps(ctx)
    moved = move(ctx, belief, elapsed, steps)
    if ctx.bound.motion.integrator != "rk4":
        return moved
    size = largest_rate(_flow_jacobian(ctx, belief.mean) * (elapsed / steps)[:, None, None])
    return divided(lambda finer: move(ctx, belief, elapsed, finer * steps), moved, size)


def largest_rate(jacobian: Tensor) -> Tensor:
    """About the largest |λ| of the eigenvalues of J (B, d, d): |tr J⁸|^⅛, (B,), whatever the units of the states."""
    for _ in range(3):
        jacobian = jacobian @ jacobian
    return jacobian.diagonal(dim1=-2, dim2=-1).sum(-1).abs() ** 0.125


def divided(step: Callable[[int], T], whole: T, size: Tensor) -> T:
    """A step of "rk4", divided where it is too long.

    Args:
        step: Gives the result of the step divided into so many.
        whole: The result of the undivided step.
        size: |hλ| of that, (B,).
    """
    finer = 2
    while finer <= MAX_FINER and holds((size > 0.5 * finer * ACCURATE).any()):
        whole = select(size > 0.5 * finer * ACCURATE, step(finer), whole)
        finer *= 2
    return whole


def _step(
    ctx: Context,
    belief: GaussianWithSensitivities,
    dt: Tensor,
    transitions: Mapping[int, NoiseTransition],
    path: InputPath,
) -> tuple[GaussianWithSensitivities, FlowStep]:
    """One integration step of state, parameters and noises."""
    layout, d, variance = ctx.bound.layout, ctx.bound.motion.dim, ctx.state.reference.variance
    own = {block.place for block in layout.own.values()}
    step, regression = regressed_step(ctx, belief, dt, path)
    change = regression.value - belief.mean[:, :d]
    jacobian = torch.constant_pad_nd(regression.jacobian, (0, layout.size - regression.jacobian.shape[-1]))
    jacobian[..., :d].diagonal(dim1=-2, dim2=-1).sub_(1.0)
    for block in layout.own.values():
        if block.place in transitions:
            moved = transitions[block.place]
            first = torch.zeros_like(moved.matrix[:, :1])
            first[..., 0] = 1.0
            at, channels = block.elements, block.elements.stop - block.elements.start
            rows = (repeat_per_channel(row, channels) for row in (first, moved.half[:, :1], moved.matrix[:, :1]))
            rows = (torch.constant_pad_nd(row, (0, 0, at.start, d - at.stop)) for row in rows)
            jacobian[..., block.latents] = step.integrate(*rows)
            change = change + torch.bmm(jacobian[..., block.latents], belief.mean[:, block.latents, None])[..., 0]
    noise = step.diffuse(white_noise(ctx) * (ctx.bound.motion.process_noise == "diffusion"))
    if regression.residual is not None:
        noise[:, 0] += regression.residual
    dtheta = belief.dmean_dtheta.new_zeros(len(dt), d, belief.dmean_dtheta.shape[-1])
    for each in layout.parameters[None]:
        if not each.is_joint:
            dtheta[..., each.sensitivities] = step.parameter_jacobian[..., each.columns]
    belief = kalman.predict(belief, change, jacobian, dtheta, noise)
    for each in layout.all_parameters:
        if each.is_joint:
            walk = dt[:, None] * ctx.message(each.link).walk
            belief = kalman.add_variance(belief, each.elements, walk)
    for block in layout.noises:
        if block.place in transitions:
            moved = transitions[block.place]
            added = layout.coordinates_by_source(block, variance[:, block.channels], moved.covariance)
            belief = kalman.transform(belief, block.latents, moved.matrix, added)
            if block.place in own and step.second_half is not None:
                # new noise has acted on the state by half of its value at the end
                channels = block.elements.stop - block.elements.start
                belief = kalman.couple(belief, block.elements, block.latents, added[..., :channels, :], 0.5 * dt)
    return belief, step


def regressed_step(
    ctx: Context, belief: GaussianWithSensitivities, dt: Tensor, path: InputPath
) -> tuple[FlowStep, Regression]:
    """A step of the flow, and the same as a function of state, joint parameters and deviations of inputs.

    Inputs that the flow takes, and the time, move along like states whose velocity is known.

    In a gap of so many intervals that even MAX_STEPS are long, by local linearisation, which stays stable.
    """
    layout, d, mean = ctx.bound.layout, ctx.bound.motion.dim, belief.mean
    flow, integrator = ctx.bound.motion.flow, ctx.bound.motion.integrator
    if ctx.relative_dt is not None and holds((ctx.relative_dt > 1.5 * MAX_STEPS).any()):
        integrator = "local_linearisation"
    theta = parameters_of(ctx, None, mean)

    start = arguments(ctx, flow, mean, path.value)
    motion = further_arguments(flow, path.velocity)

    def at(x: Tensor) -> FlowAt:
        found = flow.linearise(x[:, None], theta, 1)
        slope = x.new_zeros(len(x), d, 0)
        if theta.shape[-1]:
            slope = flow.parameter_slope(x[:, None], theta, 1)[:, 0]
        here = FlowAt(found.value[:, 0], found.jacobian.expand(len(x), d, x.shape[-1]), slope)
        return with_input_motion(here, motion)

    step = cache(lambda: of_state(flow_step(at, start, dt, integrator), d))  # often nobody asks for it

    def taylor() -> Regression:
        return Regression(step().value, joint_jacobian(ctx, None, step().jacobian, step().parameter_jacobian), None)

    points = ctx.bound.motion.linearisation
    if points == "taylor" or flow.is_affine:
        return step(), taylor()
    jacobian = at(start).jacobian if integrator == "local_linearisation" else None

    def after(points: Tensor) -> Tensor:
        return advanced(ctx, points, dt, path, integrator, jacobian)

    covariance = belief.covariance_of(layout.joint)
    found = regress_or_keep(after, mean[:, layout.joint], covariance, taylor, points)
    value, slope = found.value, found.jacobian[..., :d]
    if layout.n_scored or integrator == "local_linearisation":
        return step().regressed(value, slope), found
    return known_step(value, slope, dt, integrator), found


def advanced(
    ctx: Context,
    points: Tensor,
    dt: Tensor,
    path: InputPath,
    integrator: IntegratorName,
    jacobian: Tensor | None = None,
    drive: Tensor | None = None,
) -> Tensor:
    """States (B, k, dim) after a step from some points (B, k, n); drive: a constant part of the velocity."""
    flow, parameters = ctx.bound.motion.flow, parameters_of(ctx, None, points)
    first = arguments(ctx, flow, points, path.value)
    further = further_arguments(flow, path.velocity)[:, None].expand(*points.shape[:-1], -1)

    def velocity(x: Tensor) -> Tensor:
        own = flow(x, parameters)
        own = own if drive is None else own + drive
        return torch.cat([own, further], -1) if further.shape[-1] else own

    return advance(velocity, first, dt, integrator, jacobian)[..., : ctx.bound.motion.dim]


def _flow_jacobian(ctx: Context, mean: Tensor) -> Tensor:
    """∂f/∂x at a mean, with the inputs of the last time update; (B, dim, dim)."""
    motion = ctx.bound.motion
    start = arguments(ctx, motion.flow, mean, known_arguments(ctx))
    found = motion.flow.linearise(start[:, None], parameters_of(ctx, None, mean), 1).jacobian
    return found.expand(len(mean), motion.dim, start.shape[-1])[..., : motion.dim]


def stability(ctx: Context, elements: int) -> float:
    """The largest |hλ| over a batch, with h an integration step and λ the largest eigenvalue of ∂f/∂x.

    Of the hypotheses about an element the median counts; an element whose belief is no longer finite counts as 0.
    """
    mean = ctx.state.belief.mean
    jacobian = _flow_jacobian(ctx, mean)
    finite = torch.isfinite(mean).all(-1) & torch.isfinite(jacobian).flatten(1).all(-1)
    rates = torch.linalg.eigvals(torch.where(finite[:, None, None], jacobian, 0.0)).abs().amax(-1)
    sizes: Tensor = (ctx.dt * rates / ctx.bound.motion.substeps).expand(len(mean))
    return float(sizes.reshape(-1, elements).median(0).values.max())
