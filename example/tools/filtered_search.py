"""A search tool whose calls may name a year, for an index with `--filter_fields year`.

`agent.tools=[example/tools/filtered_search.py:YearSearch]` in a dialogue format whose calls have
arguments (`template=native`); in others the policy cannot name one.
"""

import copy
from collections.abc import Mapping
from typing import Any

from search_r1.agent.retriever import ServedSearch
from search_r1.retrieval.filters import FilteredRetrieval
from verl.agent.interface import Observation
from verl.config import Config


class YearSearch(ServedSearch):
    """Searches passages, of one year if the policy names one."""

    description = "Searches passages; with `year` only those of that year."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string"}, "year": {"type": "integer"}},
        "required": ["query"],
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config.retriever, config)

    async def call(self, *, query: str, year: int | None = None) -> Observation:
        """Return the documents for a query. Raises ToolError if the search fails."""
        tool = copy.copy(self)  # shares what the dialogue counts
        if year is not None:
            tool.retrieval = FilteredRetrieval(self.client, {"year": year})
        return await ServedSearch.call(tool, query=query)
