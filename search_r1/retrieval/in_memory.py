"""A retriever of documents in memory, for tests and small programs."""

import re
from collections.abc import Mapping, Sequence

from search_r1.retrieval.schema import Document


class InMemoryRetrieval:
    """Documents in memory, found by exact query in a mapping or by shared words in a list."""

    def __init__(
        self, documents: Mapping[str, Sequence[Document]] | Sequence[Document], topk: int = 3
    ) -> None:
        """At most `topk` documents are found per query; `queries` lists all queries so far."""
        self._documents = documents
        self._topk = topk
        self.queries: list[str] = []

    async def search(self, query: str) -> list[Document]:
        """Return the mapping's documents for `query`, or those with the most words in common."""
        self.queries.append(query)
        if isinstance(self._documents, Mapping):
            return list(self._documents.get(query, ()))[: self._topk]
        words = _words(query)
        overlaps = [(len(words & _words(d.contents)), d) for d in self._documents]
        matches = sorted((pair for pair in overlaps if pair[0]), key=lambda pair: -pair[0])
        return [document for _, document in matches[: self._topk]]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
