"""Pruned BM25: the hits and scores of the plain engine, bit for bit."""

import json
from functools import partial
from pathlib import Path

import bm25s
import numpy as np
import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.bm25 import Bm25Retriever
from search_r1.retrieval.engines.bm25_pruned import MAX_K, PrunedRanking, open_pruned
from search_r1.retrieval.tokenization import tokenize

pytest.importorskip("numba")
EXAMPLE = Path(__file__).parents[3] / "example"


def made_up(path: Path, num_documents: int) -> tuple[list[list[str]], list[str]]:
    """Write a corpus of Zipf's words, in which every tenth text is a copy of the one before."""
    draw = np.random.default_rng(num_documents)
    texts: list[list[str]] = []
    for row in range(num_documents):
        words = [f"w{n}" for n in np.minimum(draw.zipf(1.3, draw.integers(1, 30)), 800)]
        texts.append(texts[-1] if row % 10 == 9 else words)
    lines = [json.dumps({"id": str(i), "contents": " ".join(t)}) for i, t in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    queries = [f"w{n} w{n + 3} w1 w2 w{40 * n} w1 absent" for n in range(1, 40)]
    return texts, [*queries, "w1", "w700", "w1 w1", "absent", " ".join(texts[0] * 20)]


@pytest.mark.parametrize("num_documents", [1, 63, 64, 3000])
@pytest.mark.parametrize("window", [1, 100, 1 << 15])
def test_ranks_as_the_plain_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_documents: int, window: int
) -> None:
    """Any number of windows, blocks of 64 rows and hits gives the same hits, in three threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    texts, queries = made_up(tmp_path / "corpus.jsonl", num_documents)
    index, corpus = bm25s.BM25(), Corpus.open(tmp_path / "corpus.jsonl")
    index.index(texts, show_progress=False)
    ranked_by = partial(PrunedRanking, window=window)
    plain, pruned = (Bm25Retriever(index, corpus, "folded", by) for by in (None, ranked_by))
    for k in (1, 3, 40, MAX_K + 1):
        assert pruned.rank(queries, k) == plain.rank(queries, k)


def test_ranks_real_questions_as_the_plain_engine() -> None:
    """The passages of the example, each the query for its neighbours, rank the same."""
    corpus = Corpus.open(EXAMPLE / "corpus.jsonl")
    texts = [document.contents for document in corpus.documents(range(len(corpus)))]
    index = bm25s.BM25()
    index.index(tokenize(texts), show_progress=False)
    plain, pruned = (Bm25Retriever(index, corpus, "folded", by) for by in (None, open_pruned))
    assert isinstance(pruned._rank, PrunedRanking)
    assert pruned.rank(texts[::20], 5) == plain.rank(texts[::20], 5)
