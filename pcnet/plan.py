"""A schedule laid out for a graph: for each of its lines, which nodes act and at which ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pcnet.errors import ScheduleError
from pcnet.node import Local, Node, Start
from pcnet.schedule import ROLES, Act, Schedule


class Line(NamedTuple):
    """One act of a schedule, ready to be done: who does what, and at which ticks."""

    doers: tuple[tuple[Callable[[Local], None], Local, Node], ...]
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


def check(schedule: Schedule, nodes: Mapping[str, Node]) -> None:
    """Refuse a schedule that asks for nodes that are not there, or that does not ask for what a node needs."""
    roles = {node.role for node in nodes.values()}
    for name in nodes:
        if name in roles:
            raise ScheduleError(f"a node is called {name!r}, as all nodes of that role are in schedules; rename it")
    known = {*nodes, *roles, *ROLES}
    for act in schedule.lines:
        for who in (*act.who, *act.but):
            if who not in known:
                raise ScheduleError(
                    f"{schedule.name}: there is no node or role {who!r}; nodes: {', '.join(nodes)}; "
                    f"roles: {', '.join(sorted(roles))}"
                )
    asked = {(act.verb, name) for act in schedule.acts for name in who_acts(act, nodes)}
    for name, node in nodes.items():
        if node.observes and ("sense", name) not in asked:
            raise ScheduleError(f"{schedule.name}: {name!r} never senses; add act('sense', {name!r})")
        for verb in node.needs:
            if (verb, name) not in asked:
                raise ScheduleError(
                    f"{schedule.name}: {node.title} is never asked to {verb}; use a schedule that does, such as "
                    "schedule=pcnet.tracking()"
                )


def who_acts(act: Act, nodes: Mapping[str, Node]) -> list[str]:
    """The names an act stands for, in the order in which it gives them; nodes of one role from above."""
    found: list[str] = []
    for who in act.who:
        for name, node in nodes.items():
            left_out = name in act.but or node.role in act.but
            if who in (name, node.role) and not left_out and name not in found:
                found.append(name)
    return found


def lay_out(
    acts: Iterable[Act], nodes: Mapping[str, Node], locals_: Mapping[str, Local], start: Start
) -> tuple[Line, ...]:
    lines = []
    for act in acts:
        periods = tuple(sorted({int(period) for period in act.clock.every.reshape(-1)}))
        by_element = start.fill(act.clock.every, 0).to(torch.int64) if len(periods) > 1 else None
        doers = tuple((getattr(nodes[name], act.verb), locals_[name], nodes[name]) for name in who_acts(act, nodes))
        lines.append(Line(doers, act.times, periods, by_element, act.clock.doubling))
    return tuple(lines)


def period(lines: Iterable[Line], local: Local, verb: str, like: Tensor) -> Tensor:
    """How many ticks pass until a node does something again, (B,); 1 if it does it never."""
    for line in lines:
        if any(doer is local and do.__name__ == verb for do, doer, _ in line.doers):
            return torch.full_like(like, line.periods[0]) if line.by_element is None else line.by_element.to(like)
    return torch.ones_like(like)
