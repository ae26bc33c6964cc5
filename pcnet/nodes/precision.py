"""Precision nodes: the log-precisions and the smoothness of one error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.model.messages import Error, Prediction
from pcnet.model.node import INDEFINITE, BatchSpec, Energy, Indefinite, Link, Node, NodeContext, Recordable
from pcnet.numerics.coloured_noise import Noise
from pcnet.numerics.estimators import ParameterEstimator, RobbinsMonro
from pcnet.numerics.generalised import check_smoothness, temporal_precision
from pcnet.numerics.kalman import ScoreAndInformation
from pcnet.numerics.kernels import Autocorrelation, Kernel, Matern, SquaredExponential, lengthscale_of
from pcnet.numerics.laplace import covariance_of, laplace_posterior, standard_deviations
from pcnet.numerics.precision import CholeskyPrecision, Precision
from pcnet.settings import Positive, PositiveVector, Vector, at_least_1d, broadcast, number, settings


class PrecisionBelief(NamedTuple):
    """Mean (B, n), posterior precision with log|Σ| (B,), and the same of the prior.

    Log-precisions alone do not interact: their precision is a diagonal, (B, n). With couplings, or a mover that
    learns from curvatures, it is (B, n, n).
    """

    mean: Tensor
    precision: Tensor
    log_det_covariance: Tensor
    prior_mean: Tensor
    prior_precision: Tensor
    prior_log_det_covariance: Tensor


class PrecisionRule(NamedTuple):
    """How λ moves, S⁻¹ with its log-determinant for each number of orders that is weighed, and the kernel of both.

    levels: how many log-precisions there are.
    """

    mover: ParameterEstimator
    temporal: dict[int, tuple[Tensor, Tensor]]
    kernel: Kernel
    levels: int


@settings
class PrecisionNode(Node):
    """Log-precisions λ of an error: Π̃ = S⁻¹ ⊗ Π with Π = diag(e^λ), and S from the noise's autocorrelation.

    Local energy ½(λ − η)²/σ² for each channel; F grows by ½(ε̃ᵀΠ̃ε̃ − orders) along each λ.

    channels: one λ for "each" channel; one "shared" by all; or a "full" matrix Π = Tᵀ diag(e^λ) T with T one on its
    diagonal and zero above. λ_i is then the log-precision of channel i given those before it, and the belief is about λ
    and, after it and row by row, the couplings T_ij of channels j < i: meant for up to some tens of channels. Π itself
    can be recorded and read as "matrix".
    expected: the expected precision E[e^λ], so that η = log expected − sd²/2; or give `mean` = η itself.
    sd: prior standard deviation of λ. expected, mean, sd: one number, or (..., channels) with leading batch dimensions.
    coupling_sd: prior standard deviation of the couplings of a full matrix, around 0, for channels scaled by e^(η/2).
    smoothness: width of a squared-exponential autocorrelation in time units; or give any `kernel`.
    smoothness_sd: prior standard deviation of the log of that width (of either), which then is learned as well; it can
    be recorded and read as "smoothness". Without it the width stays as it is given. Errors of a `StateNode` that
    follows the observations are not the noise and mislead; of a `FilterNode` it is learned.
    curvature: of F; "gauss-newton" is the expected one, orders/2 along λ, "exact" is ½ε̃ᵀΠ̃ε̃ there.
    ridge: times the mean variance, added to the diagonal of S before it is inverted.
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
    estimator: ParameterEstimator = RobbinsMonro()
    curvature: Literal["gauss-newton", "exact"] = "gauss-newton"
    indefinite: Indefinite = "clamp"
    ridge: float = Field(default=0.0, ge=0.0)
    role: ClassVar[str] = "precision"

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if (self.prior_precision is None) == (self.mean is None):
            raise SettingError(f"{self.title}: give either expected (a precision) or mean (a log-precision)")
        if (self.correlation_time is None) == (self.kernel is None):
            raise SettingError(f"{self.title}: give either smoothness (a width in time units) or a kernel")
        if self.correlation_time_sd is not None:
            self._check_learned_width()
        try:
            _ = broadcast(self.prior_mean.shape, at_least_1d(self.sd).shape)
        except RuntimeError:
            raise SettingError(f"{self.title}: the shapes of sd and of expected or mean do not fit together") from None

    def _check_learned_width(self) -> None:
        if not isinstance(self.noise_kernel, (SquaredExponential, Matern, Autocorrelation)):
            raise SettingError(f"{self.title}: {self.noise_kernel!r} has no width that could be learned")
        if self.channels == "full" or self.curvature == "exact":
            raise SettingError(
                f"{self.title}: a width is not learned together with channels='full' or curvature='exact'; leave out "
                "these, or smoothness_sd"
            )

    @property
    def noise_kernel(self) -> Kernel:
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
        width = self.correlation_time
        kernel = f"smoothness {width.item():g}" if width is not None and width.numel() == 1 else repr(self.noise_kernel)
        return f"{CHANNELS[self.channels]}, {kernel}"

    def as_parent(self, link: Link) -> None:
        if link.kind != "weighs":
            Node.as_parent(self, link)
        shape = link.child.error_shape
        if shape is None:
            raise GraphError(f"{link.child.title} has no error of its own to weigh")
        given = broadcast(self.prior_mean.shape[-1:], at_least_1d(self.sd).shape[-1:])[0]
        allowed = {1} if self.channels == "shared" else {1, shape.dim}
        if given not in allowed:
            raise GraphError(
                f"{self.title} is given {given} channels but {link.child.name!r} has {shape.dim}; the last dimension "
                f"of expected, mean and sd must be {' or '.join(str(n) for n in sorted(allowed))} "
                "(for a batch of single values add one: expected[:, None])"
            )

    def check(self, above: tuple[Link, ...], below: tuple[Link, ...], like: Tensor) -> None:
        if not below:
            raise GraphError(f"{self.title} weighs nothing: add graph.weighs({self.name}, node)")
        dims = {link.child.error_shape.dim for link in below if link.child.error_shape is not None}
        if len(dims) > 1 and self.channels != "shared":
            raise GraphError(
                f"{self.title} weighs errors of {sorted(dims)} channels; use channels='shared' or separate nodes"
            )
        for shape, name in {(link.child.error_shape, link.child.name) for link in below}:
            assert shape is not None
            try:
                check_smoothness(self.noise_kernel, shape.rows, self.ridge)
            except SettingError as error:
                raise GraphError(f"{self.title} weighs {shape.rows} orders of {name!r}, but {error}") from None

    def check_batch(self, above: tuple[Link, ...]) -> None:
        self.estimator.check_batch(self.title)
        if self.correlation_time_sd is not None:
            raise GraphError(
                f"{self.title} learns a width, for which the free action of a pass is too jagged: leave out "
                "smoothness_sd, or run it online first to find the width"
            )

    def begin(self, local: NodeContext, start: BatchSpec) -> None:
        shape = local.below[0].child.error_shape
        assert shape is not None
        channels = 1 if self.channels == "shared" else shape.dim

        def fill(value: Tensor) -> Tensor:
            value = at_least_1d(value)
            return start.fill(value.expand(*value.shape[:-1], channels), 1)

        mean, sd = fill(self.prior_mean), fill(self.sd)
        if self.channels == "full":
            i, j = torch.tril_indices(channels, channels, -1, device=mean.device)
            units = (0.5 * (mean[:, j] - mean[:, i])).exp()
            mean = torch.cat([mean, torch.zeros_like(units)], -1)
            sd = torch.cat([sd, start.fill(self.coupling_sd, 0)[:, None] * units], -1)
        kernel = start.lay_out(self.noise_kernel)
        if self.correlation_time_sd is not None:
            log_width = lengthscale_of(kernel).log().expand(start.batch)
            mean = torch.cat([mean, log_width[:, None]], -1)
            sd = torch.cat([sd, start.fill(self.correlation_time_sd, 0)[:, None]], -1)
        precision, log_det = sd**-2, 2 * sd.log().sum(-1)
        if self._interacting:
            precision = precision.diag_embed()
        local.belief = PrecisionBelief(mean, precision, log_det, mean, precision, log_det)
        temporal = {}
        for rows in {link.child.error_shape.rows for link in local.below if link.child.error_shape is not None}:
            matrix = start.fill(temporal_precision(self.noise_kernel, rows, self.ridge), 2)
            temporal[rows] = matrix, torch.linalg.slogdet(matrix)[1]
        local.rule = PrecisionRule(start.lay_out(self.estimator), temporal, kernel, channels)
        local.memory = local.rule.mover.init(mean, precision)

    def initialise(self, local: NodeContext) -> None:
        """Begin to learn from where the mover does; a width begins where it is expected."""
        belief, rule = local.belief, local.rule
        levels = slice(rule.levels)
        mean = belief.mean.clone()
        mean[:, levels] = rule.mover.initial_mean(mean, standard_deviations(self._uncertainty(local)))[:, levels]
        local.belief = belief._replace(mean=mean, prior_mean=mean)

    def warm_start(self, local: NodeContext, belief: PrecisionBelief) -> None:
        """Gather anew, beginning with the pull of the prior; what earlier passes have said of the same is not added."""
        local.belief = belief
        pull = _times(belief.prior_precision, belief.mean - belief.prior_mean)
        local.memory = local.rule.mover.warm_start(local.memory, pull)

    def prediction(self, local: NodeContext, link: Link) -> Prediction[Precision]:
        shape = link.child.error_shape
        assert shape is not None
        rule: PrecisionRule = local.rule
        (temporal, log_det), kernel = rule.temporal[shape.rows], rule.kernel
        mean = local.belief.mean[:, : rule.levels].expand(-1, shape.dim)
        learned = self.correlation_time_sd is not None
        if learned:
            width = self._width(local)[:, 0]
            order = torch.arange(shape.rows).to(width)
            scale = (width / lengthscale_of(kernel))[:, None] ** order
            temporal = scale[..., None] * temporal * scale[:, None]
            log_det, kernel = log_det + 2 * scale.log().sum(-1), kernel.with_lengthscale(width)
        total = shape.rows * mean.sum(-1) + shape.dim * log_det
        if self.channels != "full":
            noise = Noise((-mean).exp(), kernel, rule.levels, learned)
            uncertainty = partial(self._uncertainty, local)
            precision = Precision(temporal, mean.exp(), total, learns_lengthscale=learned)
            return Prediction(precision, covariance=uncertainty, noise=noise, kernel=kernel)
        factor = torch.eye(shape.dim).to(mean).repeat(len(mean), 1, 1)
        i, j = torch.tril_indices(shape.dim, shape.dim, -1, device=mean.device)
        factor[:, i, j] = local.belief.mean[:, shape.dim :]
        return Prediction(CholeskyPrecision(temporal, mean, factor, total), kernel=kernel)

    def update(self, local: NodeContext) -> None:
        change, local.memory = local.rule.mover.step(local.memory)
        mean: Tensor = local.belief.mean + change
        size = mean[:, : local.rule.levels].abs()
        beyond = size > math.log(torch.finfo(mean.dtype).max)
        if bool(beyond.any()):
            local.fail(
                beyond.any(-1),
                f"a log-precision reached {float(size.max()):.3g}, so that its precision is 0 or "
                "infinite; the error it weighs has run away: smaller steps (lower kappa or rate) help",
            )
        local.belief = local.belief._replace(mean=mean)

    def accumulate(self, local: NodeContext) -> None:
        mover, belief = local.rule.mover, local.belief
        if mover.needs_curvature:
            gradient = self._less_errors(local, torch.zeros_like(belief.mean))
            curvature = self._with_evidence(local, torch.zeros_like(belief.precision))
            local.memory = mover.accumulate(local.memory, gradient, curvature)
        else:
            local.memory = mover.accumulate(local.memory, self.gradient(local))

    def gradient(self, local: NodeContext) -> Tensor:
        belief = local.belief
        return self._less_errors(local, _times(belief.prior_precision, belief.mean - belief.prior_mean))

    def _less_errors(self, local: NodeContext, gradient: Tensor) -> Tensor:
        """A gradient (B, n) with that of the errors below."""
        for link in local.below:
            gradient = gradient - self._pull(local.error(link).weighted)
        return gradient

    def hessian(self, local: NodeContext) -> Tensor:
        return _matrix(self._curvature(local))

    def update_covariance(self, local: NodeContext) -> None:
        learned = local.rule.mover.needs_curvature
        curvature = local.memory.precision if learned else self._curvature(local)
        if not self._interacting:
            log_det = -curvature.log().sum(-1)
            local.belief = local.belief._replace(precision=curvature, log_det_covariance=log_det)
            return
        found = laplace_posterior(curvature)
        if found.regularised is not None:
            if self.indefinite == "raise":
                local.fail(found.regularised, INDEFINITE)
            local.memory = local.memory._replace(regularised=local.memory.regularised + found.regularised)
        local.belief = local.belief._replace(precision=found.precision, log_det_covariance=found.log_det_covariance)

    def _curvature(self, local: NodeContext) -> Tensor:
        """(B, n) along each log-precision, which do not interact; (B, n, n) with couplings."""
        return self._with_evidence(local, local.belief.prior_precision)

    def _with_evidence(self, local: NodeContext, curvature: Tensor) -> Tensor:
        """A curvature with that of the errors below."""
        for link in local.below:
            error = local.error(link)
            curvature = curvature + self._shaped(self._pulled(error.precision))
            if self.curvature == "exact" and error.remainder is not None:
                curvature = curvature + self._shaped(self._pulled(error.remainder))
        return curvature

    def _shaped(self, curvature: Tensor) -> Tensor:
        """A curvature (B, n) or (B, n, n) in the form that this node keeps its precisions in."""
        if self._interacting:
            return _matrix(curvature)
        return curvature if curvature.dim() == 2 else curvature.diagonal(dim1=-2, dim2=-1)

    @property
    def _interacting(self) -> bool:
        """Whether precisions are matrices: for couplings and widths, and for rules that learn from curvatures."""
        return self.channels == "full" or self.estimator.needs_curvature or self.correlation_time_sd is not None

    def renew_prior(self, local: NodeContext) -> None:
        local.memory = local.rule.mover.forget(local.memory)
        belief = local.belief
        local.belief = belief._replace(
            prior_mean=belief.mean,
            prior_precision=belief.precision,
            prior_log_det_covariance=belief.log_det_covariance,
        )

    def energy(self, local: NodeContext) -> Energy:
        belief: PrecisionBelief = local.belief

        def compute() -> Energy:
            moved = belief.mean - belief.prior_mean
            fit = (moved * _times(belief.prior_precision, moved)).sum(-1)
            return Energy(complexity=0.5 * (fit + belief.prior_log_det_covariance - belief.log_det_covariance))

        return local.once("energy", compute, belief)

    def fallbacks(self, local: NodeContext) -> Tensor | None:
        regularised: Tensor = local.memory.regularised
        return regularised if self._interacting else None

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        known = {
            "mean": Recordable(("dimension",), lambda local: self._but_width(local.belief.mean)),
            "sd": Recordable(
                ("dimension",), self._covariance_but_width, standard_deviations if self._interacting else torch.sqrt
            ),
            "covariance": Recordable(
                ("dimension", "dimension_"), lambda local: _matrix(self._covariance_but_width(local))
            ),
        }
        if self.correlation_time_sd is not None:
            known["smoothness"] = Recordable(("width",), self._width)
            known["log_smoothness_sd"] = Recordable(
                ("width",), lambda local: self._covariance(local)[:, -1:, -1].sqrt()
            )
        if self.channels == "full":
            matrix = Recordable(
                ("channel", "channel_"), lambda local: self.prediction(local, local.below[0]).value.channel
            )
            known["matrix"] = matrix
        return known

    def _covariance(self, local: NodeContext) -> Tensor:
        precision: Tensor = local.belief.precision
        invert = covariance_of if self._interacting else torch.reciprocal
        return local.once("covariance", lambda: invert(precision), precision)

    def _uncertainty(self, local: NodeContext) -> Tensor:
        return _matrix(self._covariance(local))

    def _covariance_but_width(self, local: NodeContext) -> Tensor:
        known = self._covariance(local)
        return known if self.correlation_time_sd is None else known[:, :-1, :-1]

    def _but_width(self, values: Tensor) -> Tensor:
        """What is said of log-precisions and couplings alone."""
        return values if self.correlation_time_sd is None else values[..., :-1]

    def _width(self, local: NodeContext) -> Tensor:
        """The width of the kernel, where it is learned; (B, 1)."""
        log_width: Tensor = local.belief.mean[:, -1:]
        return log_width.exp()

    def _pull(self, by_channel: Tensor) -> Tensor:
        """What errors say of all channels, and of a width after them, as what they say of the belief."""
        if self.channels != "shared":
            return by_channel
        own = self._but_width(by_channel).sum(-1, keepdim=True)
        return own if self.correlation_time_sd is None else torch.cat([own, by_channel[..., -1:]], -1)

    def _pulled(self, curvature: Tensor) -> Tensor:
        """The same of a curvature, which may be a diagonal."""
        return self._pull(curvature) if curvature.dim() == 2 else self._pull(self._pull(curvature).mT).mT


