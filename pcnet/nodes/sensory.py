"""Sensory nodes: turn observations into generalised observations and compute the sensory error."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.model.context import Neighbours, NodeContext
from pcnet.model.links import AnyLink, Predicts, Weighs
from pcnet.model.messages import GaussianPrediction, PredictionError, ScoreError
from pcnet.model.node import BatchSpec, Energy, ErrorShape, Node, Recordable
from pcnet.model.protocols import Assumes, ForecastContext, Forecasts
from pcnet.nodes.flow import check_predictors
from pcnet.nodes.precision import PrecisionNode, noise_score_error, precision_score
from pcnet.numerics import kalman, low_rank
from pcnet.numerics.branching import holds
from pcnet.numerics.coloured_noise import Noise, NoiseSpec
from pcnet.numerics.estimators import ParameterEstimator
from pcnet.numerics.generalised import backward_differences, taylor_operator, taylor_shift
from pcnet.numerics.kalman import PredictiveDistribution, ScoreAndInformation
from pcnet.numerics.kernels import White, lengthscale_of
from pcnet.numerics.low_rank import LowRankDistribution, LowRankPrecision, channel_scores
from pcnet.numerics.outliers import expect_outliers
from pcnet.numerics.precision import DensePrecision, Precision
from pcnet.settings import Fraction, NotNegative, Positive, number, settings


class SensoryState(NamedTuple):
    """The generalised observation, and the history that its derivatives are computed from."""

    observation: Tensor  # ỹ (B, orders, dim); of a missing channel, that of its last observation
    seen: Tensor  # how many orders of each channel are observed now, (B, dim)
    since: Tensor  # time since each channel was last observed, (B, dim)
    known: Tensor  # how many orders of it were known then, (B, dim)
    samples: Tensor  # the last samples, the newest first, for derivatives="fit", (B, window, dim)
    ages: Tensor  # their ages, (B, window, dim)
    motion: Tensor  # differences for learning the lengthscale of smooth noise, NaN while unknown, (B, 4, dim)
    outliers: Tensor  # expected share of outliers, (B,)


class SensoryBound(NamedTuple):
    """Constants of a run."""

    extrapolation: Tensor | None  # matrix exp(D·extrapolate), (B, orders, orders), if it is used
    reach: Tensor  # longest time between two samples from which differences are taken, (B, 1)
    full: Tensor  # `seen` while nothing is missing
    now: Tensor  # `since` while nothing is missing
    ages: Tensor  # `ages` while nothing is missing and samples come at their interval
    tracks_motion: bool  # whether the lengthscale of the noise is learned from values alone
    outliers: Tensor  # expected share of outliers, (B,)
    input_variance: Tensor | None = None  # of an input that is not known exactly, (B, dim)


class SensoryErrors(NamedTuple):
    """The prediction g̃, the error ε̃ = ỹ − g̃, its precision Π̃ and ξ = Π̃ε̃; (B, orders, dim) each."""

    prediction: Tensor
    error: Tensor
    precision: Precision | DensePrecision | LowRankPrecision
    weighted: Tensor
    distribution: PredictiveDistribution | LowRankDistribution | None = (
        None  # if the state sends one; then Π̃ is its precision
    )
    inflation: Tensor | None = None  # factor of the variance of the noise that outliers ask for, (B, dim)
    correction: Tensor | None = None  # of the log-evidence, for observations that may be outliers, (B,)


Context = NodeContext[SensoryState, SensoryBound]


@settings
class SensoryNode(Node[SensoryState, SensoryBound], Forecasts, Assumes):
    """Generalised observations ỹ (..., orders, dim).

    Local energy ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| of ε̃ = ỹ − Σ g̃, the sum over the states that predict it. Missing values (NaN) are
    integrated out: Π̃ and ε̃ are then those of the observed channels and orders.

    Args:
        dim: Number of channels.
        orders: Number of generalised orders, 1 for values alone.
        dt: Sampling interval, in time units; needed for more than one order.
        derivative_init: How derivatives start. "first": the first observation of a channel is at rest; "zeros": it is
            a jump from 0, and the first prediction finds an observation of 0; "seen": derivatives count only once there
            are samples to compute them from.
        derivatives: "backward" differences over the time since the channel was last observed; a Taylor "fit" by least
            squares to the last `window` samples; "none": only values are observed; "given": an observation consists of
            all orders, one after the other, and those of a channel count up to its first NaN.
        window: Samples of the Taylor fit; orders + 1 unless given.
        max_gap: Longest gap, in sampling intervals, over which differences are taken. After a longer one the
            derivatives of a channel start anew.
        extrapolate: Time by which the action "update" extrapolates the data: ỹ ← exp(D·extrapolate)ỹ.
        outliers: Expected share of outliers, observations with 101 times the usual noise variance, such as 0.05; 0 for
            none. Below a Kalman state, and for white noise.
    """

    _: KW_ONLY
    dim: int = Field(ge=1)
    orders: int = Field(ge=1)
    dt: Positive | None = None
    derivative_init: Literal["first", "zeros", "seen"] = "first"
    derivatives: Literal["backward", "fit", "none", "given"] = "backward"
    window: int | None = Field(default=None, ge=1)
    max_gap: Positive = number(2.0)
    extrapolate: NotNegative = number(0.0)
    outliers: Fraction = number(0.0)
    role: ClassVar[str] = "sensory"
    kind: ClassVar[str] = "sensory"
    child_of: ClassVar[tuple[type[AnyLink], ...]] = (Predicts, Weighs)
    observes: ClassVar[bool] = True
    takes_low_rank: ClassVar[bool] = True
    required_actions: ClassVar[tuple[str, ...]] = ("observe",)
    assumption: ClassVar[str] = "outliers"

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if self.dt is None and self.orders > 1 and self.derivatives in ("backward", "fit"):
            raise SettingError(f"{self.title}: give dt, the sampling interval, for {self.orders} orders")
        if self.window is not None and (self.derivatives != "fit" or self.window < self.orders):
            raise SettingError(f"{self.title}: window is for derivatives='fit', and must be {self.orders} or more")
        if not bool((self.max_gap >= 1).all()):
            raise SettingError(f"{self.title}: max_gap must be 1 (sampling interval) or more")
        if not bool((self.outliers < 0.5).all()):
            raise SettingError(f"{self.title}: the share of outliers must be below 0.5")

    @property
    def error_shape(self) -> ErrorShape:
        return ErrorShape(self.orders, self.dim)

    @property
    def observation_size(self) -> int:
        return self.orders * self.dim if self.derivatives == "given" else self.dim

    @property
    def sampling_interval(self) -> Tensor | None:
        return self.dt

    @property
    def data(self) -> Mapping[str, Any]:
        known: dict[str, Any] = {"orders": self.orders, "channels": self.dim}
        known |= {"dt": None if self.dt is None else self.dt.tolist(), "derivative_init": self.derivative_init}
        known |= {} if self.derivatives == "backward" else {"derivatives": self.derivatives}
        known |= {} if bool((self.max_gap == 2).all()) else {"max_gap": self.max_gap.tolist()}
        return known | ({"window": self.samples} if self.derivatives == "fit" else {})

    @property
    def samples(self) -> int:
        """Number of samples of the Taylor fit."""
        return (self.window or self.orders + 1) if self.derivatives == "fit" else 0

    def describe(self) -> str:
        interval = number(1.0) if self.dt is None else self.dt
        dt = f"{interval.item():g}" if interval.numel() == 1 else "one for each batch element"
        return f"dim {self.dim}, orders {self.orders}, dt {dt}"

    def check(self, links: Neighbours, like: Tensor) -> None:
        states = [link.parent for link in links.above_of(Predicts)]
        if not states:
            raise GraphError(f"{self.title} is predicted by nothing: add graph.predicts(state, {self.name})")
        if not links.above_of(Weighs):
            raise GraphError(f"{self.title} has no precision: add graph.weighs(PrecisionNode(...), {self.name})")
        check_predictors(self, states)
        if self.has_outliers and not states[0].sends_covariance:
            raise GraphError(f"{self.title} expects outliers, which needs a Kalman state; {states[0].name!r} is none")

    @cached_property
    def has_outliers(self) -> bool:
        """Whether it expects outliers."""
        return bool((self.outliers > 0).any())

    def default_estimator(self, link: AnyLink, above: tuple[AnyLink, ...]) -> ParameterEstimator | None:
        states = [other for other in above if isinstance(other, Predicts)]
        return states[0].parent.default_estimator(states[0], above) if states else None

    def noise_spec(self, above: tuple[AnyLink, ...], spec: BatchSpec) -> NoiseSpec | None:
        pairs = [(link, link.parent) for link in above if isinstance(link, Weighs)]
        return next((node.spec_of(link, spec) for link, node in pairs if isinstance(node, PrecisionNode)), None)

    def bind(self, links: Neighbours, spec: BatchSpec) -> SensoryBound:
        dt = spec.expand(number(1.0) if self.dt is None else self.dt, 0)
        ahead = spec.expand(self.extrapolate, 0)
        full = torch.full_like(spec.zeros(self.dim), 1 if self.derivatives == "none" else self.orders)
        steps = torch.constant_pad_nd(dt[:, None].expand(-1, max(0, self.samples - 1)), (min(1, self.samples), 0))
        noise = self.noise_spec(links.above, spec)
        return SensoryBound(
            taylor_shift(ahead, self.orders) if bool((ahead != 0).any()) else None,
            (spec.expand(self.max_gap, 0) * dt)[:, None] * (1 + 1e-6),  # rounding must not turn an interval into a gap
            full,
            torch.zeros_like(full),
            torch.cumsum(steps, 1)[..., None].expand(-1, -1, self.dim).contiguous(),
            self.orders == 1 and noise is not None and noise.learned_lengthscale,
            spec.expand(self.outliers, 0),
        )

    def init(self, bound: SensoryBound, spec: BatchSpec) -> SensoryState:
        return self._first(bound, torch.full_like(bound.full, torch.nan))

    def assume(self, bound: SensoryBound, state: SensoryState, value: Tensor) -> SensoryState:
        """This share of outliers, if the settings allow for any."""
        return state._replace(outliers=value) if self.has_outliers else state

    def initialise(self, ctx: Context) -> SensoryState:
        """The state at the first observation: at rest, or a jump from 0."""
        assert ctx.observation is not None
        first = self._first(ctx.bound, self.preprocess(ctx.observation)[:, : self.dim])
        return first._replace(outliers=ctx.state.outliers)

    def _first(self, bound: SensoryBound, first: Tensor) -> SensoryState:
        """The state with these first values (B, dim), NaN where they are missing."""
        there = torch.isfinite(first)
        value = torch.where(there & (self.derivative_init == "first"), first, 0.0)
        observation = torch.constant_pad_nd(value[:, None], (0, 0, 0, self.orders - 1))
        begun = there & (self.derivative_init != "seen")
        return SensoryState(
            observation,
            bound.full * there,
            bound.now,
            bound.full * begun,
            observation[:, :1].expand(-1, self.samples, -1),
            torch.where(begun[:, None], bound.ages, torch.inf),
            observation.new_full((len(first), 4, self.dim), torch.nan),
            bound.outliers,
        )

    def preprocess(self, observation: Tensor) -> Tensor:
        """What the node makes of an observation (B, observation_size) before it is used; NaN marks missing values."""
        return observation

    def observe(self, ctx: Context) -> SensoryState:
        assert ctx.observation is not None
        y = self.preprocess(ctx.observation)
        complete = holds(torch.isfinite(y.sum()))
        if self.derivatives == "given":
            state = self._observe_given(ctx, y.view(-1, self.orders, self.dim), complete)
        elif self.derivatives == "fit":
            state = self._observe_fit(ctx, y, complete)
        elif self.derivatives == "backward" and complete and self._steady(ctx):
            moved = backward_differences(y, ctx.state.observation, ctx.dt[:, None])
            state = ctx.state._replace(observation=moved, seen=ctx.bound.full)
        else:
            state = self._observe_some(ctx, y, complete)
        if ctx.bound.tracks_motion:
            motion = backward_differences(y, ctx.state.motion, ctx.dt[:, None])
            if ctx.relative_dt is not None:  # differences of irregular samples carry little information
                motion[:, 1:] = torch.nan
            state = state._replace(motion=motion)
        return state

    def _steady(self, ctx: Context) -> bool:
        """Whether all channels were observed at the previous tick, in all orders."""
        full, since, known = ctx.bound.full, ctx.state.since, ctx.state.known
        recent = ctx.cached("since", lambda: holds((since == 0).all()), since)
        return recent and ctx.cached("known", lambda: holds((known == full).all()), known)

    def complete(self, ctx: Context) -> bool:
        """Whether all orders of all channels are observed now."""
        seen, full = ctx.state.seen, ctx.bound.full
        return self.derivatives != "none" and ctx.cached("complete", lambda: holds((seen == full).all()), seen)

    def _observe_given(self, ctx: Context, y: Tensor, complete: bool) -> SensoryState:
        there = torch.isfinite(y).cumprod(1)
        seen = ctx.bound.full if complete else there.sum(1).to(y)
        known = seen if complete else torch.maximum(seen, ctx.state.known)
        observation = y if complete else torch.where(there.bool(), y, ctx.state.observation)
        return ctx.state._replace(observation=observation, seen=seen, known=known)

    def _observe_some(self, ctx: Context, y: Tensor, complete: bool) -> SensoryState:
        """Take in the observed channels of y, each with its own history."""
        bound, state, before = ctx.bound, ctx.state, ctx.state.observation
        there = torch.isfinite(y)
        never = state.known == 0
        since = state.since + ctx.dt[:, None]
        fresh = (since <= bound.reach) | never
        if self.derivative_init == "seen":
            known = torch.where(fresh, state.known + 1, 1.0)
        else:
            known = torch.where(never, bound.full, torch.where(fresh, state.known + 1, 1.0))
            if self.derivative_init == "first":  # a channel is at rest before its first observation
                rest = torch.constant_pad_nd(y[:, None], (0, 0, 0, self.orders - 1))
                before = torch.where((never & there)[:, None], rest, before)
            since = torch.where(never, ctx.dt[:, None], since)
        known = torch.where(there, torch.minimum(known, bound.full), state.known)
        moved = backward_differences(y, before, since)
        rows = torch.arange(self.orders, device=y.device)[:, None]
        moved = torch.where(rows < known[:, None], moved, 0.0)
        steady = complete and holds((known == bound.full).all())
        return state._replace(
            observation=moved if complete else torch.where(there[:, None], moved, state.observation),
            seen=bound.full if steady else torch.where(there, known, 0.0),
            since=bound.now if complete else torch.where(there, 0.0, since),
            known=bound.full if steady else known,
        )

    def _observe_fit(self, ctx: Context, y: Tensor, complete: bool) -> SensoryState:
        """Fit a Taylor series to the last samples."""
        bound, state = ctx.bound, ctx.state
        there = torch.isfinite(y)
        samples = torch.cat([torch.where(there, y, 0.0)[:, None], state.samples[:, :-1]], 1)
        steady = ctx.cached("ages", lambda: holds((state.ages == bound.ages).all()), state.ages)
        regular = complete and steady and ctx.relative_dt is None
        if regular:
            ages, known = bound.ages, bound.full
        else:
            now = torch.where(there, 0.0, torch.inf)
            ages = torch.cat([now[:, None], (state.ages + ctx.dt[:, None, None])[:, :-1]], 1)
            never = (state.known == 0) & there
            if self.derivative_init != "seen":  # before its first observation a channel is at rest, or 0
                samples = torch.where(never[:, None] & (self.derivative_init == "first"), y[:, None], samples)
                ages = torch.where(never[:, None], bound.ages, ages)
            ages = torch.where(ages <= bound.reach[..., None] * max(1, self.samples - 1), ages, torch.inf)
            known = torch.minimum(torch.isfinite(ages).sum(1).to(y), bound.full)
        operator = ctx.cached("operator", lambda: taylor_operator(ages.transpose(1, 2), self.orders), ages)
        fitted = torch.einsum("bcow,bwc->boc", operator, samples)
        seen = known if complete else torch.where(there, known, 0.0)
        return state._replace(
            observation=fitted if complete else torch.where(there[:, None], fitted, state.observation),
            seen=bound.full if regular else seen,
            since=bound.now,
            known=torch.maximum(known, state.known),
            samples=samples,
            ages=ages,
        )

    def update(self, ctx: Context) -> SensoryState:
        """Extrapolate the data by their own derivatives."""
        state, shift = ctx.state, ctx.bound.extrapolation
        return state if shift is None else state._replace(observation=torch.bmm(shift, state.observation))

    def error(self, ctx: Context, link: AnyLink) -> PredictionError | ScoreError:
        found = self.sensory_errors(ctx)
        if isinstance(link, Predicts):
            return PredictionError(
                found.weighted,
                lambda: found.precision,
                noise=self._noise(ctx),
                noise_inflation=found.inflation,
                outliers=None if found.inflation is None else ctx.state.outliers,
            )
        if found.distribution is None:
            assert isinstance(found.precision, Precision)
            return precision_score(found.precision, found.error, found.weighted)
        noise = self._noise(ctx)
        assert noise is not None
        if isinstance(found.distribution, LowRankDistribution):
            assert isinstance(found.precision, LowRankPrecision)
            given = found.distribution, found.precision, found.weighted[:, 0]
            if noise.levels > 1:
                gradient, information = channel_scores(*given)
                return ScoreError(-gradient, lambda: information)
            return noise_score_error(low_rank.noise_score(*given), noise.levels)
        assert isinstance(found.precision, DensePrecision)
        score = kalman.noise_score(found.distribution, found.error[:, 0], found.weighted[:, 0], found.precision.matrix)
        lengthscale = self._lengthscale_score(ctx, noise) if noise.learned_lengthscale else None
        return noise_score_error(score, noise.levels, lengthscale)

    def _noise(self, ctx: Context) -> Noise | None:
        links = ctx.above_of(Weighs)
        return ctx.message(links[0]).noise if links else None

    def _lengthscale_score(self, ctx: Context, noise: Noise) -> ScoreAndInformation:
        """Score of the log of the lengthscale ℓ of squared-exponential noise.

        The second and third derivatives of such noise are independent and normal, with a ratio of standard deviations
        of √5/ℓ. So z = log √5|ÿ/y⃛| has the mean log ℓ and the variance π²/4, as far as noise moves faster than the
        signal. This depends neither on noise levels nor on states. Samples within a correlation time count as one.
        """
        size = ctx.state.motion[:, 2:].abs().log()
        z, lengthscale = 0.5 * math.log(5) + size[:, 0] - size[:, 1], lengthscale_of(noise.kernel)
        there = torch.isfinite(z)
        weight = 4 / math.pi**2 * (ctx.dt / (math.sqrt(math.pi) * lengthscale)).clamp_max(1.0)
        deviation = torch.where(there, z - lengthscale.log()[:, None], 0.0).sum(-1)
        return ScoreAndInformation((weight * deviation)[:, None], (weight * there.sum(-1))[:, None, None])

    def sensory_errors(self, ctx: Context) -> SensoryErrors:
        """The sensory error and its precision; computed once for the same observation and messages."""
        observation, seen = ctx.state.observation, ctx.state.seen
        messages = [ctx.message(link) for link in ctx.above_of(Predicts)]
        (link,) = ctx.above_of(Weighs)
        noise = ctx.message(link)
        keys: list[object] = [each if isinstance(each, GaussianPrediction) else each.value for each in messages]

        def compute() -> SensoryErrors:
            prediction = sum((each.value for each in messages[1:]), messages[0].value)
            error = self.where_seen(ctx, observation - prediction, 0.0)
            if isinstance(messages[0], GaussianPrediction):
                there = None if self.complete(ctx) else seen > 0
                distribution, inflation, correction = messages[0].distribution, None, None
                if self.has_outliers and noise.noise is not None and isinstance(noise.kernel, White):
                    robust = self._with_outliers(ctx, distribution, error[:, 0], noise.noise)
                    distribution, inflation, correction = robust
                joint: DensePrecision | LowRankPrecision
                if isinstance(distribution, LowRankDistribution):
                    joint = LowRankPrecision.of(distribution, there)
                else:
                    joint = DensePrecision.of_covariance(distribution.covariance, there)
                return SensoryErrors(prediction, error, joint, joint.weigh(error), distribution, inflation, correction)
            precision = noise.value
            if not self.complete(ctx):
                observed = partial(precision.observed, seen)
                precision = ctx.cached("precision of the observed", observed, precision, seen)
            return SensoryErrors(prediction, error, precision, precision.weigh(error))

        if self.has_outliers or not isinstance(messages[0], GaussianPrediction):  # otherwise it holds the noise
            keys.append(noise.value)
        return ctx.cached("sensory errors", compute, observation, seen, *keys)

    def _with_outliers(
        self, ctx: Context, distribution: PredictiveDistribution | LowRankDistribution, error: Tensor, noise: Noise
    ) -> tuple[PredictiveDistribution | LowRankDistribution, Tensor, Tensor]:
        """The predictive distribution with the noise that outliers ask for, its factor, and what the evidence gains."""
        share, known = ctx.state.outliers[:, None], distribution.noise
        inflation, gains = expect_outliers(share, error, distribution.variance, known)
        extra = known * (inflation - 1)
        gain = torch.where(ctx.state.seen > 0, gains, 0.0).sum(-1)
        if isinstance(distribution, LowRankDistribution):
            return distribution.with_noise(extra), inflation, gain
        levels = torch.eye(self.dim, dtype=extra.dtype, device=extra.device)
        levels = levels if noise.levels == self.dim else torch.ones_like(levels[:1])
        learned = distribution.covariance_by_source.shape[1]  # none if levels are not learned
        added = (levels[:learned] * extra[:, None]).diag_embed()
        robust = distribution._replace(
            covariance=distribution.covariance + extra.diag_embed(),
            covariance_by_source=distribution.covariance_by_source + added,
        )
        return robust, inflation, gain

    def energy(self, ctx: Context) -> Energy:
        found = self.sensory_errors(ctx)
        fit = (found.weighted * found.error).sum((1, 2))
        constant = ctx.state.seen.sum(-1) * math.log(2 * math.pi)
        accuracy = 0.5 * (found.precision.log_det - fit - constant)
        return Energy(accuracy=accuracy if found.correction is None else accuracy + found.correction)

    def forecast_value(self, ctx: Context, now: ForecastContext) -> Tensor | None:
        given = now.of(Predicts)
        return sum(given[1:], given[0])

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape = ("order", "dimension")
        return {
            "observation": Recordable(shape, lambda ctx: self.where_seen(ctx, ctx.state.observation, torch.nan)),
            "prediction": Recordable(shape, lambda ctx: self.sensory_errors(ctx).prediction),
            "error": Recordable(shape, lambda ctx: self.where_seen(ctx, self.sensory_errors(ctx).error, torch.nan)),
            "weighted_error": Recordable(shape, lambda ctx: self.sensory_errors(ctx).weighted),
        }

    def where_seen(self, ctx: Context, values: Tensor, other: float) -> Tensor:
        """Values (B, orders, dim) where they are observed now, and `other` elsewhere."""
        if self.complete(ctx):
            return values
        rows = torch.arange(self.orders, device=values.device)[:, None]
        return torch.where(rows < ctx.state.seen[:, None], values, other)
