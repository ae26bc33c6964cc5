"""The first belief of a Kalman state."""

import torch
from torch import Tensor

from pcnet.model.links import Predicts
from pcnet.nodes.kalman_belief import Context, KalmanBound, KalmanState, Reference
from pcnet.nodes.kalman_functions import inputs_now
from pcnet.nodes.kalman_inputs import with_new_deviations
from pcnet.nodes.kalman_noises import lengthscales, present_noises, variances
from pcnet.nodes.kalman_parameters import scored_parameters, transition_numbers
from pcnet.nodes.kalman_predictions import predict_children
from pcnet.numerics.branching import holds
from pcnet.numerics.mixtures import Peaks, bending, split_axes
from pcnet.numerics.trees import select, tree_map

BENT, SPLIT_AXES = 0.5, 2
"""A first belief is divided along elements where mappings have so much second-order variance, at most so many."""


def started(ctx: Context) -> KalmanState:
    """The state, with batch elements that have not started yet starting at their first value."""
    state = ctx.state
    variance = state.reference.variance
    fresh = ctx.cached("fresh", lambda: variance[:, 0] == 0, variance)  # that of a noise of its own
    if not ctx.cached("any fresh", lambda: holds(fresh.any()), fresh):
        return state
    return select(fresh, start(ctx, *first_belief(ctx, state)), state)


def first_belief(ctx: Context, state: KalmanState) -> tuple[Tensor, Tensor]:
    """Mean (B, dim) and covariance (B, dim, dim) that a state starts with."""
    here = slice(ctx.bound.motion.dim)
    return state.belief.mean[:, here], state.belief.covariance_by_source[:, 0, here, here]


def start(ctx: Context, value: Tensor, spread: Tensor | None) -> KalmanState:
    """The state with this value (B, dim) and nothing learned; spread: its covariance, None if all is certain."""
    layout, state = ctx.bound.layout, ctx.state
    variance = variances(ctx)
    mean = torch.constant_pad_nd(value, (0, layout.size - ctx.bound.motion.dim))
    parts = torch.zeros_like(state.belief.covariance_by_source)
    if spread is not None:
        parts[:, 0, : ctx.bound.motion.dim, : ctx.bound.motion.dim] = spread
    for each in layout.all_parameters:
        if each.is_joint:
            mean[:, each.elements] = ctx.message(each.link).value
            if spread is not None:
                parts[:, 0, each.elements, each.elements] = ctx.message(each.link).covariance
    for block in layout.noises:
        latent = layout.by_source(block, variance[:, block.channels]).repeat(1, 1, block.model.n_latents)
        parts[..., block.latents, block.latents].diagonal(dim1=-2, dim2=-1).copy_(latent)
    numbers = transition_numbers(ctx)
    guesses = [each.variance if each.first_guess is None else each.first_guess for each in present_noises(ctx)]
    guess = torch.cat(guesses, 1)
    reference = Reference(scored_parameters(ctx), variance, guess, lengthscales(ctx), numbers)
    nothing = tree_map(torch.zeros_like, state)
    belief = nothing.belief._replace(mean=mean, covariance_by_source=parts)
    started = nothing._replace(
        belief=belief if spread is None else with_new_deviations(belief, layout.inputs),
        reference=reference,
        time=ctx.time,
        inputs=inputs_now(ctx),
    )
    none = [each.lagged_covariance for each in nothing.sent]
    return started._replace(sent=predict_children(ctx, started, none))


def peaks_of_start(ctx: Context) -> Peaks | None:
    """Peaks of a first belief that a mapping bends; None if none does."""
    bound, d = ctx.bound, ctx.bound.motion.dim
    mappings = ctx.bound.cluster.mappings
    known = {link for link, each in mappings.items() if each.is_affine or each.takes_causes or each.takes_time}
    curved = [link for link in mappings if link not in known]
    if not curved:
        return None
    largest = torch.zeros_like(bound.initial_mean[0])
    for link in curved:
        blocks = bound.layout.parameters[link.child]
        theta = [ctx.message(each.link).value for each in blocks]
        fixed = torch.cat(theta, -1) if theta else bound.initial_mean[:, :0]

        def at(points: Tensor, link: Predicts = link, fixed: Tensor = fixed) -> Tensor:
            return mappings[link](points, fixed[:, None].expand(*points.shape[:-1], -1))

        found = bending(at, bound.initial_mean, bound.initial_variance.sqrt())
        largest = torch.maximum(largest, found.amax(0))
    axes = [int(i) for i in largest.argsort(descending=True)[:SPLIT_AXES] if largest[i] > BENT]
    return split_axes(axes, bound.initial_mean[0, :d]) if axes else None


def started_at(bound: KalmanBound, state: KalmanState, offset: Tensor, narrowing: Tensor) -> KalmanState:
    """The state with its first mean and standard deviations moved and narrowed, as in `StartsAtPeaks`."""
    mean, parts = state.belief.mean.clone(), state.belief.covariance_by_source.clone()
    mean[:, : bound.motion.dim] = bound.initial_mean + offset * bound.initial_variance.sqrt()
    parts[:, 0, : bound.motion.dim, : bound.motion.dim] = (bound.initial_variance * narrowing**2).diag_embed()
    return state._replace(belief=state.belief._replace(mean=mean, covariance_by_source=parts))
