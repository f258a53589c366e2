"""One suite for all services: the retriever protocol, paging, errors, caches and hidden keys."""

import gzip
import json
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from search_r1.online import engine as online_engine
from search_r1.online import upstream
from search_r1.online.addresses import AddressPolicy
from search_r1.online.engine import OnlineRetriever, open_online
from search_r1.online.services import SERVICES
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import (
    SetupError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnavailable,
)
from search_r1.retrieval.schema import fingerprint
from search_r1.retrieval.settings import OnlineConfig, RetrieverConfig
from search_r1.retrying import Backoff
from search_r1.store import StorageError

Results = list[tuple[str, str, str]]
one_service = pytest.mark.parametrize("name", ["serper"])
"""What is the same code for all services is tested with one."""
Open = Callable[..., OnlineRetriever]


def results_of(query: str, count: int, offset: int) -> Results:
    """Return results of a fake service: as many as the last word of `query` says, else 1000."""
    last = query.split()[-1]
    total = int(last) if last.isdigit() else 1000
    return [
        (f"https://example.org/{query}/{i}", f"{query}'s {i}", f"About {query}, \u2028 part {i}.")
        for i in range(offset, min(offset + count, total))
    ]


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the backoff, which is tested elsewhere."""
    monkeypatch.setattr(upstream, "BACKOFF", Backoff(0.001))


@pytest.fixture
def start(web: Any, documented: Any, open_at: Open) -> Callable[..., tuple[Any, Open]]:
    """Return a function that starts the fake service and returns a function to open backends."""

    def begin(answer: Any = None) -> tuple[Any, Open]:
        def documented_answer(request: Any) -> Any:
            return reply_type(documented.answer(results_of(*documented.parse_request(request))))

        reply_type = type(documented.rate_limited)
        server = web(answer or documented_answer)
        return server, partial(open_at, server)

    return begin


def test_answers_as_a_retriever_does(start: Any, documented: Any, name: str) -> None:
    """One list per query in order, best first, at most k, with the documented fields."""
    server, open_engine = start()
    engine = open_engine()
    queries = ["river", "lake 2", "", "   ", "river", "pond 0", "Zürich 湖"]
    results = engine.search(queries, 3)
    assert [len(hits) for hits in results] == [3, 2, 0, 0, 3, 0, 3]
    for query, hits in zip(queries, results, strict=True):
        scores = [hit.score for hit in hits]
        assert scores == sorted(set(scores), reverse=True)
        for i, hit in enumerate(hits):
            assert hit.document.id == f"https://example.org/{query}/{i}"
            assert hit.document.title == f"{query}'s {i}"
            assert hit.document.text == f"About {query}, part {i}."
            assert hit.document.contents == f'"{hit.document.title}"\n{hit.document.text}'
    assert all(documented.authorised(request) for request in server.requests)
    assert engine.search([], 3) == []
    assert (engine.name, engine.num_documents) == (name, 0)
    assert engine.num_threads > 1


@one_service
def test_equal_queries_cost_one_request(start: Any, documented: Any) -> None:
    """Equal queries in a batch, as GRPO sends them, cost one request."""
    server, open_engine = start()
    results = open_engine().search(["river"] * 5 + [" river  "], 3)
    assert results.count(results[0]) == 6
    assert [documented.parse_request(request) for request in server.requests] in (
        [("river", 3, 0)],
        [("river", 3, 0)] * 2,  # the last text differs, but is sent as the same query
    )


@one_service
def test_queries_of_a_batch_are_concurrent(start: Any, documented: Any) -> None:
    """Eight requests that wait for each other at the service are all answered."""
    barrier = threading.Barrier(8, timeout=20)

    def answer(request: Any) -> Any:
        barrier.wait()
        return type(documented.rate_limited)(documented.answer([]))

    _, open_engine = start(answer)
    assert open_engine().search([f"q{i}" for i in range(8)], 1) == [[]] * 8


def test_a_large_k_is_paged_and_limited(start: Any, documented: Any, name: str) -> None:
    """Further results come from further pages, in order, up to the limit of the service."""
    service = SERVICES[name]
    server, open_engine = start()
    hits = open_engine().search(["river"], 10_000)[0]
    assert [h.document.id for h in hits] == [
        url for url, _, _ in results_of("river", service.max_results, 0)
    ]
    requests = [documented.parse_request(request) for request in server.requests]
    size = service.max_per_request
    assert requests == [("river", size, offset) for offset in range(0, service.max_results, size)]


def test_pages_end_with_the_results(start: Any, documented: Any, name: str) -> None:
    """No page is requested after an empty one."""
    server, open_engine = start()
    size = SERVICES[name].max_per_request
    hits = open_engine().search([f"pond {size}"], size * 5)[0]
    assert len(hits) == size
    assert len(server.requests) == min(2, SERVICES[name].max_results // size)


def test_long_queries_are_truncated_at_a_word(start: Any, documented: Any, name: str) -> None:
    """A query beyond the limits of the service is truncated."""
    service = SERVICES[name]
    server, open_engine = start()
    open_engine().search(["word " * 5000, "x" * 5000], 1)
    for request in server.requests:
        query = documented.parse_request(request)[0]
        assert (
            len(query) <= service.max_query_chars and len(query.split()) <= service.max_query_words
        )
        assert set(query.split()) in ({"word"}, {"x" * service.max_query_chars})


@one_service
@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize(
    "spelling", ["{}", '{{"error": "no such key: {}"}}', '{{"message": "{}"}}']
)
def test_echoed_keys_are_hidden(
    start: Any, documented: Any, key: str, status: int, spelling: str
) -> None:
    """Keys in an answer, also escaped or truncated, do not appear in the error."""
    for filler in ("", "x" * 70, "x" * 280):
        body = spelling.format(filler + key.replace("/", r"\/")).encode()
        _, open_engine = start(
            lambda request, body=body: type(documented.rate_limited)(body, status)
        )
        with pytest.raises((UpstreamRefused, UpstreamUnavailable)) as caught:
            open_engine(online_retries=0).search(["river"], 3)
        assert "k3y" not in str(caught.value)


@pytest.mark.parametrize("refusal", ["wrong_key", "quota_exhausted"])
def test_refusals_are_final(start: Any, documented: Any, name: str, key: str, refusal: str) -> None:
    """A refusal is not retried; the error names the variable of the key, not the key."""
    answer = getattr(documented, refusal)
    echo = type(answer)({**answer.body, "echo": key}, answer.status)
    server, open_engine = start(lambda request: echo)
    with pytest.raises(UpstreamRefused, match=SERVICES[name].key_variable) as caught:
        open_engine().search(["river"], 3)
    assert len(server.requests) == 1
    assert key not in str(caught.value)


def test_rate_limits_and_failures_are_retried(start: Any, documented: Any) -> None:
    """A 429 and a 503 are retried until the answer comes."""
    reply = type(documented.rate_limited)
    failures = [documented.rate_limited, reply(b"<html>", 503), documented.rate_limited]

    def answer(request: Any) -> Any:
        if failures:
            return failures.pop()
        return reply(documented.answer(results_of(*documented.parse_request(request))))

    server, open_engine = start(answer)
    assert len(open_engine().search(["river"], 3)[0]) == 3
    assert len(server.requests) == 4


BODIES = {
    "empty": b"", "spaces": b"  ", "html": b"<html>busy</html>", "bytes": b"\xff\xfe",
    "list": b"[]",
    "null": b"null", "number": b"3", "text": b'"text"', "true": b"true", "nothing": b"{}",
    "tail": b"{}x", "half": b'{"organic": [', "deep": b"[" * 100_000, "nan": b"NaN",
    "long number": b"9" * 10_000, "zero byte": b"\0", "latin-1": '{"a": "ü"}'.encode("latin-1"),
    "utf-16 half": "{}".encode("utf-16")[:-1], "too much": b" " * 200_000, "xml": b"<?xml?><a/>",
}  # fmt: skip
COMPRESSED = {
    "no gzip": (b"{}", "gzip"),
    "brotli": (b"{}", "br"),
    "twice": (gzip.compress(b"{}"), "gzip, gzip"),
    "bomb": (gzip.compress(b" " * 9_000_000), "gzip"),
}
VALUES = (None, True, 3, -1.5, "text", "", "\ud800", [], [3], [[]], [None], {}, {"a": 1}, 10**400)


def test_an_invalid_answer_is_an_error(
    start: Any, documented: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer outside of the documented form is retried, and then an error of one line."""
    monkeypatch.setattr(upstream, "MAX_ANSWER_BYTES", 150_000)
    reply = type(documented.rate_limited)
    server, open_engine = start()
    engine = open_engine(online_retries=1)
    for body, encoding in [*((text, "") for text in BODIES.values()), *COMPRESSED.values()]:
        answer = reply(body, headers={"Content-Encoding": encoding} if encoding else {})
        server.answer = lambda request, answer=answer: answer
        server.requests.clear()
        with pytest.raises(UpstreamInvalid) as caught:
            engine.search(["river"], 3)
        assert len(server.requests) == 2
        assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


