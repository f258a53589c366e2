"""The wire contract with every backend on real ports, and the server's command line."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from search_r1.retrieval import server as retrieval_server
from search_r1.retrieval.command import main
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.kept import result_keys
from search_r1.retrieval.errors import RetrieverUnavailable, SetupError
from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.schema import Document, Hit, fingerprint
from search_r1.retrieval.server import bind, create_app
from search_r1.retrieval.service.running import warn_if_open
from search_r1.retrieval.settings import ServiceConfig
from search_r1.store import FileStore
from tests.retrieval.conftest import write_corpus

FIELDS = {"id", "title", "text", "contents"}
HTTP = httpx.Client(timeout=30, trust_env=False)
"""Client that opens up to 100 connections."""


@pytest.fixture(scope="module", autouse=True)
def _close_connections() -> Iterator[None]:
    yield
    HTTP.close()


ENGINES = ["bm25", "hash", "torch", "empty", "random", "oracle", "replay"]
"""Every backend that needs neither a network nor a model."""


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, open_engine: Callable[[str], Retriever]) -> Retriever:
    return open_engine(request.param)


@pytest.fixture(scope="module")
def url(engine: Retriever, serve: Callable[..., Any]) -> Iterator[str]:
    with serve(create_app(engine, ServiceConfig(topk=2))) as address:
        yield address


def post(url: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return HTTP.post(f"{url}/retrieve", content=content, headers=headers)


@pytest.mark.parametrize("num_queries", [0, 1, 2, 3])
def test_line_18_both_formats_for_every_count(
    url: str, engine: Retriever, queries: list[str], num_queries: int
) -> None:
    """Correctness line 18: the same documents with and without scores, for 0 to 3 queries."""
    asked = queries[:num_queries]
    scored = post(url, {"queries": asked, "topk": 3, "return_scores": True}).json()["result"]
    plain = post(url, {"queries": asked, "topk": 3, "return_scores": False}).json()["result"]
    assert [[hit["document"] for hit in hits] for hits in scored] == plain
    hits = engine.search(asked, 3) if asked else []
    assert [[d["id"] for d in hits] for hits in plain] == [[h.document.id for h in f] for f in hits]
    for hit in (hit for hits in scored for hit in hits):
        assert set(hit) == {"document", "score"}
        assert set(hit["document"]) == FIELDS
        assert isinstance(hit["score"], float)


def test_one_request_of_the_original_client_has_2560_queries(
    open_engine: Callable[[str], Retriever], serve: Callable[..., Any]
) -> None:
    """512 prompts with 5 dialogues each, in one request, are searched in batches of 256."""
    engine = open_engine("bm25")
    words = ["capital", "France", "Danube", "river", "Seine"]
    asked = [f"{words[i % 5]} {words[i % 3]} {i}" for i in range(2560)]
    with serve(create_app(engine)) as address:
        answer = post(address, {"queries": asked, "topk": 3, "return_scores": True})
        metrics = HTTP.get(f"{address}/metrics").text
    assert answer.status_code == 200, answer.text
    ids = [[hit["document"]["id"] for hit in hits] for hits in answer.json()["result"]]
    assert ids == [[hit.document.id for hit in hits] for hits in engine.search(asked, 3)]
    sizes = dict(re.findall(r'batch\w*_bucket\{le="([^"]+)"\} (\d+)', metrics))
    assert sizes["256.0"] == sizes["+Inf"] != "0"


def test_topk(url: str, engine: Retriever, queries: list[str]) -> None:
    """Without topk the server's default applies; a topk above the corpus size returns all hits."""
    for topk, body in [(2, {}), (2, {"topk": None}), (1, {"topk": 1}), (99, {"topk": 99})]:
        results = post(url, {"queries": queries, **body}).json()["result"]
        expected = engine.search(queries, topk)
        assert [[d["id"] for d in hits] for hits in results] == [
            [h.document.id for h in f] for f in expected
        ]


