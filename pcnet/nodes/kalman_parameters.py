"""How the belief of a Kalman state follows its parameters, part of it or with sensitivities beside it."""

import torch
from torch import Tensor

from pcnet.model.messages import ParameterTransition
from pcnet.nodes.augmented_layout import ParameterBlock
from pcnet.nodes.kalman_belief import Context, KalmanState
from pcnet.numerics import kalman
from pcnet.numerics.kalman import GaussianWithSensitivities


def scored_parameters(ctx: Context) -> Tensor:
    """All parameters with sensitivities, (B, p)."""
    found = [ctx.message(each.link).value for each in ctx.bound.layout.all_parameters if not each.is_joint]
    return torch.cat(found, -1) if found else torch.zeros_like(ctx.state.reference.parameters)


def transition_numbers(ctx: Context) -> Tensor:
    """The number of the last transition of the parameters of each link, (B, links)."""
    known = [ctx.message(each.link).transition for each in ctx.bound.layout.all_parameters]
    like = ctx.state.reference.transitions
    zero = like.new_zeros(len(like))
    found = [zero if transition is None else transition.number for transition in known]
    return torch.stack(found, 1) if found else like


def scored_covariance(ctx: Context) -> Tensor:
    """The covariance of all parameters with sensitivities, (B, p, p)."""
    found = torch.zeros_like(ctx.state.evidence.parameters.information)
    for each in ctx.bound.layout.all_parameters:
        if not each.is_joint:
            found[:, each.sensitivities, each.sensitivities] = ctx.message(each.link).covariance
    return found


def state_covariance(ctx: Context) -> Tensor:
    """P of the state, plus what uncertain noise levels, and parameters beside the belief, add to it; (B, dim, dim)."""
    here = slice(ctx.bound.motion.dim)
    growth, added = _by_uncertain_levels(ctx, here)
    covariance = ctx.state.belief.covariance_by_source[..., here, here].sum(1)
    return _with_parameters(ctx, covariance * growth[:, :, None] * growth[:, None] + added)


def plain_covariance(ctx: Context) -> Tensor:
    """P of the state, plus what uncertain parameters beside the belief add to it; (B, dim, dim)."""
    here = slice(ctx.bound.motion.dim)
    return _with_parameters(ctx, ctx.state.belief.covariance_by_source[..., here, here].sum(1))


def _with_parameters(ctx: Context, covariance: Tensor) -> Tensor:
    """A covariance of the state, plus what uncertain parameters beside the belief add to it."""
    if not ctx.bound.layout.n_scored:
        return covariance
    slope = ctx.state.belief.dmean_dtheta[:, : ctx.bound.motion.dim]
    return covariance + slope @ scored_covariance(ctx) @ slope.mT


def with_uncertain_levels(ctx: Context) -> KalmanState:
    """The state, with the uncertainty of the levels of its own noises in its covariance and in their variances.

    With l ~ N(m, V) the log-variances of the noises, those variances have the means e^m exp(V/2).
    """
    layout, state = ctx.bound.layout, ctx.state
    known = _level_covariance(ctx)
    n = known.shape[-1]
    if not n:
        return state
    factors = (0.5 * known.diagonal(dim1=-2, dim2=-1)).exp()
    variance = state.reference.variance * (1 + (factors - 1) @ layout.level_channels[:n])
    growth, added = _by_uncertain_levels(ctx, slice(layout.size))
    parts = state.belief.covariance_by_source * growth[:, None, :, None] * growth[:, None, None]
    parts = torch.cat([parts[:, :1] + added[:, None], parts[:, 1:]], 1)
    return state._replace(
        belief=state.belief._replace(covariance_by_source=parts),
        reference=state.reference._replace(variance=variance),
    )


