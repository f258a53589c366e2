"""The engine that finds nothing: what an agent scores without documents."""

from collections.abc import Sequence
from typing import Any

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.settings import RetrieverConfig
from search_r1.search.schema import Hit


class EmptyRetriever:
    """Answers every query with no documents; needs no corpus and no index."""

    name = "empty"
    num_threads = 1
    num_documents = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """One empty list per query."""
        return [[] for _ in queries]

    def info(self) -> dict[str, Any]:
        """The engine's name."""
        return {"engine": self.name}


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The empty engine."""
    return EmptyRetriever()
