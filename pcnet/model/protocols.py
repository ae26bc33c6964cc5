"""Optional parts of the contract of a node: forecasting, and fitting to recorded data."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from pcnet.errors import GraphError
from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import AnyLink, Weighs
from pcnet.numerics.kernels import Kernel

L = TypeVar("L", bound=AnyLink)
Context = NodeContext[Any, Any]


class ForecastStart(NamedTuple):
    """Gaussian belief that a forecast starts from."""

    mean: Tensor  # (B, n)
    covariance: Tensor  # (B, n, n)


class ForecastContext(NamedTuple):
    """The future as one node sees it. There may be several copies of each batch element, one after the other."""

    own: Tensor  # its own variables, (B, n)
    noise: Tensor  # (B, dim)
    messages: Mapping[AnyLink, Tensor]  # from above
    time: Tensor | None = None  # (B, 1), if a function of the model depends on it

    def of(self, kind: type[L]) -> list[Tensor]:
        """The messages on links of one kind."""
        return [value for link, value in self.messages.items() if isinstance(link, kind)]

    def repeat(self, value: Tensor) -> Tensor:
        """A present value (b, ...), repeated for all copies."""
        return value.repeat(len(self.own) // len(value), *(1,) * (value.dim() - 1))


class ForecastStep(NamedTuple):
    """A future state, and what it predicts."""

    mean: Tensor  # (B, dim)
    covariance: Tensor  # (B, dim, dim)
    below: Mapping[str, tuple[Tensor, Tensor]]  # mean and covariance of the nodes below, by name


class Forecasts(ABC):
    """A node that takes part in forecasts, which integrate ż of all such nodes together."""

    @property
    def holds_noise(self) -> bool:
        """Whether its white noise is held constant from one prediction to the next; otherwise it is a diffusion."""
        return True

    def forecast_start(self, ctx: Context) -> ForecastStart | None:
        """The belief about its own variables, if it has any."""
        return None

    def offset(self, ctx: Context, now: ForecastContext) -> Tensor:
        """Its variables (B, n) in coordinates that stand still, where nodes above would move them."""
        return now.own

    def velocity(self, ctx: Context, now: ForecastContext) -> Tensor:
        """Time derivative of its variables, (B, n)."""
        return torch.zeros_like(now.own)

    def forecast_noises(self, ctx: Context) -> list[tuple[Tensor, Kernel]]:
        """The covariance (B, m, m) and autocorrelation of each noise that drives it or what it sends."""
        found: list[tuple[Tensor, Kernel]] = []
        for link in ctx.above_of(Weighs):
            message = ctx.message(link)
            channel = message.value.channel
            covariance = channel.reciprocal().diag_embed() if channel.dim() == 2 else torch.linalg.inv(channel)
            found.append((covariance, message.kernel))
        return found

    def forecast_message(self, ctx: Context, link: AnyLink, now: ForecastContext) -> Tensor:
        """The value (B, ...) that it would send down a link."""
        raise GraphError(f"{type(self).__name__} {ctx.name!r} cannot be forecast")

    def forecast_value(self, ctx: Context, now: ForecastContext) -> Tensor | None:
        """What a forecast shows of it, (B, dim), without observation noise; None for nothing."""
        return None


class ForecastsObservations(ABC):
    """A sensory node whose observations differ from what predicts them by more than noise that is added."""

    @abstractmethod
    def forecast_observation(self, ctx: Context, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of observations (..., B, n), from those of the predictions (..., B, dim)."""

    @abstractmethod
    def draw_observation(self, ctx: Context, p: Tensor, generator: torch.Generator) -> Tensor:
        """Observations (..., B, n), drawn given predictions (..., B, dim); there may be several copies of a batch."""


class ForecastsAlone(ABC):
    """A state that forecasts itself and what it predicts, including noise that persists."""

    @abstractmethod
    def forecast(self, ctx: Context, step: Tensor, every: int, count: int, parameters: bool) -> list[ForecastStep]:
        """The forecast after each `every` steps of length `step` (B,), `count` times; parameters: with their doubt."""


class SmoothingLayout(NamedTuple):
    """The form of the rows that a smoother reads."""

    size: int  # n, elements of the belief
    n_beside: int  # p, parameters beside it
    blocks: Mapping[str, slice]  # where the variables of each node are among the elements


class Smooths(ABC):
    """A state that can keep what a smoother needs; see `Neighbours.smooth`."""

    @abstractmethod
    def smoothing_layout(self, bound: Any) -> SmoothingLayout:
        """The form of its rows."""

    @abstractmethod
    def smoothing_row(self, ctx: Context) -> Tensor:
        """What a smoother needs of the last observation, (B, w)."""

    @abstractmethod
    def smoothed(self, rows: Tensor, layout: SmoothingLayout, first_only: bool) -> tuple[Tensor, Tensor]:
        """Smoothed means (T, B, n) and covariances (T, B, n, n) from rows (T, B, w); or of the first row alone."""


class Assumes(ABC):
    """A node that can be run under several assumptions side by side, as rows of a bank of hypotheses.

    assumption: the name of what is assumed. An assumption is part of the state.
    """

    assumption: ClassVar[str]

    @abstractmethod
    def assume(self, bound: Any, state: Any, value: Tensor) -> Any:
        """The state under an assumption, one value for each batch element, (B,) or (B, 1)."""


class AssumesNoiseLevels(Assumes):
    """A node that can be run from several noise levels side by side, around a first guess that may be found later."""

    assumption: ClassVar[str] = "log_variance"

    @abstractmethod
    def with_guess(self, bound: Any, state: Any, log_variance: Tensor) -> Any:
        """The state with a first guess of the log-variances, (B, n), higher by so much than that of the settings."""


class FitsRecordedData(ABC):
    """A node that can be updated once after each pass over recorded data."""

    @abstractmethod
    def check_fit(self, links: Neighbours) -> None:
        """Raise an error if the node cannot be fitted with these links."""

    @abstractmethod
    def warm_start(self, ctx: Context, state: Any) -> Any:
        """The state for another pass: the given belief, with nothing accumulated but the pull of the prior."""