def changed(answer: Any) -> Iterator[Any]:
    """Yield copies of `answer` in which one value has another type or is missing."""
    items: Any = ()
    if isinstance(answer, dict):
        items = answer.items()
        yield from ({k: v for k, v in answer.items() if k != name} for name in answer)
    elif isinstance(answer, list):
        items = enumerate(answer)
    for position, value in items:
        for other in (*changed(value), *VALUES):
            copy = answer.copy()
            copy[position] = other
            yield copy


def test_a_field_of_another_type_is_an_error_or_skipped(documented: Any, name: str) -> None:
    """Whichever value of an answer changes, results have text and finite scores, or it fails."""
    bodies = list(changed(documented.answer(results_of("river", 2, 0))))
    for body in [*bodies, *VALUES, *changed(documented.answer([]))]:
        try:
            results = SERVICES[name].read(body)
        except upstream.PARSE_ERRORS:
            continue
        for result in results:
            texts = (result.url, result.title, result.snippet)
            assert all(isinstance(text, str) for text in texts)
            assert result.url and math.isfinite(result.score or 0.0)
    assert len(bodies) > 80


def test_only_a_result_without_an_address_is_skipped(documented: Any, name: str) -> None:
    """The other results of the answer are kept, each with its own score."""
    read, results = SERVICES[name].read, results_of("river", 3, 0)
    expected = read(documented.answer(results))
    blank = [results[0], (" ", *results[1][1:]), results[2]]
    assert read(documented.answer(blank)) == [expected[0], expected[2]]


