"""Answers of services and texts of pages: the last ones in memory, or all of them in a file."""

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from search_r1.online.service import Found
from search_r1.search.errors import SetupError
from search_r1.storage import FileStore, MemoryStore, Storage, StorageError

NUM_RECENT_ANSWERS = 4096
NUM_RECENT_PAGES = 512


class Cache:
    """Keeps answers and pages; None is a miss. Safe to use from several threads."""

    def __init__(self, answers: Storage, pages: Storage) -> None:
        """The two may be one."""
        self._answers = answers
        self._pages = pages

    def answer(self, scope: str, query: str, k: int) -> list[Found] | None:
        """The results kept for a query at `k`."""
        for found in self._answers.get([("answer", scope, query, k)]).values():
            return [Found(*fields) for fields in found]
        return None

    def keep_answer(self, scope: str, query: str, k: int, found: Sequence[Found]) -> None:
        """Keep the results of a query at `k`."""
        self._answers.put({("answer", scope, query, k): [astuple(result) for result in found]})

    def page(self, scope: str, url: str) -> str | None:
        """The text kept for a page."""
        return next(iter(self._pages.get([("page", scope, url)]).values()), None)

    def keep_page(self, scope: str, url: str, content: str) -> None:
        """Keep the text of a page."""
        self._pages.put({("page", scope, url): content})

    def close(self) -> None:
        """Let go of files."""
        self._answers.close()
        self._pages.close()


def open_cache(path: str | Path | None) -> Cache:
    """All answers in the file at `path`, or for None the last ones, in memory.

    In memory they spare paying twice for a batch that failed in part. Raises SetupError.
    """
    if path is None:
        return Cache(MemoryStore(NUM_RECENT_ANSWERS), MemoryStore(NUM_RECENT_PAGES))
    try:
        file = FileStore(path, "--online_cache")
    except StorageError as error:
        raise SetupError(str(error)) from error
    return Cache(file, file)
