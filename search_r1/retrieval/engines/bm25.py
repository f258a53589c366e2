"""BM25 (the Lucene variant) over a memory-mapped bm25s index; needs neither torch nor Java."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any

import bm25s
import numpy as np
import numpy.typing as npt

from search_r1.retrieval.corpus import Corpus, Mask
from search_r1.retrieval.engines.base import Ranking, Retriever, RowRetriever, stage
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.manifest import Manifest, build_command, locate, open_corpus
from search_r1.retrieval.settings import RetrieverConfig
from search_r1.retrieval.tokenization import ANALYZERS, FOLDED, SCRIPTS, UNFOLDED, tokenize

logger = logging.getLogger(__name__)

Scores = npt.NDArray[np.float32]  # (num_documents,)
Ranked = tuple[list[int], list[float]]  # rows and scores of a query's documents, best first
Rank = Callable[[list[list[str]], int, Mask | None], Iterable[Ranked]]  # of queries' words
UNREADABLE = (TokenError, OSError, ValueError, TypeError, AttributeError, LookupError, EOFError,
              RecursionError, OverflowError, MemoryError)  # fmt: skip
"""Errors that bm25s, numpy and json raise for malformed files."""
BOUND_SAMPLE = 8192
"""Maximum number of documents of one word that are used to bound the k-th score from below."""
LARGE = 10_000_000
"""Postings, those of about 190,000 passages, from which on `bm25_pruned` ranks."""


class Bm25Retriever(RowRetriever):
    """BM25 ranking of the documents that share a word with the query; others are never hits."""

    name = "bm25"
    num_threads = 1

    def __init__(
        self, index: bm25s.BM25, corpus: Corpus, analyzer: str = FOLDED,
        ranked_by: Callable[[bm25s.BM25, Rank], Rank] | None = None,
    ) -> None:  # fmt: skip
        """`analyzer`: the documents'; `ranked_by`: returns what ranks in place of all postings."""
        self._index, self._analyzer = index, analyzer
        self._words = partial(tokenize, analyzer=analyzer, of_queries=True)
        self._watches_queries = analyzer != SCRIPTS
        self.corpus, self.num_documents = corpus, len(corpus)
        # Plain arrays, since slicing a np.memmap costs as much as reading a short posting list.
        index.scores |= {n: np.asarray(index.scores[n]) for n in ("data", "indices", "indptr")}
        self._rank: Rank = ranked_by(index, self._rank_all) if ranked_by else self._rank_all

    @classmethod
    def open(cls, folder: Path, corpus: Corpus, config: RetrieverConfig) -> "Bm25Retriever":
        """Memory-map the index; raises IndexMismatch if damaged or of another corpus."""
        manifest = Manifest.load(folder)
        manifest.check_corpus(folder, corpus.path, corpus.fingerprint)
        manifest.check_files(folder, whole=config.verify)
        command = build_command(str(corpus.path), str(folder.parent))
        if manifest.analyzer not in ANALYZERS:
            raise IndexMismatch(
                f"index {folder} was built with the analyzer {manifest.analyzer!r}; expected "
                f"{FOLDED!r}: update this program, or build it again with `{command}`"
            )
        if manifest.analyzer == UNFOLDED:
            logger.info("index %s tells Bogotá from Bogota, as it was built; to fold accents and "
                        "forms of letters build it again: `%s`", folder, command)  # fmt: skip
        if manifest.analyzer != SCRIPTS:
            from search_r1.retrieval.script_words import warn_of_corpus  # noqa: PLC0415 - as needed

            warn_of_corpus(corpus)
        try:
            index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        except UNREADABLE as error:
            raise IndexMismatch(
                f"index {folder} cannot be read ({type(error).__name__}: {error}); expected what "
                f"bm25s wrote for {len(corpus)} documents: build it again with `{command}`"
            ) from error
        ranked_by = None
        if len(index.scores["data"]) >= LARGE:
            from search_r1.retrieval.engines import bm25_pruned  # noqa: PLC0415 - if large

            ranked_by = bm25_pruned.open_pruned
        engine = cls(index, corpus, manifest.analyzer, ranked_by)
        if manifest.filter_fields:
            from search_r1.retrieval.engines.filtered import attach  # noqa: PLC0415 - as needed

            attach(engine, folder, manifest)
        return engine

    def rank(self, queries: Sequence[str], k: int, allowed: Mask | None = None) -> Ranking:
        if self._watches_queries and not all(map(str.isascii, queries)):
            from search_r1.retrieval.script_words import warn_of_queries  # noqa: PLC0415 - as needed

            self._watches_queries = not warn_of_queries(queries)
        with stage("search"):
            ranked = list(self._rank(self._words(queries), k, allowed))
        return [scores for _, scores in ranked], [rows for rows, _ in ranked]

    def explain(self, query: str, k: int) -> list[dict[str, float]]:
        """Return each hit's words of the query, with what they give to its score."""
        from search_r1.retrieval.engines.bm25_words import shares_of_words  # noqa: PLC0415 by a page

        [words], (_, [rows]) = self._words([query]), self.rank([query], k)
        return shares_of_words(self._index, words, rows)

    def _rank_all(self, queries: list[list[str]], k: int, allowed: Mask | None) -> Iterator[Ranked]:
        for words in queries:
            if not (word_ids := self._index.get_tokens_ids(words)):
                yield [], []
                continue
            scores = self._index.get_scores_from_ids(word_ids)
            if allowed is not None:
                scores *= allowed
            rows = top_rows(scores, k, self._score_lower_bound(word_ids, scores, k))
            yield rows, scores[rows].tolist()

    def _score_lower_bound(self, word_ids: list[int], scores: Scores, k: int) -> float:
        """Return the k-th best score of the rarest word that `k` documents have, or 0.0."""
        starts = self._index.scores["indptr"]
        sizes = [(int(starts[word + 1] - starts[word]), word) for word in word_ids]
        size, word = min((pair for pair in sizes if pair[0] >= k), default=(0, 0))
        if size == 0 or k > BOUND_SAMPLE:
            return 0.0
        rows = self._index.scores["indices"][starts[word] : starts[word + 1]]
        sample = scores[rows[:BOUND_SAMPLE]]
        return float(np.partition(sample, len(sample) - k)[len(sample) - k])

    def info(self) -> dict[str, Any]:
        parameters = {"k1": self._index.k1, "b": self._index.b, "method": self._index.method}
        # An index of the earlier analyzer keeps the facts that runs on it have recorded.
        analyzer = {"analyzer": self._analyzer} if self._analyzer != UNFOLDED else {}
        weighed = {"queries": "weighed"} if self._analyzer == SCRIPTS else {}  # once they were not
        corpus = asdict(self.corpus.fingerprint)
        return {"engine": self.name, **parameters, **analyzer, **weighed, "corpus": corpus}


def open_retriever(config: RetrieverConfig) -> Retriever:
    """Open the index at `index_path`, or else one beside the corpus, built again if outdated."""
    corpus = open_corpus(config)
    if config.index_path is not None:
        return Bm25Retriever.open(locate(config, "bm25"), corpus, config)
    from search_r1.retrieval.engines.bm25_beside import open_beside  # noqa: PLC0415 - as needed

    return open_beside(corpus, lambda folder: Bm25Retriever.open(folder, corpus, config))


def top_rows(scores: Scores, k: int, floor: float = 0.0) -> list[int]:
    """Return the rows of the `k` highest scores, ties by row; `floor`: a bound of the k-th."""
    rows = np.flatnonzero(scores >= floor if floor > 0 else scores > 0)
    values = scores[rows]
    if len(rows) > k:
        threshold = np.partition(values, len(values) - k)[len(values) - k]
        keep = values >= threshold
        rows, values = rows[keep], values[keep]
    order = np.lexsort((rows, -values))[:k]
    best: list[int] = rows[order].tolist()
    return best
