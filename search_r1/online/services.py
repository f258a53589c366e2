"""The search services: how each is asked, and how its answer is read.

A new one is a function that builds a request, one that reads an answer, a row of `ALL`, and its
name in `search.backends.registry`.
"""

import html
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from search_r1.search.schema import well_formed

Json = Any
MOST_RESULTS = 100
"""Of an answer; no service has half as many."""
NEVER = re.compile(r"(?!)")


@dataclass(frozen=True)
class Credentials:
    """What the environment holds for a service; only requests ever carry it."""

    key: str = field(repr=False)
    setting: str = field(default="", repr=False)
    """A second value that a service wants: Google's search engine id."""


@dataclass(frozen=True)
class SearchRequest:
    """One request: `count` results of `query`, `page` (from 0) of pages of that size."""

    query: str
    count: int
    page: int = 0


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request without its address: GET with `params`, POST if there is a `body`."""

    params: Mapping[str, str] = field(default_factory=dict, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: Mapping[str, Json] | None = None


@dataclass(frozen=True)
class SearchResult:
    """A result: its page, title and snippet, and the service's own score if it gives one."""

    url: str
    title: str
    snippet: str
    score: float | None = None


@dataclass(frozen=True)
class Service:
    """A row of the table of services."""

    name: str
    url: str
    key_variable: str
    """The environment variable with the key."""
    build: Callable[[Credentials, SearchRequest], HttpRequest]
    read: Callable[[Json], list[SearchResult]]
    """Raises KeyError, TypeError or AttributeError for an answer outside the documented form."""
    most_per_request: int = 10
    most: int = 100
    """Results that can be had for a query over all its pages."""
    setting_variable: str | None = None
    spent: re.Pattern[str] = NEVER
    """In a 429: the quota is used up, asking again is useless."""
    busy: re.Pattern[str] = NEVER
    """In another 4xx: a limit of rate all the same, asking again helps."""
    most_chars: int = 2048
    most_words: int = 1000
    """Longer queries are cut at a word, since the service would refuse them."""

    def shorten(self, query: str) -> str:
        """`query` on one line, cut at a word to what the service takes."""
        words = well_formed(query).split()[: self.most_words]
        text = " ".join(words)
        if len(text) <= self.most_chars:
            return text
        head, space, _ = text[: self.most_chars + 1].rpartition(" ")
        return head if space else text[: self.most_chars]

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that it needs."""
        return tuple(v for v in (self.key_variable, self.setting_variable) if v is not None)


def text_of(item: Mapping[str, Json], name: str) -> str:
    """The text of a field on one line, "" where it is absent; raises TypeError for other types."""
    value = item.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, expected text")
    return " ".join(well_formed(value).split())


def read_items(items: Json, url: str, title: str, snippet: str) -> list[SearchResult]:
    """Results of a list of objects whose fields have these names; those without address go."""
    if not isinstance(items, list):
        raise TypeError(f"the results are {type(items).__name__}, expected a list")
    known = items[:MOST_RESULTS]
    found = [SearchResult(text_of(i, url), text_of(i, title), text_of(i, snippet)) for i in known]
    return [result for result in found if result.url]


def _ask_google(credentials: Credentials, ask: SearchRequest) -> HttpRequest:
    """GET with `num` (1 to 10) and the 1-based `start`; `cx` is the id of a search engine."""
    start = str(1 + ask.page * 10)
    params = {"key": credentials.key, "cx": credentials.setting, "q": ask.query}
    return HttpRequest({**params, "num": str(ask.count), "start": start})


def _read_google(answer: Json) -> list[SearchResult]:
    """`items`, absent where nothing was found."""
    if answer["kind"] != "customsearch#search":
        raise TypeError(f"kind is {answer['kind']!r}, expected 'customsearch#search'")
    return read_items(answer.get("items", []), "link", "title", "snippet")


def _ask_serpapi(credentials: Credentials, ask: SearchRequest) -> HttpRequest:
    """GET with `num` and the 0-based `start`."""
    params = {"engine": "google", "q": ask.query, "num": str(ask.count)}
    return HttpRequest({**params, "start": str(ask.page * 10), "api_key": credentials.key})


def _read_serpapi(answer: Json) -> list[SearchResult]:
    """`organic_results`; a search without results comes as an `error` with status 200."""
    nothing = "hasn't returned any results"
    if "organic_results" not in answer and nothing in answer["error"]:
        return []
    return read_items(answer["organic_results"], "link", "title", "snippet")


def _ask_brave(credentials: Credentials, ask: SearchRequest) -> HttpRequest:
    """GET with `count` (1 to 20) and the page as `offset` (0 to 9), without bold marks."""
    params = {"q": ask.query, "count": str(ask.count), "offset": str(ask.page)}
    headers = {"Accept": "application/json", "X-Subscription-Token": credentials.key}
    return HttpRequest({**params, "text_decorations": "false", "result_filter": "web"}, headers)


def _read_brave(answer: Json) -> list[SearchResult]:
    """`web.results`, absent where nothing was found; its texts have HTML entities."""
    if answer["type"] != "search":
        raise TypeError(f"type is {answer['type']!r}, expected 'search'")
    results = (answer.get("web") or {"results": []})["results"]
    return [
        replace(found, title=html.unescape(found.title), snippet=html.unescape(found.snippet))
        for found in read_items(results, "url", "title", "description")
    ]


def _ask_serper(credentials: Credentials, ask: SearchRequest) -> HttpRequest:
    """POST with the 1-based `page`."""
    body = {"q": ask.query, "num": ask.count, "page": ask.page + 1}
    return HttpRequest(headers={"X-API-KEY": credentials.key}, body=body)


def _read_serper(answer: Json) -> list[SearchResult]:
    """`organic`."""
    return read_items(answer["organic"], "link", "title", "snippet")


def _ask_tavily(credentials: Credentials, ask: SearchRequest) -> HttpRequest:
    """POST with `max_results` (1 to 20); there are no further pages."""
    body = {"query": ask.query, "max_results": ask.count, "search_depth": "basic"}
    return HttpRequest(headers={"Authorization": f"Bearer {credentials.key}"}, body=body)


def _read_tavily(answer: Json) -> list[SearchResult]:
    """`results`, with scores of the service."""
    results = [item for item in answer["results"][:MOST_RESULTS] if item.get("url")]
    found = read_items(results, "url", "title", "content")
    scores = [float(item["score"]) for item in results]
    if not all(map(math.isfinite, scores)):
        raise TypeError("a score is not finite")
    return [replace(f, score=score) for f, score in zip(found, scores, strict=True)]


ALL = (
    Service(
        name="google",
        url="https://www.googleapis.com/customsearch/v1",
        key_variable="GOOGLE_API_KEY",
        setting_variable="GOOGLE_CSE_ID",
        build=_ask_google,
        read=_read_google,
        spent=re.compile(r"per day|daily ?limit", re.IGNORECASE),
        busy=re.compile(r"rateLimitExceeded", re.IGNORECASE),
    ),
    Service(
        name="serpapi",
        url="https://serpapi.com/search.json",
        key_variable="SERPAPI_API_KEY",
        build=_ask_serpapi,
        read=_read_serpapi,
        spent=re.compile(r"run out of searches", re.IGNORECASE),
    ),
    Service(
        name="brave",
        url="https://api.search.brave.com/res/v1/web/search",
        key_variable="BRAVE_API_KEY",
        most_per_request=20,
        most=200,
        build=_ask_brave,
        read=_read_brave,
        spent=re.compile(r"QUOTA|quota"),
        most_chars=400,
        most_words=50,
    ),
    Service(
        name="serper",
        url="https://google.serper.dev/search",
        key_variable="SERPER_API_KEY",
        build=_ask_serper,
        read=_read_serper,
    ),
    Service(
        name="tavily",
        url="https://api.tavily.com/search",
        key_variable="TAVILY_API_KEY",
        most_per_request=20,
        most=20,
        build=_ask_tavily,
        read=_read_tavily,
        most_chars=400,
    ),
)
SERVICES = {service.name: service for service in ALL}
"""By --retriever_name."""
