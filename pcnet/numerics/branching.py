"""The one place where a rule branches on values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_OUTCOMES: ContextVar[list[bool] | None] = ContextVar("pcnet_branch_outcomes", default=None)

_ONE_SIDED: ContextVar[bool] = ContextVar("pcnet_one_sided", default=False)


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


def may_skip(condition: Tensor) -> bool:
    """Whether work can be skipped, because a condition holds; where it does not, the rule must do for both outcomes.

    Compiled code that skips it checks the condition, and compiled code that does not is right for all values.
    """
    token = _ONE_SIDED.set(True)
    try:
        return holds(condition)
    finally:
        _ONE_SIDED.reset(token)


def is_one_sided() -> bool:
    """Whether the branch that is being decided needs no check if it is not taken."""
    return _ONE_SIDED.get()


@contextmanager
def branch_outcomes() -> Iterator[list[bool]]:
    """A context that notes how branches on values go."""
    outcomes: list[bool] = []
    token = _OUTCOMES.set(outcomes)
    try:
        yield outcomes
    finally:
        _OUTCOMES.reset(token)
