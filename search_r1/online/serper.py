"""Serper's Google results."""

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
    """POST of `q`, `num` and the 1-based `page`."""
    body = {"q": ask.query, "num": ask.count, "page": ask.page + 1}
    return Call(headers={"X-API-KEY": credentials.key}, body=body)


def read(answer: Json) -> list[Found]:
    """`organic`."""
    return read_items(answer["organic"], "link", "title", "snippet")


SERVICE = Service(
    name="serper",
    url="https://google.serper.dev/search",
    key_variable="SERPER_API_KEY",
    most_per_request=10,
    most=100,
    build=build,
    read=read,
)
