"""BM25: scores against the written formula, ties, and queries without a match."""

import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bm25s.stopwords import STOPWORDS_EN
from hypothesis import given
from hypothesis import strategies as st

from search_r1.search.corpus import Corpus
from search_r1.search.retrievers.base import Retriever
from search_r1.search.retrievers.bm25 import top_rows

K1, B = 1.5, 0.75


def words_of(text: str) -> list[str]:
    return [w for w in re.findall(r"\b\w\w+\b", text.lower()) if w not in STOPWORDS_EN]


def formula(query: str, texts: list[str]) -> list[float]:
    """Lucene's BM25 by loops: idf = ln(1 + (N - n + 1/2) / (n + 1/2)), tf saturated by length."""
    bags = [Counter(words_of(text)) for text in texts]
    mean_length = sum(bag.total() for bag in bags) / len(bags)
    scores = [0.0] * len(texts)
    for word in words_of(query):
        containing = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(texts) - containing + 0.5) / (containing + 0.5))
        for row, bag in enumerate(bags):
            norm = K1 * (1 - B + B * bag.total() / mean_length)
            scores[row] += idf * bag[word] / (bag[word] + norm)
    return scores


def test_scores_are_the_formulas(
    corpus_path: Path, open_engine: Callable[[str], Retriever], queries: list[str]
) -> None:
    """Every hit has the formula's score and rank, and no matching document is left out."""
    texts = [document.contents for document in Corpus.open(corpus_path)]
    engine = open_engine("bm25")
    for query, hits in zip(queries, engine.search(queries, len(texts)), strict=True):
        scores = formula(query, texts)
        expected = sorted((-round(s, 5), row) for row, s in enumerate(scores) if s > 0)
        assert [hit.document.id for hit in hits] == [f"d{row}" for _, row in expected]
        assert [hit.score for hit in hits] == pytest.approx(
            sorted(scores, reverse=True)[: len(hits)], rel=1e-5
        )


def test_ties_are_broken_by_row_at_any_k(open_engine: Callable[[str], Retriever]) -> None:
    """Equal documents come in corpus order, also when k cuts between them."""
    engine = open_engine("bm25")
    found = [[h.document.id for h in engine.search(["identical"], k)[0]] for k in (1, 2, 99)]
    assert found == [["d3"], ["d3", "d4"], ["d3", "d4"]]


@given(st.lists(st.integers(-1, 3), max_size=30), st.integers(1, 12))
def test_top_rows_is_a_sort(values: list[int], k: int) -> None:
    """The partial selection equals sorting everything."""
    scores = np.array(values, dtype=np.float32)
    ranked = sorted((-v, row) for row, v in enumerate(values) if v > 0)
    assert top_rows(scores, k) == [row for _, row in ranked[:k]]
