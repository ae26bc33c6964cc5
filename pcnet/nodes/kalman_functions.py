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


def widened(jacobian: Tensor, size: int) -> Tensor:
    """A Jacobian with zeros for further elements; stored by columns, which is faster with many channels."""
    return torch.constant_pad_nd(jacobian.mT, (0, 0, 0, size - jacobian.shape[-1])).mT


def joint_jacobian(ctx: Context, of: AnyNode | None, jacobian: Tensor, parameter_jacobian: Tensor) -> Tensor:
    """Derivatives of a function in the state, its parameters and inputs, as those in what the belief is about."""
    layout = ctx.bound.layout
    whole = widened(jacobian, layout.joint.stop)
    for each in layout.parameters[of]:
        if each.is_joint:
            whole[..., each.elements] = parameter_jacobian[..., each.columns]
    n = sum(each.columns.stop - each.columns.start for each in layout.parameters[of])
    if parameter_jacobian.shape[-1] > n:
        for block in layout.inputs:
            if block.is_uncertain:
                whole[..., block.elements] = parameter_jacobian[..., n:][..., block.columns]
    return whole


def regressed_mapping(ctx: Context, belief: GaussianWithSensitivities, link: Predicts) -> Regression:
    """The mapping to a node below, as a function of state, joint parameters and deviations of inputs."""
    mean, d, joint = belief.mean, ctx.bound.motion.dim, ctx.bound.layout.joint
    function, name = ctx.bound.cluster.mappings[link], link.child.name

    def compute() -> Regression:
        theta, known = parameters_of(ctx, link.child, mean), known_arguments(ctx)
        wide = ctx.bound.layout.below[link].is_wide  # a residual covariance of all channels would be dense
        kind = ctx.bound.motion.linearisation
        if kind != "taylor" and not function.is_affine and not wide:

            def at(points: Tensor) -> Tensor:
                parameters = parameters_of(ctx, link.child, points)
                return function(arguments(ctx, function, points, known), parameters)

            return regress(at, mean[:, joint], belief.covariance_of(joint), kind)
        start = arguments(ctx, function, mean, known)[:, None]
        found = function.linearise(start, theta, 1)
        jacobian = found.jacobian.expand(len(mean), -1, start.shape[-1])
        slopes = [function.parameter_slope(start, theta, 1)[:, 0]] if theta.shape[-1] else []

        def whole() -> Tensor:
            return joint_jacobian(ctx, link.child, jacobian[..., :d], torch.cat([*slopes, jacobian[..., d:]], -1))

        # that of an affine mapping stays the same
        return Regression(found.value[:, 0], ctx.cached(f"slope to {name}", whole, found.jacobian, *slopes), None)

    others = [ctx.message(each.link).value for each in ctx.bound.layout.parameters[link.child] if not each.is_joint]
    keys = (mean, belief.covariance_by_source, ctx.state.inputs, ctx.state.time, *others)
    return ctx.cached(f"mapping to {name}", compute, *keys)


def mapping_jacobian(ctx: Context, link: Predicts, mapping: Regression) -> Tensor:
    """∂g/∂s of a node below, with the coordinates of its noise; (B, d, n)."""
    layout, d = ctx.bound.layout, mapping.jacobian.shape[1]

    def compute() -> Tensor:
        jacobian = widened(mapping.jacobian, layout.size)
        first = layout.below[link].latents
        if first.stop > first.start:
            jacobian[..., first.start : first.start + d].diagonal(dim1=-2, dim2=-1).add_(1.0)
        return jacobian

    return ctx.cached(f"jacobian of {link.child.name}", compute, mapping.jacobian)


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
