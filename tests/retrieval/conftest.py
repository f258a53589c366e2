"""A small corpus with ties and unusual characters, its indexes, and servers on real ports."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.kept import KeepingRetriever
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import (
    DiagnosticConfig,
    EncoderConfig,
    RetrieverConfig,
    TorchConfig,
)
from search_r1.store import FileStore
from tests.apps import running

TEXTS = [
    ("Paris", "Paris is the capital of France and lies on the river Seine."),
    ("Lyon", "Lyon is a city in France where two rivers meet."),
    ("Vienna", "Vienna is the capital of Austria on the river Danube, the Danube of the waltz."),
    ("Twin", "Identical passage about a capital city."),
    ("Twin", "Identical passage about a capital city."),
    ("Zürich", 'Zürich (the "Little Big City") is Swiss. 湖 \u2028 ends no line.'),
    ("Nothing", "the of and"),
    ("Budapest", "Budapest, capital of Hungary, lies on both banks of the Danube."),
]
QUERIES = [
    "capital of France",
    "Danube danube river",
    "identical city",
    "quokka",
    "the of",
    "",
    "Zürich 湖",
]


def write_corpus(path: Path, texts: list[tuple[str, str]] = TEXTS) -> Path:
    """Write a jsonl corpus with ids d0, d1 ..."""
    rows = [{"id": f"d{i}", "contents": f'"{t}"\n{x}'} for i, (t, x) in enumerate(texts)]
    lines = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the small corpus."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="session")
def open_engine(corpus_path: Path) -> Callable[[str], Retriever]:
    """A function that opens a backend over the small corpus by name; builds its index if needed."""

    def open_by_name(name: str) -> Retriever:
        folder = corpus_path.parent / "built"
        encoder = EncoderConfig("hash")
        if name in ("bm25", "hash", "torch"):
            method = "hash" if name == "torch" else name
            build_index(BuildConfig(method, str(corpus_path), str(folder), model_path="hash"))
            name, engine = method, TorchConfig("torch" if name == "torch" else "faiss")
            config = RetrieverConfig(
                name, str(corpus_path), str(folder), encoder=encoder, torch=engine
            )
            return build_retriever(config)
        diagnostics = _diagnostics(corpus_path, name, open_by_name)
        return build_retriever(RetrieverConfig(name, str(corpus_path), diagnostics=diagnostics))

    return open_by_name


def _diagnostics(
    corpus_path: Path, name: str, open_by_name: Callable[[str], Retriever]
) -> DiagnosticConfig:
    """Create the files that the backends `oracle` and `replay` need."""
    if name == "oracle":
        path = corpus_path.with_name("oracle.jsonl")
        documents = [{"id": "d0", "contents": '"Paris"\nParis is the capital of France.'}]
        row = {"question": QUERIES[0], "documents": documents}
        path.write_text(json.dumps(row) + "\n")
        return DiagnosticConfig(oracle_path=str(path))
    if name == "replay":
        path = corpus_path.with_name("record.sqlite")
        with contextlib.closing(FileStore(path, "record")) as store:
            engine = KeepingRetriever(open_by_name("bm25"), store, lambda count: None)
            for k in (3, 100):
                engine.search(QUERIES, k)
        return DiagnosticConfig(replay_path=str(path))
    return DiagnosticConfig()


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """The context manager `running`, for tests that start servers."""
    return running


@pytest.fixture(scope="session")
def queries() -> list[str]:
    """Queries with ties, repeated words, no match, only stop words, no text, and non-ASCII text."""
    return QUERIES
