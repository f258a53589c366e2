"""Every service behind one suite: the Retriever contract, paging, errors, cache, and no keys."""

import gzip
import json
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from search_r1.online import engine as online_engine
from search_r1.online import upstream
from search_r1.online.addresses import AddressPolicy
from search_r1.online.engine import OnlineRetriever, open_online
from search_r1.online.services import SERVICES
from search_r1.retrying import Backoff
from search_r1.search.backends.base import collect, fingerprint
from search_r1.search.backends.registry import build_retriever
from search_r1.search.errors import (
    SetupError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnavailable,
)
from search_r1.search.settings import OnlineConfig, RetrieverConfig

Results = list[tuple[str, str, str]]
Open = Callable[..., OnlineRetriever]


def results_of(query: str, count: int, offset: int) -> Results:
    """The service's world: `query` has as many results as its last word says, else many."""
    last = query.split()[-1]
    total = int(last) if last.isdigit() else 1000
    return [
        (f"https://example.org/{query}/{i}", f"{query}'s {i}", f"About {query}, \u2028 part {i}.")
        for i in range(offset, min(offset + count, total))
    ]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off is tested where all clients share it; here it would only take time."""
    monkeypatch.setattr(upstream, "PAUSES", Backoff(0.001))


@pytest.fixture
def start(web: Any, documented: Any, name: str) -> Iterator[Callable[..., tuple[Any, Open]]]:
    """Starts the service in turn, and opens engines on it."""
    engines: list[OnlineRetriever] = []

    def begin(answer: Any = None) -> tuple[Any, Open]:
        def world(asked: Any) -> Any:
            return reply_type(documented.answer(results_of(*documented.asked_for(asked))))

        reply_type = type(documented.busy)
        server = web(answer or world)

        def open_engine(**options: Any) -> OnlineRetriever:
            chosen = {"requests_per_second": 10_000.0, "online_timeout": 5.0, **options}
            config = OnlineConfig(online_url=server.url + "/api", **chosen)
            engines.append(open_online(name, config, AddressPolicy()))
            return engines[-1]

        return server, open_engine

    yield begin
    for engine in engines:
        engine.close()


def test_answers_as_a_retriever_does(start: Any, documented: Any, name: str) -> None:
    """One list per query in order, best first, at most k, documents from the documented fields."""
    server, open_engine = start()
    engine = open_engine()
    queries = ["river", "lake 2", "", "   ", "river", "pond 0", "Zürich 湖"]
    found = engine.search(queries, 3)
    assert [len(hits) for hits in found] == [3, 2, 0, 0, 3, 0, 3]
    for query, hits in zip(queries, found, strict=True):
        scores = [hit.score for hit in hits]
        assert scores == sorted(set(scores), reverse=True)
        for i, hit in enumerate(hits):
            assert hit.document.id == f"https://example.org/{query}/{i}"
            assert hit.document.title == f"{query}'s {i}"
            assert hit.document.text == f"About {query}, part {i}."
            assert hit.document.contents == f'"{hit.document.title}"\n{hit.document.text}'
    assert all(documented.authorised(asked) for asked in server.asked)
    assert engine.search([], 3) == []
    assert (engine.name, engine.num_documents) == (name, 0)
    assert engine.num_threads > 1


def test_equal_queries_cost_one_request(start: Any, documented: Any) -> None:
    """A batch of five equal questions, as GRPO asks them, is one request of the service."""
    server, open_engine = start()
    found = open_engine().search(["river"] * 5 + [" river  "], 3)
    assert found.count(found[0]) == 6
    assert [documented.asked_for(asked) for asked in server.asked] in (
        [("river", 3, 0)],
        [("river", 3, 0)] * 2,  # the last is another text, though it asks the same
    )


def test_queries_of_a_batch_are_asked_at_once(start: Any, documented: Any) -> None:
    """Eight requests wait for each other at the service, so they must be under way together."""
    together = threading.Barrier(8, timeout=20)

    def answer(asked: Any) -> Any:
        together.wait()
        return type(documented.busy)(documented.answer([]))

    _, open_engine = start(answer)
    assert open_engine().search([f"q{i}" for i in range(8)], 1) == [[]] * 8


def test_a_large_k_is_paged_and_capped(start: Any, documented: Any, name: str) -> None:
    """More results than a request has come from further pages, in order, up to the limit."""
    service = SERVICES[name]
    server, open_engine = start()
    hits = open_engine().search(["river"], 10_000)[0]
    assert [h.document.id for h in hits] == [
        url for url, _, _ in results_of("river", service.most, 0)
    ]
    asked = [documented.asked_for(one) for one in server.asked]
    size = service.most_per_request
    assert asked == [("river", size, offset) for offset in range(0, service.most, size)]


def test_pages_end_with_the_results(start: Any, documented: Any, name: str) -> None:
    """An empty page is the last that is asked for."""
    server, open_engine = start()
    size = SERVICES[name].most_per_request
    hits = open_engine().search([f"pond {size}"], size * 5)[0]
    assert len(hits) == size
    assert len(server.asked) == min(2, SERVICES[name].most // size)


def test_long_queries_are_cut_at_a_word(start: Any, documented: Any, name: str) -> None:
    """A query beyond the service's limits is shortened, not refused."""
    service = SERVICES[name]
    server, open_engine = start()
    open_engine().search(["word " * 5000, "x" * 5000], 1)
    for asked in server.asked:
        query = documented.asked_for(asked)[0]
        assert len(query) <= service.most_chars and len(query.split()) <= service.most_words
        assert set(query.split()) in ({"word"}, {"x" * service.most_chars})


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize(
    "spelling", ["{}", '{{"error": "no such key: {}"}}', '{{"message": "{}"}}']
)
def test_echoed_keys_are_hidden(
    start: Any, documented: Any, key: str, status: int, spelling: str
) -> None:
    """A service that repeats the key, even escaped or cut by our limits, does not reveal it."""
    for filler in ("", "x" * 70, "x" * 280):
        body = spelling.format(filler + key.replace("/", r"\/")).encode()
        _, open_engine = start(lambda asked, body=body: type(documented.busy)(body, status))
        with pytest.raises((UpstreamRefused, UpstreamUnavailable)) as caught:
            open_engine(online_retries=0).search(["river"], 3)
        assert "k3y" not in str(caught.value)


