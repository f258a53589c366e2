"""What a retriever says of itself: fetched before an agent is started, and kept by evaluations."""

from collections.abc import Mapping
from typing import Any

from search_r1.retrieval.client import RetrievalClient, read_urls
from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable
from verl import plugins
from verl.config.agent import EMPTY_URL
from verl.errors import ConfigError, ToolError, explain

Facts = Mapping[str, Any]

NO_RETRIEVER: Facts = {"retriever": "none"}
"""Facts for a method that uses no retriever."""
EMPTY_RETRIEVER: Facts = {"retriever": "empty"}
"""Facts for `--retriever-url empty` and for a server that never finds anything."""
SERVER_KEYS = ("limits", "default_topk", "memory")
"""Keys of `/info` that do not affect any answer."""
CONTROLS = ("none", "empty", "random", "oracle")
"""Control retrievers, used for diagnostics instead of a real search."""


async def retriever_facts(url: str) -> Facts:
    """Fetch `/info` of a `retriever.url`; all its addresses must agree. Raises ToolError."""
    if url == EMPTY_URL:
        return EMPTY_RETRIEVER
    if url.startswith(plugins.PYTHON_PREFIX):
        return {"retriever": url}
    try:
        clients = {address: RetrievalClient(address, max_retries=1) for address in read_urls(url)}
    except ValueError as error:
        fix = "correct it, or use no retriever: --retriever-url empty"
        raise ConfigError(f"--retriever-url: {error}; fix: {fix}") from error
    facts = {address: await _server_facts(address, client) for address, client in clients.items()}
    first = next(iter(facts.values()))
    for address, other in facts.items():
        if other != first:
            fix = "give addresses of servers with the same corpus and index"
            raise ToolError(explain(f"retriever {address}", other, f"the same as {first}", fix))
    return first


async def _server_facts(url: str, client: RetrievalClient) -> Facts:
    try:
        info = await client.info()
    except RetrieverRefused as error:
        if error.status in (401, 403):
            fix = "set RETRIEVER_TOKEN to the server's token"
            raise ToolError(explain(f"retriever {url}", str(error), "access", fix)) from error
        return {"retriever": "unknown", "address": url}  # other implementations have no /info
    except RetrieverUnavailable as error:
        fix = "bash retrieval_launch.sh, or --retriever-url URL, or --retriever-url empty"
        raise ToolError(explain("retriever", str(error), "a search server", fix)) from error
    finally:
        await client.aclose()
    return {name: value for name, value in info.items() if name not in SERVER_KEYS}
