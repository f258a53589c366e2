"""The choice among several servers, with a fake clock."""

import random
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from search_r1.retrieval import client as module
from search_r1.retrieval.client import RetrievalClient, Server, order_by_preference, read_urls
from verl.ports import is_local_host

FAR = [
    "http://198.51.100.1:1",
    "http://198.51.100.2:1",
    "http://198.51.100.3:1",
    "http://198.51.100.4:1",
]
"""Addresses reserved for documentation, which no machine has."""


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], float]:
    """A function that advances the fake clock by some seconds and returns its time."""
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
    """One address, several with commas, or a sequence; with or without /retrieve; deduplicated."""
    assert read_urls(given) == expected


WRONG = ["", "http://a:1,", "b:8000", "http://", [], "http://a,b", "http://a:port", "http://[::1",
         "http://a..b:8000", "http://" + "a" * 64]  # fmt: skip


@pytest.mark.parametrize("given", WRONG)
def test_invalid_addresses_are_refused(given: str | list[str]) -> None:
    """The message shows a correct example."""
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:8000"):
        read_urls(given)


def fail(server: Server, cooldown: float = module.COOLDOWN_S) -> None:
    server.has_failed, server.retry_at = True, module.time.monotonic() + cooldown


def test_one_server_is_used_while_it_responds(wait: Callable[[float], float]) -> None:
    """A failed server is skipped; after its cooldown a single request tests it."""
    client = RetrievalClient(FAR)
    first, second, *_ = client.urls
    home = client._choose()
    assert [client._choose().url for _ in range(5)] == [first] * 5
    fail(home)
    assert client._choose().url == second
    wait(module.COOLDOWN_S + 0.1)
    assert [client._choose().url for _ in range(3)] == [first, second, second]
    home.has_failed, home.retry_at = False, 0.0
    assert client._choose().url == first


def test_with_all_in_cooldown_the_first_to_end_it_is_chosen(wait: Callable[[float], float]) -> None:
    """With every server down, the client still tries them in turn."""
    client = RetrievalClient(FAR[:2])
    asked = []
    for _ in range(6):
        server = client._choose()
        asked.append(server.url)
        fail(server)
        wait(0.5)
    assert asked == list(client.urls) * 3


def test_servers_on_this_machine_come_first() -> None:
    """A server on this machine is preferred, by name or address."""
    for here in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
        if is_local_host(urlsplit(here).hostname or ""):  # a machine may lack IPv6
            assert order_by_preference([*FAR, here])[0] == here
    assert sorted(order_by_preference(FAR)) == FAR


def test_processes_start_at_different_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes spread over equal servers, although they seed `random` alike."""
    first = set()
    for pid in range(12):
        monkeypatch.setattr(module.os, "getpid", lambda pid=pid: pid)
        random.seed(0)
        first.add(order_by_preference(FAR)[0])
    assert len(first) > 1


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": float("nan")}, {"max_retries": -1}])
def test_settings_that_could_never_answer_are_refused(wrong: dict[str, float]) -> None:
    """The message names the setting and what was expected."""
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .*expected"):
        RetrievalClient(FAR, **wrong)  # type: ignore[arg-type]
