"""Random documents: always the same for a query, equally likely, and from the corpus."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.diagnostics import draw_rows
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.schema import fingerprint
from search_r1.retrieval.settings import DiagnosticConfig, RetrieverConfig


def open_random(corpus_path: Path, seed: int = 0) -> Retriever:
    diagnostics = DiagnosticConfig(seed=seed)
    return build_retriever(RetrieverConfig("random", str(corpus_path), diagnostics=diagnostics))


def ids(engine: Retriever, query: str, k: int) -> list[str]:
    return [hit.document.id for hit in engine.search([query], k)[0]]


@given(st.integers(0, 2**128), st.integers(0, 40), st.integers(0, 60))
def test_draws_different_rows(seed: int, num_rows: int, k: int) -> None:
    """Rows exist and are different; a smaller k gets a prefix of those of a larger k."""
    rows = draw_rows(seed, num_rows, k)
    assert len(rows) == len(set(rows)) == min(k, num_rows)
    assert set(rows) <= set(range(num_rows))
    assert draw_rows(seed, num_rows, k + 5)[:k] == rows[:k]


def test_all_rows_are_equally_likely() -> None:
    """Over 6,000 seeds each row has each rank as often as in a fair draw (within 4 sigma)."""
    for rank in (0, 1, 2):
        counts = Counter(draw_rows(seed, 6, 3)[rank] for seed in range(6000))
        assert all(abs(counts[row] - 1000) < 4 * (6000 * 5 / 36) ** 0.5 for row in range(6))


def test_a_query_always_gets_the_same_documents(corpus_path: Path, queries: list[str]) -> None:
    """Documents and scores are equal alone, in a batch, and from another backend object."""
    engine = open_random(corpus_path)
    batch = engine.search(queries, 3)
    assert batch == [engine.search([query], 3)[0] for query in queries]
    assert batch == open_random(corpus_path).search(queries, 3)
    assert [hit.score for hit in batch[0]] == [1, 1 / 2, 1 / 3]


def test_seed_and_query_decide(corpus_path: Path) -> None:
    """Another seed or another query draws other documents (at least once in 20 queries)."""
    engine, other = open_random(corpus_path), open_random(corpus_path, seed=1)
    questions = [f"question {i}" for i in range(20)]
    drawn = [ids(engine, question, 3) for question in questions]
    assert len(set(map(tuple, drawn))) > 1
    assert drawn != [ids(other, question, 3) for question in questions]
    assert fingerprint(engine.info()) != fingerprint(other.info())


def test_never_more_than_the_corpus_has(corpus_path: Path) -> None:
    """A k above the number of documents returns every document once."""
    engine = open_random(corpus_path)
    assert sorted(ids(engine, "anything", 99)) == [f"d{i}" for i in range(engine.num_documents)]


def test_needs_a_corpus() -> None:
    """Without --corpus_path the error names the flag."""
    with pytest.raises(SetupError, match="--corpus_path"):
        build_retriever(RetrieverConfig("random"))
