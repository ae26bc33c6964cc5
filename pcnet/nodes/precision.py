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
from pcnet.generalised import check_smoothness, temporal_precision
from pcnet.kernels import Kernel, SquaredExponential
from pcnet.linalg import CoupledPrecision, Precision, covariance_of, deviations, posterior
from pcnet.messages import Error, Prediction
from pcnet.movers import ParameterMover, RobbinsMonro
from pcnet.node import INDEFINITE, Energy, Indefinite, Link, Local, Node, Quantity, Start
from pcnet.noises import Noise
from pcnet.settings import Positive, PositiveVector, Vector, broadcast, listed, number, settings


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
    """How λ moves, S⁻¹ with its log-determinant for each number of orders that is weighed, and the kernel of both."""

    mover: ParameterMover
    temporal: dict[int, tuple[Tensor, Tensor]]
    kernel: Kernel


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
    curvature: of F; "gauss-newton" is the expected one, orders/2 along λ, "exact" is ½ε̃ᵀΠ̃ε̃ there.
    ridge: times the mean variance, added to the diagonal of S before it is inverted.
    """

    _: KW_ONLY
    expected: PositiveVector | None = None
    mean: Vector | None = None
    sd: PositiveVector
    smoothness: Positive | None = None
    kernel: Kernel | None = None
    channels: Literal["each", "shared", "full"] = "each"
    coupling_sd: Positive = number(1.0)
    mover: ParameterMover = RobbinsMonro()
    curvature: Literal["gauss-newton", "exact"] = "gauss-newton"
    indefinite: Indefinite = "clamp"
    ridge: float = Field(default=0.0, ge=0.0)
    role: ClassVar[str] = "precision"

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if (self.expected is None) == (self.mean is None):
            raise SettingError(f"{self.title}: give either expected (a precision) or mean (a log-precision)")
        if (self.smoothness is None) == (self.kernel is None):
            raise SettingError(f"{self.title}: give either smoothness (a width in time units) or a kernel")
        try:
            _ = broadcast(self.prior_mean.shape, listed(self.sd).shape)
        except RuntimeError:
            raise SettingError(f"{self.title}: the shapes of sd and of expected or mean do not fit together") from None

    @property
    def noise_kernel(self) -> Kernel:
        if self.kernel is not None:
            return self.kernel
        assert self.smoothness is not None
        return SquaredExponential(self.smoothness)

    @property
    def prior_mean(self) -> Tensor:
        """η, (..., channels or 1)."""
        if self.mean is not None:
            return listed(self.mean)
        assert self.expected is not None
        return listed(self.expected.log() - self.sd**2 / 2)

    def describe(self) -> str:
        width = self.smoothness
        kernel = f"smoothness {width.item():g}" if width is not None and width.numel() == 1 else repr(self.noise_kernel)
        return f"{CHANNELS[self.channels]}, {kernel}"

    def as_parent(self, link: Link) -> None:
        if link.kind != "weighs":
            Node.as_parent(self, link)
        shape = link.child.error_shape
        if shape is None:
            raise GraphError(f"{link.child.title} has no error of its own to weigh")
        given = broadcast(self.prior_mean.shape[-1:], listed(self.sd).shape[-1:])[0]
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

    def check_passes(self, above: tuple[Link, ...]) -> None:
        self.mover.check_passes(self.title)

    def begin(self, local: Local, start: Start) -> None:
        shape = local.below[0].child.error_shape
        assert shape is not None
        channels = 1 if self.channels == "shared" else shape.dim

        def fill(value: Tensor) -> Tensor:
            value = listed(value)
            return start.fill(value.expand(*value.shape[:-1], channels), 1)

        mean, sd = fill(self.prior_mean), fill(self.sd)
        if self.channels == "full":
            i, j = torch.tril_indices(channels, channels, -1, device=mean.device)
            units = (0.5 * (mean[:, j] - mean[:, i])).exp()
            mean = torch.cat([mean, torch.zeros_like(units)], -1)
            sd = torch.cat([sd, start.fill(self.coupling_sd, 0)[:, None] * units], -1)
        precision, log_det = sd**-2, 2 * sd.log().sum(-1)
        if self._interacting:
            precision = precision.diag_embed()
        local.belief = PrecisionBelief(mean, precision, log_det, mean, precision, log_det)
        temporal = {}
        for rows in {link.child.error_shape.rows for link in local.below if link.child.error_shape is not None}:
            matrix = start.fill(temporal_precision(self.noise_kernel, rows, self.ridge), 2)
            temporal[rows] = matrix, torch.linalg.slogdet(matrix)[1]
        local.rule = PrecisionRule(start.lay_out(self.mover), temporal, start.lay_out(self.noise_kernel))
        local.memory = local.rule.mover.begin(mean, precision)

    def begin_again(self, local: Local, belief: PrecisionBelief) -> None:
        """Gather anew, beginning with the pull of the prior; what earlier passes have said of the same is not added."""
        local.belief = belief
        pull = _times(belief.prior_precision, belief.mean - belief.prior_mean)
        local.memory = local.memory._replace(gradient=pull)

    def predict(self, local: Local, link: Link) -> Prediction[Precision]:
        shape = link.child.error_shape
        assert shape is not None
        temporal, log_det = local.rule.temporal[shape.rows]
        mean = local.belief.mean[:, : shape.dim].expand(-1, shape.dim)
        total = shape.rows * mean.sum(-1) + shape.dim * log_det
        if self.channels != "full":
            noise = Noise((-mean).exp(), local.rule.kernel, local.belief.mean.shape[1])
            uncertainty = partial(self._uncertainty, local)
            return Prediction(Precision(temporal, mean.exp(), total), covariance=uncertainty, noise=noise)
        factor = torch.eye(shape.dim).to(mean).repeat(len(mean), 1, 1)
        i, j = torch.tril_indices(shape.dim, shape.dim, -1, device=mean.device)
        factor[:, i, j] = local.belief.mean[:, shape.dim :]
        return Prediction(CoupledPrecision(temporal, mean, factor, total))

    def move(self, local: Local) -> None:
        change, local.memory = local.rule.mover.step(local.memory)
        mean: Tensor = local.belief.mean + change
        shape = local.below[0].child.error_shape
        assert shape is not None
        size = mean[:, : shape.dim].abs()  # log-precisions come first, couplings after them
        beyond = size > math.log(torch.finfo(mean.dtype).max)
        if bool(beyond.any()):
            local.fail(
                beyond.any(-1),
                f"a log-precision reached {float(size.max()):.3g}, so that its precision is 0 or "
                "infinite; the error it weighs has run away: smaller steps (lower kappa or rate) help",
            )
        local.belief = local.belief._replace(mean=mean)

    def gather(self, local: Local) -> None:
        mover, belief = local.rule.mover, local.belief
        if mover.needs_curvature:
            gradient = self._less_errors(local, torch.zeros_like(belief.mean))
            curvature = self._with_evidence(local, torch.zeros_like(belief.precision))
            local.memory = mover.gather(local.memory, gradient, curvature)
        else:
            local.memory = mover.gather(local.memory, self.gradient(local))

    def gradient(self, local: Local) -> Tensor:
        belief = local.belief
        return self._less_errors(local, _times(belief.prior_precision, belief.mean - belief.prior_mean))

    def _less_errors(self, local: Local, gradient: Tensor) -> Tensor:
        """A gradient (B, n) with that of the errors below."""
        for link in local.below:
            gradient = gradient - self._pull(local.error(link).weighted)
        return gradient

    def hessian(self, local: Local) -> Tensor:
        return _matrix(self._curvature(local))

    def settle(self, local: Local) -> None:
        learned = local.rule.mover.needs_curvature
        curvature = local.memory.known if learned else self._curvature(local)
        if not self._interacting:
            log_det = -curvature.log().sum(-1)
            local.belief = local.belief._replace(precision=curvature, log_det_covariance=log_det)
            return
        found = posterior(curvature)
        if found.mended is not None:
            if self.indefinite == "raise":
                local.fail(found.mended, INDEFINITE)
            local.memory = local.memory._replace(mended=local.memory.mended + found.mended)
        local.belief = local.belief._replace(precision=found.precision, log_det_covariance=found.log_det_covariance)

    def _curvature(self, local: Local) -> Tensor:
        """(B, n) along each log-precision, which do not interact; (B, n, n) with couplings."""
        return self._with_evidence(local, local.belief.prior_precision)

    def _with_evidence(self, local: Local, curvature: Tensor) -> Tensor:
        """A curvature with that of the errors below."""
        for link in local.below:
            error = local.error(link)
            curvature = curvature + self._shaped(self._pull(error.precision))
            if self.curvature == "exact" and error.remainder is not None:
                curvature = curvature + self._shaped(self._pull(error.remainder))
        return curvature

    def _shaped(self, curvature: Tensor) -> Tensor:
        """A curvature (B, n) or (B, n, n) in the form that this node keeps its precisions in."""
        if self._interacting:
            return _matrix(curvature)
        return curvature if curvature.dim() == 2 else curvature.diagonal(dim1=-2, dim2=-1)

    @property
    def _interacting(self) -> bool:
        """Whether precisions are matrices: for couplings, and for rules that learn from curvatures."""
        return self.channels == "full" or self.mover.needs_curvature

    def carry(self, local: Local) -> None:
        local.memory = local.rule.mover.forget(local.memory)
        belief = local.belief
        local.belief = belief._replace(
            prior_mean=belief.mean,
            prior_precision=belief.precision,
            prior_log_det_covariance=belief.log_det_covariance,
        )

    def energy(self, local: Local) -> Energy:
        belief: PrecisionBelief = local.belief

        def compute() -> Energy:
            moved = belief.mean - belief.prior_mean
            fit = (moved * _times(belief.prior_precision, moved)).sum(-1)
            return Energy(complexity=0.5 * (fit + belief.prior_log_det_covariance - belief.log_det_covariance))

        return local.once("energy", compute, belief)

    def fallbacks(self, local: Local) -> Tensor | None:
        mended: Tensor = local.memory.mended
        return mended if self._interacting else None

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        known = {
            "mean": Quantity(("dimension",), lambda local: local.belief.mean),
            "sd": Quantity(("dimension",), self._covariance, deviations if self._interacting else torch.sqrt),
            "covariance": Quantity(("dimension", "dimension_"), self._uncertainty),
        }
        if self.channels == "full":
            matrix = Quantity(("channel", "channel_"), lambda local: self.predict(local, local.below[0]).value.channel)
            known["matrix"] = matrix
        return known

    def _covariance(self, local: Local) -> Tensor:
        precision: Tensor = local.belief.precision
        invert = covariance_of if self._interacting else torch.reciprocal
        return local.once("covariance", lambda: invert(precision), precision)

    def _uncertainty(self, local: Local) -> Tensor:
        return _matrix(self._covariance(local))

    def _pull(self, by_channel: Tensor) -> Tensor:
        return by_channel.sum(-1, keepdim=True) if self.channels == "shared" else by_channel


CHANNELS = {
    "each": "a log-precision a channel",
    "shared": "one log-precision for all channels",
    "full": "a full precision matrix of the channels",
}


def precision_error(precision: Precision, error: Tensor, weighted: Tensor) -> Error[Tensor]:
    """What an error says of the parameters of its precision through the energy E = ½ε̃ᵀΠ̃ε̃ − ½log|Π̃|."""

    def remainder() -> Tensor:
        return precision.curvature(error, weighted) - precision.information()

    return Error(-precision.slope(error, weighted), precision.information, remainder)


def _times(precision: Tensor, vector: Tensor) -> Tensor:
    """A diagonal (B, n) or matrix (B, n, n) times a vector (B, n)."""
    return precision * vector if precision.dim() == 2 else torch.bmm(precision, vector[..., None])[..., 0]


def _matrix(precision: Tensor) -> Tensor:
    """A diagonal (B, n) or matrix (B, n, n) as a matrix."""
    return precision.diag_embed() if precision.dim() == 2 else precision
