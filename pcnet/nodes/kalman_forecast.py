"""Forecasts of a Kalman state, and draws of its future."""

from abc import abstractmethod

import torch
from torch import Tensor

from pcnet.model.context import Now
from pcnet.model.links import Predicts
from pcnet.model.protocols import DrawsFutures, ForecastsAlone, ForecastStart, ForecastStep
from pcnet.nodes.augmented_layout import NoiseBlock
from pcnet.nodes.flow import FlowForecasts
from pcnet.nodes.kalman_belief import Context, KalmanState
from pcnet.nodes.kalman_cluster import members
from pcnet.nodes.kalman_functions import (
    arguments,
    direct_slope,
    inputs_now,
    mapping_jacobian,
    parameters_of,
    regressed_mapping,
)
from pcnet.nodes.kalman_inputs import InputPath, input_path
from pcnet.nodes.kalman_motion import advanced, divided, largest_rate
from pcnet.nodes.kalman_noises import observation_noise, present_model, white_noise
from pcnet.nodes.kalman_parameters import (
    plain_covariance,
    scored_covariance,
    state_covariance,
    with_uncertain_levels,
)
from pcnet.numerics import kalman
from pcnet.numerics.sigma_points import covariance_root

POINT_STEPS = 2
"""Integration steps of a drawn point in one of the belief, because single points may be where a flow is stiff. Not by
"euler", whose steps are those of the process."""


