"""An SQLite index of one run's trajectories: the columns to search by, and each line's position.

The lines stay in the files that the run wrote. A file is read again when it has changed, so the
index follows a run that is still writing; incomplete last lines are left for the next read.
"""

import contextlib
import math
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import Query

from search_r1.rewards.normalize import Normalize, normalize_answer
from search_r1.runs.dialogue import Dialogue, read_dialogue
from verl.agent.grammar import Grammar
from verl.errors import ConfigError, explain

TRAIN, VALIDATION = "train", "val"
STEP = re.compile(r"step_(\d+)\.jsonl")
INVALIDATE_EVERY_S = 2.0
"""Seconds after which cached query results are dropped while many files are read."""
MAX_CACHED = 64
"""Cached query results; each takes at most a few bytes per trajectory."""
# by_words and by_score also contain the columns filtered in their order, so that queries need not
# read the wide rows.
LAYOUT = """
CREATE TABLE IF NOT EXISTS files (
    kind TEXT, step INTEGER, path TEXT, state TEXT, num_bad INTEGER, PRIMARY KEY (kind, step));
CREATE TABLE IF NOT EXISTS trajectories (
    id INTEGER PRIMARY KEY, kind TEXT, step INTEGER, line INTEGER,
    uid TEXT, source TEXT, "group" TEXT, sample INTEGER, status TEXT, score REAL,
    searches INTEGER, turns INTEGER, tokens INTEGER, log_prob REAL, question TEXT, answer TEXT,
    gold TEXT, queries TEXT, words TEXT, is_found INTEGER, is_given INTEGER,
    start INTEGER, length INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS by_place ON trajectories (step, kind, line);
CREATE INDEX IF NOT EXISTS by_uid ON trajectories (uid, step);
CREATE INDEX IF NOT EXISTS by_newest ON trajectories (step DESC, kind, line);
CREATE INDEX IF NOT EXISTS by_words ON trajectories (step DESC, kind, line, words);
CREATE INDEX IF NOT EXISTS by_score ON trajectories (score, step DESC, searches);
CREATE INDEX IF NOT EXISTS by_searches ON trajectories (searches DESC, step DESC);
CREATE INDEX IF NOT EXISTS by_log_prob ON trajectories (log_prob IS NULL, log_prob, step DESC);
CREATE INDEX IF NOT EXISTS by_status ON trajectories (kind, status, source);
CREATE INDEX IF NOT EXISTS by_outcome ON trajectories (is_found, is_given, step DESC, kind, line);
"""
INSERT = """INSERT INTO trajectories VALUES (NULL, :kind, :step, :line, :uid, :source, :group,
    :sample, :status, :score, :searches, :turns, :tokens, :log_prob, :question, :answer, :gold,
    :queries, :words, :is_found, :is_given, :start, :length)"""


