"""Texts of pages as documents: the article, or the snippet if the page cannot be read."""

import ipaddress
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.online import engine as online_engine
from search_r1.online.addresses import AddressPolicy
from search_r1.online.engine import OnlineRetriever, open_online
from search_r1.online.fetch import PageError
from search_r1.online.pages import visit
from search_r1.online.services import truncate
from search_r1.retrieval.engines.base import collect
from search_r1.retrieval.settings import OnlineConfig
from tests.online.article import ARTICLE, SENTENCES


@given(st.text(alphabet="ab \n", max_size=40), st.integers(1, 45))
def test_texts_are_truncated_at_a_word(text: str, max_chars: int) -> None:
    """The result is a prefix of at most `max_chars` characters, ending with a whole word."""
    short = truncate(text, max_chars)
    assert text.startswith(short) and len(short) <= max_chars
    if len(text) > max_chars and any(c.isspace() for c in text[:max_chars].strip()):
        assert text[len(short)].isspace()


@pytest.fixture
def service(web: Any, reply: Any) -> Any:
    """Start a service with its pages: a good page, a missing one, and a malicious redirect."""

    def answer(request: Any) -> Any:
        if request.method == "POST":
            paths = ["/good", "/missing", "/hostile", "/good"]
            items = [
                {"title": path, "link": f"{server.url}{path}", "snippet": f"snippet of {path}"}
                for path in paths
            ]
            return reply({"organic": items})
        if request.path == "/hostile":
            return reply(b"", 302, {"Location": f"http://[::1]:{server.port}/admin"})
        if request.path == "/missing":
            return reply(b"", 404)
        return reply(ARTICLE.encode(), headers={"Content-Type": "text/html; charset=utf-8"})

    server = web(answer)
    return server


def open_with_pages(server: Any, **options: Any) -> OnlineRetriever:
    policy = AddressPolicy(frozenset({server.port}), (ipaddress.ip_network("127.0.0.1/32"),))
    config = OnlineConfig(
        online_url=server.url, requests_per_second=1000.0, page_text=True, **options
    )
    return open_online("serper", config, policy)


def test_page_text_replaces_the_snippet(service: Any) -> None:
    """The text of a page replaces the snippet, which stays if the page cannot be read."""
    engine = open_with_pages(service, page_chars=300)
    with collect() as seconds:
        results = engine.search(["danube", "river"], 3)
    texts = [hit.document.text for hit in results[0]]
    assert SENTENCES[0] in texts[0] and len(texts[0]) <= 300
    assert texts[0].split()[-1] in SENTENCES[2].split()  # truncated at a word
    assert texts[1:] == ["snippet of /missing", "snippet of /hostile"]
    assert results[0] == results[1]
    fetched = [request.path for request in service.requests if request.method == "GET"]
    assert sorted(fetched) == ["/good", "/hostile", "/missing"]
    assert set(seconds) == {"search", "fetch"}
    assert (engine.info()["page_text"], engine.info()["page_chars"]) == (True, 300)
    engine.close()


def test_a_bad_address_affects_only_its_own_text(web: Any, reply: Any) -> None:
    """Results with an invalid address or a slow page keep snippets; all others have texts."""
    bad = ["http://xn--/", "http://[", "javascript:x", "\ud800", "http://\x00/", "https://xn--0/"]

    def answer(request: Any) -> Any:
        if request.method == "GET":
            time.sleep(3 if request.path == "/slow" else 0)
            return reply(ARTICLE.encode(), headers={"Content-Type": "text/html; charset=utf-8"})
        urls = [f"{server.url}/good"]
        if request.body["q"] == "poisoned":
            urls += [*bad, *(f"{server.url}/slow?{i}" for i in range(8))]
        return reply({"organic": [{"link": url, "title": "t", "snippet": "s"} for url in urls]})

    server = web(answer)
    engine, start = open_with_pages(server, online_timeout=1.5), time.monotonic()
    poisoned, danube = engine.search(["poisoned", "danube"], 20)
    assert time.monotonic() - start < 3
    assert (len(poisoned), len(danube)) == (15, 1)
    assert SENTENCES[0] in poisoned[0].document.text and danube[0] == poisoned[0]
    assert {hit.document.text for hit in poisoned[1:]} == {"s"}
    engine.close()


def test_pages_are_cached_too(service: Any, tmp_path: Path) -> None:
    """With a cache file a page is fetched once; failed pages are fetched again."""
    path = str(tmp_path / "cache")
    first = open_with_pages(service, online_cache=path)
    hits = first.search(["danube"], 3)
    first.close()
    service.requests.clear()
    second = open_with_pages(service, online_cache=path)
    assert second.search(["danube"], 3) == hits
    assert sorted(request.path for request in service.requests) == ["/hostile", "/missing"]
    second.close()


def test_longer_texts_than_the_cached_ones_are_fetched_again(
    service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that was cut for the cache is not returned when more characters are requested."""
    monkeypatch.setattr(online_engine, "MAX_CACHED_CHARS", 50)
    lengths = []
    for page_chars in (20, 50, 300):
        engine = open_with_pages(service, online_cache=str(tmp_path / "c"), page_chars=page_chars)
        lengths.append(len(engine.search(["danube"], 1)[0][0].document.text))
        engine.close()
    assert lengths[0] <= 20 < lengths[1] <= 50 < lengths[2] <= 300
    assert [request.path for request in service.requests].count("/good") == 2


def test_the_default_policy_fetches_no_local_page(service: Any) -> None:
    """By default no page on 127.0.0.1 is requested, so all results keep their snippets."""
    config = OnlineConfig(online_url=service.url, requests_per_second=1000.0, page_text=True)
    settings = online_engine.RetrieverConfig("serper", online=config)
    engine = online_engine.open_retriever(settings)
    texts = [hit.document.text for hit in engine.search(["danube"], 3)[0]]
    assert texts == ["snippet of /good", "snippet of /missing", "snippet of /hostile"]
    assert [request.method for request in service.requests] == ["POST"]


def test_visit_returns_title_and_text(service: Any) -> None:
    """A page has title and text; a page that is missing or not public is an error."""
    policy = AddressPolicy(frozenset({service.port}), (ipaddress.ip_network("127.0.0.1/32"),))
    article = visit(f"{service.url}/good", policy)
    assert article.title == "Danube" and SENTENCES[0] in article.text
    with pytest.raises(PageError, match="status 404"):
        visit(f"{service.url}/missing", policy)
    for url in (f"{service.url}/hostile", "http://[::1]/"):
        with pytest.raises(PageError, match="AddressRefused"):
            visit(url, policy)
    with pytest.raises(PageError, match="AddressRefused"):
        visit(f"{service.url}/good")
