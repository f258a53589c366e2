"""The tool `visit`: a whole document by its id, or the page at an address.

Documents come from the retrieval server that searches. Pages come through `search_r1.online`, whose
policy keeps a policy away from addresses that are not public; that package is an extra.
"""

import asyncio
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from search_r1.agent.retriever import (
    QUERY,
    RetrieverTool,
    build_client,
    failure,
    given_retrieval,
)
from search_r1.search.client import RETRIED, RetrievalClient, counting
from search_r1.search.errors import SearchError, install_command
from search_r1.search.schema import Document
from verl.agent.interface import Item, Observation, text_arguments
from verl.config import Config
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.errors import ToolRefused, explain

PAGES = ("http://", "https://")
FAILED = "visits_failed"
"""Visits that the retrieval server did not answer, after all retries."""


class Documents(Protocol):
    """What finds documents by their ids."""

    async def document(self, id: str) -> Document | None:
        """The document, or None. Raises a SearchError."""
        ...


class Page(Protocol):
    """What a page says."""

    @property
    def title(self) -> str: ...

    @property
    def text(self) -> str: ...


class VisitTool(RetrieverTool):
    """Opens one document or page. What is not there is an observation that says so."""

    name = "visit"
    description = "Opens a whole document by its id, or the web page at an address (https://…)."
    parameters = text_arguments(target="the id of a document, or an address")
    counted_as = "visits"
    shows_ids = True
    faults = (RETRIED, FAILED)

    def __init__(
        self,
        documents: Documents | None,
        open_page: Callable[[str], Page] | None = None,
        options: ServerConfig | None = None,
    ) -> None:
        """`documents` None: there is no server; `open_page` blocks; None: the online package's."""
        super().__init__(options)
        self.documents = documents
        self._open_page = open_page or open_online

    async def call(self, *, target: str) -> Observation:  # type: ignore[override]
        """The document or page. Raises ToolError when the retrieval server does not answer."""
        if target.startswith(PAGES):
            try:
                page = await asyncio.to_thread(self._open_page, target)
            except PageUnavailable as error:
                return Observation((Item(f"Error: {error}"),))
            return Observation((Item(page.text, page.title, target),))
        if self.documents is None:
            return Observation((Item("Error: there are no documents"),))
        with counting() as faults:
            try:
                found = await self.documents.document(target)
            except SearchError as error:
                raise failure(error, {**faults, FAILED: 1}) from error
        if found is None:
            return Observation((Item(f"Error: no document has the id {target!r}"),), dict(faults))
        return Observation((Item(found.text, found.title, found.id, found),), dict(faults))

    async def try_out(self, client: RetrievalClient) -> None:
        """The document of the first id that a search shows. Raises ToolRefused for none."""
        for id in [document.id for document in await client.search(QUERY)][:1]:
            is_page = id.startswith(PAGES)
            if not is_page and await client.document(id) is None:
                got = f"no document of the id {id!r}, which its own search shows"
                fix = "start it with --corpus_path, or leave visit out of agent.tools"
                raise ToolRefused(explain(f"visit: retriever.url={self.label}", got, "it", fix))

    async def aclose(self) -> None:
        if isinstance(self.documents, RetrievalClient):
            await self.documents.aclose()


class PageUnavailable(Exception):
    """A page that cannot be read; the message says why, for the policy."""


def open_online(url: str) -> Page:
    """The page at a public address. Raises PageUnavailable; blocks for up to 15 s."""
    if importlib.util.find_spec("trafilatura") is None:
        raise PageUnavailable(f"pages cannot be opened here: {install_command('online')}")
    # An extra, and heavy: wanted by the visitors of pages only.
    from search_r1.online.fetch import PageError  # noqa: PLC0415
    from search_r1.online.pages import visit  # noqa: PLC0415

    try:
        return visit(url)
    except PageError as error:
        raise PageUnavailable(str(error)) from error


def build_visit(config: Config) -> VisitTool:
    """The tool of a run, beside the configured retriever, or without one for url `empty`."""
    options, own = config.retriever, given_retrieval(config)
    if own is not None:
        documents = own if hasattr(own, "document") else None
        return VisitTool(documents, options=replace(options, url=EMPTY_URL))
    documents = None if options.url == EMPTY_URL else build_client(options)
    return VisitTool(documents, options=options)
