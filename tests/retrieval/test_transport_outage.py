"""An outage of all servers is detected by one search, not by each search again."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from search_r1.retrieval.client import RETRIED, RetrievalClient, count_retries
from search_r1.retrieval.errors import RetrieverUnavailable
from search_r1.retrieval.transport import RetryPolicy, Servers, Transport
from search_r1.retrying import Backoff
from tests.apps import running

URL = "http://there:1"
NUM_RETRIES = 2


class Scripted:
    """A fake HTTP session whose responses depend on the path."""

    def __init__(self, num_retries: int = NUM_RETRIES) -> None:
        self.num_asked: Counter[str] = Counter()
        self.is_down = False
        patience = RetryPolicy(max_retries=num_retries, backoff=Backoff(0.02, 0.02))
        self.transport = Transport(Servers([URL]), patience)

    @asynccontextmanager
    async def request(self, method: str, url: str, **_: Any) -> AsyncIterator[Any]:
        path = url.removeprefix(URL)
        self.num_asked[path] += 1

        async def parts() -> AsyncIterator[bytes]:
            yield b"{}"

        status = 500 if self.is_down or path == "/bad" else 200
        content = SimpleNamespace(iter_any=parts)
        yield SimpleNamespace(status=status, headers={}, content=content)

    async def ask(self, path: str, **options: Any) -> int:
        """Return the number of attempts of one exchange, successful or not."""
        before = self.num_asked[path]
        try:
            exchange = self.transport.exchange
            await exchange(cast(Any, self), "GET", path, parse=lambda response: response, **options)
        except RetrieverUnavailable as error:
            assert error.num_retries == max(0, self.num_asked[path] - before - 1)
        return self.num_asked[path] - before


def test_after_a_failed_exchange_others_make_one_attempt_until_a_response() -> None:
    """Only one exchange goes through all retries; a response ends the outage."""
    server = Scripted()

    async def play() -> list[int]:
        server.is_down = True
        attempts = [await server.ask("/a"), await server.ask("/b"), await server.ask("/c")]
        server.is_down = False
        attempts.append(await server.ask("/d"))
        server.is_down = True
        return [*attempts, await server.ask("/e")]

    assert asyncio.run(play()) == [1 + NUM_RETRIES, 1, 1, 1, 1 + NUM_RETRIES]


def test_exchanges_in_progress_give_up_with_the_first() -> None:
    """Exchanges that began later do not go through all their retries."""
    server = Scripted(num_retries=20)
    server.is_down = True

    async def late() -> int:
        while server.num_asked["/first"] < 15:
            await asyncio.sleep(0.001)
        return await server.ask("/late")

    async def play() -> list[int]:
        return await asyncio.gather(server.ask("/first"), late())

    first, after = asyncio.run(play())
    assert first == 21 and after < 21


def test_one_bad_request_among_good_ones_is_no_outage() -> None:
    """All retries are kept while other requests succeed, and after a failed health check."""
    server = Scripted()

    async def chatter() -> None:
        while True:
            await server.ask("/good")
            await asyncio.sleep(0.005)

    async def play() -> list[int]:
        others = asyncio.ensure_future(chatter())
        bad = [await server.ask("/bad"), await server.ask("/bad")]
        others.cancel()
        return bad

    assert asyncio.run(play()) == [1 + NUM_RETRIES] * 2
    other = Scripted()
    other.is_down = True
    assert asyncio.run(other.ask("/health", max_retries=0)) == 1
    assert asyncio.run(other.ask("/a")) == 1 + NUM_RETRIES


def test_a_deadline_that_has_passed_is_no_outage() -> None:
    """No server was asked, so other exchanges keep all their retries."""
    server = Scripted()
    assert asyncio.run(server.ask("/late", deadline=time.monotonic() - 1)) == 0
    server.is_down = True
    assert asyncio.run(server.ask("/a")) == 1 + NUM_RETRIES


class Flaky:
    """An application that responds to searches after `num_errors` errors of one status."""

    def __init__(self, status: int, num_errors: int) -> None:
        self.status = status
        self.num_left = num_errors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.num_left -= 1
        status = self.status if self.num_left >= 0 else 200
        await send({"type": "http.response.start", "status": status,
                    "headers": [(b"content-length", b"15")]})  # fmt: skip
        await send({"type": "http.response.body", "body": b'{"result":[[]]}'})


def test_each_search_of_a_shared_request_knows_that_it_was_retried() -> None:
    """Each task counts its own searches, although they shared a request."""

    async def search_repeatedly(client: RetrievalClient, query: str, searches: int) -> int:
        with count_retries() as counts:
            for _ in range(searches):
                await client.search(query)
        return counts[RETRIED]

    async def play(url: str) -> list[int]:
        async with RetrievalClient(url, 1, backoff=0.01) as client:
            return await asyncio.gather(
                search_repeatedly(client, "a", 1), search_repeatedly(client, "a", 3)
            )

    with running(Flaky(500, 1)) as url:
        assert asyncio.run(play(url)) == [1, 1]
