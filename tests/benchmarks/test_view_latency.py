"""The requests of the benchmark of `search-r1 view`."""

import random
import re

import httpx
import pytest

from benchmarks.view_latency import REQUESTS, request


@pytest.mark.parametrize("page", REQUESTS)
def test_requests_of_a_short_run_have_valid_steps(page: str) -> None:
    """The server refuses steps below 0, also if the run has fewer steps than are subtracted."""
    urls: list[str] = []

    def respond(received: httpx.Request) -> httpx.Response:
        urls.append(str(received.url))
        return httpx.Response(200)

    with httpx.Client(base_url="http://view", transport=httpx.MockTransport(respond)) as client:
        for seed in range(20):
            request(client, random.Random(seed), page, steps=2, size=1)
    assert not [url for url in urls if re.search(r"step(_from|_to)?=-", url)]
