"""The tool `search`: documents from a `Retrieval`, such as a server or an object from Python."""

from collections.abc import Mapping, Sequence
from typing import Any

from search_r1.retrieval.errors import REQUEST_LEVEL_STATUSES, RetrieverRefused, SearchError
from search_r1.retrieval.protocol import RETRIED, Retrieval, count_retries
from search_r1.retrieval.schema import Document
from verl.agent.interface import Item, Observation, Tool, text_arguments
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.errors import ToolError, ToolRefused

FAILED = "searches_failed"
"""Fault name: searches that were not answered after all retries."""
EMPTY, BLANK = "searches_without_documents", "documents_without_text"
"""Fault names: searches that found nothing, and found documents whose text is blank."""


class SearchTool(Tool):
    """Searches a collection of documents."""

    name = "search"
    description = "Searches a collection of documents and gives the best passages for a query."
    parameters = text_arguments(query="What to look for.")
    counted_as = "searches"
    faults = (RETRIED, FAILED, EMPTY, BLANK)

    def __init__(self, retrieval: Retrieval, options: ServerConfig | None = None) -> None:
        """`retrieval` finds the documents; `options`: those of `retriever` in a run."""
        self.retrieval = retrieval
        self.options = options or ServerConfig(url=EMPTY_URL)

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

    def settings(self) -> Mapping[str, Any]:
        return {"topk": self.options.topk}


def count_blank(documents: Sequence[Document]) -> int:
    """Return the number of documents without text, from which the policy learns nothing."""
    return sum(not document.text.strip() for document in documents)


def to_tool_error(error: SearchError, faults: Mapping[str, int]) -> ToolError:
    """Convert a search error: ToolRefused if every other call would be refused as well."""
    is_refused = isinstance(error, RetrieverRefused) and error.status in REQUEST_LEVEL_STATUSES
    return (ToolRefused if is_refused else ToolError)(str(error), faults)
