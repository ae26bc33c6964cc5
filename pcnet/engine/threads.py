"""Threads: how many torch uses during a run, and one at a time for each session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Locked(Protocol):
    """Something that one thread at a time may use."""

    @property
    def lock(self) -> AbstractContextManager[Any]: ...


S = TypeVar("S", bound=Locked)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method during which all other threads wait that call such a method of the same object."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return call


class ThreadLimit:
    """A context in which torch uses so many threads within an operation; None leaves torch's own setting.

    For small matrices threads cost more than they gain. On a busy machine, an operation that waits for a second thread
    takes milliseconds instead of microseconds.
    """

    def __init__(self, threads: int | None) -> None:
        self._usual = torch.get_num_threads()
        self._threads = self._usual if threads is None else threads

    def __enter__(self) -> None:
        if self._threads != self._usual:
            torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        if self._threads != self._usual:
            torch.set_num_threads(self._usual)
