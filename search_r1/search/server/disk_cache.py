"""Results that outlive the server, in a sqlite file that several servers may share.

Rows are keyed by the engine's fingerprint and name, the query and k; hits are JSON, whose numbers
read back bit for bit. A file that fails later only stops being used: a cache is never needed.
"""

import json
import logging
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from search_r1.search.errors import SetupError
from search_r1.search.schema import Document, Hit

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x53523143
VERSION = 1
BUSY_S = 5.0
LOOK_UP = 500
"""Queries per SELECT; sqlite bounds the number of parameters."""
TABLE = """CREATE TABLE IF NOT EXISTS results (fingerprint TEXT, engine TEXT, query BLOB, k INTEGER,
hits TEXT NOT NULL, PRIMARY KEY (fingerprint, engine, query, k)) WITHOUT ROWID"""


class DiskCache:
    """The results of one engine in a sqlite file; safe to use from several threads."""

    def __init__(self, path: str | Path, fingerprint: str, engine: str) -> None:
        """Create or open the file; raises SetupError if it cannot serve as a cache."""
        self._path = Path(path)
        self._engine = (fingerprint, engine)
        self._lock = threading.Lock()
        self._has_failed = False
        try:
            self._file = _open(self._path)
        except sqlite3.Error as error:
            raise SetupError(
                f"--cache_path {path} cannot be used ({error}); expected a new path in a writable "
                "folder, or a file that this server made: delete it if it is damaged"
            ) from error

    def get(self, queries: Sequence[str], k: int) -> dict[str, list[Hit]]:
        """The results that are here, by query."""
        found: dict[str, list[Hit]] = {}
        try:
            for start in range(0, len(queries), LOOK_UP):
                found |= self._select(queries[start : start + LOOK_UP], k)
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._fail(error)
        return found

    def put(self, results: Mapping[str, Sequence[Hit]], k: int) -> None:
        """Keep results; what is here already stays."""
        rows = [(*self._engine, q.encode(), k, _write(hits)) for q, hits in results.items()]
        try:
            with self._lock, self._file:
                self._file.executemany("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            self._fail(error)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _select(self, queries: Sequence[str], k: int) -> dict[str, list[Hit]]:
        marks = ",".join("?" * len(queries))
        select = (
            "SELECT query, hits FROM results WHERE fingerprint = ? AND engine = ? AND k = ? "
            f"AND query IN ({marks})"
        )
        values = (*self._engine, k, *(query.encode() for query in queries))
        with self._lock:
            rows = self._file.execute(select, values).fetchall()
        return {query.decode(): _read(hits) for query, hits in rows}

    def _fail(self, error: Exception) -> None:
        level = logging.DEBUG if self._has_failed else logging.WARNING
        self._has_failed = True
        logger.log(level, "%s is not used for now: %s", self._path, error)


def _open(path: Path) -> sqlite3.Connection:
    """The file with its table; raises sqlite3.Error for another program's file."""
    file = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        _prepare(file)
    except sqlite3.Error:
        file.close()
        raise
    return file


def _prepare(file: sqlite3.Connection) -> None:
    tables = file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    mark = file.execute("PRAGMA application_id").fetchone()[0]
    version = file.execute("PRAGMA user_version").fetchone()[0]
    if tables and (mark, version) != (APPLICATION_ID, VERSION):
        raise sqlite3.DatabaseError("it belongs to another program or release")
    file.execute("PRAGMA journal_mode = WAL")
    file.execute("PRAGMA synchronous = NORMAL")
    with file:
        file.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        file.execute(f"PRAGMA user_version = {VERSION}")
        file.execute(TABLE)
    damage = file.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise sqlite3.DatabaseError(damage)


def _write(hits: Sequence[Hit]) -> str:
    return json.dumps([[*astuple(hit.document), hit.score] for hit in hits])


def _read(text: str) -> list[Hit]:
    return [Hit(Document(*fields), score) for *fields, score in json.loads(text)]
