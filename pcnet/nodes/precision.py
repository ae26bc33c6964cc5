"""Precision nodes: the log-precisions and the smoothness of one error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.generalised import check_smoothness, temporal_precision
from pcnet.kernels import Kernel, SquaredExponential
from pcnet.linalg import Precision, quadratic
from pcnet.messages import Error, Prediction
from pcnet.movers import Gathered, RobbinsMonro
from pcnet.node import Energy, Link, Local, Node, Quantity, Start
from pcnet.settings import Positive, PositiveVector, Vector, broadcast, listed, settings


class PrecisionBelief(NamedTuple):
    """Log-precisions: mean and variance, and the same of their prior; (B, channels) each."""

    mean: Tensor
    variance: Tensor
    prior_mean: Tensor
    prior_variance: Tensor


class PrecisionRule(NamedTuple):
    """How λ moves, and S⁻¹ with its log-determinant for each number of orders that is weighed."""

    mover: RobbinsMonro
    temporal: dict[int, tuple[Tensor, Tensor]]


@settings
class PrecisionNode(Node):
    """Log-precisions λ of an error: Π̃ = S⁻¹ ⊗ diag(e^λ), with S from the noise's autocorrelation.

    Local energy ½(λ − η)²/σ² for each channel; F grows by ½(ε̃ᵀΠ̃ε̃ − orders) along each λ.

    expected: the expected precision E[e^λ], so that η = log expected − sd²/2; or give `mean` = η itself.
    sd: prior standard deviation of λ. expected, mean, sd: one number, or (..., channels) with leading batch dimensions.
    smoothness: width of a squared-exponential autocorrelation in time units; or give any `kernel`.
    shared: one λ for all channels instead of one for each.
    curvature: of F in λ; "gauss-newton" is the expected one, orders/2, "exact" is ½ε̃ᵀΠ̃ε̃.
    ridge: times the mean variance, added to the diagonal of S before it is inverted.
    """

    _: KW_ONLY
    expected: PositiveVector | None = None
    mean: Vector | None = None
    sd: PositiveVector
    smoothness: Positive | None = None
    kernel: Kernel | None = None
    shared: bool = False
    mover: RobbinsMonro = RobbinsMonro()
    curvature: Literal["gauss-newton", "exact"] = "gauss-newton"
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
        return f"{'one log-precision for all channels' if self.shared else 'a log-precision a channel'}, {kernel}"

    def as_parent(self, link: Link) -> None:
        if link.kind != "weighs":
            Node.as_parent(self, link)
        shape = link.child.error_shape
        if shape is None:
            raise GraphError(f"{link.child.title} has no error of its own to weigh")
        given = broadcast(self.prior_mean.shape[-1:], listed(self.sd).shape[-1:])[0]
        allowed = {1} if self.shared else {1, shape.dim}
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
        if len(dims) > 1 and not self.shared:
            raise GraphError(
                f"{self.title} weighs errors of {sorted(dims)} channels; use shared=True or separate nodes"
            )
        for shape, name in {(link.child.error_shape, link.child.name) for link in below}:
            assert shape is not None
            try:
                check_smoothness(self.noise_kernel, shape.rows, self.ridge)
            except SettingError as error:
                raise GraphError(f"{self.title} weighs {shape.rows} orders of {name!r}, but {error}") from None

    def begin(self, local: Local, start: Start) -> None:
        shape = local.below[0].child.error_shape
        assert shape is not None
        channels = 1 if self.shared else shape.dim

        def fill(value: Tensor) -> Tensor:
            value = listed(value)
            return start.fill(value.expand(*value.shape[:-1], channels), 1)

        mean, variance = fill(self.prior_mean), fill(self.sd) ** 2
        local.belief = PrecisionBelief(mean, variance, mean, variance)
        local.memory = Gathered.nothing(mean)
        temporal = {}
        for rows in {link.child.error_shape.rows for link in local.below if link.child.error_shape is not None}:
            matrix = start.fill(temporal_precision(self.noise_kernel, rows, self.ridge), 2)
            temporal[rows] = matrix, torch.linalg.slogdet(matrix)[1]
        local.rule = PrecisionRule(start.lay_out(self.mover), temporal)

    def predict(self, local: Local, link: Link) -> Prediction[Precision]:
        shape = link.child.error_shape
        assert shape is not None
        temporal, log_det = local.rule.temporal[shape.rows]
        mean = local.belief.mean.expand(-1, shape.dim)
        total = shape.rows * mean.sum(-1) + shape.dim * log_det
        return Prediction(Precision(temporal, mean.exp(), total))

    def move(self, local: Local) -> None:
        change, emptied = local.rule.mover.step(local.memory)
        local.memory = emptied
        mean: Tensor = local.belief.mean + change
        beyond = mean.abs() > math.log(torch.finfo(mean.dtype).max)
        if bool(beyond.any()):
            local.fail(
                beyond.any(-1),
                f"a log-precision reached {float(mean[beyond].abs().max()):.3g}, so that its precision is 0 or "
                "infinite; the error it weighs has run away: smaller steps (lower kappa or rate) help",
            )
        local.belief = local.belief._replace(mean=mean)

    def gather(self, local: Local) -> None:
        local.memory = local.rule.mover.gather(local.memory, self.gradient(local))

    def gradient(self, local: Local) -> Tensor:
        belief = local.belief
        gradient: Tensor = (belief.mean - belief.prior_mean) / belief.prior_variance
        for link in local.below:
            gradient = gradient - self._pull(local.error(link).weighted)
        return gradient

    def hessian(self, local: Local) -> Tensor:
        return self._curvature(local).diag_embed()

    def settle(self, local: Local) -> None:
        local.belief = local.belief._replace(variance=1 / self._curvature(local))

    def _curvature(self, local: Local) -> Tensor:
        """The curvature along each log-precision, (B, channels): they do not interact."""
        curvature: Tensor = 1 / local.belief.prior_variance
        for link in local.below:
            error = local.error(link)
            curvature = curvature + self._pull(error.precision)
            if self.curvature == "exact" and error.remainder is not None:
                curvature = curvature + self._pull(error.remainder)
        return curvature

    def carry(self, local: Local) -> None:
        belief = local.belief
        local.belief = belief._replace(prior_mean=belief.mean, prior_variance=belief.variance)

    def energy(self, local: Local) -> Energy:
        belief: PrecisionBelief = local.belief

        def compute() -> Energy:
            moved = (belief.mean - belief.prior_mean) ** 2 / belief.prior_variance
            complexity = 0.5 * (moved + belief.prior_variance.log() - belief.variance.log()).sum(-1)
            return Energy(complexity=complexity)

        return local.once("energy", compute, belief)

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        return {
            "mean": Quantity(("dimension",), lambda local: local.belief.mean),
            "sd": Quantity(("dimension",), lambda local: local.belief.variance.sqrt()),
            "covariance": Quantity(("dimension", "dimension_"), lambda local: local.belief.variance.diag_embed()),
        }

    def _pull(self, by_channel: Tensor) -> Tensor:
        return by_channel.sum(-1, keepdim=True) if self.shared else by_channel


def precision_error(weighted: Tensor, error: Tensor) -> Error[Tensor]:
    """What an error says of its own log-precisions, by channel: E = ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| has ∂E/∂λ = ½(ξ·ε − orders)."""
    rows = error.shape[1]
    excess = 0.5 * (quadratic(weighted, error) - rows)
    return Error(-excess, lambda: torch.full_like(excess, 0.5 * rows), excess)
