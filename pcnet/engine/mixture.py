"""Sessions of a model under several hypotheses: rows of an ordinary run, and a mixture of their beliefs on top."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcnet.engine import bank as banks
from pcnet.engine import review as reviews
from pcnet.engine import rows
from pcnet.engine.bank import Array, Bank, Indices
from pcnet.engine.choice import EngineChoice
from pcnet.engine.divergence import DivergenceLog
from pcnet.engine.inputs import Observation, time_of
from pcnet.engine.mixture_recording import MixtureRecording
from pcnet.engine.opening import Opening, next_check, sizes_of, unknown
from pcnet.engine.program import Program
from pcnet.engine.review import Traits
from pcnet.engine.run import Run, Snapshot, common_batch_shape
from pcnet.engine.screen import Suspects
from pcnet.engine.session import Session
from pcnet.engine.smooth import (
    CompiledReads,
    Trail,
    lagged,
    mixed,
    smoothed_nodes,
    trail_for,
    with_smoothed,
    with_smoothing,
    without_smoothing,
)
from pcnet.engine.state import GraphState
from pcnet.engine.threads import ThreadLimit, exclusive
from pcnet.errors import DivergenceError, ScheduleError
from pcnet.model.hypotheses import Hypotheses
from pcnet.model.model import Engine, RunOptions
from pcnet.model.node import BatchSpec
from pcnet.model.protocols import AssumesNoiseLevels, DividesBelief, Smooths
from pcnet.numerics.mixtures import Peaks, mean_of, mix
from pcnet.results.recorder import ENERGY, EVIDENCE, Column, Record, Recorder
from pcnet.results.result import Divergence, Result, Smoothed

if TYPE_CHECKING:
    from pcnet.engine.forecast import Draws, Forecast

SUMS = ("sum", "collected")  # names of sums of log-evidence in checkpoints


class _Newest(NamedTuple):
    """What was gathered of the last observation: evidence of rows (K, B), free energy (B,), and (K·B, ...) by name."""

    evidence: Array
    energy: Array
    values: dict[str, Tensor]


class _Beginning(NamedTuple):
    """How rows begin, which a first run of one row tells: see `rows.first_peaks`, `contrasted` and `around_found`."""

    peaks: dict[str, Peaks]
    contrasted: dict[str, slice]
    around_found: Hypotheses


class MixtureSession(Session):
    """A session whose batch has a leading dimension of rows, one for each hypothesis that is still in use.

    What is read and recorded is that of the mixture: means and covariances of all rows together, and averages of
    everything else. The free energy is the negative log of the predictive evidence of the mixture.
    """

    _bank: Bank
    _trail: Trail | None
    _reads: CompiledReads
    _recording: MixtureRecording
    _shape: torch.Size
    _newest: _Newest | None = None  # nothing before the first observation, and after a resumption
    _due: int
    _beginning: _Beginning | None = None  # not known before the first binding

    def _next_look(self) -> int:
        """Number of observations after which something is to be done beside taking them in."""
        due = [reviews.next_review(self._reviewed)]
        if self._opening is not None:
            due.append(next_check(self.tick))
        if rows.has_scales(self._bound):
            due += [each for each in rows.RESCALED if each > self.tick]
        return min(due)

    @property
    def hypotheses(self) -> Hypotheses:
        found = self.model.hypotheses
        assert found is not None
        return found

    # --- rows ----------------------------------------------------------------------------------------------------
    def _bind(self, observation: Observation, total: int | None) -> Run:
        self._shape = common_batch_shape(self.model, observation)
        self._total = total
        self._sum = np.zeros(self._shape.numel())  # log-evidence up to the last review
        self._reviewed, self._collected = 0, np.zeros(self._shape.numel())
        self._last_energy = torch.zeros(self._shape, dtype=torch.float64)
        self._opening = Opening([], {}, {}) if self.hypotheses.guess else None
        self._trail, self._reads = trail_for(self.graph, self.record, self.smooth), CompiledReads()
        run = self._begin(unknown(sizes_of([observation], self.hypotheses.guess, self.graph, self._shape)))
        self._recording = self._new_recording()
        return run

    def _begin(self, guess: Mapping[str, Tensor]) -> Run:
        """Start all rows; guess: log-variances (B, n) of the precision nodes whose first guess is to be found.

        Before it is found, the whole grid of levels is needed, and contrasts are not.
        """
        batch, final = self._shape.numel(), self._opening is None
        if self._beginning is None:
            one = self._bind_rows(1)
            around = rows.around_found(one, self.hypotheses)
            self._beginning = _Beginning(rows.first_peaks(one), rows.contrasted(one, self.hypotheses), around)
        peaks, contrasted = self._beginning.peaks, self._beginning.contrasted if final else {}
        weights = next((each.weights.double().numpy() for each in peaks.values()), np.ones(1))
        elements = max((each.stop for each in contrasted.values()), default=0)
        hypotheses = self._beginning.around_found if final else self.hypotheses
        self._bank, levels = banks.start(hypotheses, batch, weights, elements)
        before, run = self._run, self._bind_rows(self._bank.rows)
        if before is not None:
            before.release()
        rows.start(run, batch, levels, contrasted, peaks, guess, self.hypotheses.told)
        rows.assume_kinds(run, self.hypotheses, self._bank)
        run.first = run.now.state
        self._due = self._next_look()
        return run

    def _new_recording(self) -> MixtureRecording:
        return MixtureRecording(self.recorder_for(self.record), self.record.every)

    def _bind_rows(self, count: int, acting: Engine | None = None) -> Run:
        """A run of so many rows, with an engine of its own. acting: the engine that acted before."""
        before = self._engine
        self._engine = EngineChoice(self.engine)
        self._engine.eager_ticks = before.eager_ticks
        if acting is not None:
            self._engine.continue_with(acting)
        shape = torch.Size((count, *self._shape))
        spec = BatchSpec(shape.numel(), self.dtype, self.device, shape)
        policy, smooth = "stop" if self.on_divergence == "raise" else self.on_divergence, self.smooth is not False
        if before.lead is None:
            known = self._engine.known_before(self.model, spec, smooth)
        else:
            known = before.lead.engine.known.with_rows(self._shape.numel(), count)
        make = partial(Program, self.model) if known is None else partial(known.program, self.model)
        self._run = run = Run(make(spec, smooth), self._engine, self._raw_record, policy)
        self._engine.choose(run, self._total, known)
        if self._engine.lead is not None and before.lead is not None:
            self._engine.lead.engine.compiled_ticks += before.lead.engine.compiled_ticks
        return run

    @cached_property
    def _raw_record(self) -> Record:
        """What is recorded of each row."""
        asked = [q for q in self.record.quantities if q != ENERGY]
        beside = [mean_of(q, node.quantities) for q in asked for node in self._nodes.values()]
        wanted = dict.fromkeys((*asked, "mean", "sd", *(q for q in beside if q is not None), EVIDENCE))
        nodes = self.record.nodes
        if nodes is not None and self.hypotheses.guess:  # first guesses need the means of states
            states = (name for name, node in self._nodes.items() if node.role == "state")
            nodes = tuple(dict.fromkeys((*nodes, *states)))
        record = Record(
            (*wanted, *((ENERGY,) if ENERGY in self.record.quantities else ())),
            nodes,
            1,
            self.record.messages,
        )
        return record if self.smooth is False else with_smoothing(record)

    # --- observations --------------------------------------------------------------------------------------------
    @exclusive
    def step(self, observation: Any, t: float | None = None) -> Session:
        if self._run is None or self._opening is not None:  # the first observations are kept
            with torch.inference_mode(), ThreadLimit(self.threads):
                self._take(self._reader.timed(observation), t)
            return self
        super().step(observation, t)
        if self.tick >= self._due:
            with torch.inference_mode(), ThreadLimit(self.threads):
                self._look()
        return self

    def _absorb(self, observation: Observation, t: float | None, total: int | None = None) -> None:
        super()._absorb(observation, t, total)
        if self._opening is not None and len(self._opening.observations) < self.tick:
            self._opening.observations.append((observation, t))
        self._look()

    def _run_part(
        self, series: Mapping[str, Tensor], moments: Sequence[float] | None, start: int, stop: int, bar: Any
    ) -> None:
        while start < stop:
            if self._run is None or self.watchers:
                observation = {name: value[start] for name, value in series.items()}
                t = None if moments is None else time_of(moments[start])
                self._absorb(observation, t, len(next(iter(series.values()))))
                self._progressed(1, bar)
                start += 1
                continue
            end = min(stop, start + self._due - self.tick)
            opening = self._opening
            if opening is not None:
                ahead = ({name: value[i] for name, value in series.items()} for i in range(start, end))
                times = [None] * (end - start) if moments is None else moments[start:end]
                opening.observations.extend(zip(ahead, times, strict=True))
            try:
                super()._run_part(series, moments, start, end, bar)
            except BaseException:
                if opening is not None:
                    del opening.observations[self.tick :]
                raise
            self._look()
            start = end

    def _look(self) -> None:
        """Replay the first observations, review rows and tie noises to their levels, each if it is time."""
        if self.tick < self._due:
            return
        self._gather()
        opening = self._opening
        if opening is not None and opening.is_complete(self.graph):
            self._replay()
            return
        sizes = None if opening is None else opening.grown(self.hypotheses.guess, self.graph, self._shape)
        if opening is not None and sizes is not None:
            self._begin_opening(opening.observations, sizes)
            return
        if self.tick >= reviews.next_review(self._reviewed):
            self._review()
            if self.tick in reviews.DIVIDED_AT:
                self._divide()
        if self.tick in rows.RESCALED and rows.has_scales(self._bound):
            with torch.inference_mode():
                rows.rescale(self._bound, self._row_weights, rows.RESCALED[self.tick])
        self._due = self._next_look()

    def _check_rows(self, left: bool) -> None:
        """With the policy "raise", an error unless rows are left in each batch element."""
        if self.on_divergence == "raise" and not left:
            events = self._bound.snapshot.log.events
            why = f": {events[-1].why}" if events else ""
            raise DivergenceError(f"all hypotheses have diverged by observation {self.tick}{why}")

    def _review(self) -> None:
        """Check that rows are left; drop, merge and copy them."""
        assert self._newest is not None
        run, (evidence, energy, _) = self._bound, self._newest
        self._check_rows(self._bank.has_rows(evidence))
        tick, passed = self.tick, self.tick - self._reviewed
        before = np.arange(self._bank.rows)[:, None]
        found = reviews.review(self.hypotheses, self._bank, evidence, self._traits, tick, passed, rows.has_walks(run))
        self._last_energy = torch.as_tensor(energy).reshape(self._shape)
        self._sum = self._sum + self._bank.total(evidence)
        self._reviewed, self._collected = tick, np.zeros_like(self._sum)
        if len(found.source) == len(before) and bool((found.source == before).all()):
            self._bank = found.bank
        else:
            self._copy_rows(found.bank, found.source, found.copy_of)

    def _copy_rows(self, bank: Bank, source: Indices, copy_of: Indices | None = None) -> None:
        """Continue with another bank, whose rows are copies of these rows (K, B).

        copy_of: the row (K, B) of the new bank that each stays a copy of; see `Review`.
        """
        before, lead, index, batch = self._bound, self._engine.lead, rows.places(source), source.shape[1]
        at, node = (value.reshape(-1) for value in self.diverged)  # batch elements of which no row is left
        alike, self._bank = bank.assumes_like(self._bank, source), bank
        gone = np.flatnonzero(at >= 0).tolist()
        stopped = {row * batch + b: (int(at[b]), str(node[b])) for row in range(len(source)) for b in gone}
        log = DivergenceLog(before.snapshot.log.events, stopped)
        with torch.inference_mode():
            if self._trail is not None:
                self._trail.branch(index)
            first, same = before.first, len(source) == before.program.spec.batch_shape[0]
            run = before if same else self._bind_rows(len(source), self.acting_engine)
            new = self._engine.lead
            if new is not None:
                new.engine.copy_of = None if copy_of is None else rows.places(copy_of).numpy()
            if lead is None or new is None or not new.copy_elements(lead, index.numpy(), log):
                now = before.now
                relative = None if now.relative_dt is None else now.relative_dt[index]
                run.now = now._replace(state=rows.copies(now.state, index), relative_dt=relative, log=log)
            if not alike or self.on_divergence == "reset":  # reset rows have the assumptions of the start
                rows.assume_kinds(run, self.hypotheses, bank)
            if self.on_divergence != "raise":  # otherwise nothing is reset to it
                run.first = run.first._replace(nodes=rows.copies(first, index).nodes)
            if run.rescue is not None:
                run.rescue.forget()
                run.keep_for_rescue()
            if not same:
                before.release()

    def _divide(self) -> None:
        """Divide rows whose beliefs are bent by the flow or a mapping, which may have several peaks."""
        found = [name for name, node in self._nodes.items() if isinstance(node, DividesBelief)]
        if len(found) != 1:
            return
        (name,) = found
        node = self._nodes[name]
        assert isinstance(node, DividesBelief)
        if not node.can_bend(self.program.bound[name]):
            return
        with torch.inference_mode():
            bends = node.bends(self.context(name))
            bent = bends.largest.double().numpy().reshape(self._bank.log_weight.shape)
            division = reviews.divide(self._bank, bent)
            if division is None:
                return
            self._copy_rows(division.bank, division.source)
            index, run = rows.places(division.source), self._bound
            bends, place = rows.picked(bends, index), torch.as_tensor(division.place).reshape(-1)
            run.replace_nodes({name: node.part(run.node_state(name), bends, place.to(bends.along))})
            if self._trail is not None and isinstance(node, Smooths):
                self._trail.replace_last({name: node.smoothing_row(self.context(name))})

    def _start_anew(self, suspects: Suspects) -> None:
        if self._opening is None:
            super()._start_anew(suspects)
            return
        cleaned = [(suspects.remove(each), t) for each, t in self._opening.observations]
        sizes = sizes_of([each for each, _ in cleaned], self.hypotheses.guess, self.graph, self._shape)
        self._begin_opening(cleaned, sizes)

    def _begin_opening(
        self, observations: Sequence[tuple[Observation, float | None]], sizes: Mapping[str, Tensor]
    ) -> None:
        """Start again with the first observations, which have changed, or are larger than they seemed."""
        self._gather()  # what was found before is no part of the new opening
        self._opening = opening = Opening([], {}, {})
        self._start_over(unknown(sizes), observations)
        opening.observations.extend(observations)

    def _traits(self) -> Traits:
        """Log-levels and means of all rows, with standard deviations."""
        levels, level_sds, means, sds = [], [], [], []
        for name, node in self._nodes.items():
            if isinstance(node, AssumesNoiseLevels):
                levels.append(self._of_rows(name, "mean"))
                level_sds.append(self._of_rows(name, "sd"))
            elif node.role in ("state", "parameter"):
                means.append(self._of_rows(name, "mean"))
                sds.append(self._of_rows(name, "sd"))
        return Traits(*(np.concatenate(each, -1) for each in (levels, level_sds, means, sds)))

    def _of_rows(self, node: str, quantity: str) -> Array:
        """A quantity of all rows at the last observation, (K, B, n), which was gathered."""
        assert self._newest is not None
        value = self._newest.values.get(f"{node}.{quantity}")
        if value is None:  # it is not recorded
            with torch.inference_mode():
                value = self.graph[node].quantities[quantity].read(self.context(node))
        found: Array = value.reshape(self._bank.rows, self._shape.numel(), -1).double().cpu().numpy()
        return found

    def _evidence(self, sums: Tensor, missed: Tensor) -> Array:
        """Sums of log-evidence of rows (..., K·B) as (..., K, B), less what lost observations cost."""
        shape = (*sums.shape[:-1], self._bank.rows, -1)  # contiguous: digits must not depend on the order in memory
        return banks.evidence(*(value.contiguous().reshape(shape).double().cpu().numpy() for value in (sums, missed)))

    def _evidence_now(self) -> Array:
        state = self._bound.now.state
        return self._evidence(state.sum_accuracy, state.missed)

    def _replay(self) -> None:
        """Start again with first guesses from the first observations, and take these in once more."""
        opening = self._opening
        assert opening is not None
        self._opening = None  # what it holds was observed before any of it is taken in once more
        interval = self._bound.program.interval[: self._shape.numel()]
        guess = opening.guesses(self.hypotheses.guess, self.graph, self._shape, interval)
        self._start_over(guess, opening.observations)

    def _start_over(
        self, guess: Mapping[str, Tensor], observations: Sequence[tuple[Observation, float | None]]
    ) -> None:
        """Start all rows again, and take in what was observed; what was recorded and summed up is kept."""
        self._gather()
        if self._trail is not None:
            self._trail.clear()
        total, self._reviewed, self._collected = self._sum + self._collected, 0, np.zeros_like(self._sum)
        with torch.inference_mode():
            self._begin(guess)
        recording, self._recording = self._recording, MixtureRecording(Recorder({}), 1)
        series, moments, done = *Opening(list(observations), {}, {}).series(), 0
        while done < len(observations):
            lead = None if self.watchers else self._engine.lead
            ahead = self._due - self.tick
            ahead = 0 if lead is None or series is None else lead.take_block(series, moments, done, ahead)
            if not ahead:
                super()._absorb(*observations[done], self._total)
            done += max(1, ahead)
            self._look()
        self._gather()
        self._recording, self._sum = recording, total - self._collected

    # --- the mixture ---------------------------------------------------------------------------------------------
    @property
    def batch_shape(self) -> tuple[int, ...]:
        _ = self._bound
        return tuple(self._shape)

    @property
    def weights(self) -> Tensor:
        """Weights of all rows now, (rows, ...)."""
        return torch.as_tensor(self._weights(self._evidence_now())).reshape(-1, *self._shape)

    @property
    def in_use(self) -> Tensor:
        return self.weights.reshape(-1) > 0

    def has_enough(self, finite: Tensor) -> Tensor:
        """Rows that run away are left out of a forecast, if the others have half of the weight or more.

        The forecast of batch elements that have stopped is NaN, unless all of them have.
        """
        weight = self._row_weights
        stopped = ~(weight.sum(0) > 0)
        kept = torch.where(finite.reshape(len(finite), *weight.shape), weight, 0.0).sum(1)
        return ((kept >= 0.5) | stopped & ~stopped.all()).all(1)

    def _weights(self, evidence: Array) -> Array:
        """Weights of rows (..., K, B) in the mixture; none for rows that are about to be dropped."""
        return self._bank.weights(evidence, self.hypotheses.drop + 1.0)  # rows at the limit must not depend on rounding

    @exclusive
    def read(self, node: str, quantity: str) -> Tensor:
        quantities = self.graph[node].quantities
        if not isinstance(quantity, str) or quantity not in quantities:
            raise ScheduleError(f"{self.graph[node].title} has no {quantity!r}; it has: {', '.join(quantities)}")
        _ = self._bound  # an error before the first observation
        count, batch = self._bank.rows, self._shape.numel()

        def get(name: str) -> Tensor:
            value = quantities[name].read(self.context(node))
            return value.reshape(1, count, batch, *value.shape[1:])

        with torch.inference_mode():
            weight = self.weights.reshape(1, count, batch).to(self.program.zeros)
            self._check_rows(bool((weight[0] > 0).any(0).all()))
            mixed = mix(quantity, get, weight, "sd" in quantities, mean_of(quantity, quantities))[0]
        return mixed.reshape(*self._shape, *mixed.shape[1:])

    def _gather(self) -> None:
        """Take over what rows have recorded since the last time, with the weights of rows."""
        run = self._bound
        times = run.recorded.times
        if not times:
            return
        first = run.place.tick - len(times)
        found = run.take_recorded()
        if self._trail is not None:
            self._trail.add(without_smoothing(found))
        evidence = self._evidence(found[EVIDENCE], found["missed"])
        total = np.concatenate([self._collected[None], self._bank.total(evidence)])
        self._collected = total[-1]
        self._newest = _Newest(evidence[-1], total[-2] - total[-1], {name: value[-1] for name, value in found.items()})
        if self._opening is not None:
            self._opening.add_beliefs(*(self._mixed_beliefs(each, found, evidence) for each in ("mean", "sd")))
        found |= {"accuracy": torch.as_tensor(np.diff(total, axis=0)), EVIDENCE: torch.as_tensor(total[1:] + self._sum)}
        weight = torch.as_tensor(self._weights(evidence)).to(self.program.zeros)
        self._recording.add(first, times, found, weight)

    def _mixed_beliefs(self, quantity: str, found: Mapping[str, Tensor], evidence: Array) -> dict[str, Tensor]:
        """Means or sds (T, B, dim) of states of the mixture, from what rows have recorded, and evidence (T, K, B)."""
        weight = torch.as_tensor(self._weights(evidence)).to(self.program.zeros)
        shape, mixed = (len(weight), *self._shape, -1), {}
        for name in (name for name, node in self._nodes.items() if node.role == "state"):
            rows = {each: found[f"{name}.{each}"].reshape(*weight.shape, -1) for each in ("mean", "sd")}
            mixed[name] = mix(quantity, rows.__getitem__, weight, True, mean_of(quantity, rows)).reshape(shape)
        return mixed

    def _collect(self) -> None:
        """Bring the table of what was recorded of the mixture up to date."""
        with torch.inference_mode(), ThreadLimit(self.threads):
            self._gather()
            self._recording.reduce()

    @property
    def recorder(self) -> Recorder:
        self._collect()
        return self._recording.table

    def recorder_for(self, record: Record) -> Recorder:
        bound, rows = self._bound, self._bound.recorder_for(record).columns

        def column_now(name: str) -> Column:
            """A column of the present rows, of which there may be others than when the recorder was made."""
            nonlocal bound, rows
            if bound is not self._bound:
                bound, rows = self._bound, self._bound.recorder_for(record).columns
            return rows[name]

        def reader(name: str) -> Callable[[], Tensor]:
            node, _, quantity = name.rpartition(".")
            if node in self._nodes and quantity in self._nodes[node].quantities:

                def mixed() -> Tensor:
                    value = self.read(node, quantity)
                    return value.reshape(self._shape.numel(), *value.shape[len(self._shape) :])

                return mixed

            def read() -> Tensor:
                column = column_now(name)
                value = column.read() if column.transform is None else column.transform(column.read())
                shaped = value.reshape(1, self._bank.rows, self._shape.numel(), *value.shape[1:])
                return mix(quantity, lambda _: shaped, self.weights.reshape(1, self._bank.rows, -1).to(shaped))[0]

            return read

        return Recorder({name: Column(column.dims, reader(name)) for name, column in rows.items()})

    @property
    def _log_evidence(self) -> Tensor:
        total = self._sum + self._bank.total(self._evidence_now())
        return torch.as_tensor(total).reshape(self._shape)

    @property
    def total_accuracy(self) -> Tensor:
        return self._log_evidence

    @property
    def total_complexity(self) -> Tensor:
        return torch.zeros_like(self._log_evidence)

    @property
    def free_energy(self) -> Tensor:
        if self.tick == self._reviewed:  # by the weights before the review
            return self._last_energy
        return self._energy()

    def _energy(self) -> Tensor:
        state = self._bound.now.state
        now = self._evidence_now()
        before = self._evidence(state.sum_accuracy - state.accuracy, state.missed)
        return torch.as_tensor(self._bank.total(before) - self._bank.total(now)).reshape(self._shape)

    @property
    def diverged(self) -> Divergence:
        """Batch elements all of whose rows have stopped."""
        rows = self._bound.snapshot.log.summary((self._bank.rows, *self._shape))
        all_stopped = (rows.at >= 0).all(0)
        return Divergence(np.where(all_stopped, rows.at.max(0), -1), np.where(all_stopped, rows.node[0], ""))

    @property
    def fallbacks(self) -> dict[str, Tensor]:
        """Fallbacks of the row with the largest weight."""
        if self._run is None:
            return {}
        best = self.weights.reshape(self._bank.rows, -1).argmax(0)
        found = {}
        for name, count in super().fallbacks.items():
            shaped = count.reshape(self._bank.rows, -1)
            found[name] = shaped[best, torch.arange(shaped.shape[1])].reshape(self._shape)
        return found

    @exclusive
    def take_recorded(self) -> dict[str, Tensor]:
        return self.recorder.take()

    @exclusive
    def smoothed(self, lag: int) -> dict[str, Smoothed]:
        run = self._bound
        if self._trail is None:
            return super().smoothed(lag)
        return lagged(self, run, self._trail, lag, self._last_rows, self._reads, self._last_weights)

    def _last_rows(self, count: int) -> dict[str, Tensor]:
        """The last so many rows by state."""
        assert self._trail is not None
        self._gather()
        return self._trail.rows(count)

    def _last_weights(self) -> Array:
        """Weights of all rows at the last observation, (K, B), without reading the state, if they are known."""
        run = self._bound
        sums, missed = run.newest(EVIDENCE), run.newest("missed")
        if self.tick == self._reviewed:
            return self._row_weights.numpy()
        if sums is None or missed is None:
            self._gather()
            return self._row_weights.numpy() if self._newest is None else self._weights(self._newest.evidence)
        count, shape = self._bank.log_weight.size, self._bank.log_weight.shape
        return self._weights(banks.evidence(*(each[0, :count].reshape(shape) for each in (sums, missed))))

    def result_of(self, recorder: Recorder, last: int | None = None) -> Result:
        """The rows of a recorder as a result; smoothed beliefs are those of the mixture of the rows that are left."""
        result = super().result_of(recorder, last)
        table = self._recording.table
        if self._trail is None or self._trail.lag is not None or recorder is not table or last is not None:
            return result
        with torch.inference_mode():
            found = mixed(smoothed_nodes(self.program, self._trail.rows()), self._row_weights)
        return with_smoothed(result, found, [n for n, node in self._nodes.items() if node.role == "state"])

    @property
    def _row_weights(self) -> Tensor:
        """Weights of all rows now, (K, B)."""
        return self.weights.reshape(self._bank.rows, -1)

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
        """Draw futures from the model: a hypothesis by its weight, then a future from its beliefs."""
        from pcnet.engine.mixture_future import mixed_draws

        rows = super().sample(horizon, draws, every=every, seed=seed, inputs=inputs)
        return mixed_draws(rows, self._row_weights, self._shape, seed)

    # --- files and copies ----------------------------------------------------------------------------------------
    def further_tensors(self) -> dict[str, Tensor]:
        self._collect()
        found = super().further_tensors()
        found |= {f"bank/{name}": torch.as_tensor(value) for name, value in self._bank._asdict().items()}
        found |= {name: torch.as_tensor(value) for name, value in zip(SUMS, (self._sum, self._collected), strict=True)}
        found |= {"reviewed": torch.tensor(self._reviewed), "last_energy": self._last_energy}
        found |= {} if self._trail is None else self._trail.tensors()
        if self._opening is not None:
            found |= {f"opening/{name}": value for name, value in self._opening.tensors().items()}
        return found

    def restore(
        self,
        batch_shape: Sequence[int],
        make: Callable[[GraphState], Snapshot],
        further: dict[str, Tensor],
        acting: Engine | None = None,
    ) -> None:
        self._restore_screen(further)
        self._shape, self._total = torch.Size(batch_shape[1:]), None
        self._bank = Bank(*(further.pop(f"bank/{name}").numpy() for name in Bank._fields))
        self._bank.check(batch_shape[0], self._shape.numel(), len(self.hypotheses.walks))
        self._sum, self._collected = (further.pop(name).reshape(self._shape.numel()).numpy() for name in SUMS)
        self._reviewed, self._last_energy = (
            int(further.pop("reviewed")),
            further.pop("last_energy").reshape(self._shape),
        )
        self._trail, self._reads = trail_for(self.graph, self.record, self.smooth), CompiledReads()
        if self._trail is not None:
            self._trail.restore(further)
        first = {name.removeprefix("opening/"): value for name, value in further.items()}
        self._opening = Opening.of(first) if first else None
        with torch.inference_mode():
            run = self._bind_rows(batch_shape[0], acting)
            run.now = make(run.now.state)._replace(rows=0)
            run.show()
            if self._trail is not None:
                self._trail.check(run)
        self._recording = self._new_recording()
        self._due = self._next_look()

    @exclusive
    def __deepcopy__(self, memo: dict[int, Any]) -> MixtureSession:
        options = {name: getattr(self, name) for name in RunOptions.__annotations__}
        made = MixtureSession(self.model, **options)
        made._screen = None if self._screen is None else self._screen.copy()
        if self._run is not None:
            further, now = self.further_tensors(), self._bound.now
            made.restore(list(self.program.spec.batch_shape), lambda _: now, further, self.acting_engine)
            made._recording.table.restore(*self._recording.table.state())
        return made

    @exclusive
    def forecast(
        self,
        horizon: float,
        every: float | None = None,
        *,
        parameters: bool = True,
        inputs: Mapping[str, Any] | None = None,
    ) -> Forecast:
        """Moments of the mixture; see `mixed_forecast`."""
        from pcnet.engine.mixture_future import mixed_forecast

        rows = super().forecast(horizon, every, parameters=parameters, inputs=inputs)
        hidden = [name for name in rows.nodes if not self._nodes[name].observes]
        return mixed_forecast(rows, self._row_weights, self._shape, hidden)
