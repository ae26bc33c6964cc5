"""Sessions: a model at work, one observation at a time."""

from __future__ import annotations

import copy
import itertools
import math
import sys
import warnings
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcnet.engine.choice import EngineChoice
from pcnet.engine.divergence import DivergenceEvent, check_policy
from pcnet.engine.future import forecasts_alone
from pcnet.engine.inputs import Observation, ObservationReader, Sample, sampling_periods, time_of
from pcnet.engine.program import Program
from pcnet.engine.recording import result_of
from pcnet.engine.remarks import of_functions, of_observations, of_start, of_tables, of_times
from pcnet.engine.run import Run, Snapshot, common_batch_shape
from pcnet.engine.screen import Screen, Suspects
from pcnet.engine.state import GraphState
from pcnet.engine.threads import ThreadLimit, exclusive
from pcnet.errors import CheckpointError, DivergenceError, ObservationError, PcnetError, ScheduleError, SettingError
from pcnet.files import path_of
from pcnet.guidance import Guided, arguments, instead
from pcnet.model.context import NodeContext
from pcnet.model.model import Engine, Model, OnDivergence, RunOptions, device_of
from pcnet.model.node import BatchSpec
from pcnet.model.protocols import WarnsAfterRun
from pcnet.results.recorder import ENERGY, EVIDENCE, Record, Recorder
from pcnet.results.result import Divergence, Result, Smoothed
from pcnet.results.summary import remarks

if TYPE_CHECKING:
    from pcnet.engine.compiled.engine import Known
    from pcnet.engine.forecast import Draws, Forecast, Innovation
    from pcnet.engine.segments import Segments

CHUNK = 4096  # observations that are judged at once
ALLOWED = 5.0  # standard deviations from its forecast within which a value is plausible
Watcher = Callable[[float, Tensor | None], None]