class TrajectoryIndex:
    """Index of one run's trajectories; safe to read from several threads."""

    def __init__(
        self,
        file: Path,
        folders: dict[str, Path],
        tags: Grammar,
        normalize: Normalize = normalize_answer,
    ) -> None:
        """Open or create the index in `file`. Raises ConfigError if that is not possible.

        `folders` maps each kind to its folder. Answers are compared by the rule `normalize`.
        """
        self.folders = folders
        self._tags, self._normalize = tags, normalize
        self._file = file
        self._threads = threading.local()
        self.num_pending = 0
        """Files not read yet."""
        self._cache: dict[tuple[Any, ...], list[Any]] = {}
        self._generation = 0
        """Incremented with each change of the index; part of the cache's keys."""
        self._last_states: dict[tuple[str, int], str] = {}
        """File states at the last refresh; another viewer may have updated the index since."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.db.executescript(LAYOUT)
        except (OSError, sqlite3.Error) as error:
            got, fix = f"{file.parent}: {error}", "name another with --index-dir"
            raise ConfigError(explain("--index-dir", got, "a writable folder", fix)) from error

    @property
    def db(self) -> sqlite3.Connection:
        if not hasattr(self._threads, "db"):
            db = sqlite3.connect(self._file, timeout=60, isolation_level=None)
            db.row_factory = sqlite3.Row
            db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;"
                             "PRAGMA cache_size=-65536; PRAGMA mmap_size=1073741824;")  # fmt: skip
            self._threads.db = db
        return self._threads.db  # type: ignore[no-any-return]

    def refresh(self, ended: threading.Event | None = None) -> bool:
        """Read new and changed files, drop deleted ones, and return whether anything changed.

        Stops early when `ended` is set.
        """
        files = dict(self._files())
        known = self._states()
        changed = [key for key, (_, state) in files.items() if known.get(key) != state]
        deleted = known.keys() - files.keys()
        self.num_pending = len(changed)
        invalidated = time.monotonic()
        for key in (*deleted, *sorted(changed, key=lambda kind_and_step: kind_and_step[1])):
            if ended is not None and ended.is_set():
                break
            self._replace(*key, *files.get(key, (None, "")))
            self.num_pending -= key in files
            if time.monotonic() - invalidated > INVALIDATE_EVERY_S:
                self._generation += 1
                invalidated = time.monotonic()
        is_changed = bool(changed or deleted or known != self._last_states)
        if is_changed:
            self._last_states = self._states()
            self._generation += 1
        return is_changed

    def _states(self) -> dict[tuple[str, int], str]:
        """Return the state in which each indexed file was read."""
        rows = self.db.execute("SELECT kind, step, state FROM files")
        return {(kind, step): state for kind, step, state in rows}

    def read(
        self, kind: str, step: int, line: int
    ) -> tuple[dict[str, Any], dict[str, Any], Dialogue] | None:
        """Return a trajectory's indexed facts, row and dialogue; None if it is gone."""
        indexed = self.db.execute(
            "SELECT t.*, f.path FROM trajectories t JOIN files f USING (kind, step) "
            "WHERE step = ? AND kind = ? AND line = ?", (step, kind, line)).fetchone()  # fmt: skip
        if indexed is None:
            return None
        facts = dict(indexed)
        path, start, length = Path(facts.pop("path")), facts.pop("start"), facts.pop("length")
        try:
            with path.open("rb") as file:
                file.seek(start)
                row = orjson.loads(file.read(length))
            return facts, row, read_dialogue(row, self._tags, self._normalize)
        except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return None

    def column(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """Return the first column of a query's result, cached until the index changes."""
        key = (self._generation, query, values)
        column = self._cache.get(key)  # another thread may clear the cache at any moment
        if column is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            column = self._cache[key] = [row[0] for row in self.db.execute(query, values)]
        return column

    def summary(self) -> dict[str, Any]:
        """Return the extent of the index and the values that a query can filter by."""
        names = ("count(*)", "min(step)", "max(step)", "max(searches)")
        numbers = [self.column(f"SELECT {name} FROM trajectories")[0] for name in names]
        choices = {
            name: self.column(f"SELECT DISTINCT {name} FROM trajectories ORDER BY 1")
            for name in ("kind", "status", "source")
        }
        return {
            **dict(zip(("count", "first", "last", "searches"), numbers, strict=True)),
            **choices,
            "bad": self.column("SELECT sum(num_bad) FROM files")[0] or 0,
            "pending": self.num_pending,
        }

    def _files(self) -> Iterator[tuple[tuple[str, int], tuple[Path, str]]]:
        for kind, folder in self.folders.items():
            if not folder.is_dir():
                continue
            matches = ((path, STEP.fullmatch(path.name)) for path in folder.iterdir())
            for step, path in {int(match[1]): path for path, match in matches if match}.items():
                with contextlib.suppress(FileNotFoundError):  # deleted since iterdir
                    stat = path.stat()
                    state = f"{path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"
                    yield (kind, step), (path, state)

    def _replace(self, kind: str, step: int, path: Path | None, state: str) -> None:
        """Replace the index rows of a file; without a path, delete them."""
        try:
            rows, num_bad = self._rows(kind, step, path) if path else ([], 0)
        except FileNotFoundError:
            return
        db = self.db
        db.execute("BEGIN IMMEDIATE")
        try:
            for table in ("trajectories", "files"):
                db.execute(f"DELETE FROM {table} WHERE step = ? AND kind = ?", (step, kind))
            db.executemany(INSERT, rows)
            if path:
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)",
                           (kind, step, str(path), state, num_bad))  # fmt: skip
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise

    def _rows(self, kind: str, step: int, path: Path) -> tuple[list[dict[str, Any]], int]:
        """Return the facts of each complete line, and the number of lines without a trajectory."""
        rows, start, num_bad = [], 0, 0
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True)):
            if line.endswith(b"\n"):
                facts = _facts(line, self._tags, self._normalize)
                num_bad += facts is None
                if facts is not None:
                    key = {"kind": kind, "step": step, "line": number}
                    rows.append(facts | key | {"start": start, "length": len(line)})
            start += len(line)
        return rows, num_bad


def _facts(line: bytes, tags: Grammar, normalize: Normalize) -> dict[str, Any] | None:
    """Return the indexed columns of a trajectory; None if the line contains none."""
    try:
        row = orjson.loads(line)
        dialogue = read_dialogue(row, tags, normalize)
        policy = [s for s in dialogue.segments if s["origin"] == "policy"]
        log_probs = [x for s in policy for x in s.get("log_probs", ()) if x is not None]
        queries = "\n".join(search.query for search in dialogue.searches)
        words = (dialogue.question, queries, dialogue.answer or "")
        return {
            "uid": str(row["uid"]),
            "source": str(row["data_source"]),
            "group": str(row.get("group", "")),
            "sample": int(row.get("sample", 0)),
            "status": str(row["status"]),
            "score": None if row["score"] is None else float(row["score"]),
            "searches": len(dialogue.searches),
            "turns": int(row["stats"].get("turns", len(policy))),
            "tokens": sum(len(s.get("ids", ())) for s in policy) or None,
            "log_prob": sum(log_probs) / len(log_probs) if log_probs else None,
            "question": dialogue.question,
            "answer": dialogue.answer,
            "gold": " | ".join(dialogue.gold),
            "queries": queries,
            "words": "\n".join(words).casefold(),
            "is_found": dialogue.is_found,
            "is_given": dialogue.is_given,
        }
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        return None


