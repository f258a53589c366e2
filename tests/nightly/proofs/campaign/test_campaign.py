"""The parts of the campaign: its plan, its proxy, and the trajectories that a fault changed."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.nightly.proofs.campaign.__main__ import SHARES, STEPS, Report, markdown
from tests.nightly.proofs.campaign.clock import Clock
from tests.nightly.proofs.campaign.faults import Kind, plan
from tests.nightly.proofs.campaign.proxy import FaultyProxy
from tests.nightly.proofs.campaign.run import (
    Effect,
    changed_trajectories,
    ends_badly,
    max_age,
    other_prompts,
)
from tests.nightly.proofs.campaign.world import LEGS

ANSWER = json.dumps({"result": [[{"id": "1"}], [{"id": "2"}]]}).encode()


def test_a_plan_depends_on_its_seed_and_has_every_kind() -> None:
    """Equal faults at equal moments; a full campaign has every kind."""
    assert set(LEGS) == set(SHARES) == set(STEPS)
    assert {kind for _, kinds in LEGS.values() for kind in kinds} == set(Kind)
    for _, kinds in LEGS.values():
        faults = plan(100, 3, kinds, 1.0)
        assert faults == plan(100, 3, kinds, 1.0) != plan(100, 4, kinds, 1.0)
        assert [fault.number for fault in faults] == list(range(1, 101))
        assert set(kinds) == {fault.kind for fault in faults}
        assert Counter(f.kind for f in plan(len(kinds), 0, kinds, 1.0)) == Counter(kinds)


class _Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    """A proxy in front of a server with a fixed response."""
    server = HTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    with FaultyProxy(server.server_port) as proxy:
        yield proxy
    server.shutdown()
    server.server_close()


def ask(proxy: FaultyProxy) -> tuple[int, bytes]:
    port = int(proxy.url.rpartition(":")[2].partition("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/retrieve", b'{"queries": ["a", "b"]}')
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_proxy_forwards_the_servers_response(proxy: FaultyProxy) -> None:
    """Without a fault, it behaves like the retriever."""
    assert ask(proxy) == (200, ANSWER)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.REFUSES, (503, b'{"detail": "too busy"}')),
        (Kind.GARBAGE, (200, b"<html>not a search engine</html>")),
        (Kind.LIES, (200, json.dumps({"result": [[{"id": "1"}]]}).encode())),
        (Kind.RESETS, http.client.RemoteDisconnected),
        (Kind.HANGS, http.client.RemoteDisconnected),
        (Kind.TRUNCATES, http.client.IncompleteRead),
    ],
)
def test_a_fault_is_what_its_name_says(
    proxy: FaultyProxy, kind: Kind, expected: tuple[int, bytes] | type[Exception]
) -> None:
    """A request during the fault is affected and counted; a later one is answered."""
    struck: list[int] = []
    fault = threading.Thread(target=lambda: struck.append(proxy.break_for(kind, 0.2)))
    fault.start()
    while proxy.fault is None:
        pass
    if isinstance(expected, tuple):
        assert ask(proxy) == expected
    else:
        with pytest.raises(expected):
            ask(proxy)
    fault.join()
    assert struck[0] >= 1
    assert ask(proxy) == (200, ANSWER)


SHOW_TIME = """
import sys, threading, time
for line in sys.stdin:
    start = time.monotonic()
    threading.Event().wait(0.05)
    print(time.time(), time.monotonic() - start, flush=True)
