"""Dense retrieval: an encoder and a FAISS index of any kind, on CPU or on all GPUs."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from search_r1.search.corpus import Corpus
from search_r1.search.encoder import Encoder, open_encoder
from search_r1.search.retrievers.base import Retriever
from search_r1.search.retrievers.faiss_index import FaissIndex
from search_r1.search.retrievers.locations import open_corpus
from search_r1.search.retrievers.settings import FaissConfig, RetrieverConfig
from search_r1.search.retrievers.vector_index import (
    check_manifest,
    check_shape,
    index_digest,
    locate_index,
    read_ahead,
    vectors_file,
)
from search_r1.search.schema import Hit
from search_r1.search.stages import stage


class DenseRetriever:
    """Ranks documents by the inner product of query and passage embeddings."""

    num_threads = 1

    def __init__(
        self, name: str, index: FaissIndex, digest: str, corpus: Corpus, encoder: Encoder
    ) -> None:
        """`digest` identifies the file of the index."""
        self.name = name
        self._index, self._digest = index, digest
        self._corpus, self._encoder = corpus, encoder

    @classmethod
    def open(
        cls, name: str, path: Path, corpus: Corpus, encoder: Encoder, config: FaissConfig
    ) -> "DenseRetriever":
        """Open our index folder, or a bare FAISS file such as the published `e5_Flat.index`.

        Raises IndexMismatch if the index is not of this corpus and encoder.
        """
        check_manifest(path, corpus, encoder)
        index = FaissIndex.open(vectors_file(path), config)
        check_shape(path, index.num_rows, index.dim, corpus, encoder)
        return cls(name, index, index_digest(vectors_file(path)), corpus, encoder)

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
        return {"engine": "faiss", **index, "encoder": self._encoder.info(), "corpus": corpus}


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The FAISS index and the encoder that the settings name."""
    corpus = open_corpus(config)
    path = locate_index(config)
    read_ahead(vectors_file(path))
    encoder = open_encoder(config.encoder)
    return DenseRetriever.open(config.retriever_name, path, corpus, encoder, config.faiss)
