"""The store of caches and records: keys and values in a sqlite file that processes may share.

Keys are tuples of strings and integers, values anything that JSON can hold; numbers are read back
exactly. If the file fails while in use, this is logged and the store behaves as if it were empty.
"""

import contextlib
import json
import logging
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.errors import ConfigError

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x53523143
"""sqlite application id of our files, so that no other program's file is overwritten."""
VERSION = 2
MAGIC = b"SQLite format 3\0"
BUSY_S = 10.0
"""Seconds to wait for a lock of another process."""
KEYS_PER_SELECT = 500
"""sqlite limits the number of parameters of a statement."""
TABLE = "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID"

Key = tuple[str | int, ...]


class StorageError(ConfigError, ValueError):
    """A file that cannot be used as a store."""


class FileStore:
    """Persistent store in a sqlite file; several threads and processes may use it at once."""

    def __init__(self, path: str | Path, option: str) -> None:
        """Create or open the file, which the flag `option` names.

        Raises StorageError; a damaged file, or one of another program, stays unchanged.
        """
        self._path = path
        self._lock = threading.Lock()
        self._has_failed = False
        try:
            _check_header(Path(path))
            with contextlib.ExitStack() as stack:
                self._file = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
                stack.callback(self._file.close)
                _create_table(self._file)
                stack.pop_all()
        except (sqlite3.Error, OSError) as error:
            raise StorageError(
                f"{option} {path} cannot be used ({error}); expected a new path in a folder that "
                "exists and may be written, or a file that this option created: delete it if it "
                "is damaged or from an earlier release"
            ) from error

    def get(self, keys: Sequence[Key]) -> dict[Key, Any]:
        """Return the values of those keys that are present."""
        by_text = {json.dumps(key): key for key in keys}
        texts, rows = list(by_text), []
        try:
            for start in range(0, len(texts), KEYS_PER_SELECT):
                chunk = texts[start : start + KEYS_PER_SELECT]
                placeholders = ",".join("?" * len(chunk))
                select = f"SELECT key, value FROM entries WHERE key IN ({placeholders})"
                with self._lock:
                    rows += self._file.execute(select, chunk).fetchall()
            return {by_text[key]: json.loads(value) for key, value in rows}
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._log_failure(error)
            return {}

    def list_keys(self) -> list[Key]:
        """Return all keys, sorted by their text."""
        try:
            with self._lock:
                rows = self._file.execute("SELECT key FROM entries ORDER BY key").fetchall()
            return [tuple(json.loads(text)) for (text,) in rows]
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._log_failure(error)
            return []

    def put(self, values: Mapping[Key, Any]) -> None:
        """Add values; keys that are already present keep their values."""
        rows = [(json.dumps(key), json.dumps(value)) for key, value in values.items()]
        try:
            with self._lock, self._file:
                self._file.executemany("INSERT OR IGNORE INTO entries VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            self._log_failure(error)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _log_failure(self, error: Exception) -> None:
        # Warn only once: a full disk may fail at every access, and hold the log as well.
        level = logging.DEBUG if self._has_failed else logging.WARNING
        self._has_failed = True
        logger.log(level, "continuing without the cache file %s: %s", self._path, error)


def _check_header(path: Path) -> None:
    """Refuse a short file of another format, which sqlite would treat as empty and overwrite."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) not in (b"", MAGIC):
                raise sqlite3.DatabaseError("it is not a sqlite file")


def _create_table(file: sqlite3.Connection) -> None:
    """Create the table unless it exists; raises sqlite3.Error for any other non-empty file."""
    num_tables = file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    application_id = file.execute("PRAGMA application_id").fetchone()[0]
    version = file.execute("PRAGMA user_version").fetchone()[0]
    if num_tables and (application_id, version) != (APPLICATION_ID, VERSION):
        raise sqlite3.DatabaseError("it belongs to another program or release")
    file.execute("PRAGMA journal_mode = WAL")
    file.execute("PRAGMA synchronous = NORMAL")
    with file:
        file.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        file.execute(f"PRAGMA user_version = {VERSION}")
        file.execute(TABLE)
    check_result = file.execute("PRAGMA quick_check(1)").fetchone()[0]
    if check_result != "ok":
        raise sqlite3.DatabaseError(check_result)
