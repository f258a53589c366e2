"""Answers of services and texts of pages: the last ones in memory, or all of them on disk.

On disk they are one sqlite file with JSON inside, kept for good.
"""

import json
import logging
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from search_r1.online.service import Found
from search_r1.search.errors import SetupError

T = TypeVar("T")

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
NUM_RECENT_ANSWERS = 4096
NUM_RECENT_PAGES = 512


class Cache(Protocol):
    """What keeps answers and pages; None is a miss. Safe to use from several threads."""

    def answer(self, scope: str, query: str, k: int) -> list[Found] | None:
        """The results kept for a query at `k`."""
        ...

    def keep_answer(self, scope: str, query: str, k: int, found: Sequence[Found]) -> None:
        """Keep the results of a query at `k`."""
        ...

    def page(self, scope: str, url: str) -> str | None:
        """The text kept for a page."""
        ...

    def keep_page(self, scope: str, url: str, content: str) -> None:
        """Keep the text of a page."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


class _Recent(Generic[T]):
    """The values that were used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[tuple[str, ...], T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, *key: str) -> T | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, value: T, *key: str) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._most:
                self._values.popitem(last=False)


class RecentAnswers:
    """The last answers and pages, so that a batch that failed in part is not paid for twice."""

    def __init__(self) -> None:
        self._answers: _Recent[list[Found]] = _Recent(NUM_RECENT_ANSWERS)
        self._pages: _Recent[str] = _Recent(NUM_RECENT_PAGES)

    def answer(self, scope: str, query: str, k: int) -> list[Found] | None:
        """The results kept for a query at `k`."""
        return self._answers.get(scope, query, str(k))

    def keep_answer(self, scope: str, query: str, k: int, found: Sequence[Found]) -> None:
        """Keep the results of a query at `k`."""
        self._answers.put(list(found), scope, query, str(k))

    def page(self, scope: str, url: str) -> str | None:
        """The text kept for a page."""
        return self._pages.get(scope, url)

    def keep_page(self, scope: str, url: str, content: str) -> None:
        """Keep the text of a page."""
        self._pages.put(content, scope, url)

    def close(self) -> None:
        """Nothing to let go of."""


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
