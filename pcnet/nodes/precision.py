"""Precision nodes: the log-precisions and the correlation time of one error."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import AnyLink, Parametrises, Weighs
from pcnet.model.messages import NoisePrediction, ScoreError
from pcnet.model.node import BatchSpec, Energy, Indefinite, Node, Recordable
from pcnet.model.protocols import AssumesNoiseLevels
from pcnet.nodes.slow_belief import SlowBelief, as_matrix
from pcnet.numerics.branching import holds
from pcnet.numerics.coloured_noise import Noise, NoiseSpec
from pcnet.numerics.estimators import GradientAccumulator, NoiseScoring, ParameterEstimator
from pcnet.numerics.generalised import check_smoothness, temporal_precision
from pcnet.numerics.kalman import ScoreAndInformation
from pcnet.numerics.kernels import Autocorrelation, Kernel, Matern, SquaredExponential, lengthscale_of
from pcnet.numerics.laplace import standard_deviations
from pcnet.numerics.precision import CholeskyPrecision, Precision
from pcnet.settings import Positive, PositiveVector, Vector, at_least_1d, broadcast, check_shapes, number, settings


class PrecisionState(NamedTuple):
    """The belief with its prior, and gradients and curvatures since the last update.

    Log-precisions alone do not interact: their precision is a diagonal, (B, n). With couplings, a learned lengthscale,
    or an estimator that uses curvatures, it is (B, n, n).
    """

    mean: Tensor  # (B, n)
    precision: Tensor
    log_det_covariance: Tensor  # log|Σ|, (B,)
    prior_mean: Tensor
    prior_precision: Tensor
    prior_log_det_covariance: Tensor
    accumulated: GradientAccumulator


class PrecisionBound(NamedTuple):
    """Constants of a run; mean and standard deviation of the prior are (B, n)."""

    estimator: ParameterEstimator
    mean: Tensor
    sd: Tensor
    temporal: dict[int, tuple[Tensor, Tensor]]  # S⁻¹ with its log-determinant, by number of orders that are weighed
    kernel: Kernel  # the autocorrelation behind it
    levels: int  # number of log-precisions
    interacting: bool  # whether precisions of the belief are matrices
    recursive: bool  # whether it is learned along with the beliefs of a Kalman state


Context = NodeContext[PrecisionState, PrecisionBound]


@settings
class PrecisionNode(SlowBelief, AssumesNoiseLevels):
    """Log-precisions λ of an error: Π̃ = S⁻¹ ⊗ Π with Π = diag(e^λ), and S from the autocorrelation of the noise.

    Local energy ½(λ − η)²/σ² for each channel; F grows by ½(ε̃ᵀΠ̃ε̃ − orders) along each λ.

    Args:
        prior_precision: Expected precision E[e^λ], so that η = log prior_precision − sd²/2. One number, or
            (..., channels) with leading batch dimensions; so are mean and sd.
        mean: η itself, instead of prior_precision.
        sd: Prior standard deviation of λ.
        correlation_time: Lengthscale of a squared-exponential autocorrelation, in time units.
        kernel: Any autocorrelation, instead of correlation_time.
        correlation_time_sd: Prior standard deviation of the log of the lengthscale, which then is learned as well; it
            can be recorded and read as "correlation_time". Below a Kalman state this works; the errors of a generalised
            state that follows the observations are not the noise and bias it.
        channels: One λ for "each" channel; one "shared" by all; or a "full" matrix Π = Tᵀ diag(e^λ) T with T unit lower
            triangular. Then λ_i is the log-precision of channel i given those before it, and the belief is about λ and
            the couplings T_ij, j < i, row by row: for up to some tens of channels. Π can be read as "matrix".
        coupling_sd: Prior standard deviation of the couplings, around 0, for channels scaled by e^(η/2).
        estimator: How λ is learned. Unless given: `NoiseScoring` next to a Kalman state, the paper's `RobbinsMonro`
            elsewhere.
        curvature: "gauss-newton" uses the expected curvature of F along λ, orders/2; "exact" uses ½ε̃ᵀΠ̃ε̃.
        indefinite: What to do where the exact curvature is not positive definite.
        ridge: Added to the diagonal of S before it is inverted, relative to the mean variance.
    """

    _: KW_ONLY
    prior_precision: PositiveVector | None = None
    mean: Vector | None = None
    sd: PositiveVector
    correlation_time: Positive | None = None
    kernel: Kernel | None = None
    correlation_time_sd: Positive | None = None
    channels: Literal["each", "shared", "full"] = "each"
    coupling_sd: Positive = number(1.0)
    estimator: ParameterEstimator | None = None
    curvature: Literal["gauss-newton", "exact"] = "gauss-newton"
    indefinite: Indefinite = "clamp"
    ridge: float = Field(default=0.0, ge=0.0)
    role: ClassVar[str] = "precision"
    kind: ClassVar[str] = "precision"
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Weighs,)
    informed_by: ClassVar[type[Parametrises | Weighs]] = Weighs

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if (self.prior_precision is None) == (self.mean is None):
            raise SettingError(f"{self.title}: give either prior_precision (a precision) or mean (a log-precision)")
        if (self.correlation_time is None) == (self.kernel is None):
            raise SettingError(f"{self.title}: give either correlation_time (in time units) or a kernel")
        learned = self.correlation_time_sd is not None
        if learned and not isinstance(self.noise_kernel, (SquaredExponential, Matern, Autocorrelation)):
            raise SettingError(f"{self.title}: {self.noise_kernel!r} has no lengthscale to learn")
        if learned and (self.channels == "full" or self.curvature == "exact"):
            raise SettingError(f"{self.title}: correlation_time_sd excludes channels='full' and curvature='exact'")
        given = self.prior_precision if self.mean is None else self.mean
        assert given is not None
        check_shapes(self.title, mean=given, sd=self.sd)

    @property
    def noise_kernel(self) -> Kernel:
        """The autocorrelation of the noise."""
        if self.kernel is not None:
            return self.kernel
        assert self.correlation_time is not None
        return SquaredExponential(self.correlation_time)

    @property
    def prior_mean(self) -> Tensor:
        """η, (..., channels or 1)."""
        if self.mean is not None:
            return at_least_1d(self.mean)
        assert self.prior_precision is not None
        return at_least_1d(self.prior_precision.log() - self.sd**2 / 2)

    def describe(self) -> str:
        time = self.correlation_time
        single = time is not None and time.numel() == 1
        kernel = f"correlation time {time:g}" if single else repr(self.noise_kernel)
        return f"{CHANNELS[self.channels]}, {kernel}"

    def check_as_parent(self, link: AnyLink) -> None:
        super().check_as_parent(link)
        shape = link.child.error_shape
        if shape is None:
            raise GraphError(f"{link.child.title} has no error of its own to weigh")
        given = broadcast(self.prior_mean.shape[-1:], at_least_1d(self.sd).shape[-1:])[0]
        allowed = {1} if self.channels == "shared" else {1, shape.dim}
        if given not in allowed:
            raise GraphError(
                f"{self.title} is given {given} channels but {link.child.name!r} has {shape.dim}; the last dimension "
                f"of prior_precision, mean and sd must be {' or '.join(str(n) for n in sorted(allowed))} "
                "(for a batch of single values add one: prior_precision[:, None])"
            )

    def check(self, links: Neighbours, like: Tensor) -> None:
        if not links.below:
            raise GraphError(f"{self.title} weighs nothing: add graph.weighs({self.name}, node)")
        dims = {link.child.shape.dim for link in links.below}
        if len(dims) > 1 and self.channels != "shared":
            raise GraphError(f"{self.title} weighs errors of {sorted(dims)} channels; use channels='shared'")
        for child in (link.child for link in links.below):
            rows = child.shape.rows
            try:
                check_smoothness(self.noise_kernel, rows, self.ridge)
            except SettingError as error:
                raise GraphError(f"{self.title} weighs {rows} orders of {child.name!r}, but {error}") from None

    def check_fit(self, links: Neighbours) -> None:
        self.resolve_estimator(links).check_batch(self.title)
        if self.correlation_time_sd is not None:
            raise GraphError(
                f"{self.title} learns a lengthscale, for which the free action of a pass is too irregular: leave out "
                "correlation_time_sd, or run it online first to find the lengthscale"
            )

    def spec_of(self, link: Weighs, spec: BatchSpec) -> NoiseSpec | None:
        """The noise of a child, as a Kalman state carries it; None if its channels are coupled."""
        if self.channels == "full":
            return None
        dim, kernel = link.child.shape.dim, spec.expand_to_batch(self.noise_kernel)
        return NoiseSpec(kernel, dim, 1 if self.channels == "shared" else dim, self.correlation_time_sd is not None)

    def bind(self, links: Neighbours, spec: BatchSpec) -> PrecisionBound:
        shapes = [link.child.shape for link in links.below]
        channels = 1 if self.channels == "shared" else shapes[0].dim
        mean, sd = spec.expand_vector(self.prior_mean, channels), spec.expand_vector(self.sd, channels)
        if self.channels == "full":
            i, j = torch.tril_indices(channels, channels, -1, device=mean.device)
            units = (0.5 * (mean[:, j] - mean[:, i])).exp()
            mean = torch.cat([mean, torch.zeros_like(units)], -1)
            sd = torch.cat([sd, spec.expand(self.coupling_sd, 0)[:, None] * units], -1)
        kernel = spec.expand_to_batch(self.noise_kernel)
        if self.correlation_time_sd is not None:
            log_lengthscale = lengthscale_of(kernel).log().expand(spec.batch)
            mean = torch.cat([mean, log_lengthscale[:, None]], -1)
            sd = torch.cat([sd, spec.expand(self.correlation_time_sd, 0)[:, None]], -1)
        temporal = {}
        for rows in {shape.rows for shape in shapes}:
            matrix = spec.expand(temporal_precision(self.noise_kernel, rows, self.ridge), 2)
            temporal[rows] = matrix, torch.linalg.slogdet(matrix)[1]
        estimator = spec.expand_to_batch(self.resolve_estimator(links))
        coupled = self.channels == "full" or self.correlation_time_sd is not None
        recursive = isinstance(estimator, NoiseScoring)
        known = (estimator, *(links.default_estimators.get(link) for link in links.below))
        independent = any(isinstance(each, NoiseScoring) and each.independent for each in known)
        interacting = coupled or (estimator.needs_curvature and not (recursive and independent))
        return PrecisionBound(estimator, mean, sd, temporal, kernel, channels, interacting, recursive and links.online)

    def init(self, bound: PrecisionBound, spec: BatchSpec) -> PrecisionState:
        mean, sd = bound.mean, bound.sd
        precision, log_det = sd**-2, 2 * sd.log().sum(-1)
        precision = precision.diag_embed() if bound.interacting else precision
        accumulated = bound.estimator.init(mean, precision)
        return PrecisionState(mean, precision, log_det, mean, precision, log_det, accumulated)

    def assume(self, bound: PrecisionBound, state: PrecisionState, value: Tensor) -> PrecisionState:
        """Log-variances that start higher by `value` than the first guess."""
        return state._replace(mean=state.mean - self._shift(bound, state, value))

    def levels(self, bound: PrecisionBound) -> int:
        return bound.levels

    def with_guess(self, bound: PrecisionBound, state: PrecisionState, log_variance: Tensor) -> PrecisionState:
        shift = self._shift(bound, state, log_variance)
        return state._replace(mean=state.mean - shift, prior_mean=state.prior_mean - shift)

    def _shift(self, bound: PrecisionBound, state: PrecisionState, value: Tensor) -> Tensor:
        """A change of log-variances (B, n) or (B, 1) in the form of the belief."""
        shift = torch.zeros_like(state.mean)
        shift[:, : bound.levels] = value if bound.levels > 1 else value.mean(1, keepdim=True)
        return shift

    def prediction(self, ctx: Context, link: AnyLink) -> NoisePrediction:
        shape, bound = link.child.shape, ctx.bound
        (temporal, log_det), kernel = bound.temporal[shape.rows], bound.kernel
        mean = ctx.state.mean[:, : bound.levels].expand(-1, shape.dim)
        learned = self.correlation_time_sd is not None
        if learned:
            lengthscale = self._lengthscale(ctx)[:, 0]
            order = torch.arange(shape.rows, dtype=mean.dtype, device=mean.device)
            scale = (lengthscale / lengthscale_of(kernel))[:, None] ** order
            temporal = scale[..., None] * temporal * scale[:, None]
            log_det, kernel = log_det + 2 * scale.log().sum(-1), kernel.with_lengthscale(lengthscale)

        def total() -> Tensor:
            return shape.rows * mean.sum(-1) + shape.dim * log_det

        if self.channels != "full":
            prior = ctx.state.prior_mean
            guess = ctx.cached("first guess", (-prior[:, : bound.levels]).exp, prior)
            noise = Noise((-mean).exp(), kernel, bound.levels, learned, guess.expand(-1, shape.dim))
            return NoisePrediction(
                lambda: Precision(temporal, mean.exp(), total(), learns_lengthscale=learned),
                *(kernel, noise, lambda: self._learned_covariance(ctx)),
            )
        factor = torch.eye(shape.dim, dtype=mean.dtype, device=mean.device).repeat(len(mean), 1, 1)
        i, j = torch.tril_indices(shape.dim, shape.dim, -1, device=mean.device)
        factor[:, i, j] = ctx.state.mean[:, shape.dim :]
        return NoisePrediction(lambda: CholeskyPrecision(temporal, mean, factor, total()), kernel)

    def update(self, ctx: Context) -> PrecisionState:
        state: PrecisionState = super().update(ctx)
        if ctx.bound.recursive:
            state = state._replace(precision=state.accumulated.precision)
        mean = state.mean
        size = mean[:, : ctx.bound.levels].abs()
        beyond = size > math.log(torch.finfo(mean.dtype).max)
        if holds(beyond.any()):
            ctx.mark_diverged(
                beyond.any(-1),
                f"a log-precision reached {float(size.max()):.3g}, so its precision is 0 or infinite; the error that "
                "it weighs has diverged: use smaller steps (lower kappa or rate)",
            )
        return state

    def energy(self, ctx: Context) -> Energy:
        """None for levels that are learned along with a Kalman state, whose predictive likelihoods contain it."""
        return Energy() if ctx.bound.recursive else super().energy(ctx)

    def shape_curvature(self, ctx: Context, curvature: Tensor) -> Tensor:
        curvature = self.shape_gradient(curvature)
        if curvature.dim() == 3:
            curvature = self.shape_gradient(curvature.mT).mT
        if ctx.bound.interacting:
            return as_matrix(curvature)
        return curvature if curvature.dim() == 2 else curvature.diagonal(dim1=-2, dim2=-1)

    def shape_gradient(self, by_channel: Tensor) -> Tensor:
        """Values for all channels, and a lengthscale after them, as values for the belief."""
        if self.channels != "shared":
            return by_channel
        own = self._without_lengthscale(by_channel).sum(-1, keepdim=True)
        return own if self.correlation_time_sd is None else torch.cat([own, by_channel[..., -1:]], -1)

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        known = {
            "mean": Recordable(("dimension",), lambda ctx: self._without_lengthscale(ctx.state.mean)),
            "sd": Recordable(("dimension",), self._level_covariance, _sd),
            "covariance": Recordable(("dimension", "dimension_"), lambda ctx: as_matrix(self._level_covariance(ctx))),
        }
        if self.correlation_time_sd is not None:
            known["correlation_time"] = Recordable(("lengthscale",), self._lengthscale)
            sd = Recordable(("lengthscale",), lambda ctx: self.covariance(ctx)[:, -1:, -1].sqrt())
            known["log_correlation_time_sd"] = sd
        if self.channels == "full":
            dims = ("channel", "channel_")
            known["matrix"] = Recordable(dims, lambda ctx: self.prediction(ctx, ctx.below[0]).value.channel)
        return known

    def _level_covariance(self, ctx: Context) -> Tensor:
        """Covariance without that of a lengthscale, (B, n) or (B, n, n)."""
        known = self.covariance(ctx)
        return known if self.correlation_time_sd is None else known[:, :-1, :-1]

    def _learned_covariance(self, ctx: Context) -> Tensor:
        """The covariance (B, n, n); 0 before anything is learned, because a noise that is not learned is known."""
        covariance, learned = as_matrix(self.covariance(ctx)), ctx.state.accumulated.steps > 0
        return torch.where(learned[:, None, None], covariance, 0.0)

    def _without_lengthscale(self, values: Tensor) -> Tensor:
        return values if self.correlation_time_sd is None else values[..., :-1]

    def _lengthscale(self, ctx: Context) -> Tensor:
        """The learned lengthscale of the kernel, (B, 1)."""
        return ctx.state.mean[:, -1:].exp()


CHANNELS = {
    "each": "one log-precision per channel",
    "shared": "one log-precision for all channels",
    "full": "a full precision matrix of the channels",
}


def precision_score(precision: Precision, error: Tensor, weighted: Tensor) -> ScoreError:
    """The error of the parameters of a precision, from the energy E = ½ε̃ᵀΠ̃ε̃ − ½log|Π̃|."""
    slope = precision.gradient(error, weighted)
    if precision.learns_lengthscale:
        slope = torch.cat([slope, precision.lengthscale_gradient(error, weighted)], -1)
        return ScoreError(-slope, precision.joint_information)

    def remainder() -> Tensor:
        return precision.curvature(error, weighted) - precision.information()

    return ScoreError(-slope, precision.information, remainder)


def noise_score_error(
    levels: ScoreAndInformation, n_levels: int, lengthscale: ScoreAndInformation | None = None
) -> ScoreError:
    """A score of log-variances, and of a log-lengthscale, as an error of n_levels log-precisions and that lengthscale.

    Log-precisions without a score get zero.
    """
    missing = n_levels - levels.score.shape[1]
    gradient = torch.constant_pad_nd(-levels.score, (0, missing))
    information = torch.constant_pad_nd(levels.information, (0, missing, 0, missing))
    if lengthscale is None:
        return ScoreError(gradient, lambda: information)
    joint = torch.constant_pad_nd(information, (0, 1, 0, 1))
    joint[:, -1:, -1:] = lengthscale.information
    return ScoreError(torch.cat([gradient, lengthscale.score], -1), lambda: joint)


def _sd(covariance: Tensor) -> Tensor:
    """Standard deviations of variances (B, n) or a covariance (B, n, n)."""
    return covariance.sqrt() if covariance.dim() == 2 else standard_deviations(covariance)
