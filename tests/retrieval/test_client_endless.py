"""Endless responses: the client gives up at its deadline."""

import asyncio

import pytest

from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.errors import RetrieverUnavailable
from tests.endless import DRIPS, FLOOD, endless


async def search(url: str, timeout: float) -> None:
    async with RetrievalClient(url, timeout=timeout, max_retries=1, backoff=0.001) as client:
        await client.search("a")


@pytest.mark.parametrize("start, part", [*DRIPS.values(), FLOOD], ids=[*DRIPS, "flood"])
def test_an_endless_answer_has_one_deadline(start: bytes, part: bytes) -> None:
    """One deadline covers headers and body, however often a byte arrives."""
    with endless(start, part) as (url, count):
        with pytest.raises(RetrieverUnavailable, match="TimeoutError"):
            asyncio.run(search(url, 0.3))
        assert count == [2]
