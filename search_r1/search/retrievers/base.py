"""The seam of every search engine: queries in, ranked hits out."""

from collections.abc import Sequence
from typing import Any, Protocol

from search_r1.search.schema import Hit


class Retriever(Protocol):
    """A search engine; the server calls it from one thread at a time."""

    name: str

    @property
    def num_documents(self) -> int:
        """Documents that can be found."""
        ...

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most `k` hits per query, best first, ties by row; one list per query in order."""
        ...

    def info(self) -> dict[str, Any]:
        """JSON-ready facts about engine, corpus and encoder for `/info`."""
        ...
