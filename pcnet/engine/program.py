"""A schedule laid out for a graph: for each of its lines, which nodes act and at which ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.model.node import BatchSpec, Node, NodeContext
from pcnet.model.schedule import Act


class Line(NamedTuple):
    """One act of a schedule, ready to be done: who does what, and at which ticks."""

    doers: tuple[tuple[Callable[[NodeContext], None], NodeContext, Node], ...]
    times: int
    periods: tuple[int, ...]
    by_element: Tensor | None
    doubling: bool

    def due(self, tick: int) -> bool | Tensor:
        """Whether the tick (from 0) is one of its own: for all batch elements, or for which."""
        now = tick + 1
        early = self.doubling and now & tick == 0  # a power of two
        if self.by_element is None:
            return now % self.periods[0] == 0 or (early and now < self.periods[0])
        if not any(now % period == 0 or (early and now < period) for period in self.periods):
            return False
        mask = now % self.by_element == 0
        if early:
            mask = mask | (now < self.by_element)
        return True if bool(mask.all()) else mask


def lay_out(
    acts: Iterable[Act], nodes: Mapping[str, Node], locals_: Mapping[str, NodeContext], start: BatchSpec
) -> tuple[Line, ...]:
    lines = []
    for act in acts:
        periods = tuple(sorted({int(period) for period in act.clock.every.reshape(-1)}))
        by_element = start.fill(act.clock.every, 0).to(torch.int64) if len(periods) > 1 else None
        doers = tuple((getattr(nodes[name], act.action), locals_[name], nodes[name]) for name in act.names(nodes))
        lines.append(Line(doers, act.repeats, periods, by_element, act.clock.warmup == "doubling"))
    return tuple(lines)


def period(lines: Iterable[Line], local: NodeContext, verb: str, like: Tensor) -> Tensor:
    """How many ticks pass until a node does something again, (B,); 1 if it does it never."""
    for line in lines:
        if any(doer is local and do.__name__ == verb for do, doer, _ in line.doers):
            return torch.full_like(like, line.periods[0]) if line.by_element is None else line.by_element.to(like)
    return torch.ones_like(like)
