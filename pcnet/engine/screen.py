"""Screening: observations that cannot be right are judged before a model takes them in.

A channel rarely moves much further in one step than it has moved in any of the steps before. A value that does is taken
as missing. If the following values agree with it, it was a jump and not an outlier, and they are taken in again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcnet.engine.inputs import Observation

Array = NDArray[Any]
WINDOW = 64  # recent steps of a channel that are remembered
FURTHER = 4.0  # a value is implausible if it moves further than this many times the largest of these
FEW = 8  # steps that must be known before anything is judged
AGREEING = 8  # implausible values in a row that agree with each other are a jump, and taken in
PATIENCE = 64  # so many implausible values in a row are taken in whether they agree or not
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
        self.count = np.zeros((), dtype=np.int64)  # all implausible values
        self.ticks = np.zeros((), dtype=np.int64)
        self._reach = np.zeros(shape)  # the largest of the steps
        self._plain = False  # whether nothing is missing, and everything known

    FIELDS = (
        *("steps", "first", "last", "largest", "known", "waiting"),
        *("refused", "agreeing", "candidate", "count", "ticks"),
    )
    """What a checkpoint holds."""

    def judge(self, value: Array, gap: float) -> Array | None:
        """Which channels of a value (..., dim) are implausible; None for none. gap: sampling intervals since the last.

        NaN is a missing value. All fields are replaced, never changed, so that a shallow copy stays what it was.
        """
        with np.errstate(all="ignore"):
            step = np.abs(value - self.last)
            if gap == 1.0 and self._plain and (step <= FURTHER * self._reach).all():
                self.steps = self.steps.copy()
                self.steps[int(self.ticks) % WINDOW] = step
                self.ticks, self._reach = self.ticks + 1, self.steps.max(0)
                self.last, self.known = value, self.known + 1
                self.largest = np.maximum(self.largest, np.abs(value))
                return None
            return self._look(value, gap)

    def _look(self, value: Array, gap: float) -> Array | None:
        """Judge a value of which some channels are missing, not known well enough, or far off."""
        waiting = self.waiting + (gap - 1.0)
        step, limit = np.abs(value - self.last) / waiting, FURTHER * self._reach
        seen, fine = np.isfinite(value), (step <= limit) & (self.known > FEW)
        still = (self.steps == 0).sum(0) > min(int(self.ticks), WINDOW) / 2  # channels that mostly stand still
        wide = still & (np.abs(value) <= 10 * self.largest)
        agrees = np.abs(value - self.candidate) <= np.maximum(limit, 1e-9 * np.abs(value))
        again = seen & (self.refused > 0) & agrees
        self.agreeing = np.where(again, self.agreeing + 1, np.where(seen, 0, self.agreeing))
        patient = (self.agreeing + 1 >= AGREEING) | (self.refused + 1 >= PATIENCE)
        fine = seen & (fine | wide | (self.known <= FEW) | ((self.refused > 0) & patient))
        bad: Array = seen & ~fine
        moved = fine & (self.known > 0) & (self.refused == 0)  # a jump is no measure of steps to come
        self.steps = self.steps.copy()
        self.steps[int(self.ticks) % WINDOW] = np.where(moved & np.isfinite(step), step, 0.0)
        lost = fine & (self.refused + 1 >= PATIENCE)  # the channel has another scale now
        self.steps = np.where(lost, np.where(self.steps.max(0) > 0, step, self.steps), self.steps)
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
        self.count = self.count + bad.sum()
        self._plain = bool((self.known > FEW + 1).all() and (self.waiting == 1.0).all() and not self.refused.any())
        return bad if bad.any() else None

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

    def agree(self, values: Array, gaps: Array) -> int:
        """How many of the next values (T, ..., dim) are plausible without a closer look; they are taken in."""
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
        self.steps = self.steps.copy()
        for i in range(max(0, count - WINDOW), count):
            self.steps[(int(self.ticks) + i) % WINDOW] = steps[i]
        if count:
            self.ticks = self.ticks + count
            self._reach = self.steps.max(0)
            self.last = values[count - 1].copy()
            self.known = self.known + count
            self.largest = np.maximum(self.largest, np.abs(values[:count]).max(0))
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

    def one(self, observation: Observation, gap: float) -> Observation:
        """An observation with implausible values as NaN; gap: sampling intervals since the last one."""
        found = observation
        for name, value in observation.items():
            mine = self._of(name, tuple(value.shape))
            bad = None if mine is None else mine.judge(value.numpy().astype(np.float64), gap)
            if bad is not None:
                found = {**found, name: torch.where(torch.from_numpy(bad), torch.nan, value)}
        return found

    def _of(self, name: str, shape: tuple[int, ...]) -> ChannelScreen | None:
        mine = self.nodes.setdefault(name, ChannelScreen(shape))
        return mine if mine.shape == shape else None

    def series(self, series: Mapping[str, Tensor], gaps: Array) -> dict[str, Tensor]:
        """Observations (T, ..., dim) with implausible values as NaN, as if they came one by one."""
        found = dict(series)
        for name, value in series.items():
            mine = self._of(name, tuple(value.shape[1:]))
            if mine is None:
                continue
            values, done, bad = value.numpy().astype(np.float64), 0, list[tuple[int, Array]]()
            while done < len(values):
                done += mine.agree(values[done : done + 256], gaps[done : done + 256])
                if done < len(values):
                    judged = mine.judge(values[done], float(gaps[done]))
                    bad += [] if judged is None else [(done, judged)]
                    done += 1
            if bad:
                found[name] = value.clone()
                for place, where in bad:
                    found[name][place][torch.from_numpy(where)] = torch.nan
        return found

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
            mine._plain = bool((mine.known > FEW + 1).all() and (mine.waiting == 1.0).all() and not mine.refused.any())
        return made
