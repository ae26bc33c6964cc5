"""The file of a study: one SQLite database in which every finished batch of inversions is safe."""

from __future__ import annotations

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

APPLICATION = 0x70636E74
"""Marks a SQLite file as one of ours ("pcnt")."""
FORMAT = 1

TABLES = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE inversions (
    id INTEGER PRIMARY KEY,
    settings TEXT NOT NULL,       -- JSON
    replicate INTEGER NOT NULL,
    model TEXT NOT NULL,          -- a fingerprint of what was built from the settings
    data TEXT NOT NULL,           -- JSON: what became of the observations
    batch INTEGER NOT NULL,       -- inversions of one batch are finished together
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
    """An inversion that is to be in the study."""

    settings: str
    replicate: int
    model: str
    data: str


class Row(NamedTuple):
    """An inversion in the study, finished or not."""

    id: int
    settings: dict[str, Any]
    replicate: int
    data: str
    status: str
    free_action: float | None
    accuracy: float | None
    complexity: float | None
    diverged_at: int | None
    diverged_node: str | None
    scores: dict[str, dict[str, float]]
    beliefs: dict[str, dict[str, Any]]
    fallbacks: dict[str, int]
    seconds: float | None
    version: str | None


class Store:
    """Reads and writes a study's file; each change is whole or not at all."""

    def __init__(self, path: Path | None, create: bool) -> None:
        self.path = path
        where = ":memory:" if path is None else str(path)
        if path is not None and not create and not path.exists():
            raise StudyError(f"there is no study {where!r}")
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
        form = self._one("PRAGMA user_version")
        if form > FORMAT:
            raise StudyError(f"{where!r} has format {form}; this pcnet reads up to {FORMAT}")

    def close(self) -> None:
        self._connection.close()

    # --- about the study as a whole -------------------------------------------------------------------------------
    def about(self, key: str) -> str | None:
        found = self._connection.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def note(self, key: str, value: str) -> None:
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, value))

    # --- planning ---------------------------------------------------------------------------------------------------
    def known(self) -> dict[tuple[str, int], str]:
        """The fingerprints of the models in the study, by settings and replicate."""
        rows = self._connection.execute("SELECT settings, replicate, model FROM inversions")
        return {(settings, replicate): model for settings, replicate, model in rows}

    def models(self) -> dict[int, str]:
        """The same by the numbers of the inversions."""
        return dict(self._connection.execute("SELECT id, model FROM inversions"))

    def plan(self, batches: Iterable[Sequence[Planned]]) -> None:
        """Add inversions, batch by batch. They stay in that batch however often the study is interrupted.

        So what is computed together is the same in the end, and with it every digit.
        """
        with self._transaction():
            number = self._one("SELECT coalesce(max(batch), -1) FROM inversions") + 1
            for offset, batch in enumerate(batches):
                self._connection.executemany(
                    "INSERT INTO inversions (settings, replicate, model, data, batch) VALUES (?, ?, ?, ?, ?)",
                    [(*planned, number + offset) for planned in batch],
                )

    def open_batches(self) -> dict[int, list[tuple[int, str, int]]]:
        """What is still to be done: (id, settings, replicate) by batch."""
        rows = self._connection.execute(
            "SELECT batch, id, settings, replicate FROM inversions WHERE batch IN "
            "(SELECT batch FROM inversions WHERE status = 'open') ORDER BY batch, id"
        )
        batches: dict[int, list[tuple[int, str, int]]] = {}
        for batch, *rest in rows:
            batches.setdefault(batch, []).append(tuple(rest))
        return batches

    def finish(self, ids: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Keep the outcomes of a batch, all of them or none."""
        now, version = datetime.now(UTC).isoformat(timespec="seconds"), package_version()
        with self._transaction():
            self._connection.executemany(
                "UPDATE inversions SET status = ?, free_action = ?, accuracy = ?, complexity = ?, diverged_at = ?, "
                "diverged_node = ?, scores = ?, beliefs = ?, fallbacks = ?, seconds = ?, version = ?, finished = ? "
                "WHERE id = ?",
                [
                    (
                        "done" if outcome.diverged_at is None else "diverged",
                        *(_finite(x) for x in (outcome.free_action, outcome.accuracy, outcome.complexity)),
                        outcome.diverged_at,
                        outcome.diverged_node,
                        to_json(outcome.scores),
                        to_json(outcome.beliefs),
                        to_json(outcome.fallbacks),
                        outcome.seconds,
                        version,
                        now,
                        row,
                    )
                    for row, outcome in zip(ids, outcomes, strict=True)
                ],
            )

    # --- reading ----------------------------------------------------------------------------------------------------
    def counts(self) -> dict[str, int]:
        """How many inversions are open, done and diverged."""
        found = dict(self._connection.execute("SELECT status, count(*) FROM inversions GROUP BY status"))
        return {status: int(found.get(status, 0)) for status in ("open", "done", "diverged")}

    def rows(self) -> Iterator[Row]:
        fields = ", ".join(Row._fields)
        with closing(self._connection.execute(f"SELECT {fields} FROM inversions ORDER BY id")) as found:
            for values in found:
                row = dict(zip(Row._fields, values, strict=True))
                for name in ("settings", "scores", "beliefs", "fallbacks"):
                    row[name] = json.loads(row[name]) if row[name] else {}
                yield Row(**row)

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
    """Text that says the same whenever the value is the same; what is not finite becomes null."""
    return json.dumps(_plain(value), sort_keys=True, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
