"""Durable files: written whole or not at all, kept through a crash, and with errors that name the path and the remedy.

A file is written under a scratch name in its own folder, flushed to the disk, and renamed. On Linux the scratch has no
name until it is complete, so that a process that is killed leaves nothing behind. Elsewhere, and in the moment between
naming and renaming, the scratch of a dead process is removed by the next one that writes the same file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pcnet.errors import PcnetError, ResultError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

REMEDIES = {
    errno.ENOSPC: "the disk is full; make room, or choose another folder",
    errno.EDQUOT: "the disk quota is used up; make room, or choose another folder",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission is denied; choose a folder that you may write to",
    errno.EPERM: "permission is denied; choose a folder that you may write to",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.EISDIR: "it is a folder; give the name of a file",
    errno.ENOTDIR: "a part of the path is not a folder; check the path",
    errno.ENOENT: "its folder does not exist, or was removed; create it first",
    errno.EFBIG: "the file is too large for this file system; choose another folder",
    errno.EIO: "the disk reports an error; choose another one",
    errno.EMFILE: "too many files are open; close some",
    errno.ELOOP: "its links lead in a circle; check the path",
}
"""What a user can do about an `OSError`, by its number."""
PREFIX, ENDING = ".pcnet-", ".part"  # names of scratch files
TRAILER = b"\npcnet sha256 "
"""Begins the last line of a sealed file, which holds the digest of all that comes before it."""


def explain(path: object, doing: str, error: OSError | ValueError) -> str:
    """What went wrong with a file, and the remedy: "'a.nc' cannot be written: the disk is full; make room, …"."""
    if not isinstance(error, OSError):  # a NUL in the name
        why = "the name is not valid; choose another one"
    else:
        why = REMEDIES.get(error.errno or 0, error.strerror or str(error) or type(error).__name__)
    return f"{str(path)!r} cannot be {doing}: {why}"


@contextmanager
def plain_os_errors(path: object, doing: str, error: type[PcnetError]) -> Iterator[None]:
    """Turn errors of the operating system about a file into a pcnet error with its path and the remedy."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as why:
        raise error(explain(path, doing, why)) from None
    except MemoryError:
        raise error(f"{str(path)!r} cannot be {doing}: it does not fit into memory") from None
    except ValueError as why:
        if "null byte" not in str(why) and "null character" not in str(why):
            raise
        raise error(explain(path, doing, why)) from None


def path_of(given: object, error: type[PcnetError]) -> Path:
    """A path from text or a path; an error of the given kind for anything else."""
    if isinstance(given, (str, os.PathLike)) and not isinstance(given, bytes):
        found = os.fspath(given)
        if isinstance(found, str):
            return Path(found)
    raise error(f"give the path of a file as text or a pathlib.Path, not {type(given).__name__}")


def check_target(path: Path, error: type[PcnetError] = ResultError) -> Path:
    """The regular file that a path stands for, links followed; it need not exist, but its folder must.

    Raises:
        PcnetError: Of the given kind, if the path cannot be written: no folder, a device, a socket, a pipe, …
    """
    with plain_os_errors(path, "written", error):
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise error(f"there is no folder {str(path.parent)!r} to save into; create it first")
        try:
            mode = target.stat().st_mode
        except FileNotFoundError:
            return target
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "", str(path))
        if not stat.S_ISREG(mode):
            raise error(f"{str(path)!r} cannot be written: it is a device, a pipe or a socket; give a regular file")
    return target


@contextmanager
def atomic_write(path: Path, error: type[PcnetError] = ResultError) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes `path` once the context is left, and is nothing after any exception."""
    target = check_target(path, error)
    with plain_os_errors(path, "written", error):
        _remove_stale(target)
        scratch = _Scratch(target)
        try:
            with os.fdopen(scratch.handle, "wb", closefd=False) as file:
                yield file
            scratch.publish()
        finally:
            scratch.close()


class _Scratch:
    """A file without a name if the system has such, else with a name of its own; locked as long as it is written."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._name: Path | None = None
        self.handle = self._without_name()
        if self.handle < 0:
            self._name = _scratch_name(target)
            self.handle = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        lock(self.handle)

    def _without_name(self) -> int:
        if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").is_dir():
            return -1
        try:
            return os.open(self._target.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                return -1
            raise

    def publish(self) -> None:
        """Flush everything to the disk, and give the scratch the name of the target."""
        with suppress(OSError):  # permissions of the file that is replaced
            os.fchmod(self.handle, stat.S_IMODE(self._target.stat().st_mode))
        os.fsync(self.handle)
        if self._name is None:
            name = _scratch_name(self._target)
            here = os.open(self._target.parent, os.O_RDONLY)
            try:  # with a folder, python asks for the file behind the link in /proc
                os.link(f"/proc/self/fd/{self.handle}", name.name, dst_dir_fd=here, follow_symlinks=True)
            finally:
                os.close(here)
            self._name = name
        os.replace(self._name, self._target)
        self._name = None
        sync_folder(self._target.parent)

    def close(self) -> None:
        if self._name is not None:
            with suppress(OSError):
                self._name.unlink()
        os.close(self.handle)


def _scratch_name(target: Path) -> Path:
    """A new name for a scratch of a target; of bounded length, whatever the name of the target."""
    return target.with_name(f"{_mark(target)}{secrets.token_hex(8)}{ENDING}")


def _mark(target: Path) -> str:
    return f"{PREFIX}{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]}-"


def _remove_stale(target: Path) -> None:
    """Remove what processes that were killed while they wrote this file have left: scratches that nobody has locked."""
    if fcntl is None:
        return
    mark, names = _mark(target), list[str]()
    with suppress(OSError), os.scandir(target.parent) as entries:
        names = [entry.path for entry in entries if entry.name.startswith(mark) and entry.name.endswith(ENDING)]
    for name in names:
        with suppress(OSError):
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(name).unlink()
            finally:
                os.close(handle)


def lock(handle: int) -> bool:
    """Lock an open file until it is closed; False if another has locked it. True where there are no locks."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems have no locks
            return True
    return True


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait until no other thread or process holds the lock of a folder, where the system has such locks."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_regular(path: Path, error: type[PcnetError], limit: int | None = None) -> bytes:
    """The content of a regular file; an error of the given kind if it is none, too large or cannot be read."""
    with plain_os_errors(path, "read", error):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise error(f"there is no file {str(path)!r}") from None
        if not stat.S_ISREG(status.st_mode):
            raise error(f"there is no file {str(path)!r}: it is a folder or a device")
        if limit is not None and status.st_size > limit:
            raise error(f"{str(path)!r} is larger than {limit // 2**20} MB")
        return path.read_bytes()


# --- checksums -------------------------------------------------------------------------------------------------------
def seal(content: bytes) -> bytes:
    """Content with a last line that holds its digest."""
    return content + TRAILER + hashlib.sha256(content).hexdigest().encode() + b"\n"


def unseal(sealed: bytes) -> bytes | None:
    """The content of a sealed file; None if there is no seal. ValueError if content and seal do not match."""
    length = len(TRAILER) + 64 + 1
    content, seal_ = sealed[:-length], sealed[-length:]
    if len(sealed) < length or not seal_.startswith(TRAILER) or not seal_.endswith(b"\n"):
        return None
    if hashlib.sha256(content).hexdigest().encode() != seal_[len(TRAILER) : -1]:
        raise ValueError("its content does not match its digest")
    return content
