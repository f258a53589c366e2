"""The tool `search`: documents from a retrieval server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from search_r1.search.client import EmptyRetrieval, Retrieval, RetrievalClient
from search_r1.search.errors import SearchError
from search_r1.search.identity import retriever_identity
from search_r1.search.probe import SearchProbe, retriever_problem
from search_r1.search.tally import RETRIED, counting
from verl.agent.interface import Item, Observation, Tool, text_arguments
from verl.config import Config
from verl.config.agent import EMPTY, ServerConfig
from verl.errors import ToolError, explain

FAILED = "searches_failed"
"""Searches that were not answered, after all retries."""
PROBE_S = 30.0
"""Longest that one attempt of a probe, or the question for fingerprints, may take."""
FIX = "start it (bash retrieval_launch.sh)"


class SearchTool(Tool):
    """Searches a collection of documents."""

    name = "search"
    description = "Searches a collection of documents and gives the best passages for a query."
    parameters = text_arguments(query="What to look for.")
    counted_as = "searches"
    faults = (RETRIED, FAILED)
    max_outage_option = "retriever.max_outage"
    fix = FIX

    def __init__(self, retrieval: Retrieval, options: ServerConfig | None = None) -> None:
        """`retrieval` finds the documents; `options` say where it is, for probes and messages."""
        self.retrieval = retrieval
        self.options = options or ServerConfig(url=EMPTY)
        self.max_outage = self.options.max_outage

    @property
    def label(self) -> str:
        """The address of the server."""
        return self.options.url

    async def call(self, *, query: str) -> Observation:  # type: ignore[override]
        """The documents for one query, best first. Raises ToolError when the search fails."""
        with counting() as faults:
            try:
                documents = await self.retrieval.search(query)
            except SearchError as error:
                raise ToolError(str(error), {**faults, FAILED: 1}) from error
        items = tuple(Item(one.text, one.title, one.id, one) for one in documents)
        return Observation(items, dict(faults))

    def probe(self, seconds: float) -> str:
        """What is wrong with the server, by a search; see `Tool.probe`."""
        if self.options.url == EMPTY:
            return ""
        timeout = min(self.options.timeout, PROBE_S)
        return SearchProbe(self.options.url, self.options.topk, timeout)(seconds)

    def preflight(self, seconds: float) -> Iterator[ToolError]:
        """Each address that does not answer."""
        if self.options.url == EMPTY:
            return
        timeout = min(self.options.timeout, seconds)
        for address in map(str.strip, self.options.url.split(",")):
            problem = retriever_problem(address, timeout)
            if problem:
                expected = 'an answer {"result": [...]} to POST /retrieve'
                fix = f"{FIX} and set retriever.url=http://HOST:PORT/retrieve"
                yield ToolError(explain(f"retriever.url={address}", problem, expected, fix))

    def identity(self) -> Mapping[str, str]:
        """Fingerprints of corpus, index and encoder, as far as the server tells them."""
        if self.options.url == EMPTY:
            return {}
        return retriever_identity(self.options.url, min(self.options.timeout, PROBE_S))

    def settings(self) -> Mapping[str, Any]:
        """How many documents a search brings."""
        return {"topk": self.options.topk}

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        if isinstance(self.retrieval, RetrievalClient):
            await self.retrieval.aclose()


def build_search(config: Config) -> SearchTool:
    """The tool of a run, over the configured retriever, or over none for url `empty`."""
    options = config.retriever
    is_empty = options.url == EMPTY
    return SearchTool(EmptyRetrieval() if is_empty else build_client(options), options)


def build_client(options: ServerConfig) -> RetrievalClient:
    """The client of a run's retrieval server."""
    return RetrievalClient(
        options.url,
        options.topk,
        timeout=options.timeout,
        max_retries=options.max_retries,
        deadline=options.deadline,
    )
