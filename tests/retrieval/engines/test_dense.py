"""Dense search compared with brute force: kinds of indexes, their settings, bare files."""

from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import HashEncoder
from search_r1.retrieval.engines.base import Retriever, collect
from search_r1.retrieval.engines.faiss_index import FaissIndex
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import IndexMismatch, SetupError
from search_r1.retrieval.schema import fingerprint
from search_r1.retrieval.settings import EncoderConfig, FaissConfig, RetrieverConfig

DIM = 32


@pytest.mark.parametrize("k", [1, 3, 8, 50])
def test_top_k_is_brute_force(
    corpus_path: Path, open_engine: Callable[[str], Retriever], queries: list[str], k: int
) -> None:
    """Hits are the documents with the k largest inner products, ties by row."""
    encoder, corpus = HashEncoder(), Corpus.open(corpus_path)
    passages = encoder.encode_passages([document.contents for document in corpus])
    for query, hits in zip(queries, open_engine("hash").search(queries, k), strict=True):
        vector = encoder.encode_queries([query])[0].astype(np.float64)
        products = (passages @ vector).astype(np.float32)
        order = sorted(range(len(corpus)), key=lambda row: (-products[row], row))[:k]
        assert [hit.document for hit in hits] == corpus.documents(order)
        assert [hit.score for hit in hits] == pytest.approx(products[order].tolist(), abs=1e-7)


def test_stages_and_facts(open_engine: Callable[[str], Retriever]) -> None:
    """Time is reported by stage, and `info()` names index, encoder and corpus."""
    retriever = open_engine("hash")
    with collect() as seconds:
        retriever.search(["capital"], 1)
    assert set(seconds) == {"encode", "search", "documents"}
    facts = retriever.info()
    assert (facts["kind"], facts["dim"], facts["metric"]) == ("IndexFlatIP", 64, "ip")
    assert facts["encoder"] == HashEncoder().info()
    assert {"index", "corpus"} <= set(facts)


