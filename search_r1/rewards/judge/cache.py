"""Verdicts that outlive the run, in a sqlite file that several processes may share."""

import hashlib
import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

logger = logging.getLogger(__name__)

BUSY_S = 30.0


def key(model: str, message: str) -> str:
    """What a verdict depends on: the model and the whole message."""
    return hashlib.sha256(f"{model}\0{message}".encode()).hexdigest()


class VerdictCache:
    """Scores by key; safe to use from several threads and processes."""

    def __init__(self, path: str | Path) -> None:
        """Create or open the file; raises ValueError if it cannot serve as a cache."""
        self._lock = threading.Lock()
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(file, timeout=BUSY_S, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode = WAL")
            with self._file:
                self._file.execute(
                    "CREATE TABLE IF NOT EXISTS verdicts "
                    "(key TEXT PRIMARY KEY, score REAL NOT NULL) WITHOUT ROWID"
                )
            self.get("")
        except (sqlite3.Error, OSError) as error:
            raise ValueError(
                f"got reward_model.judge.cache_path={path} ({error}), expected a new path, or a "
                "file of verdicts: delete it if it is damaged, or set it to null"
            ) from error

    def get(self, key: str) -> float | None:
        """The score kept under the key."""
        select = "SELECT score FROM verdicts WHERE key = ?"
        with self._lock, closing(self._file.execute(select, (key,))) as rows:
            found = rows.fetchone()
        return None if found is None else float(found[0])

    def put(self, key: str, score: float) -> None:
        """Keep a score; what is there already stays. A file that fails keeps nothing."""
        try:
            with self._lock, self._file:
                self._file.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", (key, score))
        except sqlite3.Error as error:
            logger.warning("a verdict is not kept: %s", error)
