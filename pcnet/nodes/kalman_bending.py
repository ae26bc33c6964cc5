"""How far flow and mappings of a Kalman state are from linear over its belief, and the belief divided accordingly."""

import torch
from torch import Tensor

from pcnet.functions.base import Function
from pcnet.model.links import Predicts
from pcnet.model.node import AnyNode
from pcnet.nodes.kalman_belief import Context, KalmanBound, KalmanState
from pcnet.nodes.kalman_functions import arguments, known_arguments, parameters_of
from pcnet.nodes.kalman_noises import observation_noise
from pcnet.numerics.gaussian_sums import NODE, Bends, Probe, bending, narrowed
from pcnet.numerics.mixtures import SHIFT
from pcnet.numerics.sigma_points import covariance_root

AHEAD = 16.0  # intervals in which a flow must matter


def flow_bends(ctx: Context, root: Tensor) -> Tensor:
    """How far the flow is from linear along the columns of a root of the covariance, (B, q)."""
    motion, belief, joint = ctx.bound.motion, ctx.state.belief, ctx.bound.layout.joint
    if motion.flow.is_affine:
        return torch.zeros_like(belief.mean[:, joint])
    variance = belief.covariance.diagonal(dim1=-2, dim2=-1)[:, : motion.dim]
    return bending(_probe(ctx, motion.flow, None, root), variance / (AHEAD * ctx.dt[:, None]) ** 2)


def mappings_bend(ctx: Context, root: Tensor) -> Tensor:
    """How far mappings are from linear along the columns of a root of the covariance, (B, q)."""
    cluster, layout = ctx.bound.cluster, ctx.bound.layout
    found = torch.zeros_like(ctx.state.belief.mean[:, layout.joint])
    for link in ctx.below_of(Predicts):
        mapping = cluster.mappings[link]
        if not mapping.is_affine and not layout.below[link].is_wide:
            noise = observation_noise(ctx, layout.below[link]).sum(1)
            found = found + bending(_probe(ctx, mapping, link.child, root), noise)
    return found


def _probe(ctx: Context, function: Function, of: AnyNode | None, root: Tensor) -> Probe:
    """A flow, or the mapping to a node, at points that represent the beliefs."""
    belief, joint = ctx.state.belief, ctx.bound.layout.joint
    mean, q, known = belief.mean[:, joint], joint.stop, known_arguments(ctx)
    away = NODE * root[:, joint, joint].mT

    def at(points: Tensor) -> Tensor:
        return function(arguments(ctx, function, points, known), parameters_of(ctx, of, points))

    places = [torch.zeros_like(away[:, :1]), away, -away, 0.5 * away, -0.5 * away]
    values = at(mean[:, None] + torch.cat(places, 1))
    return Probe(values[:, 0], *torch.split(values[:, 1:], q, 1))


def can_bend(bound: KalmanBound) -> bool:
    """Whether flow or mappings are other than affine."""
    below = bound.layout.below
    mappings = (mapping for link, mapping in bound.cluster.mappings.items() if not below[link].is_wide)
    return not all(function.is_affine for function in (bound.motion.flow, *mappings))


def all_bends(ctx: Context) -> Bends:
    """How far flow and mappings are from linear along the columns of a root of the covariance."""
    root = covariance_root(ctx.state.belief.covariance)
    return Bends(root, torch.maximum(flow_bends(ctx, root), mappings_bend(ctx, root)))


def part_of(state: KalmanState, bends: Bends, place: Tensor) -> KalmanState:
    """The state with each belief replaced by one of three parts of it along the column where it is most bent.

    place: −1, 0 or 1 for the parts, (B,); anything else for beliefs that stay as they are.
    """
    belief = state.belief
    cut = (place.abs() <= 1).to(belief.mean)
    shares, column = narrowed(belief.covariance_by_source, *bends, cut)
    mean = belief.mean + (SHIFT * cut * place)[:, None] * column
    return state._replace(belief=belief._replace(mean=mean, covariance_by_source=shares))
