"""The tool `search`: documents from a `Retrieval`, such as a server or an object from Python."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from search_r1.retrieval.errors import REQUEST_LEVEL_STATUSES, RetrieverRefused, SearchError
from search_r1.retrieval.protocol import RETRIED, EmptyRetrieval, Retrieval, count_retries
from search_r1.retrieval.schema import Document
from verl.agent.interface import Item, Observation, Tool, text_arguments
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.errors import ToolError, ToolRefused
from verl.types import Trajectory

FAILED = "searches_failed"
"""Fault name: searches that were not answered after all retries."""
EMPTY, BLANK = "searches_without_documents", "documents_without_text"
"""Fault names: searches that found nothing, and found documents whose text is blank."""
EMPTY_SHARE, BLANK_SHARE = "empty_result_share", "blank_result_share"
"""Statistics of a dialogue: the same as shares of its searches, and of the documents found."""
ANSWER_SHARE = "answer_result_share"
"""Statistic of a dialogue: share of its searches whose documents hold an accepted answer."""
SEARCHES, DOCUMENTS = "searches", "documents"
ERROR = "Error: "
"""Begins an observation that is no result but says what was wrong with a call."""


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
        self.seen: Counter[str] | None = None
        self.accepted: Sequence[str] = ()

    def for_dialogue(self, start: Trajectory) -> Self:
        """Return the tool with counts of its own, and the answers of the dialogue's question."""
        tool = copy.copy(self)
        tool.seen, tool.accepted = Counter(), start.prompt.ground_truth
        return tool

    async def call(self, *, query: str) -> Observation:  # type: ignore[override]
        """Return the documents for a query, best first. Raises ToolError if the search fails."""
        with count_retries() as faults:
            try:
                documents = await self.retrieval.search(query)
            except SearchError as error:
                raise to_tool_error(error, {**faults, FAILED: 1}) from error
        items = tuple(Item(d.text, d.title, d.id, source=d) for d in documents)
        missing = {EMPTY: int(not documents), BLANK: count_blank(documents)}
        if self.seen is not None:
            self.seen.update({SEARCHES: 1, DOCUMENTS: len(documents), **missing})
            self.seen[ANSWER_SHARE] += holds_answer(documents, self.accepted)
        return Observation(items, {**faults, **missing})

    def ended(self) -> Mapping[str, float]:
        """Return shares of the searches that were answered and of their documents, if any."""
        seen = self.seen or Counter()
        shares = {}
        if seen[SEARCHES] and not isinstance(self.retrieval, EmptyRetrieval):
            shares[EMPTY_SHARE] = seen[EMPTY] / seen[SEARCHES]
            if self.accepted:
                shares[ANSWER_SHARE] = seen[ANSWER_SHARE] / seen[SEARCHES]
        if seen[DOCUMENTS]:
            shares[BLANK_SHARE] = seen[BLANK] / seen[DOCUMENTS]
        return shares

    def settings(self) -> Mapping[str, Any]:
        return {"topk": self.options.topk}


def documents_of(observation: Observation) -> tuple[Document, ...]:
    """Return the passages that a search gave, best first; the message of an error is none.

    Searches other than the built-in one, such as an environment's, give items without documents.
    """
    passages = (
        item
        for item in observation.items
        if item.source is not None or item.id or item.title or not item.text.startswith(ERROR)
    )
    return tuple(
        item.source
        if isinstance(item.source, Document)
        else Document.from_mapping({"id": item.id, "title": item.title, "text": item.text})
        for item in passages
    )


def count_blank(documents: Sequence[Document]) -> int:
    """Return the number of documents without text, from which the policy learns nothing."""
    return sum(not document.text.strip() for document in documents)


def holds_answer(
    documents: Sequence[Document], accepted: Sequence[str],
    normalize: Callable[[str], str] | None = None,
) -> bool:  # fmt: skip
    """Return whether documents contain an accepted answer; None compares by the default rule."""
    from search_r1.rewards import normalize as rules  # noqa: PLC0415 - not to import a tool

    text = "\n".join(document.contents for document in documents)
    return rules.contains_answer(text, accepted, normalize or rules.normalize_answer)


def to_tool_error(error: SearchError, faults: Mapping[str, int]) -> ToolError:
    """Convert a search error: ToolRefused if every other call would be refused as well."""
    is_refused = isinstance(error, RetrieverRefused) and error.status in REQUEST_LEVEL_STATUSES
    return (ToolRefused if is_refused else ToolError)(str(error), faults)
