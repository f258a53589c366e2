"""The seam between an agent and whatever finds documents, with two stand-ins without a server."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from search_r1.search.schema import Document


class Retrieval(Protocol):
    """What an agent needs of a retriever."""

    async def search(self, query: str) -> list[Document]:
        """The documents, best first; SearchError is an infrastructure failure, never a result."""
        ...


class EmptyRetrieval:
    """Finds nothing: what an agent scores without documents."""

    async def search(self, query: str) -> list[Document]:
        """No documents."""
        return []


class InMemoryRetrieval:
    """Documents held in memory: by exact query from a mapping, or by shared words from a list."""

    def __init__(
        self, documents: Mapping[str, Sequence[Document]] | Sequence[Document], topk: int = 3
    ) -> None:
        """At most `topk` documents are found; `queries` records what was asked."""
        self._documents = documents
        self._topk = topk
        self.queries: list[str] = []

    async def search(self, query: str) -> list[Document]:
        """The mapping's documents for `query`, or those that share most words with it."""
        self.queries.append(query)
        if isinstance(self._documents, Mapping):
            return list(self._documents.get(query, ()))[: self._topk]
        words = _words(query)
        overlaps = [(len(words & _words(d.contents)), d) for d in self._documents]
        found = sorted((pair for pair in overlaps if pair[0]), key=lambda pair: -pair[0])
        return [document for _, document in found[: self._topk]]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


if __name__ == "__main__":
    sys.exit(
        "retrieval: this module serves nothing; expected one of:\n"
        "  python -m search_r1.search.retrieval_server --help   (a server of documents)\n"
        "  python scripts/data_process/nq_rag.py --help         (documents in prompts)"
    )
