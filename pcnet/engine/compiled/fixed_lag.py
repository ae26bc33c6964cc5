"""Smoothing with a fixed lag in compiled code, at a cost for each observation that does not depend on the lag.

The smoothed belief L observations ago is the filtered one, moved through the last L steps back in time. Steps are
joined as in a queue of two stacks: `front` holds the joined steps from an earlier observation k back to each of those
before it, and one step, `back`, is all steps since k. An observation adds its step to `back`. Once the window has left
k behind, which is every L observations, `front` is made anew.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.engine.compiled.element_tick import ElementTick
from pcnet.engine.compiled.layout import Array, Layout, TickKind, slots
from pcnet.engine.compiled.run import WORD, Block, CompiledRun, address, width_for
from pcnet.engine.compiled.variants import Variants
from pcnet.engine.program import Program
from pcnet.model.digest import digest
from pcnet.model.protocols import SmoothingLayout, SmoothsBySteps
from pcnet.numerics.laplace import standard_deviations
from pcnet.numerics.smoothing import Steps
from pcnet.numerics.trees import spans
from pcnet.results.recorder import Record

KIND = TickKind((), False, False)
NOTHING = Record((), None, 1, False)
STEP, ROW, FRONT = "smoothing/step", "smoothing/row", "smoothing/front"
_TICKS, _STATE, _OTHER = WORD["ticks"], WORD["state"], WORD["other"]
_GIVEN, _GIVEN_STEP, _RECORD, _RECORD_STEP = (WORD[each] for each in ("given", "given_step", "record", "record_step"))


def _pack(steps: Steps) -> Tensor:
    """A step as one row, (B, v)."""
    return torch.cat([each.flatten(1) for each in steps], 1)


def _unpack(packed: Tensor, form: SmoothingLayout) -> Steps:
    n, batch = form.size, len(packed)
    offset, gain, rest = (packed[:, place] for place in spans([n * (1 + form.n_beside), n * n, n * n]))
    return Steps(offset.reshape(batch, n, -1), gain.reshape(batch, n, n), rest.reshape(batch, n, n))


def _standing(form: SmoothingLayout) -> Tensor:
    """The step that changes nothing, (1, v)."""
    n = form.size
    zeros = torch.zeros(1, n, n, dtype=torch.float64)
    return _pack(Steps(zeros.new_zeros(1, n, 1 + form.n_beside), torch.eye(n, dtype=zeros.dtype)[None], zeros))


class _StepLayout(Layout):
    """The memory: a step and a row; a row and another step are given."""

    def __init__(self, step: Tensor, row: Tensor) -> None:
        self.state, self.given = slots({STEP: step, ROW: row}), slots({ROW: row, FRONT: step})
        self.settings, self.record = [], []


class _Joining(ElementTick):
    """Work on steps of one batch element."""

    def __init__(self, node: SmoothsBySteps, form: SmoothingLayout, *args: Any) -> None:
        super().__init__(*args)
        self._node, self._form = node, form
        self._step, self._row = self.state[STEP], self.given[ROW]


class _Backwards(_Joining):
    """Add the step to the row before, at the end of the joined ones; recorded."""

    def _run(self) -> dict[str, Tensor]:
        step = self._node.backward_step(self.state[ROW], self._row, self._form)
        joined = _pack(step.joined(_unpack(self._step, self._form)))
        return {f"state/{STEP}": joined, f"state/{ROW}": self._row.clone(), f"record/{STEP}": joined.clone()}


class _Forwards(_Joining):
    """Add the step from the next row, at the beginning of the joined ones; mean, sd and covariance are recorded."""

    def _run(self) -> dict[str, Tensor]:
        form, node = self._form, self._node
        step = node.backward_step(self._row, self.state[ROW], form)
        back, front = _unpack(self._step, form).joined(step), _unpack(self.given[FRONT], form)
        mean, covariance = node.smoothed_by((back, front), self._row, form)
        found = {"mean": mean, "sd": standard_deviations(covariance), "covariance": covariance}
        made = {f"state/{STEP}": _pack(back), f"state/{ROW}": self._row.clone()}
        return made | {f"record/{name}": value for name, value in found.items()}


class _Rows:
    """Memory of rows of all batch elements, (T, groups, n, lanes)."""

    def __init__(self, count: int, groups: int, n: int, width: int) -> None:
        self.values: Array = np.zeros((count, groups, n, width))
        self._start, (self.step, self.group) = address(self.values), self.values.strides[:2]

    def at(self, row: int) -> int:
        """The address of a row."""
        return self._start + row * self.step


class _Loop:
    """One of the ticks above in compiled code, once for each of some rows.

    Args:
        run: Compiles it, and runs it where batch elements take different branches.
        most: Most rows at once.
    """

    def __init__(self, run: CompiledRun, most: int) -> None:
        self._run, self._function = run, run.function
        self._states = _Rows(2, run.groups, run.size, run.width)
        self._now = 0  # which of the two holds the state
        self._kinds, self._ones = np.full(most, run.number_of(KIND), np.uint8), np.ones(most, np.uint8)
        self._version = (-1, -1)
        self._words: list[tuple[memoryview, int]] = []

    @property
    def state(self) -> Array:
        """(groups, size, lanes)."""
        found: Array = self._states.values[self._now]
        return found

    def advance(self, count: int, given: _Rows, first: int, record: _Rows, into: int, by: int = 1) -> bool:
        """Take in rows first, first + by, … and record from row `into` on; False if it cannot be compiled."""
        if self._version != (self._run.version, self._run.variants.version):
            self._lay_out(given, record)
        begun = self.state.copy() if count > 1 else None
        states, now = self._states, self._now
        before, after, start, into_ = states.at(now), states.at(1 - now), given.at(first), record.at(into)
        for group, (words, place) in enumerate(self._words):
            if count > 1:
                words[_TICKS], words[_GIVEN_STEP], words[_RECORD_STEP] = count, by * given.step, by * record.step
            if group:
                before, after = before + states.group, after + states.group
                start, into_ = start + given.group, into_ + record.group
            words[_STATE], words[_OTHER], words[_GIVEN], words[_RECORD] = before, after, start, into_
            if self._function(place) != count:
                return self._compile(self.state if begun is None else begun, count, given, first, record, into, by)
        self._now = (now + count) % 2
        return True

    def _lay_out(self, given: _Rows, record: _Rows) -> None:
        """Find out where the code is, and what is derived from settings."""
        self._words = []
        for group in range(self._run.groups):
            rows = given.values[:, group], self._kinds, self._ones, record.values[:, group]
            words = self._run.words_for(*rows, group)
            self._words.append((words.data, address(words)))
        self._version = (self._run.version, self._run.variants.version)

    def _compile(self, begun: Array, count: int, given: _Rows, first: int, record: _Rows, into: int, by: int) -> bool:
        """The same from a state (groups, size, lanes), compiling what is missing."""
        run, places = self._run, [first + by * i for i in range(count)]
        rows = given.values[places].swapaxes(2, 3).reshape(count, run.groups * run.width, -1)[:, : run.batch]
        run.load_memory(begun.swapaxes(1, 2).reshape(run.groups * run.width, -1)[: run.batch])
        made, found = run.advance(Block(self._kinds[:count], np.ascontiguousarray(rows), self._ones[:count]))
        if made < count:
            return False
        self._states.values[0], self._now = run.grouped(run.memory()), 0
        for i, each in enumerate(found):
            record.values[into + by * i] = run.grouped(each)
        return True


class FixedLag:
    """The smoothed belief about one state of a program, so many observations ago.

    tick: the number of the observation that was taken in last; -1 if the next one needs the rows before as well.

    Args:
        program: The program.
        name: The state.
        lag: Number of observations, 1 or more.
        row: Any row, (B, w).
    """

    def __init__(self, program: Program, name: str, lag: int, row: Tensor) -> None:
        node, model, width = program.nodes[name], program.model, width_for(len(row))
        assert isinstance(node, SmoothsBySteps)
        self.form = form = node.smoothing_layout(program.bound[name])
        step = _standing(form)

        def run_of(kind: type[_Joining]) -> CompiledRun:
            key = (kind, name, row.shape[1:], str(row.dtype), width, digest(model), id(node))
            kept: dict[object, Variants] = model.compiled
            if key not in kept:
                layout = _StepLayout(step.to(row), row[:1])
                kept[key] = Variants(layout, width, NOTHING, make_tick=partial(kind, node, form))
            return CompiledRun(program, kept[key])

        forwards = run_of(_Forwards)
        self.lag, self.tick, self._run = lag, -1, forwards
        self._backwards, self._forwards = _Loop(run_of(_Backwards), max(1, lag - 1)), _Loop(forwards, 1)
        self._w, v, groups = row.shape[1], step.shape[1], forwards.groups
        self._rows = _Rows(2 * lag + 1, groups, self._w + v, width)  # with the step that is given beside each
        self._given_rows, self._given_steps = np.split(self._rows.values, [self._w], 2)
        self._front = _Rows(lag, groups, v, width)
        self._record = _Rows(1, groups, form.size * (form.size + 2), width)
        self._standing = step.numpy()[0, :, None]
        self._front.values[-1] = self._standing
        self._end = 0  # number of rows
        self._left = lag  # how many of the steps in front the window has left behind

    def start(self, rows: Tensor, tick: int) -> bool:
        """Start with the last lag + 1 rows (T, B, w), the last one that of observation `tick`."""
        self._end, self._left = 0, self.lag
        for row in rows[:-1].double().cpu().numpy():
            self._given_rows[self._end] = self._run.grouped(row)
            self._end += 1
        return self.add_all(rows[-1:], tick)

    def add_all(self, rows: Tensor, tick: int) -> bool:
        """Take in rows (T, B, w), the last one that of observation `tick`; False if compiled code cannot."""
        return all(self.add(self._run.grouped(row), tick) for row in rows.double().cpu().numpy())

    def add(self, row: Array, tick: int) -> bool:
        """Take in the row of observation `tick`, (groups, w, lanes), or (w, lanes) of a single group."""
        self.tick = -1  # until it has been taken in
        if self._left == self.lag and not self._renew_front():
            return False
        end = self._end
        self._given_rows[end], self._given_steps[end] = row, self._front.values[self._left]
        if not self._forwards.advance(1, self._rows, end, self._record, 0):
            return False
        self._end, self._left, self.tick = end + 1, self._left + 1, tick
        return True

    def _renew_front(self) -> bool:
        """Join the steps back from the last row."""
        rows, size = self._rows.values, self._w
        if self._end > self.lag:
            rows[: self.lag] = rows[self._end - self.lag : self._end].copy()
            self._end = self.lag
        last = rows[self._end - 1, :, :size]
        for loop in (self._backwards, self._forwards):
            loop.state[:, :-size], loop.state[:, -size:] = self._standing, last
        self._left = 0
        count = self.lag - 1
        return not count or self._backwards.advance(count, self._rows, self._end - 2, self._front, count - 1, -1)

    def moments(self) -> Array:
        """Mean, sd and covariance of all elements, one after the other, (B, n + n + n²)."""
        found = self._record.values[0].swapaxes(1, 2)
        made: Array = found.reshape(-1, found.shape[2])[: self._run.batch].copy()
        return made
