"""Every trajectory of one run in an index on disk: what it is found by, and where its line is.

The lines stay in the files that the run wrote. A file is read again when it has changed, so the
index follows a run that is still writing; what is not a whole line yet waits.
"""

import contextlib
import math
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import Query

from search_r1.view.dialogue import Dialogue, read_dialogue
from verl.agent.grammar import Grammar
from verl.errors import ConfigError, explain

TRAIN, VALIDATION = "train", "val"
STEP = re.compile(r"step_(\d+)\.jsonl")
TELL_S = 2.0
"""While many files are read, what is kept is looked up anew this often."""
MOST_KEPT = 64
"""Answers in memory, of at most a few bytes a trajectory each."""
# by_words and by_score also hold what is filtered in their order, so that no wide row is read.
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
    """The trajectories of one run; safe to read from several threads."""

    def __init__(
        self,
        file: Path,
        folders: dict[str, Path],
        tags: Grammar,
        only: Callable[[Collection[int]], Collection[int]] = lambda steps: steps,
    ) -> None:
        """`folders`: of each kind, of which `only` some steps are read. Raises ConfigError."""
        self.folders, self._tags, self._file, self._only = folders, tags, file, only
        self._threads = threading.local()
        self.num_pending = 0
        """Files that are not read yet."""
        self._kept: dict[tuple[Any, ...], list[Any]] = {}
        self._generation = 0
        """Grows with changes; what is kept belongs to one."""
        self._left: dict[tuple[str, int], str] = {}
        """The files' states as they were known last; another viewer may have gone on since."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self.db.executescript(LAYOUT)
        except (OSError, sqlite3.Error) as error:
            expected = "a folder that can be written"
            fix = "name another with --index-dir"
            raise ConfigError(
                explain("--index-dir", f"{file.parent}: {error}", expected, fix)
            ) from error

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
        """Read files that are new or changed, forget those gone, until `ended`; whether any."""
        found = dict(self._files())
        known = self._states()
        changed = [key for key, (_, state) in found.items() if known.get(key) != state]
        gone = known.keys() - found.keys()
        self.num_pending, told = len(changed), time.monotonic()
        for key in (*gone, *sorted(changed, key=lambda one: one[1])):
            if ended is not None and ended.is_set():
                break
            self._replace(*key, *found.get(key, (None, "")))
            self.num_pending -= key in found
            if time.monotonic() - told > TELL_S:
                self._generation, told = self._generation + 1, time.monotonic()
        is_changed = bool(changed or gone or known != self._left)
        if is_changed:
            self._left = self._states()
            self._generation += 1
        return is_changed

    def _states(self) -> dict[tuple[str, int], str]:
        """Each file that is in the index, as it was when it was read."""
        rows = self.db.execute("SELECT kind, step, state FROM files")
        return {(kind, step): state for kind, step, state in rows}

    def read(
        self, kind: str, step: int, line: int
    ) -> tuple[dict[str, Any], Path, dict[str, Any], Dialogue] | None:
        """A trajectory's facts, file, row and dialogue; None where it is not there any more."""
        found = self.db.execute(
            "SELECT t.*, f.path FROM trajectories t JOIN files f USING (kind, step) "
            "WHERE step = ? AND kind = ? AND line = ?", (step, kind, line)).fetchone()  # fmt: skip
        if found is None:
            return None
        facts = dict(found)
        path, start, length = Path(facts.pop("path")), facts.pop("start"), facts.pop("length")
        try:
            with path.open("rb") as file:
                file.seek(start)
                row = orjson.loads(file.read(length))
            return facts, path, row, read_dialogue(row, self._tags)
        except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return None

    def kept(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The first column of a query's rows, kept until the index changes."""
        key = (self._generation, query, values)
        found = self._kept.get(key)  # another thread may clear what is kept at any moment
        if found is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = [row[0] for row in self.db.execute(query, values)]
        return found

    def report(self) -> dict[str, Any]:
        """What there is to choose from."""
        names = ("count(*)", "min(step)", "max(step)", "max(searches)")
        numbers = [self.kept(f"SELECT {name} FROM trajectories")[0] for name in names]
        choices = {
            name: self.kept(f"SELECT DISTINCT {name} FROM trajectories ORDER BY 1")
            for name in ("kind", "status", "source")
        }
        return {
            **dict(zip(("count", "first", "last", "searches"), numbers, strict=True)),
            **choices,
            "bad": self.kept("SELECT sum(num_bad) FROM files")[0] or 0,
            "pending": self.num_pending,
        }

    def _files(self) -> Iterator[tuple[tuple[str, int], tuple[Path, str]]]:
        for kind, folder in self.folders.items():
            if not folder.is_dir():
                continue
            named = ((path, STEP.fullmatch(path.name)) for path in folder.iterdir())
            steps = {int(name[1]): path for path, name in named if name}
            for step in self._only(steps):
                path = steps[step]
                with contextlib.suppress(FileNotFoundError):  # replaced between the two looks
                    about = path.stat()
                    state = f"{path} {about.st_ino} {about.st_size} {about.st_mtime_ns}"
                    yield (kind, step), (path, state)

    def _replace(self, kind: str, step: int, path: Path | None, state: str) -> None:
        """Put a file's rows in the place of those that it had."""
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
        """The facts of each whole line, and how many lines hold no trajectory."""
        rows, start, num_bad = [], 0, 0
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True)):
            if line.endswith(b"\n"):
                facts = _facts(line, self._tags)
                num_bad += facts is None
                if facts is not None:
                    place = {"kind": kind, "step": step, "line": number}
                    rows.append(facts | place | {"start": start, "length": len(line)})
            start += len(line)
        return rows, num_bad


