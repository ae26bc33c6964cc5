"""The one place where a rule branches on values."""

from __future__ import annotations

from torch import Tensor


def holds(condition: Tensor) -> bool:
    """Whether a condition, a boolean tensor with one element, is true.

    All branches on values in the rules of nodes go through this function, so that a tracer can record them.
    """
    return bool(condition)
