"""The backend that answers from a record: no corpus, no index, the same answers bit for bit.

A query is served at the `k` it was recorded with, or, when only larger ones were recorded, from the
smallest of them: its first `k` hits. A larger `k` than any recorded is not recorded at all.
"""

import hashlib
import json
import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_r1.search.backends.base import Retriever, stage
from search_r1.search.errors import QueryNotRecorded, SetupError
from search_r1.search.recording import Record, read_facts, read_rows, to_record
from search_r1.search.schema import Hit
from search_r1.search.settings import RetrieverConfig


class ReplayRetriever:
    """Answers by byte offset into the file, so that a large record needs little memory."""

    name = "replay"
    num_threads = 64

    def __init__(self, path: str | Path, with_latency: bool = False) -> None:
        """Read the record; `with_latency`: answers as slow as they were. Raises SetupError."""
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
        self.num_documents = len(ids)
        """Different documents in the record."""
        self._digest = hasher.hexdigest()
        with self._path.open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The recorded hits, with latency as late as the slowest; raises QueryNotRecorded."""
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
        start = recorded[min(large_enough)]
        return to_record(json.loads(self._lines[start : self._lines.find(b"\n", start)]))

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
            "--retriever_name replay without --replay_path; expected a file of --record"
        )
    return ReplayRetriever(path, config.diagnostics.replay_latency)