Order = Literal["newest", "oldest", "score_low", "score_high", "searches_most", "log_prob_low"]
ORDERS: dict[str, str] = {
    "newest": "step DESC, kind, line",
    "oldest": "step, kind, line",
    "score_low": "score, step DESC",
    "score_high": "score DESC, step DESC",
    "searches_most": "searches DESC, step DESC",
    "log_prob_low": "log_prob IS NULL, log_prob, step DESC",
}
ROW_COLUMNS = (
    'kind, step, line, uid, source, "group", sample, status, score, searches, turns, tokens, '
    "log_prob, question, answer, gold, queries, is_found, is_given"
)
MAX_INT = 2**31
NonNegative = Annotated[int, Query(ge=0, le=MAX_INT)]
Bound = Annotated[int | None, Query(ge=0, le=MAX_INT)]
OUTCOMES = {
    "given": "is_given = 1",
    "missed": "is_found = 1 AND is_given = 0",
    "no_search": "is_found = 0 AND is_given = 0 AND searches = 0",
    "one_search": "is_found = 0 AND is_given = 0 AND searches = 1",
    "not_found": "is_found = 0 AND is_given = 0 AND searches > 1",
    "known": "is_found = 0 AND is_given = 1",
}
"""missed: the documents contained the answer, but it was not given; known: given though not in any
document."""


@dataclass(frozen=True)
class TrajectoryQuery:
    """Filters, order and page of a list of trajectories; None or "" does not filter."""

    words: Annotated[str, Query(max_length=500)] = ""
    """Words that all occur in the question, the queries or the answer."""
    kind: str = ""
    status: str = ""
    source: str = ""
    group: str = ""
    uid: str = ""
    outcome: Literal["", "given", "missed", "no_search", "one_search", "not_found", "known"] = ""
    step_from: Bound = None
    step_to: Bound = None
    score_from: float | None = None
    score_to: float | None = None
    searches_from: Bound = None
    searches_to: Bound = None
    order: Order = "newest"
    page: Annotated[int, Query(ge=1, le=MAX_INT)] = 1
    size: Annotated[int, Query(ge=1, le=200)] = 50

    def condition(self) -> tuple[str, list[Any]]:
        """Return the WHERE clause and its values."""
        parts, values = [], []
        for field in fields(self):
            value = getattr(self, field.name)
            name, _, end = field.name.partition("_")
            if end in ("from", "to") and value is not None:
                parts.append(f"{name} {'>=' if end == 'from' else '<='} ?")
                values.append(value)
        for name in ("kind", "status", "source", "group", "uid"):
            if getattr(self, name):
                parts.append(f'"{name}" = ?')
                values.append(getattr(self, name))
        for word in self.words.split():
            parts.append("instr(words, ?)")
            values.append(word.casefold())
        if self.outcome:
            parts.append(OUTCOMES[self.outcome])
        return " AND ".join(parts) or "1", values


def find_trajectories(index: TrajectoryIndex, query: TrajectoryQuery) -> dict[str, Any]:
    """Return one page of the matching trajectories, and the number of all matches."""
    where, values = query.condition()
    order = ORDERS[query.order]
    # All ids are read in one pass, which also gives the count, and in one row, since each row would
    # wait for the interpreter lock again while another thread reads files.
    # By itself SQLite chooses the narrower by_newest and then reads every row for its words.
    by = "INDEXED BY by_words" if query.words.split() and query.order == "newest" else ""
    inner = f"SELECT id FROM trajectories {by} WHERE {where} ORDER BY {order} LIMIT -1"
    [joined] = index.column(f"SELECT group_concat(id) FROM ({inner})", tuple(values))
    ids = joined.split(",") if joined else []
    pages = max(1, math.ceil(len(ids) / query.size))
    page = min(query.page, pages)
    on_page = ids[(page - 1) * query.size : page * query.size]
    rows = index.db.execute(
        f"SELECT {ROW_COLUMNS} FROM trajectories WHERE id IN ({', '.join('?' * len(on_page))}) "
        f"ORDER BY {order}", on_page)  # fmt: skip
    return {"count": len(ids), "page": page, "pages": pages, "rows": [dict(row) for row in rows]}


def question_history(
    index: TrajectoryIndex, uid: str, kind: str, limit: int
) -> list[dict[str, Any]]:
    """Return one question's trajectories in the order of the steps, at most `limit` of them."""
    where = "uid = ? AND (? = '' OR kind = ?)"
    rows = index.db.execute(
        f"SELECT {ROW_COLUMNS} FROM trajectories WHERE {where} ORDER BY step, kind DESC, line",
        (uid, kind, kind)).fetchall()  # fmt: skip
    if len(rows) > limit:
        chosen = {round(i * (len(rows) - 1) / max(1, limit - 1)) for i in range(limit)}
        rows = [rows[i] for i in sorted(chosen)]
    return [dict(row) for row in rows]
