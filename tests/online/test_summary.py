"""Summaries of pages by a chat model: what is asked, kept, cached and refused."""

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from search_r1.online.addresses import AddressPolicy
from search_r1.online.engine import OnlineRetriever, open_online
from search_r1.online.summary import KEY, NOTHING
from search_r1.retrieval.errors import SetupError, UpstreamRefused, UpstreamUnavailable
from search_r1.retrieval.settings import OnlineConfig
from tests.online.article import ARTICLE, SENTENCES

PATHS = ("/rivers", "/weather")


@pytest.fixture
def service(web: Any, reply: Any) -> Any:
    """Start a search service with its pages; both pages hold the article."""

    def answer(request: Any) -> Any:
        if request.method == "GET":
            return reply(ARTICLE.encode(), headers={"Content-Type": "text/html; charset=utf-8"})
        items = [
            {"title": p, "link": f"{server.url}{p}", "snippet": f"snippet of {p}"} for p in PATHS
        ]
        return reply({"organic": items})

    server = web(answer)
    return server


@pytest.fixture
def model(web: Any, reply: Any) -> Any:
    """Start a chat server that answers with the query of the message, and knows no weather."""

    def answer(request: Any) -> Any:
        query = request.body["messages"][0]["content"].split("Query: ")[1].splitlines()[0]
        text = NOTHING if query == "weather" else f"About {query}:\nso and so"
        return reply({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    return web(answer)


def open_summarized(service: Any, model: Any, **options: Any) -> OnlineRetriever:
    policy = AddressPolicy(frozenset({service.port}), (ipaddress.ip_network("127.0.0.1/32"),))
    settings = {"page_text": True, "page_summary_url": f"{model.url}/v1", "page_chars": 60,
                "page_summary_model": "reader", "requests_per_second": 1000.0,
                "online_retries": 0, **options}  # fmt: skip
    return open_online("serper", OnlineConfig(online_url=service.url, **settings), policy)


def texts(engine: OnlineRetriever, *queries: str) -> list[list[str]]:
    return [[hit.document.text for hit in hits] for hits in engine.search(queries, 2)]


def test_each_query_has_its_own_summary_of_a_page(
    service: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model reads beyond a document's length; a page without help keeps its snippet."""
    monkeypatch.setenv(KEY, "k3y")
    engine = open_summarized(service, model)
    found = texts(engine, "danube", "weather")
    assert found == [["About danube: so and so"] * 2, [f"snippet of {path}" for path in PATHS]]
    assert len([r for r in service.requests if r.method == "GET"]) == len(PATHS)
    asked = model.requests[0]
    assert "Bearer k3y" in asked.headers.values() and asked.body["model"] == "reader"
    assert SENTENCES[-1] in asked.body["messages"][0]["content"]
    assert engine.info()["page_summary"] == "reader" and "k3y" not in str(engine.info())
    engine.close()


def test_summaries_are_cached_by_model(service: Any, model: Any, tmp_path: Path) -> None:
    """A second server with the file asks nothing; another model is asked."""
    cache = str(tmp_path / "web.sqlite")
    for name, asked in (("reader", 2), ("reader", 0), ("other", 2)):
        model.requests.clear()
        engine = open_summarized(service, model, online_cache=cache, page_summary_model=name)
        assert texts(engine, "danube") == [["About danube: so and so"] * 2]
        assert len(model.requests) == asked
        engine.close()


@pytest.mark.parametrize(
    ("status", "error"), [(401, UpstreamRefused), (503, UpstreamUnavailable)]
)  # fmt: skip
def test_a_model_that_fails_fails_the_search(
    service: Any, web: Any, reply: Any, status: int, error: type[Exception]
) -> None:
    """No document is passed off as a summary."""
    engine = open_summarized(service, web(lambda request: reply({"error": "no"}, status)))
    with pytest.raises(error):
        texts(engine, "danube")
    engine.close()


@pytest.mark.parametrize(
    "options",
    [{"page_text": False}, {"page_summary_url": None}, {"page_summary_model": None},
     {"page_summary_url": "localhost:8000/v1"}],
)  # fmt: skip
def test_incomplete_settings_are_refused(service: Any, model: Any, options: Any) -> None:
    """The server does not start without one of the three."""
    with pytest.raises(SetupError):
        open_summarized(service, model, **options)
