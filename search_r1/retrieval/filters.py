"""Searches that are limited to values of the corpus's fields, from a client's side.

A server that knows no filters ignores one, and would answer with passages that it excludes: a
client asks for the server's fields before its first search with a filter.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from search_r1.retrieval.errors import RetrieverRefused
from search_r1.retrieval.schema import Document
from verl.errors import did_you_mean, explain


class FilteringServer(Protocol):
    """A client whose server may keep fields."""

    async def info(self) -> dict[str, Any]:
        """Return what the server says of itself."""

    async def search(self, query: str, filter: Mapping[str, Any] | None = None) -> list[Document]:
        """Return the documents for one query that a filter leaves, best first."""

    async def document(self, id: str) -> Document | None:
        """Return the document with this id, or None."""


class FilteredRetrieval:
    """A `Retrieval` whose every search has one filter: `{"year": [1990, 1991], "tags": "red"}`."""

    def __init__(self, client: FilteringServer, filter: Mapping[str, Any]) -> None:
        """`filter`: of each field one value, or a list of which a document must have one."""
        self.client, self.filter = client, dict(filter)

    async def search(self, query: str) -> list[Document]:
        """Return the documents that the filter leaves, best first; raises the client's errors."""
        return await self.client.search(query, self.filter)

    async def document(self, id: str) -> Document | None:
        """Return a document by its id, whether the filter leaves it or not."""
        return await self.client.document(id)


_fields: weakref.WeakKeyDictionary[FilteringServer, Sequence[str]] = weakref.WeakKeyDictionary()
"""The fields of the server of each client that searched with a filter."""


async def check_filter(client: FilteringServer, filter: Mapping[str, Any]) -> None:
    """Raise RetrieverRefused unless the client's server keeps the fields of a filter.

    The server is asked once; wrong values are refused by itself.
    """
    if client not in _fields:
        info = await client.info()
        _fields[client] = info.get("filter_fields", ())
    names = _fields[client]
    if unknown := [name for name in filter if name not in names]:
        fix = did_you_mean(unknown[0], names, "build its index with --filter_fields")
        expected = f"one of {', '.join(names)}" if names else "none: this server keeps no fields"
        raise RetrieverRefused(explain("filter", repr(unknown[0]), expected, fix), 422)
