"""Dense retrieval: an encoder, an index of vectors, and the documents of its rows.

The indexes are in `faiss_index` and `torch_flat`; this module loads neither FAISS nor torch.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from search_r1.search.corpus import Corpus
from search_r1.search.encoders.interface import Encoder, Vectors
from search_r1.search.schema import Hit
from search_r1.search.stages import stage


class VectorIndex(Protocol):
    """Rows with the highest scores; answers do not depend on which queries came together."""

    def search(self, queries: Vectors, k: int) -> tuple[list[list[float]], list[list[int]]]:
        """Scores and rows of at most `k` vectors per query, best first, ties by row."""
        ...

    def info(self) -> dict[str, Any]:
        """What decides a score."""
        ...


class DenseRetriever:
    """Ranks documents by the inner product (or distance) of query and passage embeddings."""

    num_threads = 1

    def __init__(
        self, name: str, index: VectorIndex, digest: str, corpus: Corpus, encoder: Encoder
    ) -> None:
        """`digest` identifies the file of the index."""
        self.name = name
        self._index, self._digest = index, digest
        self._corpus, self._encoder = corpus, encoder

    @property
    def num_documents(self) -> int:
        """Documents that can be found."""
        return len(self._corpus)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most `k` hits per query, best first, ties by row."""
        if not queries:
            return []
        with stage("encode"):
            vectors = self._encoder.encode_queries(queries)
        with stage("search"):
            scores, rows = self._index.search(vectors, k)
        with stage("documents"):
            documents = iter(self._corpus.documents([row for found in rows for row in found]))
            return [[Hit(next(documents), score) for score in found] for found in scores]

    def info(self) -> dict[str, Any]:
        """Engine, index, encoder and the corpus."""
        index = {**self._index.info(), "index": self._digest}
        corpus = asdict(self._corpus.fingerprint)
        return {**index, "encoder": self._encoder.info(), "corpus": corpus}