def test_unusual_queries_are_answered(url: str, engine: Retriever, queries: list[str]) -> None:
    """Empty, huge, non-ASCII and ill-formed queries are answered; unknown fields are ignored."""
    odd = ["", " ", "a" * 16_000, "湖\u2028\x00", "bad \ud800 half", *queries]
    answer = post(url, {"queries": odd, "unknown": 1})
    if engine.name == "replay":
        assert (answer.status_code, "is recorded" in answer.text) == (424, True)
        odd = queries
        answer = post(url, {"queries": odd, "unknown": 1})
    assert answer.status_code == 200
    assert len(answer.json()["result"]) == len(odd)


def test_health_and_info(url: str, engine: Retriever) -> None:
    """/health has the backend and the number of documents, /info all facts about it."""
    health = httpx.get(f"{url}/health").json()
    expected = {"retriever": engine.name, "num_documents": engine.num_documents}
    assert health == {"status": "ok", **expected}
    info = httpx.get(f"{url}/info").json()
    assert info["default_topk"] == 2
    assert info.items() >= json.loads(json.dumps(engine.info())).items()
    assert info["fingerprint"] == fingerprint(engine.info())
    assert "/retrieve" in httpx.get(f"{url}/openapi.json").json()["paths"]


class Fragile:
    """A backend that fails for concurrent calls and records the calling threads."""

    name = "fragile"
    num_documents = 1
    num_threads = 1

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self._lock = threading.Lock()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        assert self._lock.acquire(blocking=False), "two searches at once"
        self.threads.add(threading.get_ident())
        time.sleep(0.001)
        self._lock.release()
        return [[Hit(Document.from_contents(query, query), 1.0)] for query in queries]

    def info(self) -> dict[str, Any]:
        return {}


def test_the_backend_is_used_by_one_thread(serve: Callable[..., Any]) -> None:
    """Concurrent requests call the backend one at a time, always from the same thread."""
    engine = Fragile()
    with serve(create_app(engine)) as address, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: post(address, {"queries": [f"q{i}"]}), range(64)))
    assert [a.json()["result"][0][0]["id"] for a in answers] == [f"q{i}" for i in range(64)]
    assert len(engine.threads) == 1


def test_line_18_concurrent_clients_get_serial_answers(
    corpus_path: Path, queries: list[str], tmp_path: Path
) -> None:
    """Correctness line 18: 64 concurrent clients get exactly the bytes of a single client."""
    bodies = [
        {
            "queries": [queries[i % 7], queries[i % 5]],
            "topk": 1 + i % 4,
            "return_scores": i % 2 == 0,
        }
        for i in range(64)
    ]
    log = tmp_path / "logs" / "server.log"
    with LocalServer(["--corpus_path", str(corpus_path)], log_path=log) as server:
        serial = [post(server.url, body).content for body in bodies]
        with ThreadPoolExecutor(64) as pool:
            for _ in range(3):
                assert list(pool.map(lambda b: post(server.url, b).content, bodies)) == serial
        pid, address = server.pid, server.url
        assert httpx.get(f"{address}/health").json()["num_documents"] == 8
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "serving on http://127.0.0.1" in log.read_text()


def test_launch_script(corpus_path: Path, tmp_path: Path) -> None:
    """The launch script uses environment variables and passes its arguments on."""
    root = Path(__file__).resolve().parents[2]
    port_file = tmp_path / "port"
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PORT": "0"}
    environment |= {"CORPUS_PATH": str(corpus_path), "TOPK": "5"}
    command = ["bash", str(root / "retrieval_launch.sh"), "--port_file", str(port_file)]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        info = httpx.get(f"http://127.0.0.1:{port_file.read_text().strip()}/info").json()
    finally:
        process.terminate()
        status = process.wait(20)
    assert (info["retriever"], info["default_topk"]) == ("bm25", 5)
    assert status in (0, -signal.SIGTERM)


