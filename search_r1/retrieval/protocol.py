"""The interface through which agents search, and the implementation that finds nothing."""

from typing import Protocol

from search_r1.retrieval.schema import Document


class Retrieval(Protocol):
    """Interface of a retriever as an agent uses it."""

    async def search(self, query: str) -> list[Document]:
        """Return the documents, best first; raises SearchError for an infrastructure failure."""


class EmptyRetrieval:
    """Finds nothing; measures an agent without documents."""

    async def search(self, query: str) -> list[Document]:
        return []
