"""Functions that a tracer takes as one operation, because their own steps depend on values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

Handler = Callable[[str, Callable[..., Tensor], tuple[Any, ...]], Tensor]
Kernel = TypeVar("Kernel", bound=Callable[..., Tensor])
_HANDLER: ContextVar[Handler | None] = ContextVar("pcnet_kernel_handler", default=None)


def kernel(function: Kernel) -> Kernel:
    """Mark a function of tensors as one operation for tracers."""

    @wraps(function)
    def call(*args: Any) -> Tensor:
        handler = _HANDLER.get()
        return function(*args) if handler is None else handler(function.__name__, function, args)

    return call  # type: ignore[return-value]


def is_traced() -> bool:
    """Whether a tracer listens."""
    return _HANDLER.get() is not None


@contextmanager
def kernel_calls_go_to(handler: Handler) -> Iterator[None]:
    """A context in which calls of kernels go to a handler, with the name of the kernel and its arguments."""
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)
