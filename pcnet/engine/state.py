"""The state of a run: everything that changes from one observation to the next, as a tree of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from pcnet.numerics.trees import flatten, select, unflatten

NodeStates = Mapping[str, tuple[Any, ...]]
"""The state of each node by name."""


class GraphState(NamedTuple):
    """The states of all nodes and the progress of each batch element. It is never changed, only replaced.

    nodes: states by name. time: (B,), in double precision; see `pcnet.model.context.Now`. dt: the last interval, (B,).
    started: batch elements of which something has been observed, (B,). running: batch elements that have not stopped,
    (B,). missed: ticks that were lost to "hold" or "reset", (B,). accuracy, complexity: of the last observation, (B,).
    sum_accuracy, sum_complexity: of all observations, (B,).
    """

    nodes: NodeStates
    time: Tensor
    dt: Tensor
    started: Tensor
    running: Tensor
    missed: Tensor
    accuracy: Tensor
    complexity: Tensor
    sum_accuracy: Tensor
    sum_complexity: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name: x/belief/mean, or time."""
        found = {name: getattr(self, name) for name in self._fields[1:]}
        for name, state in self.nodes.items():
            found |= flatten(state, name)
        return found

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> GraphState:
        """A state of the same form with these tensors; KeyError for one that is missing, misshapen or not needed."""
        left = dict(tensors)
        nodes = {name: unflatten(state, name, left) for name, state in self.nodes.items()}
        rest = {name: unflatten(getattr(self, name), name, left) for name in self._fields[1:]}
        if left:
            raise KeyError(min(left))
        return GraphState(nodes, **rest)


def select_nodes(mask: Tensor, new: NodeStates, old: NodeStates) -> NodeStates:
    """`new` for the batch elements of a mask (B,), and `old` for the others."""
    return {name: select(mask, state, old[name]) for name, state in new.items()}
