"""BM25: scores compared with the formula, ties, and queries without a match."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import bm25s
import numpy as np
import pytest
from bm25s.stopwords import STOPWORDS_EN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines import bm25
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.bm25 import top_rows

K1, B = 1.5, 0.75
WORDS = ["ax", "bo", "cz", "dw"]


def words_of(text: str) -> list[str]:
    return [w for w in re.findall(r"\b\w\w+\b", text.lower()) if w not in STOPWORDS_EN]


def formula(query: str, texts: list[str]) -> list[float]:
    """Compute Lucene's BM25 with loops: idf = ln(1 + (N - n + 1/2) / (n + 1/2)), saturated tf."""
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
    """Equal documents rank in corpus order, also if only some of them are among the k best."""
    engine = open_engine("bm25")
    found = [[h.document.id for h in engine.search(["identical"], k)[0]] for k in (1, 2, 99)]
    assert found == [["d3"], ["d3", "d4"], ["d3", "d4"]]


def test_a_batch_is_its_queries_one_by_one(
    open_engine: Callable[[str], Retriever], queries: list[str]
) -> None:
    """A query gets the same hits bit for bit alone and in a batch, for any k."""
    engine = open_engine("bm25")
    for k in (1, 2, 3, 99):
        assert engine.search(queries, k) == [engine.search([query], k)[0] for query in queries]


@given(st.lists(st.integers(-1, 3), max_size=30), st.integers(1, 12), st.integers(0, 3))
def test_top_rows_is_a_sort(values: list[int], k: int, floor: int) -> None:
    """The partial selection equals a full sort, with any floor that at least `k` rows reach."""
    scores = np.array(values, dtype=np.float32)
    ranked = sorted((-v, row) for row, v in enumerate(values) if v > 0)
    known = floor if sum(v >= floor for v in values) >= k else 0
    assert top_rows(scores, k, known) == [row for _, row in ranked[:k]]


@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=4), min_size=1),
    st.integers(1, 9),
    st.integers(1, 9),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_lower_bound_loses_no_document(
    tmp_path: Path, texts: list[list[str]], k: int, sample: int
) -> None:
    """Hits equal those of a full sort, for any shared words and any sample size of the bound."""
    path, texts = tmp_path / "corpus.jsonl", [*texts, WORDS]
    rows = [{"id": str(row), "contents": " ".join(words)} for row, words in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = bm25s.BM25()
    index.index(texts, show_progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "BOUND_SAMPLE", sample)
        found = bm25.Bm25Retriever(index, Corpus.open(path)).search(["ax bo", "cz", "dw ax ax"], k)
    for words, hits in zip((["ax", "bo"], ["cz"], ["dw", "ax", "ax"]), found, strict=True):
        scores = index.get_scores_from_ids(index.get_tokens_ids(words))
        ranked = sorted((-s, row) for row, s in enumerate(scores.tolist()) if s > 0)[:k]
        assert [(-hit.score, int(hit.document.id)) for hit in hits] == ranked
