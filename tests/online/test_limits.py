"""Rate limits and Retry-After, with a fake clock that only sleeping advances."""

import threading
import time
from typing import Any

import pytest

from search_r1.online.services import SERVICES, SearchRequest
from search_r1.online.upstream import RateLimit, Upstream, read_credentials
from search_r1.retrieval.errors import UpstreamUnavailable
from search_r1.retrieval.settings import OnlineConfig


class Clock:
    """A fake clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = 50.0

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


def test_requests_are_evenly_spaced() -> None:
    """At 4 per second the n-th request is sent at n / 4 s; idle time allows no burst later."""
    clock = Clock()
    limit = RateLimit(4.0, lambda: clock.now, clock.sleep)
    sent = []
    for _ in range(5):
        limit.wait()
        sent.append(clock.now - 50)
    assert sent == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    clock.sleep(10)
    for _ in range(3):
        limit.wait()
        sent.append(clock.now - 50)
    assert sent[5:] == pytest.approx([11, 11.25, 11.5])


def test_threads_share_the_rate() -> None:
    """Twelve threads at 100 per second need at least 110 ms, 10 ms between two requests."""
    limit = RateLimit(100.0)
    sent: list[float] = []

    def send() -> None:
        limit.wait()
        sent.append(time.monotonic())

    begin = time.monotonic()
    threads = [threading.Thread(target=send) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sent) == 12
    assert max(sent) - begin >= 11 * 0.01 - 1e-3


def test_a_pause_stops_all_requests() -> None:
    """After pause(7) nothing is sent for 7 s; a shorter pause does not shorten a longer one."""
    clock = Clock()
    limit = RateLimit(1000.0, lambda: clock.now, clock.sleep)
    limit.pause(7)
    limit.pause(2)
    limit.wait()
    assert clock.now == pytest.approx(57)


def open_upstream(
    url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Upstream:
    service = SERVICES["serper"]
    config = OnlineConfig(online_url=url, requests_per_second=1000.0, **options)
    client = Upstream(service, read_credentials(service), config, clock.sleep)
    monkeypatch.setattr(
        client, "_limit", RateLimit(config.requests_per_second, lambda: clock.now, clock.sleep)
    )
    return client


def test_retry_after_is_honoured(web: Any, reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt is as late as the service asked for, later than the backoff alone."""
    clock = Clock()
    answers = [reply({"organic": []}), reply(b"", 429, {"Retry-After": "41"})]
    times: list[float] = []

    def answer(request: Any) -> Any:
        times.append(clock.now)
        return answers.pop()

    upstream = open_upstream(web(answer).url, clock, monkeypatch)
    assert upstream.search(SearchRequest("river", 3)) == []
    assert times[1] - times[0] == pytest.approx(41)
    upstream.close()


def test_a_long_retry_after_is_an_outage(
    web: Any, reply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search does not sleep for an hour; the caller gets an error at once."""
    clock = Clock()
    server = web(lambda request: reply(b"", 503, {"Retry-After": "3600"}))
    upstream = open_upstream(server.url, clock, monkeypatch)
    with pytest.raises(UpstreamUnavailable, match="come back in 3600 s"):
        upstream.search(SearchRequest("river", 3))
    assert clock.now == pytest.approx(50, abs=1)
    upstream.close()
