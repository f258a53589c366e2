"""The bounded HTTP client: endless responses are abandoned."""

import time

import httpx
import pytest

from search_r1.online.exchange import BoundedHttpClient
from tests.endless import DRIPS, FLOOD, endless


@pytest.mark.parametrize("name", DRIPS)
def test_an_answer_that_drips_has_one_deadline(name: str) -> None:
    """One deadline covers headers and body, however often a byte arrives."""
    with endless(*DRIPS[name]) as (url, _):
        client, start = BoundedHttpClient(0.4, 1000), time.monotonic()
        with pytest.raises(httpx.TimeoutException, match=r"0\.4 s"):
            client.send("GET", url)
        client.close()
        assert time.monotonic() - start < 5


def test_an_answer_without_end_is_not_kept() -> None:
    """Reading stops at the size limit."""
    with endless(*FLOOD, pause=0.0) as (url, count):
        client = BoundedHttpClient(20, 100_000)
        with pytest.raises(ValueError, match="100000"):
            client.send("GET", url)
        client.close()
        assert count == [1]
