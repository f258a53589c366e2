"""The Brave Search API."""

import html
import re
from dataclasses import replace

from search_r1.online.service import (
    Ask,
    Call,
    Credentials,
    Found,
    Json,
    Service,
    read_items,
)


def build(credentials: Credentials, ask: Ask) -> Call:
    """GET with `q`, `count` (1 to 20) and the page as `offset` (0 to 9), without bold marks."""
    params = {
        "q": ask.query,
        "count": str(ask.count),
        "offset": str(ask.page),
        "text_decorations": "false",
        "result_filter": "web",
    }
    headers = {"Accept": "application/json", "X-Subscription-Token": credentials.key}
    return Call(params, headers)


def read(answer: Json) -> list[Found]:
    """`web.results`, absent where nothing was found; its texts have HTML entities."""
    if answer["type"] != "search":
        raise TypeError(f"type is {answer['type']!r}, expected 'search'")
    results = (answer.get("web") or {"results": []})["results"]
    return [_plain(found) for found in read_items(results, "url", "title", "description")]


def _plain(found: Found) -> Found:
    return replace(found, title=html.unescape(found.title), snippet=html.unescape(found.snippet))


SERVICE = Service(
    name="brave",
    url="https://api.search.brave.com/res/v1/web/search",
    key_variable="BRAVE_API_KEY",
    most_per_request=20,
    most=200,
    build=build,
    read=read,
    spent=re.compile(r"QUOTA|quota"),
    most_chars=400,
    most_words=50,
)
