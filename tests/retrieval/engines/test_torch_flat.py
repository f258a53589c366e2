"""The torch backend over bare FAISS files and built folders, compared with the FAISS backend."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import HashEncoder
from search_r1.retrieval.engines.base import Retriever, collect
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.engines.torch_flat import TorchFlatIndex, load_and_measure_recall
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.schema import fingerprint
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig, TorchConfig
from tests.retrieval.engines.flat_indexes import brute_force, layout, random_rows, write


@pytest.fixture
def settings(corpus_path: Path, open_engine: Callable[[str], Retriever]) -> RetrieverConfig:
    """Return settings of the torch backend for a folder that index_builder made."""
    open_engine("hash")
    return RetrieverConfig(
        "hash",
        str(corpus_path),
        str(corpus_path.parent / "built"),
        encoder=EncoderConfig("hash"),
        torch=TorchConfig("torch", matrix_devices=("cpu",)),
    )


@pytest.mark.parametrize("k", [1, 3, 50])
def test_hits_are_the_faiss_engines(
    settings: RetrieverConfig, open_engine: Callable[[str], Retriever], queries: list[str], k: int
) -> None:
    """Documents and scores equal those of the FAISS backend for the same folder."""
    torch_hits = build_retriever(settings).search(queries, k)
    faiss_hits = open_engine("hash").search(queries, k)
    for a, b in zip(torch_hits, faiss_hits, strict=True):
        assert [hit.score for hit in a] == pytest.approx([hit.score for hit in b], abs=1e-6)
        assert len(a) == min(k, 8)
    exact = brute_force(*_vectors(settings, queries), k)[1]
    assert [[int(hit.document.id[1:]) for hit in hits] for hits in torch_hits] == exact.tolist()


def _vectors(settings: RetrieverConfig, queries: list[str]) -> tuple[np.ndarray, np.ndarray]:
    encoder, corpus = HashEncoder(), Corpus.open(str(settings.corpus_path))
    passages = encoder.encode_passages([document.contents for document in corpus])
    return encoder.encode_queries(queries), passages


def test_bare_file_is_served_in_every_dtype(corpus_path: Path, tmp_path: Path) -> None:
    """A bare FAISS file without a manifest, like the published indexes, can be searched."""
    index = faiss.IndexFlatIP(64)
    corpus = Corpus.open(corpus_path)
    index.add(HashEncoder().encode_passages([document.contents for document in corpus]))
    faiss.write_index(index, str(tmp_path / "e5_Flat.index"))
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        config = RetrieverConfig(
            "e5",
            str(corpus_path),
            str(tmp_path),
            encoder=EncoderConfig("hash"),
            torch=TorchConfig("torch", dtype, ("cpu", "cpu"), tile_rows=3),
        )
        hits = build_retriever(config).search(["capital of Hungary, Budapest"], 1)
        assert hits[0][0].document.id == "d7"


def test_recall_of_a_smaller_dtype_is_logged(
    settings: RetrieverConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The recall of int8 is logged at the start; for float32 there is nothing to log."""
    caplog.set_level(logging.INFO)
    build_retriever(settings)
    assert "recall@3" not in caplog.text
    config = replace(settings, torch=replace(settings.torch, matrix_dtype="int8"))
    assert build_retriever(config).info()["dtype"] == "int8"
    logged = re.search(
        r"recall@3 of int8 \(rescore 0\) against float32 on 8 probe queries: ([\d.]+)", caplog.text
    )
    assert logged is not None and 0.9 < float(logged[1]) <= 1


@pytest.mark.parametrize("tile_rows", [37, 1000])
def test_recall_is_that_of_brute_force(tmp_path: Path, tile_rows: int) -> None:
    """The recall measured while loading tiles equals the recall against numpy's exact top 3."""
    vectors = random_rows(20, 900, 6)
    queries = random_rows(21, 64, 6)
    flat = write(tmp_path / "flat", vectors)
    index = TorchFlatIndex(flat, layout("int8", ("cpu", "cpu"), tile_rows))
    measured = load_and_measure_recall(index, flat, queries)
    exact, found = brute_force(queries, vectors, 3)[1], index.search(queries, 3)[1]
    hits = sum(len(set(a) & set(b)) for a, b in zip(exact.tolist(), found, strict=True))
    assert measured == hits / (64 * 3) < 1


def test_time_is_reported_by_stage(settings: RetrieverConfig) -> None:
    """A search reports the time of each stage to the server."""
    retriever = build_retriever(settings)
    with collect() as seconds:
        retriever.search(["Danube"], 2)
    assert set(seconds) == {"encode", "search", "documents"}
    assert retriever.search([], 2) == []


def test_facts_change_with_what_decides_an_answer(settings: RetrieverConfig) -> None:
    """Dtype and rescore change the fingerprint; devices and tiles do not."""

    def fingerprint_with(**options: object) -> str:
        torch = replace(settings.torch, **options)
        return fingerprint(build_retriever(replace(settings, torch=torch)).info())

    default = fingerprint_with()
    assert fingerprint_with(tile_rows=2, matrix_devices=("cpu", "cpu")) == default
    int8 = fingerprint_with(matrix_dtype="int8")
    assert len({default, int8, fingerprint_with(matrix_dtype="int8", rescore=4)}) == 3


def test_index_that_is_not_flat_is_refused(settings: RetrieverConfig, tmp_path: Path) -> None:
    """The error names the kind of index and the backend that reads it."""
    index = faiss.IndexHNSWFlat(64, 4)
    index.add(random_rows(22, 8, 64))
    faiss.write_index(index, str(tmp_path / "hnsw"))
    with pytest.raises(SetupError, match="--dense_engine"):
        build_retriever(replace(settings, index_path=str(tmp_path / "hnsw")))
