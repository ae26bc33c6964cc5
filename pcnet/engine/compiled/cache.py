"""A folder of compiled code, so that a second process starts at once.

Each file holds the code for one key, which covers everything that the code depends on, and a digest. A file that is
damaged is made anew. Files are written whole or not at all, so that processes can share the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path

from pcnet.errors import ResultError
from pcnet.files import atomic_write

MAGIC = b"pcnet code 1\n"
LIMIT = 256 * 2**20
"""Bytes that the folder may hold; the files that were not used for longest go first."""


class ObjectCache:
    """Compiled code by key, in a folder that only its owner can read and write. Nothing here raises an `OSError`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def default(cls) -> ObjectCache | None:
        """The cache of this user: the folder PCNET_CACHE, or one of the system's; None if PCNET_CACHE is empty."""
        given = os.environ.get("PCNET_CACHE")
        if given is not None:
            return cls(Path(given)) if given else None
        if sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        elif os.name == "nt":
            base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cls(base / "pcnet")

    def get(self, key: str) -> bytes | None:
        """The code of a key; None if it is not there, damaged, or not this user's own file."""
        path = self.folder / f"{key}.o"
        try:
            if not self._is_private(self.folder) or not self._is_private(path):
                return None
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        digest, code = content[len(MAGIC) : len(MAGIC) + 32], content[len(MAGIC) + 32 :]
        if content.startswith(MAGIC) and hashlib.sha256(key.encode() + code).digest() == digest:
            return code
        return None

    def put(self, key: str, code: bytes) -> None:
        """Keep the code of a key, if the folder can be written."""
        with contextlib.suppress(OSError, ResultError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private(self.folder):
                return
            with atomic_write(self.folder / f"{key}.o") as file:
                if os.name != "nt":
                    os.fchmod(file.fileno(), 0o600)
                file.write(MAGIC + hashlib.sha256(key.encode() + code).digest() + code)
            self._shrink()

    def _is_private(self, path: Path) -> bool:
        """Whether a path belongs to this user and nobody else can write to it: what is read from it is executed."""
        if os.name == "nt":
            return True
        status = path.stat()
        return status.st_uid == os.getuid() and not status.st_mode & 0o022

    def _shrink(self) -> None:
        files = sorted(
            (status.st_mtime, status.st_size, path) for path in self.folder.glob("*.o") for status in [path.stat()]
        )
        spare = sum(size for _, size, _ in files) - LIMIT
        for _, size, path in files:
            if spare <= 0:
                break
            path.unlink(missing_ok=True)
            spare -= size