def test_shutdown_finishes_accepted_requests(corpus_path: Path, tmp_path: Path) -> None:
    """After SIGTERM under load, every request has a complete response or a closed connection.

    The log has no traceback, the exit status is 0, and the file has the answered queries.
    """
    kept, log = tmp_path / "kept.sqlite", tmp_path / "server.log"
    flags = ["--corpus_path", str(corpus_path), "--cache_path", str(kept)]
    answered, once = [], threading.Lock()

    def ask(i: int) -> None:
        try:
            answer = post(server.url, {"queries": [f"river {i}"]})
        except httpx.TransportError:
            return
        assert answer.status_code in (200, 503) and answer.json()
        if answer.status_code == 200:
            answered.append(f"river {i}")
        if len(answered) >= 100 and once.acquire(blocking=False):
            os.kill(server.pid, signal.SIGTERM)

    with LocalServer(flags, log_path=log) as server, ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(1000)))
    assert 100 <= len(answered) < 1000
    assert server.status == 0
    assert "Traceback" not in log.read_text()
    assert {key[-1] for key in result_keys(FileStore(kept, "kept"))} >= set(answered)


def test_shutdown_abandons_a_search_that_takes_too_long(tmp_path: Path) -> None:
    """After --drain its request gets 503 and the process ends."""
    record = tmp_path / "record"
    FileStore(record, "").put({("0", "slow", 3, "slow"): {"hits": [], "seconds": 60}})
    flags = ["--retriever_name", "replay", "--replay_path", str(record), "--replay_latency"]
    log = tmp_path / "server.log"
    with (
        LocalServer([*flags, "--drain", "0.1"], log_path=log) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(post, server.url, {"queries": ["slow"]})
        while b"retriever_pending 1" not in HTTP.get(f"{server.url}/metrics").content:
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGTERM)
        assert (answer.result().status_code, answer.result().headers["retry-after"]) == (503, "1")
        server.stop()
    assert server.status == 1 and "in the middle of a search" in log.read_text()


def app_of(monkeypatch: pytest.MonkeyPatch, *flags: str) -> TestClient:
    """Return a client of the app that the command would serve."""
    apps: list[Any] = []
    monkeypatch.setattr(retrieval_server, "serve", lambda app, *_: apps.append(app) or True)
    assert main(["--port", "0", *flags]) == 0
    return TestClient(apps[0])


def test_documents_by_id_come_from_the_searched_corpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They come from the opened corpus, even if the file is replaced later."""
    corpus = write_corpus(tmp_path / "c.jsonl")
    http = app_of(monkeypatch, "--corpus_path", str(corpus), "--retriever_name", "random")
    write_corpus(tmp_path / "other.jsonl", [("Other", "another text")]).replace(corpus)
    assert http.get("/document?id=d0").json()["document"]["title"] == "Paris"


def test_a_corpus_that_is_not_searched_is_opened_lazily(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A backend without a corpus starts even if the corpus file is invalid."""
    (tmp_path / "c.jsonl").touch()
    flags = ["--corpus_path", str(tmp_path / "c.jsonl"), "--retriever_name", "empty"]
    assert app_of(monkeypatch, *flags).get("/document?id=d0").status_code == 500


def test_the_token_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server uses RETRIEVER_TOKEN and does not log it."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("RETRIEVER_TOKEN", "hush-hush")
    http = app_of(monkeypatch, "--retriever_name", "empty")
    assert http.post("/retrieve", json={"queries": []}).status_code == 401
    headers = {"Authorization": "Bearer hush-hush"}
    assert http.get("/info", headers=headers).status_code == 200
    assert caplog.text and "hush" not in caplog.text