def test_an_outage_is_retried_and_named(start: Any, documented: Any, name: str) -> None:
    """A service that fails all attempts is UpstreamUnavailable after exactly these attempts."""
    server, open_engine = start(lambda request: documented.rate_limited)
    with pytest.raises(UpstreamUnavailable, match=f"{name} did not answer in 3 tries.*429"):
        open_engine(online_retries=2).search(["river"], 3)
    assert len(server.requests) == 3


@one_service
def test_a_hanging_service_is_an_outage(start: Any, documented: Any) -> None:
    """A service that accepts a connection and never answers fails after the timeout."""
    release = threading.Event()

    def answer(request: Any) -> Any:
        release.wait(20)
        return documented.rate_limited

    _, open_engine = start(answer)
    try:
        with pytest.raises(UpstreamUnavailable, match="ReadTimeout"):
            open_engine(online_retries=0, online_timeout=0.2).search(["river"], 3)
    finally:
        release.set()


@one_service
def test_redirects_are_not_followed(start: Any, documented: Any, web: Any) -> None:
    """A redirect is not followed, since that would send the key to another host."""
    reply = type(documented.rate_limited)
    other = web(lambda request: reply(documented.answer([])))
    _, open_engine = start(lambda request: reply(b"", 302, {"Location": other.url}))
    with pytest.raises(UpstreamRefused, match="302"):
        open_engine().search(["river"], 3)
    assert other.requests == []


@one_service
def test_answers_are_cached_in_a_file(start: Any, documented: Any, tmp_path: Path) -> None:
    """A second backend with the same cache file sends no request and returns equal hits."""
    server, open_engine = start()
    queries, path = ["river", "pond 0", "lake 2"], str(tmp_path / "cache.sqlite")
    first = open_engine(online_cache=path)
    hits = first.search(queries, 3)
    first.close()
    count = len(server.requests)
    second = open_engine(online_cache=path)
    assert second.search(queries, 3) == hits
    assert len(server.requests) == count
    second.search(["river"], 2)
    assert len(server.requests) == count + 1


