"""Sessions: a model at work, one observation at a time."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcnet.engine.choice import EngineChoice
from pcnet.engine.clock import Clock, Interval
from pcnet.engine.divergence import DivergenceEvent, DivergenceLog, check_policy, everything_failed, resolve
from pcnet.engine.inputs import Observation, ObservationReader, Sample, time_of
from pcnet.engine.program import Program
from pcnet.engine.recording import columns
from pcnet.engine.state import GraphState
from pcnet.engine.tick import Failure, Inputs, NumericalError, Outputs, Workspace, tick
from pcnet.errors import ObservationError, ScheduleError, SettingError
from pcnet.model.context import NodeContext, Now
from pcnet.model.model import Engine, Model, OnDivergence, RunOptions, device_of
from pcnet.model.node import BatchSpec
from pcnet.model.protocols import FitsRecordedData
from pcnet.results.graph_summary import GraphSummary
from pcnet.results.recorder import ENERGY, Record, Recorder
from pcnet.results.result import Divergence, Result, Trace
from pcnet.settings import broadcast

if TYPE_CHECKING:
    from pcnet.engine.compiled.engine import CompiledEngine, Series
    from pcnet.engine.forecast import Draws, Forecast, Innovation

ROWS = 256
"""Rows that single ticks record before they go into the recorder."""
UNEQUAL = "there must be as many times as observations"
Watcher = Callable[[float, Tensor | None], None]
BOUND = ("program", "_recorder", "_space", "_interval", "_snapshot", "_showing")
"""Attributes of a session that exist from the first observation on."""


class Snapshot(NamedTuple):
    """Where a session is: replaced as a whole by each observation, so that it is taken in completely or not at all.

    tick: number of observations. relative_dt: of the last one. rows: number of recorded rows.
    """

    tick: int
    state: GraphState
    clock: Clock
    relative_dt: Tensor | None
    log: DivergenceLog
    outputs: Outputs
    rows: int = 0


class Lead(NamedTuple):
    """Where compiled code is: a snapshot without the state, which stays in its memory until it is read.

    elapsed: the time since the observation before; None for the sampling interval. flipped: whether the state is in the
    second of two buffers.
    """

    tick: int
    clock: Clock
    elapsed: float | None
    rows: int
    flipped: bool = False


class Session:
    """A model at work. Made by `model.start(...)`; the options are those of `Model.run`."""

    def __init__(
        self,
        model: Model,
        *,
        record: Record | Iterable[str] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        threads: int | None = 1,
        on_divergence: OnDivergence = "raise",
        engine: Engine = "auto",
        warm_start: Mapping[str, Any] | None = None,
        copies: int | None = None,
    ) -> None:
        """warm_start, copies: states of nodes that a fit continues from, as so many copies of the batch."""
        if dtype not in (torch.float32, torch.float64):
            raise SettingError(f"dtype must be torch.float32 or torch.float64, not {dtype!r}")
        device = device_of(device)
        model.graph.check(dtype, device)
        check_policy(on_divergence, model.graph.nodes)
        if engine not in get_args(Engine):
            raise SettingError(f"engine must be 'auto', 'compiled' or 'eager', not {engine!r}")
        model.schedule.check(model.graph.nodes)
        self.model = model
        self.graph, self.schedule = model
        self.record = Record.of(record)
        self.dtype, self.device, self.threads = dtype, device, threads
        self.on_divergence: OnDivergence = on_divergence
        self.engine: Engine = engine
        self.watchers: list[Watcher] = []
        """Called after each observation with its time and the batch elements that have not stopped, None for all."""
        self.on_progress: Callable[[int], object] | None = None
        """Called with the number of observations that were taken in since the last call."""
        self._nodes = self.graph.nodes
        sizes = {name: node.observation_size for name, node in self._nodes.items() if node.observes}
        self._reader = ObservationReader(sizes, dtype, device)
        known = {quantity for node in self._nodes.values() for quantity in node.quantities} | {ENERGY}
        for quantity in self.record.quantities:
            if quantity not in known:
                raise ScheduleError(f"there is no quantity {quantity!r}; there is: {', '.join(sorted(known))}")
        for name in self.record.nodes or ():
            _ = self.graph[name]
        self._warm_start, self._copies = warm_start or {}, copies
        self.program: Program
        self._recorder: Recorder
        self._space: Workspace
        self._interval: Interval
        self._snapshot: Snapshot
        self._showing: Snapshot
        self._engine = EngineChoice(engine)
        self._lead: Lead | None = None
        """Where compiled code is, if the snapshot is behind it."""
        self._loaded: Snapshot | None = None
        """The snapshot that compiled code started from."""
        self._flushed = 0
        """Rows that are in the recorder, and not in the memory of single ticks."""

    def __getattr__(self, name: str) -> Any:
        if name in BOUND:
            raise ObservationError("there is nothing to read before the first observation; call step(y) first")
        raise AttributeError(f"a session has no {name!r}")

    @property
    def _bound(self) -> bool:
        return "program" in vars(self)

    def step(self, observation: Any, t: float | None = None) -> Session:
        """Take in one observation.

        Args:
            observation: (..., dim), or a mapping from names of sensory nodes to these. NaN is a missing channel, None
                (or a missing name) a missing node.
            t: Its time; one sampling interval after the previous one unless given.
        """
        if not self._step_at_once(observation, t):
            with torch.inference_mode(), ThreadLimit(self.threads):
                self._take(self._reader.timed(observation), t)
        return self

    def _step_at_once(self, observation: Any, t: Any, *, is_read: bool = False) -> bool:
        """One tick of a single run in compiled code; False if it has to go another way, which may raise an error.

        is_read: whether the observation was read, as tensors by node, and the time is a number.
        """
        stepper, lead = self._engine.stepper, self._lead
        if lead is None and self._bound and self._loaded is self._snapshot:
            now = self._snapshot
            lead = Lead(now.tick, now.clock, None, now.rows)
        if stepper is None or lead is None or self.watchers or not stepper.valid:
            return False
        if not is_read and isinstance(observation, Sample) and t is None:
            observation, t = observation
        moment = self._moment(lead, t)
        if moment is None or not (stepper.fill(observation) if is_read else stepper.read(observation)):
            return False
        number, (time, elapsed) = lead.tick, moment
        row = lead.rows - self._flushed
        if row >= ROWS:
            self._flush()
            row = 0
        if not stepper.tick(number, lead.flipped, row, elapsed):
            return False
        rows = lead.rows
        if (number + 1) % self.record.every == 0 and self._recorder.columns:
            stepper.times[row] = time
            rows += 1
        stepper.engine.compiled_ticks += 1
        self._lead = Lead(number + 1, Clock(time, lead.clock.timed or t is not None), elapsed, rows, not lead.flipped)
        return True

    def _moment(self, lead: Lead, t: Any) -> tuple[float, float | None] | None:
        """The next time, and the time step, None for the sampling interval; None if the time needs a closer look."""
        clock, dt = lead.clock, self._interval.dt
        if t is None:
            return (clock.time + dt if clock.timed else lead.tick * dt), None
        elapsed = t - clock.time if type(t) is float else -1.0
        if not 0 < elapsed < math.inf:
            return None
        return t, None if self._interval.is_regular(elapsed) else elapsed

    def _flush(self) -> None:
        """Move rows that single ticks have recorded into the recorder."""
        stepper, lead = self._engine.stepper, self._lead
        if stepper is not None and lead is not None and lead.rows > self._flushed:
            times, rows = stepper.recorded(lead.rows - self._flushed)
            self._recorder.truncate(self._flushed)
            self._recorder.add_block(times, stepper.engine.columns(rows))
            self._flushed = lead.rows

    def run(self, observations: Any, progress: bool | None = None, *, times: Iterable[float] | None = None) -> Session:
        """Take in all observations; the arguments are those of `Model.run`."""
        series = self._reader.series(observations)
        total = self._reader.length(observations) if series is None else len(next(iter(series.values())))
        hidden = not (sys.stderr.isatty() if progress is None else progress)
        with (
            torch.inference_mode(),
            ThreadLimit(self.threads),
            tqdm(total=total, disable=hidden, unit="obs", desc=self.schedule.name) as bar,
        ):
            if series is None:
                self._run_one_by_one(self._reader.items(observations), times, bar)
            else:
                self._run_series(series, times, bar)
        return self._not_empty()

    def _run_one_by_one(self, items: Iterable[Observation | Sample], times: Iterable[float] | None, bar: Any) -> None:
        pairs = zip(items, itertools.repeat(None)) if times is None else zip(items, times, strict=True)
        try:
            for observation, t in pairs:
                self._take(observation, t)
                self._progressed(1, bar)
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            raise ObservationError(UNEQUAL) from None

    def _run_series(self, series: Mapping[str, Tensor], times: Iterable[float] | None, bar: Any) -> None:
        """Take in observations (T, ..., n), in blocks where compiled code runs them."""
        total = len(next(iter(series.values())))
        moments = None if times is None else list(itertools.islice(times, total + 1))
        if moments is not None and len(moments) != total:
            raise ObservationError(UNEQUAL)
        done, size = 0, 1
        while done < total:
            ahead = self._run_block(series, moments, done, size) if self._bound else 0
            if not ahead:
                observation = {name: value[done] for name, value in series.items()}
                self._take(observation, None if moments is None else moments[done], total)
                ahead, size = 1, max(1, size // 4)
            else:
                size = 4 * max(size, ahead)
            done += ahead
            self._progressed(ahead, bar)

    def _run_block(self, series: Mapping[str, Tensor], moments: Sequence[float] | None, start: int, size: int) -> int:
        """Let compiled code take in observations from `start` on; their number, 0 if it cannot."""
        engine = self._engine.compiled
        if engine is None or self.watchers:
            return 0
        try:
            whole = self._engine.series_of(series, moments)
        except (RuntimeError, ObservationError):  # the eager engine says what is wrong, at the right observation
            return 0
        if start >= len(whole):
            return 0
        return self._advance_compiled(engine, whole, start, min(size, engine.block_size(), len(whole) - start))

    def _progressed(self, count: int, bar: Any) -> None:
        bar.update(count)
        if self.on_progress is not None:
            self.on_progress(count)

    async def arun(self, observations: AsyncIterable[Any]) -> Session:
        """Take in observations (or `Sample`s) of an asynchronous iterator as they arrive."""
        if not isinstance(observations, AsyncIterable):
            raise ObservationError(f"give an asynchronous iterator, not {type(observations).__name__}; or call run")
        async for observation in observations:
            self.step(observation)
        return self._not_empty()

    def _not_empty(self) -> Session:
        if not self._bound:
            raise ObservationError("there are no observations; give at least one")
        return self

    def prepare(self, observations: Any) -> Session:
        """Bind the model to the batch of these observations, without taking any in."""
        series = self._reader.series(observations)
        total = None if series is None else len(next(iter(series.values())))
        with torch.inference_mode():
            items = self._reader.items(observations) if series is None else iter([{k: v[0] for k, v in series.items()}])
            for first in itertools.islice(items, 1):
                self._bind(first.observation if isinstance(first, Sample) else first)
                self._engine.choose(self.model, self.program, self._interval, self.record, total)
        return self._not_empty()

    def finish(self) -> None:
        """Take the actions that the schedule has for the end of a pass."""
        program, now = self.program, self._now
        with torch.inference_mode(), ThreadLimit(self.threads):
            self._load()
            try:
                self._space.take_all(program.on_end, None if bool(now.state.running.all()) else now.state.running)
                failures = tuple(self._space.failures)
            except NumericalError as error:
                failures = (Failure(error.node, now.state.running, error.why),)
            events, running = [], now.state.running.clone()
            for failure in failures:
                for i in (failure.where & running).nonzero()[:, 0].tolist():
                    events.append(DivergenceEvent(now.tick, failure.node.name, i, failure.why))
                    running[i] = False
            state = now.state._replace(nodes=self._space.nodes, running=running)
            self._now = now._replace(state=state, log=now.log.with_events(events, self.on_divergence == "stop"))

    def replace_nodes(self, nodes: Mapping[str, Any]) -> None:
        """Replace the states of some nodes."""
        state = self.state
        self._now = self._now._replace(state=state._replace(nodes={**state.nodes, **nodes}))
        self._load()

    def _take(self, given: Observation | Sample, t: float | None, total: int | None = None) -> None:
        """One tick. If anything fails, the session is as it was. total: number of observations of a whole run."""
        if isinstance(given, Sample):
            if t is not None:
                raise ObservationError(f"observation {self.tick} has two times: t = {t} and that of its sample")
            observation, t = given
        else:
            observation = given
        t = None if t is None else time_of(t)
        new = not self._bound
        if new:
            self._bind(observation)
            self._engine.choose(self.model, self.program, self._interval, self.record, total)
        try:
            if not self._step_compiled(observation, t):
                self._advance(observation, t)
                self._engine.count_eager_tick(self.tick)
        except BaseException:
            for name in BOUND if new else ():
                vars(self).pop(name, None)
            raise

    def _step_compiled(self, observation: Observation, t: float | None) -> bool:
        """One tick in compiled code; False if it has to be eager."""
        engine = self._engine.compiled
        if engine is None:
            return False
        if self._step_at_once(observation, t, is_read=True):
            return True
        try:
            series = engine.series(
                {name: value[None] for name, value in observation.items()}, None if t is None else np.array([t])
            )
        except RuntimeError:
            return False
        return bool(self._advance_compiled(engine, series, 0, 1))

    def _advance_compiled(self, engine: CompiledEngine, series: Series, start: int, count: int) -> int:
        """Let compiled code take in observations of a series; their number."""
        self._settle()
        lead = self._lead
        if lead is None:
            now = self._snapshot
            if self._loaded is not now:
                engine.load(now.state)
                self._loaded = now
            lead = Lead(now.tick, now.clock, None, now.rows)
        if self._engine.stepper is not None:
            self._engine.stepper.forget_derived()
        made = engine.advance(series, start, count, lead.tick, lead.clock, self.record.every)
        if made.ticks:
            rows = lead.rows
            if made.times and self._recorder.columns:
                self._recorder.truncate(rows)
                self._recorder.add_block(made.times, made.record)
                rows += len(made.times)
            self._lead, self._flushed = Lead(lead.tick + made.ticks, made.clock, made.elapsed, rows), rows
            self._engine.prepare_stepper(ROWS)
            if self.watchers:
                running = None if bool(self.state.running.all()) else self.state.running
                self._load()
                for see in self.watchers:
                    see(made.clock.time, running)
        return made.ticks

    def _settle(self) -> None:
        """Bring what single ticks have done to where all else looks for it."""
        self._flush()
        if self._lead is not None and self._engine.stepper is not None:
            self._engine.stepper.engine.run.settle(self._lead.flipped)
            self._lead = self._lead._replace(flipped=False)

    @property
    def _now(self) -> Snapshot:
        """Where the session is."""
        self._settle()
        lead, known = self._lead, self._snapshot
        if lead is None:
            return known
        assert self._engine.compiled is not None
        state = self._engine.compiled.state()
        interval = self.program.interval
        relative = None if lead.elapsed is None else torch.full_like(interval, lead.elapsed) / interval
        found = Snapshot(lead.tick, state, lead.clock, relative, known.log, Outputs({}), lead.rows)
        self._snapshot = self._loaded = found
        self._lead = None
        return found

    @_now.setter
    def _now(self, snapshot: Snapshot) -> None:
        self._snapshot, self._lead = snapshot, None

    @property
    def recorder(self) -> Recorder:
        """What was recorded so far."""
        self._flush()
        return self._recorder

    def _advance(self, observation: Observation, t: float | None) -> None:
        program, now, space = self.program, self._now, self._space
        filled = {}
        for name, value in observation.items():
            try:
                filled[name] = program.spec.expand(value, 1)
            except RuntimeError:
                shapes = f"{tuple(value.shape[:-1])}; the run began with {self.batch_shape}"
                raise ObservationError(f"observation {now.tick} of {name!r} has batch dimensions {shapes}") from None
        clock, dt, relative_dt = self._interval.advance(now.clock, t, now.tick)
        inputs = Inputs(filled, dt, relative_dt, program.due(now.tick), now.tick == 0)
        try:
            after, outputs = tick(program, now.state, inputs, space)
        except NumericalError as error:  # the batch elements that are to blame are not known
            outputs = everything_failed(program, now.state, error.node, error.why)
            time = dt + now.state.time
            after = now.state._replace(time=time, dt=dt, accuracy=program.zeros, complexity=program.zeros)
        state, events = resolve(self.on_divergence, space, now.state, after, outputs, inputs, now.tick)
        log = now.log.with_events(events, self.on_divergence == "stop") if events else now.log
        space.load(state.nodes, Now(state.time, dt, relative_dt))
        running = None if bool(state.running.all()) else state.running
        following = Snapshot(now.tick + 1, state, clock, relative_dt, log, outputs, now.rows)
        self._showing = following
        if (now.tick + 1) % self.record.every == 0 and self._recorder.columns:
            self._recorder.truncate(now.rows)  # after an interrupted tick
            self._recorder.append(self._recorder.read(clock.time, running))
            if self._engine.compiled is not None:
                self._recorder.close()  # digits must not depend on which ticks are eager
            following = following._replace(rows=now.rows + 1)
        self._now = following
        for see in self.watchers:
            see(clock.time, running)

    @property
    def tick(self) -> int:
        """Number of observations so far."""
        if not self._bound:
            return 0
        return self._snapshot.tick if self._lead is None else self._lead.tick

    @property
    def state(self) -> GraphState:
        """The state of the run: all that changes, as a tree of tensors. It is safe to keep."""
        return self._now.state

    def context(self, node: str) -> NodeContext[Any, Any]:
        """What a node sees now: its state, and the messages on its links."""
        name = self.graph[node].name
        self._load()
        return self._space.contexts[name]

    def read(self, node: str, quantity: str) -> Tensor:
        """A quantity of a node now, (..., *dims)."""
        quantities = self.graph[node].quantities
        if quantity not in quantities:
            raise ScheduleError(f"{self.graph[node].title} has no {quantity!r}; it has: {', '.join(quantities)}")
        with torch.inference_mode():
            value: Tensor = quantities[quantity].read(self.context(node))
        return value.reshape(*self.batch_shape, *value.shape[1:]).clone()

    def mean(self, node: str) -> Tensor:
        return self.read(node, "mean")

    def sd(self, node: str) -> Tensor:
        return self.read(node, "sd")

    @property
    def free_energy(self) -> Tensor:
        """F at the last observation, (...)."""
        return self._shaped(self.state.complexity - self.state.accuracy)

    @property
    def free_action(self) -> Tensor:
        """The sum of F over all observations, (...); NaN for batch elements that have stopped."""
        return self.total_complexity - self.total_accuracy

    @property
    def total_accuracy(self) -> Tensor:
        """The sum of the accuracy over all observations, (...)."""
        return self._shaped(self.state.sum_accuracy)

    @property
    def total_complexity(self) -> Tensor:
        """The sum of the complexity over all observations, (...)."""
        return self._shaped(self.state.sum_complexity)

    @property
    def diverged(self) -> Divergence:
        """Which batch elements have stopped, when and at which node."""
        batch = self.program.spec.batch
        at, node = np.full(batch, -1), np.full(batch, "", dtype=object)
        for i, (when, name) in self._now.log.stopped.items():
            at[i], node[i] = when, name
        return Divergence(at.reshape(self.batch_shape), node.astype(str).reshape(self.batch_shape))

    @property
    def divergence_events(self) -> Sequence[DivergenceEvent]:
        """The last batch elements that diverged, if the run went on: when, at which node, and why."""
        return self._now.log.events if self._bound else ()

    @property
    def fallbacks(self) -> dict[str, Tensor]:
        """How often named fallbacks were used, by node, and how many ticks were lost to "hold" or "reset"; (...)."""
        if not self._bound:
            return {}
        counts = {name: node.fallbacks(self.context(name)) for name, node in self._nodes.items()}
        found = {name: self._shaped(count) for name, count in counts.items() if count is not None}
        if self.on_divergence in ("hold", "reset"):
            found[self.on_divergence] = self._shaped(self.state.missed)
        return found

    @property
    def time(self) -> float:
        """Time of the last observation; the first is at 0 unless times are given."""
        if not self._bound:
            return 0.0
        return self._snapshot.clock.time if self._lead is None else self._lead.clock.time

    @property
    def interval(self) -> float:
        """The sampling interval; 1 if batch elements have different ones."""
        return self._interval.dt

    @property
    def intervals(self) -> Tensor:
        """The sampling interval of each batch element, (B,)."""
        return self.program.interval

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.program.spec.batch_shape)

    def forecast(self, horizon: float, every: float | None = None, *, parameters: bool = True) -> Forecast:
        """Forecast states and observations, with standard deviations.

        Covariances follow the linearised flow, driven by the noises of the precision nodes.

        Args:
            horizon: How far from now, in time units.
            every: Time between two forecasts; the sampling interval unless given.
            parameters: Whether to include the uncertainty of the parameters.
        """
        from pcnet.engine.forecast import forecast

        with ThreadLimit(self.threads):
            return forecast(self, horizon, every, parameters=parameters)

    def sample(self, horizon: float, draws: int = 1, *, every: float | None = None, seed: int) -> Draws:
        """Draw futures from the model, from the present beliefs on."""
        from pcnet.engine.forecast import draw

        with ThreadLimit(self.threads):
            return draw(self, horizon, draws, every, seed)

    def innovation(self, observation: Any, t: float | None = None) -> dict[str, Innovation]:
        """The difference of a coming observation from its forecast, by sensory node, with standard deviation."""
        from pcnet.engine.forecast import innovation

        if t is not None and time_of(t) <= self.time:
            raise ObservationError(f"t = {t} is not after the last observation at t = {self.time:g}")
        with ThreadLimit(self.threads):
            return innovation(self, self._reader.one(observation), None if t is None else time_of(t))

    @property
    def acting_engine(self) -> Engine:
        """The engine that goes on with the session: "compiled", with eager ticks where it must, or "eager"."""
        return "eager" if self._engine.compiled is None else "compiled"

    @property
    def engine_report(self) -> str:
        """Which engine acts, what it has compiled, and what was left to the eager engine and why."""
        return self._engine.report(self.tick)

    def compiled_code(self, variant: int = 0) -> str:
        """The LLVM code of a variant of the tick, as numbered in `engine_report`."""
        engine = self._engine.compiled
        count = 0 if engine is None else len(engine.variants.all)
        if engine is None or not 0 <= variant < count:
            raise SettingError(f"there is no variant {variant}; {count} are compiled so far")
        found = engine.variants.all[variant].text
        return found or "compiled by another process; set PCNET_CACHE= (empty) to see the code"

    def take_recorded(self) -> dict[str, Tensor]:
        """What was recorded since the last call, (T, B, ...) by name; it is not kept."""
        now = self._now
        self._recorder.truncate(now.rows)
        found = self._recorder.take()
        self._now, self._flushed = now._replace(rows=0), 0
        return found

    def result(self) -> Result:
        """Everything that was recorded so far."""
        self.recorder.truncate(self._now.rows)
        return self.result_of(self.recorder)

    def result_of(self, recorder: Recorder, last: int | None = None) -> Result:
        """The rows of a recorder, or the last so many of them, as a result."""
        shape, traces = self.batch_shape, {}
        times = recorder.times[-last:] if last else recorder.times
        for name, column in recorder.columns.items():
            values = recorder.tensor(name)
            if values is not None:
                values = values[len(values) - len(times) :]
                array = values.movedim(0, 1).reshape(*shape, values.shape[0], *values.shape[2:])
                traces[name] = Trace(array.numpy(), column.dims)
        return Result(
            traces=traces,
            batch_shape=shape,
            times=np.asarray(times, dtype=np.float64),
            free_action=self.free_action.cpu().numpy(),
            diverged=self.diverged,
            fallbacks={name: count.cpu().numpy() for name, count in self.fallbacks.items()},
            observations=self.tick,
            roles={name: node.role for name, node in self._nodes.items()},
            summary=str(self.graph),
            schedule=str(self.schedule),
            structure=GraphSummary.of(self.graph, self.schedule),
            engine=self._engine.acted,
            eager_ticks=self._engine.eager_ticks,
        )

    def save(self, path: str | Path, *, recording: bool = True) -> Path:
        """Write a checkpoint, atomically, from which `pcnet.resume` continues; recording: with what was recorded."""
        from pcnet.engine.checkpoint import save

        self.recorder.truncate(self._now.rows)
        return save(self, Path(path), recording)

    @property
    def snapshot(self) -> Snapshot:
        """Where the session is, for checkpoints."""
        return self._now

    def restore(
        self, batch_shape: Sequence[int], make: Callable[[GraphState], Snapshot], acting: Engine | None = None
    ) -> None:
        """Continue from a checkpoint.

        Args:
            batch_shape: The batch dimensions.
            make: Gives the snapshot, from a state of the right form.
            acting: With engine="auto", the engine that goes on; chosen anew unless given.
        """
        if acting is not None:
            self._engine.continue_with(acting)
        with torch.inference_mode():
            self._bind_to(torch.Size(batch_shape))
            self._now = make(self._now.state)
            self._load()
        self._engine.choose(self.model, self.program, self._interval, self.record, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """An independent session at the same place. States are never changed, so that they can be shared."""
        options = {name: getattr(self, name) for name in RunOptions.__annotations__}
        made = Session(self.model, **options)
        if self._bound:
            with torch.inference_mode():
                made._bind_to(self.program.spec.batch_shape)
                made._now = self._now
                made._load()
            made._engine.continue_with(self.acting_engine)
            if self._engine.compiled is not None:
                made._engine.choose(made.model, made.program, made._interval, made.record, None)
            self.recorder.truncate(self._now.rows)
            made.recorder.restore(self.recorder.times, *self.recorder.state())
        return made

    def __copy__(self) -> Session:
        return copy.deepcopy(self)

    def _bind(self, observation: Observation) -> None:
        given = broadcast(*(value.shape[:-1] for value in observation.values()))
        try:
            shape = broadcast(self.graph.batch_shape, self.schedule.batch_shape, given)
        except RuntimeError:
            shapes = [tuple(each) for each in (self.graph.batch_shape, self.schedule.batch_shape, given)]
            raise ObservationError(
                f"the batch dimensions of settings, schedule and observations do not fit together: {shapes}"
            ) from None
        self._bind_to(shape if self._copies is None else torch.Size((self._copies, *shape)))

    def _bind_to(self, shape: torch.Size) -> None:
        program = Program(self.model, BatchSpec(shape.numel(), self.dtype, self.device, shape))
        state = program.initial
        self._space = Workspace(program, state)
        if self._warm_start:
            nodes = dict(state.nodes)
            for name, given in self._warm_start.items():
                node = program.nodes[name]
                assert isinstance(node, FitsRecordedData)
                nodes[name] = node.warm_start(self._space.contexts[name], given)
            state = state._replace(nodes=nodes)
        self._interval = Interval.of(program.interval, program.shortest_dt)
        self.program = program
        self._now = Snapshot(0, state, Clock(), None, DivergenceLog(), Outputs({}))
        self._recorder = self.recorder_for(self.record)
        self._load()

    def _load(self) -> None:
        """Let contexts show the present state."""
        state, self._showing = self._now.state, self._now
        self._space.load(state.nodes, Now(state.time, state.dt, self._now.relative_dt))

    def _shaped(self, value: Tensor) -> Tensor:
        return value.reshape(self.batch_shape).clone()

    def recorder_for(self, record: Record) -> Recorder:
        """An empty recorder for what a record asks for."""
        return Recorder(
            columns(self.program, self._space, record, lambda: (self._showing.state, self._showing.outputs))
        )


class ThreadLimit:
    """A context in which torch uses so many threads within an operation; None leaves torch's own setting.

    For small matrices threads cost more than they gain. On a busy machine, an operation that waits for a second thread
    takes milliseconds instead of microseconds.
    """

    def __init__(self, threads: int | None) -> None:
        self._usual = torch.get_num_threads()
        self._threads = self._usual if threads is None else threads

    def __enter__(self) -> None:
        if self._threads != self._usual:
            torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        if self._threads != self._usual:
            torch.set_num_threads(self._usual)