class KalmanForecasts(FlowForecasts, ForecastsAlone, DrawsFutures):
    """A Kalman state seen into the future: its moments step by step, or points that are drawn."""

    @abstractmethod
    def predict(self, ctx: Context) -> KalmanState:
        """The time update."""

    def forecast_state(self, ctx: Context, parameters: bool) -> KalmanState:
        state = with_uncertain_levels(ctx)._replace(time=ctx.time)
        if parameters:
            return state
        certain = state.belief.covariance_by_source.clone()
        for block in ctx.bound.layout.all_parameters:
            certain[:, :, block.elements], certain[..., block.elements] = 0.0, 0.0
        return state._replace(belief=state.belief._replace(covariance_by_source=certain))

    def forecast_step(self, ctx: Context) -> KalmanState:
        return self.predict(ctx.at(ctx.state, Now(ctx.state.time + ctx.dt, ctx.dt, ctx.relative_dt)))

    def forecast_shown(self, ctx: Context, parameters: bool) -> ForecastStep:
        belief, below, cluster = ctx.state.belief, {}, ctx.bound.cluster
        d = ctx.bound.motion.dim
        covariance = plain_covariance(ctx) if parameters else belief.covariance[:, :d, :d]
        here, *_ = cluster.blocks.values()
        for node, place in members(cluster):
            below[node.name] = belief.mean[:, place], covariance[:, place, place].diagonal(dim1=-2, dim2=-1)
        for link, sent in zip(ctx.below_of(Predicts), ctx.state.sent, strict=True):
            variance = sent.distribution.variance
            if parameters and ctx.bound.layout.n_scored:
                jacobian = mapping_jacobian(ctx, link, regressed_mapping(ctx, belief, link))
                direct = direct_slope(ctx, belief, link)
                through = kalman.total_derivative(jacobian, belief.dmean_dtheta, direct)
                variance = variance + (through @ scored_covariance(ctx) * through).sum(-1)
            below[link.child.name] = sent.distribution.mean, variance
        return ForecastStep(belief.mean[:, here], covariance[:, here, here], below)

    def draws(self, ctx: Context) -> bool:
        """Only if all parameters are part of the belief."""
        return not ctx.bound.layout.n_scored

    def stays_gaussian(self, ctx: Context) -> bool:
        return ctx.bound.motion.flow.is_affine and all(each.is_affine for each in ctx.bound.cluster.mappings.values())

    def point_size(self, ctx: Context) -> tuple[int, int]:
        """Each element needs one number, the state itself two."""
        return ctx.bound.layout.size, ctx.bound.layout.size + ctx.bound.motion.dim

    def points(self, ctx: Context, normal: Tensor, parameters: bool) -> Tensor:
        state = self.forecast_state(ctx, parameters)
        return state.belief.mean[:, None] + normal @ covariance_root(state.belief.covariance).mT

    def move_points(self, ctx: Context, points: Tensor, normal: Tensor) -> Tensor:
        """Diffusion is added in two halves, before and after the flow, and coloured noise acts by its mean."""
        layout, motion, dt = ctx.bound.layout, ctx.bound.motion, ctx.dt
        d, integrator = motion.dim, motion.integrator
        later, now = normal[..., :d], normal[..., d:]  # the first numbers are those of the second half
        white = white_noise(ctx.at(with_uncertain_levels(ctx), ctx.now)).sum(1)[:, None].sqrt()
        moved = points.clone()
        drive = torch.zeros_like(points[..., :d])
        for block in layout.noises:
            if not block.model.is_white:
                moved[..., block.latents] = self._moved_noise(ctx, block, points, now)
        for block in layout.own.values():
            if not block.model.is_white:
                at = block.elements
                place = slice(block.latents.start, block.latents.start + at.stop - at.start)
                later_share = 0.0 if integrator == "euler" else 0.5
                drive[..., at] += torch.lerp(points[..., place], moved[..., place], later_share)
        half = white * (0.5 * dt[:, None, None]).sqrt()
        if motion.process_noise == "held":
            drive = drive + white * now[..., :d]
        else:
            moved[..., :d] += half * now[..., :d]
        inputs = inputs_now(ctx)
        steps, began = motion.substeps * (1 if integrator == "euler" else POINT_STEPS), moved
        first = input_path(layout.inputs, inputs, inputs, ctx.time - dt, dt)

        def follow_flow(finer: int) -> tuple[Tensor]:
            """The states after so many times `steps`."""
            points, path, h = began.clone(), first, dt / (finer * steps)
            for _ in range(finer * steps):
                jacobian = self._jacobian_at(ctx, points, path) if integrator == "local_linearisation" else None
                points[..., :d] = advanced(ctx, points, h, path, integrator, jacobian, drive)
                path = path.after(h)
            return (points[..., :d],)

        ahead = follow_flow(1)
        if integrator == "rk4":
            size = largest_rate(self._jacobian_at(ctx, began, first)[:, :d, :d]) * dt / steps
            ahead = divided(follow_flow, ahead, size)
        (moved[..., :d],) = ahead
        if motion.process_noise == "diffusion":
            moved[..., :d] += half * later
        for each in layout.all_parameters:
            walk = (dt[:, None] * ctx.message(each.link).walk).sqrt()
            moved[..., each.elements] += walk[:, None] * now[..., each.elements]
        for given in layout.inputs:
            if given.spec.variance is not None:
                sd = given.spec.variance[: len(points)].sqrt()[:, None]  # there may be several beliefs
                moved[..., given.elements] = sd * now[..., given.elements]
        return moved

    def _moved_noise(self, ctx: Context, block: NoiseBlock, points: Tensor, normal: Tensor) -> Tensor:
        """The coordinates of a coloured noise one interval later, (B, k, coordinates · channels)."""
        transition = present_model(ctx, block).transition(ctx.dt)
        sd = ctx.state.reference.variance[:, block.channels].sqrt()[:, None, None]
        shape = (*points.shape[:2], block.model.n_latents, -1)
        before, new = (each[..., block.latents].reshape(shape) for each in (points, normal))
        moved = transition.matrix[:, None] @ before + covariance_root(transition.covariance)[:, None] @ (sd * new)
        return moved.flatten(2)

    def _jacobian_at(self, ctx: Context, points: Tensor, path: InputPath) -> Tensor:
        """∂f/∂(x, u) at the mean of some points, (B, d, d + k), with the motion of inputs below it."""
        mean, flow, d = points.mean(1), ctx.bound.motion.flow, ctx.bound.motion.dim
        start = arguments(ctx, flow, mean, path.value)
        found = flow.linearise(start[:, None], parameters_of(ctx, None, mean), 1).jacobian
        size = start.shape[-1]
        return torch.constant_pad_nd(found.expand(len(mean), d, size), (0, 0, 0, size - d))

    def values_of(self, ctx: Context, points: Tensor) -> dict[str, Tensor]:
        found = {node.name: points[..., place] for node, place in ctx.bound.cluster.blocks.items()}
        known = torch.cat([inputs_now(ctx), ctx.time.to(points)[:, None]], 1)
        for link in ctx.below_of(Predicts):
            parameters = parameters_of(ctx, link.child, points)
            mapping = ctx.bound.cluster.mappings[link]
            value = mapping(arguments(ctx, mapping, points, known), parameters)
            block = ctx.bound.layout.below[link]
            if not block.model.is_white:
                value = value + points[..., block.latents.start : block.latents.start + value.shape[-1]]
            found[link.child.name] = value
        return found

    def white_noise_below(self, ctx: Context) -> dict[str, Tensor]:
        blocks = {link.child.name: ctx.bound.layout.below[link] for link in ctx.below_of(Predicts)}
        return {name: observation_noise(ctx, block).sum(1) for name, block in blocks.items()}

    def forecast_start(self, ctx: Context) -> ForecastStart:
        here, *_ = ctx.bound.cluster.blocks.values()
        return ForecastStart(ctx.state.belief.mean[:, here], state_covariance(ctx)[:, here, here])
