"""Sensory nodes: turn observations into generalised observations and hold the sensory error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import GraphError, SettingError
from pcnet.model.messages import Error
from pcnet.model.node import BatchSpec, Energy, ErrorShape, ForecastContext, Link, Node, NodeContext, Recordable
from pcnet.nodes.precision import noise_error, precision_error
from pcnet.numerics import kalman as carrying
from pcnet.numerics.coloured_noise import Noise
from pcnet.numerics.generalised import backward_differences, taylor_operator, taylor_shift
from pcnet.numerics.kalman import PredictiveDistribution, ScoreAndInformation
from pcnet.numerics.kernels import lengthscale_of
from pcnet.numerics.precision import DensePrecision
from pcnet.settings import NotNegative, Positive, number, settings


class SensoryBelief(NamedTuple):
    """The generalised observation ỹ (B, orders, dim), and how many orders of each channel are seen now, (B, dim).

    Of a channel that is not seen now, ỹ is what it was when it was seen.
    """

    observation: Tensor
    seen: Tensor


class SensoryMemory(NamedTuple):
    """For each channel (B, dim): how long before now it was seen last, and how many orders of it were known then.

    For a fit also the last samples (B, window, dim), the newest first, and how long they are ago. To learn the width of
    smooth noise, four orders of motion by differences (B, 4, dim), NaN where they are not known yet.
    """

    since: Tensor
    known: Tensor
    samples: Tensor
    ages: Tensor
    motion: Tensor


class SensoryRule(NamedTuple):
    """What a run needs again and again.

    The matrix that moves data on (B, orders, orders), if they do; how long after a sample the next one may come so that
    differences are taken, (B, 1); and what `seen`, `since` and `ages` are while nothing is missing and samples come at
    their interval.
    """

    ahead: Tensor | None
    reach: Tensor
    full: Tensor
    now: Tensor
    ages: Tensor


class SensoryWork(NamedTuple):
    """The prediction g̃, the error ε̃ = ỹ − g̃, its precision Π̃ and ξ = Π̃ε̃; (B, orders, dim) each.

    expected: all that was expected of a value, where the state says so; then Π̃ is the precision of that.
    """

    prediction: Tensor
    error: Tensor
    precision: Any
    weighted: Tensor
    expected: PredictiveDistribution | None = None


@settings
class SensoryNode(Node):
    """Generalised observations ỹ (..., orders, dim), by backward differences in time, or given.

    Local energy ½ε̃ᵀΠ̃ε̃ − ½log|Π̃| of ε̃ = ỹ − Σ g̃, the sum over the states that predict it. What is missing (NaN) is
    integrated out: Π̃ and ε̃ are then those of the channels and orders that are seen.

    dt: the time between two observations, if it is known; needed for more orders than one.
    derivatives: "backward" differences over the time since the channel was seen last; a Taylor "fit", by least squares,
    to the last `window` samples (one more than orders unless given); "none": only values are seen; or "given": an
    observation then is all orders of ỹ, one after the other, and those of a channel count up to the first that is NaN.
    start: where derivatives begin. "first" takes a channel's first observation as standing still, "zeros" as a jump
    from 0; "seen" lets derivatives count only as soon as there are samples to take them from.
    What is done before the first observation then finds an observation of 0.
    gap: if a channel was not seen for longer than so many dt, it begins anew: its value counts at once, and its
    derivatives as samples come in.
    ahead: how far, in time, data move on by themselves when the node is asked to move: ỹ ← exp(D·ahead)ỹ.
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
    role: ClassVar[str] = "sensory"
    observes: ClassVar[bool] = True
    required_actions: ClassVar[tuple[str, ...]] = ("observe",)

    def __post_init__(self) -> None:
        Node.__post_init__(self)
        if self.dt is None and self.orders > 1 and self.derivatives in ("backward", "fit"):
            raise SettingError(f"{self.title}: give dt, the time between two observations, for {self.orders} orders")
        if self.window is not None and (self.derivatives != "fit" or self.window < self.orders):
            raise SettingError(
                f"{self.title}: window is for derivatives='fit', and must be {self.orders} or more for as many orders"
            )
        if not bool((self.max_gap >= 1).all()):
            raise SettingError(f"{self.title}: gap must be 1 (sampling interval) or more")

    @property
    def error_shape(self) -> ErrorShape:
        return ErrorShape(self.orders, self.dim)

    @property
    def observed_width(self) -> int:
        return self.orders * self.dim if self.derivatives == "given" else self.dim

    @property
    def sampling_interval(self) -> Tensor | None:
        return self.dt

    @property
    def data(self) -> Mapping[str, Any]:
        dt = None if self.dt is None else self.dt.tolist()
        known: dict[str, Any] = {"orders": self.orders, "channels": self.dim, "dt": dt, "start": self.derivative_init}
        known |= {} if self.derivatives == "backward" else {"derivatives": self.derivatives}
        known |= {} if bool((self.max_gap == 2).all()) else {"gap": self.max_gap.tolist()}
        return known | ({"window": self.samples} if self.derivatives == "fit" else {})

    @property
    def samples(self) -> int:
        """How many samples derivatives are taken from, where they are fitted."""
        if self.derivatives != "fit":
            return 0
        return self.orders + 1 if self.window is None else self.window

    def describe(self) -> str:
        interval = number(1.0) if self.dt is None else self.dt
        dt = f"{interval.item():g}" if interval.numel() == 1 else "one for each batch element"
        return f"dim {self.dim}, orders {self.orders}, dt {dt}"

    def as_child(self, link: Link) -> None:
        if link.kind not in ("predicts", "weighs"):
            Node.as_child(self, link)

    def check(self, above: tuple[Link, ...], below: tuple[Link, ...], like: Tensor) -> None:
        if not any(link.kind == "predicts" for link in above):
            raise GraphError(f"{self.title} is predicted by nothing: add graph.predicts(state, {self.name})")
        if not any(link.kind == "weighs" for link in above):
            raise GraphError(
                f"{self.title} has no precision: add graph.weighs(PrecisionNode(...), {self.name}) for its error"
            )
        states = [link.parent for link in above if link.kind == "predicts"]
        if len(states) > 1 and any(state.sure for state in states):
            raise GraphError(
                f"{self.title} is predicted by {states[0].name!r} and {states[1].name!r}, of which one carries its "
                "whole belief: make them one state"
            )

    def begin(self, local: NodeContext, start: BatchSpec) -> None:
        dt, ahead = start.fill(number(1.0) if self.dt is None else self.dt, 0), start.fill(self.extrapolate, 0)
        blank = torch.zeros(start.batch, self.orders, self.dim, dtype=start.dtype, device=start.device)
        full = torch.full_like(blank[:, 0], 1 if self.derivatives == "none" else self.orders)
        steps = torch.constant_pad_nd(dt[:, None].expand(-1, max(0, self.samples - 1)), (min(1, self.samples), 0))
        local.rule = SensoryRule(
            taylor_shift(ahead, self.orders) if bool((ahead != 0).any()) else None,
            (start.fill(self.max_gap, 0) * dt)[:, None] * (1 + 1e-6),  # an interval is no gap because of rounding
            full,
            torch.zeros_like(full),
            torch.cumsum(steps, 1)[..., None].expand(-1, -1, self.dim).contiguous(),
        )
        there = torch.zeros_like(full, dtype=torch.bool)
        if local.observation is not None:
            first = local.observation[:, : self.dim]
            there = torch.isfinite(first)
            blank[:, 0] = torch.where(there, first, 0.0) if self.derivative_init == "first" else 0.0
        local.belief = SensoryBelief(blank, full * there)
        begun = there & (self.derivative_init != "seen")
        ages = torch.where(begun[:, None], local.rule.ages, torch.inf)
        samples = blank[:, :1].expand(-1, self.samples, -1)
        motion = blank.new_full((start.batch, 4, self.dim), torch.nan)
        local.memory = SensoryMemory(local.rule.now, full * begun, samples, ages, motion)

    # --- taking in what is there --------------------------------------------------------------------------------------
    def observe(self, local: NodeContext) -> None:
        y = local.observation
        assert y is not None
        whole = math.isfinite(y.sum().item()) or bool(torch.isfinite(y).all())
        if self.derivatives == "given":
            self._sense_given(local, y.view(-1, self.orders, self.dim), whole)
        elif self.derivatives == "fit":
            self._sense_fit(local, y, whole)
        elif self.derivatives == "backward" and whole and self._steady(local):
            ahead = backward_differences(y, local.belief.observation, local.elapsed[:, None])
            local.belief = SensoryBelief(ahead, local.rule.full)
        else:
            self._sense_some(local, y, whole)
        if self.orders == 1:  # more of them say themselves how fast noise changes
            noise = self._noise(local)
            if noise is not None and noise.learned_width:
                motion = backward_differences(y, local.memory.motion, local.elapsed[:, None])
                if local.pace is not None:  # differences of samples that come as they like say little of such motion
                    motion[:, 1:] = torch.nan
                local.memory = local.memory._replace(motion=motion)

    def _noise(self, local: NodeContext) -> Noise | None:
        weighers = local.links_above("weighs")
        return local.message(weighers[0]).noise if weighers else None

    def _of_width(self, local: NodeContext, noise: Noise) -> ScoreAndInformation:
        """What observations say of the log of the width w of their noise, where it is a squared exponential.

        Then ÿ and y⃛ are independent and normal, with y⃛ √5/w times as large, as far as noise moves faster than what is
        observed: z = log √5|ÿ/y⃛| is log w in the mean, with the variance π²/4. This does not depend on what levels are
        believed in, nor on states. As long as values resemble each other they count as one.
        """
        size = local.memory.motion[:, 2:].abs().log()
        z, width = 0.5 * math.log(5) + size[:, 0] - size[:, 1], lengthscale_of(noise.kernel)
        there = torch.isfinite(z)
        each = 4 / math.pi**2 * (local.elapsed / (math.sqrt(math.pi) * width)).clamp_max(1.0)
        apart = torch.where(there, z - width.log()[:, None], 0.0).sum(-1)
        return ScoreAndInformation((each * apart)[:, None], (each * there.sum(-1))[:, None, None])

    def _steady(self, local: NodeContext) -> bool:
        """Whether all channels were seen at the previous observation, in all orders."""
        now, full, (since, known, *_) = local.rule.now, local.rule.full, local.memory
        return local.once("now", partial(torch.equal, since, now), since) and local.once(
            "known", partial(torch.equal, known, full), known
        )

    def complete(self, local: NodeContext) -> bool:
        """Whether all orders of all channels are seen now."""
        seen: Tensor = local.belief.seen
        full = local.rule.full
        return self.derivatives != "none" and local.once("complete", partial(torch.equal, seen, full), seen)

    def _sense_given(self, local: NodeContext, y: Tensor, whole: bool) -> None:
        there = torch.isfinite(y).cumprod(1)
        seen = local.rule.full if whole else there.sum(1).to(y)
        if whole:
            local.memory = local.memory._replace(known=seen)
        else:
            local.memory = local.memory._replace(known=torch.maximum(seen, local.memory.known))
        local.belief = SensoryBelief(y if whole else torch.where(there.bool(), y, local.belief.observation), seen)

    def _sense_some(self, local: NodeContext, y: Tensor, whole: bool) -> None:
        """Take in what is there of y, channel by channel."""
        rule, memory, before = local.rule, local.memory, local.belief.observation
        there = torch.isfinite(y)
        never = memory.known == 0
        since = memory.since + local.elapsed[:, None]
        fresh = (since <= rule.reach) | never
        if self.derivative_init == "seen":
            known = torch.where(fresh, memory.known + 1, 1.0)
        else:
            known = torch.where(never, rule.full, torch.where(fresh, memory.known + 1, 1.0))
            if self.derivative_init == "first":  # what is seen for the first time stood still before
                rest = torch.constant_pad_nd(y[:, None], (0, 0, 0, self.orders - 1))
                before = torch.where((never & there)[:, None], rest, before)
            since = torch.where(never, local.elapsed[:, None], since)
        known = torch.where(there, torch.minimum(known, rule.full), memory.known)
        moved = backward_differences(y, before, since)
        rows = torch.arange(self.orders, device=y.device)[:, None]
        moved = torch.where(rows < known[:, None], moved, 0.0)
        settled = whole and bool((known == rule.full).all())
        local.belief = SensoryBelief(
            moved if whole else torch.where(there[:, None], moved, local.belief.observation),
            rule.full if settled else torch.where(there, known, 0.0),
        )
        since = torch.where(there, 0.0, since)
        local.memory = memory._replace(since=rule.now if whole else since, known=rule.full if settled else known)

    def _sense_fit(self, local: NodeContext, y: Tensor, whole: bool) -> None:
        """Fit a Taylor series to what is there of the last samples."""
        rule, memory = local.rule, local.memory
        there = torch.isfinite(y)
        samples = torch.cat([torch.where(there, y, 0.0)[:, None], memory.samples[:, :-1]], 1)
        steady = local.once("ages", partial(torch.equal, memory.ages, rule.ages), memory.ages)
        regular = whole and steady and local.pace is None
        if regular:
            ages, known = rule.ages, rule.full
        else:
            now = torch.where(there, 0.0, torch.inf)
            ages = torch.cat([now[:, None], (memory.ages + local.elapsed[:, None, None])[:, :-1]], 1)
            never = (memory.known == 0) & there
            if self.derivative_init != "seen":  # what is seen for the first time stood still before, or was 0
                samples = torch.where(never[:, None] & (self.derivative_init == "first"), y[:, None], samples)
                ages = torch.where(never[:, None], rule.ages, ages)
            ages = torch.where(ages <= rule.reach[..., None] * max(1, self.samples - 1), ages, torch.inf)
            known = torch.minimum(torch.isfinite(ages).sum(1).to(y), rule.full)
        operator = local.once("operator", lambda: taylor_operator(ages.transpose(1, 2), self.orders), ages)
        fitted = torch.einsum("bcow,bwc->boc", operator, samples)
        seen = known if whole else torch.where(there, known, 0.0)
        if not whole:
            fitted = torch.where(there[:, None], fitted, local.belief.observation)
        local.belief = SensoryBelief(fitted, rule.full if regular else seen)
        known = torch.maximum(known, memory.known)
        local.memory = memory._replace(since=rule.now, known=known, samples=samples, ages=ages)

    def update(self, local: NodeContext) -> None:
        """Let the data move on under their own derivatives."""
        if local.rule.ahead is not None:
            moved = torch.bmm(local.rule.ahead, local.belief.observation)
            local.belief = local.belief._replace(observation=moved)

    def error(self, local: NodeContext, link: Link) -> Error[Any]:
        work = self.work(local)
        if link.kind == "predicts":
            return Error(work.weighted, work.precision, noise=self._noise(local))
        if work.expected is not None:
            said = carrying.of_noise(work.expected, work.error[:, 0], work.precision.matrix)
            noise = local.message(link).noise
            assert noise is not None
            return noise_error(said, noise, self._of_width(local, noise) if noise.learned_width else None)
        return precision_error(work.precision, work.error, work.weighted)

    def energy(self, local: NodeContext) -> Energy:
        work = self.work(local)
        fit = (work.weighted * work.error).sum((1, 2))
        constant = local.belief.seen.sum(-1) * math.log(2 * math.pi)
        return Energy(accuracy=0.5 * (work.precision.log_det - fit - constant))

    def forecast_value(self, local: NodeContext, now: ForecastContext) -> Tensor | None:
        given = now.of("predicts")
        return sum(given[1:], given[0])

    @property
    def quantities(self) -> Mapping[str, Recordable]:
        shape = ("order", "dimension")
        return {
            "observation": Recordable(shape, lambda local: self.where_seen(local, local.belief.observation, torch.nan)),
            "prediction": Recordable(shape, lambda local: self.work(local).prediction),
            "error": Recordable(shape, lambda local: self.where_seen(local, self.work(local).error, torch.nan)),
            "weighted_error": Recordable(shape, lambda local: self.work(local).weighted),
        }

    def where_seen(self, local: NodeContext, values: Tensor, other: float) -> Tensor:
        """Values (B, orders, dim) as they are where there is something to see now, and else `other`."""
        if self.complete(local):
            return values
        rows = torch.arange(self.orders, device=values.device)[:, None]
        return torch.where(rows < local.belief.seen[:, None], values, other)

    def work(self, local: NodeContext) -> SensoryWork:
        """The sensory error and its weight; once for the same observation and messages."""
        observation, seen = local.belief

        def compute() -> SensoryWork:
            parts = [local.prediction(link) for link in local.links_above("predicts")]
            (link,) = local.links_above("weighs")
            prediction, precision = sum(parts[1:], parts[0]), local.prediction(link)
            error = self.where_seen(local, observation - prediction, 0.0)
            expected = local.message(local.links_above("predicts")[0]).expected
            if expected is not None:
                there = None if self.complete(local) else seen > 0
                sure = DensePrecision.of_covariance(expected.covariance, there)
                return SensoryWork(prediction, error, sure, sure.weigh(error), expected)
            if not self.complete(local):
                precision = local.once("precision of what is seen", partial(precision.observed, seen), precision, seen)
            return SensoryWork(prediction, error, precision, precision.weigh(error))

        return local.once("work", compute, observation, seen, *[local.prediction(link) for link in local.above])
