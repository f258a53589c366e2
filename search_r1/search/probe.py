"""Whether a retriever answers searches: what a run asks before it goes on after failures."""

import asyncio
import logging
from collections.abc import Sequence

from search_r1.search.client import RetrievalClient
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable

QUERY = "capital of France"


class SearchProbe:
    """Searches for something: `/health` may answer where searches fail."""

    def __init__(self, url: str | Sequence[str], topk: int | None, timeout: float) -> None:
        """`url` and `topk` as of the client; one attempt takes at most `timeout` seconds."""
        self._url = url
        self._topk = topk
        self._timeout = timeout

    def __call__(self, seconds: float) -> str:
        """What is wrong, or an empty text where a server answers; takes at most `seconds`.

        A refusal is an answer: that of one query, as of a replay, or one that waiting cannot help.
        """
        try:
            asyncio.run(self._search(seconds))
        except RetrieverRefused:
            return ""
        except RetrieverUnavailable as error:
            return error.reason
        return ""

    async def _search(self, seconds: float) -> None:
        """One search; a second attempt and a third, so that a single error is no outage."""
        async with RetrievalClient(
            self._url, self._topk, timeout=self._timeout, max_retries=2, deadline=seconds,
            log_level=logging.DEBUG,
        ) as client:  # fmt: skip
            await client.search(QUERY)