"""


def test_a_clock_jumps_while_a_process_reads_it(tmp_path: Path) -> None:
    """Wall time is wrong immediately and by the offset; waits take as long as before."""
    clock = Clock(tmp_path)
    if not clock.available:
        pytest.skip("needs a C compiler")
    words = clock.command([sys.executable, "-c", SHOW_TIME])
    with subprocess.Popen(words, stdin=PIPE, stdout=PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for wrong in (0, 86_400, -86_400, 0):
            clock.set_offset(wrong)
            process.stdin.write("\n")
            wall, waited = (float(word) for word in process.stdout.readline().split())
            assert wall == pytest.approx(time.time() + wrong, abs=60)
            assert 0.05 <= waited < 60
        process.stdin.close()


def row(sample: int, *segments: tuple[str, list[int]]) -> str:
    parts = [{"origin": origin, "ids": ids} for origin, ids in segments]
    return json.dumps({"group": "g", "uid": "q", "sample": sample, "segments": parts}) + "\n"


def test_an_observation_of_a_fault_is_found_and_another_sample_is_not(tmp_path: Path) -> None:
    """Only a different observation after equal policy tokens counts."""
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    calm.mkdir()
    disturbed.mkdir()
    same = row(0, ("policy", [1]), ("observation", [2]))
    (calm / "step_1.jsonl").write_text(same + same.replace('"sample": 0', '"sample": 1'))
    error = row(0, ("policy", [1]), ("observation", [9]))
    (disturbed / "step_1.jsonl").write_text(error + row(1, ("policy", [7]), ("observation", [9])))
    assert changed_trajectories(calm, disturbed) == ["step_1 q/0"]


def test_other_prompts_and_old_tokens_are_found(tmp_path: Path) -> None:
    """Missing and repeated rows, and the maximum age of a policy token."""
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    for folder in (calm, disturbed):
        folder.mkdir()
        (folder / "step_1.jsonl").write_text(row(0) + row(1))
        (folder / "step_2.jsonl").write_text(row(0) + row(1))
    (disturbed / "step_1.jsonl").write_text(row(1) + row(0))
    assert other_prompts(calm, disturbed) == [] and max_age(disturbed) == 0
    (disturbed / "step_2.jsonl").write_text(row(0) + row(0))
    (calm / "step_3.jsonl").write_text(row(0))
    assert other_prompts(calm, disturbed) == ["step_2", "step_3"]
    segments = [{"origin": "prompt"}, {"origin": "policy", "weight_version": 5}]
    (disturbed / "step_7.jsonl").write_text(json.dumps({"step": 7, "segments": segments}) + "\n")
    assert max_age(disturbed) == 2


@pytest.mark.parametrize(
    ("log", "is_bad"),
    [
        ("train: 1%\nTraceback (most recent call last):\n", True),
        ("train: 1%\rTraceback (most recent call last):\n", True),
        ("(ActorHost pid=1) ERROR [async_llm.py] Traceback (most recent call last):\n", False),
        ("the checkpoint of step 8 could not be written\n", False),
    ],
)
def test_a_traceback_is_the_run_s_own(log: str, is_bad: bool) -> None:
    """vLLM logs a traceback when its engine core is killed, and the run continues."""
    assert ends_badly(log) is is_bad


def effect(**changes: object) -> Effect:
    values = {"number": 1, "kind": "SIGKILL", "victim": "rank", "step": 2, "met": True,
              "status": None, "traceback": False, "log": ""}  # fmt: skip
    return Effect(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"differences": 1}, False),
        ({"leg": "retriever", "differences": 1, "same_weights": False}, True),
        ({"touched": ["step_1 q/0"]}, False),
        ({"missing_steps": [3]}, False),
        ({"other_prompts": ["step_3"]}, False),
        ({"staleness": 2, "oldest": 2}, True),
        ({"staleness": 2, "oldest": 3}, False),
        ({"broken": ["global_step_1"]}, False),
        ({"left": ["process 1: rank"]}, False),
        ({"effects": [effect(status=1, traceback=True)]}, False),
        ({"effects": [effect(status=4), effect(met=False)]}, True),
    ],
)
def test_a_campaign_holds_only_if_nothing_was_lost(changes: dict[str, object], holds: bool) -> None:
    """Faults of the retriever may leave rounding; no fault may leave a traceback or lose data."""
    values = {"leg": "machine", "seed": 0, "seconds": 1.0, "starts": 1, "steps": 3,
              "effects": [effect()], "not_run": ["disk full"], "missing_steps": [],
              "differences": 0, "same_weights": True, "touched": [], "broken": [],
              "left": []}  # fmt: skip
    report = Report(**{**values, **changes})  # type: ignore[arg-type]
    assert report.holds is holds
    assert ("DOES NOT HOLD" in markdown(report)) is not holds
    assert "| disk full | not run: needs root or a compiler | 0 |" in markdown(report)
