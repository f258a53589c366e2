"""The search services: how to build a request for each of them and how to read its answer.

A new service needs these two functions, an entry in `ALL`, and a name in the backends' `registry`.
"""

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from search_r1.retrieval.schema import well_formed

Json = Any
MAX_RESULTS = 100
"""Maximum number of results that are read from an answer; no service returns half as many."""
NEVER = re.compile(r"(?!)")


@dataclass(frozen=True)
class Credentials:
    """Secrets of a service from the environment; they appear in requests only."""

    key: str = field(repr=False)
    setting: str = field(default="", repr=False)
    """A second value that a service needs: Google's search engine id."""


@dataclass(frozen=True)
class SearchRequest:
    """A request for page `page` (from 0) of the results of `query`, with `count` results a page."""

    query: str
    count: int
    page: int = 0
    with_box: bool = False
    """Ask for the service's own answer too."""


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request without its URL: a POST if there is a `body`, else a GET with `params`."""

    params: Mapping[str, str] = field(default_factory=dict, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: Mapping[str, Json] | None = None


@dataclass(frozen=True)
class SearchResult:
    """A search result: URL, title and snippet, and the score of the service if it has one."""

    url: str
    title: str
    snippet: str
    score: float | None = None


@dataclass(frozen=True)
class SearchService:
    """An entry of the table of services."""

    name: str
    url: str
    key_variable: str
    """Environment variable with the API key."""
    build: Callable[[Credentials, SearchRequest], HttpRequest]
    read: Callable[[Json], list[SearchResult]]
    """Parses an answer; raises KeyError, TypeError or AttributeError for an undocumented form."""
    read_box: Callable[[Json], list[SearchResult]] | None = None
    """Reads the service's own answers, best first; raises as `read` does. None: it has none."""
    max_per_request: int = 10
    max_results: int = 100
    """Maximum number of results for a query over all its pages."""
    setting_variable: str | None = None
    quota_exhausted: re.Pattern[str] = NEVER
    """Matches a 429 answer if the quota is used up, so that a retry is useless."""
    rate_limited: re.Pattern[str] = NEVER
    """Matches another 4xx answer that is a rate limit too, so that a retry helps."""
    max_query_chars: int = 2048
    max_query_words: int = 1000
    """Longer queries, which the service would refuse, are truncated at a word."""

    def shorten(self, query: str) -> str:
        """Return `query` on one line, truncated at a word to the limits of the service."""
        text = " ".join(well_formed(query).split()[: self.max_query_words])
        return truncate(text, self.max_query_chars)

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(v for v in (self.key_variable, self.setting_variable) if v is not None)


def truncate(text: str, max_chars: int) -> str:
    """Truncate `text` to at most `max_chars` characters, at white space if there is any."""
    if len(text) <= max_chars:
        return text
    head = text[:max_chars]
    if text[max_chars].isspace():
        return head.rstrip()
    if head[-1:].isspace():
        return head.rstrip() or head
    words = head.rsplit(None, 1)
    return words[0] if len(words) == 2 else head


def text_of(item: Mapping[str, Json], name: str) -> str:
    """Return a text field on one line, "" if it is missing; raises TypeError for other types."""
    value = item.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, expected text")
    return " ".join(well_formed(value).split())


def read_items(items: Json, url: str, title: str, snippet: str) -> list[SearchResult]:
    """Read results with URL from objects, given the names of their fields; raises TypeError."""
    if not isinstance(items, list):
        raise TypeError(f"the results are {type(items).__name__}, expected a list")
    results = [
        SearchResult(text_of(item, url), text_of(item, title), text_of(item, snippet))
        for item in items[:MAX_RESULTS]
    ]
    return [result for result in results if result.url]


def _ask_google(credentials: Credentials, request: SearchRequest) -> HttpRequest:
    """Build a GET with `num` (1 to 10), the 1-based `start`, and the search engine id `cx`."""
    start = str(1 + request.page * 10)
    params = {"key": credentials.key, "cx": credentials.setting, "q": request.query}
    return HttpRequest({**params, "num": str(request.count), "start": start})


def _read_google(answer: Json) -> list[SearchResult]:
    """Read `items`, which is missing if nothing was found."""
    if answer["kind"] != "customsearch#search":
        raise TypeError(f"kind is {answer['kind']!r}, expected 'customsearch#search'")
    return read_items(answer.get("items", []), "link", "title", "snippet")


def _ask_serpapi(credentials: Credentials, request: SearchRequest) -> HttpRequest:
    """Build a GET with `num` and the 0-based `start`."""
    params = {"engine": "google", "q": request.query, "num": str(request.count)}
    return HttpRequest({**params, "start": str(request.page * 10), "api_key": credentials.key})


def _read_serpapi(answer: Json) -> list[SearchResult]:
    """Read `organic_results`; a search without results is an `error` with status 200."""
    no_results = "hasn't returned any results"
    if "organic_results" not in answer and no_results in answer["error"]:
        return []
    return read_items(answer["organic_results"], "link", "title", "snippet")


def _ask_brave(credentials: Credentials, request: SearchRequest) -> HttpRequest:
    """Build a GET with `count` (1 to 20), the page as `offset` (0 to 9), and no bold markup."""
    params = {"q": request.query, "count": str(request.count), "offset": str(request.page)}
    headers = {"Accept": "application/json", "X-Subscription-Token": credentials.key}
    return HttpRequest({**params, "text_decorations": "false", "result_filter": "web"}, headers)