def vectors(count: int, seed: int) -> np.ndarray:
    """Return unit vectors (count, DIM) in 50 clusters, like texts on 50 subjects."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((50, DIM))
    rng = np.random.default_rng(seed)
    drawn = centres[rng.integers(0, 50, count)] + 1.5 * rng.standard_normal((count, DIM))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


PASSAGES, QUESTIONS = vectors(3000, 1), vectors(100, 2)
EXACT = np.argsort(-(QUESTIONS.astype(np.float64) @ PASSAGES.T), axis=1, kind="stable")[:, :3]


def saved(folder: Path, factory: str, metric: int = faiss.METRIC_INNER_PRODUCT) -> Path:
    """Save an index of PASSAGES of the given kind."""
    index = faiss.index_factory(DIM, factory, metric)
    index.train(PASSAGES)
    index.add(PASSAGES)
    faiss.write_index(index, str(folder / "some.index"))
    return folder / "some.index"


def recall(index: FaissIndex) -> float:
    """Return the fraction of the exact top 3 that is found."""
    rows = index.search(QUESTIONS, 3)[1]
    return float(np.mean([len(set(a) & set(b)) / 3 for a, b in zip(rows, EXACT, strict=True)]))


@pytest.mark.parametrize(
    ("factory", "config", "min_recall"),
    [
        ("Flat", FaissConfig(), 1.0),
        ("HNSW16", FaissConfig(ef_search=64), 0.97),
        ("HNSW16,SQ8", FaissConfig(ef_search=64), 0.9),
        ("IVF16,Flat", FaissConfig(nprobe=8), 0.95),
        ("IVF16,Flat", FaissConfig(nprobe=16), 1.0),
        ("IVF16_HNSW8,SQ8", FaissConfig(nprobe=8, ef_search=16), 0.9),
        ("SQ8", FaissConfig(), 0.95),
        ("SQfp16", FaissConfig(), 0.99),
        ("PQ16x5np", FaissConfig(), 0.5),
        ("RR32,IVF16,SQ8", FaissConfig(nprobe=8), 0.9),
        pytest.param("OPQ16,PQ16x6", FaissConfig(), 0.6, marks=pytest.mark.slow),
    ],
)
def test_recall_of_every_kind(
    tmp_path: Path, factory: str, config: FaissConfig, min_recall: float
) -> None:
    """An index of any factory string can be opened and reaches its minimum recall."""
    index = FaissIndex.open(saved(tmp_path, factory), config)
    assert (index.num_rows, index.dim) == (3000, DIM)
    assert recall(index) >= min_recall


def test_search_parameters_are_settings(tmp_path: Path) -> None:
    """nprobe and ef_search change the recall and the fingerprint."""
    lists = saved(tmp_path, "IVF64,Flat")
    few = FaissIndex.open(lists, FaissConfig())
    many = FaissIndex.open(lists, FaissConfig(nprobe=32))
    assert recall(few) < 0.9 < recall(many)
    assert (few.info()["nprobe"], many.info()["nprobe"]) == (1, 32)
    assert fingerprint(few.info()) != fingerprint(many.info())
    graph = saved(tmp_path, "HNSW4")
    few = FaissIndex.open(graph, FaissConfig(ef_search=3))
    many = FaissIndex.open(graph, FaissConfig(ef_search=200))
    assert recall(few) < recall(many)
    assert (few.info()["ef_search"], many.info()["ef_search"]) == (3, 200)


@pytest.mark.parametrize(
    ("factory", "config", "message"),
    [
        ("Flat", FaissConfig(nprobe=4), "--nprobe 4, but the index is IndexFlat.* an IVF index"),
        ("HNSW8", FaissConfig(nprobe=4), "--nprobe 4, but the index is IndexHNSWFlat"),
        ("IVF16,Flat", FaissConfig(ef_search=9), "--ef_search 9, but .* an HNSW index"),
        ("SQ8", FaissConfig(ef_search=9), "--ef_search 9, but the index is IndexScalarQuantizer"),
    ],
)
def test_settings_that_an_index_lacks_are_refused(
    tmp_path: Path, factory: str, config: FaissConfig, message: str
) -> None:
    """A search parameter that the index does not have is an error."""
    with pytest.raises(SetupError, match=message):
        FaissIndex.open(saved(tmp_path, factory), config)


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat"])
def test_distances_are_negative_scores(tmp_path: Path, factory: str) -> None:
    """The scores of an L2 index are negative squared distances, best first."""
    config = FaissConfig(nprobe=16) if factory != "Flat" else FaissConfig()
    index = FaissIndex.open(saved(tmp_path, factory, faiss.METRIC_L2), config)
    scores, rows = index.search(QUESTIONS, 3)
    assert index.metric == "l2"
    assert rows == EXACT.tolist()
    expected = -((QUESTIONS[:, None].astype(np.float64) - PASSAGES[EXACT]) ** 2).sum(axis=2)
    assert np.array(scores) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("k", [1, 5, 30])
def test_equal_vectors_rank_by_row_in_any_batch(tmp_path: Path, k: int) -> None:
    """Copies of a vector have equal scores and rank by row, for one query and in a batch."""
    index = faiss.IndexFlatIP(DIM)
    index.add(np.tile(PASSAGES[:100], (23, 1)))
    faiss.write_index(index, str(tmp_path / "copies.index"))
    opened = FaissIndex.open(tmp_path / "copies.index", FaissConfig())
    scores, rows = opened.search(QUESTIONS, k)
    best = np.argmax(QUESTIONS.astype(np.float64) @ PASSAGES[:100].T, axis=1)
    for i, row in enumerate(best):
        assert rows[i][:23] == [row + 100 * copy for copy in range(min(k, 23))]
        assert len(set(scores[i][:23])) == 1
        assert opened.search(QUESTIONS[i : i + 1], k) == ([scores[i]], [rows[i]])


def bare(corpus_path: Path, file: Path) -> RetrieverConfig:
    """Write a FAISS file without a manifest, like the published ones; return its settings."""
    encoder = HashEncoder()
    index = faiss.IndexHNSWFlat(64, 8, faiss.METRIC_INNER_PRODUCT)
    index.add(encoder.encode_passages([document.contents for document in Corpus.open(corpus_path)]))
    faiss.write_index(index, str(file))
    return RetrieverConfig("e5", str(corpus_path), str(file), encoder=EncoderConfig("hash"))


def test_a_bare_faiss_file_can_be_searched(corpus_path: Path, tmp_path: Path) -> None:
    """A bare FAISS file can be opened by its own path or by the folder that contains it."""
    config = bare(corpus_path, tmp_path / "e5_HNSW64.index")
    parent = RetrieverConfig("e5", str(corpus_path), str(tmp_path), encoder=EncoderConfig("hash"))
    retrievers = [build_retriever(c) for c in (config, parent)]
    for retriever in retrievers:
        hits = retriever.search(["capital of Hungary, Budapest"], 1)
        assert hits[0][0].document.id == "d7"
    assert fingerprint(retrievers[0].info()) == fingerprint(retrievers[1].info())


def test_misfits_are_refused(corpus_path: Path, tmp_path: Path) -> None:
    """A file that is not an index, or belongs to another corpus or encoder, is refused."""
    path = tmp_path / "e5_Flat.index"
    config = bare(corpus_path, path)
    narrow = RetrieverConfig("e5", str(corpus_path), str(path), encoder=EncoderConfig("hash:32"))
    with pytest.raises(IndexMismatch, match=r"has 64 dimensions.* gives 32"):
        build_retriever(narrow)
    short = tmp_path / "short.jsonl"
    short.write_text('{"id": "1", "contents": "a"}\n')
    other = RetrieverConfig("e5", str(short), str(path), encoder=EncoderConfig("hash"))
    with pytest.raises(IndexMismatch, match=r"holds 8 vectors.* has 1 documents"):
        build_retriever(other)
    path.write_bytes(b"no index")
    with pytest.raises(SetupError):
        build_retriever(config)


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
    with pytest.raises(SetupError):
        build_retriever(config)