def _by_uncertain_levels(ctx: Context, place: slice) -> tuple[Tensor, Tensor]:
    """What uncertain levels of the own noises do to elements at a place: factors of their standard deviations (B, m),
    and a covariance that is added, (B, m, m).

    The log of a variance P_ii of the belief has the slopes s_k = P_k,ii/P_ii with respect to the log-variances l of the
    noises, the shares of the noises in it. Where it is linear, as for states that are not observed (s = 1) and for
    random walks that are observed often (s = 1/2), E P_ii = P_ii exp(sᵀVs/2). Correlations stay. That l is uncertain
    also moves the mean, by ∂m/∂l.
    """
    known = _level_covariance(ctx)
    n, slope = known.shape[-1], ctx.state.belief.dmean_dlogvar[:, place, : known.shape[-1]]
    by_source = ctx.state.belief.covariance_by_source[..., place, place].diagonal(dim1=-2, dim2=-1)
    total = by_source.sum(1)
    shares = by_source[:, 1 : 1 + n].mT * torch.where(total > 0, total, 1.0).reciprocal()[..., None]
    return (0.25 * (shares @ known * shares).sum(-1)).exp(), slope @ known @ slope.mT


def _level_covariance(ctx: Context) -> Tensor:
    """Covariance V of the levels of the own noises, (B, n, n); 0 for levels that are not learned."""
    n, variance = ctx.bound.layout.own_levels.stop, ctx.state.reference.variance
    found = variance.new_zeros(len(variance), n, n)
    for link, block in ctx.bound.layout.own.items():
        known, here = ctx.message(link).covariance, block.levels
        if known is not None:
            size = here.stop - here.start
            found[:, here, here] = known[:, :size, :size]
    return found


def follow_joint(
    ctx: Context, belief: GaussianWithSensitivities, block: ParameterBlock, transition: ParameterTransition
) -> GaussianWithSensitivities:
    """The belief with parameters θ of it replaced by their successors θ⁺ = η⁺ + B(θ − m) + ε.

    With v₀ and v₁ the covariances of θ and θ⁺, and c = gain v₁ between them: B = cᵀv₀⁻¹, Var ε = v₁ − Bv₀Bᵀ.
    """
    message, place = ctx.message(block.link), block.elements
    v0, v1 = belief.covariance[:, place, place], message.covariance
    matrix = torch.linalg.solve(v0, transition.gain @ v1).mT
    noise = torch.zeros_like(belief.covariance_by_source[..., place, place])
    noise[:, 0] = v1 - matrix @ v0 @ matrix.mT
    moved = kalman.transform(belief, place, matrix, noise)
    mean = moved.mean.clone()
    mean[:, place] = message.value
    return moved._replace(mean=mean)


def follow_scored(
    ctx: Context, belief: GaussianWithSensitivities, theta: Tensor, numbers: Tensor
) -> GaussianWithSensitivities:
    """The belief corrected for parameters with sensitivities that were updated, and that have moved on since."""
    layout, reference, dtheta = ctx.bound.layout, ctx.state.reference, belief.dmean_dtheta
    target = theta.clone()
    gain = torch.eye(layout.n_scored, dtype=theta.dtype, device=theta.device).repeat(len(theta), 1, 1)
    residual = torch.zeros_like(gain)
    for i, each in enumerate(layout.all_parameters):
        transition, part = ctx.message(each.link).transition, each.sensitivities
        if not each.is_joint and transition is not None:
            changed = numbers[:, i] != reference.transitions[:, i]
            column, matrix = changed[:, None], changed[:, None, None]
            target[:, part] = torch.where(column, transition.mean, target[:, part])
            gain[:, part, part] = torch.where(matrix, transition.gain, gain[:, part, part])
            residual[:, part, part] = torch.where(matrix, transition.residual_covariance, 0.0)
    mean = belief.mean + torch.bmm(dtheta, (target - reference.parameters)[..., None])[..., 0]
    parts = belief.covariance_by_source
    parts = torch.cat([parts[:, :1] + (dtheta @ residual @ dtheta.mT)[:, None], parts[:, 1:]], 1)
    return belief._replace(mean=mean, covariance_by_source=parts, dmean_dtheta=dtheta @ gain)
