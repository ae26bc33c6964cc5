"""File of a study: an SQLite database to which every finished batch of inversions is committed.

Every row carries a checksum, and one over all of them tells whether a row is missing. Both are checked before anything
is read, so that damaged or edited numbers do not pass for results.
"""

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pcnet.errors import StudyError
from pcnet.files import plain_os_errors
from pcnet.results.result import package_version
from pcnet.sweeps.evaluate import Outcome

APPLICATION = 0x70636E74  # SQLite application id that marks a study ("pcnt")
FORMAT = 2  # 1 had no checksums, and no inversions that failed

TABLES = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE inversions (
    id INTEGER PRIMARY KEY,
    settings TEXT NOT NULL,       -- JSON
    replicate INTEGER NOT NULL,
    model TEXT NOT NULL,          -- digest of the model that build made from the settings
    data TEXT NOT NULL,           -- JSON: how the observations were processed
    batch INTEGER NOT NULL,       -- inversions of one batch are computed and committed together
    status TEXT NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'done', 'diverged', 'failed')),
    free_action REAL, accuracy REAL, complexity REAL,
    diverged_at INTEGER, diverged_node TEXT,
    scores TEXT, beliefs TEXT, fallbacks TEXT,  -- JSON
    seconds REAL, version TEXT, finished TEXT,
    error TEXT,                   -- why build failed
    checksum TEXT NOT NULL,       -- of the other columns
    UNIQUE (settings, replicate)
);
CREATE INDEX by_batch ON inversions (batch);
"""


class Planned(NamedTuple):
    """An inversion to add to the study."""

    settings: str
    replicate: int
    model: str
    data: str


COLUMNS = ("id", "settings", "replicate", "data", "status", *Outcome._fields, "version", "error")
"""Fields of an inversion as `Store.rows` returns them."""
NESTED = ("settings", "scores", "beliefs", "fallbacks")  # fields that are stored as JSON
CHECKED = (
    *("id", "settings", "replicate", "model", "data", "batch", "status", *Outcome._fields),
    *("version", "finished", "error"),
)
"""Columns that a checksum covers."""
SEAL = "checksum"  # key under which the checksum of all rows is stored
STATUSES = ("open", "done", "diverged", "failed")
REMEDIES = {
    "disk is full": "the disk is full; make room and start again: finished work is kept",
    "readonly": "it cannot be written; check its permissions, or use another folder",
    "disk I/O error": "the disk reports an error, or is full; finished work is kept",
    "unable to open": "it is a folder, or may not be read or written; check the path",
    "locked": "another process is writing to it; wait for it",
}
"""What a user can do about an error of SQLite, by a part of its text."""


class Store:
    """Reads and writes the file of a study; every change is one transaction."""

    def __init__(self, path: Path | None, create: bool) -> None:
        self.path = path
        where = ":memory:" if path is None else str(path)
        with plain_os_errors(where, "read", StudyError):
            known = path is None or create or path.exists()
        if not known:
            raise StudyError(f"there is no study {where!r}; make one with pcnet.sweep(..., file=...)")
        try:
            self._connection = sqlite3.connect(where, timeout=60, isolation_level=None)
        except (sqlite3.Error, ValueError) as error:
            raise StudyError(f"cannot open {where!r}: {error}") from None
        try:
            with self._transaction(writing=create):
                self._prepare(where, create)
                sound = self._connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
                if sound != "ok":
                    raise StudyError(f"{where!r} is damaged: {sound}")
                self._verify()
        except BaseException:
            self.close()
            raise

    def _prepare(self, where: str, create: bool) -> None:
        application = self._one("PRAGMA application_id")
        tables = self._one("SELECT count(*) FROM sqlite_master")
        if application == 0 and tables == 0 and create:
            for statement in TABLES.split(";"):
                if statement.strip():
                    self._connection.execute(statement)
            self._connection.execute(f"PRAGMA application_id = {APPLICATION}")
            self._connection.execute(f"PRAGMA user_version = {FORMAT}")
            self._seal()
            return
        if application != APPLICATION:
            raise StudyError(f"{where!r} is not a study of pcnet")
        version = self._one("PRAGMA user_version")
        if not 1 <= version <= FORMAT:
            raise StudyError(f"{where!r} has format {version}; this pcnet reads up to {FORMAT}: update pcnet")
        if version == 1:
            raise StudyError(f"{where!r} is a study of an earlier version, without checksums; make it again")

    def close(self) -> None:
        self._connection.close()

    # --- metadata -------------------------------------------------------------------------------------------------
    def metadata(self, key: str) -> str | None:
        with self._plain_errors():
            row = self._connection.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_metadata(self, key: str, value: str) -> None:
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, value))
            self._seal()

    # --- planning -------------------------------------------------------------------------------------------------
    def digests(self) -> dict[tuple[str, int], str]:
        """Digests of the models in the study by settings and replicate; without those that could not be built."""
        rows = self._all("SELECT settings, replicate, model FROM inversions WHERE status != 'failed'")
        return {(settings, replicate): model for settings, replicate, model in rows}

    def digests_by_id(self) -> dict[int, str]:
        return dict(self._all("SELECT id, model FROM inversions"))

    def plan(self, batches: Sequence[Sequence[Planned]], failed: Mapping[Planned, str] | None = None) -> None:
        """Add batches of inversions, and those that could not be built, with the reason.

        Inversions stay in their batch, on which digits depend. Those that failed before are tried again.
        """
        insert = "INSERT INTO inversions (settings, replicate, model, data, batch, status, error, checksum) "
        with self._transaction():
            for planned in (each for batch in (*batches, failed or {}) for each in batch):
                self._connection.execute(
                    "DELETE FROM inversions WHERE status = 'failed' AND settings = ? AND replicate = ?", planned[:2]
                )
            number = self._one("SELECT coalesce(max(batch), -1) FROM inversions") + 1
            rows = list[tuple[Any, ...]]()
            for i, batch in enumerate(batches):
                rows += [(*planned, number + i, "open", None, "") for planned in batch]
            rows += [(*planned, -1, "failed", why, "") for planned, why in (failed or {}).items()]
            self._connection.executemany(insert + "VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            self._seal("checksum = ''")

    def open_batches(self) -> dict[int, list[tuple[int, str, int]]]:
        """Unfinished inversions (id, settings, replicate) by batch."""
        rows = self._all(
            "SELECT batch, id, settings, replicate FROM inversions WHERE batch IN "
            "(SELECT batch FROM inversions WHERE status = 'open') ORDER BY batch, id"
        )
        batches: dict[int, list[tuple[int, str, int]]] = {}
        for batch, *rest in rows:
            batches.setdefault(batch, []).append(tuple(rest))
        return batches

    def finish(self, ids: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Store the outcomes of a batch in one transaction."""
        now, version = datetime.now(UTC).isoformat(timespec="seconds"), package_version()
        fields = ("status", *Outcome._fields, "version", "finished")
        rows = []
        for row, outcome in zip(ids, outcomes, strict=True):
            values = [to_json(v) if isinstance(v, dict) else _plain(v) for v in outcome]
            rows.append(("done" if outcome.diverged_at is None else "diverged", *values, version, now, row))
        with self._transaction():
            assignments = ", ".join(f"{name} = ?" for name in fields)
            self._connection.executemany(f"UPDATE inversions SET {assignments}, checksum = '' WHERE id = ?", rows)
            self._seal("checksum = ''")

    # --- reading ----------------------------------------------------------------------------------------------------
    def counts(self) -> dict[str, int]:
        """Numbers of inversions that are open, done, diverged, or failed because they could not be built."""
        counts = dict(self._all("SELECT status, count(*) FROM inversions GROUP BY status"))
        return {status: int(counts.get(status, 0)) for status in STATUSES}

    def rows(self) -> Iterator[dict[str, Any]]:
        """All inversions, finished or not, with the fields of COLUMNS."""
        with self._transaction(writing=False):
            self._verify()
            found = self._connection.execute(f"SELECT {', '.join(COLUMNS)} FROM inversions ORDER BY id").fetchall()
        for values in found:
            row = dict(zip(COLUMNS, values, strict=True))
            yield row | {name: json.loads(row[name]) if row[name] else {} for name in NESTED}

    def _all(self, query: str) -> list[Any]:
        with self._plain_errors():
            return self._connection.execute(query).fetchall()

    def _one(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    # --- checksums --------------------------------------------------------------------------------------------------
    def _seal(self, which: str | None = None) -> None:
        """Renew the checksums of some rows, and that of the whole study."""
        if which is not None:
            rows = self._connection.execute(f"SELECT {', '.join(CHECKED)} FROM inversions WHERE {which}").fetchall()
            made = [(_checksum(row), row[0]) for row in rows]
            self._connection.executemany("UPDATE inversions SET checksum = ? WHERE id = ?", made)
        self._connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (SEAL, self._total()))

    def _total(self) -> str:
        """The checksum of all metadata and of the checksums of all rows."""
        about = self._connection.execute("SELECT key, value FROM about WHERE key != ? ORDER BY key", (SEAL,)).fetchall()
        rows = self._connection.execute("SELECT checksum FROM inversions ORDER BY id").fetchall()
        return _checksum([about, rows])

    def _verify(self) -> None:
        """Raise `StudyError` for a row, or a study, that does not match its checksum."""
        for *row, checksum in self._connection.execute(f"SELECT {', '.join(CHECKED)}, checksum FROM inversions"):
            if _checksum(row) != checksum:
                raise StudyError(f"{self._where!r} is damaged or was edited: inversion {row[0]} has a wrong checksum")
        found = self._connection.execute("SELECT value FROM about WHERE key = ?", (SEAL,)).fetchone()
        if found is None or found[0] != self._total():
            raise StudyError(f"{self._where!r} is damaged or was edited: rows are missing, or its metadata are changed")

    @property
    def _where(self) -> str:
        return ":memory:" if self.path is None else str(self.path)

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Turn errors of SQLite, and of content that makes no sense, into `StudyError`s with a remedy."""
        try:
            yield
        except sqlite3.OperationalError as error:
            text = str(error)
            remedy = next((remedy for part, remedy in REMEDIES.items() if part in text), None)
            what = "is not a study, or it is damaged" if remedy is None else "cannot be used"
            raise StudyError(f"{self._where!r} {what}: {remedy or text}") from None
        except (sqlite3.Error, UnicodeDecodeError, OverflowError, ValueError, TypeError, MemoryError) as error:
            if isinstance(error, StudyError):
                raise
            raise StudyError(f"{self._where!r} is not a study, or it is damaged: {error}") from None

    @contextmanager
    def _transaction(self, writing: bool = True) -> Iterator[None]:
        with self._plain_errors():
            self._connection.execute("BEGIN IMMEDIATE" if writing else "BEGIN")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite itself rolls back if the disk is full
                    self._connection.execute("ROLLBACK")
                raise


def _checksum(values: Any) -> str:
    return hashlib.sha256(repr(values if isinstance(values, list) else list(values)).encode()).hexdigest()


def to_json(value: Any) -> str:
    """Canonical JSON: equal values give equal text; numbers that are not finite become null."""
    return json.dumps(_plain(value), sort_keys=True, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
