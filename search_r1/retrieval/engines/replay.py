"""The backend that replays a server's --cache_path file: it needs no corpus and no index.

A query that was searched with this `k` gets those hits, bit for bit, else the first `k` hits of the
smallest larger `k`. Any other query is an error.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_r1.retrieval.engines.base import Retriever, stage
from search_r1.retrieval.engines.kept import read_value, result_keys, to_value
from search_r1.retrieval.errors import QueryNotRecorded, SetupError
from search_r1.retrieval.schema import Hit
from search_r1.retrieval.settings import RetrieverConfig
from search_r1.store import MAGIC, FileStore, Key
from verl.files import regular_file

EXPECTED = "a file that a server wrote with --cache_path"


class ReplayRetriever:
    """Replays the results in a file, of which only the keys are kept in memory."""

    name = "replay"
    num_threads = 64

    def __init__(self, path: str | Path, with_latency: bool = False) -> None:
        """Read the file; raises SetupError. `with_latency`: search as long as was recorded."""
        self._path, self._with_latency = path, with_latency
        self._store = open_record(Path(path))
        keys = result_keys(self._store)
        backends = sorted({key[:2] for key in keys})
        if len(backends) != 1:
            names = ", ".join(f"{name} ({facts})" for facts, name in backends) or "none"
            raise SetupError(
                f"--replay_path {path}: got results of {len(backends)} backends ({names}), "
                "expected those of one; fix: give each backend its own --cache_path file"
            )
        self._backend = backends[0]
        self._ks: dict[str, list[int]] = {}
        for *_, k, query in keys:
            self._ks.setdefault(str(query), []).append(int(k))
        ids: set[str] = set()
        hasher = hashlib.blake2b(digest_size=8)
        for key in keys:
            hits, _ = read_value(self._store.get([key])[key])
            ids.update(hit.document.id for hit in hits)
            hasher.update(json.dumps([*key, to_value(hits, 0.0)]).encode())
        self.num_documents = len(ids)
        """Number of different documents in the file."""
        self._answers = {"count": len(keys), "digest": hasher.hexdigest()}

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the recorded hits; latency is that of the slowest. Raises QueryNotRecorded."""
        with stage("search"):
            start = time.monotonic()
            keys = [self._key(query, k) for query in queries]
            values = self._store.get(keys)
            results = [read_value(values[key]) for key in keys]
            if self._with_latency and results:
                slowest = max(seconds for _, seconds in results)
                time.sleep(max(0.0, slowest - (time.monotonic() - start)))
        return [hits[:k] for hits, _ in results]

    def _key(self, query: str, k: int) -> Key:
        recorded = self._ks.get(query, [])
        large_enough = [other for other in recorded if other >= k]
        if not large_enough:
            known = f"only with k = {max(recorded)}" if recorded else "not at all"
            raise QueryNotRecorded(
                f"query {query[:200]!r} with k = {k} is recorded {known} in {self._path}; record "
                "it with this topk first, or serve the backend itself"
            )
        return (*self._backend, min(large_enough), query)

    def info(self) -> dict[str, Any]:
        facts = self._store.get([self._backend]).get(self._backend)
        return {"engine": self.name, "recorded": facts, "answers": self._answers}


def open_retriever(config: RetrieverConfig) -> Retriever:
    path = config.diagnostics.replay_path
    if path is None:
        raise SetupError(f"--retriever_name replay without --replay_path; expected {EXPECTED}")
    return ReplayRetriever(path, config.diagnostics.replay_latency)


def open_record(path: Path) -> FileStore:
    """Open the file; raises SetupError."""
    try:
        with regular_file(path).open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise SetupError(f"--replay_path {path}: got {error}, expected {EXPECTED}") from error
    if head != MAGIC:
        raise SetupError(f"--replay_path {path}: got another file, expected {EXPECTED}")
    return FileStore(path, "--replay_path")
