"""Schedules as data: which nodes take which action at which observation, and in which order."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from pcnet.errors import ScheduleError, naming
from pcnet.model.node import AnyNode
from pcnet.settings import Period, broadcast, number, settings, to_tensor

Action = Literal[
    "observe", "initialise", "predict", "update", "accumulate", "update_covariance", "retune", "renew_prior"
]
"""The actions of a node: methods of `pcnet.model.node.AnyNode` with these names."""


@settings
class Every:
    """A clock that ticks at every `every`-th observation.

    Args:
        every: Period in observations, a whole number, or a tensor with one period for each batch element.
    """

    every: Period = number(1)


@settings
class Act:
    """One line of a schedule: the given nodes take an action.

    Args:
        action: Name of the action.
        nodes: Names or roles of the nodes that take it.
        clock: When they take it.
        repeats: How often in a row they take it.
        exclude: Names or roles of nodes that do not take it.
    """

    action: Action
    nodes: tuple[str, ...]
    clock: Every = Every()
    repeats: int = Field(default=1, ge=1, le=1000)
    exclude: tuple[str, ...] = ()

    def names(self, nodes: Mapping[str, AnyNode]) -> list[str]:
        """Names of the nodes that take the action: in the order of `self.nodes`, nodes of one role in graph order."""
        found: list[str] = []
        for wanted in self.nodes:
            for name, node in nodes.items():
                excluded = name in self.exclude or node.role in self.exclude
                if wanted in (name, node.role) and not excluded and name not in found:
                    found.append(name)
        return found

    def __str__(self) -> str:
        every = self.clock.every
        when = "" if bool((every == 1).all()) else f", every {span(every)}"
        often = "" if self.repeats == 1 else f", {self.repeats} times"
        exclude = f" except {', '.join(self.exclude)}" if self.exclude else ""
        return f"{', '.join(self.nodes)}{exclude}: {self.action}{often}{when}"


@settings
class Schedule:
    """The actions of one observation, in order.

    Args:
        acts: Actions at each observation.
        on_start: Actions taken once, with the first observation, before `acts`.
        name: Name for summaries and errors.
        on_end: Actions taken once, after the last observation. A schedule that has them is for `Model.fit`.
    """

    acts: tuple[Act, ...]
    on_start: tuple[Act, ...] = ()
    name: str = "schedule"
    on_end: tuple[Act, ...] = ()

    def __post_init__(self) -> None:
        for part, acts in (("on_start", self.on_start), ("on_end", self.on_end)):
            if any(bool((act.clock.every != 1).any()) for act in acts):
                raise ScheduleError(f"{self.name}: actions in {part} are taken once; remove their `every`")
        if any(not act.nodes for act in self.all_acts):
            raise ScheduleError(f"{self.name}: an act needs nodes or roles, for example act('update', 'state')")

    @property
    def all_acts(self) -> tuple[Act, ...]:
        """All acts: on_start, acts, on_end."""
        return self.on_start + self.acts + self.on_end

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of the periods."""
        return broadcast(*(act.clock.every.shape for act in self.all_acts))

    def check(self, nodes: Mapping[str, AnyNode]) -> None:
        """Raise `ScheduleError` for unknown nodes, and where an action that a node requires is missing."""
        roles = {node.role for node in nodes.values()}
        for name in roles & nodes.keys():
            raise ScheduleError(f"the node name {name!r} is also a role in schedules; rename the node")
        known = {*nodes, *roles, *ROLES}
        names = f"nodes: {', '.join(nodes)}; roles: {', '.join(sorted(roles))}"
        for name in (name for act in self.all_acts for name in (*act.nodes, *act.exclude)):
            if name not in known:
                raise ScheduleError(f"{self.name}: there is no node or role {name!r}; {names}")
        taken = {(act.action, name) for act in self.acts for name in act.names(nodes)}
        for name, node in nodes.items():
            for action in node.required_actions:
                if (action, name) not in taken:
                    other = "use a schedule that has it, such as pcnet.adaptive_filtering()"
                    remedy = f"add act('observe', {name!r})" if node.observes else other
                    raise ScheduleError(f"{self.name}: {node.title} never takes the action {action!r}; {remedy}")

    def __str__(self) -> str:
        lines = [f"on start: {act}" for act in self.on_start] + [str(act) for act in self.acts]
        lines += [f"on end: {act}" for act in self.on_end]
        return "\n".join([self.name, *(f"  {line}" for line in lines)])


def span(values: Tensor) -> str:
    """The range of whole numbers as text: "64" or "64 to 256"."""
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"


@naming(ScheduleError)
def act(
    action: Action,
    *nodes: str,
    every: Any = 1,
    repeats: int = 1,
    exclude: Sequence[str] = (),
) -> Act:
    """A line of a schedule in short form, for example `act("update", "parameter", every=64)`."""
    return Act(action, tuple(nodes), Every(every), repeats, tuple(exclude))


def slow_step(*nodes: str, every: Any, exclude: Sequence[str] = ()) -> tuple[Act, ...]:
    """One slow step: update the mean, then the covariance, then make the posterior the new prior."""
    return tuple(act(action, *nodes, every=every, exclude=exclude) for action in SLOW_STEP)


