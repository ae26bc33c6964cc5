"""Steps of a forecast or of a draw in compiled code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.engine.compiled.element import varying_settings
from pcnet.engine.compiled.element_tick import ElementTick
from pcnet.engine.compiled.engine import BLOCK_BYTES, MAX_BLOCK
from pcnet.engine.compiled.errors import UntraceableError
from pcnet.engine.compiled.layout import Layout, TickKind, slots
from pcnet.engine.compiled.run import Block, CompiledRun, width_for
from pcnet.engine.compiled.variants import Variants
from pcnet.engine.future import NOISE, STEP, FutureMaker, Moving
from pcnet.engine.program import Program
from pcnet.engine.state import GraphState
from pcnet.model.digest import digest
from pcnet.results.recorder import Record

KIND = TickKind((), False, False)
NOTHING = Record((), None, 1, False)
LARGEST_CARRIED = 30_000
"""Most numbers that move in a step, for it to be compiled."""


class FutureLayout(Layout):
    """The memory of a step: the state of the run, which stands still, and what moves."""

    def __init__(
        self, program: Program, settings: Mapping[str, Tensor], moving: Moving, given: Mapping[str, Tensor]
    ) -> None:
        super().__init__(program, settings)
        self.state = slots({**program.initial.tensors(), **moving})
        self.given = slots(given)


class FutureStep(ElementTick):
    """One step of the future of one batch element."""

    def __init__(self, make: FutureMaker, *args: Any) -> None:
        super().__init__(*args)
        self._make = make

    def _run(self) -> dict[str, Tensor]:
        program = self.one.program
        names = program.initial.tensors()
        before = program.initial.with_tensors({name: self.state[name] for name in names})
        moving = {name: value for name, value in self.state.items() if name not in names}
        future = self._make(program, before)
        after = future.step(moving, self.given)
        found = {f"state/{name}": value for name, value in {**before.tensors(), **after}.items()}
        return found | {f"record/{name}": value for name, value in future.show(after, self.given).items()}


def compiled_future(
    program: Program,
    state: GraphState,
    make: FutureMaker,
    moving: Moving,
    step: float,
    steps: int,
    count: int,
    noise: Tensor | None = None,
) -> dict[str, Tensor] | None:
    """What is shown of a future, (T, B, ...) by name; None if it cannot be compiled, or diverges.

    Args:
        program: The program of the run.
        state: Its state.
        make: Makes the future of one batch element.
        moving: Where it begins, for all batch elements, or for several copies of each, one after the other.
        step: Length of a step.
        steps: Number of steps from one time to the next.
        count: Number of times.
        noise: Given at each step, (steps · count, B, m).
    """
    if program.zeros.device.type != "cpu" or sum(value[0].numel() for value in moving.values()) > LARGEST_CARRIED:
        return None
    try:
        settings = varying_settings(program)
    except UntraceableError:
        return None
    rows, batch = len(next(iter(moving.values()))), program.spec.batch
    width, model = width_for(rows), program.model
    like = {STEP: program.zeros[:1]} | ({} if noise is None else {NOISE: noise[0, :1]})
    shapes = tuple((name, tuple(value.shape[1:])) for name, value in moving.items())
    what = (make.func, *make.keywords.items()) if isinstance(make, partial) else make
    details = (str(program.zeros.dtype), width, tuple(settings), digest(model), *map(id, model.graph.nodes.values()))
    key = ("future", what, shapes, program.smooth, *details)
    kept: dict[object, Variants] = model.compiled
    variants = kept.get(key)
    if variants is None or not variants.is_valid:
        layout = FutureLayout(program, settings, moving, like)
        variants = kept[key] = Variants(layout, width, NOTHING, make_tick=partial(FutureStep, make))
    run = CompiledRun(program, variants)
    elements = np.tile(np.arange(batch), rows // batch)
    whole = {name: value.repeat(rows // batch, *(1,) * (value.dim() - 1)) for name, value in state.tensors().items()}
    run.load_copies({**whole, **moving}, settings, elements)
    kind, parts, done = run.number_of(KIND), [], 0
    total = steps * count
    while done < total:
        size = 8 * rows * max(1, Layout.size(run.layout.record) + run.n_given)
        ahead = min(total - done, MAX_BLOCK, max(1, BLOCK_BYTES // size))
        given = np.empty((ahead, run.n_given) if noise is None else (ahead, rows, run.n_given))
        given[..., run.layout.given_at[STEP]] = step
        if noise is not None:
            given[..., run.layout.given_at[NOISE]] = noise[done : done + ahead].cpu().numpy()
        recorded = (np.arange(done + 1, done + ahead + 1) % steps == 0).astype(np.uint8)
        made, shown = run.advance(Block(np.full(ahead, kind, dtype=np.uint8), given, recorded))
        if made < ahead:
            return None
        parts.append(torch.from_numpy(shown))
        done += ahead
    table = torch.cat(parts)
    return {
        slot.name: table[:, :, slot.places].to(slot.dtype).reshape(*table.shape[:2], *slot.shape)
        for slot in run.layout.record
    }
