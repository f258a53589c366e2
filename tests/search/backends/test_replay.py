"""Replay: recorded answers without the engine, and a typed error for all others."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from search_r1.search.backends import replay
from search_r1.search.backends.base import Retriever, fingerprint
from search_r1.search.backends.registry import build_retriever
from search_r1.search.errors import QueryNotRecorded, SetupError
from search_r1.search.recording import Record, Recorder
from search_r1.search.schema import Document, Hit
from search_r1.search.settings import DiagnosticConfig, RetrieverConfig


def record(path: Path, engine: Retriever, queries: Sequence[str], k: int) -> None:
    recorder = Recorder(path, engine.info())
    hits = engine.search(queries, k)
    recorder.write([Record(q, k, h, 0.25) for q, h in zip(queries, hits, strict=True)])
    recorder.close()


def open_replay(path: Path, latency: bool = False) -> Retriever:
    diagnostics = DiagnosticConfig(replay_path=str(path), replay_latency=latency)
    return build_retriever(RetrieverConfig("replay", diagnostics=diagnostics))


@pytest.mark.parametrize("name", ["bm25", "hash", "empty"])
def test_answers_as_the_engine_did(
    tmp_path: Path, open_engine: Callable[[str], Retriever], queries: list[str], name: str
) -> None:
    """Documents and scores equal the engine's bit for bit, in any order and repetition."""
    engine = open_engine(name)
    record(tmp_path / "r", engine, queries, 3)
    asked = queries[::-1] + queries[:2]
    assert open_replay(tmp_path / "r").search(asked, 3) == engine.search(asked, 3)


def test_a_smaller_k_is_a_prefix_of_the_nearest_larger(tmp_path: Path) -> None:
    """k = 2 comes from k = 3, not from k = 5, though both were recorded; k = 6 from none."""
    documents = [Document.from_contents(str(i), "text") for i in range(10)]
    recorder = Recorder(tmp_path / "r", {"engine": "fake"})
    for k, first in ((5, 5), (3, 0), (1, 9)):
        hits = [Hit(document, 1.0) for document in documents[first : first + k]]
        recorder.write([Record("q", k, hits, 0.0)])
    recorder.close()
    engine = open_replay(tmp_path / "r")
    found = {k: [h.document.id for h in engine.search(["q"], k)[0]] for k in (1, 2, 3, 4, 5)}
    assert found == {1: ["9"], 2: ["0", "1"], 3: ["0", "1", "2"], 4: list("5678"), 5: list("56789")}
    with pytest.raises(QueryNotRecorded, match="only with k = 5"):
        engine.search(["q"], 6)
    assert engine.num_documents == 8


def test_other_queries_are_a_typed_error(
    tmp_path: Path, open_engine: Callable[[str], Retriever]
) -> None:
    """A query that differs by a space is named in the error, never answered with nothing."""
    record(tmp_path / "r", open_engine("bm25"), ["capital of France"], 3)
    with pytest.raises(QueryNotRecorded, match="'capital of  France' with k = 3 is recorded not"):
        open_replay(tmp_path / "r").search(["capital of  France"], 3)


def test_waits_as_long_as_the_slowest_recorded_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --replay_latency a batch waits once, for its slowest query; without it, never."""
    clock = [100.0]
    waits: list[float] = []
    monkeypatch.setattr(replay.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(replay.time, "sleep", waits.append)
    recorder = Recorder(tmp_path / "r", {"engine": "fake"})
    recorder.write([Record(q, 1, [], s) for q, s in (("a", 0.25), ("b", 4.0), ("c", 1.0))])
    recorder.close()
    open_replay(tmp_path / "r").search(["a", "b", "c"], 1)
    assert waits == []
    engine = open_replay(tmp_path / "r", latency=True)
    engine.search(["a", "b", "c"], 1)
    engine.search([], 1)
    assert waits == [4.0]


def test_threads_read_their_own_answers(tmp_path: Path) -> None:
    """Concurrent searches never get each other's lines, long or short."""
    recorder = Recorder(tmp_path / "r", {"engine": "fake"})
    texts = {f"q{i}": f"{i} " * (i * 400) for i in range(40)}
    for query, text in texts.items():
        hit = Hit(Document.from_contents(query, text), 1.0)
        recorder.write([Record(query, 1, [hit], 0.0)])
    recorder.close()
    engine = open_replay(tmp_path / "r")
    wrong: list[str] = []

    def ask(shift: int) -> None:
        for i in range(40):
            query = f"q{(i * 7 + shift) % 40}"
            document = engine.search([query], 1)[0][0].document
            if (document.id, document.contents) != (query, texts[query]):
                wrong.append(query)

    threads = [threading.Thread(target=ask, args=(shift,)) for shift in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_facts_tell_records_apart(tmp_path: Path, open_engine: Callable[[str], Retriever]) -> None:
    """Equal answers have one fingerprint whatever the path and latency; others have another."""
    engine = open_engine("bm25")
    record(tmp_path / "a", engine, ["river"], 3)
    record(tmp_path / "b", engine, ["river"], 3)
    record(tmp_path / "c", engine, ["river", "city"], 3)
    marks = [fingerprint(open_replay(tmp_path / name).info()) for name in "abc"]
    assert marks[0] == marks[1] != marks[2]
    assert open_replay(tmp_path / "a").info()["recorded"] == engine.info()


def test_missing_paths_are_setup_errors(tmp_path: Path) -> None:
    """Without a path, and without a file there, the error names the flag or the file."""
    with pytest.raises(SetupError, match="--replay_path"):
        build_retriever(RetrieverConfig("replay"))
    with pytest.raises(SetupError, match="nowhere"):
        open_replay(tmp_path / "nowhere")
