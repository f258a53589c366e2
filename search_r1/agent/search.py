"""The tool `search`: documents from a retrieval server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from search_r1 import loops
from search_r1.agent.retriever import (
    PROBE_TIMEOUT_S,
    TEST_QUERY,
    RetrieverTool,
    build_client,
    python_retriever,
    to_tool_error,
)
from search_r1.retrieval.client import RETRIED, RetrievalClient, count_retries
from search_r1.retrieval.errors import SearchError
from search_r1.retrieval.protocol import EmptyRetrieval, Retrieval
from search_r1.retrieval.schema import Document, fingerprint
from verl.agent.interface import Item, Observation, text_arguments
from verl.config import Config
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.errors import ToolRefused, explain

FAILED = "searches_failed"
"""Fault name: searches that were not answered after all retries."""
EMPTY, BLANK = "searches_without_documents", "documents_without_text"
"""Fault names: searches that found nothing, and found documents whose text is blank."""
NOT_INDEX = {"retriever", "num_documents", "default_topk", "fingerprint", "limits", "memory",
             "corpus", "encoder"}  # fmt: skip
"""Keys of `/info` that do not describe the backend and its index."""


class SearchTool(RetrieverTool):
    """Searches a collection of documents."""

    name = "search"
    description = "Searches a collection of documents and gives the best passages for a query."
    parameters = text_arguments(query="What to look for.")
    counted_as = "searches"
    faults = (RETRIED, FAILED, EMPTY, BLANK)

    def __init__(self, retrieval: Retrieval, options: ServerConfig | None = None) -> None:
        """`retrieval` finds the documents; `options` locate its server, for probes and messages."""
        super().__init__(options)
        self.retrieval = retrieval

    async def call(self, *, query: str) -> Observation:  # type: ignore[override]
        """Return the documents for a query, best first. Raises ToolError if the search fails."""
        with count_retries() as faults:
            try:
                documents = await self.retrieval.search(query)
            except SearchError as error:
                raise to_tool_error(error, {**faults, FAILED: 1}) from error
        items = tuple(Item(d.text, d.title, d.id, source=d) for d in documents)
        missing = {EMPTY: int(not documents), BLANK: count_blank(documents)}
        return Observation(items, {**faults, **missing})

    async def send_test_request(self, client: RetrievalClient) -> str:
        """Search with the run's token and topk. Raises ToolRefused if no document has a text."""
        documents = await client.search(TEST_QUERY)
        where = f"retriever.url={self.label}"
        if not documents:
            return (
                f"{where}: no documents for {TEST_QUERY!r}; check that it serves the run's corpus"
            )
        if count_blank(documents) < len(documents):
            return ""
        got = f"{len(documents)} documents without text for {TEST_QUERY!r}"
        raise ToolRefused(explain(where, got, "passages", "serve a corpus with texts"))

    def identity(self) -> Mapping[str, str]:
        """Return fingerprints of `corpus`, `index` (the backend's settings) and `encoder`.

        Empty for servers without this form of `/info`, such as the original Search-R1 server, and
        if the request fails.
        """
        if self.options.url == EMPTY_URL:
            return {}
        try:
            return info_fingerprints(loops.run(self._fetch_info()))
        except SearchError:
            return {}

    async def _fetch_info(self) -> dict[str, Any]:
        timeout = min(self.options.timeout, PROBE_TIMEOUT_S)
        url = self.options.url
        async with RetrievalClient(url, timeout=timeout, max_retries=1, deadline=timeout) as client:
            return await client.info()

    def settings(self) -> Mapping[str, Any]:
        return {"topk": self.options.topk}

    async def aclose(self) -> None:
        if isinstance(self.retrieval, RetrievalClient):
            await self.retrieval.aclose()


def count_blank(documents: Sequence[Document]) -> int:
    """Return the number of documents without text, from which the policy learns nothing."""
    return sum(not document.text.strip() for document in documents)


def build_search(config: Config) -> SearchTool:
    """Build a run's tool over its server, a retriever passed from Python, or nothing (`empty`)."""
    options = config.retriever
    retriever = python_retriever(config)
    if retriever is not None:  # no server to probe
        return SearchTool(retriever, replace(options, url=EMPTY_URL))
    is_empty = options.url == EMPTY_URL
    return SearchTool(EmptyRetrieval() if is_empty else build_client(options), options)


def info_fingerprints(info: Mapping[str, Any]) -> dict[str, str]:
    """Compute the fingerprints of a response to `/info`."""
    parts = {name: info[name] for name in ("corpus", "encoder") if isinstance(info.get(name), dict)}
    backend = {name: value for name, value in info.items() if name not in NOT_INDEX}
    if backend:
        parts["index"] = backend
    return {name: fingerprint(facts) for name, facts in parts.items()}