class Session(Guided):
    """A model at work. Made by `model.start(...)`; the options are those of `Model.run`."""

    CALLED = "session"
    LENGTH = "use session.tick, the number of observations so far"
    NODE = 'session.mean("{node}") or session.sd("{node}")'
    INSTEAD = instead(
        {
            "update push feed observe correct add append send": "session.step(y)",
            "predict predictions ahead": "session.forecast(horizon), in units of time",
            "filter process fit infer train extend": "session.run(observations)",
            "results record_ history trace recorded": "session.result()",
            "summary plot error_flow to_dataframe": "session.result().{name}()",
            "times traces": "session.result().{name}",
            "checkpoint dump write": 'session.save("run.ckpt")',
            "load resume reload": 'pcnet.resume("run.ckpt", model)',
            "smooth smoother": "session.smoothed(lag), of model.start(smooth=lag)",
            "states estimate posterior belief": 'session.mean("x") and session.sd("x")',
            "cov covariance P": 'session.read("x", "covariance")',
            "parameters params": 'session.mean("theta")',
            "t now": "session.time",
            "count n ticks": "session.tick",
            "reset restart clear": "model.start() for a new session",
            "close stop end flush": 'session.save("run.ckpt"); there is nothing to close',
        }
    )

    ARGUMENTS = arguments(
        forecast={
            "()": "session.forecast(5.0), in units of time",
            "steps n_steps n periods num_steps length samples": "horizon=, in units of time: n steps are n * dt",
            "time t until duration": "horizon=, the time from the last observation on",
            "dt step interval": "every=, the time between two rows",
            "u control exog": "inputs={name: rows}, for the inputs of the model",
        },
        sample={
            "()": "session.sample(5.0, draws=100, seed=0), in units of time",
            "steps n_steps periods": "horizon=, in units of time: n steps are n * dt",
            "n size num_samples samples n_samples n_draws": "draws=",
            "generator rng random_state key": "seed=, a whole number",
        },
    )

    def _node_names(self) -> Iterable[str]:
        return tuple(self._own("graph").nodes)

    _keeps_updates = False  # whether states keep what a smoother needs

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
        screen: bool = True,
        smooth: bool | int = False,
        warm_start: Mapping[str, Any] | None = None,
        copies: int | None = None,
    ) -> None:
        """warm_start, copies: states of nodes that a fit continues from, as so many copies of the batch."""
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
            raise SettingError(f"dtype must be torch.float32 or torch.float64, not {dtype!r}")
        device = device_of(device)
        model.graph.check(dtype, device)
        check_policy(on_divergence, model.graph.nodes)
        if not isinstance(engine, str) or engine not in get_args(Engine):
            raise SettingError(f"engine must be 'auto', 'compiled' or 'eager', not {engine!r}")
        model.schedule.check(model.graph.nodes)
        self.model = model
        self.graph, self.schedule = model.graph, model.schedule
        self.record = Record.of(record)
        self.dtype, self.device, self.threads = dtype, device, threads
        self.on_divergence: OnDivergence = on_divergence
        self.engine: Engine = engine
        if not isinstance(smooth, bool) and (type(smooth) is not int or smooth < 1):
            raise SettingError(f"smooth is True, or the largest lag in observations, 1 or more, not {smooth!r}")
        self.smooth = smooth
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise SettingError(f"threads must be a whole number, 1 or more, or None, not {threads!r}")
        if not isinstance(screen, bool):
            raise SettingError(f"screen must be True or False, not {screen!r}")
        self.screen = screen
        self._screen = Screen() if screen and on_divergence != "raise" else None
        self.watchers: list[Watcher] = []
        """Called after each observation with its time and the batch elements that have not stopped, None for all."""
        self.expected: int | None = None
        """Number of observations that there will be, if it is known."""
        self.on_progress: Callable[[int], object] | None = None
        """Called with the number of observations that were taken in since the last call."""
        self._nodes = self.graph.nodes
        sizes = {name: node.observation_size for name, node in self._nodes.items() if node.observes}
        self._reader = ObservationReader(sizes, dtype, device, sampling_periods(self._nodes))
        known = {quantity for node in self._nodes.values() for quantity in node.quantities} | {ENERGY, EVIDENCE}
        for quantity in self.record.quantities:
            if quantity not in known:
                raise ScheduleError(f"there is no quantity {quantity!r}; there is: {', '.join(sorted(known))}")
        for name in self.record.nodes or ():
            _ = self.graph[name]
        self._warm_start, self._copies = warm_start or {}, copies
        self._engine = EngineChoice(engine)
        self._run: Run | None = None
        self._warned = False
        self.lock: AbstractContextManager[Any] = RLock()
        """Held by a thread as long as it changes or reads the session; others wait."""
        self.segments: dict[Path, Segments] = {}
        """What `save` has appended to the files beside its checkpoints."""

    @property
    def _bound(self) -> Run:
        """The run, which exists from the first observation on."""
        if self._run is None:
            raise ObservationError("there is nothing to read before the first observation; call step(y) first")
        return self._run

    @exclusive
    def step(self, observation: Any, t: float | None = None) -> Session:
        """Take in one observation.

        Args:
            observation: (..., dim), or a mapping from names of sensory nodes to these. NaN is a missing channel, None
                (or a missing name) a missing node.
            t: Its time; one sampling interval after the previous one unless given.
        """
        lead = self._engine.lead
        if lead is None or self.watchers or self._screen is not None or not lead.step(observation, t):
            with torch.inference_mode(), ThreadLimit(self.threads):
                self._take(self._reader.timed(observation), t)
        return self

    @exclusive
    def run(self, observations: Any, progress: bool | None = None, *, times: Iterable[float] | None = None) -> Session:
        """Take in all observations; the arguments are those of `Model.run`."""
        if times is not None and not isinstance(times, Iterable):
            raise ObservationError(f"times must be a number for each observation, not {times!r}")
        series = self._reader.series(observations)
        total = self._reader.length(observations) if series is None else len(next(iter(series.values())))
        self.expected = None if total is None else self.tick + total
        hidden = not (sys.stderr.isatty() if progress is None else progress)
        with (
            torch.inference_mode(),
            ThreadLimit(self.threads),
            tqdm(total=total, disable=hidden, unit="obs", desc=self.schedule.name) as bar,
        ):
            try:
                if series is None:
                    self._run_one_by_one(self._reader.items(observations), times, bar)
                else:
                    self._run_series(series, times, bar)
            except DivergenceError as error:
                like = torch.empty(0, dtype=self.dtype, device=self.device)
                error.args = (f"{error}{of_functions(self.graph, like)}{of_start(self._nodes, self.tick)}",)
                raise
            self._check_settings()
        self._not_empty()
        tables = of_tables(observations, self.intervals) if times is None else ()
        for remark in (*of_observations(self._nodes, series or {}), *of_times(times, self.intervals), *tables):
            warnings.warn(remark, UserWarning, stacklevel=3)
        return self

    def _check_settings(self) -> None:
        """Warn once of settings that do not suit a flow or its units."""
        for name, node in self._nodes.items():
            if self._run is not None and not self._warned and isinstance(node, WarnsAfterRun):
                for found in node.warnings(self.context(name), math.prod(self.batch_shape)):
                    self._warned = True
                    warnings.warn(found, UserWarning, stacklevel=4)

    def _run_one_by_one(self, items: Iterable[Observation | Sample], times: Iterable[float] | None, bar: Any) -> None:
        pairs = zip(items, itertools.repeat(None)) if times is None else zip(items, times, strict=True)
        try:
            for observation, t in pairs:
                self._take(observation, t)
                self._progressed(1, bar)
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            raise ObservationError("there must be as many times as observations") from None

    def _run_series(self, series: Mapping[str, Tensor], times: Iterable[float] | None, bar: Any) -> None:
        """Take in observations (T, ..., n), in blocks where compiled code runs them."""
        total = len(next(iter(series.values())))
        moments = None if times is None else list(itertools.islice(times, total + 1))
        if moments is not None and len(moments) != total:
            given = len(moments) if len(moments) < total or not isinstance(times, Sized) else len(times)
            raise ObservationError(f"there must be as many times as observations, {total}, not {given}")
        if self._screen is None:
            self._run_part(series, moments, 0, total, bar)
            return
        done = 0
        while done < total:
            if self._screen.settled:
                done += self._run_clear(series, moments, done, bar)
            else:
                self._take_from(series, moments, done, bar)
                done += 1

    def _take_from(self, series: Mapping[str, Tensor], moments: Sequence[float] | None, at: int, bar: Any) -> None:
        """Take in one observation of a series."""
        observation = {name: value[at] for name, value in series.items()}
        self._take(observation, None if moments is None else moments[at], len(next(iter(series.values()))))
        self._progressed(1, bar)

    def _run_clear(self, series: Mapping[str, Tensor], moments: Sequence[float] | None, done: int, bar: Any) -> int:
        """Take in the next observations of a series, at most until one was implausible; their number."""
        assert self._screen is not None
        before, begun = self._screen.copy(), self.tick
        part = {name: value[done : done + CHUNK] for name, value in series.items()}
        length = len(next(iter(part.values())))
        gaps = np.ones(length) if moments is None else self._gaps(moments[done : done + length])
        try:
            count = self._screen.clear(part, gaps)
            self._run_part(series, moments, done, done + count, bar)
        except BaseException:  # what was not taken in was not judged either
            end = self.tick - begun
            before.clear({name: value[:end] for name, value in part.items()}, gaps[:end])
            self._screen = before
            raise
        if count < length:
            self._take_from(series, moments, done + count, bar)
            count += 1
        return count

    def _gaps(self, moments: Sequence[float]) -> Any:
        """The time before each of the next observations in sampling intervals, 1 or more, given their times."""
        times = np.array([time_of(t) for t in moments])
        return np.maximum(1.0, np.diff(times, prepend=self.time) / self.interval)

    def _run_part(
        self, series: Mapping[str, Tensor], moments: Sequence[float] | None, start: int, stop: int, bar: Any
    ) -> None:
        """Take in the observations of a series, which were judged, from `start` to before `stop`."""
        total, done, size = len(next(iter(series.values()))), start, 1 if start == 0 else stop
        while done < stop:
            lead = None if self.watchers else self._engine.lead
            ahead = 0 if lead is None else lead.take_block(series, moments, done, min(size, stop - done))
            if not ahead:
                observation = {name: value[done] for name, value in series.items()}
                self._absorb(observation, None if moments is None else time_of(moments[done]), total)
                ahead, size = 1, max(1, size // 4)
            else:
                size = 16 * max(size, ahead)
            done += ahead
            if self._run is not None and self._run.rescue is not None:
                self._run.keep_for_rescue()
            self._progressed(ahead, bar)

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
        if self._run is None:
            raise ObservationError("there are no observations; give at least one")
        return self

    @exclusive
    def prepare(self, observations: Any) -> Session:
        """Bind the model to the batch of these observations, without taking any in."""
        series = self._reader.series(observations)
        total = None if series is None else len(next(iter(series.values())))
        with torch.inference_mode():
            items = self._reader.items(observations) if series is None else iter([{k: v[0] for k, v in series.items()}])
            for first in itertools.islice(items, 1):
                self._bind(first.observation if isinstance(first, Sample) else first, total)
        return self._not_empty()

    @exclusive
    def finish(self) -> None:
        """Take the actions that the schedule has for the end of a pass."""
        with torch.inference_mode(), ThreadLimit(self.threads):
            self._bound.finish()

    def replace_nodes(self, nodes: Mapping[str, Any]) -> None:
        """Replace the states of some nodes."""
        run, state = self._bound, self.state
        run.now = run.now._replace(state=state._replace(nodes={**state.nodes, **nodes}))
        run.show()

    def _take(self, given: Observation | Sample, t: float | None, total: int | None = None) -> None:
        """One tick. If anything fails, the session is as it was. total: number of observations of a whole run."""
        if isinstance(given, Sample):
            if t is not None:
                raise ObservationError(f"observation {self.tick} has two times: t = {t} and that of its sample")
            observation, t = given
        else:
            observation = given
        t = None if t is None else time_of(t)
        if self._screen is None:
            self._absorb(observation, t, total)
            return
        before = self._screen.copy()
        gap = 1.0 if t is None or self._run is None else max(1.0, (t - self.time) / self.interval)
        unsettled = not before.settled
        try:
            self._absorb(self._screen.one(observation, gap, lambda: self._foreseen(observation, t)), t, total)
        except BaseException:
            self._screen = before
            raise
        if unsettled:
            suspects = self._screen.suspects(self.batch_shape)
            if suspects is not None:
                self._start_anew(suspects)
        if self._run is not None and self._run.rescue is not None:
            self._run.keep_for_rescue()

    def _foreseen(self, observation: Observation, t: float | None) -> dict[str, Any]:
        """Which values of an observation the predictive distribution of the model allows for, by sensory node."""
        if self._run is None or forecasts_alone(self.program) is None or (t is not None and t <= self.time):
            return {}
        try:
            found = self.innovation(observation, t)
        except PcnetError:  # it has none at present
            return {}
        allowed = {}
        for name, (error, sd) in found.items():
            fits = np.abs(error) <= ALLOWED * sd
            allowed[name] = fits.any(tuple(range(fits.ndim - observation[name].ndim)))  # of a batch of settings
        return allowed

    def _start_anew(self, suspects: Suspects) -> None:
        """Set batch elements back to the start that have begun with implausible observations."""
        run = self._bound
        lost = np.zeros(run.program.spec.batch, dtype=np.int64)
        for event in run.now.log.events:
            lost[event.element] += 1
        rows = lost.size // suspects.counts.size
        which = np.tile(suspects.counts.reshape(-1), rows) > lost  # others were not taken in at all
        if which.any():
            with torch.inference_mode():
                run.restart(torch.from_numpy(which))

    def _absorb(self, observation: Observation, t: float | None, total: int | None = None) -> None:
        """One tick with an observation that was read and judged."""
        new = self._run is None
        run = self._bind(observation, total) if self._run is None else self._run
        if t is not None and run.place.tick == 0:
            run.start_at(t)
        lead = self._engine.lead
        try:
            is_compiled = lead is not None and lead.take(observation, t)
            if not is_compiled:
                run.advance(observation, t)
            if self.watchers:
                run.show()
                time, running = self.time, run.running
                for see in self.watchers:
                    see(time, running)
            if not is_compiled:
                self._engine.count_eager_tick(run.snapshot.tick)
        except BaseException:
            if new:
                self._run, self._engine = None, EngineChoice(self.engine)
            raise

    @property
    def tick(self) -> int:
        """Number of observations so far."""
        return 0 if self._run is None else self._run.place.tick

    @property
    def program(self) -> Program:
        """The model bound to the batch of the observations."""
        return self._bound.program

    @property
    def state(self) -> GraphState:
        """The state of the run: all that changes, as a tree of tensors. It is safe to keep."""
        return self._bound.now.state

    @property
    def in_use(self) -> Tensor | None:
        """Batch elements of the run that a forecast needs, (B,); None for all."""
        return None

    def has_enough(self, finite: Tensor) -> Tensor:
        """At which times a forecast can be given, (T,), if so much of it is finite, (T, B)."""
        return finite.all(1)

    def context(self, node: str) -> NodeContext[Any, Any]:
        """What a node sees now: its state, and the messages on its links."""
        name = self.graph[node].name
        self._bound.show()
        return self._bound.space.contexts[name]

    @exclusive
    def read(self, node: str, quantity: str) -> Tensor:
        """A quantity of a node now, (..., *dims)."""
        quantities = self.graph[node].quantities
        if not isinstance(quantity, str) or quantity not in quantities:
            raise ScheduleError(f"{self.graph[node].title} has no {quantity!r}; it has: {', '.join(quantities)}")
        with torch.inference_mode():
            value: Tensor = quantities[quantity].read(self.context(node))
        return self._bound.shaped(value)

    def mean(self, node: str) -> Tensor:
        return self.read(node, "mean")

    def sd(self, node: str) -> Tensor:
        return self.read(node, "sd")

    @property
    def free_energy(self) -> Tensor:
        """F at the last observation, (...)."""
        return self._bound.shaped(self.state.complexity - self.state.accuracy)

    @property
    def free_action(self) -> Tensor:
        """The sum of F over all observations, (...); NaN for batch elements that have stopped."""
        return self.total_complexity - self.total_accuracy

    @property
    def total_accuracy(self) -> Tensor:
        """The sum of the accuracy over all observations, (...)."""
        return self._bound.shaped(self.state.sum_accuracy)

    @property
    def total_complexity(self) -> Tensor:
        """The sum of the complexity over all observations, (...)."""
        return self._bound.shaped(self.state.sum_complexity)

    @property
    def diverged(self) -> Divergence:
        """Which batch elements have stopped, when and at which node."""
        return self._bound.now.log.summary(self.batch_shape)

    @property
    def divergence_events(self) -> Sequence[DivergenceEvent]:
        """The last batch elements that diverged, if the run went on: when, at which node, and why."""
        return () if self._run is None else self._run.now.log.events

    @property
    def fallbacks(self) -> dict[str, Tensor]:
        """How often named fallbacks were used, by node, and how many ticks were lost to "hold" or "reset"; (...)."""
        if self._run is None:
            return {}
        counts = {name: node.fallbacks(self.context(name)) for name, node in self._nodes.items()}
        found = {name: self._bound.shaped(count) for name, count in counts.items() if count is not None}
        if self.on_divergence in ("hold", "reset"):
            found[self.on_divergence] = self._bound.shaped(self.state.missed)
        return found

    @property
    def screened(self) -> int:
        """Observed values that were implausible and taken as missing; with policies other than "raise"."""
        return 0 if self._screen is None else self._screen.count

    @property
    def time(self) -> float:
        """Time of the last observation; the first is at 0 unless times are given."""
        return 0.0 if self._run is None else self._run.place.clock.time

    @property
    def interval(self) -> float:
        """The sampling interval; 1 if batch elements have different ones."""
        return self._bound.interval.dt

    @property
    def intervals(self) -> Tensor:
        """The sampling interval of each batch element, (B,)."""
        return self.program.interval

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.program.spec.batch_shape)

    @exclusive
    def smoothed(self, lag: int) -> dict[str, Smoothed]:
        """The belief about the states (and parameters) `lag` observations ago, given all observations since, by node.

        The session must have been started by model.start(smooth=...), with the largest lag.
        """
        raise SettingError(f"this session keeps nothing to smooth; start it by model.start(smooth={lag})")

    @exclusive
    def forecast(
        self,
        horizon: float,
        every: float | None = None,
        *,
        parameters: bool = True,
        inputs: Mapping[str, Any] | None = None,
    ) -> Forecast:
        """Forecast states and observations, with standard deviations.

        Covariances follow the linearised flow, driven by the noises of the precision nodes.

        Args:
            horizon: How far from now, in time units.
            every: Time between two forecasts; the sampling interval unless given.
            parameters: Whether to include the uncertainty of the parameters.
            inputs: Known inputs at the times of the forecast, (..., times, dim) by name; the last ones hold unless
                given. For graphs with one Kalman state.
        """
        from pcnet.engine.forecast import forecast

        with ThreadLimit(self.threads):
            return forecast(self, horizon, every, parameters=parameters, inputs=inputs)

    @exclusive
    def sample(
        self,
        horizon: float,
        draws: int = 1,
        *,
        every: float | None = None,
        seed: int,
        inputs: Mapping[str, Any] | None = None,
    ) -> Draws:
        """Draw futures from the model, from the present beliefs on; inputs: as for `forecast`."""
        from pcnet.engine.forecast import draw

        for name, value in (("draws", draws), ("seed", seed)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
                raise SettingError(f"{name} must be a whole number, 0 or more, not {value!r}")
        with ThreadLimit(self.threads):
            return draw(self, horizon, draws, every, seed, inputs)

    def read_inputs(self, inputs: Mapping[str, Any], count: int) -> dict[str, Tensor]:
        """Inputs that are known ahead as tensors with time first, (count, ..., dim) by name."""
        for name in inputs:
            if name not in self._nodes or not self._nodes[name].is_input:
                raise SettingError(f"{name!r} is not an input; inputs: {', '.join(self._inputs) or 'none'}")
        found = {name: self._reader.rows(name, value) for name, value in inputs.items()}
        for name, value in found.items():
            if len(value) != count:
                raise SettingError(f"the forecast has {count} times, but the input {name!r} has {len(value)} rows")
        return found

    @property
    def _inputs(self) -> tuple[str, ...]:
        """Names of the known inputs."""
        return tuple(name for name, node in self._nodes.items() if node.is_input)

    @exclusive
    def innovation(self, observation: Any, t: float | None = None) -> dict[str, Innovation]:
        """The difference of a coming observation from its forecast, by sensory node, with standard deviation."""
        from pcnet.engine.forecast import innovation

        if t is not None and time_of(t) <= self.time:
            raise ObservationError(f"t = {t} is not after the last observation at t = {self.time:g}")
        with ThreadLimit(self.threads):
            return innovation(self, self._reader.one(observation), None if t is None else time_of(t))

    def compiles(self, steps: int) -> bool:
        """Whether so many steps of a forecast are to be taken by compiled code, if it can."""
        return self._engine.is_worth_compiling(steps)

    @property
    def acting_engine(self) -> Engine:
        """The engine that goes on with the session: "compiled", with eager ticks where it must, or "eager"."""
        return "eager" if self._engine.lead is None else "compiled"

    @property
    def engine_report(self) -> str:
        """Which engine acts, what it has compiled, and what was left to the eager engine and why."""
        return self._engine.report()

    def compiled_code(self, variant: int = 0) -> str:
        """The LLVM code of a variant of the tick, as numbered in `engine_report`."""
        lead = self._engine.lead
        variants = [] if lead is None else lead.engine.variants.all
        if not 0 <= variant < len(variants):
            raise SettingError(f"there is no variant {variant}; {len(variants)} are compiled so far")
        return variants[variant].text or "compiled by another process; set PCNET_CACHE= (empty) to see the code"

    @exclusive
    def take_recorded(self) -> dict[str, Tensor]:
        """What was recorded since the last call, (T, B, ...) by name; it is not kept."""
        return self._bound.take_recorded()

    @property
    def recorder(self) -> Recorder:
        """What was recorded so far."""
        return self._bound.recorded

    def recorder_for(self, record: Record) -> Recorder:
        """An empty recorder for what a record asks for."""
        return self._bound.recorder_for(record)

    @exclusive
    def result(self) -> Result:
        """Everything that was recorded so far."""
        return self.result_of(self.recorder)

    def final_result(self) -> Result:
        """Everything that was recorded in a run that is over; warns of parameters that the data do not determine."""
        result = self.result()
        for remark in remarks(result):
            warnings.warn(remark, UserWarning, stacklevel=3)
        return result

    def result_of(self, recorder: Recorder, last: int | None = None) -> Result:
        """The rows of a recorder, or the last so many of them, as a result."""
        return result_of(self, self._engine, recorder, last)

    @exclusive
    def save(self, path: str | Path, *, recording: bool = True) -> Path:
        """Write a checkpoint, atomically, from which `pcnet.resume` continues.

        A long recording goes into a second file beside it, `<path>.rows-…`, to which further calls append. So the time
        that it takes does not depend on the length of the run, unless all of it is to be smoothed (smooth=True).

        Args:
            path: The file.
            recording: Whether to include what was recorded.
        """
        from pcnet.engine.checkpoint import save

        return save(self, path_of(path, CheckpointError), recording)

    @property
    def snapshot(self) -> Snapshot:
        """Where the session is, for checkpoints."""
        return self._bound.now

    def further_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the state of the run."""
        return {} if self._screen is None else self._screen.tensors()

    def restore(
        self,
        batch_shape: Sequence[int],
        make: Callable[[GraphState], Snapshot],
        further: dict[str, Tensor],
        acting: Engine | None = None,
    ) -> None:
        """Continue from a checkpoint.

        Args:
            batch_shape: The batch dimensions.
            make: Gives the snapshot, from a state of the right form.
            further: The tensors of `further_tensors`; KeyError if one is missing.
            acting: With engine="auto", the engine that goes on; chosen anew unless given.
        """
        self._restore_screen(further)
        if further:
            raise KeyError(min(further))
        if acting is not None:
            self._engine.continue_with(acting)
        with torch.inference_mode():
            self._run = run = self._bind_to(torch.Size(batch_shape))
            run.now = make(run.now.state)
            run.show()
        self._engine.choose(run, None)

    def _restore_screen(self, further: dict[str, Tensor]) -> None:
        """Take the screen out of what a checkpoint holds."""
        found = Screen.of(further)
        if self._screen is not None:
            self._screen = found

    @exclusive
    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """An independent session at the same place. States are never changed, so that they can be shared."""
        options = {name: getattr(self, name) for name in RunOptions.__annotations__}
        made = Session(self.model, **options)
        made._screen = None if self._screen is None else self._screen.copy()
        if self._run is not None:
            with torch.inference_mode():
                made._run = run = made._bind_to(self._run.program.spec.batch_shape)
                run.now = self._run.now
                run.show()
            made._engine.continue_with(self.acting_engine)
            if self._engine.lead is not None:
                made._engine.choose(run, None)
            recorder = self.recorder
            run.recorder.restore(*recorder.state())
        return made

    def __copy__(self) -> Session:
        return copy.deepcopy(self)

    def _bind(self, observation: Observation, total: int | None) -> Run:
        """Bind the model to the batch of an observation. total: number of observations of a whole run."""
        shape = common_batch_shape(self.model, observation)
        shape = shape if self._copies is None else torch.Size((self._copies, *shape))
        known = self._engine.known_before(self.model, self._spec(shape), self._keeps_updates)
        run = self._bind_to(shape, known)
        self._engine.choose(run, total, known)
        self._run = run
        return run

    def _bind_to(self, shape: torch.Size, known: Known | None = None) -> Run:
        """known: what is known of the model from an earlier session."""
        program = self._program(shape, known)
        return Run(program, self._engine, self.record, self.on_divergence, self._warm_start)

    def _program(self, shape: torch.Size, known: Known | None) -> Program:
        make = partial(Program, self.model) if known is None else partial(known.program, self.model)
        return make(self._spec(shape), self._keeps_updates)

    def _spec(self, shape: torch.Size) -> BatchSpec:
        return BatchSpec(shape.numel(), self.dtype, self.device, shape)
