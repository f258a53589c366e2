"""The protocol of every retriever backend: queries in, ranked hits out, and its identity."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from search_r1.search.schema import Hit


class Retriever(Protocol):
    """A retriever backend; the server calls it from at most `num_threads` threads at once."""

    name: str
    num_threads: int
    """Threads that may search at once: 1 for an index, more where a search waits for a network."""

    @property
    def num_documents(self) -> int:
        """Documents that can be found; 0 where nobody can know."""
        ...

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most `k` hits per query, best first, ties by row; one list per query in order."""
        ...

    def info(self) -> dict[str, Any]:
        """JSON-ready facts for `/info`: everything that decides an answer, and nothing else.

        Two backends with equal facts give equal answers, so times and paths do not belong here.
        """
        ...


def fingerprint(facts: Mapping[str, Any]) -> str:
    """64-bit BLAKE2b hash (hex) of a backend's `info()`: the key of caches and of records."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
