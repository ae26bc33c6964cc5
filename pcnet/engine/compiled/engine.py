"""The compiled engine of a run: observations and times in, blocks of ticks out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcnet.engine.clock import Clock, Interval
from pcnet.engine.compiled.element import varying_settings
from pcnet.engine.compiled.errors import UntraceableError
from pcnet.engine.compiled.layout import Array, Layout, TickKind
from pcnet.engine.compiled.manifest import identity
from pcnet.engine.compiled.run import Block, CompiledRun, width_for
from pcnet.engine.compiled.variants import Variants
from pcnet.engine.program import Program
from pcnet.engine.state import GraphState, NodeStates
from pcnet.errors import SettingError
from pcnet.model.context import ROUNDING
from pcnet.model.digest import digest
from pcnet.model.model import Model
from pcnet.model.node import BatchSpec
from pcnet.numerics.trees import flatten, unflatten
from pcnet.results.recorder import Record

BLOCK_BYTES = 2**25
"""Most memory of the record of a block."""
MAX_BLOCK = 8192
"""Most observations of a block; between blocks progress is shown and interrupts are obeyed."""


MOST_KEPT = 256
"""Batch elements up to which a program is kept for other sessions."""


class Advanced(NamedTuple):
    """Where a block has led: the clock after it, and the last time step, None for the sampling interval."""

    ticks: int
    clock: Clock
    elapsed: float | None
    times: list[float]
    record: dict[str, Tensor]


class Series(NamedTuple):
    """Observations of all sensory nodes, (T, n) for all batch elements or (T, B, n), and their times (T,)."""

    values: Array
    times: Array | None

    def __len__(self) -> int:
        return len(self.values)


class Known(NamedTuple):
    """What an engine found out of its run: the digest of the model, and the settings that differ over the batch.

    programs: the model bound to small batches, which sessions share.
    """

    about: str
    settings: Mapping[str, Tensor]
    programs: dict[tuple[BatchSpec, bool], Program]

    def with_rows(self, batch: int, rows: int) -> Known:
        """The same for another number of rows of `batch` elements each, all rows being alike."""
        each = {name: value[:batch].repeat(rows, *(1,) * (value.dim() - 1)) for name, value in self.settings.items()}
        return self._replace(settings=each)

    def program(self, model: Model, spec: BatchSpec, smooth: bool) -> Program:
        """The same model bound to a batch; see `Program`."""
        found = self.programs.get((spec, smooth))
        if found is None:
            found = Program(model, spec, smooth)
            if spec.batch <= MOST_KEPT:
                self.programs[spec, smooth] = found
        return found


def compiled_engine(program: Program, interval: Interval, record: Record, known: Known | None = None) -> CompiledEngine:
    """The compiled engine for a run; known: what is known of it already.

    Raises:
        UntraceableError: If the model cannot be compiled, with the reason.
    """
    if program.zeros.device.type != "cpu":
        raise UntraceableError(f"compiled code runs on the cpu, not on {program.zeros.device}")
    model = program.model
    if known is None:
        try:
            about, varying = digest(model), varying_settings(program)
        except SettingError as error:
            raise UntraceableError(str(error)) from None
        known = Known(about, varying, {})
        if program.spec.batch <= MOST_KEPT:
            model.compiled["known", program.spec, program.smooth, *_nodes(model)] = known
    about, settings, _ = known
    width = width_for(program.spec.batch)
    details = (
        str(program.zeros.dtype),
        width,
        tuple(settings),
        (record.quantities, record.nodes, record.messages),
        tuple(sorted(program.counted_once)),
        program.smooth,
    )
    key = (*details, about, *_nodes(model))
    kept: dict[object, Variants] = model.compiled
    variants = kept.get(key)
    if variants is None or not variants.is_valid:
        variants = kept[key] = Variants(Layout(program, settings), width, record, identity(model, about, details))
    return CompiledEngine(program, interval, variants, known)


def known_before(model: Model, spec: BatchSpec, smooth: bool) -> Known | None:
    """What an earlier session has found out, if the model is still the same."""
    known: Known | None = model.compiled.get(("known", spec, smooth, *_nodes(model)))
    return known if known is not None and known.about == digest(model) else None


def _nodes(model: Model) -> tuple[int, ...]:
    """The nodes of a model by identity: they, and weights of modules, may be others than in an earlier session."""
    return tuple(map(id, model.graph.nodes.values()))


class CompiledEngine:
    """Takes in blocks of observations of one run."""

    def __init__(self, program: Program, interval: Interval, variants: Variants, known: Known) -> None:
        self.program, self.interval, self.variants = program, interval, variants
        self.known, self.settings = known, known.settings
        self.run = CompiledRun(program, variants)
        self.compiled_ticks = 0
        self.copy_of: NDArray[np.int64] | None = None
        """The batch element (B,) that each one is a copy of from the next state on; itself, or one of which that is so.
        None if there are no copies. They are run once."""
        self._stopped: NDArray[np.int64] | None = None
        self._places: NDArray[np.int64] | None = None  # among those that are run, (B,); None if all are
        self._codes: dict[int, int] = {}

    @property
    def given_up(self) -> str | None:
        """Why nothing of the model can be compiled, once that is certain."""
        if any(not variant.kind.first for variant in self.variants.all):
            return None
        found = [reasons for kind, reasons in self.variants.reasons.items() if not kind.first and len(reasons) > 1]
        return found[0][0] if found else None

    def load(self, state: GraphState) -> None:
        """Take over a state. Batch elements that have stopped are left out from here on."""
        self._before = state
        self._elapsed: list[Array] = []
        running = state.running.cpu().numpy()
        elements = self._choose(running)
        if len(elements):
            self.run.load(state.tensors(), self.settings, elements)

    def _choose(self, running: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The batch elements that are run: all that have not stopped, less copies if that makes fewer vectors."""
        self._stopped = None if running.all() else np.flatnonzero(~running)
        own, alone = np.arange(len(running)), running
        if self.copy_of is not None:
            own = np.where(running[self.copy_of], self.copy_of, own)
            alone = running & (own == np.arange(len(running)))
            if -(-alone.sum() // self.run.width) == -(-running.sum() // self.run.width):
                own, alone = np.arange(len(running)), running
        self._places = None if alone.all() else (np.cumsum(alone) - 1).clip(0)[own]
        return np.flatnonzero(alone)

    def copy_elements(self, other: CompiledEngine, index: NDArray[np.int64]) -> bool:
        """Take over copies of batch elements of another engine (or of this one); False if some of them have stopped."""
        if other._stopped is not None:
            return False
        memory = other.run.memory()
        places = index if other._places is None else other._places[index]
        if self is not other:
            self._before, self._elapsed = self.program.initial, []
            self.run.load_settings(self.settings)
        elements = self._choose(np.ones(len(index), dtype=bool))
        self.run.change_elements(memory[places[elements]], self.settings, elements)
        return True

    def state(self) -> GraphState:
        """The state after the observations that were taken in since `load`."""
        whole = {name: self._of_all(value) for name, value in self.run.tensors().items()}
        if self._stopped is None:
            return self._before.with_tensors(whole)
        running = self._before.running
        for name, value in self._before.tensors().items():
            whole[name] = whole[name].to(value)
            whole[name][~running] = value[~running]
        time = whole["time"]
        for dt in np.concatenate(self._elapsed).tolist() if self._elapsed else ():
            time = torch.where(running, time, time + (self.program.interval if math.isnan(dt) else dt))
        last = self._elapsed[-1][-1] if self._elapsed else math.nan
        dt = self.program.interval if math.isnan(last) else torch.full_like(self.program.interval, last)
        whole |= {"time": time, "dt": dt}
        for name in ("accuracy", "complexity", "sum_accuracy", "sum_complexity"):
            whole[name] = torch.where(running, whole[name], torch.nan)
        return self._before.with_tensors(whole)

    def _of_all(self, value: Tensor) -> Tensor:
        """A tensor of all batch elements from one of those that are run; anything for those that have stopped."""
        return value if self._places is None else value[torch.from_numpy(self._places)]

    def node_state(self, name: str) -> Any:
        """The present state of a node."""
        before = flatten(self._before.nodes[name], name)
        made = {path: self._of_all(value) for path, value in self.run.node_tensors(name).items()}
        if self._stopped is not None:
            for path, value in made.items():
                value[self._stopped] = before[path][self._stopped].to(value)
        return unflatten(self.program.initial.nodes[name], name, made)

    def replace_nodes(self, nodes: NodeStates) -> None:
        """Replace the present states of some nodes."""
        if self._stopped is not None:
            self._before = self._before._replace(nodes={**self._before.nodes, **nodes})
        for name, state in nodes.items():
            tensors = flatten(state, name)
            if self._places is not None:
                tensors = {path: value[self.run.elements] for path, value in tensors.items()}
            self.run.set_node_tensors(name, tensors)

    def series(self, observations: Mapping[str, Tensor], times: Array | None) -> Series:
        """Observations (T, ..., n) by node as a series; RuntimeError if their batch dimensions do not fit."""
        spec = self.program.spec
        ordered = [observations[name] for name in self.program.observers]
        if spec.batch > 1 and all(value.dim() == 2 for value in ordered):
            return Series(torch.cat(ordered, -1).cpu().to(torch.float64).numpy(), times)
        ordered = [
            value.reshape(len(value), *(1,) * (len(spec.batch_shape) + 2 - value.dim()), *value.shape[1:])
            .expand(len(value), *spec.batch_shape, value.shape[-1])
            .reshape(len(value), spec.batch, -1)
            for value in ordered
        ]
        if spec.batch == 1:
            ordered = [value[:, 0] for value in ordered]
        return Series(torch.cat(ordered, -1).cpu().to(torch.float64).numpy(), times)

    def block_size(self) -> int:
        """Number of observations that a block should have at most."""
        size = 8 * self.run.batch * max(1, Layout.size(self.run.layout.record) + self.run.n_given)
        return max(1, min(MAX_BLOCK, BLOCK_BYTES // size))

    def advance(self, series: Series, start: int, count: int, tick: int, clock: Clock, every: int) -> Advanced:
        """Take in observations start … start + count of a series, as many as compiled code can.

        Args:
            series: The observations.
            start: The first of them to take in.
            count: How many.
            tick: The number of observations before.
            clock: The clock before.
            every: Record each n-th observation.
        """
        moments = self._times(series, start, count, tick, clock)
        count = len(moments.times)
        if (
            not count
            or not self.run.batch
            or (self._stopped is not None and len(self._stopped) == self.program.spec.batch)
        ):
            return Advanced(0, clock, None, [], {})
        numbers = np.arange(tick, tick + count)
        recorded = ((numbers + 1) % every == 0).astype(np.uint8)
        block = Block(*self._kinds(numbers, moments, series, start), recorded)
        done, rows = self.run.advance(block)
        self.compiled_ticks += done
        if not done:
            return Advanced(0, clock, None, [], {})
        times = moments.times[:done][recorded[:done] != 0].tolist()
        if self._stopped is not None:
            self._elapsed.append(np.where(moments.regular, np.nan, moments.elapsed)[:done])
        timed = clock.timed or series.times is not None
        elapsed = None if moments.regular[done - 1] else float(moments.elapsed[done - 1])
        return Advanced(done, Clock(float(moments.times[done - 1]), timed), elapsed, times, self.columns(rows))

    def columns(self, rows: Array) -> dict[str, Tensor]:
        """What was recorded, (rows, B, n), by column, (rows, B, ...)."""
        if self._places is not None:  # times stay next to each other in memory
            rows = rows.transpose(1, 2, 0)[self._places].transpose(2, 0, 1)
        if self._stopped is not None:
            rows[:, self._stopped] = np.nan
        whole, record = torch.from_numpy(rows), self.run.layout.record
        return {
            slot.name: piece.to(slot.dtype).reshape(*rows.shape[:2], *slot.shape)
            for slot, piece in zip(record, whole.split_with_sizes([slot.size for slot in record], 2), strict=True)
        }

    def _times(self, series: Series, start: int, count: int, tick: int, clock: Clock) -> _Moments:
        """The times of observations, up to one that is not after its predecessor."""
        dt = self.interval.dt
        if series.times is None:
            if clock.timed:
                times = np.cumsum(np.concatenate([[clock.time], np.full(count, dt)]))[1:]
            else:
                times = np.arange(tick, tick + count) * dt
            return _Moments(times, np.full(count, dt), np.ones(count, dtype=bool))
        times = series.times[start : start + count]
        before = np.concatenate([[times[0] - dt if tick == 0 else clock.time], times[:-1]])
        elapsed = times - before
        late = np.flatnonzero(~(elapsed > 0))
        end = int(late[0]) if len(late) else count
        regular = np.abs(elapsed - dt) <= ROUNDING * dt if self.interval.common else np.zeros(count, dtype=bool)
        if tick == 0:
            regular[0] = True
        return _Moments(times[:end], elapsed[:end], regular[:end])

    def _kinds(
        self, numbers: NDArray[np.int64], moments: _Moments, series: Series, start: int
    ) -> tuple[NDArray[np.uint8], Array]:
        """The kind of each tick, and what is given at it."""
        count, run, acts = len(numbers), self.run, self.program.acts
        values = series.values[start : start + count]
        counts = numbers + 1
        always = sum(1 << i for i, act in enumerate(acts) if 1 in act.periods)
        codes = np.full(count, always, dtype=np.int64)
        masks: dict[int, NDArray[np.bool_]] = {}
        for i, act in enumerate(acts):
            for period in act.periods if not always >> i & 1 else ():
                codes |= (counts % period == 0).astype(np.int64) << i
            if act.by_element is not None and (codes >> i & 1).any():
                masks[i] = counts[:, None] % act.by_element.cpu().numpy() == 0
        codes |= (~moments.regular).astype(np.int64) << len(acts)
        codes |= (numbers == 0).astype(np.int64) << (len(acts) + 1)
        if (codes == codes[0]).all():  # without sorting them
            kinds = np.full(count, self.number_of(int(codes[0])), dtype=np.uint8)
        else:
            found, place = np.unique(codes, return_inverse=True)
            kinds = np.array([self.number_of(int(code)) for code in found], dtype=np.uint8)[place]
        n = values.shape[-1]
        shared = values.ndim == 2 and not masks
        shape = (count, run.n_given) if shared else (count, run.batch, run.n_given)
        given = np.zeros(shape)
        given[..., :n] = values if shared else values[:, run.elements] if values.ndim == 3 else values[:, None]
        given[..., run.layout.given_at["/dt"]] = moments.elapsed.reshape(-1, *(1,) * (len(shape) - 1))
        for i, mask in masks.items():
            given[..., run.layout.given_at[f"/due {i}"]] = mask[:, run.elements, None]
        return kinds, given

    def number_of(self, code: int) -> int:
        """The number of a kind of tick from its code: a bit for each act that is due, for irregular time, for first."""
        found = self._codes.get(code)
        if found is None:
            acts = self.program.acts
            due = tuple(
                (None if act.by_element is not None else True) if code >> i & 1 else False for i, act in enumerate(acts)
            )
            kind = TickKind(due, not code >> len(acts) & 1, bool(code >> (len(acts) + 1) & 1))
            found = self._codes[code] = self.run.number_of(kind)
        return found


class _Moments(NamedTuple):
    """Times, time steps, and which of these are the sampling interval; (T,) each."""

    times: Array
    elapsed: Array
    regular: NDArray[np.bool_]
