"""The one place where a rule branches on values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_OUTCOMES: ContextVar[list[bool] | None] = ContextVar("pcnet_branch_outcomes", default=None)
_HARMLESS: ContextVar[bool] = ContextVar("pcnet_branch_harmless", default=False)


class EagerOnlyError(Exception):
    """A rule takes a way that is not worth compiling."""


def eager_only(what: str) -> None:
    """Leave this tick to the eager engine: called by a rule on a way that is taken once, and has many branches."""
    if _OUTCOMES.get() is not None:
        raise EagerOnlyError(f"{what} is done by the eager engine")


def holds(condition: Tensor) -> bool:
    """Whether a condition, a boolean tensor with one element, is true.

    All branches on values in the rules of nodes go through this function, so that a tracer can record them.
    """
    outcome = bool(condition)
    outcomes = _OUTCOMES.get()
    if outcomes is not None:
        outcomes.append(outcome)
    return outcome


def needed(condition: Tensor) -> bool:
    """Whether something has to be done, which changes nothing where it does not; the condition is as in `holds`.

    Compiled code that does it serves in both cases, so that lanes of a vector need not agree.
    """
    token = _HARMLESS.set(True)
    try:
        return holds(condition)
    finally:
        _HARMLESS.reset(token)


def is_guarded(outcome: bool) -> bool:
    """Whether code recorded with this outcome of the present branch is right with this outcome only."""
    return not (outcome and _HARMLESS.get())


@contextmanager
def branch_outcomes() -> Iterator[list[bool]]:
    """A context that notes how branches on values go."""
    outcomes: list[bool] = []
    token = _OUTCOMES.set(outcomes)
    try:
        yield outcomes
    finally:
        _OUTCOMES.reset(token)
