"""Endless responses: the client gives up at its deadline or at the size limit."""

import asyncio

import pytest

from search_r1.retrieval import transport
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable
from tests.endless import DRIPS, FLOOD, endless


async def search(url: str, timeout: float) -> None:
    async with RetrievalClient(url, timeout=timeout, max_retries=1, backoff=0.001) as client:
        await client.search("a")


@pytest.mark.parametrize("name", DRIPS)
def test_an_answer_that_drips_has_one_deadline(name: str) -> None:
    """One deadline covers headers and body, however often a byte arrives."""
    with endless(*DRIPS[name]) as (url, count):
        with pytest.raises(RetrieverUnavailable, match="TimeoutError"):
            asyncio.run(search(url, 0.3))
        assert count == [2]


def test_an_endless_response_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is requested once more; then the error says in one line what was received."""
    monkeypatch.setattr(transport, "MAX_RESPONSE_BYTES", 200_000)
    with endless(*FLOOD, pause=0.0) as (url, count):
        with pytest.raises(RetrieverRefused, match="answered with more than 200000 bytes"):
            asyncio.run(search(url, 20))
        assert count == [2]
