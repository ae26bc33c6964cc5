"""Limiting the threads of torch during a run."""

import torch


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