@pytest.mark.parametrize("refusal", ["wrong_key", "spent"])
def test_refusals_are_final(start: Any, documented: Any, name: str, key: str, refusal: str) -> None:
    """A wrong key and a spent quota are asked once; the error names the variable, not the key."""
    told = getattr(documented, refusal)
    echo = type(told)({**told.body, "echo": key}, told.status)
    server, open_engine = start(lambda asked: echo)
    with pytest.raises(UpstreamRefused, match=SERVICES[name].key_variable) as caught:
        open_engine().search(["river"], 3)
    assert len(server.asked) == 1
    assert key not in str(caught.value)


def test_rate_limits_and_failures_pass(start: Any, documented: Any) -> None:
    """After a 429 and a 503 the answer comes, and no query is lost."""
    reply = type(documented.busy)
    troubles = [documented.busy, reply(b"<html>", 503), documented.busy]

    def answer(asked: Any) -> Any:
        if troubles:
            return troubles.pop()
        return reply(documented.answer(results_of(*documented.asked_for(asked))))

    server, open_engine = start(answer)
    assert len(open_engine().search(["river"], 3)[0]) == 3
    assert len(server.asked) == 4


BODIES = {
    "empty": b"", "spaces": b"  ", "html": b"<html>busy</html>", "bytes": b"\xff\xfe",
    "list": b"[]",
    "null": b"null", "number": b"3", "text": b'"text"', "true": b"true", "nothing": b"{}",
    "tail": b"{}x", "half": b'{"organic": [', "deep": b"[" * 100_000, "nan": b"NaN",
    "long number": b"9" * 10_000, "zero byte": b"\0", "latin-1": '{"a": "ü"}'.encode("latin-1"),
    "utf-16 half": "{}".encode("utf-16")[:-1], "too much": b" " * 200_000, "xml": b"<?xml?><a/>",
}  # fmt: skip
PACKED = {
    "no gzip": (b"{}", "gzip"),
    "brotli": (b"{}", "br"),
    "twice": (gzip.compress(b"{}"), "gzip, gzip"),
    "bomb": (gzip.compress(b" " * 9_000_000), "gzip"),
}
VALUES = (None, True, 3, -1.5, "text", "", "\ud800", [], [3], [[]], [None], {}, {"a": 1}, 10**400)


