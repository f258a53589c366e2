"""SerpAPI's Google results."""

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
NOTHING_FOUND = "hasn't returned any results"


def build(credentials: Credentials, ask: Ask) -> Call:
    """GET with `engine`, `q`, `num`, the 0-based `start` and `api_key`."""
    params = {
        "engine": "google",
        "q": ask.query,
        "num": str(ask.count),
        "start": str(ask.page * PER_REQUEST),
        "api_key": credentials.key,
    }
    return Call(params)


def read(answer: Json) -> list[Found]:
    """`organic_results`; a search without results is told as an `error` of a good answer."""
    if "organic_results" not in answer and NOTHING_FOUND in answer["error"]:
        return []
    return read_items(answer["organic_results"], "link", "title", "snippet")


SERVICE = Service(
    name="serpapi",
    url="https://serpapi.com/search.json",
    key_variable="SERPAPI_API_KEY",
    most_per_request=PER_REQUEST,
    most=100,
    build=build,
    read=read,
    spent=re.compile(r"run out of searches", re.IGNORECASE),
)
