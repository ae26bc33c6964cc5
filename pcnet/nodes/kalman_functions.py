"""Flow and mappings as functions of what the belief of a Kalman state is about, with their derivatives."""

import torch
from torch import Tensor

from pcnet.functions.base import Function
from pcnet.model.links import Predicts
from pcnet.model.node import AnyNode
from pcnet.nodes.kalman_belief import Context
from pcnet.nodes.kalman_inputs import arguments_of, present_inputs
from pcnet.numerics.kalman import GaussianWithSensitivities
from pcnet.numerics.sigma_points import Regression, regress


def parameters_of(ctx: Context, of: AnyNode | None, points: Tensor) -> Tensor:
    """θ of the flow, or of the mapping to `of`: from the belief at some points (B, ..., n), or from messages."""
    found = []
    for each in ctx.bound.layout.parameters[of]:
        if each.is_joint:
            found.append(points[..., each.elements])
        else:
            value = ctx.message(each.link).value
            found.append(value.view(len(value), *(1,) * (points.dim() - 2), -1).expand(*points.shape[:-1], -1))
    return torch.cat(found, -1) if found else points.new_zeros(*points.shape[:-1], 0)


def inputs_now(ctx: Context) -> Tensor:
    return present_inputs(ctx, ctx.bound.layout.inputs, ctx.state.inputs)


def known_arguments(ctx: Context) -> Tensor:
    """The inputs at the last time update and, last, its time; (B, m + 1)."""
    state = ctx.state
    return torch.cat([state.inputs, state.time.to(state.inputs)[:, None]], 1)


def arguments(ctx: Context, function: Function, points: Tensor, known: Tensor) -> Tensor:
    return arguments_of(function, ctx.bound.layout.inputs, ctx.bound.motion.dim, points, known)


def joint_taylor(
    ctx: Context, of: AnyNode | None, value: Tensor, jacobian: Tensor, parameter_jacobian: Tensor
) -> Regression:
    """Derivatives of a function in the state, its parameters and inputs, as those in what the belief is about."""
    layout = ctx.bound.layout
    whole = torch.constant_pad_nd(jacobian, (0, layout.joint.stop - ctx.bound.motion.dim))
    for each in layout.parameters[of]:
        if each.is_joint:
            whole[..., each.elements] = parameter_jacobian[..., each.columns]
    n = sum(each.columns.stop - each.columns.start for each in layout.parameters[of])
    if parameter_jacobian.shape[-1] > n:
        for block in layout.inputs:
            if block.is_uncertain:
                whole[..., block.elements] = parameter_jacobian[..., n:][..., block.columns]
    return Regression(value, whole, None)


def regressed_mapping(ctx: Context, belief: GaussianWithSensitivities, link: Predicts) -> Regression:
    """The mapping to a node below, as a function of state, joint parameters and deviations of inputs."""
    mean, d, joint = belief.mean, ctx.bound.motion.dim, ctx.bound.layout.joint
    theta, known = parameters_of(ctx, link.child, mean), known_arguments(ctx)
    function = ctx.bound.cluster.mappings[link]

    def compute() -> Regression:
        wide = ctx.bound.layout.below[link].is_wide  # a residual covariance of all channels would be dense
        kind = ctx.bound.motion.linearisation
        if kind != "taylor" and not function.is_affine and not wide:

            def at(points: Tensor) -> Tensor:
                parameters = parameters_of(ctx, link.child, points)
                return function(arguments(ctx, function, points, known), parameters)

            return regress(at, mean[:, joint], belief.covariance[:, joint, joint], kind)
        start = arguments(ctx, function, mean, known)[:, None]
        found = function.linearise(start, theta, 1)
        jacobian = found.jacobian.expand(len(mean), -1, start.shape[-1])
        slope = jacobian[..., d:]
        if theta.shape[-1]:
            slope = torch.cat([function.parameter_slope(start, theta, 1)[:, 0], slope], -1)
        return joint_taylor(ctx, link.child, found.value[:, 0], jacobian[..., :d], slope)

    keys = (mean, belief.covariance_by_source, theta, ctx.state.inputs, ctx.state.time)
    return ctx.cached(f"mapping to {link.child.name}", compute, *keys)


def mapping_jacobian(ctx: Context, link: Predicts, mapping: Regression) -> Tensor:
    """∂g/∂s of a node below, with the coordinates of its noise; (B, d, n)."""
    layout, d = ctx.bound.layout, mapping.jacobian.shape[1]
    jacobian = torch.constant_pad_nd(mapping.jacobian, (0, layout.size - mapping.jacobian.shape[-1]))
    first = layout.below[link].latents
    if first.stop > first.start:
        jacobian[..., first.start : first.start + d].diagonal(dim1=-2, dim2=-1).add_(1.0)
    return jacobian


def all_jacobians(ctx: Context, belief: GaussianWithSensitivities) -> Tensor:
    """∂g/∂s of all nodes below, without observation noise; (B, all d, n)."""
    found = torch.cat([regressed_mapping(ctx, belief, link).jacobian for link in ctx.below_of(Predicts)], 1)
    return torch.constant_pad_nd(found, (0, ctx.bound.layout.size - found.shape[-1]))


def direct_slope(ctx: Context, belief: GaussianWithSensitivities, link: Predicts) -> Tensor | None:
    """∂g/∂θ of a mapping at a fixed state, (B, d, p), for parameters with sensitivities."""
    layout = ctx.bound.layout
    blocks = [each for each in layout.parameters[link.child] if not each.is_joint]
    if not blocks:
        return None
    theta = parameters_of(ctx, link.child, belief.mean)
    function = ctx.bound.cluster.mappings[link]
    start = arguments(ctx, function, belief.mean, known_arguments(ctx))
    found = function.parameter_slope(start[:, None], theta, 1)[:, 0]
    slope = found.new_zeros(*found.shape[:2], layout.n_scored)
    for each in blocks:
        slope[..., each.sensitivities] = found[..., each.columns]
    return slope