SLOW_STEP: tuple[Action, ...] = ("update", "update_covariance", "renew_prior")

INITIALISE = act("initialise", "state", repeats=5)
"""Find the first states from the first observation. Repeated, because mappings may be nonlinear."""

TAKE_IN = (act("observe", "sensory"), act("predict", "state"), act("update", "state"))
"""Take in an observation; inputs are observed before the states that they drive are predicted."""

ROLES = ("sensory", "state", "precision", "parameter")
"""Roles that schedules may name even if the graph has no node of that role."""

SLOW = ("precision", "parameter")  # roles of the slow context, in the order in which they step


@naming(ScheduleError)
def odem(every: Any = 64, *, periods: Mapping[str, Any] | None = None) -> Schedule:
    """States at every observation, precisions and then parameters at every N-th (Algorithm 1 of the paper).

    Args:
        every: N, a whole number, or a tensor with one period for each batch element.
        periods: Other periods for named nodes, for example {"lambda_y": 128}; these step after the others.
    """
    own = dict(periods or {})
    others = tuple(own)
    slow = [step for role in SLOW for step in slow_step(role, every=every, exclude=others)]
    slow += [step for name, period in own.items() for step in slow_step(name, every=period)]
    return Schedule(
        name="ODEM",
        on_start=(INITIALISE,),
        acts=(
            act("observe", "sensory"),
            act("update", "state", exclude=others),
            act("accumulate", *SLOW),
            *slow,
            act("update_covariance", "state", exclude=others),
        ),
    )


@naming(ScheduleError)
def generalised_filtering() -> Schedule:
    """States, precisions and parameters at every observation."""
    return dataclasses.replace(odem(every=1), name="generalised filtering")


def states_only() -> Schedule:
    """States at every observation; parameters and precisions stay at their priors."""
    return Schedule(
        name="states only",
        on_start=(INITIALISE,),
        acts=(*TAKE_IN, act("update_covariance", "state")),
    )


@naming(ScheduleError)
def batch(nodes: str | Sequence[str] = SLOW) -> Schedule:
    """For recorded data, as in DEM: states at every observation, precisions and parameters once after each pass.

    States start anew with each pass. `Model.fit` repeats passes until the free action converges.

    Args:
        nodes: Roles or names of what is updated after a pass. What is left out stays at its prior.
    """
    slow = (nodes,) if isinstance(nodes, str) else tuple(nodes)
    return Schedule(
        name="batch",
        on_start=(INITIALISE,),
        acts=(*TAKE_IN, act("accumulate", *slow), act("update_covariance", "state")),
        on_end=(act("update", *slow), act("update_covariance", *slow)),
    )


class LevelNodes(NamedTuple):
    """Names or roles of the nodes of one level of a stack."""

    states: tuple[str, ...] = ("state",)
    precisions: tuple[str, ...] = ("precision",)
    parameters: tuple[str, ...] = ("parameter",)


@naming(ScheduleError)
def adaptive_filtering(
    every: Any = 64, *, levels: Sequence[LevelNodes] = (LevelNodes(),), learn_every: Any = 1
) -> Schedule:
    """For Kalman states: observe, predict, update, and learn noise levels and parameters, at every observation.

    A level of a stack acts once in `every` actions of the level below it: it takes in the posterior of the parameters
    there, and predicts their next prior.

    Args:
        every: N: level i, from 0, has the period N**i.
        levels: The nodes of each level, the lowest first.
        learn_every: Period of the steps of noise levels and of parameters with an estimator, in actions of their level.
            Parameters that are part of the belief of a state are learned by each of its updates.
    """
    periods = [to_tensor(every) ** i for i in range(len(levels) + 1)]

    def upward(i: int) -> list[Act]:
        """The acts of level i after the errors below it are known, with those of all levels above it."""
        level, now, is_top = levels[i], periods[i], i + 1 == len(levels)
        learn = now * to_tensor(learn_every)
        later = learn if is_top else periods[i + 1]
        acts = [act("update", *level.states, every=now)]
        context = level.precisions + level.parameters
        if not context:
            return acts
        acts.append(act("accumulate", *context, every=now))
        if level.precisions:
            acts.append(act("update", *level.precisions, every=learn))
        if level.parameters:
            acts += [act(action, *level.parameters, every=later) for action in ("update", "update_covariance")]
        if not is_top:
            acts += [*upward(i + 1), act("predict", *levels[i + 1].states, every=later)]
        if level.parameters:
            acts.append(act("renew_prior", *level.parameters, every=later))
        return [*acts, act("retune", *level.states, every=learn)]

    first = levels[0]
    parameters = [act("initialise", *level.parameters) for level in reversed(levels) if level.parameters]
    states = [act("initialise", *level.states, repeats=5) for level in reversed(levels)]
    return Schedule(
        name="adaptive filtering",
        on_start=(*states[:-1], *parameters, states[-1]),
        acts=(act("observe", "sensory"), act("predict", *first.states), *upward(0)),
    )
