"""Searches that a filter limits find what is left of a search of everything, by each engine."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.bm25 import Bm25Retriever
from search_r1.retrieval.engines.bm25_pruned import PrunedRanking
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.engines.rerank import Pair, RerankingRetriever
from search_r1.retrieval.errors import CorpusError, SetupError
from search_r1.retrieval.fields import Fields
from search_r1.retrieval.index_builder import AppendConfig, BuildConfig, build_index
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.schema import Hit
from search_r1.retrieval.settings import (
    EncoderConfig,
    FaissConfig,
    FusionConfig,
    RetrieverConfig,
    TorchConfig,
)
from tests.retrieval.with_fields import (
    FILTERS,
    NAMES,
    NUM_ROWS,
    QUERIES,
    best_left,
    filter_of,
    is_left,
    write_with_fields,
)

pytest.importorskip("faiss")
MODEL = "hash:32"
K = 4
ENGINES: dict[str, dict[str, Any]] = {
    "bm25": {},
    "flat": {},
    "ivf": {"faiss": FaissConfig(nprobe=3)},
    "hnsw": {"faiss": FaissConfig(ef_search=NUM_ROWS)},
    "pca": {},
    "torch": {"torch": TorchConfig("torch", tile_rows=16)},
    "int8": {"torch": TorchConfig("torch", matrix_dtype="int8", rescore=NUM_ROWS)},
}
FACTORIES = {"ivf": "IVF3,Flat", "hnsw": "HNSW16", "pca": "PCA16,Flat"}
NAMED = {"torch": "flat", "int8": "flat"}
"""Engines that search the index of another."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fields") / "corpus.jsonl"
    write_with_fields(path)
    return path


@pytest.fixture(scope="module")
def open_engine(corpus: Path) -> Callable[..., Any]:
    """Opens an engine over an index with fields, which it builds."""

    def open_by_name(name: str, **options: Any) -> Any:
        method, folder = NAMED.get(name, name), corpus.parent / "index"
        for part in method.split("+"):
            build_index(BuildConfig(part, str(corpus), str(folder), MODEL, filter_fields=NAMES,
                                    faiss_type=FACTORIES.get(part, "Flat")))  # fmt: skip
        return build_retriever(RetrieverConfig(
            method, str(corpus), str(folder), encoder=EncoderConfig(MODEL),
            **ENGINES.get(name, {}) | options,
        ))  # fmt: skip

    return open_by_name


def scores_of(found: Sequence[Sequence[Hit]]) -> list[list[float]]:
    """Return the scores; FAISS orders only those of a Flat index by rows where they are equal."""
    return [[hit.score for hit in hits] for hits in found]


@pytest.mark.parametrize("name", ENGINES)
def test_finds_the_best_that_are_left(
    name: str, corpus: Path, open_engine: Callable[..., Any]
) -> None:
    """Documents, order and scores, also where none or fewer than k are left."""
    engine = open_engine(name)
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert engine.filter_fields == NAMES
    sizes = set()
    for value in FILTERS:
        found = engine.filtered(filter_of(value)).search(QUERIES, K)
        expected = best_left(engine, rows, value, K)
        if name in FACTORIES:
            left = {row["id"] for row in rows if is_left(row, value)}
            assert {hit.document.id for hits in found for hit in hits} <= left, value
            for ours, theirs in zip(*map(scores_of, (found, expected)), strict=True):
                assert ours == pytest.approx(theirs, abs=1e-6), value
        else:
            assert found == expected, value
        sizes |= {len(hits) for hits in found}
    assert {0, K} <= sizes


def test_pruned_words_are_limited_too(corpus: Path, open_engine: Callable[..., Any]) -> None:
    """The engine of large indexes leaves out the same, in windows of a few rows too."""
    pytest.importorskip("numba")
    plain = open_engine("bm25")
    ranked_by = partial(PrunedRanking, window=16)
    pruned = Bm25Retriever(plain._index, plain.corpus, "folded", ranked_by)
    for value in FILTERS:
        allowed = plain.fields.mask(filter_of(value))
        assert pruned.rank(QUERIES, K, allowed) == plain.rank(QUERIES, K, allowed)
    assert pruned.rank(QUERIES, K) == plain.rank(QUERIES, K)


def test_a_hybrid_fuses_what_is_left(corpus: Path, open_engine: Callable[..., Any]) -> None:
    """Its ranks are those among the passages that are left."""
    hybrid = open_engine("bm25+flat", fusion=FusionConfig("ranks", (1.0, 1.0), NUM_ROWS))
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    for value in FILTERS:
        filter = filter_of(value)
        shares: list[dict[str, float]] = [{} for _ in QUERIES]
        for part in hybrid.parts.values():
            for found, hits in zip(shares, best_left(part, rows, value, NUM_ROWS), strict=True):
                for rank, hit in enumerate(hits if any(h.score for h in hits) else []):
                    found[hit.document.id] = found.get(hit.document.id, 0) + 1 / (61 + rank)
        for found, hits in zip(shares, hybrid.filtered(filter).search(QUERIES, K), strict=True):
            best = sorted(found.values(), reverse=True)[:K]
            assert [hit.score for hit in hits] == pytest.approx(best)
            assert all(found[h.document.id] == pytest.approx(h.score) for h in hits)


