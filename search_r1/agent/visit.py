"""The tool `visit`: opens a whole document by its id, or a web page by its address.

Documents come from the retrieval server that also searches. Pages are fetched by
`search_r1.online`, an optional extra whose address rules block addresses that are not public.
"""

import asyncio
import importlib
import importlib.util
from collections.abc import Callable
from typing import Protocol

from search_r1.agent.retriever import TEST_QUERY, ServedTool, build_client, python_retriever
from search_r1.agent.search import to_tool_error
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.errors import SearchError, install_command
from search_r1.retrieval.protocol import RETRIED, count_retries
from search_r1.retrieval.schema import Document
from verl.agent.interface import Item, Observation, Tool, text_arguments
from verl.config import Config
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.errors import ToolRefused, explain

PAGES = ("http://", "https://")
FAILED = "visits_failed"
"""Fault name: visits that the retrieval server did not answer after all retries."""


class DocumentSource(Protocol):
    """A source of documents by id."""

    async def document(self, id: str) -> Document | None:
        """Return the document, or None if there is none. Raises a SearchError."""
        ...


class OpenedPage(Protocol):
    """The text of a web page."""

    @property
    def title(self) -> str: ...

    @property
    def text(self) -> str: ...


class VisitTool(Tool):
    """Opens one document or page; if it does not exist, the observation says so."""

    name = "visit"
    description = "Opens a whole document by its id, or the web page at an address (https://…)."
    parameters = text_arguments(target="the id of a document, or an address")
    counted_as = "visits"
    shows_ids = True
    faults = (RETRIED, FAILED)

    def __init__(
        self,
        documents: DocumentSource | None,
        open_page: Callable[[str], OpenedPage] | None = None,
    ) -> None:
        """`documents`: None without a server; `open_page`: may block, default `open_online`."""
        self.documents, self._open_page = documents, open_page or open_online

    async def call(self, *, target: str) -> Observation:  # type: ignore[override]
        """Return the document or page. Raises ToolError if the retrieval server does not answer."""
        if target.startswith(PAGES):
            try:
                page = await asyncio.to_thread(self._open_page, target)
            except PageUnavailable as error:
                return Observation((Item(f"Error: {error}"),))
            return Observation((Item(page.text, page.title, target),))
        if self.documents is None:
            return Observation((Item("Error: there are no documents"),))
        with count_retries() as faults:
            try:
                document = await self.documents.document(target)
            except SearchError as error:
                raise to_tool_error(error, {**faults, FAILED: 1}) from error
        if document is None:
            return Observation((Item(f"Error: no document has the id {target!r}"),), dict(faults))
        item = Item(document.text, document.title, document.id, source=document)
        return Observation((item,), dict(faults))


class PageUnavailable(Exception):
    """A page that cannot be read; the policy sees the message."""


def open_online(url: str) -> OpenedPage:
    """Fetch the page at a public address; blocks for up to 15 s. Raises PageUnavailable."""
    if not all(map(importlib.util.find_spec, ("trafilatura", "search_r1.online"))):
        raise PageUnavailable(f"pages cannot be opened here: {install_command('online')}")
    # Optional and slow to import: needed only when a page is opened.
    pages = importlib.import_module("search_r1.online.pages")
    try:
        page: OpenedPage = pages.visit(url)
    except pages.PageError as error:
        raise PageUnavailable(str(error)) from error
    return page


class ServedVisit(ServedTool, VisitTool):
    """The tool `visit` over a run's retrieval server."""

    def __init__(self, options: ServerConfig) -> None:
        """Raises ConfigError for an invalid address."""
        self.options, self.client = options, build_client(options)
        super().__init__(self.client)

    async def send_test_request(self, client: RetrievalClient) -> str:
        """Open the first document that a search returns. Raises ToolRefused if it is missing."""
        ids = [document.id for document in await client.search(TEST_QUERY)]
        if not ids or ids[0].startswith(PAGES) or await client.document(ids[0]) is not None:
            return ""
        got = f"no document with the id {ids[0]!r}, which its search returned"
        fix = "start it with --corpus_path, or leave visit out of agent.tools"
        raise ToolRefused(explain(f"visit: retriever.url={self.label}", got, "that document", fix))

    async def aclose(self) -> None:
        await self.client.aclose()


def build_visit(config: Config) -> VisitTool:
    """Build a run's tool over its retriever, or without documents if `retriever.url` is `empty`."""
    if (retriever := python_retriever(config)) is not None:
        return VisitTool(retriever if hasattr(retriever, "document") else None)
    options = config.retriever
    return VisitTool(None) if options.url == EMPTY_URL else ServedVisit(options)