def test_garbage_is_never_a_result(
    start: Any, documented: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer outside the documented form is tried again, then a typed error with one line."""
    monkeypatch.setattr(upstream, "MOST_BYTES", 150_000)
    reply, garbage = type(documented.busy), [b"", ""]
    headers: Callable[[], Any] = lambda: {"Content-Encoding": garbage[1]} if garbage[1] else {}  # noqa: E731
    server, open_engine = start(lambda asked: reply(garbage[0], headers=headers()))
    engine = open_engine(online_retries=1)
    for body, encoding in [*((body, "") for body in BODIES.values()), *PACKED.values()]:
        garbage[:] = [body, encoding]
        server.asked.clear()
        with pytest.raises(UpstreamInvalid, match=r"documented form|more than") as caught:
            engine.search(["river"], 3)
        assert len(server.asked) == 2
        assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


def changed(answer: Any) -> Iterator[Any]:
    """`answer` with one value at a time of another type, or gone."""
    inner: Any = ()
    if isinstance(answer, dict):
        inner = answer.items()
        yield from ({k: v for k, v in answer.items() if k != name} for name in answer)
    elif isinstance(answer, list):
        inner = enumerate(answer)
    for place, value in inner:
        for other in (*changed(value), *VALUES):
            copy = answer.copy()
            copy[place] = other
            yield copy


def test_any_field_of_another_type_is_garbage_or_left_out(documented: Any, name: str) -> None:
    """Of each value of an answer: there are results of text and finite scores, or a typed error."""
    bodies = list(changed(documented.answer(results_of("river", 2, 0))))
    for body in [*bodies, *VALUES, *changed(documented.answer([]))]:
        try:
            results = SERVICES[name].read(body)
        except upstream.GARBAGE:
            continue
        for found in results:
            assert all(isinstance(text, str) for text in (found.url, found.title, found.snippet))
            assert found.url and math.isfinite(found.score or 0.0)
    assert len(bodies) > 80


def test_outages_are_counted_and_named(start: Any, documented: Any, name: str) -> None:
    """A service that is down for all tries is UpstreamUnavailable after exactly those tries."""
    server, open_engine = start(lambda asked: documented.busy)
    with pytest.raises(UpstreamUnavailable, match=f"{name} did not answer in 3 tries.*429"):
        open_engine(online_retries=2).search(["river"], 3)
    assert len(server.asked) == 3


def test_a_hanging_service_is_an_outage(start: Any, documented: Any) -> None:
    """A service that accepts and says nothing costs the time-out, not for ever."""
    release = threading.Event()

    def answer(asked: Any) -> Any:
        release.wait(20)
        return documented.busy

    _, open_engine = start(answer)
    try:
        with pytest.raises(UpstreamUnavailable, match="ReadTimeout"):
            open_engine(online_retries=0, online_timeout=0.2).search(["river"], 3)
    finally:
        release.set()


def test_a_refused_connection_is_an_outage(
    start: Any, documented: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody at the port: retried, then UpstreamUnavailable."""
    server, open_engine = start()
    engine = open_engine(online_retries=1)
    engine._upstream.url = "http://127.0.0.1:1/"
    with pytest.raises(UpstreamUnavailable, match="ConnectError"):
        engine.search(["river"], 3)
    assert server.asked == []


def test_too_much_is_not_read(start: Any, documented: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer beyond the limit is given up, so that no service can fill the memory."""
    monkeypatch.setattr(upstream, "MOST_BYTES", 1000)
    _, open_engine = start(lambda asked: type(documented.busy)(b" " * 2000))
    with pytest.raises(UpstreamUnavailable, match="more than 1000 bytes"):
        open_engine(online_retries=0).search(["river"], 3)


def test_redirects_are_not_followed(start: Any, documented: Any, web: Any) -> None:
    """A redirect must not carry the key to another machine."""
    reply = type(documented.busy)
    other = web(lambda asked: reply(documented.answer([])))
    _, open_engine = start(lambda asked: reply(b"", 302, {"Location": other.url}))
    with pytest.raises(UpstreamRefused, match="302"):
        open_engine().search(["river"], 3)
    assert other.asked == []


def test_answers_outlive_the_server(start: Any, documented: Any, tmp_path: Path) -> None:
    """A second engine on the same cache asks for nothing, and gives equal hits."""
    server, open_engine = start()
    queries, path = ["river", "pond 0", "lake 2"], str(tmp_path / "cache.sqlite")
    first = open_engine(online_cache=path)
    found = first.search(queries, 3)
    first.close()
    count = len(server.asked)
    second = open_engine(online_cache=path)
    assert second.search(queries, 3) == found
    assert len(server.asked) == count
    second.search(["river"], 2)
    assert len(server.asked) == count + 1


def test_the_last_answers_stay_in_memory(
    start: Any, documented: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file the last used answers are kept, by query and k, and older ones forgotten."""
    monkeypatch.setattr(online_engine, "NUM_RECENT_ANSWERS", 2)
    server, open_engine = start()
    engine = open_engine()
    for query, k in (("a", 1), ("b", 1), ("a", 1), ("c", 1), ("a", 1), ("b", 1), ("b", 2)):
        engine.search([query], k)
    asked = [documented.asked_for(one)[:2] for one in server.asked]
    assert asked == [("a", 1), ("b", 1), ("c", 1), ("b", 1), ("b", 2)]


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    """A file of another kind, or a folder that is missing, is said at start and left alone."""
    (tmp_path / "corpus.jsonl").write_text('{"id": "1"}\n' * 100)
    for path in (tmp_path / "corpus.jsonl", tmp_path / "none" / "c"):
        with pytest.raises(SetupError, match="--online_cache"):
            open_online("serper", OnlineConfig(online_cache=str(path)), AddressPolicy())
    assert (tmp_path / "corpus.jsonl").read_text() == '{"id": "1"}\n' * 100


def test_a_failed_batch_is_not_paid_for_twice(start: Any, documented: Any) -> None:
    """When one query of a batch fails, asking the others again costs no request."""
    reply = type(documented.busy)

    def answer(asked: Any) -> Any:
        together.wait()  # so that none is called off before it began
        query, count, offset = documented.asked_for(asked)
        if query == "bad":
            return reply({"error": "bad query"}, 400)
        return reply(documented.answer(results_of(query, count, offset)))

    together = threading.Barrier(4, timeout=20)
    server, open_engine = start(answer)
    engine = open_engine()
    with pytest.raises(UpstreamRefused):
        engine.search(["a", "bad", "b", "c"], 2)
    engine._requests.shutdown(wait=True)  # those under way finish
    engine._requests = ThreadPoolExecutor(2)
    assert [len(hits) for hits in engine.search(["a", "b", "c"], 2)] == [2, 2, 2]
    assert len(server.asked) == 4


def test_failures_are_not_kept(start: Any, documented: Any, tmp_path: Path) -> None:
    """An outage leaves nothing in the cache: the next search asks again and succeeds."""
    reply = type(documented.busy)
    troubles = [documented.busy]

    def answer(asked: Any) -> Any:
        return troubles.pop() if troubles else reply(documented.answer(results_of("a", 1, 0)))

    _, open_engine = start(answer)
    engine = open_engine(online_cache=str(tmp_path / "c"), online_retries=0)
    with pytest.raises(UpstreamUnavailable):
        engine.search(["river"], 1)
    assert len(engine.search(["river"], 1)[0]) == 1


def test_keys_stay_in_requests(
    start: Any, documented: Any, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No log line at any level, no fact and no byte of the cache has the key in any spelling."""
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore.http11", "httpcore.connection"):
        caplog.set_level(logging.DEBUG, logger=name)
    _, open_engine = start()
    engine = open_engine(online_cache=str(tmp_path / "cache"))
    engine.search(["river"], 3)
    facts = json.dumps(engine.info())
    engine.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir()).decode("latin-1")
    assert "HTTP Request" in caplog.text
    for spelling in (key, "k3y%2Bof%2Ftests%3D%3D", "k3y%2Bof/tests%3D%3D", "k3y+of/tests"):
        for place in (caplog.text, facts, kept, repr(engine.__dict__)):
            assert spelling not in place


def test_facts_say_what_decides_an_answer(
    start: Any, documented: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another key or cache is the same engine; another search engine id is not."""
    _, open_engine = start()
    mark = fingerprint(open_engine().info())
    monkeypatch.setenv(SERVICES[name].key_variable, "another-key")
    assert fingerprint(open_engine(requests_per_second=7.0).info()) == mark
    if name == "google":
        monkeypatch.setenv("GOOGLE_CSE_ID", "another")
        assert fingerprint(open_engine().info()) != mark


def test_nothing_heavy_is_loaded_for_snippets() -> None:
    """A service without page texts needs neither an HTML reader nor torch, FAISS or numpy."""
    code = (
        "import sys; from search_r1.search.backends.registry import build_retriever;"
        "from search_r1.search.settings import RetrieverConfig;"
        "build_retriever(RetrieverConfig('brave'));"
        "print({'torch', 'faiss', 'trafilatura', 'numpy', 'bm25s'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_stages_are_reported(start: Any, documented: Any) -> None:
    """The server can tell how long the service took."""
    _, open_engine = start()
    with collect() as seconds:
        open_engine().search(["river"], 1)
    assert list(seconds) == ["search"] and seconds["search"] > 0


def test_missing_keys_are_named(name: str, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Without its variable, or with one that no key can be, a service is not opened."""
    for variable in SERVICES[name].variables:
        monkeypatch.setenv(variable, " ")
        with pytest.raises(SetupError, match=f"without the environment variable {variable}"):
            build_retriever(RetrieverConfig(name))
        monkeypatch.setenv(variable, f"{key}\n{key}")
        with pytest.raises(SetupError, match=f"value of {variable}") as caught:
            build_retriever(RetrieverConfig(name))
        assert key not in str(caught.value)
        monkeypatch.setenv(variable, key)


@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://127.0.0.1", "http://u:p@127.0.0.1", "http://", "http://a/?key=1"]
)
def test_wrong_addresses_are_refused_at_start(url: str) -> None:
    """An --online_url that is no plain http address is said before the first search."""
    with pytest.raises(SetupError, match="--online_url"):
        build_retriever(RetrieverConfig("brave", online=OnlineConfig(online_url=url)))
