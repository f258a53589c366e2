"""Replay: kept answers without the backend, and an error for queries that were not searched."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from search_r1.retrieval.engines import replay
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.kept import KeepingRetriever, to_value
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import QueryNotRecorded, SetupError
from search_r1.retrieval.schema import Document, Hit, fingerprint
from search_r1.retrieval.settings import DiagnosticConfig, RetrieverConfig
from search_r1.store import FileStore


def record(path: Path, engine: Retriever, queries: Sequence[str], k: int) -> None:
    with contextlib.closing(FileStore(path, "record")) as store:
        KeepingRetriever(engine, store, lambda count: None).search(queries, k)


def write(path: Path, *results: tuple[str, int, list[Hit], float]) -> None:
    """Write results of a backend: query, k, hits and seconds."""
    with contextlib.closing(FileStore(path, "record")) as store:
        for query, k, hits, seconds in results:
            store.put({("0", "fake", k, query): to_value(hits, seconds)})


def open_replay(path: Path, latency: bool = False) -> Retriever:
    diagnostics = DiagnosticConfig(replay_path=str(path), replay_latency=latency)
    return build_retriever(RetrieverConfig("replay", diagnostics=diagnostics))


@pytest.mark.parametrize("name", ["bm25", "hash", "empty"])
def test_answers_as_the_engine_did(
    tmp_path: Path, open_engine: Callable[[str], Retriever], queries: list[str], name: str
) -> None:
    """Documents and scores equal those recorded, bit for bit, for queries in any order."""
    engine = open_engine(name)
    record(tmp_path / "r", engine, queries, 3)
    repeated = queries[::-1] + queries[:2]
    assert open_replay(tmp_path / "r").search(repeated, 3) == engine.search(repeated, 3)


def test_a_smaller_k_is_a_prefix_of_the_nearest_larger(tmp_path: Path) -> None:
    """With k = 3 and 5 recorded, k = 2 gets the first hits of k = 3, and k = 6 is an error."""
    documents = [Document.from_contents(str(i), "text") for i in range(10)]
    for k, first in ((5, 5), (3, 0), (1, 9)):
        hits = [Hit(document, 1.0) for document in documents[first : first + k]]
        write(tmp_path / "r", ("q", k, hits, 0.0))
    engine = open_replay(tmp_path / "r")
    found = {k: [h.document.id for h in engine.search(["q"], k)[0]] for k in (1, 2, 3, 4, 5)}
    assert found == {1: ["9"], 2: ["0", "1"], 3: ["0", "1", "2"], 4: list("5678"), 5: list("56789")}
    with pytest.raises(QueryNotRecorded, match="only with k = 5"):
        engine.search(["q"], 6)
    assert engine.num_documents == 8


def test_other_queries_are_a_typed_error(
    tmp_path: Path, open_engine: Callable[[str], Retriever]
) -> None:
    """A query that differs by a space raises an error that names it; it does not get no hits."""
    record(tmp_path / "r", open_engine("bm25"), ["capital of France"], 3)
    with pytest.raises(QueryNotRecorded, match="'capital of  France' with k = 3 is recorded not"):
        open_replay(tmp_path / "r").search(["capital of  France"], 3)


def test_waits_as_long_as_the_slowest_recorded_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --replay_latency a batch waits once, as long as its slowest query took."""
    clock = [100.0]
    waits: list[float] = []
    monkeypatch.setattr(replay.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(replay.time, "sleep", waits.append)
    write(tmp_path / "r", *((q, 1, [], s) for q, s in (("a", 0.25), ("b", 4.0), ("c", 1.0))))
    open_replay(tmp_path / "r").search(["a", "b", "c"], 1)
    assert waits == []
    engine = open_replay(tmp_path / "r", latency=True)
    engine.search(["a", "b", "c"], 1)
    engine.search([], 1)
    assert waits == [4.0]


def test_threads_read_their_own_answers(tmp_path: Path) -> None:
    """Concurrent searches never get each other's answers, long or short."""
    texts = {f"q{i}": f"{i} " * (i * 400) for i in range(40)}
    documents = [Document.from_contents(query, text) for query, text in texts.items()]
    write(tmp_path / "r", *((d.id, 1, [Hit(d, 1.0)], 0.0) for d in documents))
    engine = open_replay(tmp_path / "r")
    wrong: list[str] = []

    def search_all(shift: int) -> None:
        for i in range(40):
            query = f"q{(i * 7 + shift) % 40}"
            document = engine.search([query], 1)[0][0].document
            if (document.id, document.contents) != (query, texts[query]):
                wrong.append(query)

    threads = [threading.Thread(target=search_all, args=(shift,)) for shift in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_facts_tell_records_apart(tmp_path: Path, open_engine: Callable[[str], Retriever]) -> None:
    """The fingerprint depends on the recorded answers, not on the path."""
    engine = open_engine("bm25")
    record(tmp_path / "a", engine, ["river"], 3)
    record(tmp_path / "b", engine, ["river"], 3)
    record(tmp_path / "c", engine, ["river", "city"], 3)
    fingerprints = [fingerprint(open_replay(tmp_path / name).info()) for name in "abc"]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert open_replay(tmp_path / "a").info()["recorded"] == engine.info()


def test_missing_paths_are_setup_errors(tmp_path: Path) -> None:
    """A missing flag and a missing file are errors that name them."""
    with pytest.raises(SetupError, match="--replay_path"):
        build_retriever(RetrieverConfig("replay"))
    with pytest.raises(SetupError, match="nowhere"):
        open_replay(tmp_path / "nowhere")


def test_a_file_of_several_backends_or_none_is_refused(
    tmp_path: Path, open_engine: Callable[[str], Retriever]
) -> None:
    """Results of two backends are never mixed."""
    record(tmp_path / "r", open_engine("bm25"), [], 3)
    with pytest.raises(SetupError, match="0 backends"):
        open_replay(tmp_path / "r")
    for name in ("bm25", "empty"):
        record(tmp_path / "r", open_engine(name), ["river"], 3)
    with pytest.raises(SetupError, match="2 backends"):
        open_replay(tmp_path / "r")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\n",
        b'{"id": "1", "contents": "a corpus"}\n',
        b'{"format": "search-r1-record", "version": 1, "facts": {"engine": "bm25"}}\n',
    ],
)
def test_other_files_are_refused_and_unchanged(tmp_path: Path, content: bytes) -> None:
    """An empty, foreign or malformed file is one line of error."""
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(SetupError) as caught:
        open_replay(tmp_path / "r")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    assert (tmp_path / "r").read_bytes() == content
