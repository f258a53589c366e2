"""The backend that answers from a record: no corpus, no index, the same answers bit for bit.

A query is served at the `k` it was recorded with, or, when only larger ones were recorded, from the
smallest of them: its first `k` hits. A larger `k` than any recorded is not recorded at all.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.settings import RetrieverConfig
from search_r1.search.errors import QueryNotRecorded, SetupError
from search_r1.search.recording import Record, read_facts, read_rows, to_record
from search_r1.search.schema import Hit
from search_r1.search.timing import stage


class ReplayRetriever:
    """Answers by byte offset into the file, so that a large record needs little memory."""

    name = "replay"
    num_threads = 64

    def __init__(self, path: str | Path, with_latency: bool = False) -> None:
        """Read the record at `path`; `with_latency` makes answers as slow as they were.

        Raises SetupError for a file that is missing or is no record.
        """
        self._path = Path(path)
        self._with_latency = with_latency
        self._recorded = read_facts(path)
        self._offsets: dict[str, dict[int, int]] = {}
        ids: set[str] = set()
        hasher = hashlib.blake2b(digest_size=8)
        for offset, row in read_rows(path):
            of_query = self._offsets.setdefault(row["query"], {})
            if of_query.setdefault(row["k"], offset) == offset:  # the first answer stays
                ids.update(item["id"] for item in row["hits"])
                hasher.update(json.dumps([row["query"], row["k"], row["hits"]]).encode())
        self._num_documents = len(ids)
        self._digest = hasher.hexdigest()
        self._file = self._path.open("rb")

    @property
    def num_documents(self) -> int:
        """Different documents in the record."""
        return self._num_documents

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The recorded hits; raises QueryNotRecorded if a query has none at `k` or above.

        With latency, a batch takes as long as its slowest recorded search.
        """
        with stage("search"):
            start = time.monotonic()
            records = [self._find(query, k) for query in queries]
            if self._with_latency and records:
                slowest = max(record.seconds for record in records)
                time.sleep(max(0.0, slowest - (time.monotonic() - start)))
        return [record.hits[:k] for record in records]

    def _find(self, query: str, k: int) -> Record:
        recorded = self._offsets.get(query, {})
        large_enough = [other for other in recorded if other >= k]
        if not large_enough:
            known = f"only with k = {max(recorded)}" if recorded else "not at all"
            raise QueryNotRecorded(
                f"query {query[:200]!r} with k = {k} is recorded {known} in {self._path}; record "
                "it with this topk first, or serve the backend itself"
            )
        line = self._read_line(recorded[min(large_enough)])
        return to_record(json.loads(line))

    def _read_line(self, offset: int) -> bytes:
        """The line at a byte offset; reads in no shared position, so threads do not disturb."""
        line, size = b"", 1 << 14
        while not line.endswith(b"\n"):
            line = os.pread(self._file.fileno(), size, offset).partition(b"\n")[0] + b"\n"
            if len(line) > size:
                line, size = b"", size * 4
        return line

    def info(self) -> dict[str, Any]:
        """The recorded backend and a hash of the recorded answers."""
        count = sum(len(recorded) for recorded in self._offsets.values())
        answers = {"count": count, "digest": self._digest}
        return {"engine": self.name, "recorded": self._recorded, "answers": answers}


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The record that the settings name."""
    path = config.diagnostics.replay_path
    if path is None:
        raise SetupError(
            "--retriever_name replay without --replay_path; expected a file that a server wrote "
            "with --record"
        )
    return ReplayRetriever(path, config.diagnostics.replay_latency)
