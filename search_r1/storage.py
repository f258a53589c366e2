"""Key-value stores of the caches: a sqlite file that processes may share, or the last in memory.

Keys are tuples of text and numbers, values whatever JSON holds; numbers read back bit for bit. A
cache is never needed: a file that fails while it is in use is logged and passed over.
"""

import contextlib
import json
import logging
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cachetools import LRUCache

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x53523143
"""Marks a sqlite file as ours, so that no other program's file is written into."""
VERSION = 2
MAGIC = b"SQLite format 3\0"
BUSY_S = 10.0
LOOK_UP = 500
"""Keys per SELECT; sqlite bounds the number of parameters."""
TABLE = "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID"

Key = tuple[str | int, ...]


class StorageError(ValueError):
    """A file that cannot be a store."""


class MemoryStore:
    """The `most` values that were used last; safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self._values: LRUCache[Key, Any] = LRUCache(most)
        self._lock = threading.Lock()

    def get(self, keys: Sequence[Key]) -> dict[Key, Any]:
        """The values that are here, which become the most recent."""
        with self._lock:
            return {key: self._values[key] for key in keys if key in self._values}

    def put(self, values: Mapping[Key, Any]) -> None:
        """Keep values, and drop those unused for longest."""
        with self._lock:
            self._values.update(values)

    def close(self) -> None:
        """Nothing to let go of."""


class FileStore:
    """A sqlite file, kept for good; several threads and processes may use it at once."""

    def __init__(self, path: str | Path, option: str) -> None:
        """Create or open the file; raises StorageError, which names the `option` it came from.

        Another program's file, or a damaged one, is left as it is.
        """
        self._path = path
        self._lock = threading.Lock()
        self._has_failed = False
        try:
            _check_head(Path(path))
            with contextlib.ExitStack() as stack:
                self._file = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
                stack.callback(self._file.close)
                _prepare(self._file)
                stack.pop_all()
        except (sqlite3.Error, OSError) as error:
            raise StorageError(
                f"{option} {path} cannot be used ({error}); expected a new path in a folder that "
                "exists and may be written, or a file that this option made: delete it if it is "
                "damaged or of an earlier release"
            ) from error

    def get(self, keys: Sequence[Key]) -> dict[Key, Any]:
        """The values that are here, by key."""
        by_text = {json.dumps(key): key for key in keys}
        texts, rows = list(by_text), []
        try:
            for start in range(0, len(texts), LOOK_UP):
                part = texts[start : start + LOOK_UP]
                marks = ",".join("?" * len(part))
                select = f"SELECT key, value FROM entries WHERE key IN ({marks})"
                with self._lock:
                    rows += self._file.execute(select, part).fetchall()
            return {by_text[key]: json.loads(value) for key, value in rows}
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._pass_over(error)
            return {}

    def put(self, values: Mapping[Key, Any]) -> None:
        """Keep values; what is here already stays."""
        rows = [(json.dumps(key), json.dumps(value)) for key, value in values.items()]
        try:
            with self._lock, self._file:
                self._file.executemany("INSERT OR IGNORE INTO entries VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            self._pass_over(error)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _pass_over(self, error: Exception) -> None:
        """Say it once: a full disk would fill the log as well."""
        level = logging.DEBUG if self._has_failed else logging.WARNING
        self._has_failed = True
        logger.log(level, "%s is not used for now: %s", self._path, error)


Storage = MemoryStore | FileStore


def _check_head(path: Path) -> None:
    """sqlite takes a file of less than a page for an empty one, and would write over it."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) not in (b"", MAGIC):
                raise sqlite3.DatabaseError("it is no sqlite file")


def _prepare(file: sqlite3.Connection) -> None:
    """The table in a file that is ours or empty; raises sqlite3.Error for any other."""
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
