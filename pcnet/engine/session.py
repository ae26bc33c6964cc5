"""Scheduled message passing: wakes nodes when their clocks tick. Nothing here knows what kind a node is."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcnet.engine import program as plan
from pcnet.engine.clock import Clock
from pcnet.engine.divergence import DivergenceEvent, Failures, OnDivergence
from pcnet.engine.inputs import Observation, ObservationReader, Sample, moment
from pcnet.engine.message_cache import connect
from pcnet.engine.program import Line
from pcnet.engine.state import Course, Mark
from pcnet.errors import ObservationError, ScheduleError, SettingError
from pcnet.model.graph import Graph
from pcnet.model.node import BatchSpec, Energy, Node, NodeContext
from pcnet.model.schedule import Schedule
from pcnet.results.graph_summary import GraphSummary
from pcnet.results.recorder import ENERGY, Record, TraceBuffer
from pcnet.results.result import Divergence, Result, Trace
from pcnet.settings import broadcast

if TYPE_CHECKING:
    from pcnet.engine.forecast import Draws, Forecast, Innovation


class NumericalError(Exception):
    """A node cannot do what it is asked to: some matrix of it cannot be inverted or factorised."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


class Session:
    """A graph at work, one observation at a time. Made by `graph.start(...)`."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        *,
        record: Record | Iterable[str] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | None = None,
        threads: int | None = 1,
        on_divergence: OnDivergence = "raise",
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise ScheduleError(f"schedule must be a Schedule, such as pcnet.odem(), not {schedule!r}")
        if dtype not in (torch.float32, torch.float64):
            raise SettingError(f"dtype must be torch.float32 or torch.float64, not {dtype!r}")
        device = device or torch.device("cpu")
        graph.check(dtype, device)
        self.graph = graph
        self.schedule = schedule
        self.record = Record.of(record)
        self.dtype, self.device, self.threads = dtype, device, threads
        self.watchers: list[Callable[[float, Tensor | None], None]] = []
        """Called after each observation with its time and which batch elements go on, if not all."""
        self._nodes = graph.nodes
        self._locals = {name: NodeContext() for name in self._nodes}
        self._course = Course(self._locals, Failures(self._nodes, self._locals, on_divergence))
        self._observers = [name for name, node in self._nodes.items() if node.observes]
        dims = {node.name: node.observed_width for node in self._nodes.values() if node.observes}
        self._intake = ObservationReader(dims, self.dtype, self.device)
        schedule.check(self._nodes)
        self._check_record()
        self._channels = connect(graph, self._locals)
        self._begun = False
        self._opening: tuple[Line, ...] = ()
        self._closing: tuple[Line, ...] = ()
        self._once = {name for act in schedule.on_end for name in act.names(self._nodes)}
        self._standing: Mapping[str, Any] = {}
        self._copies: int | None = None
        self._acts: tuple[Line, ...] = ()
        self._start: BatchSpec

    @property
    def tick(self) -> int:
        """How many observations have been taken in."""
        return self._course.tick

    @tick.setter
    def tick(self, tick: int) -> None:
        self._course.tick = tick

    # --- one observation at a time --------------------------------------------------------------------------------
    def step(self, observation: Any, t: float | None = None) -> Session:
        """Take in one observation, (..., dim) or a mapping from sensory names to these, at the time t.

        NaN is a channel that is missing; None, or no name, a sensory node. Without t it comes a sampling interval after
        the one before.
        """
        with torch.inference_mode(), Limited(self.threads):
            self._take(self._intake.timed(observation), t)
        return self

    def run(self, observations: Any, progress: bool | None = None, *, times: Iterable[float] | None = None) -> Session:
        """Take in observations to the end of them; times: one for each, unless they come at regular intervals."""
        stream, total = self._intake.stream(observations)
        hidden = not (sys.stderr.isatty() if progress is None else progress)
        with torch.inference_mode(), Limited(self.threads):
            shown = tqdm(stream, total=total, disable=hidden, unit="obs", desc=self.schedule.name)
            for observation, t in _with_times(shown, times):
                self._take(observation, t)
        if self.tick == 0:
            raise ObservationError("there are no observations; give at least one")
        return self

    def prepare(self, observations: Any) -> Session:
        """Begin as observations ask for, without taking any in."""
        first = next(self._intake.stream(observations)[0], None)
        if first is None:
            raise ObservationError("there are no observations; give at least one")
        with torch.inference_mode():
            self._begin(first.observation if isinstance(first, Sample) else first)
        return self

    def warm_start(self, beliefs: Mapping[str, Any], copies: int | None = None) -> None:
        """Let nodes begin with these beliefs, which another pass over the same observations has led to.

        copies: as a batch of so many copies of the run, which lead its batch dimensions.
        """
        self._standing, self._copies = beliefs, copies

    def close(self) -> None:
        """Do what the schedule has for the end of a pass."""
        self._need_begun()
        with torch.inference_mode(), Limited(self.threads):
            try:
                for line in self._closing:
                    self._do(line, None)
            except NumericalError as broken:
                self._course.failures.note(broken.node, None, broken.why, self.tick)
            self._course.failures.put_down(self.tick)

    async def arun(self, observations: AsyncIterable[Any]) -> Session:
        """Take in observations (or `Sample`s) as they arrive, to the end of them."""
        if not isinstance(observations, AsyncIterable):
            raise ObservationError(f"give an asynchronous iterator, not {type(observations).__name__}; or call run")
        async for observation in observations:
            self.step(observation)
        if self.tick == 0:
            raise ObservationError("there are no observations; give at least one")
        return self

    def read(self, node: str, quantity: str) -> Tensor:
        """A quantity of a node as it is now; (..., *dims)."""
        quantities = self.graph[node].quantities
        if quantity not in quantities:
            raise ScheduleError(f"{self.graph[node].title} has no {quantity!r}; it has: {', '.join(quantities)}")
        self._need_begun()
        with torch.inference_mode():
            value = quantities[quantity].read(self._locals[node])
        return value.reshape(*self._start.batch_shape, *value.shape[1:]).clone()

    def local(self, node: str) -> NodeContext:
        """A node's little world, for looking inside: its belief, memory and messages."""
        return self._locals[self.graph[node].name]

    def mean(self, node: str) -> Tensor:
        return self.read(node, "mean")

    def sd(self, node: str) -> Tensor:
        return self.read(node, "sd")

    @property
    def free_energy(self) -> Tensor:
        """F at the last observation, (...)."""
        self._need_begun()
        return self._shaped(self._course.complexity - self._course.accuracy)

    @property
    def free_action(self) -> Tensor:
        """The sum of F over all observations, (...); NaN where the run diverged."""
        return self.total_complexity - self.total_accuracy

    @property
    def total_accuracy(self) -> Tensor:
        """The sum of the accuracy over all observations, (...)."""
        self._need_begun()
        return self._shaped(self._course.sum_accuracy)

    @property
    def total_complexity(self) -> Tensor:
        """The sum of the complexity over all observations, (...)."""
        self._need_begun()
        return self._shaped(self._course.sum_complexity)

    @property
    def diverged(self) -> Divergence:
        """Which batch elements have stopped, when and at which node; they are held where they were before."""
        self._need_begun()
        at, node = np.full(self._start.batch, -1), np.full(self._start.batch, "", dtype=object)
        for i, (tick, name) in self._course.failures.stopped.items():
            at[i], node[i] = tick, name
        shape = tuple(self._start.batch_shape)
        return Divergence(at.reshape(shape), node.astype(str).reshape(shape))

    @property
    def fallbacks(self) -> dict[str, Tensor]:
        """How often named fallbacks acted, by node, and how often a tick was lost to "hold" or "reset"; (...)."""
        found = {}
        for name, node in self._nodes.items():
            count = node.fallbacks(self._locals[name]) if self._begun else None
            if count is not None:
                found[name] = self._shaped(count)
        if self._begun and self.on_divergence in ("hold", "reset"):
            found[self.on_divergence] = self._shaped(self._course.failures.missed)
        return found

    @property
    def on_divergence(self) -> OnDivergence:
        """What is done with batch elements that diverge."""
        return self._course.failures.policy

    @property
    def divergence_events(self) -> Sequence[DivergenceEvent]:
        """The last batch elements that diverged, if the run goes on: when, at which node, and why."""
        return self._course.failures.divergence_events

    # --- what is to come --------------------------------------------------------------------------------------------
    def forecast(self, horizon: float, every: float | None = None, *, parameters: bool = True) -> Forecast:
        """What states and observations are expected to be until `horizon` from now, with standard deviations that grow.

        every: the time between two of them; the sampling interval unless given. Covariances follow the linearised flow,
        fed by the noises that the precision nodes believe in. parameters: whether what is not known of them counts too.
        """
        from pcnet.engine.forecast import forecast

        self._need_begun()
        with Limited(self.threads):
            return forecast(self, horizon, every, parameters=parameters)

    def sample(self, horizon: float, draws: int = 1, *, every: float | None = None, seed: int) -> Draws:
        """What might come: draws from the model that the graph is, from the beliefs as they are now."""
        from pcnet.engine.forecast import draw

        self._need_begun()
        with Limited(self.threads):
            return draw(self, horizon, draws, every, seed)

    def innovation(self, observation: Any, t: float | None = None) -> dict[str, Innovation]:
        """How far an observation that is about to be taken in is from its forecast, by sensory node."""
        from pcnet.engine.forecast import one_ahead

        self._need_begun()
        if t is not None and moment(t) <= self.time:
            raise ObservationError(f"t = {t} is not after the last observation at t = {self.time:g}")
        with Limited(self.threads):
            return one_ahead(self, self._intake.one(observation), None if t is None else moment(t))

    @property
    def time(self) -> float:
        """When the last observation came; the first is at 0 unless times are given."""
        return self._course.clock.time if self._begun else 0.0

    @property
    def interval(self) -> float:
        """The sampling interval, if all batch elements have the same."""
        self._need_begun()
        return self._course.clock.dt

    @property
    def batch_shape(self) -> tuple[int, ...]:
        self._need_begun()
        return tuple(self._start.batch_shape)

    @property
    def intervals(self) -> Tensor:
        """The sampling interval of each batch element, (B,)."""
        self._need_begun()
        return self._course.clock.interval

    def period(self, node: str) -> Tensor:
        """After how many observations a node that is carried on is so again, (B,); 1 for others."""
        self._need_begun()
        return plan.period(self._acts, self._locals[node], "predict", self._nothing)

    def result(self) -> Result:
        """All that was recorded so far."""
        self._need_begun()
        return self.result_of(self._tapes, self._times)

    def result_of(self, tapes: Mapping[str, TraceBuffer], times: Sequence[float]) -> Result:
        """What these tapes hold of these last times as a result, with all else as it is now."""
        shape = tuple(self._start.batch_shape)
        traces = {}
        for key, tape in tapes.items():
            values = tape.tensor()
            if values is not None:
                values = values[len(values) - len(times) :]
                array = values.movedim(0, 1).reshape(*shape, values.shape[0], *values.shape[2:])
                traces[key] = Trace(array.numpy(), tape.dims)
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
        )

    def _need_begun(self) -> None:
        if not self._begun:
            raise ObservationError("there is nothing to read before the first observation; call step(y) first")

    # --- a tick ---------------------------------------------------------------------------------------------------
    def _take(self, observation: Observation | Sample, t: float | None) -> None:
        """One tick, at its time."""
        if isinstance(observation, Sample):
            if t is not None:
                raise ObservationError(f"observation {self.tick} has two times: t = {t} and that of its sample")
            seen, t = observation
        else:
            seen = observation
        t = None if t is None else moment(t)
        begun = self._begun
        if not begun:
            self._begin(seen)
        mark, recorded = self._course.mark(), len(self._times)
        try:
            filled = {name: self._fill(name, value) for name, value in seen.items()}
            self._course.clock.advance(t, self.tick)
            for name, value in filled.items():
                self._locals[name].observation = value
            self._tick(mark)
        except BaseException:  # also by Ctrl-C: what is half done would be saved, and then done once more
            self._course.go_back(mark)
            self._begun = begun
            del self._times[recorded:]
            for tape in self._tapes.values():
                tape.truncate(recorded)
            raise

    def _fill(self, name: str, value: Tensor) -> Tensor:
        try:
            return self._start.fill(value, 1)
        except RuntimeError:
            raise ObservationError(
                f"observation {self.tick} of {name!r} has batch dimensions {tuple(value.shape[:-1])}; the run "
                f"began with {tuple(self._start.batch_shape)}"
            ) from None

    def _tick(self, before: Mark) -> None:
        course = self._course
        failures = course.failures
        try:
            self.act()
        except NumericalError as broken:  # which batch elements are to blame is not known
            failures.note(broken.node, None, broken.why, self.tick)
            self._energies = [Energy() for _ in self._nodes]
            course.accuracy = course.complexity = self._nothing
        failed = failures.deal_with(self._energies, course.complexity - course.accuracy, before.beliefs, self.tick)
        if failed is not None:
            self._leave_unopened(failed, before.unopened)
        if failures.going is not None:
            course.accuracy = torch.where(failures.going, course.accuracy, torch.nan)
            course.complexity = torch.where(failures.going, course.complexity, torch.nan)
        course.sum_accuracy = course.sum_accuracy + _but(failed, course.accuracy, 0.0)
        course.sum_complexity = course.sum_complexity + _but(failed, course.complexity, 0.0)
        course.accuracy = _but(failed, course.accuracy, torch.nan)
        course.complexity = _but(failed, course.complexity, torch.nan)
        if (self.tick + 1) % self.record.every == 0 and self._tapes:
            self._times.append(course.clock.time)
            for tape in self._tapes.values():
                tape.append(failures.going)
        for see in self.watchers:
            see(course.clock.time, failures.going)
        self.tick += 1

    def act(self) -> None:
        """All that the schedule asks of the nodes at this tick, and their free energy.

        `step` and `run` call it; a subclass may override it to look on, as examples/benchmark_live.py does.
        """
        if self._course.unopened is not None:
            self._open()
        for line in self._acts:
            due = line.due(self.tick)
            if due is not False:
                self._do(line, None if due is True else due)
        counted = self._once if self.tick else ()  # what stands still for a pass counts once in it
        self._energies = [
            Energy() if name in counted else node.energy(self._locals[name]) for name, node in self._nodes.items()
        ]
        self._course.accuracy = self._total([energy.accuracy for energy in self._energies])
        self._course.complexity = self._total([energy.complexity for energy in self._energies])

    def _total(self, parts: list[Tensor | None]) -> Tensor:
        found = [part for part in parts if part is not None]
        return sum(found[1:], found[0]) if found else self._nothing

    def _share(self, i: int) -> Tensor:
        """The free energy of the i-th node, (B,)."""
        free = self._energies[i].free
        return self._nothing if free is None else free

    def _do(self, line: Line, mask: Tensor | None) -> None:
        going = self._course.failures.going
        if going is not None:
            mask = going if mask is None else mask & going
        for _ in range(line.times):
            for do, local, node in line.doers:
                local.mask = mask
                try:
                    do(local)
                except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                    raise NumericalError(node, str(error)) from None
                finally:
                    local.mask = None
                if local.trouble is not None:
                    (where, why), local.trouble = local.trouble, None
                    self._course.failures.note(node, where, why, self.tick)

    # --- keeping ----------------------------------------------------------------------------------------------------
    def save(self, path: str | Path, *, recording: bool = True) -> Path:
        """Write all that it takes to go on from here, to the same digits, whole or not at all; see `pcnet.resume`.

        recording: with all that was recorded so far, or as if the recording began here.
        """
        from pcnet.engine.checkpoint import save

        self._need_begun()
        return save(self, Path(path), recording)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What changes during a run, but for the recording: tensors by name, and facts fit for JSON."""
        self._need_begun()
        tensors, facts = self._course.state()
        return tensors, facts | {"batch_shape": list(self._start.batch_shape)}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a `state`. A part that the nodes of this graph do not have, or lack, is a KeyError."""
        seen = {name: tensors[key] for name in self._nodes if (key := f"{name}/observation") in tensors}
        shape = torch.Size(facts["batch_shape"])
        with torch.inference_mode():
            self._begin_with(shape, {name: value.view(*shape, value.shape[-1]) for name, value in seen.items()})
            self._course.restore(tensors, facts)

    @property
    def tapes(self) -> Mapping[str, TraceBuffer]:
        """What is being recorded, by name."""
        self._need_begun()
        return self._tapes

    @property
    def recorded_times(self) -> list[float]:
        """When what is recorded was so."""
        self._need_begun()
        return self._times

    # --- setting up -----------------------------------------------------------------------------------------------
    def _begin(self, observation: Observation) -> None:
        brought = broadcast(*(value.shape[:-1] for value in observation.values()))
        try:
            shape = broadcast(self.graph.batch_shape, self.schedule.batch_shape, brought)
        except RuntimeError:
            raise ObservationError(
                f"the batch dimensions of the settings {tuple(self.graph.batch_shape)}, of the schedule "
                f"{tuple(self.schedule.batch_shape)} and of the observations {tuple(brought)} do not fit together"
            ) from None
        self._begin_with(shape if self._copies is None else torch.Size((self._copies, *shape)), observation)

    def _begin_with(self, shape: torch.Size, observation: Observation) -> None:
        self._start = BatchSpec(shape.numel(), self.dtype, self.device, shape)
        self._nothing = torch.zeros(shape.numel(), dtype=self.dtype, device=self.device)
        self._course.failures.begin(self._start)
        self._course.begin(self._set_up_clock(), self._nothing)
        for name, node in self._nodes.items():
            self._locals[name].clock = self._course.clock
            if name in observation:
                self._locals[name].observation = self._start.fill(observation[name], 1)
            node.begin(self._locals[name], self._start)
        for name, belief in self._standing.items():
            self._nodes[name].warm_start(self._locals[name], belief)
        self._closing = plan.lay_out(self.schedule.on_end, self.graph.topological_order, self._locals, self._start)
        self._opening = plan.lay_out(self.schedule.on_start, self.graph.topological_order, self._locals, self._start)
        self._acts = plan.lay_out(self.schedule.acts, self.graph.topological_order, self._locals, self._start)
        self._begun = True
        self._times: list[float] = []
        self._tapes = self.tapes_for(self.record)

    def _open(self) -> None:
        """Do what is done once, for the batch elements of which something is seen for the first time."""
        assert self._course.unopened is not None
        seen = torch.zeros_like(self._course.unopened)
        for name in self._observers:
            observation = self._locals[name].observation
            assert observation is not None
            seen = seen | torch.isfinite(observation).any(-1)
        mask = seen & self._course.unopened
        if bool(mask.any()):
            if self.tick:
                self._begin_observers(mask)
            for line in self._opening:
                self._do(line, None if bool(mask.all()) else mask)
        left = self._course.unopened & ~mask
        self._course.unopened = left if bool(left.any()) else None

    def _leave_unopened(self, failed: Tensor, before: Tensor | None) -> None:
        """After a tick that some lost: those who begin anew, or had not begun before it, have not begun."""
        nobody = torch.zeros_like(failed)
        then = failed if self.on_divergence == "reset" else nobody if before is None else before & failed
        left = then if self._course.unopened is None else then | (self._course.unopened & ~failed)
        self._course.unopened = left if bool(left.any()) else None

    def _begin_observers(self, mask: Tensor) -> None:
        """Let observing nodes begin once more, with what is now the first observation of these batch elements."""
        for name in self._observers:
            local = self._locals[name]
            local.mask = mask
            try:
                self._nodes[name].begin(local, self._start)
            finally:
                local.mask = None

    # --- recording ------------------------------------------------------------------------------------------------
    def _check_record(self) -> None:
        known = {quantity for node in self._nodes.values() for quantity in node.quantities} | {ENERGY}
        for quantity in self.record.quantities:
            if quantity not in known:
                raise ScheduleError(
                    f"nothing called {quantity!r} can be recorded; there is: {', '.join(sorted(known))}"
                )
        for name in self.record.nodes or ():
            _ = self.graph[name]

    def tapes_for(self, record: Record) -> dict[str, TraceBuffer]:
        """Empty tapes for what a record asks for; each writes down what is so at the time."""
        self._need_begun()
        tapes: dict[str, TraceBuffer] = {}
        chosen = record.nodes if record.nodes is not None else tuple(self._nodes)
        for name in chosen:
            local = self._locals[name]
            for quantity, (dims, raw, transform) in self._nodes[name].quantities.items():
                if quantity in record.quantities:
                    tapes[f"{name}.{quantity}"] = TraceBuffer(dims, partial(raw, local), transform)
        if ENERGY in record.quantities:
            tapes["accuracy"] = TraceBuffer((), lambda: self._course.accuracy)
            tapes["complexity"] = TraceBuffer((), lambda: self._course.complexity)
            for i, name in enumerate(self._nodes):
                tapes[f"{name}.free_energy"] = TraceBuffer((), partial(self._share, i))
        if record.messages:
            for channel in self._channels:
                tapes[channel.name] = TraceBuffer(("message",), channel.content)
        return tapes

    def _set_up_clock(self) -> Clock:
        """A clock that goes by the shortest sampling interval of the observing nodes; by 1 if none is given."""
        given = [each for name in self._observers if (each := self._nodes[name].sampling_interval) is not None]
        if not given:
            return Clock(torch.ones_like(self._nothing), 1.0)
        interval = torch.stack([self._start.fill(each, 0) for each in given]).amin(0)
        return Clock(interval, min(float(each.min()) for each in given))

    def _shaped(self, value: Tensor) -> Tensor:
        return value.reshape(self._start.batch_shape).clone()


def _with_times(
    observations: Iterable[Observation | Sample], times: Iterable[float] | None
) -> Iterator[tuple[Observation | Sample, float | None]]:
    if times is None:
        yield from ((observation, None) for observation in observations)
        return
    try:
        yield from zip(observations, times, strict=True)
    except ValueError as error:
        if "zip()" not in str(error):
            raise
        raise ObservationError("there must be as many times as observations") from None


def _but(where: Tensor | None, value: Tensor, other: float) -> Tensor:
    return value if where is None else torch.where(where, other, value)


class Limited:
    """While it is entered, lets torch use so many threads within an operation; None leaves it alone.

    With matrices as small as these, threads cost more than they bring, and on a busy machine an
    operation that waits for a second thread takes milliseconds instead of microseconds.
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
