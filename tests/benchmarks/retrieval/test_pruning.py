"""The corpus of the comparison, and a difference between the engines."""

from pathlib import Path

import pytest

from benchmarks.retrieval.pruning import compare, recombine
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.bm25 import Bm25Retriever
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import RetrieverConfig
from tests.retrieval.conftest import TEXTS, write_corpus


def engine(folder: Path, corpus: Path) -> Bm25Retriever:
    build_index(BuildConfig("bm25", str(corpus), str(folder)))
    return Bm25Retriever.open(folder / "bm25", Corpus.open(corpus), RetrieverConfig())


def test_recombined_passages_and_a_difference(tmp_path: Path) -> None:
    """The first rows are the source's, and all sentences; another ranking is not overlooked."""
    source = write_corpus(tmp_path / "source.jsonl", TEXTS)
    recombine(source, tmp_path / "many.jsonl", 40)
    rows, first = [*Corpus.open(tmp_path / "many.jsonl")], [*Corpus.open(source)]
    assert len(rows) == 40
    assert [(r.title, r.text) for r in rows[: len(first)]] == [(r.title, r.text) for r in first]
    assert {row.title for row in rows} == {row.title for row in first}
    one = engine(tmp_path / "one", tmp_path / "many.jsonl")
    assert set(compare({"all": one, "pruned": one}, ["capital", "Danube"], 3, None)) == {
        "all",
        "pruned",
    }
    other = engine(tmp_path / "other", source)
    with pytest.raises(AssertionError):
        compare({"all": one, "pruned": other}, ["capital", "Danube"], 3, None)