CHANNELS = {
    "each": "a log-precision a channel",
    "shared": "one log-precision for all channels",
    "full": "a full precision matrix of the channels",
}


def precision_error(precision: Precision, error: Tensor, weighted: Tensor) -> Error[Tensor]:
    """What an error says of the parameters of its precision through the energy E = ½ε̃ᵀΠ̃ε̃ − ½log|Π̃|."""
    slope = precision.gradient(error, weighted)
    if precision.learns_lengthscale:
        slope = torch.cat([slope, precision.lengthscale_gradient(error, weighted)], -1)
        return Error(-slope, precision.joint_information)

    def remainder() -> Tensor:
        return precision.curvature(error, weighted) - precision.information()

    return Error(-slope, precision.information, remainder)


def noise_error(
    of_levels: ScoreAndInformation, noise: Noise | None, with_lengthscale: ScoreAndInformation | None = None
) -> Error[Tensor]:
    """What is said of log-variances, and of a log-width, as an error of log-precisions and of that width after them.

    Where nothing is said of levels that a noise has, that is zero.
    """
    unsaid = 0 if noise is None else noise.levels - of_levels.gradient.shape[1]
    gradient = torch.constant_pad_nd(-of_levels.gradient, (0, unsaid))
    information = torch.constant_pad_nd(of_levels.information, (0, unsaid, 0, unsaid))
    if with_lengthscale is None:
        return Error(gradient, information)
    joint = torch.constant_pad_nd(information, (0, 1, 0, 1))
    joint[:, -1:, -1:] = with_lengthscale.information
    return Error(torch.cat([gradient, with_lengthscale.gradient], -1), joint)


def _times(precision: Tensor, vector: Tensor) -> Tensor:
    """A diagonal (B, n) or matrix (B, n, n) times a vector (B, n)."""
    return precision * vector if precision.dim() == 2 else torch.bmm(precision, vector[..., None])[..., 0]


def _matrix(precision: Tensor) -> Tensor:
    """A diagonal (B, n) or matrix (B, n, n) as a matrix."""
    return precision.diag_embed() if precision.dim() == 2 else precision