class ByLength:
    """A scorer that prefers long passages."""

    def scores(self, pairs: Sequence[Pair]) -> list[float]:
        return [float(len(contents)) for _, contents in pairs]

    def info(self) -> dict[str, Any]:
        return {}


def test_what_is_left_is_reranked(corpus: Path, open_engine: Callable[..., Any]) -> None:
    """And nothing else is read by the model."""
    engine = open_engine("bm25")
    reranked = RerankingRetriever(engine, ByLength(), NUM_ROWS)
    assert reranked.filter_fields == NAMES
    found = reranked.filtered(filter_of(FILTERS[1])).search(QUERIES, K)
    left = engine.filtered(filter_of(FILTERS[1])).search(QUERIES, NUM_ROWS)
    for hits, unranked in zip(found, left, strict=True):
        by_length = sorted(unranked, key=lambda hit: -len(hit.document.contents))[:K]
        assert [hit.document for hit in hits] == [hit.document for hit in by_length]
    assert len(reranked.search(["city"], NUM_ROWS)[0]) > max(map(len, left))  # itself as before


@pytest.mark.parametrize("rank", ["vectors", "words", "hybrid"])
def test_milvus_limits_each_ranking(rank: str, corpus: Path, tmp_path: Path) -> None:
    """With Milvus Lite: what FAISS, and BM25 in a folder, leave; what a hybrid finds is left."""
    pytest.importorskip("milvus_lite")
    uri, encoder = f"milvus:{tmp_path}/file.db/fields", EncoderConfig(MODEL)
    build_index(BuildConfig("flat", str(corpus), to=uri, model_path=MODEL, filter_fields=NAMES))
    settings = RetrieverConfig(
        "milvus", None, f"{uri}?rank={rank}",
        encoder=EncoderConfig() if rank == "words" else encoder,
    )  # fmt: skip
    engine: Any = build_retriever(settings)
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    assert engine.filter_fields == NAMES
    unfiltered = engine.search(QUERIES, K)
    for value in FILTERS:
        found = engine.filtered(filter_of(value)).search(QUERIES, K)
        left = {row["id"] for row in rows if is_left(row, value)}
        assert {hit.document.id for hits in found for hit in hits} <= left, value
        if rank != "hybrid":
            expected = best_left(engine, rows, value, K)
            for ours, theirs in zip(*map(scores_of, (found, expected)), strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5), value
        assert rank == "words" or {len(hits) for hits in found} == {min(K, len(left))}
    assert engine.search(QUERIES, K) == unfiltered


def test_rows_of_a_filter(corpus: Path) -> None:
    """The store, written and read again, is what each row says."""
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    fields = Fields.of(Corpus.open(corpus), NAMES)
    fields.save(corpus.parent)
    for read in (fields, Fields.open(corpus.parent, NUM_ROWS)):
        for value in FILTERS:
            expected = [is_left(row, value) for row in rows]
            assert np.array_equal(read.mask(filter_of(value)), expected), value
            assert read.mask(filter_of(value)) is read.mask(filter_of(value))
    assert [sum(is_left(row, value) for row in rows) for value in FILTERS[-2:]] == [0, 0]


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("yaer",), CorpusError),
        (("nested",), CorpusError),
        (("a=b",), SetupError),
        (("id",), CorpusError),
    ],
)
@pytest.mark.parametrize("method", ["bm25", "flat"])
def test_fields_that_cannot_be_kept(
    method: str, names: tuple[str, ...], error: type[Exception], tmp_path: Path
) -> None:
    """One of no row, an object, a name that cannot be told apart, and one of a malformed row."""
    path = tmp_path / "corpus.jsonl"
    row = {"id": "a", "contents": "a word or two", "nested": {"c": 1}, "a=b": 1}
    path.write_text(json.dumps(row) + ('\n["a"]' if names == ("id",) else ""))
    with pytest.raises(error, match=r"filter_fields|nested|row 2"):
        build_index(BuildConfig(method, str(path), str(tmp_path / "i"), MODEL, filter_fields=names))


def test_appended_passages_have_fields(tmp_path: Path) -> None:
    """Those of the new rows are kept in the corpus, and found by both indexes."""
    from search_r1.retrieval.index.appending import run  # noqa: PLC0415 - beside what it needs

    rows = write_with_fields(tmp_path / "all.jsonl")
    corpus, new, folder = (tmp_path / name for name in ("corpus.jsonl", "new.jsonl", "index"))
    corpus.write_text("\n".join(map(json.dumps, rows[:100])))
    new.write_text("\n".join(map(json.dumps, rows[100:])))
    build_index(BuildConfig("bm25+flat", str(corpus), str(folder), MODEL, filter_fields=NAMES))
    run(AppendConfig(str(new), str(corpus), str(folder), MODEL))
    for name in ("bm25", "flat_Flat.index"):
        assert Manifest.load(folder / name).filter_fields == NAMES
        fields = Fields.open(folder / name, NUM_ROWS)
        for value in FILTERS:
            expected = [is_left(row, value) for row in rows]
            assert np.array_equal(fields.mask(filter_of(value)), expected), value
