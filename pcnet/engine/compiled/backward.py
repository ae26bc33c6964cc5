"""The backward pass of a smoother with a fixed lag of states with several beliefs, in compiled code."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcnet.engine.compiled.element_tick import ElementTick
from pcnet.engine.compiled.layout import Array, Layout, TickKind, slots
from pcnet.engine.compiled.run import Block, CompiledRun, width_for
from pcnet.engine.compiled.variants import Variants
from pcnet.engine.program import Program
from pcnet.model.digest import digest
from pcnet.model.protocols import SmoothingLayout, SmoothsBack
from pcnet.results.recorder import Record

KIND = TickKind((), False, False)
NOTHING = Record((), None, 1, False)
BELIEF, ROW = "smoothing/belief", "smoothing/row"


class BackwardLayout(Layout):
    """The memory of a step: the smoothed belief and the row it belongs to; the row before is given."""

    def __init__(self, belief: Tensor, row: Tensor) -> None:
        self.state, self.given = slots({BELIEF: belief, ROW: row}), slots({ROW: row})
        self.settings, self.record = [], []


class BackwardStep(ElementTick):
    """One step back of one batch element."""

    def __init__(self, node: SmoothsBack, form: SmoothingLayout, *args: Any) -> None:
        super().__init__(*args)
        self._node, self._form = node, form

    def _run(self) -> dict[str, Tensor]:
        later, earlier = self.state[ROW], self.given[ROW]
        belief = self._node.smooth_back(self.state[BELIEF], later, earlier, self._form)
        return {f"state/{BELIEF}": belief, f"state/{ROW}": earlier.clone()}


class BackwardPass:
    """SmoothsBack the rows of one state of a program.

    Args:
        program: The program.
        name: The state.
        row: Any row, (B, w).
    """

    def __init__(self, program: Program, name: str, row: Tensor) -> None:
        node, model = program.nodes[name], program.model
        assert isinstance(node, SmoothsBack)
        form, width = node.smoothing_layout(program.bound[name]), width_for(len(row))
        key = ("backward", name, row.shape[1:], str(row.dtype), width, digest(model), id(node))
        kept: dict[object, Variants] = model.compiled
        if key not in kept:
            layout = BackwardLayout(row[:, form.belief], row)
            kept[key] = Variants(layout, width, NOTHING, make_tick=partial(BackwardStep, node, form))
        self._node, self._form = node, form
        self._belief, self._run = form.belief, CompiledRun(program, kept[key])
        self._kind = self._run.number_of(KIND)

    def first(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Smoothed mean (B, n) and covariance (B, n, n) at the first of T rows (T, B, w); None if not compiled."""
        table: Array = rows.double().cpu().numpy()
        run, count = self._run, len(table) - 1
        run.load_memory(np.concatenate([table[-1][:, self._belief], table[-1]], 1))
        given = np.ascontiguousarray(table[-2::-1])
        made, _ = run.advance(Block(np.full(count, self._kind, np.uint8), given, np.zeros(count, np.uint8)))
        size = self._belief.stop - self._belief.start
        if made < count:
            return None
        belief = torch.from_numpy(run.memory()[:, :size].copy()).to(rows.dtype)
        return self._node.smoothed_moments(belief, rows[-1], self._form)
