"""Optional parts of the contract of a node: forecasting, and fitting to recorded data."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from pcnet.errors import GraphError
from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import AnyLink, Weighs
from pcnet.model.node import BatchSpec
from pcnet.numerics.gaussian_sums import Bends
from pcnet.numerics.kernels import Kernel
from pcnet.numerics.mixtures import Peaks
from pcnet.numerics.smoothing import Steps

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
    below: Mapping[str, tuple[Tensor, Tensor]]  # mean and variance of the nodes below, by name


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
    def forecast_state(self, ctx: Context, parameters: bool) -> Any:
        """The state that a forecast starts from; parameters: with their uncertainty."""

    @abstractmethod
    def forecast_step(self, ctx: Context) -> Any:
        """The state after one more step, of the length of the time step of the context."""

    @abstractmethod
    def forecast_shown(self, ctx: Context, parameters: bool) -> ForecastStep:
        """What a forecast shows of the state of the context, and of the nodes below."""


class DrawsFutures(ABC):
    """A state whose future can be drawn step by step, from points of its belief on.

    Points (B, k, n) are values of everything that the state carries, k of each batch element.
    """

    @abstractmethod
    def draws(self, ctx: Context) -> bool:
        """Whether it can draw, in its graph."""

    @abstractmethod
    def stays_gaussian(self, ctx: Context) -> bool:
        """Whether its belief stays Gaussian in time, so that its moments need no draws."""

    @abstractmethod
    def point_size(self, ctx: Context) -> tuple[int, int]:
        """n, and the number m of standard normal numbers that a step of a point needs."""

    @abstractmethod
    def points(self, ctx: Context, normal: Tensor, parameters: bool) -> Tensor:
        """Points of the belief, from standard normal numbers (B, k, n).

        parameters: whether parameters are drawn too; otherwise they are at their means.
        """

    @abstractmethod
    def move_points(self, ctx: Context, points: Tensor, normal: Tensor) -> Tensor:
        """The points at the time of the context, one interval later, with noise from normal numbers (B, k, m)."""

    @abstractmethod
    def values_of(self, ctx: Context, points: Tensor) -> dict[str, Tensor]:
        """The state itself and the nodes below at these points, (B, k, dim) by name, without white noise."""

    @abstractmethod
    def white_noise_below(self, ctx: Context) -> dict[str, Tensor]:
        """Variances (B, dim) of the white noise of the nodes below, by name."""


class SmoothingLayout(NamedTuple):
    """The form of the rows that a smoother reads."""

    size: int  # n, elements of the belief
    n_beside: int  # p, parameters beside it
    blocks: Mapping[str, slice]  # where the variables of each node are among the elements
    belief: slice  # where the filtered belief is in a row, in the form that smoothed ones have too
    by_steps: bool = True  # whether it is one Gaussian, as of `SmoothsBySteps`, or several, as of `SmoothsBack`
    modes: int = 1  # k, beliefs side by side
    stages: int = 1  # s, of each of them


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


class SmoothsBySteps(Smooths):
    """A state whose smoothed belief is a linear function of the one after it: one Gaussian."""

    @abstractmethod
    def backward_step(self, later: Tensor, earlier: Tensor, layout: SmoothingLayout) -> Steps:
        """The step from a row to the one before it; rows are (B, w)."""

    @abstractmethod
    def smoothed_by(self, steps: Sequence[Steps], row: Tensor, layout: SmoothingLayout) -> tuple[Tensor, Tensor]:
        """Mean (B, n) and covariance (B, n, n) that steps, one after the other, give from the last row (B, w)."""


class SmoothsBack(Smooths):
    """A state whose smoothed belief is any function of the one after it: several Gaussians."""

    @abstractmethod
    def smooth_back(self, belief: Tensor, later: Tensor, earlier: Tensor, layout: SmoothingLayout) -> Tensor:
        """The smoothed belief (B, v) at an earlier row from that at the row after it; rows are (B, w)."""

    @abstractmethod
    def smoothed_moments(self, belief: Tensor, last: Tensor, layout: SmoothingLayout) -> tuple[Tensor, Tensor]:
        """Mean (B, n) and covariance (B, n, n) of a smoothed belief (B, v); last: the last row, (B, w)."""


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
    def levels(self, bound: Any) -> int:
        """The number n of noise levels."""

    @abstractmethod
    def with_guess(self, bound: Any, state: Any, log_variance: Tensor) -> Any:
        """The state with a first guess of the log-variances, (B, n), higher by so much than that of the settings."""

    @property
    @abstractmethod
    def noise_kernel(self) -> Kernel:
        """The autocorrelation of the noise, as it is given."""


class WarnsAfterRun(ABC):
    """A state whose settings may not suit its flow or its units, which its belief shows after a run."""

    @abstractmethod
    def warnings(self, ctx: Context, elements: int) -> Iterator[str]:
        """What is wrong at the present belief, and the remedies.

        elements: size of the batch; there are as many further rows as there are hypotheses.
        """


class KeepsNoiseScales(ABC):
    """A state with parts of noise that are tied to the first guess of a noise level, until more is known of it."""

    @abstractmethod
    def has_scales(self, bound: Any) -> bool:
        """Whether there are such parts."""

    @abstractmethod
    def rescaled(self, bound: Any, state: Any, weights: Tensor, factor: float) -> Any:
        """The state with all scales at a multiple of the mean level of the rows of a bank.

        weights: of the rows, (K, B). The mean is that of logarithms.
        """


class StartsGiven(ABC):
    """A state whose first belief may be given."""

    @abstractmethod
    def first_sd(self, spec: BatchSpec) -> Tensor | None:
        """Standard deviations of the first belief, (B, d), if it is given; else None."""

    @property
    @abstractmethod
    def has_default_start(self) -> bool:
        """Whether nothing was given of the first belief, so that its standard deviation is 1."""


class StartsAtPeaks(ABC):
    """A state whose first belief can be divided into several narrower ones, as rows of a bank of hypotheses."""

    @abstractmethod
    def start_peaks(self, ctx: Context) -> Peaks | None:
        """The parts, if what the state predicts is far from linear over its first belief; else None."""

    @abstractmethod
    def start_at(self, bound: Any, state: Any, offset: Tensor, narrowing: Tensor) -> Any:
        """The state before its start, at an offset (B, d) of its mean and with a narrower sd, both relative to sds."""


class DividesBelief(ABC):
    """A state whose belief can be divided into several narrower ones, as rows of a bank of hypotheses."""

    @abstractmethod
    def can_bend(self, bound: Any) -> bool:
        """Whether what the belief is sent through can be far from linear, so that it may have to be divided."""

    @abstractmethod
    def bends(self, ctx: Context) -> Bends:
        """How far what the belief is sent through is from linear over it."""

    @abstractmethod
    def part(self, state: Any, bends: Bends, place: Tensor) -> Any:
        """The state with beliefs replaced by one of three parts, −1, 0 or 1, (B,); others stay as they are."""


class FitsRecordedData(ABC):
    """A node that can be updated once after each pass over recorded data."""

    @abstractmethod
    def check_fit(self, links: Neighbours) -> None:
        """Raise an error if the node cannot be fitted with these links."""

    @abstractmethod
    def warm_start(self, ctx: Context, state: Any) -> Any:
        """The state for another pass: the given belief, with nothing accumulated but the pull of the prior."""
