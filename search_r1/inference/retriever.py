"""The retriever that is asked: reached before long work, and known by what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search_r1.search.client import RetrievalClient
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable
from search_r1.search.transport import read_urls
from verl import plugins
from verl.config import Config
from verl.config.agent import EMPTY
from verl.errors import ConfigError, ToolError, explain

Facts = Mapping[str, Any]

NO_RETRIEVER: Facts = {"retriever": "none"}
"""Of a method that asks none."""
NOTHING_FOUND: Facts = {"retriever": "empty"}
"""Of `--retriever-url empty`, and of a server that finds nothing."""
ALLOWANCES = ("limits", "default_topk")
"""What a server says of itself that decides no answer."""
CONTROLS = ("none", "empty", "random", "oracle")
"""Retrievers whose documents are known beforehand: diagnostics, not search."""


async def facts_of(config: Config) -> Facts:
    """What answers the searches: engine, corpus, index and encoder, as `/info` tells them.

    Servers that stand in for each other must serve the same. Raises ToolError when one does
    not answer, or differs.
    """
    if config.retriever.url == EMPTY:
        return NOTHING_FOUND
    if config.retriever.url.startswith(plugins.GIVEN):
        return {"retriever": config.retriever.url}
    first: Facts | None = None
    for url in _addresses(config.retriever.url):
        found = await _facts_of(url, config)
        if first is not None and found != first:
            fix = "give addresses of servers with the same corpus and index"
            raise ToolError(explain(f"retriever {url}", found, f"as {first}", fix))
        first = found
    assert first is not None, "read_urls gives at least one"
    return first


def _addresses(urls: str) -> tuple[str, ...]:
    try:
        return read_urls(urls)
    except ValueError as error:
        fix = "--retriever-url http://HOST:PORT, or --retriever-url empty"
        raise ConfigError(explain("--retriever-url", urls, str(error), fix)) from error


async def _facts_of(url: str, config: Config) -> Facts:
    client = RetrievalClient(url, config.retriever.topk, max_retries=1)
    try:
        found = await client.info()
    except RetrieverRefused as error:
        if error.status in (401, 403):
            fix = "set RETRIEVER_TOKEN to the server's token"
            raise ToolError(explain(f"retriever {url}", str(error), "access", fix)) from error
        return {"retriever": "unknown", "address": url}  # a server of another make has no /info
    except RetrieverUnavailable as error:
        fix = "bash retrieval_launch.sh, or --retriever-url URL, or --retriever-url empty"
        raise ToolError(explain("retriever", str(error), "a search server", fix)) from error
    finally:
        await client.aclose()
    return {name: value for name, value in found.items() if name not in ALLOWANCES}
