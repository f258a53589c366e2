"""The text of the page at an address: fetched, read in another process, and kept."""

import logging
import re

from search_r1.online.addresses import AddressPolicy
from search_r1.online.fetch import Deadline, PageError, PageFetcher
from search_r1.online.reading import READERS, Article
from search_r1.storage import Storage

logger = logging.getLogger(__name__)

MOST_KEPT = 100_000
"""Characters of a page; beyond them only what is asked for."""


def visit(
    url: str,
    policy: AddressPolicy | None = None,
    *,
    most_bytes: int = 2_000_000,
    timeout: float = 15.0,
) -> Article:
    """Title and text of the page at `url`; raises PageError, which says why there is none.

    Blocks for up to `timeout` s. Only public addresses are fetched from, unless `policy` allows
    others; at most `most_bytes` are read.
    """
    fetcher, deadline = PageFetcher(policy or AddressPolicy(), most_bytes), Deadline(timeout)
    try:
        return READERS.read(fetcher.fetch(url, deadline), deadline, with_title=True)
    finally:
        fetcher.close()


class PageReader:
    """Texts of pages, kept ones first."""

    def __init__(self, fetcher: PageFetcher, texts: Storage, scope: str, most_chars: int) -> None:
        """`scope` tells the pages of `texts` apart by how they were read."""
        self._fetcher = fetcher
        self._texts = texts
        self._scope = scope
        self._most_chars = most_chars

    def text(self, url: str, deadline: Deadline) -> str | None:
        """The first characters of the page's text, cut at a word; None if it cannot be read."""
        key = ("page", self._scope, url)
        text = self._texts.get([key]).get(key)
        if text is None:
            try:
                whole = READERS.read(self._fetcher.fetch(url, deadline), deadline).text
                text = cut(whole, max(MOST_KEPT, self._most_chars))
            except PageError as error:
                logger.info("no text of page %r: %s", url, error)
                return None
            self._texts.put({key: text})
        return cut(text, self._most_chars)

    def close(self) -> None:
        """Let go of threads."""
        self._fetcher.close()


def cut(text: str, most_chars: int) -> str:
    """`text` cut at a space or a line's end."""
    if len(text) <= most_chars:
        return text
    head = text[:most_chars]
    return head.rstrip() if text[most_chars].isspace() else re.sub(r"\s+\S*\Z", "", head) or head
