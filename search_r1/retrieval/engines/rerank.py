"""Reranking of any backend's hits by a cross-encoder, which reads query and document together.

The pairs of all queries of a call are scored in the same batches, but each query is paired with its
own documents only. `PairScorer` is the interface; `encoders.cross_encoder` implements it.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from search_r1.retrieval.encoders.cross_encoder import CrossEncoder
from search_r1.retrieval.engines.base import Filter, Retriever, stage
from search_r1.retrieval.schema import Hit
from search_r1.retrieval.settings import RerankConfig

Pair = tuple[str, str]
"""A query and the contents of a document."""


class PairScorer(Protocol):
    """Scores how well documents answer queries."""

    def scores(self, pairs: Sequence[Pair]) -> list[float]:
        """Return one score per pair, in order; higher is better."""

    def info(self) -> dict[str, Any]:
        """Return JSON-ready facts that affect the scores."""


class RerankingRetriever:
    """Another backend's documents, scored and sorted again by a `PairScorer`."""

    def __init__(self, retriever: Retriever, scorer: PairScorer, retrieval_topk: int) -> None:
        """`retrieval_topk`: documents to request from the backend, at least `k` of each search."""
        self.name = retriever.name
        self.num_threads = retriever.num_threads
        self.num_documents = retriever.num_documents
        self.corpus = getattr(retriever, "corpus", None)
        self.filter_fields = getattr(retriever, "filter_fields", ())
        self.cuts = (*getattr(retriever, "cuts", ()), *getattr(scorer, "cuts", ()))
        self._retriever = retriever
        self._scorer = scorer
        self._retrieval_topk = retrieval_topk
        self._scorer_lock = threading.Lock()  # a tokenizer is not thread-safe

    def filtered(self, filter: Filter) -> Retriever:
        narrowed = copy.copy(self)
        narrowed._retriever = self._retriever.filtered(filter)  # type: ignore[attr-defined]
        return narrowed

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the `k` hits with the highest scores per query, ties in the backend's order."""
        retrieved = self._retriever.search(queries, max(self._retrieval_topk, k))
        with stage("rerank"):
            pairs = [
                (query, hit.document.contents)
                for query, hits in zip(queries, retrieved, strict=True)
                for hit in hits
            ]
            scores = iter(self._score(pairs))
            scored = [[Hit(hit.document, next(scores)) for hit in hits] for hits in retrieved]
            # The sort is stable, so ties stay in the backend's order.
            return [sorted(hits, key=lambda hit: -hit.score)[:k] for hits in scored]

    def info(self) -> dict[str, Any]:
        rerank = {"retrieval_topk": self._retrieval_topk, **self._scorer.info()}
        return {**self._retriever.info(), "rerank": rerank}

    def _score(self, pairs: list[Pair]) -> list[float]:
        """Score equal pairs once, since scores differ in their last bits between batches."""
        distinct = list(dict.fromkeys(pairs))
        if not distinct:
            return []
        with self._scorer_lock:
            scores = self._scorer.scores(distinct)
        score_of = dict(zip(distinct, scores, strict=True))
        return [score_of[pair] for pair in pairs]


def open_reranker(config: RerankConfig) -> Callable[[Retriever], Retriever]:
    """Load the model, and return what wraps another backend; raises SetupError with the fix."""
    scorer = CrossEncoder.open(config)
    return lambda retriever: RerankingRetriever(retriever, scorer, config.retrieval_topk)
