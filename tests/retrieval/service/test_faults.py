"""Injected faults follow their settings."""

from collections import Counter
from pathlib import Path

import httpx
import pytest

from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.server import create_app
from search_r1.retrieval.service.faults import (
    ANSWER,
    FAILURES,
    HANG,
    INVALID,
    TRUNCATED,
    FaultConfig,
    FaultInjector,
)
from tests.apps import running
from tests.retrieval.service.fake_backends import FakeBackend

BODY = {"queries": ["q"], "topk": 1, "return_scores": True}


def outcomes(faults: FaultConfig, count: int, timeout: float = 60.0) -> list[str]:
    """Return the outcomes of `count` consecutive requests, as a client sees them."""
    with (
        running(FaultInjector(create_app(FakeBackend()), faults)) as url,
        httpx.Client(trust_env=False) as http,
    ):
        return [outcome(http, url, timeout) for _ in range(count)]


def outcome(http: httpx.Client, url: str, timeout: float = 60.0) -> str:
    try:
        answer = http.post(f"{url}/retrieve", json=BODY, timeout=timeout)
    except httpx.ReadTimeout:
        return HANG
    except (httpx.RemoteProtocolError, httpx.ReadError):  # closed, or reset
        return TRUNCATED
    if answer.status_code != httpx.codes.OK:
        return str(answer.status_code)
    return ANSWER if answer.content.startswith(b'{"result"') else INVALID


def test_the_same_seed_fails_the_same_requests() -> None:
    """All failures occur, at about the configured rate; another seed gives other outcomes."""
    first = outcomes(FaultConfig(0.4, 0.0, 0), 80)
    assert first == outcomes(FaultConfig(0.4, 0.0, 0), 80)
    assert first != outcomes(FaultConfig(0.4, 0.0, 1), 80)
    counts = Counter(first)
    assert set(counts) == {ANSWER, *FAILURES}
    assert 0.3 < 1 - counts[ANSWER] / 80 < 0.5


def test_a_hanging_request_is_never_answered() -> None:
    """It ends when its client disconnects, so that the server can stop."""
    assert outcomes(FaultConfig(0.0, 1.0), 2, timeout=0.2) == [HANG, HANG]


def test_only_searches_fail() -> None:
    """/health and /info are not affected."""
    with running(FaultInjector(create_app(FakeBackend()), FaultConfig(1.0))) as url:
        for route in ("health", "info"):
            assert httpx.get(f"{url}/{route}", trust_env=False).is_success


def test_shares_above_one_are_refused() -> None:
    """Impossible settings are refused at the start."""
    with pytest.raises(SetupError, match="at most 1"):
        FaultConfig(0.7, 0.4).check()


def test_the_command_line_injects_faults_and_warns(tmp_path: Path) -> None:
    """The flags are applied, and the server's log warns of the injected faults."""
    log = tmp_path / "log"
    args = ["--retriever_name", "empty", "--inject_failures", "1", "--inject_seed", "7"]
    with LocalServer(args, log_path=log) as server, httpx.Client(trust_env=False) as http:
        assert {outcome(http, server.url) for _ in range(20)} == set(FAILURES)
    assert "on purpose" in log.read_text()
    assert "inject_failures=1.0" in log.read_text()
