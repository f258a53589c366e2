"""A server that fails on purpose does it as it was asked to, and only then."""

from collections import Counter
from pathlib import Path

import httpx
import pytest

from search_r1.search.errors import SetupError
from search_r1.search.local_server import LocalServer
from search_r1.search.retrieval_server import create_app
from search_r1.search.server.faults import ANSWER, FAILURES, HANG, FaultConfig, FaultInjector
from tests.apps import running
from tests.search.server.engines import Watched

BODY = {"queries": ["q"], "topk": 1, "return_scores": True}


def fates(faults: FaultConfig, count: int, timeout: float = 60.0) -> list[str]:
    """What becomes of so many requests, one after the other, as a client sees it."""
    with (
        running(FaultInjector(create_app(Watched()), faults)) as url,
        httpx.Client(trust_env=False) as http,
    ):
        return [fate(http, url, timeout) for _ in range(count)]


def fate(http: httpx.Client, url: str, timeout: float = 60.0) -> str:
    try:
        answer = http.post(f"{url}/retrieve", json=BODY, timeout=timeout)
    except httpx.ReadTimeout:
        return HANG
    except (httpx.RemoteProtocolError, httpx.ReadError):  # closed, or reset
        return "torn"
    if answer.status_code != httpx.codes.OK:
        return str(answer.status_code)
    return ANSWER if answer.content.startswith(b'{"result"') else "garbled"


def test_the_same_seed_spoils_the_same_requests() -> None:
    """Every way to fail occurs, about as often as asked for; another seed spoils others."""
    found = fates(FaultConfig(0.4, 0.0, 0), 80)
    assert found == fates(FaultConfig(0.4, 0.0, 0), 80)
    assert found != fates(FaultConfig(0.4, 0.0, 1), 80)
    counts = Counter(found)
    assert set(counts) == {ANSWER, *FAILURES}
    assert 0.3 < 1 - counts[ANSWER] / 80 < 0.5


def test_a_hanging_request_is_never_answered() -> None:
    """And is over when its client gives up, so that the server can be stopped."""
    assert fates(FaultConfig(0.0, 1.0), 2, timeout=0.2) == [HANG, HANG]


def test_only_searches_fail() -> None:
    """Whoever asks for the server's health or facts learns the truth."""
    with running(FaultInjector(create_app(Watched()), FaultConfig(1.0))) as url:
        for route in ("health", "info"):
            assert httpx.get(f"{url}/{route}", trust_env=False).is_success


def test_shares_above_one_are_refused() -> None:
    """What cannot be is said at the start."""
    with pytest.raises(SetupError, match="at most 1"):
        FaultConfig(0.7, 0.4).check()


def test_the_command_line_runs_test_faults_and_says_so(tmp_path: Path) -> None:
    """The flags reach the server, whose log warns that it fails on purpose."""
    log = tmp_path / "log"
    args = ["--retriever_name", "empty", "--inject_failures", "1", "--inject_seed", "7"]
    with LocalServer(args, log_path=log) as server, httpx.Client(trust_env=False) as http:
        assert {fate(http, server.url) for _ in range(20)} == set(FAILURES)
    assert "on purpose" in log.read_text()
    assert "inject_failures=1.0" in log.read_text()
