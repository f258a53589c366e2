"""The backend that replays a record: it needs no corpus or index and repeats answers bit for bit.

A query that was recorded with this `k` gets those hits, else the first `k` hits of the smallest
larger `k` that was recorded. A `k` above all recorded ones is an error.
"""

import hashlib
import json
import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_r1.retrieval.engines.base import Retriever, stage
from search_r1.retrieval.errors import QueryNotRecorded, SetupError
from search_r1.retrieval.recording import Record, read_facts, read_rows, to_record
from search_r1.retrieval.schema import Hit
from search_r1.retrieval.settings import RetrieverConfig


class ReplayRetriever:
    """Replays the hits in a record, of which only byte offsets are kept in memory."""

    name = "replay"
    num_threads = 64

    def __init__(self, path: str | Path, with_latency: bool = False) -> None:
        """Read the record; raises SetupError. `with_latency`: repeat the recorded duration."""
        self._path = Path(path)
        self._with_latency = with_latency
        self._recorded = read_facts(path)
        self._offsets: dict[str, dict[int, int]] = {}
        ids: set[str] = set()
        hasher = hashlib.blake2b(digest_size=8)
        for offset, row in read_rows(path):
            offset_by_k = self._offsets.setdefault(row["query"], {})
            if offset_by_k.setdefault(row["k"], offset) == offset:  # the first answer counts
                ids.update(item["id"] for item in row["hits"])
                hasher.update(json.dumps([row["query"], row["k"], row["hits"]]).encode())
        self.num_documents = len(ids)
        """Number of different documents in the record."""
        self._digest = hasher.hexdigest()
        with self._path.open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the recorded hits; latency is that of the slowest. Raises QueryNotRecorded."""
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
        count = sum(len(recorded) for recorded in self._offsets.values())
        answers = {"count": count, "digest": self._digest}
        return {"engine": self.name, "recorded": self._recorded, "answers": answers}


def open_retriever(config: RetrieverConfig) -> Retriever:
    path = config.diagnostics.replay_path
    if path is None:
        raise SetupError(
            "--retriever_name replay without --replay_path; expected a file of --record"
        )
    return ReplayRetriever(path, config.diagnostics.replay_latency)
