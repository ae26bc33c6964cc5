"""Atomic writing of files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pcnet.errors import PcnetError, ResultError


@contextmanager
def atomic_write(path: Path, error: type[PcnetError] = ResultError) -> Iterator[Path]:
    """A temporary path in the folder of `path`; replaces `path` on success and is removed on any exception."""
    check_folder(path, error)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def check_folder(path: Path, error: type[PcnetError] = ResultError) -> None:
    """Raise an error if the folder of a file to be written does not exist; `atomic_write` does this too."""
    if not path.parent.is_dir():
        raise error(f"there is no folder {str(path.parent)!r} to save into; create it first")
