"""The backend that replays a server's --cache_path file: it needs no corpus and no index.

A query that was searched with this `k` gets those hits, bit for bit, else the first `k` hits of the
smallest larger `k`. Any other query is an error.
"""

import hashlib
import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from search_r1.retrieval.engines.base import Retriever, stage
from search_r1.retrieval.engines.kept import read_value, result_keys, to_value
from search_r1.retrieval.errors import QueryNotRecorded, SetupError
from search_r1.retrieval.schema import Document, Hit, fingerprint
from search_r1.retrieval.settings import RetrieverConfig
from search_r1.store import MAGIC, FileStore, Key
from verl.files import MAX_CHARS, regular_file

OLD_FORMAT = "search-r1-record"
"""Format in the first line of a jsonl file that the earlier option --record wrote."""


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
        raise SetupError("--retriever_name replay without --replay_path; expected a file that a "
                         "server wrote with --cache_path")  # fmt: skip
    return ReplayRetriever(path, config.diagnostics.replay_latency)


def open_record(path: Path) -> FileStore:
    """Open the file, or read that of an earlier --record into memory; raises SetupError."""
    expected = "expected a --cache_path file, or one of the earlier --record"
    try:
        with regular_file(path).open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return FileStore(path, "--replay_path")
            file.seek(0)
            store = FileStore(":memory:", "--replay_path")
            for entry in _old_entries(file):
                store.put(entry)
            return store
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        got = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise SetupError(f"--replay_path {path}: got {got}, {expected}") from error


def _old_entries(file: BinaryIO) -> Iterator[dict[Key, Any]]:
    """Yield the entry of each line of a file of --record; the last line may be incomplete."""
    header = json.loads(file.readline(MAX_CHARS))
    if header["format"] != OLD_FORMAT:
        raise ValueError(f"format {header['format']!r}")
    facts = header["facts"]
    backend = (fingerprint(facts), str(facts.get("engine", "")))
    yield {backend: facts}
    for number, line in enumerate(file, 2):
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
            hits = [Hit(Document.from_mapping(item), float(item["score"])) for item in row["hits"]]
            key = (*backend, int(row["k"]), str(row["query"]))
            yield {key: to_value(hits, float(row["seconds"]))}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"line {number}: {type(error).__name__} {error}") from error
