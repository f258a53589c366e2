"""Answers of services and texts of pages on disk: one sqlite file, JSON inside, kept for good."""

import json
import logging
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from search_r1.search.errors import SetupError
from search_r1.search.retrievers.online.service import Found

logger = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    scope TEXT, query TEXT, k INTEGER, found TEXT, PRIMARY KEY (scope, query, k)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pages (
    scope TEXT, url TEXT, content TEXT, PRIMARY KEY (scope, url)
) WITHOUT ROWID;
"""
PATIENCE_S = 10.0


class AnswerCache:
    """Safe for several threads and for several processes on one file.

    A disk that fails while serving costs the cache, not the answer: it is logged and passed over.
    """

    def __init__(self, path: str | Path) -> None:
        """Open or create the file; raises SetupError if it is not sqlite's or not writable."""
        self._lock = threading.Lock()
        try:
            self._base = sqlite3.connect(path, timeout=PATIENCE_S, check_same_thread=False)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise SetupError(
                f"--online_cache {path} cannot be used ({error}); expected a sqlite file, or a new "
                "name in a folder that exists and may be written"
            ) from error

    def answer(self, scope: str, query: str, k: int) -> list[Found] | None:
        """The results kept for a query at `k`; None if there are none."""
        where = "SELECT found FROM answers WHERE scope = ? AND query = ? AND k = ?"
        text = self._one(where, (scope, query, k))
        return None if text is None else [Found(*fields) for fields in json.loads(text)]

    def keep_answer(self, scope: str, query: str, k: int, found: Sequence[Found]) -> None:
        """Keep the results of a query at `k`."""
        text = json.dumps([astuple(result) for result in found])
        self._put("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", (scope, query, k, text))

    def page(self, scope: str, url: str) -> str | None:
        """The text kept for a page; None if there is none."""
        return self._one("SELECT content FROM pages WHERE scope = ? AND url = ?", (scope, url))

    def keep_page(self, scope: str, url: str, content: str) -> None:
        """Keep the text of a page."""
        self._put("INSERT OR REPLACE INTO pages VALUES (?, ?, ?)", (scope, url, content))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._base.close()

    def _one(self, query: str, values: tuple[str | int, ...]) -> str | None:
        try:
            with self._lock:
                row = self._base.execute(query, values).fetchone()
        except sqlite3.Error as error:
            logger.warning("the cache cannot be read: %s", error)
            return None
        return None if row is None else str(row[0])

    def _put(self, statement: str, values: tuple[str | int, ...]) -> None:
        try:
            with self._lock, self._base:
                self._base.execute(statement, values)
        except sqlite3.Error as error:
            logger.warning("the cache cannot be written: %s", error)