def _read_brave(answer: Json) -> list[SearchResult]:
    """Read `web.results`, missing if nothing was found; its texts have HTML entities."""
    if answer["type"] != "search":
        raise TypeError(f"type is {answer['type']!r}, expected 'search'")
    results = (answer.get("web") or {"results": []})["results"]
    return [
        replace(result, title=html.unescape(result.title), snippet=html.unescape(result.snippet))
        for result in read_items(results, "url", "title", "description")
    ]


def _ask_serper(credentials: Credentials, request: SearchRequest) -> HttpRequest:
    """Build a POST with the 1-based `page`."""
    body = {"q": request.query, "num": request.count, "page": request.page + 1}
    return HttpRequest(headers={"X-API-KEY": credentials.key}, body=body)


def _read_serper(answer: Json) -> list[SearchResult]:
    return read_items(answer["organic"], "link", "title", "snippet")


def _ask_tavily(credentials: Credentials, request: SearchRequest) -> HttpRequest:
    """Build a POST with `max_results` (1 to 20); there are no further pages."""
    body: dict[str, Json] = {"query": request.query, "max_results": request.count}
    body["search_depth"] = "basic"
    if request.with_box:
        body["include_answer"] = True
    return HttpRequest(headers={"Authorization": f"Bearer {credentials.key}"}, body=body)


def _read_tavily(answer: Json) -> list[SearchResult]:
    results = []
    for item in answer["results"][:MAX_RESULTS]:
        for result in read_items([item], "url", "title", "content"):  # none without a URL
            score = float(item["score"])
            if not math.isfinite(score):
                raise TypeError("a score is not finite")
            results.append(replace(result, score=score))
    return results


def _boxes(
    answer: Json, names: Mapping[str, Sequence[str]], links: Sequence[str]
) -> list[SearchResult]:
    """Read boxes by the names of their fields with text, in the order in which they answer.

    A box's id is not the address in it, since its page is another document.
    """
    found = []
    for name, fields in names.items():
        box = answer.get(name) or {}
        if not isinstance(box, dict):
            raise TypeError(f"{name} is {type(box).__name__}, expected an object")
        if text := next((text for field in fields if (text := _box_text(box, field))), ""):
            link = next((text_of(box, link) for link in links if box.get(link)), "")
            found.append(
                SearchResult(f"{name}:{link}" if link else name, text_of(box, "title"), text)
            )
    return found


def _box_text(box: Mapping[str, Json], field: str) -> str:
    """Return a field that is text, a number or a list of texts; "" for any other or no value."""
    value = box.get(field)
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = "; ".join(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return text_of({field: value}, field) if isinstance(value, str) else ""


def _read_serpapi_box(answer: Json) -> list[SearchResult]:
    """Read `answer_box`, whose text depends on its kind, and `knowledge_graph`."""
    box = ("answer", "result", "snippet", "list")
    return _boxes(
        answer, {"answer_box": box, "knowledge_graph": ("description",)}, ("link", "website")
    )


def _read_serper_box(answer: Json) -> list[SearchResult]:
    names = {"answerBox": ("answer", "snippet"), "knowledgeGraph": ("description",)}
    return _boxes(answer, names, ("link", "descriptionLink", "website"))


def _read_tavily_box(answer: Json) -> list[SearchResult]:
    """Read `answer`, a model's, which has no address; the score of the best result is 1."""
    text = text_of(answer, "answer")
    return [SearchResult("answer", "", text, 1.0)] if text else []


ALL = (
    SearchService(
        name="google",
        url="https://www.googleapis.com/customsearch/v1",
        key_variable="GOOGLE_API_KEY",
        setting_variable="GOOGLE_CSE_ID",
        build=_ask_google,
        read=_read_google,
        quota_exhausted=re.compile(r"per day|daily ?limit", re.IGNORECASE),
        rate_limited=re.compile(r"rateLimitExceeded", re.IGNORECASE),
    ),
    SearchService(
        name="serpapi",
        url="https://serpapi.com/search.json",
        key_variable="SERPAPI_API_KEY",
        build=_ask_serpapi,
        read=_read_serpapi,
        read_box=_read_serpapi_box,
        quota_exhausted=re.compile(r"run out of searches", re.IGNORECASE),
    ),
    SearchService(
        name="brave",
        url="https://api.search.brave.com/res/v1/web/search",
        key_variable="BRAVE_API_KEY",
        max_per_request=20,
        max_results=200,
        build=_ask_brave,
        read=_read_brave,
        quota_exhausted=re.compile(r"QUOTA_LIMITED"),  # any 429 has fields such as quota_limit
        max_query_chars=400,
        max_query_words=50,
    ),
    SearchService(
        name="serper",
        url="https://google.serper.dev/search",
        key_variable="SERPER_API_KEY",
        build=_ask_serper,
        read=_read_serper,
        read_box=_read_serper_box,
    ),
    SearchService(
        name="tavily",
        url="https://api.tavily.com/search",
        key_variable="TAVILY_API_KEY",
        max_per_request=20,
        max_results=20,
        build=_ask_tavily,
        read=_read_tavily,
        read_box=_read_tavily_box,
        max_query_chars=400,
    ),
)
SERVICES = {service.name: service for service in ALL}
