"""Runs: a model bound to a batch, the snapshot after its last observation, and the eager tick to the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pcnet.engine.choice import EngineChoice
from pcnet.engine.clock import Clock, Interval
from pcnet.engine.divergence import DivergenceEvent, DivergenceLog, everything_failed, resolve
from pcnet.engine.inputs import Observation
from pcnet.engine.program import Program
from pcnet.engine.recording import columns
from pcnet.engine.rescue import Rescue
from pcnet.engine.state import GraphState, NodeStates, select_nodes
from pcnet.engine.tick import Failure, Inputs, NumericalError, Outputs, Workspace, tick
from pcnet.errors import ObservationError
from pcnet.model.context import Now
from pcnet.model.model import Model, OnDivergence
from pcnet.model.protocols import FitsRecordedData
from pcnet.results.recorder import Record, Recorder
from pcnet.settings import broadcast

if TYPE_CHECKING:
    from pcnet.engine.compiled.layout import Array
    from pcnet.engine.compiled.lead import Place


class Snapshot(NamedTuple):
    """Where a run is: replaced as a whole by each observation, so that it is taken in completely or not at all.

    tick: number of observations. relative_dt: of the last one. rows: number of recorded rows.
    """

    tick: int
    state: GraphState
    clock: Clock
    relative_dt: Tensor | None
    log: DivergenceLog
    outputs: Outputs
    rows: int = 0


class Run:
    """A model bound to a batch.

    snapshot: where the run is, unless compiled code is ahead of it; `now` is always right.
    """

    def __init__(
        self,
        program: Program,
        engine: EngineChoice,
        record: Record,
        on_divergence: OnDivergence,
        warm_start: Mapping[str, Any] | None = None,
    ) -> None:
        """warm_start: states of nodes that a fit continues from."""
        self.program = program
        self.engine, self.record, self.on_divergence = engine, record, on_divergence
        state = program.initial
        self.space = Workspace(program, state)
        if warm_start:
            nodes = dict(state.nodes)
            for name, given in warm_start.items():
                node = program.nodes[name]
                assert isinstance(node, FitsRecordedData)
                nodes[name] = node.warm_start(self.space.contexts[name], given)
            state = state._replace(nodes=nodes)
        self.interval = Interval.of(program.interval, program.shortest_dt)
        self.first = state
        """What batch elements are reset to."""
        self.rescue = Rescue() if on_divergence == "hold" else None
        self.snapshot = Snapshot(0, state, Clock(), None, DivergenceLog(), Outputs({}))
        self.recorder = self.recorder_for(record)
        """What was recorded, without the last compiled ticks; `recorded` is complete."""
        self.show()

    @property
    def now(self) -> Snapshot:
        """Where the run is. Setting it discards what compiled code has done since."""
        if self.engine.lead is not None:
            self.engine.lead.catch_up()
        return self.snapshot

    @now.setter
    def now(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if self.engine.lead is not None:
            self.engine.lead.place = None

    def release(self) -> None:
        """Free the memory of compiled code at once: it refers to this run, and would wait for the garbage collector."""
        self.engine.lead = None

    def node_state(self, name: str) -> Any:
        """The present state of a node, without reading that of other nodes from compiled code."""
        lead = self.engine.lead
        return self.snapshot.state.nodes[name] if lead is None or lead.place is None else lead.node_state(name)

    def replace_nodes(self, nodes: NodeStates) -> None:
        """Replace the present states of some nodes; contexts show it from the next `show` on."""
        lead = self.engine.lead
        if lead is not None and lead.place is not None:
            lead.replace_nodes(nodes)
        else:
            state = self.snapshot.state
            self.now = self.snapshot._replace(state=state._replace(nodes={**state.nodes, **nodes}))

    @property
    def place(self) -> Snapshot | Place:
        """Number of observations, clock and number of recorded rows, without reading the state of compiled code."""
        lead = self.engine.lead
        return self.snapshot if lead is None or lead.place is None else lead.place

    @property
    def recorded(self) -> Recorder:
        """What was recorded so far."""
        if self.engine.lead is not None:
            self.engine.lead.flush()
        self.recorder.truncate(self.place.rows)  # after an interrupted tick
        return self.recorder

    def last_recorded(self, name: str, count: int) -> Tensor | None:
        """The last values of a column, at most so many, (T, B, ...), without reading the state of compiled code."""
        if self.engine.lead is not None:
            self.engine.lead.flush()
        return self.recorder.last(name, count)

    def newest(self, name: str) -> Array | None:
        """The last value of a column in the memory of compiled single ticks, (n, lanes); None if it is elsewhere."""
        return None if self.engine.lead is None else self.engine.lead.newest(name)

    def take_recorded(self) -> dict[str, Tensor]:
        """What was recorded since the last call, (T, B, ...) by name; the state stays where it is."""
        found, before = self.recorded.take(), self.snapshot
        self.snapshot = before._replace(rows=0)
        if self.engine.lead is not None:
            self.engine.lead.forget_rows(before)
        return found

    @property
    def running(self) -> Tensor | None:
        """Batch elements that have not stopped, (B,); None for all."""
        running = self.now.state.running
        return None if bool(running.all()) else running

    def recorder_for(self, record: Record) -> Recorder:
        """An empty recorder for what a record asks for."""
        return Recorder(columns(self.program, self.space, record, lambda: (self._shown.state, self._shown.outputs)))

    def show(self) -> None:
        """Let contexts show the present state."""
        self._show(self.now)

    def _show(self, snapshot: Snapshot) -> None:
        self._shown, state = snapshot, snapshot.state
        self.space.load(state.nodes, Now(state.time, state.dt, snapshot.relative_dt))

    def start_at(self, t: float) -> None:
        """Let the first observation be at time t, if a function depends on the time.

        Otherwise times count from the first observation, so that their differences lose no digits.
        """
        if self.program.depends_on_time:
            now = self.now
            self.now = now._replace(state=now.state._replace(time=t - self.program.interval.double()))

    def advance(self, observation: Observation, t: float | None) -> None:
        """Take in one observation with the eager engine."""
        program, now, space = self.program, self.now, self.space
        expanded = self._expanded(observation)
        clock, dt, relative_dt = self.interval.advance(now.clock, t, now.tick)
        inputs = Inputs(expanded, dt, relative_dt, program.due(now.tick), now.tick == 0)
        try:
            after, outputs = tick(program, now.state, inputs, space)
        except NumericalError as error:  # the batch elements that are to blame are not known
            outputs = everything_failed(program, now.state, error.node, error.why)
            time = dt + now.state.time
            after = now.state._replace(time=time, dt=dt, accuracy=program.zeros, complexity=program.zeros)
        state, events = resolve(self.on_divergence, space, now.state, after, outputs, inputs, now.tick, self.first)
        if events and self.rescue is not None:
            state = self.rescue.after_loss(now.tick, [event.element for event in events], state, self.first)
        log = now.log.with_events(events, self.on_divergence == "stop") if events else now.log
        following = Snapshot(now.tick + 1, state, clock, relative_dt, log, outputs, now.rows)
        self._show(following)
        if (now.tick + 1) % self.record.every == 0 and self.recorder.columns:
            self.recorder.truncate(now.rows)  # after an interrupted tick
            running = None if bool(state.running.all()) else state.running
            self.recorder.append(self.recorder.read(clock.time, running))
            if self.engine.lead is not None:
                self.recorder.close()  # digits must not depend on which ticks are eager
            following = following._replace(rows=now.rows + 1)
        self.now = following

    def keep_for_rescue(self) -> None:
        """Keep the present state from time to time, for beliefs that must be set back."""
        if self.rescue is not None and self.rescue.is_due(self.place.tick):
            self.rescue.keep(self.place.tick, self.now.state)

    def restart(self, which: Tensor) -> None:
        """Set some batch elements (B,) back to the start; the time goes on."""
        state = self.now.state
        nodes = select_nodes(which, self.first.nodes, state.nodes)
        started = torch.where(which, self.first.started, state.started)
        self.now = self.now._replace(state=state._replace(nodes=nodes, started=started))
        self.show()

    def _expanded(self, observation: Observation) -> Observation:
        """An observation of the whole batch."""
        filled, spec = {}, self.program.spec
        for name, value in observation.items():
            try:
                filled[name] = spec.expand(value, 1)
            except RuntimeError:
                shapes = f"{tuple(value.shape[:-1])}; the run began with {tuple(spec.batch_shape)}"
                where = f"observation {self.now.tick} of {name!r}"
                raise ObservationError(f"{where} has batch dimensions {shapes}") from None
        return filled

    def finish(self) -> None:
        """Take the actions that the schedule has for the end of a pass."""
        now, running = self.now, self.running
        self.show()
        try:
            self.space.take_all(self.program.on_end, running)
            failures = tuple(self.space.failures)
        except NumericalError as error:
            failures = (Failure(error.node, now.state.running, error.why),)
        events, left = [], now.state.running.clone()
        for failure in failures:
            for i in (failure.where & left).nonzero()[:, 0].tolist():
                events.append(DivergenceEvent(now.tick, failure.node.name, i, failure.why))
                left[i] = False
        state = now.state._replace(nodes=self.space.nodes, running=left)
        self.now = now._replace(state=state, log=now.log.with_events(events, self.on_divergence == "stop"))

    def shaped(self, value: Tensor) -> Tensor:
        """A value (B, ...) of the batch with its own dimensions."""
        return value.reshape((*self.program.spec.batch_shape, *value.shape[1:])).clone()


def common_batch_shape(model: Model, observation: Observation) -> torch.Size:
    """The batch dimensions of settings, schedule and an observation together."""
    given = broadcast(*(value.shape[:-1] for value in observation.values()))
    shapes = model.graph.batch_shape, model.schedule.batch_shape, given
    try:
        return broadcast(*shapes)
    except RuntimeError:
        raise ObservationError(
            "the batch dimensions of settings, schedule and observations do not fit together: "
            f"{[tuple(shape) for shape in shapes]}"
        ) from None
