"""Hidden causes of Kalman states, and levels above them: variables that are part of a state's belief."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field, SkipValidation
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.functions.base import Function
from pcnet.functions.check import check_function
from pcnet.functions.closed_form import Linear
from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import AnyLink, Drives, Parametrises, Weighs
from pcnet.model.messages import ClusterPosterior, RelayedPrediction
from pcnet.model.node import BatchSpec, Energy, ErrorShape, Node, Recordable
from pcnet.nodes.flow import checked_flow
from pcnet.numerics.estimators import Newton, NoiseScoring, ParameterEstimator
from pcnet.numerics.laplace import standard_deviations
from pcnet.settings import Positive, PositiveVector, Vector, at_least_1d, check_size, number, settings


class CauseState(NamedTuple):
    """The last mean that is known, for display."""

    mean: Tensor  # (B, dim)


Context = NodeContext[Any, Any]


@settings
class KalmanCauseNode(Node[CauseState, Tensor]):
    """A hidden cause v of a Kalman state, or a level above it, with a belief that is carried.

    v̇ = h(v, u, θ) + noise, and v is an argument of the flow f(x, v, θ) of the state that it drives, and of its mappings
    g(x, v, θ). State and causes have one joint belief, which the state holds; each owns a block of it. For linear
    functions it is the Kalman filter of all levels together. A cause may be driven by inputs and by other causes, which
    are then the levels above it. Integration and linearisation are those of the state.

    Args:
        dim: Dimension.
        flow: h, a function of (v, parameters) or (v, causes, parameters); the relaxation −v/correlation_time unless
            given.
        correlation_time: How long a cause without a flow lasts, in time units: an Ornstein–Uhlenbeck process.
        initial_mean: Value at the first observation, (..., dim); 0 unless given.
        initial_sd: Its standard deviation, one number or (..., dim).
        learn_noise: Whether precision nodes receive scores.
    """

    _: KW_ONLY
    dim: int = Field(ge=1)
    flow: SkipValidation[Any] = None
    correlation_time: Positive | None = None
    initial_mean: Vector | None = None
    initial_sd: PositiveVector = number(1.0)
    learn_noise: bool = True
    role: ClassVar[str] = "state"
    kind: ClassVar[str] = "cause"
    parent_of: ClassVar[tuple[type[AnyLink], ...]] = (Drives,)
    child_of: ClassVar[tuple[type[AnyLink], ...]] = (Drives, Parametrises, Weighs)
    sends_covariance: ClassVar[bool] = True
    joins_parameters: ClassVar[bool] = True
    joins_child: ClassVar[bool] = True
    joins_causes: ClassVar[bool] = True
    multiple_noises: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if (self.flow is None) == (self.correlation_time is None):
            raise SettingError(f"{self.title}: give either flow or correlation_time (in time units)")
        if self.flow is not None:
            object.__setattr__(self, "flow", checked_flow(self, self.flow, self.dim))
        elif self.correlation_time is not None and self.correlation_time.numel() != 1:
            raise SettingError(f"{self.title}: correlation_time is one number; give a flow for a batch of them")
        if self.initial_mean is not None and at_least_1d(self.initial_mean).shape[-1] != self.dim:
            raise SettingError(f"{self.title}: initial_mean must end in {self.dim}")
        check_size(self.title, "initial_sd", self.initial_sd, self.dim)

    @cached_property
    def dynamics(self) -> Function:
        """h."""
        if self.flow is not None:
            return self.flow  # type: ignore[no-any-return]
        assert self.correlation_time is not None
        return Linear(-torch.eye(self.dim, dtype=torch.float64) / self.correlation_time)

    @property
    def error_shape(self) -> ErrorShape:
        return ErrorShape(1, self.dim)

    def describe(self) -> str:
        return f"dim {self.dim}, flow {self.dynamics!r}"

    def check_as_parent(self, link: AnyLink) -> None:
        super().check_as_parent(link)
        if not link.child.joins_causes:
            several = "make the cause a further element of that state, with a flow of its own"
            instead = several if link.child.sends_covariance else "drive it by a CauseNode"
            raise GraphError(
                f"{self.title} drives states with one Gaussian belief, or other causes of them, not "
                f"{link.child.title}; {instead}"
            )

    def check_as_child(self, link: AnyLink) -> None:
        super().check_as_child(link)
        if isinstance(link, Drives) and not (link.parent.is_input or link.parent.joins_child):
            raise GraphError(f"{self.title} can be driven by InputNodes and KalmanCauseNodes, not {link.parent.name!r}")

    def check(self, links: Neighbours, like: Tensor) -> None:
        if len(links.below) != 1:
            raise GraphError(f"{self.title} must drive one node: graph.drives({self.name}, state)")
        if not links.above_of(Weighs):
            raise GraphError(f"{self.title} has no precision: add graph.weighs(PrecisionNode(...), {self.name})")
        width = sum(link.parent.shape.dim for link in links.above_of(Drives))
        taken = self.dynamics.takes_causes or self.dynamics.takes_time
        if width and not taken:
            raise GraphError(f"{self.title} is driven, but its flow takes no causes; give a function of (v, u, theta)")
        n_parameters = sum(link.parent.n_parameters for link in links.above_of(Parametrises))
        size = self.dim + (width if taken else 0) + self.dynamics.takes_time
        check_function(f"the flow of {self.title}", self.dynamics, size, n_parameters, self.dim, like)

    def depends_on_time(self, links: Neighbours) -> bool:
        return bool(self.dynamics.takes_time)

    def default_estimator(self, link: AnyLink, above: tuple[AnyLink, ...]) -> ParameterEstimator | None:
        if isinstance(link, Parametrises):
            return Newton()
        return NoiseScoring() if self.learn_noise else None

    def bind(self, links: Neighbours, spec: BatchSpec) -> Tensor:
        return spec.zeros(self.dim) if self.initial_mean is None else spec.expand(self.initial_mean, 1)

    def init(self, bound: Tensor, spec: BatchSpec) -> CauseState:
        return CauseState(bound)

    def prediction(self, ctx: Context, link: AnyLink) -> RelayedPrediction:
        return RelayedPrediction(
            ctx.state.mean[:, None], {each: ctx.message(each) for each in (*ctx.above, *ctx.links.relayed)}
        )

    def error(self, ctx: Context, link: AnyLink) -> Any:
        return self._posterior(ctx).errors[link]

    def _posterior(self, ctx: Context) -> ClusterPosterior:
        found = ctx.error(ctx.below[0])
        assert isinstance(found, ClusterPosterior)
        return found

    def update(self, ctx: Context) -> CauseState:
        return CauseState(self._posterior(ctx).mean)

    def energy(self, ctx: Context) -> Energy:
        """None of its own: the energies of the nodes below are predictive log-likelihoods."""
        return Energy()

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape, errors = ("order", "dimension"), ("error_order", "dimension")

        def covariance(ctx: Context) -> Tensor:
            return self._posterior(ctx).covariance

        return {
            "mean": Recordable(shape, lambda ctx: self._posterior(ctx).mean[:, None]),
            "sd": Recordable(shape, covariance, lambda found: standard_deviations(found)[..., None, :]),
            "covariance": Recordable(("element", "element_"), covariance),
            "error": Recordable(errors, lambda ctx: self._posterior(ctx).change[:, None]),
            "weighted_error": Recordable(errors, lambda ctx: self._posterior(ctx).weighted[:, None]),
        }
