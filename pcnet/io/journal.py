"""The journal of a stream: every line that was answered, in a file that is only ever appended to.

Each entry is one line of JSON with its number and a checksum that covers all entries before it. An entry is written
before the answer, so that after a crash every answered line is there. A last entry that is cut off was not answered.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from pcnet.errors import ObservationError
from pcnet.files import check_target, lock, plain_os_errors, read_regular, sync_folder

FORMAT = 1
FLUSH = 1.0  # seconds after which entries are flushed to the disk itself


class Entry(NamedTuple):
    """A line that was answered; observation: the number of observations before it."""

    observation: int
    line: str


class Journal:
    """A journal that is open for further entries.

    Args:
        path: The file; made if it does not exist.
        model: The digest of the model, which must be that of the journal.
        start: The number of observations before the first entry of a new journal.
    """

    def __init__(self, path: Path, model: str, start: int) -> None:
        self.path = check_target(path, ObservationError)
        self.entries: list[Entry] = []
        self._sum = b""
        with plain_os_errors(path, "written", ObservationError):
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            try:
                if not lock(self._handle):
                    raise ObservationError(f"{str(path)!r} is in use; give each stream a journal of its own")
                size = self._read(model, start)
                os.ftruncate(self._handle, size)  # without an entry that is cut off
                os.lseek(self._handle, size, os.SEEK_SET)
                if not size:
                    self._write(_head(model, start))
                    os.fsync(self._handle)
                    sync_folder(self.path.parent)
            except BaseException:
                os.close(self._handle)
                raise
        self._flushed = time.monotonic()

    def _read(self, model: str, start: int) -> int:
        """Read all entries; the number of bytes that are valid."""
        content, valid = read_regular(self.path, ObservationError), 0
        if b"\n" not in content:  # nothing, a first entry that is cut off, or another file, which must not be lost
            first = _text(_head(model, start), b"").partition(b'"start"')[0]
            if len(content) > len(first) + 100 or content[: len(first)] != first[: len(content)]:
                raise ObservationError(f"{str(self.path)!r} is not a journal; give a file that does not exist yet")
        for number, line in enumerate(content.split(b"\n")[:-1]):
            entry = self._entry(line, number)
            if number == 0:
                if entry.get("pcnet journal") != FORMAT:
                    raise ObservationError(f"{str(self.path)!r} is not a journal of this version of pcnet")
                if entry.get("model") != model:
                    raise ObservationError(f"{str(self.path)!r} is the journal of another model; give another file")
            else:
                self.entries.append(Entry(entry["observation"], entry["line"]))
            valid += len(line) + 1
        return valid

    def _entry(self, line: bytes, number: int) -> dict[str, Any]:
        where = f"{str(self.path)!r} is damaged in line {number + 1}"
        try:
            entry = json.loads(line)
            found = entry.pop("sum")
            self._sum = _chain(self._sum, entry)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ObservationError(f"{where}: it is not an entry") from None
        if found != self._sum.hex() or line != _text(entry, self._sum):
            raise ObservationError(f"{where}: its checksum does not match")
        return dict(entry)

    def replayed(self, done: int) -> list[Entry]:
        """Entries after the first `done` observations; `ObservationError` if some are missing before them."""
        left = [entry for entry in self.entries if entry.observation >= done]
        if left and left[0].observation != done:
            first = left[0].observation
            raise ObservationError(
                f"{str(self.path)!r} begins after {first} observations, and the session is after {done}; resume from "
                "the checkpoint that belongs to it"
            )
        return left

    def add(self, observation: int, line: str) -> None:
        """Write an entry. It survives the end of this process at once, and a power failure after a second."""
        with plain_os_errors(self.path, "written", ObservationError):
            self._write({"observation": observation, "line": line})
            if time.monotonic() - self._flushed > FLUSH:
                self.flush()

    def _write(self, entry: dict[str, Any]) -> None:
        self._sum = _chain(self._sum, entry)
        left = memoryview(_text(entry, self._sum) + b"\n")
        while left:
            left = left[os.write(self._handle, left) :]

    def flush(self) -> None:
        """Flush all entries to the disk."""
        os.fsync(self._handle)
        self._flushed = time.monotonic()

    def close(self) -> None:
        with plain_os_errors(self.path, "written", ObservationError):
            self.flush()
            os.close(self._handle)


def _head(model: str, start: int) -> dict[str, Any]:
    return {"pcnet journal": FORMAT, "model": model, "start": start}


def _chain(before: bytes, entry: dict[str, Any]) -> bytes:
    return hashlib.sha256(before + json.dumps(entry, sort_keys=True).encode()).digest()[:16]


def _text(entry: dict[str, Any], checksum: bytes) -> bytes:
    return json.dumps(entry | {"sum": checksum.hex()}, sort_keys=True).encode()
