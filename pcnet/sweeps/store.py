"""File of a study: an SQLite database to which every finished batch of inversions is committed."""

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pcnet.errors import StudyError
from pcnet.results.result import package_version
from pcnet.sweeps.evaluate import Outcome

APPLICATION = 0x70636E74  # SQLite application id that marks a study ("pcnt")
FORMAT = 1

TABLES = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE inversions (
    id INTEGER PRIMARY KEY,
    settings TEXT NOT NULL,       -- JSON
    replicate INTEGER NOT NULL,
    model TEXT NOT NULL,          -- digest of the model that build made from the settings
    data TEXT NOT NULL,           -- JSON: how the observations were processed
    batch INTEGER NOT NULL,       -- inversions of one batch are computed and committed together
    status TEXT NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'done', 'diverged')),
    free_action REAL, accuracy REAL, complexity REAL,
    diverged_at INTEGER, diverged_node TEXT,
    scores TEXT, beliefs TEXT, fallbacks TEXT,  -- JSON
    seconds REAL, version TEXT, finished TEXT,
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


COLUMNS = ("id", "settings", "replicate", "data", "status", *Outcome._fields, "version")
"""Fields of an inversion as `Store.rows` returns them."""
NESTED = ("settings", "scores", "beliefs", "fallbacks")  # fields that are stored as JSON


class Store:
    """Reads and writes the file of a study; every change is one transaction."""

    def __init__(self, path: Path | None, create: bool) -> None:
        self.path = path
        where = ":memory:" if path is None else str(path)
        if path is not None and not create and not path.exists():
            raise StudyError(f"there is no study {where!r}; make one with pcnet.sweep(..., file=...)")
        try:
            self._connection = sqlite3.connect(where, timeout=60, isolation_level=None)
        except sqlite3.OperationalError as error:
            raise StudyError(f"cannot open {where!r}: {error}") from None
        try:
            with self._transaction(writing=create):
                self._prepare(where, create)
        except sqlite3.DatabaseError as error:
            self.close()
            raise StudyError(f"{where!r} is not a study, or it is damaged: {error}") from None
        except StudyError:
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
            return
        if application != APPLICATION:
            raise StudyError(f"{where!r} is not a study of pcnet")
        version = self._one("PRAGMA user_version")
        if version > FORMAT:
            raise StudyError(f"{where!r} has format {version}; this pcnet reads up to {FORMAT}: update pcnet")

    def close(self) -> None:
        self._connection.close()

    # --- metadata -------------------------------------------------------------------------------------------------
    def metadata(self, key: str) -> str | None:
        row = self._connection.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_metadata(self, key: str, value: str) -> None:
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, value))

    # --- planning -------------------------------------------------------------------------------------------------
    def digests(self) -> dict[tuple[str, int], str]:
        """Digests of the models in the study by settings and replicate."""
        rows = self._connection.execute("SELECT settings, replicate, model FROM inversions")
        return {(settings, replicate): model for settings, replicate, model in rows}

    def digests_by_id(self) -> dict[int, str]:
        return dict(self._connection.execute("SELECT id, model FROM inversions"))

    def plan(self, batches: Iterable[Sequence[Planned]]) -> None:
        """Add batches of inversions. They stay in their batch, on which digits depend."""
        with self._transaction():
            number = self._one("SELECT coalesce(max(batch), -1) FROM inversions") + 1
            for offset, batch in enumerate(batches):
                self._connection.executemany(
                    "INSERT INTO inversions (settings, replicate, model, data, batch) VALUES (?, ?, ?, ?, ?)",
                    [(*planned, number + offset) for planned in batch],
                )

    def open_batches(self) -> dict[int, list[tuple[int, str, int]]]:
        """Unfinished inversions (id, settings, replicate) by batch."""
        rows = self._connection.execute(
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
            self._connection.executemany(f"UPDATE inversions SET {assignments} WHERE id = ?", rows)

    # --- reading ----------------------------------------------------------------------------------------------------
    def counts(self) -> dict[str, int]:
        """Numbers of open, done and diverged inversions."""
        counts = dict(self._connection.execute("SELECT status, count(*) FROM inversions GROUP BY status"))
        return {status: int(counts.get(status, 0)) for status in ("open", "done", "diverged")}

    def rows(self) -> Iterator[dict[str, Any]]:
        """All inversions, finished or not, with the fields of COLUMNS."""
        with closing(self._connection.execute(f"SELECT {', '.join(COLUMNS)} FROM inversions ORDER BY id")) as cursor:
            for values in cursor:
                row = dict(zip(COLUMNS, values, strict=True))
                yield row | {name: json.loads(row[name]) if row[name] else {} for name in NESTED}

    def _one(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    @contextmanager
    def _transaction(self, writing: bool = True) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE" if writing else "BEGIN")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def to_json(value: Any) -> str:
    """Canonical JSON: equal values give equal text; numbers that are not finite become null."""
    return json.dumps(_plain(value), sort_keys=True, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
