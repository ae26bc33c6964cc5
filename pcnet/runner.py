"""Scheduled message passing: wakes nodes when their clocks tick. Nothing here knows what kind a node is."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pcnet import plan
from pcnet.errors import DivergenceError, ObservationError, ScheduleError, SettingError
from pcnet.graph import Graph
from pcnet.node import Energy, Local, Node, Start, merge
from pcnet.observations import Intake, Observation
from pcnet.plan import Line
from pcnet.record import ENERGY, Record, Tape
from pcnet.result import Divergence, Result, Trace
from pcnet.schedule import Schedule
from pcnet.settings import broadcast
from pcnet.structure import Structure
from pcnet.wiring import connect


class Live:
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
        on_divergence: Literal["raise", "stop"] = "raise",
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise ScheduleError(f"schedule must be a Schedule, such as pcnet.odem(), not {schedule!r}")
        if dtype not in (torch.float32, torch.float64):
            raise SettingError(f"dtype must be torch.float32 or torch.float64, not {dtype!r}")
        if on_divergence not in ("raise", "stop"):
            raise SettingError(f"on_divergence must be 'raise' or 'stop', not {on_divergence!r}")
        device = device or torch.device("cpu")
        graph.check(dtype, device)
        self.graph = graph
        self.schedule = schedule
        self.record = Record.of(record)
        self.dtype, self.device, self.threads = dtype, device, threads
        self.on_divergence = on_divergence
        self.tick = 0
        """How many observations have been taken in."""
        self.watchers: list[Callable[[float, Tensor | None], None]] = []
        """Called after each observation with its time and which batch elements go on, if not all."""
        self._nodes = graph.nodes
        self._locals = {name: Local() for name in self._nodes}
        self._observers = [name for name, node in self._nodes.items() if node.observes]
        dims = {node.name: node.observed_width for node in self._nodes.values() if node.observes}
        self._intake = Intake(dims, self.dtype, self.device)
        plan.check(schedule, self._nodes)
        self._check_record()
        self._channels = connect(graph, self._locals)
        self._begun = False
        self._failing: dict[int, Node] = {}
        self._acts: tuple[Line, ...] = ()
        self._start: Start
        self._sum_accuracy: Tensor
        self._sum_complexity: Tensor
        self._going: Tensor | None = None  # which batch elements go on, once some have diverged
        self._stopped: dict[int, tuple[int, str]] = {}

    # --- one observation at a time --------------------------------------------------------------------------------
    def step(self, observation: Any) -> Live:
        """Take in one observation, (..., dim) or a mapping from sensory names to these."""
        with torch.inference_mode(), limited(self.threads):
            self._step(self._intake.one(observation))
        return self

    def run(self, observations: Any, progress: bool | None = None) -> Live:
        """Take in observations to the end of them."""
        stream, total = self._intake.stream(observations)
        hidden = not (sys.stderr.isatty() if progress is None else progress)
        with torch.inference_mode(), limited(self.threads):
            for observation in tqdm(stream, total=total, disable=hidden, unit="obs", desc=self.schedule.name):
                self._step(observation)
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

    def local(self, node: str) -> Local:
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
        return self._shaped(self._complexity - self._accuracy)

    @property
    def free_action(self) -> Tensor:
        """The sum of F over all observations, (...); NaN where the run diverged."""
        return self.total_complexity - self.total_accuracy

    @property
    def total_accuracy(self) -> Tensor:
        """The sum of the accuracy over all observations, (...)."""
        self._need_begun()
        return self._shaped(self._sum_accuracy)

    @property
    def total_complexity(self) -> Tensor:
        """The sum of the complexity over all observations, (...)."""
        self._need_begun()
        return self._shaped(self._sum_complexity)

    @property
    def diverged(self) -> Divergence:
        """Which batch elements have stopped, when and at which node; they are held where they were before."""
        self._need_begun()
        at, node = np.full(self._start.batch, -1), np.full(self._start.batch, "", dtype=object)
        for i, (tick, name) in self._stopped.items():
            at[i], node[i] = tick, name
        shape = tuple(self._start.batch_shape)
        return Divergence(at.reshape(shape), node.astype(str).reshape(shape))

    @property
    def fallbacks(self) -> dict[str, Tensor]:
        """How often named fallbacks acted, by node; (...)."""
        found = {}
        for name, node in self._nodes.items():
            count = node.fallbacks(self._locals[name]) if self._begun else None
            if count is not None:
                found[name] = self._shaped(count)
        return found

    def result(self) -> Result:
        """All that was recorded so far."""
        self._need_begun()
        return self.result_of(self._tapes, self._times)

    def result_of(self, tapes: Mapping[str, Tape], times: Sequence[float]) -> Result:
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
            structure=Structure.of(self.graph, self.schedule),
        )

    def _need_begun(self) -> None:
        if not self._begun:
            raise ObservationError("there is nothing to read before the first observation; call step(y) first")

    # --- a tick ---------------------------------------------------------------------------------------------------
    def _step(self, observation: Observation) -> None:
        if not self._begun:
            self._begin(observation)
        for name, value in observation.items():
            try:
                self._locals[name].observation = self._start.fill(value, 1)
            except RuntimeError:
                raise ObservationError(
                    f"observation {self.tick} of {name!r} has batch dimensions {tuple(value.shape[:-1])}; the run "
                    f"began with {tuple(self._start.batch_shape)}"
                ) from None
        before = [(local.belief, local.memory) for local in self._locals.values()]
        for line in self._acts:
            due = line.due(self.tick)
            if due is not False:
                self._do(line, None if due is True else due)
        energies = [node.energy(self._locals[name]) for name, node in self._nodes.items()]
        self._accuracy = self._total([energy.accuracy for energy in energies])
        self._complexity = self._total([energy.complexity for energy in energies])
        self._energies = energies
        free_energy = self._complexity - self._accuracy
        counted = free_energy if self._going is None else free_energy[self._going]
        if self._failing or not math.isfinite(counted.sum().item()):
            self._stop_diverged(free_energy, before)
        if self._going is not None:
            self._accuracy = torch.where(self._going, self._accuracy, torch.nan)
            self._complexity = torch.where(self._going, self._complexity, torch.nan)
        self._sum_accuracy = self._sum_accuracy + self._accuracy
        self._sum_complexity = self._sum_complexity + self._complexity
        if (self.tick + 1) % self.record.every == 0 and self._tapes:
            self._times.append(self.tick * self._dt)
            for tape in self._tapes.values():
                tape.write(self._going)
        for see in self.watchers:
            see(self.tick * self._dt, self._going)
        self.tick += 1

    def _total(self, parts: list[Tensor | None]) -> Tensor:
        found = [part for part in parts if part is not None]
        return sum(found[1:], found[0]) if found else self._nothing

    def _share(self, energy: Energy) -> Tensor:
        """A node's free energy, complexity − accuracy."""
        if energy.accuracy is None:
            return self._nothing if energy.complexity is None else energy.complexity
        return -energy.accuracy if energy.complexity is None else energy.complexity - energy.accuracy

    def _do(self, line: Line, mask: Tensor | None) -> None:
        if self._going is not None:
            mask = self._going if mask is None else mask & self._going
        for _ in range(line.times):
            for do, local, node in line.doers:
                local.mask = mask
                try:
                    do(local)
                finally:
                    local.mask = None
                if local.trouble is not None:
                    self._take_note(node, local)

    # --- divergence -----------------------------------------------------------------------------------------------
    def _take_note(self, node: Node, local: Local) -> None:
        """A node says that it cannot go on with some batch elements: end the run, or remember it to the tick's end."""
        assert local.trouble is not None
        (where, why), local.trouble = local.trouble, None
        indices = where.nonzero()[:, 0].tolist()
        if self.on_divergence == "raise":
            raise DivergenceError(f"{node.title} at observation {self.tick}{_elements(indices, len(where))}: {why}")
        for i in indices:
            self._failing.setdefault(i, node)

    def _stop_diverged(self, free_energy: Tensor, before: list[tuple[Any, Any]]) -> None:
        """End the run, or put the failing batch elements back to where they were before this tick and leave them there.

        Held there they stay finite, so that whatever is still computed of them does not spoil their neighbours.
        """
        lost = ~torch.isfinite(free_energy)
        if self._going is not None:
            lost = lost & self._going
        for i in lost.nonzero()[:, 0].tolist():
            self._failing.setdefault(i, self._culprit(i))
        if not self._failing:  # finite each, but not their sum over the batch
            return
        if self.on_divergence == "raise":
            node = next(iter(self._failing.values()))
            raise DivergenceError(
                f"{node.title} is no longer finite at observation {self.tick}"
                f"{_elements(list(self._failing), len(lost))}; smaller steps (lower kappa or rate), lower precisions, "
                "a longer smoothness or an initial_mean help"
            )
        going = torch.ones_like(lost) if self._going is None else self._going.clone()
        for i, node in self._failing.items():
            self._stopped[i] = self.tick, node.name
            going[i] = False
        self._failing.clear()
        self._going = going
        for local, (belief, memory) in zip(self._locals.values(), before, strict=True):
            local.belief = merge(going, local.belief, belief)
            local.memory = local.memory if memory is None else merge(going, local.memory, memory)

    def _culprit(self, i: int) -> Node:
        """The first node whose belief or share of the free energy is not finite in a batch element."""
        for (name, node), energy in zip(self._nodes.items(), self._energies, strict=True):
            parts = [*self._locals[name].belief, self._share(energy)]
            if not all(bool(torch.isfinite(part[i]).all()) for part in parts):
                return node
        return next(iter(self._nodes.values()))  # finite each, but not their sum

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
        self._start = Start(shape.numel(), self.dtype, self.device, shape)
        self._nothing = torch.zeros(shape.numel(), dtype=self.dtype, device=self.device)
        self._sum_accuracy = self._sum_complexity = self._nothing
        for name, node in self._nodes.items():
            if name in observation:
                self._locals[name].observation = self._start.fill(observation[name], 1)
            node.begin(self._locals[name], self._start)
        opening = plan.lay_out(self.schedule.opening, self.graph.from_above, self._locals, self._start)
        self._acts = plan.lay_out(self.schedule.acts, self.graph.from_above, self._locals, self._start)
        self._begun = True
        self._times: list[float] = []
        self._dt = self._common_dt()
        self._tapes = self.tapes(self.record)
        for line in opening:
            self._do(line, None)

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

    def tapes(self, record: Record) -> dict[str, Tape]:
        """Empty tapes for what a record asks for; each writes down what is so at the time."""
        self._need_begun()
        tapes: dict[str, Tape] = {}
        chosen = record.nodes if record.nodes is not None else tuple(self._nodes)
        for name in chosen:
            local = self._locals[name]
            for quantity, (dims, read) in self._nodes[name].quantities.items():
                if quantity in record.quantities:
                    tapes[f"{name}.{quantity}"] = Tape(dims, lambda r=read, lo=local: r(lo))  # type: ignore[misc]
        if ENERGY in record.quantities:
            tapes["accuracy"] = Tape((), lambda: self._accuracy)
            tapes["complexity"] = Tape((), lambda: self._complexity)
            for i, name in enumerate(self._nodes):
                tapes[f"{name}.free_energy"] = Tape((), lambda i=i: self._share(self._energies[i]))  # type: ignore[misc]
        if record.messages:
            for channel in self._channels:
                tapes[channel.name] = Tape(("message",), channel.content)
        return tapes

    def _common_dt(self) -> float:
        """The sampling interval if all sensory nodes have the same, else 1: then times are observation numbers."""
        given = [self._nodes[name].sampling_interval for name in self._observers]
        intervals = {float(value) for each in given if each is not None for value in each.reshape(-1)}
        return intervals.pop() if len(intervals) == 1 else 1.0

    def _shaped(self, value: Tensor) -> Tensor:
        return value.reshape(self._start.batch_shape).clone()


def _elements(indices: list[int], batch: int) -> str:
    """Which batch elements, in words, where there are several."""
    if batch == 1:
        return ""
    more = ", …" if len(indices) > 8 else ""
    return f" (batch elements {', '.join(map(str, indices[:8]))}{more})"


@contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Let torch use so many threads within an operation, for the time being; None leaves it alone.

    With matrices as small as these, threads cost more than they bring, and on a busy machine an
    operation that waits for a second thread takes milliseconds instead of microseconds.
    """
    usual = torch.get_num_threads()
    if threads is None or threads == usual:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
