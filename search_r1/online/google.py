"""Google's Custom Search JSON API: needs a key and the id of a search engine (`cx`)."""

import re

from search_r1.online.service import (
    Ask,
    Call,
    Credentials,
    Found,
    Json,
    Service,
    read_items,
)

PER_REQUEST = 10


def build(credentials: Credentials, ask: Ask) -> Call:
    """GET with `key`, `cx`, `q`, `num` (1 to 10) and the 1-based `start`."""
    params = {
        "key": credentials.key,
        "cx": credentials.setting,
        "q": ask.query,
        "num": str(ask.count),
        "start": str(1 + ask.page * PER_REQUEST),
    }
    return Call(params)


def read(answer: Json) -> list[Found]:
    """`items`, absent where nothing was found."""
    if answer["kind"] != "customsearch#search":
        raise TypeError(f"kind is {answer['kind']!r}, expected 'customsearch#search'")
    return read_items(answer.get("items", []), "link", "title", "snippet")


SERVICE = Service(
    name="google",
    url="https://www.googleapis.com/customsearch/v1",
    key_variable="GOOGLE_API_KEY",
    setting_variable="GOOGLE_CSE_ID",
    most_per_request=PER_REQUEST,
    most=100,
    build=build,
    read=read,
    spent=re.compile(r"per day|daily ?limit", re.IGNORECASE),
    busy=re.compile(r"rateLimitExceeded", re.IGNORECASE),
)
