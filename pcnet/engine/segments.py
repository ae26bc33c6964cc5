"""The recording of a long run in a file of segments, to which each checkpoint appends what is new.

A segment is its length, a digest of all segments up to it, and the recorded rows as safetensors. The checkpoint holds
how many bytes belong to it and their digest, so that what a killed process has appended beyond is not read.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor

from pcnet.errors import CheckpointError
from pcnet.files import plain_os_errors, read_regular, sync_folder

TIMES = "/times"  # the name of the times among the tensors; no node has a name with a slash
HEAD = 8 + 32  # bytes of length and digest


class Segments(NamedTuple):
    """How much of a file of segments is valid: its token, bytes, their digest, and the number of rows.

    token: the last part of its name, after that of the checkpoint, so that both can be renamed. until: the number of
    the row after the last one, counted from the first that was ever recorded.
    """

    token: str
    size: int
    digest: bytes
    rows: int
    until: int

    def file(self, path: Path) -> Path:
        """The file of segments of a checkpoint."""
        return path.with_name(f"{path.name}.rows-{self.token}")


def append(path: Path, before: Segments | None, rows: dict[str, Tensor], until: int) -> Segments:
    """Append rows to the file of segments of a checkpoint; to a new one if `before` is None.

    Args:
        path: The checkpoint.
        before: What is valid so far.
        rows: Recorded values (T, B, ...) by name, with their times.
        until: See `Segments`.
    """
    known = before or Segments(secrets.token_hex(4), 0, b"", 0, 0)
    file = known.file(path)
    payload = to_bytes({name: value.contiguous() for name, value in rows.items()})
    digest = hashlib.sha256(known.digest + payload).digest()
    with plain_os_errors(file, "written", CheckpointError):
        flags = os.O_WRONLY | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if before is None else 0)
        handle = os.open(file, flags, 0o666)
        try:
            with os.fdopen(handle, "wb", closefd=False) as opened:
                opened.seek(known.size)
                opened.truncate()  # what a killed process has left
                opened.write(len(payload).to_bytes(8, "little") + digest)
                opened.write(payload)
            os.fsync(handle)
        finally:
            os.close(handle)
        if before is None:
            sync_folder(file.parent)
    count = len(rows[TIMES])
    return Segments(known.token, known.size + HEAD + len(payload), digest, known.rows + count, until)


def is_there(path: Path, known: Segments) -> bool:
    """Whether the file of segments of a checkpoint is still long enough to be continued."""
    with suppress(OSError):
        return known.file(path).stat().st_size >= known.size
    return False


def read(path: Path, known: Segments) -> dict[str, Tensor]:
    """All rows of the segments of a checkpoint, (T, B, ...) by name; `CheckpointError` if they are not as written."""
    file = known.file(path)
    try:
        content = read_regular(file, CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; it holds the recording of {str(path)!r} and belongs beside it") from None
    damaged = CheckpointError(f"{str(file)!r} is damaged: it is not what belongs to {str(path)!r}")
    place, digest, parts = 0, b"", list[dict[str, Tensor]]()
    while place < known.size:
        head = content[place : min(place + HEAD, known.size)]
        length = int.from_bytes(head[:8], "little")
        payload = content[place + HEAD : min(place + HEAD + length, known.size)]
        digest = hashlib.sha256(digest + payload).digest()
        if len(head) < HEAD or len(payload) != length or digest != head[8:]:
            raise damaged
        try:
            parts.append(load(payload))
        except (SafetensorError, ValueError, RuntimeError):
            raise damaged from None
        place += HEAD + length
    if digest != known.digest or any(part.keys() != parts[0].keys() for part in parts):
        raise damaged
    try:
        return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    except RuntimeError:
        raise damaged from None


def remove_others(path: Path, kept: Segments | None) -> None:
    """Remove files of segments of a checkpoint that it no longer refers to."""
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in list(entries):
            mine = entry.name.startswith(f"{path.name}.rows-") and len(entry.name) == len(path.name) + 14
            if mine and (kept is None or entry.name != kept.file(path).name):
                Path(entry.path).unlink()
