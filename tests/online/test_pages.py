"""Texts of pages as documents: the article, or the snippet where there is none in time."""

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
from search_r1.online.pages import cut, visit
from search_r1.search.backends.base import collect
from search_r1.search.settings import OnlineConfig
from tests.online.article import ARTICLE, SENTENCES


@given(st.text(alphabet="ab \n", max_size=40), st.integers(1, 45))
def test_cut_at_a_word(text: str, most: int) -> None:
    """A prefix of at most `most` characters, ending with a whole word if there is any break."""
    short = cut(text, most)
    assert text.startswith(short) and len(short) <= most
    if len(text) > most and any(c.isspace() for c in text[:most].strip()):
        assert text[len(short)].isspace()


@pytest.fixture
def service(web: Any, reply: Any) -> Any:
    """A service and its pages on one server: a good page, a missing one, and a hostile one."""

    def answer(asked: Any) -> Any:
        if asked.method == "POST":
            paths = ["/good", "/missing", "/hostile", "/good"]
            items = [
                {"title": path, "link": f"{server.url}{path}", "snippet": f"snippet of {path}"}
                for path in paths
            ]
            return reply({"organic": items})
        if asked.path == "/hostile":
            return reply(b"", 302, {"Location": f"http://[::1]:{server.port}/admin"})
        if asked.path == "/missing":
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
    """A page that can be read gives its text; one that cannot keeps its snippet."""
    engine = open_with_pages(service, page_chars=300)
    with collect() as seconds:
        found = engine.search(["danube", "river"], 3)
    texts = [hit.document.text for hit in found[0]]
    assert SENTENCES[0] in texts[0] and len(texts[0]) <= 300
    assert texts[0].split()[-1] in SENTENCES[2].split()  # no word is cut
    assert texts[1:] == ["snippet of /missing", "snippet of /hostile"]
    assert found[0] == found[1]
    fetched = [asked.path for asked in service.asked if asked.method == "GET"]
    assert sorted(fetched) == ["/good", "/hostile", "/missing"]
    assert set(seconds) == {"search", "fetch"}
    assert (engine.info()["page_text"], engine.info()["page_chars"]) == (True, 300)
    engine.close()


def test_one_bad_address_costs_its_own_text_only(web: Any, reply: Any) -> None:
    """Of a merged batch the results without a web address, or on a slow page, keep snippets."""
    bad = ["http://xn--/", "http://[", "javascript:x", "\ud800", "http://\x00/", "https://xn--0/"]

    def answer(asked: Any) -> Any:
        if asked.method == "GET":
            time.sleep(3 if asked.path == "/slow" else 0)
            return reply(ARTICLE.encode(), headers={"Content-Type": "text/html; charset=utf-8"})
        urls = [f"{server.url}/good"]
        if asked.body["q"] == "poisoned":
            urls += [*bad, *(f"{server.url}/slow?{i}" for i in range(8))]
        return reply({"organic": [{"link": url, "title": "t", "snippet": "s"} for url in urls]})

    server = web(answer)
    engine, start = open_with_pages(server, online_timeout=1.5), time.monotonic()
    found = engine.search(["poisoned", "danube"], 20)
    assert time.monotonic() - start < 3
    assert [len(hits) for hits in found] == [15, 1]
    assert SENTENCES[0] in found[0][0].document.text and found[1][0] == found[0][0]
    assert {hit.document.text for hit in found[0][1:]} == {"s"}
    engine.close()


def test_pages_are_kept_too(service: Any, tmp_path: Path) -> None:
    """With a cache a page is fetched once, also for another page_chars; failures again."""
    path = str(tmp_path / "cache")
    first = open_with_pages(service, online_cache=path)
    found = first.search(["danube"], 3)
    first.close()
    service.asked.clear()
    second = open_with_pages(service, online_cache=path)
    assert second.search(["danube"], 3) == found
    assert sorted(asked.path for asked in service.asked) == ["/hostile", "/missing"]
    second.close()


def test_the_shipped_policy_fetches_no_page_here(service: Any) -> None:
    """By the settings alone nothing of 127.0.0.1 is read: all snippets, no page asked for."""
    config = OnlineConfig(online_url=service.url, requests_per_second=1000.0, page_text=True)
    settings = online_engine.RetrieverConfig("serper", online=config)
    engine = online_engine.open_retriever(settings)
    texts = [hit.document.text for hit in engine.search(["danube"], 3)[0]]
    assert texts == ["snippet of /good", "snippet of /missing", "snippet of /hostile"]
    assert [asked.method for asked in service.asked] == ["POST"]


def test_a_page_is_visited_by_its_address(service: Any) -> None:
    """Title and text of a page; a typed error for one that is missing or not public."""
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
