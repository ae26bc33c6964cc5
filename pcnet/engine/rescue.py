"""Rescue: what becomes of a batch element that can take in no more observations.

With the policy "hold", a state that cannot take in the next observation is kept. If that happens for several in a row,
the state itself is to blame. It is replaced by one of some time ago; if that does not help by an earlier one, and then
by the state at the start.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from pcnet.engine.state import GraphState, select_nodes

IN_A_ROW = 8  # observations in a row that are lost before a state is replaced
SPACING = 64  # observations between two states that are kept
DEPTH = 4  # states that are kept


class Streak(NamedTuple):
    """Observations that a batch element has lost in a row, until when, and how often its state was replaced since."""

    until: int
    length: int
    replaced: int


class Rescue:
    """Keeps states of some time ago, and counts what is lost in a row."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, GraphState]] = []
        self._streaks: dict[int, Streak] = {}
        self._warned = False

    def is_due(self, tick: int) -> bool:
        """Whether a state should be kept after so many observations."""
        return not self._kept or tick - self._kept[-1][0] >= SPACING

    def keep(self, tick: int, state: GraphState) -> None:
        """Keep a state, and drop the oldest."""
        self._kept = [*self._kept[-DEPTH + 1 :], (tick, state)]

    def forget(self) -> None:
        """Drop all states, because batch elements have changed their places."""
        self._kept, self._streaks = [], {}

    def after_loss(self, tick: int, elements: Iterable[int], state: GraphState, first: GraphState) -> GraphState:
        """The state after an observation that some batch elements have lost. first: the state at the start."""
        due = dict[int, Streak]()
        for i in elements:
            old = self._streaks.get(i, Streak(-1, 0, 0))
            length = old.length + 1 if old.until == tick - 1 else 1
            replaced = old.replaced if old.until >= tick - SPACING else 0
            self._streaks[i] = new = Streak(tick, length, replaced)
            if length % IN_A_ROW == 0:
                due[i] = new
                self._streaks[i] = Streak(tick, length, replaced + 1)
        for i, streak in due.items():
            begun = tick - streak.length + 1
            usable = [each for each in self._kept if each[0] <= begun - IN_A_ROW]
            at, source = usable[-1 - streak.replaced] if streak.replaced < len(usable) else (0, first)
            mask = torch.zeros_like(state.running)
            mask[i] = True
            nodes = select_nodes(mask, source.nodes, state.nodes)
            started = torch.where(mask, source.started, state.started)
            state = state._replace(nodes=nodes, started=started)
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{IN_A_ROW} observations in a row could not be taken in, the last at observation {tick}; beliefs "
                    f"are set back to those after {at} observations",
                    stacklevel=2,
                )
        return state
