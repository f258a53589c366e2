"""The bounded HTTP client: endless responses are abandoned, connections are reused."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from search_r1.exchange import BoundedHttpClient
from search_r1.rewards.judge.client import JudgeClient
from search_r1.rewards.judge.options import JudgeOptions
from search_r1.rewards.judge.request import RequestBody
from search_r1.rewards.judge.reward import JudgeEndpoint, JudgeFailed
from tests.endless import DRIPS, FLOOD, endless
from tests.rewards.judge.server import judge_server


@contextmanager
def judge_at(options: JudgeOptions) -> Iterator[JudgeEndpoint]:
    client = JudgeClient(options)
    yield JudgeEndpoint(options, RequestBody(options), client)
    client.close()


@pytest.mark.parametrize("name", DRIPS)
def test_an_answer_that_drips_has_one_deadline(name: str) -> None:
    """One deadline covers headers and body, however often a byte arrives; also for the judge."""
    with endless(*DRIPS[name]) as (url, _):
        client, start = BoundedHttpClient(0.4, 1000), time.monotonic()
        with pytest.raises(httpx.TimeoutException, match=r"no complete answer within 0.4 s"):
            client.send("GET", url)
        client.close()
        options = JudgeOptions(url=url, model="m", timeout=0.4, max_retries=0)
        with (
            judge_at(options) as judge,
            pytest.raises(JudgeFailed, match=r"within 0.4 s"),
        ):
            judge.judge("?")
        assert time.monotonic() - start < 5


def test_an_answer_without_end_is_not_kept() -> None:
    """Reading stops at the size limit; the judge retries and then reports it."""
    with endless(*FLOOD, pause=0.0) as (url, count):
        client = BoundedHttpClient(20, 100_000)
        with pytest.raises(ValueError, match="more than 100000 bytes"):
            client.send("GET", url)
        client.close()
        options = JudgeOptions(url=url, model="m", max_retries=1, first_pause=0.0)
        with (
            judge_at(options) as judge,
            pytest.raises(JudgeFailed, match="more than 8388608"),
        ):
            judge.judge("?")
        assert count == [3]


def test_threads_share_connections() -> None:
    """Forty requests from four threads open at most four connections."""
    with judge_server(lambda n, body: "yes") as server:
        options = replace(JudgeOptions(model="m"), url=server.url)
        with (
            judge_at(options) as judge,
            ThreadPoolExecutor(4) as threads,
        ):
            assert list(threads.map(judge.judge, "ab" * 20)) == [1.0] * 40
        assert server.max_concurrent <= 4
