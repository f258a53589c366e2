"""Filling a collection of Milvus Lite: resumed at any row, refused for another corpus."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.engines.remote import Address, Collection, connect
from search_r1.retrieval.errors import CorpusError, IndexMismatch, SearchError, SetupError
from search_r1.retrieval.index.remote_builder import _num_complete
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from tests.retrieval.conftest import TEXTS, write_corpus

NUM_ROWS = len(TEXTS)


@pytest.fixture
def config(corpus_path: Path, tmp_path: Path) -> BuildConfig:
    uri = f"milvus:{tmp_path}/file.db/cities"
    return BuildConfig("e5", str(corpus_path), to=uri, model_path="hash", shard_rows=3)


def open_collection(config: BuildConfig) -> Collection:
    collection = connect(Address.parse("--to", config.to), 10)
    collection.load()
    return collection


@pytest.mark.parametrize("kept", [0, 1, 3, 4, NUM_ROWS])
def test_a_fill_continues_where_it_was_killed(config: BuildConfig, kept: int) -> None:
    """Whatever rows are missing at the end, the same command makes the collection whole."""
    build_index(config)
    open_collection(config).delete_from(kept)
    assert open_collection(config).count() == kept
    build_index(config)
    corpus, encoder = config.corpus_path, EncoderConfig("hash")
    settings = RetrieverConfig("milvus", corpus, config.to, verify=True, encoder=encoder)
    assert build_retriever(settings).num_documents == NUM_ROWS


def test_an_unfinished_collection_is_not_served(config: BuildConfig) -> None:
    """The error names the command that finishes it."""
    build_index(config)
    open_collection(config).delete_from(5)
    with pytest.raises(IndexMismatch, match="search-r1 index --to milvus:"):
        build_retriever(
            RetrieverConfig("milvus", index_path=config.to, encoder=EncoderConfig("hash"))
        )


@pytest.mark.parametrize(
    "present",
    [set(), {0}, {0, 1, 2}, {0, 1, 2, 3}, {1, 2}, {0, 1, 2, 6}, {3, 4, 5}, set(range(8))],
)
def test_only_whole_blocks_from_the_first_count(present: set[int]) -> None:
    """Rows that a parallel insert stored out of order are inserted again."""

    class Rows:
        def count(self, below: int | None = None) -> int:
            return sum(row < (8 if below is None else below) for row in present)

    expected = 8 if len(present) == 8 else 3 if present >= {0, 1, 2} else 0
    assert _num_complete(Rows(), 8, 3) == expected  # type: ignore[arg-type]


def changed_corpus(folder: Path) -> str:
    return str(write_corpus(folder / "other.jsonl", TEXTS[1:]))


def long_corpus(folder: Path) -> str:
    return str(write_corpus(folder / "long.jsonl", [("Long", "é" * 40_000)]))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda folder: {"corpus_path": changed_corpus(folder)}, IndexMismatch),
        (lambda folder: {"model_path": "hash:32"}, IndexMismatch),
        (lambda folder: {"max_length": 7}, IndexMismatch),
        (lambda folder: {"faiss_type": "HNSW32"}, IndexMismatch),
        (lambda folder: {"save_dir": "x"}, SetupError),
        (lambda folder: {"to": None}, SetupError),
        (lambda folder: {"model_path": None}, SetupError),
        (lambda folder: {"devices": ("cpu", "cpu")}, SetupError),
    ],
)
def test_a_collection_is_never_mixed(
    config: BuildConfig, tmp_path: Path, change: Callable[[Path], dict], error: type[SearchError]
) -> None:
    """Another corpus, encoder, limit or index, and contradictory options, change nothing."""
    build_index(config)
    with pytest.raises(error):
        build_index(replace(config, **change(tmp_path)))
    assert open_collection(config).count() == NUM_ROWS


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda folder: {"corpus_path": long_corpus(folder)}, CorpusError),
        (lambda folder: {"faiss_type": "SQ8"}, SetupError),
        (lambda folder: {"faiss_type": "HNSW64,SQ8"}, SetupError),
    ],
)
def test_what_the_engine_cannot_hold_is_refused_first(
    config: BuildConfig, tmp_path: Path, change: Callable[[Path], dict], error: type[SearchError]
) -> None:
    """Before a collection is made."""
    with pytest.raises(error):
        build_index(replace(config, **change(tmp_path)))
    assert connect(Address.parse("--to", config.to), 10).read_description() is None


def test_embeddings_of_a_file_are_inserted(config: BuildConfig, tmp_path: Path) -> None:
    """They are compared with the encoder first."""
    local = replace(config, to=None, save_dir=str(tmp_path / "local"), save_embedding=True)
    build_index(local)
    file = tmp_path / "local" / "e5_embeddings.npy"
    build_index(replace(config, embedding_path=str(file)))
    assert open_collection(config).count() == NUM_ROWS
    np.save(file, np.load(file)[::-1])
    with pytest.raises(IndexMismatch):
        build_index(replace(config, embedding_path=str(file), to=f"{config.to}2"))