@one_service
def test_recent_answers_are_cached_in_memory(
    start: Any, documented: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file the most recently used answers are cached, by query and k."""
    monkeypatch.setattr(online_engine, "NUM_RECENT_ANSWERS", 2)
    server, open_engine = start()
    engine = open_engine()
    for query, k in (("a", 1), ("b", 1), ("a", 1), ("c", 1), ("a", 1), ("b", 1), ("b", 2)):
        engine.search([query], k)
    requests = [documented.parse_request(request)[:2] for request in server.requests]
    assert requests == [("a", 1), ("b", 1), ("c", 1), ("b", 1), ("b", 2)]


def test_an_unusable_cache_file_is_refused(tmp_path: Path) -> None:
    """A file of another kind and a missing folder are errors; the file is not changed."""
    (tmp_path / "corpus.jsonl").write_text('{"id": "1"}\n' * 100)
    for path in (tmp_path / "corpus.jsonl", tmp_path / "none" / "c"):
        with pytest.raises(StorageError, match="--online_cache"):
            open_online("serper", OnlineConfig(online_cache=str(path)), AddressPolicy())
    assert (tmp_path / "corpus.jsonl").read_text() == '{"id": "1"}\n' * 100


@one_service
def test_a_failed_batch_is_not_paid_for_twice(start: Any, documented: Any) -> None:
    """If one query of a batch fails, searching the other queries again costs no request."""
    reply = type(documented.rate_limited)

    def answer(request: Any) -> Any:
        barrier.wait()  # so that no request is cancelled before it has started
        query, count, offset = documented.parse_request(request)
        if query == "bad":
            return reply({"error": "bad query"}, 400)
        return reply(documented.answer(results_of(query, count, offset)))

    barrier = threading.Barrier(4, timeout=20)
    server, open_engine = start(answer)
    engine = open_engine()
    with pytest.raises(UpstreamRefused):
        engine.search(["a", "bad", "b", "c"], 2)
    engine._requests.shutdown(wait=True)  # wait for running requests
    engine._requests = ThreadPoolExecutor(2)
    assert [len(hits) for hits in engine.search(["a", "b", "c"], 2)] == [2, 2, 2]
    assert len(server.requests) == 4


@one_service
def test_failures_are_not_cached(start: Any, documented: Any, tmp_path: Path) -> None:
    """After an outage the next search sends a new request and succeeds."""
    reply = type(documented.rate_limited)
    failures = [documented.rate_limited]

    def answer(request: Any) -> Any:
        return failures.pop() if failures else reply(documented.answer(results_of("a", 1, 0)))

    _, open_engine = start(answer)
    engine = open_engine(online_cache=str(tmp_path / "c"), online_retries=0)
    with pytest.raises(UpstreamUnavailable):
        engine.search(["river"], 1)
    assert len(engine.search(["river"], 1)[0]) == 1


def test_keys_appear_only_in_requests(
    start: Any, documented: Any, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No log line, no fact and no byte of the cache file contains the key in any spelling."""
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore.http11", "httpcore.connection"):
        caplog.set_level(logging.DEBUG, logger=name)
    _, open_engine = start()
    engine = open_engine(online_cache=str(tmp_path / "cache"))
    engine.search(["river"], 3)
    facts = json.dumps(engine.info())
    engine.close()
    cached = b"".join(path.read_bytes() for path in tmp_path.iterdir()).decode("latin-1")
    assert "HTTP Request" in caplog.text
    for spelling in (key, "k3y%2Bof%2Ftests%3D%3D", "k3y%2Bof/tests%3D%3D", "k3y+of/tests"):
        for text in (caplog.text, facts, cached, repr(engine.__dict__)):
            assert spelling not in text


def test_facts_have_all_that_affects_answers(
    start: Any, documented: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint depends on the search engine id, but not on the key or the rate."""
    _, open_engine = start()
    expected = fingerprint(open_engine().info())
    monkeypatch.setenv(SERVICES[name].key_variable, "another-key")
    assert fingerprint(open_engine(requests_per_second=7.0).info()) == expected
    if name == "google":
        monkeypatch.setenv("GOOGLE_CSE_ID", "another")
        assert fingerprint(open_engine().info()) != expected


def test_no_heavy_packages_are_imported_for_snippets() -> None:
    """A service without page texts needs neither trafilatura nor torch, FAISS or numpy."""
    code = (
        "import sys; from search_r1.retrieval.engines.registry import build_retriever;"
        "from search_r1.retrieval.settings import RetrieverConfig;"
        "build_retriever(RetrieverConfig('brave'));"
        "print({'torch', 'faiss', 'trafilatura', 'numpy', 'bm25s'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_missing_keys_are_named(name: str, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """A missing variable, or one that cannot be a key, is an error that names the variable."""
    for variable in SERVICES[name].variables:
        monkeypatch.setenv(variable, " ")
        with pytest.raises(SetupError, match=variable):
            build_retriever(RetrieverConfig(name))
        monkeypatch.setenv(variable, f"{key}\n{key}")
        with pytest.raises(SetupError, match=variable) as caught:
            build_retriever(RetrieverConfig(name))
        assert key not in str(caught.value)
        monkeypatch.setenv(variable, key)


@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://127.0.0.1", "http://u:p@127.0.0.1", "http://", "http://a/?key=1"]
)
def test_wrong_addresses_are_refused_at_start(url: str) -> None:
    """An --online_url that is not a plain http(s) address is an error at the start."""
    with pytest.raises(SetupError, match="--online_url"):
        build_retriever(RetrieverConfig("brave", online=OnlineConfig(online_url=url)))
