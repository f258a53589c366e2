"""Rates and Retry-After, against a clock that only sleeping moves."""

import threading
import time
from typing import Any

import pytest

from search_r1.online.services import SERVICES, SearchRequest
from search_r1.online.upstream import RateLimit, Upstream, read_credentials
from search_r1.search.errors import UpstreamUnavailable
from search_r1.search.settings import OnlineConfig


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 50.0

    def sleep(self, seconds: float) -> None:
        """Pass the time."""
        self.now += seconds


def test_requests_are_evenly_spaced() -> None:
    """At 4 a second the n-th request leaves at n / 4 s, and idle time saves up no burst."""
    clock = Clock()
    limit = RateLimit(4.0, lambda: clock.now, clock.sleep)
    left = []
    for _ in range(5):
        limit.wait()
        left.append(clock.now - 50)
    assert left == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    clock.sleep(10)
    for _ in range(3):
        limit.wait()
        left.append(clock.now - 50)
    assert left[5:] == pytest.approx([11, 11.25, 11.5])


def test_threads_share_the_rate() -> None:
    """Twelve threads at 100 a second: no two requests leave less than 10 ms apart."""
    limit = RateLimit(100.0)
    left: list[float] = []

    def send() -> None:
        limit.wait()
        left.append(time.monotonic())

    begin = time.monotonic()
    threads = [threading.Thread(target=send) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(left) == 12
    assert max(left) - begin >= 11 * 0.01 - 1e-3


def test_holding_stops_everybody() -> None:
    """After hold(7) nobody sends for 7 s, and a shorter hold does not lessen a longer one."""
    clock = Clock()
    limit = RateLimit(1000.0, lambda: clock.now, clock.sleep)
    limit.hold(7)
    limit.hold(2)
    limit.wait()
    assert clock.now == pytest.approx(57)


def open_upstream(url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Upstream:
    service = SERVICES["serper"]
    config = OnlineConfig(online_url=url, requests_per_second=1000.0, **more)
    found = Upstream(service, read_credentials(service), config, clock.sleep)
    monkeypatch.setattr(
        found, "_limit", RateLimit(config.requests_per_second, lambda: clock.now, clock.sleep)
    )
    return found


def test_retry_after_is_honoured(web: Any, reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next try comes as late as the service asked, which back-off alone would not."""
    clock = Clock()
    answers = [reply({"organic": []}), reply(b"", 429, {"Retry-After": "41"})]
    times: list[float] = []

    def answer(asked: Any) -> Any:
        times.append(clock.now)
        return answers.pop()

    upstream = open_upstream(web(answer).url, clock, monkeypatch)
    assert upstream.ask(SearchRequest("river", 3)) == []
    assert times[1] - times[0] == pytest.approx(41)
    upstream.close()


def test_a_long_retry_after_is_an_outage(
    web: Any, reply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search does not sleep for an hour: the caller learns at once that it must come back."""
    clock = Clock()
    server = web(lambda asked: reply(b"", 503, {"Retry-After": "3600"}))
    upstream = open_upstream(server.url, clock, monkeypatch)
    with pytest.raises(UpstreamUnavailable, match="come back in 3600 s"):
        upstream.ask(SearchRequest("river", 3))
    assert clock.now == pytest.approx(50, abs=1)
    upstream.close()
