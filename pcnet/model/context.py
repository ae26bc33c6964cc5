"""What a rule of a node can reach: its own state, time, its observation, and the messages on its own links."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from pcnet.model.links import AnyLink, Link
from pcnet.numerics.branching import holds
from pcnet.numerics.coloured_noise import NoiseSpec

if TYPE_CHECKING:
    from pcnet.model.node import AnyNode
    from pcnet.numerics.estimators import ParameterEstimator

S = TypeVar("S", bound=tuple[Any, ...])
B = TypeVar("B")
P = TypeVar("P")
E = TypeVar("E")
L = TypeVar("L", bound=AnyLink)
R = TypeVar("R")


class Neighbours(NamedTuple):
    """The links of a node, and what binding needs to know of the nodes at their other ends."""

    above: tuple[AnyLink, ...]
    below: tuple[AnyLink, ...]
    noise: Mapping[AnyLink, NoiseSpec | None] = MappingProxyType({})  # the noise behind the error of a child
    default_estimators: Mapping[AnyLink, ParameterEstimator | None] = MappingProxyType({})  # suggested by a child
    joint: frozenset[AnyLink] = frozenset()  # links whose parameters are part of the belief of the state below
    online: bool = True  # whether the node learns during a run, and not after passes over recorded data
    smooth: bool = False  # whether states keep what a smoother needs
    relayed: Mapping[AnyLink, AnyLink] = MappingProxyType({})  # links above causes in its belief: the link they come by

    def above_of(self, kind: type[L], of: AnyNode | None = None) -> tuple[L, ...]:
        """The links above of one kind; for `Parametrises`, those of the flow or of the mapping to `of`.

        After its own come those of causes that are part of its belief.
        """
        return tuple(link for link in (*self.above, *self.relayed) if isinstance(link, kind) and link.of is of)

    def below_of(self, kind: type[L]) -> tuple[L, ...]:
        """The links below of one kind."""
        return tuple(link for link in self.below if isinstance(link, kind))


ROUNDING = 1e-9
"""A time step that differs from the sampling interval by less than this, relative to it, is that interval."""


class Now(NamedTuple):
    """The time of a tick."""

    time: Tensor  # (B,), in double precision; from the first observation on, or as given if functions depend on it
    dt: Tensor  # since the previous observation, (B,); at the first one, the sampling interval
    relative_dt: Tensor | None  # dt over the sampling interval, (B,); None while observations come at that interval


class Surroundings(Protocol):
    """What the engine provides to the contexts of all nodes."""

    now: Now

    def message(self, link: AnyLink) -> Any: ...

    def error(self, link: AnyLink) -> Any: ...

    def adopt(self, name: str, state: Any) -> None: ...

    def mark_diverged(self, name: str, where: Tensor, why: str) -> None: ...


class NodeContext(Generic[S, B]):
    """What one node sees during a tick. It can reach nothing else: locality is enforced, not a convention.

    bound: what its `bind` returned. state: its state, which changes only by what its actions return. observation: what
    was observed of it, (B, observation_size), NaN where it is missing; None if it does not observe.
    """

    __slots__ = (
        *("_ahead", "_found", "_host", "_memo", "_now"),
        *("above", "below", "bound", "links", "name", "observation", "state"),
    )

    def __init__(self, name: str, links: Neighbours, bound: B, state: S, surroundings: Surroundings) -> None:
        self.name, self.bound, self.state = name, bound, state
        self.links, self.above, self.below = links, links.above, links.below
        self.observation: Tensor | None = None
        self._now: Now | None = None  # only in copies for forecasts
        self._ahead: Mapping[AnyLink, Any] = {}  # other messages, only in such copies
        self._host = surroundings
        self._found: dict[Any, tuple[Any, ...]] = {}
        self._memo: dict[str, tuple[tuple[Any, ...], Any]] = {}

    @property
    def now(self) -> Now:
        return self._host.now if self._now is None else self._now

    @property
    def time(self) -> Tensor:
        """See `Now`, (B,)."""
        return self.now.time

    @property
    def dt(self) -> Tensor:
        """Time since the previous observation, (B,)."""
        return self.now.dt

    def time_since(self, earlier: Tensor) -> Tensor:
        """Time since an earlier one (B,): exactly dt if all differ from it by rounding only, because dt is constant."""
        elapsed = self.time - earlier
        return self.dt if holds(((elapsed - self.dt).abs() <= ROUNDING * self.dt).all()) else elapsed

    @property
    def relative_dt(self) -> Tensor | None:
        """dt over the sampling interval, (B,); None while observations come at that interval."""
        return self.now.relative_dt

    def above_of(self, kind: type[L], of: AnyNode | None = None) -> tuple[L, ...]:
        """The links above of one kind; for `Parametrises`, those of the flow or of the mapping to `of`."""
        found = self._found.get((kind, of))
        if found is None:
            found = self._found[kind, of] = self.links.above_of(kind, of)
        return found

    def below_of(self, kind: type[L]) -> tuple[L, ...]:
        """The links below of one kind."""
        found = self._found.get(kind)
        if found is None:
            found = self._found[kind] = self.links.below_of(kind)
        return found

    def message(self, link: Link[P, E]) -> P:
        """The prediction that came down a link above."""
        if self._ahead and link in self._ahead:
            return self._ahead[link]  # type: ignore[no-any-return]
        via = self.links.relayed.get(link)
        if via is not None:
            return self.message(via).messages[link]  # type: ignore[no-any-return]
        return self._host.message(link)  # type: ignore[no-any-return]

    def error(self, link: Link[P, E]) -> E:
        """The error that came up a link below."""
        if self._ahead and link in self._ahead:
            return self._ahead[link]  # type: ignore[no-any-return]
        return self._host.error(link)  # type: ignore[no-any-return]

    def propose(self, state: S) -> None:
        """Adopt a state on trial, so that errors from below are those at this state."""
        if self._now is not None:
            self.state = state
        elif state is not self.state:
            self._host.adopt(self.name, state)

    def at(
        self, state: Any, now: Now, messages: Mapping[AnyLink, Any] | None = None, bound: Any = None
    ) -> NodeContext[Any, Any]:
        """A copy of this context with another state and time, for forecasts and for modes.

        messages: predictions from above and errors from below, by link; those that are not given are the present ones,
        or those of this copy. bound: other constants, unless they stay the same.
        """
        other: NodeContext[Any, Any] = copy.copy(self)
        other.state, other._now = state, now
        if bound is not None:
            other.bound, other._memo = bound, {}
        if messages:
            other._ahead = messages
        return other

    def mark_diverged(self, where: Tensor, why: str) -> None:
        """Report batch elements (B,) that cannot go on; their new state is discarded."""
        self._host.mark_diverged(self.name, where, why)

    def cached(self, name: str, compute: Callable[[], R], *inputs: Any) -> R:
        """compute(), reused as long as its inputs are the same objects."""
        kept = self._memo.get(name)
        if kept is not None and len(kept[0]) == len(inputs) and all(map(operator.is_, kept[0], inputs)):
            return kept[1]  # type: ignore[no-any-return]
        result = compute()
        self._memo[name] = (inputs, result)
        return result
