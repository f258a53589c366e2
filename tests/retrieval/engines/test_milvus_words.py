"""Words in Milvus: BM25 as the one in a folder, alone and beside vectors; with Milvus Lite."""

from pathlib import Path

import pytest

from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import CorpusError, IndexMismatch
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from tests.retrieval.conftest import QUERIES, TEXTS, write_corpus

CHINESE = [
    ("北京", "北京是中国的首都。"),
    ("红楼梦", "《红楼梦》的作者是曹雪芹。"),
    ("Bogotá", "A capital."),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Cities in English, and passages in Chinese."""
    return str(write_corpus(tmp_path_factory.mktemp("words") / "corpus.jsonl", [*TEXTS, *CHINESE]))


def fill(method: str, corpus: str, folder: Path) -> str:
    uri = f"milvus:{folder}/file.db/cities"
    build_index(BuildConfig(method, corpus, to=uri, model_path="hash" if method == "e5" else None))
    return uri


def test_words_rank_as_in_a_folder(corpus: str, tmp_path: Path) -> None:
    """Documents, order and scores; accents and scripts without spaces too; nothing for no word."""
    remote = build_retriever(RetrieverConfig("milvus", None, fill("bm25", corpus, tmp_path)))
    local = build_retriever(RetrieverConfig("bm25", corpus))
    queries = [*QUERIES, "中国的首都是哪里", "红楼梦的作者是谁", "BOGOTA"]
    for query, theirs, ours in zip(queries, remote.search(queries, 3), local.search(queries, 3),
                                   strict=True):  # fmt: skip
        kept = [hit for hit in ours if hit.score > 0]
        assert [hit.document for hit in theirs] == [hit.document for hit in kept], query
        ratios = {round(a.score / b.score, 3) for a, b in zip(theirs, kept, strict=True)}
        assert len(ratios) <= 1, query
    assert remote.search(["the of", "zyzzyva"], 3) == [[], []]


def test_a_hybrid_fuses_words_and_vectors(corpus: str, tmp_path: Path) -> None:
    """One collection gives three rankings; the fused one finds what words alone find."""
    uri, encoder = fill("e5", corpus, tmp_path), EncoderConfig("hash")
    hybrid = build_retriever(RetrieverConfig("milvus", None, f"{uri}?rank=hybrid", encoder=encoder))
    found = [hit.document for hit in hybrid.search(["曹雪芹"], len(TEXTS))[0]]
    [word] = build_retriever(RetrieverConfig("milvus", None, f"{uri}?rank=words")).search(
        ["曹雪芹"], 1
    )
    assert word[0].document.title == "红楼梦" and word[0].document in found


def test_words_that_no_field_holds_are_refused_first(tmp_path: Path) -> None:
    """Bigrams of a long Chinese passage take more bytes than the passage."""
    path = write_corpus(tmp_path / "corpus.jsonl", [("长", "中国首都" * 4000)])
    with pytest.raises(CorpusError):
        fill("bm25", str(path), tmp_path)


def test_vectors_are_still_needed_where_there_are_no_words(corpus: str, tmp_path: Path) -> None:
    """A collection of words has no vectors to search."""
    uri = fill("bm25", corpus, tmp_path)
    with pytest.raises(IndexMismatch):
        build_retriever(RetrieverConfig("milvus", None, uri, encoder=EncoderConfig("hash")))
