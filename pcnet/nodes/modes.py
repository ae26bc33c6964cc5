"""The modes of a switching state: k beliefs for each batch element, as a batch of k·B elements, mode by mode."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.model.context import NodeContext, Now
from pcnet.model.links import AnyLink, Drives, Parametrises, Weighs
from pcnet.model.messages import (
    CategoryPrediction,
    GaussianPrediction,
    NoisePrediction,
    ParameterPrediction,
    ParameterTransition,
    PointPrediction,
    PredictionError,
)
from pcnet.model.node import BatchSpec
from pcnet.numerics.coloured_noise import Noise, NoiseSpec
from pcnet.numerics.kalman import GaussianWithSensitivities, PredictiveDistribution
from pcnet.numerics.kernels import Kernel, White, lengthscale_of
from pcnet.numerics.outliers import expect_outliers
from pcnet.numerics.precision import DenseCurvature, DensePrecision
from pcnet.numerics.trees import tree_map

Context = NodeContext[Any, Any]


class ModeErrors(NamedTuple):
    """An observation as seen from each mode, and from the moments of all modes together."""

    error: PredictionError  # of k·B elements
    log_likelihood: Tensor  # of each mode, (B, k)
    of_moments: Tensor  # log-likelihood of the moment-matched prediction, (B,)


def spec_of_modes(spec: BatchSpec, k: int) -> BatchSpec:
    """The batch of all modes."""
    return spec._replace(batch=k * spec.batch, batch_shape=torch.Size((k, *spec.batch_shape)))


def repeated(value: Tensor, k: int) -> Tensor:
    """A tensor (B, ...) once for each mode, (k·B, ...)."""
    return value.repeat(k, *(1,) * (value.dim() - 1))


def inwards(tree: Any) -> Any:
    """Tensors (B, k, ...) as (k·B, ...), mode by mode."""

    def change(value: Tensor) -> Tensor:
        return value.transpose(0, 1).flatten(0, 1)

    return change(tree) if isinstance(tree, Tensor) else tree_map(change, tree)


def outwards(tree: Any, k: int) -> Any:
    """Tensors (k·B, ...) as (B, k, ...)."""

    def change(value: Tensor) -> Tensor:
        return value.reshape(k, len(value) // k, *value.shape[1:]).transpose(0, 1).contiguous()

    return change(tree) if isinstance(tree, Tensor) else tree_map(change, tree)


def average(values: Tensor, weight: Tensor) -> Tensor:
    """Σ_m w_m v_m of values (B, k, ...) with weights (B, k)."""
    return (weight.reshape(*weight.shape, *(1,) * (values.dim() - 2)) * values).sum(1)


def spread(mean: Tensor, weight: Tensor) -> Tensor:
    """Σ_m w_m (m_m − m)(m_m − m)ᵀ of means (B, k, n); (B, n, n)."""
    away = mean - average(mean, weight)[:, None]
    return away.mT @ (weight[..., None] * away)


def mixed(belief: GaussianWithSensitivities, weight: Tensor) -> GaussianWithSensitivities:
    """Beliefs (B, k, ...) of modes before a step as those that modes start with after it, with the same moments.

    weight: of each mode before (second dimension), given each mode after (third); (B, k, k).
    """

    def average_of(values: Tensor) -> Tensor:
        found = torch.bmm(weight.mT, values.flatten(2)) if values.numel() else values.flatten(2)
        return found.view_as(values)

    mean, parts = average_of(belief.mean), average_of(belief.covariance_by_source)
    away = belief.mean[:, :, None] - mean[:, None]  # (B, before, after, n)
    parts[:, :, 0] += (weight[..., None, None] * away[..., :, None] * away[..., None, :]).sum(1)
    return GaussianWithSensitivities(mean, parts, average_of(belief.dmean_dtheta), average_of(belief.dmean_dlogvar))


def moments(predicted: tuple[GaussianPrediction, ...], weight: Tensor, k: int) -> tuple[GaussianPrediction, ...]:
    """Predictions of k·B elements as one for each batch element, of the same mean and covariance; weight (B, k)."""
    found = []
    for each in predicted:
        mean, covariance, *others = outwards(each.distribution, k)
        total = average(covariance, weight) + spread(mean, weight)
        matched = PredictiveDistribution(average(mean, weight), total, *(average(other, weight) for other in others))
        found.append(GaussianPrediction(matched, matched.mean.new_zeros(len(mean), 0, 0)))
    return tuple(found)


def noise_of_modes(noise: Noise | None, k: int) -> Noise | None:
    if noise is None:
        return None
    guess = None if noise.first_guess is None else repeated(noise.first_guess, k)
    kernel = kernel_of_modes(noise.kernel, len(noise.variance), k)
    return noise._replace(variance=repeated(noise.variance, k), kernel=kernel, first_guess=guess)


def kernel_of_modes(kernel: Kernel, batch: int, k: int) -> Kernel:
    if isinstance(kernel, White) or not lengthscale_of(kernel).dim():
        return kernel
    return kernel.with_lengthscale(repeated(lengthscale_of(kernel).expand(batch), k))


def spec_of_noise(noise: NoiseSpec | None, batch: int, k: int) -> NoiseSpec | None:
    return None if noise is None else noise._replace(kernel=kernel_of_modes(noise.kernel, batch, k))


def context_of_modes(ctx: Context, state: Any, bound: Any, k: int) -> Context:
    """The context of all modes, in which each has the same messages, but for the values of its category.

    state: of k·B elements. bound: their constants.
    """
    now = ctx.now
    relative = None if now.relative_dt is None else repeated(now.relative_dt, k)
    later = Now(repeated(now.time, k), repeated(now.dt, k), relative)
    messages: dict[AnyLink, Any] = {link: _from_above(ctx, link, k) for link in ctx.above}
    for link in ctx.below:
        error = ctx.error(link)
        messages[link] = PredictionError(error.weighted, error.compute_precision, noise=noise_of_modes(error.noise, k))
    return ctx.at(state, later, messages, bound)


def _from_above(ctx: Context, link: AnyLink, k: int) -> Any:
    message = ctx.message(link)
    if isinstance(link, Weighs):
        assert isinstance(message, NoisePrediction)
        known, noise = message.covariance, noise_of_modes(message.noise, k)
        covariance = None if known is None else (lambda known=known: repeated(known, k))
        return NoisePrediction(lambda: message.value, message.kernel, noise, covariance)
    if isinstance(link, Parametrises):
        assert isinstance(message, ParameterPrediction)
        moved = message.transition
        moved = None if moved is None else ParameterTransition(*(repeated(each, k) for each in moved))
        walk = repeated(message.walk, k) if isinstance(message.walk, Tensor) else message.walk
        return ParameterPrediction(repeated(message.value, k), lambda: repeated(message.covariance, k), moved, walk)
    assert isinstance(link, Drives)
    if isinstance(message, CategoryPrediction):
        return PointPrediction(inwards(message.values)[:, None])
    return PointPrediction(repeated(message.value, k))


def errors_of_modes(
    error: PredictionError, sent: PredictiveDistribution, modes: PredictiveDistribution, k: int
) -> ModeErrors:
    """The error of each mode from that of their moment-matched prediction N(ŷ, S), given as ξ = S⁻¹(y − ŷ).

    Args:
        error: From the node below; precision 0 where nothing is observed.
        sent: N(ŷ, S), what was sent to it.
        modes: What each mode predicts, of k·B elements.
        k: Number of modes.
    """
    noise = noise_of_modes(error.noise, k)
    if error.compare is not None:
        other = error.compare(modes.mean, modes.covariance)
        curvature = DenseCurvature(other.precision)
        found = PredictionError(other.weighted[:, None], lambda: curvature, noise=noise)
        return ModeErrors(found, outwards(other.log_likelihood, k), other.of_sent)
    weighted, precision = error.weighted[:, 0], error.precision.dense()
    there = precision.diagonal(dim1=-2, dim2=-1) > 0
    moved = torch.bmm(sent.covariance, weighted[..., None])[..., 0]
    if error.noise_inflation is not None:
        moved = moved + sent.noise * (error.noise_inflation - 1) * weighted
    value = moved + sent.mean
    whole = _likelihood(value, sent, error.outliers, there)
    share = None if error.outliers is None else repeated(error.outliers, k)
    own = _likelihood(repeated(value, k), modes, share, repeated(there, k))
    found = PredictionError(own.weighted, lambda: own.precision, noise=noise, noise_inflation=own.inflation)
    return ModeErrors(found, outwards(own.log_likelihood, k), whole.log_likelihood)


class _Likelihood(NamedTuple):
    """An observation under a predictive distribution."""

    weighted: Tensor  # (B, 1, d)
    precision: DensePrecision
    inflation: Tensor | None  # factor of the variance of the noise, (B, d), if there may be outliers
    log_likelihood: Tensor  # up to a constant, (B,)


def _likelihood(
    value: Tensor, predicted: PredictiveDistribution, outliers: Tensor | None, there: Tensor
) -> _Likelihood:
    """The error of an observation (B, d), of which the channels at `there` are seen; outliers: their share, (B,)."""
    error, covariance = torch.where(there, value - predicted.mean, 0.0), predicted.covariance
    inflation, gain = None, error.new_zeros(len(error))
    if outliers is not None:
        inflation, gains = expect_outliers(outliers[:, None], error, predicted.variance, predicted.noise)
        covariance = covariance + (predicted.noise * (inflation - 1)).diag_embed()
        gain = torch.where(there, gains, 0.0).sum(-1)
    precision = DensePrecision.of_covariance(covariance, there)
    weighted = precision.weigh(error[:, None])
    fit = (weighted[:, 0] * error).sum(-1)
    return _Likelihood(weighted, precision, inflation, 0.5 * (precision.log_det - fit) + gain)


def transition_of(probability: Tensor, transition: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (B, k, s) of stages after a step, and of the category before given that after, (B, k, k)."""
    k, s = probability.shape[1:]
    joint = probability.flatten(1)[..., None] * transition
    after = joint.sum(1).view_as(probability)
    pairs = joint.view(-1, k, s, k, s).sum((2, 4))
    total = pairs.sum(1, keepdim=True)
    return after, torch.where(total > 0, pairs / torch.where(total > 0, total, 1.0), 1 / k)


def chosen_by(probability: Tensor, normal: Tensor) -> Tensor:
    """Ones and zeros (B, c, m): one of m choices with probabilities (B, c or 1, m), by normal numbers (B, c, 1)."""
    upto = probability.cumsum(-1)
    later = (torch.special.ndtr(normal) > upto[..., :-1]).to(probability)
    later = torch.constant_pad_nd(later, (1, 0), value=1.0)  # at least the first
    return later - torch.constant_pad_nd(later[..., 1:], (0, 1))


def number_of(chosen: Tensor) -> Tensor:
    """The numbers (B, c, 1) of choices (B, c, m)."""
    return (chosen.cumsum(-1) < 0.5).to(chosen).sum(-1, keepdim=True)


def choice_of(number: Tensor, m: int) -> Tensor:
    """The choices (B, c, m) with these numbers (B, c, 1)."""
    places = torch.arange(m, dtype=number.dtype, device=number.device)
    return ((number - places).abs() < 0.5).to(number)