def _facts(line: bytes, tags: Grammar) -> dict[str, Any] | None:
    """What a trajectory is found by; None for a line that holds none."""
    try:
        row = orjson.loads(line)
        dialogue = read_dialogue(row, tags)
        policy = [s for s in dialogue.segments if s["origin"] == "policy"]
        known = [x for s in policy for x in s.get("log_probs", ()) if x is not None]
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
            "log_prob": sum(known) / len(known) if known else None,
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
SHOWN = ('kind, step, line, uid, source, "group", sample, status, score, searches, turns, tokens, '
         "log_prob, question, answer, gold, queries, is_found, is_given")  # fmt: skip
MOST = 2**31
Whole = Annotated[int, Query(ge=0, le=MOST)]
Count = Annotated[int | None, Query(ge=0, le=MOST)]
OUTCOMES = {
    "given": "is_given = 1",
    "missed": "is_found = 1 AND is_given = 0",
    "not_found": "is_found = 0 AND is_given = 0",
    "known": "is_found = 0 AND is_given = 1",
}
"""missed: the answer stood in the documents and was not given; known: given, though not found."""


@dataclass(frozen=True)
class Wanted:
    """Which trajectories are wanted; None or an empty text asks for nothing."""

    words: Annotated[str, Query(max_length=500)] = ""
    """Each word occurs in the question, in a query or in the answer."""
    kind: str = ""
    status: str = ""
    source: str = ""
    group: str = ""
    uid: str = ""
    outcome: Literal["", "given", "missed", "not_found", "known"] = ""
    step_from: Count = None
    step_to: Count = None
    score_from: float | None = None
    score_to: float | None = None
    searches_from: Count = None
    searches_to: Count = None
    order: Order = "newest"
    page: Annotated[int, Query(ge=1, le=MOST)] = 1
    size: Annotated[int, Query(ge=1, le=200)] = 50

    def condition(self) -> tuple[str, list[Any]]:
        """The WHERE clause and its values."""
        parts, values = [], []
        for field in fields(self):
            value, (name, _, end) = getattr(self, field.name), field.name.partition("_")
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


def find(index: TrajectoryIndex, wanted: Wanted) -> dict[str, Any]:
    """One page of what is wanted, and how many there are in all."""
    where, values = wanted.condition()
    order = ORDERS[wanted.order]
    # All ids in one pass, which tells the count too; in one row, since each row would wait for
    # the interpreter anew while another thread reads files.
    # sqlite by itself takes the narrower by_newest, and then reads every row for its words.
    by = "INDEXED BY by_words" if wanted.words.split() and wanted.order == "newest" else ""
    inner = f"SELECT id FROM trajectories {by} WHERE {where} ORDER BY {order} LIMIT -1"
    [joined] = index.kept(f"SELECT group_concat(id) FROM ({inner})", tuple(values))
    ids = joined.split(",") if joined else []
    pages = max(1, math.ceil(len(ids) / wanted.size))
    page = min(wanted.page, pages)
    own = ids[(page - 1) * wanted.size : page * wanted.size]
    rows = index.db.execute(
        f"SELECT {SHOWN} FROM trajectories WHERE id IN ({', '.join('?' * len(own))}) "
        f"ORDER BY {order}", own)  # fmt: skip
    return {"count": len(ids), "page": page, "pages": pages, "rows": [dict(row) for row in rows]}


def over_steps(index: TrajectoryIndex, uid: str, kind: str, most: int) -> list[dict[str, Any]]:
    """One question's trajectories in the order of the steps, at most `most` spread over them."""
    where = "uid = ? AND (? = '' OR kind = ?)"
    rows = index.db.execute(
        f"SELECT {SHOWN} FROM trajectories WHERE {where} ORDER BY step, kind DESC, line",
        (uid, kind, kind)).fetchall()  # fmt: skip
    chosen = sorted({round(i * (len(rows) - 1) / max(1, most - 1)) for i in range(most)})
    return [dict(rows[i]) for i in (chosen if len(rows) > most else range(len(rows)))]
