"""Prefetches: in requests of their own, with one attempt, and never delaying a search."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from search_r1.agent.search import SearchTool
from search_r1.search import client as client_module
from search_r1.search.client import RetrievalClient, count_retries
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable
from tests.apps import running
from tests.search.test_client import SLOW, Script, scripted
from verl.agent.environment import Environment
from verl.agent.interface import ToolCall
from verl.config.agent import ServerConfig
from verl.types import Prompt, start_trajectory


def with_client(
    script: Script, body: Callable[[RetrievalClient], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run `body` with a client of the scripted server."""

    async def main(url: str) -> None:
        async with RetrievalClient(url, **{"backoff": 0.01, **options}) as client:
            await body(client)

    with running(scripted(script)) as url:
        asyncio.run(main(url))


def test_prefetches_have_requests_of_their_own() -> None:
    """A prefetch that is refused, for example as too long, does not affect any search."""
    script = Script(poison="bad")

    async def body(client: RetrievalClient) -> None:
        calls = (client.search("q"), client.prefetch("bad"), client.prefetch("good"))
        searched, refused, good = await asyncio.gather(*calls, return_exceptions=True)
        assert searched[0].text == "q" and good[0].text == "good"
        assert isinstance(refused, RetrieverRefused)

    with_client(script, body)
    sent = sorted(request["queries"] for request in script.requests)
    assert sent == [["bad"], ["bad", "good"], ["good"], ["q"]]


def test_a_failed_prefetch_stops_others_until_a_search_succeeds() -> None:
    """It has one attempt and is not counted, and later searches keep all their retries."""
    script = Script([503, 503, 503])

    async def body(client: RetrievalClient) -> None:
        assert client.can_prefetch
        with count_retries() as faults:
            with pytest.raises(RetrieverUnavailable):
                await client.prefetch("a")
            assert not client.can_prefetch and not any(faults.values())
            assert (await client.search("b"))[0].text == "b"
            assert client.can_prefetch and faults["searches_retried"] == 1

    with_client(script, body, max_retries=2)
    assert [request["queries"] for request in script.requests] == [["a"], ["b"], ["b"], ["b"]]


def test_prefetches_leave_connections_to_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prefetch is sent while too many searches or prefetches are in progress."""
    monkeypatch.setattr(client_module, "MAX_REQUESTS", 1)
    monkeypatch.setattr(client_module, "MAX_PREFETCH_REQUESTS", 2)
    script = Script([SLOW] * 3)

    async def body(client: RetrievalClient) -> None:
        search = asyncio.ensure_future(client.search("a"))
        await asyncio.sleep(0.1)
        assert not client.can_prefetch
        await search
        assert client.can_prefetch
        first = asyncio.ensure_future(client.prefetch("b"))
        await asyncio.sleep(0.1)
        assert client.can_prefetch
        second = asyncio.ensure_future(client.prefetch("c"))
        await asyncio.sleep(0.1)
        assert not client.can_prefetch
        assert [documents[0].text for documents in (await first, await second)] == ["b", "c"]

    with_client(script, body)


def test_closing_cancels_prefetches() -> None:
    """Closing the client cancels its prefetches, sent or not."""

    async def body(client: RetrievalClient) -> None:
        tasks = [asyncio.ensure_future(client.prefetch("a"))]
        await asyncio.sleep(0.1)
        tasks.append(asyncio.ensure_future(client.prefetch("not yet sent")))
        await asyncio.sleep(0)
        start = time.monotonic()
        await client.aclose()
        assert time.monotonic() - start < 0.5
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)

    with_client(Script([SLOW]), body)


def test_a_prefetch_that_hangs_is_no_fault() -> None:
    """The search follows it within one deadline, and the dialogue counts no fault."""
    script = Script([SLOW])

    async def body(client: RetrievalClient) -> None:
        tool = SearchTool(client, ServerConfig(speculate=True))
        prompt = Prompt("x", (1,), "test", (), {"question": "who"})
        environment = Environment((tool,)).for_dialogue(start_trajectory(prompt))
        await asyncio.sleep(0.05)
        observation = await environment.call(ToolCall("search", "who"))
        assert [item.text for item in observation.items] == ["who"]
        assert not any(observation.faults.values())
        stats = environment.ended()
        assert stats["searches_ahead"] == 1 and stats["searches_ahead_used"] == 0

    with_client(script, body, timeout=0.3)
    assert len(script.requests) == 2

    async def out_of_time(client: RetrievalClient) -> None:
        with pytest.raises(RetrieverUnavailable, match="deadline"):
            await client.search("q", start=time.monotonic() - 5)

    with_client(Script(), out_of_time, deadline=4.0)