def test_a_port_file_replaces_only_files(tmp_path: Path) -> None:
    """The port file is renamed over an existing path, which must be a regular file."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SetupError):
        bind("127.0.0.1", 0, tmp_path / "fifo")
    (tmp_path / "file").write_text("1")
    bind("127.0.0.1", 0, tmp_path / "file").close()


def test_serving_a_network_without_a_token_warns(caplog: pytest.LogCaptureFixture) -> None:
    """A server without a token warns unless it is bound to this machine only."""
    with bind("0.0.0.0", 0) as everywhere, bind("127.0.0.1", 0) as here:
        warn_if_open(everywhere, "token")
        warn_if_open(here, None)
        assert not caplog.records
        warn_if_open(everywhere, None)
    assert "RETRIEVER_TOKEN" in caplog.text


def test_an_interrupt_ends_quietly(tmp_path: Path) -> None:
    """Ctrl-C stops the server without a traceback."""
    port_file = tmp_path / "port"
    flags = ["--retriever_name", "empty", "--port", "0", "--port_file", str(port_file)]
    command = [sys.executable, "-m", "search_r1.retrieval.command", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not port_file.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("files", "words", "expected"),
    [
        ((), (), ["bm25", "example/corpus.jsonl"]),
        (("wiki-18.jsonl", "e5_Flat.index", "bm25/"), (), ["e5", "wiki-18.jsonl", "e5_Flat.index"]),
        (("wiki-18.jsonl", "e5_HNSW64.index"), ("--faiss_gpu",), ["e5", "e5_HNSW64.index"]),
        (("wiki-18.jsonl", "bm25/"), (), ["bm25", "wiki-18.jsonl", "wiki-18/bm25"]),
        (("wiki-18.jsonl", "bm25/"), ("--corpus_path=mine",), ["example/corpus.jsonl", "=mine"]),
        (("wiki-18.jsonl",), (), []),
    ],
)
def test_launch_script_serves_what_was_downloaded(
    files: tuple[str, ...], words: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    """Unless anything is named; a corpus without an index is refused, not replaced in silence."""
    script = shutil.copy(Path(__file__).resolve().parents[2] / "retrieval_launch.sh", tmp_path)
    for file in ("example/corpus.jsonl", *(f"data/wiki-18/{name}" for name in files)):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if file.endswith("/") else path.touch()
    run = subprocess.run(["bash", script, *words], capture_output=True, text=True, check=False,
                         env={"PATH": "/usr/bin:/bin", "PYTHON": "echo"})  # fmt: skip
    assert run.returncode == (0 if expected else 2)
    assert all(part in run.stdout for part in expected)
    assert len(run.stderr.splitlines()) == int(not words or "--faiss_gpu" in words)


def test_launch_script_without_corpus() -> None:
    """Without a corpus the launch script says in one line how to get one."""
    root = Path(__file__).resolve().parents[2]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "false", "CORPUS_PATH": "/nowhere.jsonl"}
    command = ["bash", str(root / "retrieval_launch.sh")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 2
    assert "/nowhere.jsonl" in run.stderr and "example/corpus.jsonl" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_a_server_that_cannot_start_says_why() -> None:
    """LocalServer reports the server's error message at once."""
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable, match=r"nowhere\.jsonl"):
        LocalServer(["--corpus_path", "nowhere.jsonl"]).start()
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    "flags",
    [
        ["--topk", "101"],
        ["--max_pending", "5"],
        ["--port", "PORT"],
        ["--port", "70000"],
        ["--cache_path", "/nowhere/cache.sqlite"],
        ["--cache_path", "/dev/full"],
        ["--record", "record.jsonl"],
        ["--port_file", "/nowhere/port"],
        ["--port_file", "/tmp"],
        ["--port_file", ""],
        ["--batch_wait_ms", "60000"],
        ["--host", ""],
        ["--host", "ü" * 80],
        ["--drain", "inf"],
        ["--deadline", "nan"],
    ],
)
def test_bad_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An impossible port, file or number is refused before anything is served or replaced."""
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        argv = [port if flag == "PORT" else flag for flag in flags]
        try:
            assert main(["--retriever_name", "empty", *argv]) == 2
        except SystemExit as error:
            assert error.code == 2
    assert "expected" in capsys.readouterr().err
