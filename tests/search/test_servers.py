"""The choice among several servers, with the clock in the test's hand."""

import subprocess
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from search_r1.search import transport as module
from search_r1.search.transport import MAX_REST_S, REST_S, Servers, preferred, read_urls
from verl.ports import is_local_host

FAR = [
    "http://198.51.100.1:1",
    "http://198.51.100.2:1",
    "http://198.51.100.3:1",
    "http://198.51.100.4:1",
]
"""Addresses of documentation, which no machine has."""


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], float]:
    """Moves the clock on by some seconds and tells the time."""
    now = [1000.0]

    def wait_for(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return wait_for


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://a:1/retrieve", ("http://a:1",)),
        ("http://a:1, https://b/x/retrieve/ ,http://a:1/", ("http://a:1", "https://b/x")),
        (["http://a:1", "http://b:1"], ("http://a:1", "http://b:1")),
    ],
)
def test_addresses_are_read(given: str | list[str], expected: tuple[str, ...]) -> None:
    """One, several with commas, or a sequence; with or without /retrieve; each once."""
    assert read_urls(given) == expected


WRONG = ["", "http://a:1,", "b:8000", "http://", [], "http://a,b", "http://a:port", "http://[::1"]


@pytest.mark.parametrize("given", WRONG)
def test_addresses_that_cannot_be_are_refused(given: str | list[str]) -> None:
    """What is wrong is shown beside an example."""
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:8000"):
        read_urls(given)


def test_one_server_is_kept_while_it_answers(wait: Callable[[float], float]) -> None:
    """Sticky; a failed one rests, the next is asked; after the rest a single request tries it."""
    pool = Servers(FAR)
    first, second, *_ = pool.urls
    home = pool.choose()
    assert [pool.choose().url for _ in range(5)] == [first] * 5
    pool.failed(home, wait(0), 0.0)
    assert pool.choose().url == second and pool.has_ready()
    wait(REST_S + 0.1)
    assert [pool.choose().url for _ in range(3)] == [first, second, second]
    pool.succeeded(home)
    assert pool.choose().url == first


def test_rests_grow_and_are_bounded(wait: Callable[[float], float]) -> None:
    """5, 10, 20 ... at most 60 s; requests under way together count once; 503 names its own."""
    pool = Servers(FAR[:1])
    server = pool.choose()
    rests = []
    for _ in range(6):
        started = wait(MAX_REST_S)
        now = wait(1)
        for _ in range(10):
            pool.failed(server, started, 0.0)
        rests.append(server.rests_until - now)
    assert rests == [5, 10, 20, 40, 60, 60]
    now = wait(MAX_REST_S)
    pool.failed(server, now, 1.5)
    assert server.rests_until - now == 1.5
    pool.failed(server, wait(0), 1e9)
    assert server.rests_until - now == MAX_REST_S


def test_when_all_rest_the_first_to_be_back_is_asked(wait: Callable[[float], float]) -> None:
    """A client never refuses to try: with everything down the servers are asked in turn."""
    pool = Servers(FAR[:2])
    asked = []
    for _ in range(6):
        server = pool.choose()
        asked.append(server.url)
        pool.failed(server, wait(0), 0.0)
        wait(0.5)
    assert not pool.has_ready()
    assert asked == list(pool.urls) * 3


def test_this_machine_comes_first() -> None:
    """A server of this node is asked before all others, by name or address."""
    for here in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
        if is_local_host(urlsplit(here).hostname or ""):  # a machine may lack IPv6
            assert preferred([*FAR, here])[0] == here
    assert sorted(preferred(FAR)) == FAR


def test_processes_start_at_different_servers() -> None:
    """Processes spread over equal servers, though each seeds `random` alike."""
    code = (
        "import random; random.seed(0); from search_r1.search.transport import preferred;"
        f"print(preferred({FAR})[0])"
    )
    starts = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(12)
    ]
    assert len({start.stdout for start in starts}) > 1
