"""Clocks and schedules as data: which nodes do what at which observation, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import ScheduleError
from pcnet.settings import Period, broadcast, number, settings

Verb = Literal["sense", "orient", "move", "gather", "settle", "carry"]
"""What a node can be asked to do: the methods of `pcnet.node.Node` of these names."""


@settings
class Clock:
    """Ticks at every `every`-th observation; a tensor gives each batch element its own period.

    doubling: also at the 1st, 2nd, 4th, 8th, … before that: of what is hardly known most is learned at first.
    """

    every: Period = number(1)
    doubling: bool = False


@settings
class Act:
    """One line of a schedule: `verb` is done by the nodes `who` (roles or names), but not by `but`.

    It is done at the ticks of `clock`, `times` over.
    """

    verb: Verb
    who: tuple[str, ...]
    clock: Clock = Clock()
    times: int = Field(default=1, ge=1)
    but: tuple[str, ...] = ()

    def __str__(self) -> str:
        every = self.clock.every
        when = "" if bool((every == 1).all()) else f", every {span(every)}"
        when += " and at 1, 2, 4, … before" if self.clock.doubling else ""
        often = "" if self.times == 1 else f", {self.times} times"
        but = f" but {', '.join(self.but)}" if self.but else ""
        return f"{', '.join(self.who)}{but}: {self.verb}{often}{when}"


@settings
class Schedule:
    """What happens at one observation, line by line. `opening` is done once, before the first observation is sensed.

    `closing` is done once, after the last one: a schedule that has it is one of passes over recorded data, `graph.fit`.
    """

    acts: tuple[Act, ...]
    opening: tuple[Act, ...] = ()
    name: str = "schedule"
    closing: tuple[Act, ...] = ()

    def __post_init__(self) -> None:
        for what, acts in (("opening", self.opening), ("closing", self.closing)):
            if any(bool((act.clock.every != 1).any()) for act in acts):
                raise ScheduleError(f"{self.name}: what is done in the {what} is done once, so that it has no period")
        if any(not act.who for act in self.lines):
            raise ScheduleError(f"{self.name}: an act needs nodes or roles to do it: act('move', 'state')")

    @property
    def lines(self) -> tuple[Act, ...]:
        """All acts, from the opening to the closing."""
        return self.opening + self.acts + self.closing

    @property
    def batch_shape(self) -> torch.Size:
        return broadcast(*(act.clock.every.shape for act in self.lines))

    def __str__(self) -> str:
        lines = [f"before the first: {act}" for act in self.opening] + [str(act) for act in self.acts]
        lines += [f"after the last: {act}" for act in self.closing]
        return "\n".join([self.name, *(f"  {line}" for line in lines)])


def span(values: Tensor) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"


def act(verb: Verb, *who: str, every: Any = 1, times: int = 1, but: Sequence[str] = (), doubling: bool = False) -> Act:
    """A line of a schedule, shortly: act("move", "parameter", every=64)."""
    return Act(verb, tuple(who), Clock(every, doubling), times, tuple(but))


def slow_step(*who: str, every: Any, but: Sequence[str] = (), doubling: bool = False) -> tuple[Act, ...]:
    """Move, then settle, then carry the posterior into the prior."""
    verbs: tuple[Verb, ...] = ("move", "settle", "carry")
    return tuple(act(verb, *who, every=every, but=but, doubling=doubling) for verb in verbs)


ORIENT = act("orient", "state", times=5)
"""Find the first states from the first observation; repeated for the sake of mappings that are not linear."""

ROLES = ("sensory", "state", "precision", "parameter")
"""The roles that schedules speak of; a graph need not have nodes of all of them, and may have others."""

SLOW = ("precision", "parameter")
"""The roles that make up the context, in the order in which they step."""


def odem(every: Any = 64, *, periods: Mapping[str, Any] | None = None) -> Schedule:
    """States at every observation, precisions and then parameters at every N-th (Algorithm 1 of the paper).

    every: N, one number or a tensor with a period for each batch element. periods: other periods for named nodes,
    for example {"lambda_y": 128}; these step after the others.
    """
    own = dict(periods or {})
    others = tuple(own)
    slow = [step for who in SLOW for step in slow_step(who, every=every, but=others)]
    slow += [step for name, period in own.items() for step in slow_step(name, every=period)]
    return Schedule(
        name="ODEM",
        opening=(ORIENT,),
        acts=(
            act("sense", "sensory"),
            act("move", "state", but=others),
            act("gather", *SLOW),
            *slow,
            act("settle", "state", but=others),
        ),
    )


def generalised_filtering() -> Schedule:
    """Everything at every observation."""
    filtering = odem(every=1)
    return Schedule(name="generalised filtering", opening=filtering.opening, acts=filtering.acts)


def states_only() -> Schedule:
    """States at every observation; parameters and precisions stay at their priors."""
    return Schedule(
        name="states only",
        opening=(ORIENT,),
        acts=(act("sense", "sensory"), act("move", "state"), act("settle", "state")),
    )


def offline(who: str | Sequence[str] = SLOW) -> Schedule:
    """For recorded data, as in DEM: states at every observation, precisions and parameters once after each pass.

    who: roles or names of what steps after a pass; precisions and parameters unless given. What is left out stays at
    its prior. States begin anew with each pass; `graph.fit` repeats passes until the free action settles.
    """
    slow = (who,) if isinstance(who, str) else tuple(who)
    return Schedule(
        name="offline",
        opening=(ORIENT,),
        acts=(
            act("carry", "state"),
            act("sense", "sensory"),
            act("move", "state"),
            act("gather", *slow),
            act("settle", "state"),
        ),
        closing=(act("move", *slow), act("settle", *slow)),
    )


class Level(NamedTuple):
    """Names or roles of what makes up a level of a stack: its states, their precisions and their parameters."""

    states: tuple[str, ...] = ("state",)
    precisions: tuple[str, ...] = ("precision",)
    parameters: tuple[str, ...] = ("parameter",)


def tracking(every: Any = 64, *, levels: Sequence[Level] = (Level(),), doubling: bool = False) -> Schedule:
    """For states that carry their beliefs (`FilterNode`): expect, sense, take the errors in; the context at every N-th.

    levels: those of a stack, from the lowest up. A level above acts when the context of the one below it steps: it
    takes in what the parameters there have found, and says what to expect of them next.
    doubling: the context of a single level steps at the 1st, 2nd, 4th, 8th, … observation, too, before the N-th.
    """
    if doubling and len(levels) > 1:
        raise ScheduleError("tracking: windows that double at first are for one level; those of a stack are alike")
    periods = [torch.as_tensor(every) ** i for i in range(len(levels) + 1)]

    def below(i: int) -> list[Act]:
        """What level i does with the errors below it, up to its parameters and all that is above them."""
        level, now, later = levels[i], periods[i], periods[i + 1]
        acts = [act("move", *level.states, every=now)]
        context = level.precisions + level.parameters
        if not context:
            return acts
        acts.append(act("gather", *context, every=now))
        if level.precisions:
            acts += slow_step(*level.precisions, every=later, doubling=doubling)
        if level.parameters:
            acts += [act(verb, *level.parameters, every=later, doubling=doubling) for verb in PARAMETERS_STEP]
        if i + 1 < len(levels):
            acts += [*below(i + 1), act("carry", *levels[i + 1].states, every=later)]
        if level.parameters:
            acts.append(act("carry", *level.parameters, every=later, doubling=doubling))
        return [*acts, act("settle", *level.states, every=later, doubling=doubling)]

    first = levels[0]
    precisions = [act("orient", *level.precisions) for level in reversed(levels) if level.precisions]
    parameters = [act("orient", *level.parameters) for level in reversed(levels) if level.parameters]
    states = [act("orient", *level.states, times=5) for level in reversed(levels)]
    return Schedule(
        name="tracking",
        opening=(*precisions, *states[:-1], *parameters, states[-1]),
        acts=(act("carry", *first.states), act("sense", "sensory"), *below(0)),
    )


PARAMETERS_STEP: tuple[Verb, ...] = ("move", "settle")
