"""A retriever backend in one file: `--retriever_name example/engines/sqlite.py:Sqlite`.

SQLite's own full-text search, over an index that is built in memory at the start.
"""

import re
import sqlite3
from collections.abc import Sequence
from typing import Any

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.manifest import open_corpus
from search_r1.retrieval.schema import Hit
from search_r1.retrieval.settings import RetrieverConfig


class Sqlite:
    """Ranks by BM25 over the stems of words."""

    name, num_threads = "sqlite", 1

    def __init__(self, config: RetrieverConfig) -> None:
        self.corpus: Corpus = open_corpus(config)
        self.num_documents = len(self.corpus)
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE VIRTUAL TABLE passages USING fts5(text, tokenize=porter)")
        rows = ((row, document.contents) for row, document in enumerate(self.corpus))
        self._database.executemany("INSERT INTO passages (rowid, text) VALUES (?, ?)", rows)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [self._find(query, k) for query in queries]

    def _find(self, query: str, k: int) -> list[Hit]:
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query)) or '""'
        sql = "SELECT rowid, -rank FROM passages WHERE text MATCH ? ORDER BY rank, rowid LIMIT ?"
        found = self._database.execute(sql, (words, k))
        return [Hit(self.corpus[row], score) for row, score in found]

    def info(self) -> dict[str, Any]:
        return {"engine": self.name, "corpus": self.corpus.fingerprint.digest}
