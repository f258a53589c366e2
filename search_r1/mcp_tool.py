"""The MCP tool `search`, which queries a `/retrieve` server."""

import contextlib
import functools
import logging
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from search_r1.plain import configure_logging
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.errors import SearchError
from search_r1.retrieval.service.running import address, bind, warn_if_open
from verl import __version__
from verl.errors import redact

MAX_TOPK = 100
MAX_RETRIES = 2
"""Retries of a search; few, since a client is waiting."""


class Found(BaseModel):
    id: str
    title: str
    text: str


class Results(BaseModel):
    """What a search found, best first."""

    documents: list[Found]


def build_server(url: str) -> MCPServer:
    """Build the MCP server over a retrieval server. Raises ValueError for an invalid url."""

    used: set[int] = set()

    @functools.cache
    def client(topk: int) -> RetrievalClient:
        used.add(topk)
        return RetrievalClient(url, topk, max_retries=MAX_RETRIES)

    @contextlib.asynccontextmanager
    async def closing(_: MCPServer) -> AsyncIterator[None]:
        """Close the clients' connections with the server."""
        yield
        for topk in sorted(used):
            await client(topk).aclose()

    client(1)  # refuse an invalid url before serving
    server = MCPServer(
        "search-r1",
        version=__version__,
        instructions="Searches a corpus of passages; each has an id, a title and a text.",
        log_level="WARNING",
        lifespan=closing,
    )

    @server.tool(title="Search the corpus")
    async def search(
        query: Annotated[str, Field(description="What to look for, in words.")],
        topk: Annotated[
            int, Field(ge=1, le=MAX_TOPK, description="How many documents to return.")
        ] = 3,
    ) -> Results:
        """Find the passages that fit a query best."""
        if not query.strip():
            raise ToolError("an empty query; expected words to search for")
        try:
            documents = await client(topk).search(query)
        except SearchError as error:
            raise ToolError(f"the search failed: {error}") from error
        return Results(documents=[Found(id=d.id, title=d.title, text=d.text) for d in documents])

    return server


def start(retriever_url: str, transport: str, host: str, port: int) -> int:
    """Serve until the client disconnects or the process ends; return the exit code."""
    # Logs go to standard error, since the protocol uses standard output.
    configure_logging(logging.WARNING, logging.BASIC_FORMAT)
    try:
        server = build_server(retriever_url)
    except (ValueError, httpx.InvalidURL) as error:
        sys.stderr.write(f"--retriever-url {redact(retriever_url)}: {error}\n")
        return 2
    if transport == "stdio":
        server.run("stdio")
    else:
        with bind(host, port) as bound:  # raises SetupError if the port is in use
            warn_if_open(bound, None, fix="put a proxy that requires a token in front of it")
            port = bound.getsockname()[1]  # the actual port for --port 0
            sys.stderr.write(f"the tool search is served at http://{address(bound)}/mcp\n")
        server.run("streamable-http", host=host, port=port)
    return 0
