"""A small corpus with ties and odd characters, its indexes, and real servers on real ports."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from search_r1.search.index_builder import BuildConfig, build_index
from search_r1.search.retrieval_server import bind
from search_r1.search.retrievers.base import Retriever
from search_r1.search.retrievers.registry import build_retriever
from search_r1.search.retrievers.settings import EncoderConfig, RetrieverConfig

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
    """A jsonl corpus with ids d0, d1 ..."""
    rows = [{"id": f"d{i}", "contents": f'"{t}"\n{x}'} for i, (t, x) in enumerate(texts)]
    lines = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small corpus on disk."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="session")
def open_engine(corpus_path: Path) -> Callable[[str], Retriever]:
    """Builds and opens an engine over the small corpus by name."""

    def open_by_name(name: str) -> Retriever:
        if name == "empty":
            return build_retriever(RetrieverConfig("empty"))
        folder = corpus_path.parent / "built"
        build_index(BuildConfig(name, str(corpus_path), str(folder), model_path="hash"))
        encoder = EncoderConfig("hash")
        config = RetrieverConfig(name, str(corpus_path), str(folder), encoder=encoder)
        return build_retriever(config)

    return open_by_name


@contextmanager
def running(app: Any, port: int = 0) -> Iterator[str]:
    """The base address of `app`, served by uvicorn on a port (0: a free one) in a thread."""
    bound = bind("127.0.0.1", port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """`running`, for tests that start servers of their own."""
    return running


@pytest.fixture(scope="session")
def queries() -> list[str]:
    """Queries with ties, repeated words, no match, stop words only, nothing, and no ASCII."""
    return QUERIES
