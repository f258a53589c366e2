"""Tavily's search, which scores its results itself."""

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
    """POST of `query` and `max_results` (1 to 20); there are no further pages."""
    body = {"query": ask.query, "max_results": ask.count, "search_depth": "basic"}
    return Call(headers={"Authorization": f"Bearer {credentials.key}"}, body=body)


def read(answer: Json) -> list[Found]:
    """`results` with their scores."""
    results = [item for item in answer["results"] if item.get("url")]
    found = read_items(results, "url", "title", "content")
    scores = [float(item["score"]) for item in results]
    return [replace(f, score=score) for f, score in zip(found, scores, strict=True)]


SERVICE = Service(
    name="tavily",
    url="https://api.tavily.com/search",
    key_variable="TAVILY_API_KEY",
    most_per_request=20,
    most=20,
    build=build,
    read=read,
    most_chars=400,
)
