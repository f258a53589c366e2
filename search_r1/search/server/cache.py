"""The last used results in memory, bounded in results and in documents."""

from collections import OrderedDict
from collections.abc import Sequence

from search_r1.search.schema import Hit

Key = tuple[str, int]
"""Query and k."""

DOCUMENTS_PER_ENTRY = 4
"""Mean number of documents per result beyond which fewer results are kept."""


class ResultCache:
    """At most `entries` results, and at most 4 * `entries` documents; the least recent go first."""

    def __init__(self, entries: int) -> None:
        """`entries` 0 keeps nothing."""
        self._entries = entries
        self._num_documents = 0
        self._results: OrderedDict[Key, Sequence[Hit]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: Key) -> Sequence[Hit] | None:
        """The result, which becomes the most recent; None if it is not here."""
        found = self._results.get(key)
        if found is not None:
            self._results.move_to_end(key)
        return found

    def put(self, key: Key, hits: Sequence[Hit]) -> None:
        """Keep a result as the most recent."""
        self._num_documents += len(hits) - len(self._results.pop(key, ()))
        self._results[key] = hits
        while self._is_too_large():
            _, dropped = self._results.popitem(last=False)
            self._num_documents -= len(dropped)

    def _is_too_large(self) -> bool:
        too_many = self._num_documents > DOCUMENTS_PER_ENTRY * self._entries
        return len(self._results) > self._entries or too_many
