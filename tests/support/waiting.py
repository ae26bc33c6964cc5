"""Waiting for conditions, however slow the machine is."""

import time
from collections.abc import Callable

PATIENCE = 300
"""Seconds after which a test gives up: far more than anything takes, so that a busy machine does not matter."""


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return as soon as a condition is true.

    Raises:
        TimeoutError: After `PATIENCE` seconds.
    """
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not hold within {PATIENCE} s")
        time.sleep(0.02)
