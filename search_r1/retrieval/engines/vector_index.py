"""What a dense engine needs of an index of vectors."""

from typing import Any, Protocol

from search_r1.retrieval.corpus import Corpus, Mask
from search_r1.retrieval.encoder import Encoder
from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.engines.base import Ranking


class VectorIndex(Protocol):
    """A searchable index of vectors; its results do not depend on how queries are batched."""

    num_rows: int
    dim: int

    def load(self, corpus: Corpus, encoder: Encoder) -> None:
        """Prepare for searching; called once the index is known to fit corpus and encoder."""

    def search(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Ranking:
        """Return scores and rows of at most `k` vectors per query, best first, ties by row.

        `allowed` (num_rows,): the rows that may be found.
        """

    def info(self) -> dict[str, Any]:
        """Return JSON-ready facts that affect the scores."""
