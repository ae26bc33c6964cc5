"""Screening: observations that are implausible are judged before a model takes them in.

A value is implausible if its channel has moved much further since the last one than in any recent step, and if the
model's predictive distribution does not allow for it either. It is taken as missing until the next values decide. If
they come back, it was an outlier. If they stay with it, it was a jump, and they are taken in: the further the jump is
from all values so far, the more of them it takes. A channel that is known to jump is believed at once. Steps of a
value that stood alone are no measure of those to come, so that outliers do not hide each other. A channel that is known
for them has tighter limits; where they are many, they are the noise, and are taken in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcnet.engine.inputs import Observation

Array = NDArray[Any]
Foresees = Callable[[], Mapping[str, Array]]
"""Which values of an observation the predictive distribution of the model allows for, by node, (..., dim)."""
WINDOW = 64  # recent steps of a channel that are remembered
FURTHER = 2.0  # a value is implausible if it moves further than this many times the largest of these
UNUSUAL = 1.4  # a step that is larger than so many times the largest is remembered only if the next value confirms it
FEW = 8  # steps that must be known before anything is judged
EVIDENCE = 1.0  # values beyond the first that must agree with a jump, for each decade that it is further than usual
AGREEING = 8  # values in a row that are refused at most
LEAP = 3.0  # steps up to so many times a jump are plausible after it
FADING = 0.8  # they become smaller by this factor with each observation
KNOWN = 1  # a channel that jumps is one with so many more jumps than outliers
DOUBTED = -2  # a channel with outliers is one where these lead by so many: limits are tighter, and the predictive
# distribution, which outliers have widened, does not count
RARE = 0.125  # but more than this share of all values are no outliers
HIGHER = 5.0  # it may jump so many times as far as before
MOST = 3  # the most by which jumps or outliers lead, so that a channel can change its habits
START = 20.0  # a first value is implausible if it is further than so many typical steps from the others


class ChannelScreen:
    """The recent past of the channels of one sensory node, (..., dim)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.steps = np.full((WINDOW, *shape), np.nan)  # sizes of the last steps, NaN where none was taken
        self.first = np.full((FEW + 1, *shape), np.nan)  # the first values
        self.last = np.full(shape, np.nan)  # the last value that was taken in
        self.lowest = np.full(shape, np.inf)  # the range of the values so far, without those that stood alone
        self.highest = np.full(shape, -np.inf)
        self.known = np.zeros(shape, dtype=np.int64)  # values that were taken in
        self.waiting = np.ones(shape)  # sampling intervals since the last of them
        self.refused = np.zeros(shape, dtype=np.int64)  # implausible values in a row
        self.agreeing = np.zeros(shape, dtype=np.int64)  # those of them that agree with the one before
        self.candidate = np.full(shape, np.nan)  # the last implausible value
        self.leap = np.zeros(shape)  # the size of steps that the last jump makes plausible
        self.jump = np.zeros(shape)  # the largest jump so far
        self.jumps = np.zeros(shape, dtype=np.int64)  # jumps, less outliers
        self.marked = np.zeros((WINDOW, *shape), dtype=bool)  # recent values that were implausible or stood alone
        self.origin = np.full(shape, np.nan)  # where the last step came from, if it was unusual
        self.leaping = np.zeros(shape, dtype=bool)  # whether it was a jump that was believed at once
        self.count = np.zeros((), dtype=np.int64)  # all implausible values
        self.ticks = np.zeros((), dtype=np.int64)
        self._reach = np.zeros(shape)  # the largest of the steps
        self._plain = False  # whether nothing is missing, and everything known

    FIELDS = (
        *("steps", "first", "last", "lowest", "highest", "known", "waiting"),
        *("refused", "agreeing", "candidate", "leap", "jump", "jumps", "marked", "origin", "leaping", "count", "ticks"),
    )
    """What a checkpoint holds."""

    def implausible(self, value: Array, gap: float) -> Array | None:
        """Which channels of a value (..., dim) have moved too far; None for none. gap: sampling intervals since the
        last one. NaN is a missing value."""
        with np.errstate(all="ignore"):
            step = np.abs(value - self.last)
            if gap == 1.0 and self._plain and (step <= UNUSUAL * self._reach).all():
                return None
            step = step / (self.waiting + (gap - 1.0))
            still = (self.steps == 0).sum(0) > np.isfinite(self.steps).sum(0) / 2  # channels that mostly stand still
            wide = still & (np.abs(value) <= 10 * np.maximum(-self.lowest, self.highest))
            fine = (step <= self._limit) | wide | self._usual(step) | (self.known <= FEW)
            far: Array = np.isfinite(value) & ~fine
        return far if far.any() else None

    def _usual(self, step: Array) -> Array:
        """Which steps are such as the channel is known to take."""
        return (self.jumps >= KNOWN) & (step <= HIGHER * self.jump)

    @property
    def has_outliers(self) -> Array:
        """Which channels are known for outliers."""
        return (self.jumps <= DOUBTED) & self._are_rare

    @property
    def _are_rare(self) -> Array:
        """Where values that are implausible or stand alone are few; where they are many, they are the noise."""
        found: Array = self.marked.sum(0) < RARE * WINDOW
        return found

    def _within(self, value: Array, margin: Array) -> Array:
        """Which values lie in the range of those so far, or no further from it than this."""
        found: Array = (value >= self.lowest - margin) & (value <= self.highest + margin)
        return found

    @property
    def _limit(self) -> Array:
        """The size of steps that are plausible."""
        return np.maximum(np.where(self.has_outliers, UNUSUAL, FURTHER) * self._reach, self.leap)

    def judge(self, value: Array, gap: float, far: Array | None = None) -> Array | None:
        """Take in a value (..., dim), but for those implausible channels that are to wait; these, or None for none.

        Args:
            value: The value. All fields are replaced, never changed, so that a shallow copy stays what it was.
            gap: Sampling intervals since the last one.
            far: What `implausible` has found, less what the model allows for.
        """
        with np.errstate(all="ignore"):
            step = np.abs(value - self.last)
            if far is None and gap == 1.0 and self._plain and (step <= UNUSUAL * self._reach).all():
                self._take(value[None], step[None])
                return None
            return self._look(value, gap, np.zeros(self.shape, dtype=bool) if far is None else far)

    def _look(self, value: Array, gap: float, far: Array) -> Array | None:
        """Judge a value of which some channels are missing, not known well enough, or far off."""
        waiting = self.waiting + (gap - 1.0)
        distance = np.abs(value - self.last)
        seen, step = np.isfinite(value), distance / waiting
        stays = seen & (self.refused > 0) & (np.abs(value - self.candidate) < distance)
        again = far & stays
        self.agreeing = np.where(again, self.agreeing + 1, np.where(seen, 0, self.agreeing))
        decades = np.log10(np.maximum(1.0, distance / np.maximum(self._limit, np.finfo(np.float64).tiny)))
        near = (distance <= HIGHER * self.jump) | self._within(value, self._reach)
        needed = np.where(near, 1, 1 + np.floor(EVIDENCE * decades))
        noise = ~self._are_rare & self._within(value, HIGHER * (self.highest - self.lowest))
        jumped = far & ((self.agreeing >= needed) | (self.refused >= AGREEING) | noise)
        bad: Array = far & ~jumped
        fine = seen & ~bad
        jumped |= fine & stays  # plausible because the last one is old, or the model allows for it by now
        back = fine & ~jumped & (self.refused > 0)
        alone = fine & (2 * np.abs(value - self.origin) < np.minimum(np.abs(self.last - self.origin), distance))
        alone &= self._are_rare
        sudden = fine & ~far & ~alone & (self.refused == 0) & (self.known > FEW) & (step > self._limit)
        moved = (
            fine & (self.known > 0) & (self.refused == 0) & ~sudden & ~alone
        )  # jumps are no measure of steps to come
        self.steps, self.marked = self.steps.copy(), self.marked.copy()
        self.marked[int(self.ticks) % WINDOW] = bad | alone
        self.steps[int(self.ticks) % WINDOW] = np.where(moved & np.isfinite(step), step, np.nan)
        self.steps[int(self.ticks - 1) % WINDOW][alone] = np.nan
        self.ticks = self.ticks + 1
        if (self.known <= FEW).any():
            places = np.arange(FEW + 1).reshape(-1, *(1,) * len(self.shape))
            self.first = np.where(fine & (self.known == places), value, self.first)
        confirmed = self.leaping & fine & ~alone
        withdrawn = back | (alone & (self.leaping | (self.known > WINDOW // 2)))  # earlier, larger steps are usual
        self.origin = np.where(fine & (self.known > FEW) & (step > UNUSUAL * self._reach) & ~alone, self.last, np.nan)
        self.leaping = sudden
        jumped |= sudden
        self._reach = np.fmax.reduce(self.steps, initial=0.0)
        self.last = np.where(fine, value, self.last)
        self.waiting = np.where(fine, 1.0, waiting + 1.0)
        self.known = self.known + fine
        usual = fine & np.isnan(self.origin)
        self.lowest = np.where(usual, np.minimum(self.lowest, value), self.lowest)
        self.highest = np.where(usual, np.maximum(self.highest, value), self.highest)
        self.candidate = np.where(bad, value, self.candidate)
        self.refused = np.where(fine, 0, self.refused + bad)
        self.leap = np.where(jumped, LEAP * distance, FADING * self.leap)
        self.jump = np.where(jumped, np.maximum(self.jump, distance), self.jump)
        change = (jumped & ~sudden).astype(np.int64) + confirmed - withdrawn
        self.jumps = np.clip(self.jumps + change, -MOST, MOST)
        self.count = self.count + bad.sum()
        self._settle()
        return bad if bad.any() else None

    def _settle(self) -> None:
        """Find out whether the next value can be judged by its step alone."""
        self.leap = np.where(self.leap > self._reach, self.leap, 0.0)
        known = bool((self.known > FEW + 1).all() and (self.waiting == 1.0).all())
        self._plain = known and not (self.refused.any() or self.leap.any() or np.isfinite(self.origin).any())

    def _take(self, values: Array, steps: Array) -> None:
        """Take in values (T, ..., dim) and their steps, all of which are plausible."""
        count = len(values)
        self.steps, self.marked = self.steps.copy(), self.marked.copy()
        for i in range(max(0, count - WINDOW), count):
            self.steps[(int(self.ticks) + i) % WINDOW] = steps[i]
            self.marked[(int(self.ticks) + i) % WINDOW] = False
        self.ticks = self.ticks + count
        self._reach = np.fmax.reduce(self.steps, initial=0.0)
        self.last = values[-1].copy()
        self.known = self.known + count
        self.lowest = np.minimum(self.lowest, values.min(0))
        self.highest = np.maximum(self.highest, values.max(0))

    def suspects(self) -> Array | None:
        """Which of the first values (FEW + 1, ..., dim) are implausible, once all of a channel are known; else None."""
        ready = self.known == FEW + 1
        if not ready.any():
            return None
        with np.errstate(all="ignore"):
            steps = np.median(np.abs(np.diff(self.first, axis=0)), 0)
            far = np.abs(self.first - np.median(self.first, 0)) > START * steps
        bad: Array = far & ready & (steps > 0)
        if not bad.any():
            return None
        good = np.where(bad, np.nan, self.first)
        sizes = np.abs(np.diff(good, axis=0))
        self.steps = np.where(bad.any(0), np.nan, self.steps)
        for i in range(FEW):
            place = int(self.ticks - FEW + i) % WINDOW
            self.steps[place] = np.where(bad.any(0), sizes[i], self.steps[place])
        self.lowest = np.where(bad.any(0), np.nanmin(good, 0), self.lowest)
        self.highest = np.where(bad.any(0), np.nanmax(good, 0), self.highest)
        self.last = np.where(bad[-1], np.nanmedian(good, 0), self.last)
        self._reach = np.fmax.reduce(self.steps, initial=0.0)
        self.count = self.count + bad.sum()
        return bad

    def clear(self, values: Array, gaps: Array) -> int:
        """How many of the next values (T, ..., dim) are plausible; they are taken in."""
        done = 0
        while done < len(values):
            done += self._clear_steps(values[done : done + 256], gaps[done : done + 256])
            if done < len(values):
                gap = float(gaps[done])
                if self.implausible(values[done], gap) is not None:
                    break
                self.judge(values[done], gap)
                done += 1
        return done

    def _clear_steps(self, values: Array, gaps: Array) -> int:
        """How many of the next values are plausible by their steps alone; they are taken in."""
        if not self._plain:
            return 0
        with np.errstate(all="ignore"):
            spans = gaps.reshape(-1, *(1,) * len(self.shape)) * np.ones(self.shape)
            steps = np.abs(np.diff(values, axis=0, prepend=self.last[None])) / spans
            past = np.concatenate([np.roll(self.steps, -int(self.ticks) % WINDOW, 0), steps])
            largest, width = past, 1
            while width < WINDOW:  # the largest of the last `width` steps
                largest = np.fmax(largest[width:], largest[:-width])
                width *= 2
            fine = (steps <= UNUSUAL * largest[: len(steps)]).reshape(len(steps), -1).all(1)
        count = len(steps) if fine.all() else int(np.argmin(fine))
        if count:
            self._take(values[:count], steps[:count])
        return count


class Suspects(NamedTuple):
    """Implausible first values by node, (FEW + 1, ..., dim), NaN for others; their number for each batch element."""

    values: Mapping[str, Array]
    counts: Array

    def remove(self, observation: Observation) -> Observation:
        """An observation with these values as NaN."""
        found = dict(observation)
        for name, bad in self.values.items():
            if name in found:
                hit = (found[name].numpy() == bad).any(0)
                found[name] = torch.where(torch.from_numpy(hit), torch.nan, found[name])
        return found


class Screen:
    """Screens the observations of a session, by sensory node."""

    def __init__(self) -> None:
        self.nodes: dict[str, ChannelScreen] = {}

    def one(self, observation: Observation, gap: float, foresees: Foresees) -> Observation:
        """An observation with implausible values as NaN.

        Args:
            observation: The observation.
            gap: Sampling intervals since the last one.
            foresees: Asks the model; called only if a value is far off.
        """
        found, allowed = observation, None
        for name, value in observation.items():
            mine = self._of(name, tuple(value.shape))
            if mine is None:
                continue
            given = value.numpy().astype(np.float64)
            far = mine.implausible(given, gap)
            if far is not None:
                allowed = foresees() if allowed is None else allowed
                far = far & ~(allowed.get(name, np.zeros((), dtype=bool)) & ~mine.has_outliers)
            bad = mine.judge(given, gap, far)
            if bad is not None:
                found = {**found, name: torch.where(torch.from_numpy(bad), torch.nan, value)}
        return found

    def _of(self, name: str, shape: tuple[int, ...]) -> ChannelScreen | None:
        mine = self.nodes.setdefault(name, ChannelScreen(shape))
        return mine if mine.shape == shape else None

    def clear(self, series: Mapping[str, Tensor], gaps: Array) -> int:
        """How many of the next observations (T, ..., dim) are plausible without asking the model; they are taken in."""
        before, values, count = dict(self.nodes), dict[str, Array](), len(gaps)
        for name, value in series.items():
            mine = self._of(name, tuple(value.shape[1:]))
            if mine is not None:
                before[name], values[name] = mine, value.numpy().astype(np.float64)
                self.nodes[name] = copy.copy(mine)
                count = min(count, self.nodes[name].clear(values[name][:count], gaps[:count]))
        for name, each in values.items():
            if int(self.nodes[name].ticks - before[name].ticks) > count:  # another node has something implausible
                self.nodes[name] = copy.copy(before[name])
                self.nodes[name].clear(each[:count], gaps[:count])
        return count

    def copy(self) -> Screen:
        """A screen with the same past."""
        made = Screen()
        made.nodes = {name: copy.copy(mine) for name, mine in self.nodes.items()}
        return made

    @property
    def settled(self) -> bool:
        """Whether no more channels will be found to have begun with implausible values."""
        return bool(self.nodes) and all(
            mine.ticks >= WINDOW or bool((mine.known > FEW + 1).all()) for mine in self.nodes.values()
        )

    def suspects(self, shape: tuple[int, ...]) -> Suspects | None:
        """First observations that turn out to be implausible; None for none. shape: batch dimensions."""
        values, counts = dict[str, Array](), np.zeros(shape, dtype=np.int64)
        for name, mine in self.nodes.items():
            first, bad = mine.first, mine.suspects()
            if bad is not None:
                values[name] = np.where(bad, first, np.nan)
                counts = np.maximum(counts, bad.any(-1).sum(0))
        return Suspects(values, counts) if values else None

    @property
    def count(self) -> int:
        """Number of values that were taken as missing."""
        return sum(int(mine.count) for mine in self.nodes.values())

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, for a checkpoint."""
        return {
            f"screen/{name}/{field}": torch.from_numpy(np.array(getattr(mine, field)))
            for name, mine in self.nodes.items()
            for field in ChannelScreen.FIELDS
        }

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Screen:
        """The screen that `tensors` gave; what belongs to it is taken out. KeyError if something does not fit."""
        made = cls()
        for path in [path for path in tensors if path.startswith("screen/") and path.endswith("/last")]:
            name = path.removeprefix("screen/").removesuffix("/last")
            mine = made.nodes[name] = ChannelScreen(tuple(tensors[path].shape))
            for field in ChannelScreen.FIELDS:
                value, like = tensors.pop(f"screen/{name}/{field}").numpy(), getattr(mine, field)
                if value.shape != like.shape or value.dtype != like.dtype:
                    raise KeyError(f"screen/{name}/{field}")
                setattr(mine, field, value.copy())
            mine._reach = np.fmax.reduce(mine.steps, initial=0.0)
            mine._settle()
        return made
