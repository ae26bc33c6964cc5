"""The measurement update of a Kalman state with the error of one node below it."""

import torch

from pcnet.model.links import Predicts
from pcnet.model.messages import PredictionError
from pcnet.nodes.kalman_belief import Context, KalmanState
from pcnet.nodes.kalman_functions import direct_slope, mapping_jacobian, regressed_mapping
from pcnet.nodes.kalman_noises import observation_noise
from pcnet.numerics import kalman, low_rank
from pcnet.numerics.kalman import PredictiveDistribution
from pcnet.numerics.low_rank import LowRankDistribution, LowRankPrecision


def take_in(
    ctx: Context, link: Predicts, sent: PredictiveDistribution | LowRankDistribution, error: PredictionError
) -> KalmanState:
    """The state after a measurement update, with the scores of parameters and noise levels in it.

    sent: the predictive distribution that the error is about.
    """
    layout, state = ctx.bound.layout, ctx.state
    belief, evidence = state.belief, state.evidence
    weighted, precision = error.weighted[:, 0], error.precision
    mapping = regressed_mapping(ctx, belief, link)
    jacobian, direct = mapping_jacobian(ctx, link, mapping), direct_slope(ctx, belief, link)
    pull = torch.bmm(weighted[:, None], jacobian)[:, 0]
    if layout.n_scored:
        score = kalman.parameter_score(jacobian, belief.dmean_dtheta, direct, weighted, precision)
        evidence = evidence._replace(parameters=evidence.parameters.plus(score))
    own = sent.of_levels(layout.own_levels)
    if isinstance(own, LowRankDistribution):
        assert isinstance(precision, LowRankPrecision) and isinstance(sent, LowRankDistribution)
        if layout.own_levels.stop:
            score = low_rank.noise_score(own, precision, weighted)
            evidence = evidence._replace(noise=evidence.noise.plus(score))
        updated = low_rank.update(belief, precision, pull, direct, sent.noise_levels)
    else:
        matrix = precision.dense()
        if layout.own_levels.stop:
            raw = torch.bmm(own.covariance, weighted[..., None])[..., 0]
            score = kalman.noise_score(own, raw, weighted, matrix)
            evidence = evidence._replace(noise=evidence.noise.plus(score))
        noise = None
        if error.noise is not None and error.noise.levels:
            noise = observation_noise(ctx, layout.below[link])
            noise = noise if error.noise_inflation is None else noise * error.noise_inflation[:, None]
        updated = kalman.update(belief, jacobian, direct, weighted, matrix, noise, mapping.residual)
    evidence = evidence._replace(
        correction=evidence.correction + (updated.mean - belief.mean)[:, layout.joint],
        weighted_error=evidence.weighted_error + pull[:, : ctx.bound.motion.dim],
    )
    return state._replace(belief=updated, evidence=evidence)
