"""Screening: observations that are implausible are judged before a model takes them in.

A value is implausible if its channel has moved much further since the last one than in any recent step, and if the
model's predictive distribution does not allow for it either. It is taken as missing until the next values decide. If
they come back, it was an outlier. If they stay with it, it was a jump, and they are taken in: the further the jump, the
more of them it takes. A channel that is known to jump is believed at once.
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
FURTHER = 2.5  # a value is implausible if it moves further than this many times the largest of these
FEW = 8  # steps that must be known before anything is judged
EVIDENCE = 1.5  # values beyond the first that must agree with a jump, for each decade that it is further than usual
AGREEING = 8  # values in a row that are refused at most
FADING = 0.8  # the steps that are plausible because of a jump become smaller by this factor with each observation
KNOWN = 2  # a channel that jumps is one with so many more jumps than outliers
START = 20.0  # a first value is implausible if it is further than so many typical steps from the others


class ChannelScreen:
    """The recent past of the channels of one sensory node, (..., dim)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.steps = np.zeros((WINDOW, *shape))  # sizes of the last steps, 0 where none was taken
        self.first = np.full((FEW + 1, *shape), np.nan)  # the first values
        self.last = np.full(shape, np.nan)  # the last value that was taken in
        self.largest = np.zeros(shape)  # the largest size of a value so far
        self.known = np.zeros(shape, dtype=np.int64)  # values that were taken in
        self.waiting = np.ones(shape)  # sampling intervals since the last of them
        self.refused = np.zeros(shape, dtype=np.int64)  # implausible values in a row
        self.agreeing = np.zeros(shape, dtype=np.int64)  # those of them that agree with the one before
        self.candidate = np.full(shape, np.nan)  # the last implausible value
        self.leap = np.zeros(shape)  # the size of steps that the last jump makes plausible
        self.jump = np.zeros(shape)  # the largest jump so far
        self.jumps = np.zeros(shape, dtype=np.int64)  # jumps, less outliers
        self.count = np.zeros((), dtype=np.int64)  # all implausible values
        self.ticks = np.zeros((), dtype=np.int64)
        self._reach = np.zeros(shape)  # the largest of the steps
        self._plain = False  # whether nothing is missing, and everything known

    FIELDS = (
        *("steps", "first", "last", "largest", "known", "waiting"),
        *("refused", "agreeing", "candidate", "leap", "jump", "jumps", "count", "ticks"),
    )
    """What a checkpoint holds."""

    def implausible(self, value: Array, gap: float) -> Array | None:
        """Which channels of a value (..., dim) have moved too far; None for none. gap: sampling intervals since the
        last one. NaN is a missing value."""
        with np.errstate(all="ignore"):
            step = np.abs(value - self.last)
            if gap == 1.0 and self._plain and (step <= FURTHER * self._reach).all():
                return None
            step = step / (self.waiting + (gap - 1.0))
            still = (self.steps == 0).sum(0) > min(int(self.ticks), WINDOW) / 2  # channels that mostly stand still
            wide = still & (np.abs(value) <= 10 * self.largest)
            usual = (self.jumps >= KNOWN) & (step <= FURTHER * self.jump)
            fine = (step <= self._limit) | wide | usual | (self.known <= FEW)
            far: Array = np.isfinite(value) & ~fine
        return far if far.any() else None

    @property
    def _limit(self) -> Array:
        """The size of steps that are plausible."""
        return np.maximum(FURTHER * self._reach, self.leap)

    def judge(self, value: Array, gap: float, far: Array | None = None) -> Array | None:
        """Take in a value (..., dim), but for those implausible channels that are to wait; these, or None for none.

        Args:
            value: The value. All fields are replaced, never changed, so that a shallow copy stays what it was.
            gap: Sampling intervals since the last one.
            far: What `implausible` has found, less what the model allows for.
        """
        with np.errstate(all="ignore"):
            if far is None and gap == 1.0 and self._plain and np.isfinite(value).all():
                self._take(value[None], np.abs(value - self.last)[None])
                return None
            return self._look(value, gap, np.zeros(self.shape, dtype=bool) if far is None else far)

    def _look(self, value: Array, gap: float, far: Array) -> Array | None:
        """Judge a value of which some channels are missing, not known well enough, or far off."""
        waiting = self.waiting + (gap - 1.0)
        distance = np.abs(value - self.last)
        seen, step = np.isfinite(value), distance / waiting
        again = far & (self.refused > 0) & (np.abs(value - self.candidate) < distance)
        self.agreeing = np.where(again, self.agreeing + 1, np.where(seen, 0, self.agreeing))
        decades = np.log10(np.maximum(1.0, distance / np.maximum(self._limit, np.finfo(np.float64).tiny)))
        needed = np.where(distance <= FURTHER * self.jump, 1, 1 + np.floor(EVIDENCE * decades))
        jumped = far & ((self.agreeing >= needed) | (self.refused >= AGREEING))
        bad: Array = far & ~jumped
        fine = seen & ~bad
        jumped |= fine & (self.refused > 1) & (distance > self._limit)  # plausible only because the last one is old
        back = fine & ~jumped & (self.refused > 0)
        moved = fine & (self.known > 0) & (self.refused == 0)  # a jump is no measure of steps to come
        self.steps = self.steps.copy()
        self.steps[int(self.ticks) % WINDOW] = np.where(moved & np.isfinite(step), step, 0.0)
        self.ticks = self.ticks + 1
        if (self.known <= FEW).any():
            places = np.arange(FEW + 1).reshape(-1, *(1,) * len(self.shape))
            self.first = np.where(fine & (self.known == places), value, self.first)
        self._reach = self.steps.max(0)
        self.last = np.where(fine, value, self.last)
        self.waiting = np.where(fine, 1.0, waiting + 1.0)
        self.known = self.known + fine
        self.largest = np.maximum(self.largest, np.where(fine, np.abs(value), 0.0))
        self.candidate = np.where(bad, value, self.candidate)
        self.refused = np.where(fine, 0, self.refused + bad)
        self.leap = np.where(jumped, FURTHER * distance, FADING * self.leap)
        self.jump = np.where(jumped, np.maximum(self.jump, distance), self.jump)
        self.jumps = self.jumps + jumped - back
        self.count = self.count + bad.sum()
        self._settle()
        return bad if bad.any() else None

    def _settle(self) -> None:
        """Find out whether the next value can be judged by its step alone."""
        self.leap = np.where(self.leap > self._reach, self.leap, 0.0)
        known = bool((self.known > FEW + 1).all() and (self.waiting == 1.0).all())
        self._plain = known and not self.refused.any() and not self.leap.any()

    def _take(self, values: Array, steps: Array) -> None:
        """Take in values (T, ..., dim) and their steps, all of which are plausible."""
        count = len(values)
        self.steps = self.steps.copy()
        for i in range(max(0, count - WINDOW), count):
            self.steps[(int(self.ticks) + i) % WINDOW] = steps[i]
        self.ticks = self.ticks + count
        self._reach = self.steps.max(0)
        self.last = values[-1].copy()
        self.known = self.known + count
        self.largest = np.maximum(self.largest, np.abs(values).max(0))

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
        sizes = np.nan_to_num(np.abs(np.diff(good, axis=0)))
        self.steps = np.where(bad.any(0), 0.0, self.steps)
        for i in range(FEW):
            place = int(self.ticks - FEW + i) % WINDOW
            self.steps[place] = np.where(bad.any(0), sizes[i], self.steps[place])
        self.largest = np.where(bad.any(0), np.nanmax(np.abs(good), 0), self.largest)
        self.last = np.where(bad[-1], np.nanmedian(good, 0), self.last)
        self._reach = self.steps.max(0)
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
                largest = np.maximum(largest[width:], largest[:-width])
                width *= 2
            fine = (steps <= FURTHER * largest[: len(steps)]).reshape(len(steps), -1).all(1)
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
                far = far & ~allowed.get(name, np.zeros((), dtype=bool))
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
            mine._reach = mine.steps.max(0)
            mine._settle()
        return made
