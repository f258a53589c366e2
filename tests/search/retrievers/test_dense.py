"""Dense search against brute force, and the choice of GPU."""

from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

from search_r1.search.corpus import Corpus
from search_r1.search.encoder import HashEncoder
from search_r1.search.errors import SetupError
from search_r1.search.retrievers.base import Retriever
from search_r1.search.retrievers.registry import build_retriever
from search_r1.search.retrievers.settings import EncoderConfig, FaissConfig, RetrieverConfig


@pytest.mark.parametrize("k", [1, 3, 8, 50])
def test_top_k_is_brute_force(
    corpus_path: Path, open_engine: Callable[[str], Retriever], queries: list[str], k: int
) -> None:
    """Scores are the k largest inner products, and each hit has its own document's score."""
    encoder, corpus = HashEncoder(), Corpus.open(corpus_path)
    passages = encoder.encode_passages([document.contents for document in corpus])
    for query, hits in zip(queries, open_engine("hash").search(queries, k), strict=True):
        vector = encoder.encode_queries([query])[0]
        products = {d.id: float(np.dot(p, vector)) for d, p in zip(corpus, passages, strict=True)}
        assert len(hits) == min(k, len(corpus))
        best = sorted(products.values(), reverse=True)[:k]
        assert [hit.score for hit in hits] == pytest.approx(best, abs=1e-6)
        for hit in hits:
            assert hit.score == pytest.approx(products[hit.document.id], abs=1e-6)


def test_bare_faiss_file_is_served(corpus_path: Path, tmp_path: Path) -> None:
    """A published index is one FAISS file without our manifest."""
    encoder = HashEncoder()
    index = faiss.IndexFlatIP(64)
    index.add(encoder.encode_passages([document.contents for document in Corpus.open(corpus_path)]))
    faiss.write_index(index, str(tmp_path / "e5_Flat.index"))
    config = RetrieverConfig("e5", str(corpus_path), str(tmp_path), encoder=EncoderConfig("hash"))
    hits = build_retriever(config).search(["capital of Hungary, Budapest"], 1)
    assert hits[0][0].document.id == "d7"


@pytest.mark.skipif(getattr(faiss, "get_num_gpus", int)() > 0, reason="FAISS sees a GPU")
def test_gpu_without_gpu_is_refused(
    corpus_path: Path, open_engine: Callable[[str], Retriever]
) -> None:
    """--faiss_gpu never falls back silently."""
    open_engine("hash")
    folder = str(corpus_path.parent / "built")
    config = RetrieverConfig(
        "hash",
        str(corpus_path),
        folder,
        faiss=FaissConfig(faiss_gpu=True),
        encoder=EncoderConfig("hash"),
    )
    with pytest.raises(SetupError, match="sees no GPU"):
        build_retriever(config)
