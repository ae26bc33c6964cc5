"""Smoothing of runs and sessions: beliefs about earlier states, given later observations.

While a model runs, each state keeps what a smoother needs of each observation (see `pcnet.numerics.smoothing`), as one
more recorded column. A `Trail` collects these rows, all of them or the last few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.engine.program import Program
from pcnet.engine.recording import result_of
from pcnet.engine.run import Run, Snapshot
from pcnet.engine.session import Session
from pcnet.engine.state import GraphState
from pcnet.engine.threads import ThreadLimit, exclusive
from pcnet.errors import GraphError, ObservationError, SettingError
from pcnet.model.graph import Graph
from pcnet.model.links import Predicts
from pcnet.model.model import Engine, RunOptions
from pcnet.model.protocols import SmoothingLayout, Smooths
from pcnet.numerics.laplace import standard_deviations
from pcnet.numerics.mixtures import WIDEST, mix
from pcnet.results.downsample import Array
from pcnet.results.recorder import SMOOTHING, Record, Recorder
from pcnet.results.result import Result, Smoothed, Trace

if TYPE_CHECKING:
    from pcnet.engine.compiled.backward import BackwardPass
    from pcnet.engine.compiled.engine import Known
    from pcnet.engine.compiled.fixed_lag import FixedLag

DRAIN = 256
"""Rows of a session that are collected at once; until then they stay with what compiled code has recorded."""
NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
Rows = Callable[[int], Mapping[str, Tensor]]
"""Gives the last so many rows by state, (T, B, w)."""


class _Block(NamedTuple):
    """Rows (T, B, w) of states by name, and the batch elements from which those of the next block continue."""

    rows: Mapping[str, Tensor]
    source: Tensor | None = None

    def continued(self, source: Tensor | None) -> _Block:
        """The block whose next rows continue from some of the elements that did so before."""
        if source is None:
            return self
        return self._replace(source=source if self.source is None else self.source[source])


class Trail:
    """What a smoother needs of all observations, or of the last ones.

    Batch elements may be dropped and copied, as the rows of a bank of hypotheses are; then what is kept of earlier
    observations is that of the elements from which the present ones continue.

    Args:
        lag: Number of observations before the last one that are kept; None for all.
    """

    def __init__(self, lag: int | None) -> None:
        self.lag = lag
        self.version = 0
        """Changes if earlier rows are others than they were."""
        self._blocks: list[_Block] = []

    def __len__(self) -> int:
        return sum(len(next(iter(block.rows.values()))) for block in self._blocks)

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows (T, B, w) by state."""
        keep = None if self.lag is None else -self.lag - 1
        self._blocks.append(_Block({name: each[keep:].clone() if keep else each for name, each in rows.items()}))
        if self.lag is not None:
            while len(self) - len(next(iter(self._blocks[0].rows.values()))) > self.lag:
                self._blocks.pop(0)

    def branch(self, source: Tensor) -> None:
        """Let the next rows continue from these batch elements, (B',)."""
        self.version += 1
        if self._blocks:
            self._blocks[-1] = self._blocks[-1].continued(source)

    def replace_last(self, row: Mapping[str, Tensor]) -> None:
        """Replace the last row by that of the present batch elements, (B, w) by state."""
        self.version += 1
        last = self._blocks.pop()
        before = {name: each[:-1] for name, each in last.rows.items()}
        if len(next(iter(before.values()))):
            self._blocks.append(_Block(before, last.source))
        elif self._blocks:
            self._blocks[-1] = self._blocks[-1].continued(last.source)
        self._blocks.append(_Block({name: each[None] for name, each in row.items()}))

    def clear(self) -> None:
        self.version += 1
        self._blocks = []

    def rows(self, last: int | None = None) -> dict[str, Tensor]:
        """The last so many rows, or all, (T, B, w) by state, of the present batch elements."""
        found: list[dict[str, Tensor]] = []
        index: Tensor | None = None
        count = 0
        for block in reversed(self._blocks):
            if block.source is not None:
                index = block.source if index is None else block.source[index]
            picked = {name: each if index is None else each[:, index] for name, each in block.rows.items()}
            found.append(picked)
            count += len(next(iter(picked.values())))
            if last is not None and count >= last:
                break
        names = found[0] if found else {}
        whole = {name: torch.cat([each[name] for each in reversed(found)]) for name in names}
        return whole if last is None else {name: each[-last:] for name, each in whole.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, for a checkpoint."""
        keep = None if self.lag is None else self.lag + 1
        return {f"smoothing/{name}": value for name, value in self.rows(keep).items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `tensors`, which are taken out of these."""
        names = [name for name in tensors if name.startswith("smoothing/")]
        rows = {name.removeprefix("smoothing/"): tensors.pop(name) for name in names}
        self.version += 1
        self._blocks = [_Block(rows)] if rows else []

    def check(self, run: Run) -> None:
        """KeyError if what was restored is not of this run."""
        rows, keep = self.rows(), run.place.tick if self.lag is None else min(run.place.tick, self.lag + 1)
        for name, column in run.recorder.columns.items():
            node, _, quantity = name.rpartition(".")
            if quantity == SMOOTHING and (not keep or rows.pop(node).shape != (keep, *column.read().shape)):
                raise KeyError(name)
        if rows:
            raise KeyError(min(rows))


def trail_for(graph: Graph, record: Record, smooth: bool | int) -> Trail | None:
    """The trail that an option `smooth` asks for; an error if the graph or the record do not fit."""
    if smooth is False:
        return None
    states = graph.belief_holders
    stacked = any(isinstance(link, Predicts) and not link.child.observes for link in graph.links)
    if stacked or len(states) != 1 or not isinstance(states[0], Smooths):
        raise GraphError(
            "smoothing is for graphs with one state, a KalmanStateNode, and no level above it; use "
            "graphs.adaptive_filter, or join levels into one state"
        )
    if record.every != 1:
        raise SettingError("smoothing needs every observation: leave out Record(every=...)")
    return Trail(None if smooth is True else smooth)


def with_smoothing(record: Record) -> Record:
    """A record that holds what a smoother needs as well."""
    return Record((*record.quantities, SMOOTHING), record.nodes, record.every, record.messages)


def without_smoothing(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take what a smoother needs out of recorded values; it is returned, by state."""
    ending = f".{SMOOTHING}"
    return {name.removesuffix(ending): values.pop(name) for name in list(values) if name.endswith(ending)}


class SmoothedNode(NamedTuple):
    """The smoothed belief about a node at T observations."""

    mean: Tensor  # (T, B, n)
    covariance: Tensor  # (T, B, n, n)


def smoothed_nodes(program: Program, rows: Mapping[str, Tensor], first_only: bool = False) -> dict[str, SmoothedNode]:
    """The smoothed beliefs about all nodes that are part of the belief of a state, by name."""
    found: dict[str, SmoothedNode] = {}
    for name, each in rows.items():
        node = program.nodes[name]
        assert isinstance(node, Smooths)
        layout = node.smoothing_layout(program.bound[name])
        found |= _by_node(layout, *node.smoothed(each, layout, first_only))
    return found


def _by_node(layout: SmoothingLayout, mean: Tensor, covariance: Tensor) -> dict[str, SmoothedNode]:
    """The belief about all elements, (T, B, ...), by node."""
    return {name: SmoothedNode(mean[..., at], covariance[..., at, at]) for name, at in layout.blocks.items()}


class CompiledReads:
    """Reads of the only state of a session with a fixed lag, in compiled code that goes on from read to read."""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._version = 0
        self._lags: dict[int, FixedLag] = {}
        self._back: BackwardPass | None = None

    def read(self, run: Run, lag: int, version: int, rows: Rows) -> Moments | None:
        """The smoothed belief about all elements; None if it cannot be compiled.

        Args:
            run: The run.
            lag: Number of observations, 1 or more.
            version: Changes if rows are others than they were at earlier reads.
            rows: Gives the last so many rows by state, (T, B, w).
        """
        if run.program is not self._program or version != self._version:
            self._program, self._version, self._lags, self._back = run.program, version, {}, None
            self._name = next(name for name, node in run.program.nodes.items() if isinstance(node, Smooths))
            node = run.program.nodes[self._name]
            assert isinstance(node, Smooths)
            self._layout = node.smoothing_layout(run.program.bound[self._name])
        return self._by_steps(run, lag, rows) if self._layout.by_steps else self._backwards(lag, rows)

    def _by_steps(self, run: Run, lag: int, rows: Rows) -> Moments | None:
        window, tick = self._lags.get(lag), run.place.tick
        if window is None:
            from pcnet.engine.compiled.fixed_lag import FixedLag

            assert self._program is not None
            window = self._lags[lag] = FixedLag(self._program, self._name, lag, rows(1)[self._name][0])
        new = tick - window.tick if window.tick >= 0 else lag + 1
        if new == 1:
            row = run.newest(f"{self._name}.{SMOOTHING}")
            made = window.add_all(rows(1)[self._name], tick) if row is None else window.add(row, tick)
        elif 0 <= new <= lag:
            made = not new or window.add_all(rows(new)[self._name], tick)
        else:
            made = window.start(rows(lag + 1)[self._name], tick)
        return Moments(self._layout, self._layout.size, window.moments()) if made else None

    def _backwards(self, lag: int, rows: Rows) -> Moments | None:
        from pcnet.engine.compiled.backward import BackwardPass

        assert self._program is not None
        every = rows(lag + 1)[self._name]
        if self._back is None:
            self._back = BackwardPass(self._program, self._name, every[-1])
        found = self._back.first(every)
        return None if found is None else Moments.of(self._layout, *found)


class Moments(NamedTuple):
    """The belief about all elements of a state: mean, sd and covariance, one after the other, (B, n + n + n²)."""

    layout: SmoothingLayout
    size: int  # n, which may include what a state reports beside its own elements
    values: Array

    @staticmethod
    def of(layout: SmoothingLayout, mean: Tensor, covariance: Tensor) -> Moments:
        sd = standard_deviations(covariance)
        return Moments(layout, mean.shape[-1], torch.cat([mean, sd, covariance.flatten(1)], 1).double().cpu().numpy())

    def by_node(self, shape: Sequence[int], dtype: Any) -> dict[str, Smoothed]:
        """The beliefs about nodes, with these batch dimensions."""
        n, values = self.size, self.values.reshape(*shape, -1)
        if values.dtype != dtype:
            values = values.astype(dtype)
        mean, sd, covariance = values[..., :n], values[..., n : 2 * n], values[..., 2 * n :].reshape(*shape, n, n)
        return {
            name: Smoothed(mean[..., at], sd[..., at], covariance[..., at, at])
            for name, at in self.layout.blocks.items()
        }

    def mixed(self, weight: Array) -> Moments | None:
        """Those of the mixture of rows of a bank by weights (K, B); None if some are 0 or would have to be bounded."""
        n, rows = self.size, self.values.reshape(*weight.shape, -1)
        if weight.shape[1] == 1 and not weight.all():
            rows, weight = rows[weight[:, 0] > 0], weight[weight[:, 0] > 0]
        sd = rows[..., n : 2 * n]
        if not (weight.all() and (sd.max(0, initial=0.0) <= WIDEST * sd.min(0, initial=np.inf)).all()):
            return None
        values = (weight[..., None] * rows).sum(0)
        away = rows[..., :n] - values[:, :n]
        scaled = weight[..., None] * away
        covariance = values[:, 2 * n :].reshape(-1, n, n)
        covariance += scaled.transpose(1, 2, 0) @ away.transpose(1, 0, 2)
        values[:, n : 2 * n] = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
        return self._replace(values=values)

    def nodes(self, dtype: torch.dtype) -> dict[str, SmoothedNode]:
        """The beliefs about nodes as tensors, (1, B, ...)."""
        n, values = self.size, torch.from_numpy(self.values).to(dtype)[None]
        return _by_node(self.layout, values[..., :n], values[..., 2 * n :].reshape(*values.shape[:2], n, n))


def mixed(found: Mapping[str, SmoothedNode], weight: Tensor) -> dict[str, SmoothedNode]:
    """Smoothed beliefs of a bank (T, K·B, ...) as those of the mixture by weights (K, B)."""
    made = {}
    for name, each in found.items():
        parts = {
            quantity: value.reshape(len(value), *weight.shape, *value.shape[2:])
            for quantity, value in (("mean", each.mean), ("covariance", each.covariance))
        }
        of = weight.expand(len(each.mean), *weight.shape).to(each.mean)
        parts["sd"] = standard_deviations(parts["covariance"])
        made[name] = SmoothedNode(*(mix(each, parts.__getitem__, of, has_sd=True) for each in ("mean", "covariance")))
    return made


def with_smoothed(result: Result, found: Mapping[str, SmoothedNode], orders: Iterable[str]) -> Result:
    """A result with smoothed beliefs; orders: names of nodes whose means have a dimension of orders."""
    shape, with_orders = result.batch_shape, set(orders)
    for name, each in found.items():
        for quantity, value in (("mean", each.mean), ("sd", standard_deviations(each.covariance))):
            array = _array(value, shape)
            if name in with_orders:
                result.traces[f"{name}.smoothed_{quantity}"] = Trace(array[..., None, :], ("order", "dimension"))
            else:
                result.traces[f"{name}.smoothed_{quantity}"] = Trace(array, ("dimension",))
        result.traces[f"{name}.smoothed_covariance"] = Trace(_array(each.covariance, shape), ("element", "element_"))
    return result


def _array(value: Tensor, shape: Sequence[int]) -> Array:
    """(T, B, ...) as (..., T, ...)."""
    array: Array = value.movedim(0, 1).reshape(*shape, len(value), *value.shape[2:]).cpu().numpy()
    return array


def lagged(
    session: Session,
    run: Run,
    trail: Trail,
    lag: int,
    rows: Rows,
    reads: CompiledReads,
    weight: Callable[[], Array] | None = None,
) -> dict[str, Smoothed]:
    """The belief about all nodes `lag` observations ago, given all since; see `Session.smoothed`.

    Args:
        session: The session.
        run: Its run.
        trail: What it keeps.
        lag: Number of observations.
        rows: Gives the last so many rows by state.
        reads: Reads in compiled code, if the session runs in it.
        weight: Gives the weights (K, B) of the rows of a bank.
    """
    if type(lag) is not int or lag < 0 or (trail.lag is not None and lag > trail.lag):
        most = "" if trail.lag is None else f" from 0 to {trail.lag}, as model.start(smooth={trail.lag}) keeps"
        raise SettingError(f"lag must be a whole number of observations{most}, not {lag!r}")
    if lag >= run.place.tick:
        raise ObservationError(f"there was no observation {lag} before the last one: there are {run.place.tick}")
    moments = reads.read(run, lag, trail.version, rows) if lag and run.engine.lead is not None else None
    of_rows = None if weight is None else weight()
    whole = moments if moments is None or of_rows is None else moments.mixed(of_rows)
    if whole is not None:
        return whole.by_node(session.batch_shape, NUMPY[session.dtype])
    with torch.inference_mode(), ThreadLimit(session.threads):
        found = smoothed_nodes(run.program, rows(lag + 1), True) if moments is None else moments.nodes(session.dtype)
        found = found if of_rows is None else mixed(found, torch.as_tensor(of_rows))
    shape, made = session.batch_shape, {}
    for name, each in found.items():
        sd = standard_deviations(each.covariance)
        parts = (value[0].reshape(*shape, *value.shape[2:]).cpu().numpy() for value in (each.mean, sd, each.covariance))
        made[name] = Smoothed(*parts)
    return made


class SmoothingSession(Session):
    """A session that keeps what a smoother needs, of all observations or of the last ones."""

    _keeps_updates = True

    def __init__(self, model: Any, *, smooth: bool | int = True, **options: Any) -> None:
        super().__init__(model, smooth=smooth, **options)
        trail = trail_for(self.graph, self.record, smooth)
        assert trail is not None
        self._trail, self._table, self._reads = trail, Recorder({}), CompiledReads()

    def _bind_to(self, shape: torch.Size, known: Known | None = None) -> Run:
        record, policy = with_smoothing(self.record), self.on_divergence
        run = Run(self._program(shape, known), self._engine, record, policy, self._warm_start)
        self._table = run.recorder_for(self.record)
        return run

    @exclusive
    def step(self, observation: Any, t: float | None = None) -> Session:
        super().step(observation, t)
        if self.tick % DRAIN == 0:
            self._collect()
        return self

    def _progressed(self, count: int, bar: Any) -> None:
        super()._progressed(count, bar)
        if self._trail.lag is not None and (count > 1 or self.tick % DRAIN == 0):
            self._collect()

    def _collect(self) -> None:
        """Move what was recorded to where it is kept."""
        run = self._bound
        times = run.recorded.times
        if not times:
            return
        values = run.take_recorded()
        self._trail.add(without_smoothing(values))
        if self._table.columns or self._trail.lag is None:
            self._table.add_block(times, values)

    @property
    def recorder(self) -> Recorder:
        self._collect()
        return self._table

    @exclusive
    def take_recorded(self) -> dict[str, Tensor]:
        return self.recorder.take()

    @exclusive
    def smoothed(self, lag: int) -> dict[str, Smoothed]:
        return lagged(self, self._bound, self._trail, lag, self._recent, self._reads)

    def _recent(self, count: int) -> dict[str, Tensor]:
        """The last so many rows by state: those that were collected, and those that are not yet."""
        found = {}
        for name in (name for name, node in self._nodes.items() if isinstance(node, Smooths)):
            new = self._bound.last_recorded(f"{name}.{SMOOTHING}", count)
            old = count - (0 if new is None else len(new))
            parts = [self._trail.rows(old)[name]] if old else []
            found[name] = torch.cat(parts if new is None else [*parts, new])
        return found

    def result_of(self, recorder: Recorder, last: int | None = None) -> Result:
        result = result_of(self, self._engine, recorder, last)
        if recorder is self._table and self._trail.lag is None and last is None:
            with torch.inference_mode():
                found = smoothed_nodes(self.program, self._trail.rows())
            return with_smoothed(result, found, [n for n, node in self._nodes.items() if node.role == "state"])
        return result

    def further_tensors(self) -> dict[str, Tensor]:
        self._collect()
        return super().further_tensors() | self._trail.tensors()

    def restore(
        self,
        batch_shape: Sequence[int],
        make: Callable[[GraphState], Snapshot],
        further: dict[str, Tensor],
        acting: Engine | None = None,
    ) -> None:
        self._trail.restore(further)
        super().restore(batch_shape, lambda state: make(state)._replace(rows=0), further, acting)
        self._trail.check(self._bound)

    @exclusive
    def __deepcopy__(self, memo: dict[int, Any]) -> SmoothingSession:
        options = {name: getattr(self, name) for name in RunOptions.__annotations__}
        made = SmoothingSession(self.model, **options)
        made._screen = None if self._screen is None else self._screen.copy()
        if self._run is not None:
            further, now = self.further_tensors(), self._bound.now
            made.restore(list(self.program.spec.batch_shape), lambda _: now, further, self.acting_engine)
            made._table.restore(*self._table.state())
        return made
