"""Orders what any backend finds by a cross-encoder, which reads query and document together.

Pairs of all queries of a call are scored in the same batches, but each query is paired with its
own documents only. `PairScorer` is the seam; the model behind it is in `encoders.cross_encoder`.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from search_r1.search.backends.base import Retriever, stage
from search_r1.search.schema import Hit

Pair = tuple[str, str]
"""A query and the contents of a document."""


class PairScorer(Protocol):
    """Anything that says how well documents answer queries."""

    def scores(self, pairs: Sequence[Pair]) -> list[float]:
        """One score per pair, in order; a higher one fits better."""
        ...

    def info(self) -> dict[str, Any]:
        """JSON-ready facts that decide a score."""
        ...


class RerankingRetriever:
    """The documents of another backend in the order of a scorer, whose scores they carry."""

    def __init__(self, retriever: Retriever, scorer: PairScorer, retrieval_topk: int) -> None:
        """`retrieval_topk`: documents asked of the backend, or more where a request wants more."""
        self.name = retriever.name
        self.num_threads = retriever.num_threads
        self.num_documents = retriever.num_documents
        self.corpus = getattr(retriever, "corpus", None)
        self._retriever = retriever
        self._scorer = scorer
        self._retrieval_topk = retrieval_topk
        self._one_at_a_time = threading.Lock()  # a tokenizer is not thread-safe

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The `k` hits with the highest scores per query, ties in the order of the backend."""
        found = self._retriever.search(queries, max(self._retrieval_topk, k))
        with stage("rerank"):
            pairs = [
                (query, hit.document.contents)
                for query, hits in zip(queries, found, strict=True)
                for hit in hits
            ]
            scores = iter(self._score(pairs))
            scored = [[Hit(hit.document, next(scores)) for hit in hits] for hits in found]
            # the sort is stable, so ties stay as they came
            return [sorted(hits, key=lambda hit: -hit.score)[:k] for hits in scored]

    def info(self) -> dict[str, Any]:
        """The backend's facts, and the reranker's."""
        rerank = {"retrieval_topk": self._retrieval_topk, **self._scorer.info()}
        return {**self._retriever.info(), "rerank": rerank}

    def _score(self, pairs: list[Pair]) -> list[float]:
        """Equal pairs are scored once: in other batches their last bits would differ."""
        distinct = list(dict.fromkeys(pairs))
        if not distinct:
            return []
        with self._one_at_a_time:
            scores = self._scorer.scores(distinct)
        score_of = dict(zip(distinct, scores, strict=True))
        return [score_of[pair] for pair in pairs]
