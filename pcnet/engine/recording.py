"""Which quantities of a run a record asks for, how to read them, and what was recorded as a result."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pcnet.engine.choice import EngineChoice
from pcnet.engine.program import Program
from pcnet.engine.state import GraphState
from pcnet.engine.tick import Outputs, Workspace
from pcnet.model.links import AnyLink, Predicts
from pcnet.model.messages import PredictionError
from pcnet.model.node import Energy
from pcnet.model.protocols import Smooths
from pcnet.numerics.precision import Precision
from pcnet.results.graph_summary import GraphSummary
from pcnet.results.recorder import ENERGY, EVIDENCE, SMOOTHING, Column, Record, Recorder
from pcnet.results.result import Prior, Result, Trace

if TYPE_CHECKING:
    from pcnet.engine.session import Session

Showing = Callable[[], tuple[GraphState, Outputs]]
"""Returns the state and the outputs of the tick that is being recorded."""


def columns(program: Program, space: Workspace, record: Record, showing: Showing) -> dict[str, Column]:
    """The columns of a record by name, read from a workspace."""
    found: dict[str, Column] = {}
    for name in tuple(program.nodes) if record.nodes is None else record.nodes:
        context = space.contexts[name]
        for quantity, (dims, raw, transform) in program.nodes[name].quantities.items():
            if quantity in record.quantities:
                found[f"{name}.{quantity}"] = Column(dims, partial(raw, context), transform)
    if SMOOTHING in record.quantities:
        for name, node in program.nodes.items():
            if isinstance(node, Smooths):
                found[f"{name}.{SMOOTHING}"] = Column(("element",), partial(node.smoothing_row, space.contexts[name]))
    if EVIDENCE in record.quantities:
        found[EVIDENCE] = Column((), lambda: showing()[0].sum_accuracy)
        found["missed"] = Column((), lambda: showing()[0].missed)
    if ENERGY in record.quantities:
        found["accuracy"] = Column((), lambda: showing()[0].accuracy)
        found["complexity"] = Column((), lambda: showing()[0].complexity)

        def free_energy(name: str) -> Tensor:
            energy = showing()[1].energies.get(name)
            if energy is None:  # after compiled ticks it is not known by node
                energy = Energy() if name in program.counted_once else program.nodes[name].energy(space.contexts[name])
            return program.zeros if energy.free is None else energy.free

        found |= {f"{name}.free_energy": Column((), partial(free_energy, name)) for name in program.nodes}
    if record.messages:

        def prediction(link: AnyLink) -> Tensor:
            value = space.message(link).value
            return (value.channel if isinstance(value, Precision) else value).flatten(1)

        def error(link: AnyLink) -> Tensor:
            found = space.error(link)
            sent = found.sent if isinstance(found, PredictionError) else None
            weighted: Tensor = found.weighted if sent is None else sent
            return weighted.flatten(1)

        for read in (prediction, error):
            for link in program.model.graph.links:
                found[_message_name(link, read is prediction)] = Column(("message",), partial(read, link))
    return found


def _message_name(link: AnyLink, down: bool) -> str:
    """The name of a recorded message: "x to y.prediction"."""
    ends = (link.parent.name, link.child.name)
    sender, receiver = ends if down else reversed(ends)
    of = f" ({link.of.name})" if link.of is not None else ""
    return f"{sender} to {receiver}{of}.{'prediction' if down else 'error'}"


def _priors(session: Session) -> dict[str, Prior]:
    """What beliefs were before the first observation, (..., n) by node.

    Not of noises that are guessed from data, and of parameters whose prior comes from a level above.
    """
    program, hypotheses = session.program, session.model.hypotheses
    shape, unknown = session.batch_shape, () if hypotheses is None else hypotheses.guess
    found = {}
    for name, node in program.nodes.items():
        given = name not in unknown and not program.links[name].above_of(Predicts)
        prior = node.prior_belief(program.bound[name]) if given else None
        if prior is not None:  # hypotheses are rows of the batch, with the same priors
            first = [value[: math.prod(shape)].cpu().numpy() for value in prior]
            found[name] = Prior(*(value.reshape(*shape, value.shape[-1]) for value in first))
    return found


def result_of(session: Session, engine: EngineChoice, recorder: Recorder, last: int | None = None) -> Result:
    """The rows of a recorder, or the last so many of them, as a result of a session."""
    shape, traces = session.batch_shape, {}
    times = recorder.times[-last:] if last else recorder.times
    for name, column in recorder.columns.items():
        values = recorder.by_element(name, len(times))
        if values is not None:
            traces[name] = Trace(values.reshape(*shape, *values.shape[1:]).numpy(), column.dims)
    return Result(
        traces=traces,
        batch_shape=shape,
        times=np.asarray(times, dtype=np.float64),
        free_action=session.free_action.cpu().numpy(),
        diverged=session.diverged,
        fallbacks={name: count.cpu().numpy() for name, count in session.fallbacks.items()},
        observations=session.tick,
        roles={name: node.role for name, node in session.graph.nodes.items()},
        graph=str(session.graph),
        schedule=str(session.schedule),
        structure=GraphSummary.of(session.graph, session.schedule),
        priors=_priors(session),
        engine=engine.acted,
        eager_ticks=engine.eager_ticks,
    )
