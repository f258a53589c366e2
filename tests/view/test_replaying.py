"""Replays requested through the page's application: its command, and the answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from search_r1.view import app
from search_r1.view.app import ReplayRequest, Runs, create_app
from search_r1.view.run import Run
from tests.runs import written as runs

KEY = {"step": 1, "line": 0}


def replay_output(run: Run, **changes: Any) -> bytes:
    """Return the command's output for the first trajectory, replayed with another answer."""
    path = run.folder / "rollouts" / "step_00000001.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    row["segments"][-1] = {**row["segments"][-1], "text": runs.HOSTILE, "ids": [1, 2],
                           "log_probs": [None, -1.0]}  # fmt: skip
    found = {"verdict": "Other.", "notes": [], "identical": False, "differs_at": [5, 0],
             "score": {"recorded": 0.0, "replayed": 1.0}, "row": row}  # fmt: skip
    return json.dumps(found | changes).encode()


@pytest.fixture
def replay_returns(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """A function that sets the command's output, and returns the list of its command lines."""

    def install(out: bytes, err: bytes = b"") -> list[list[str]]:
        commands: list[list[str]] = []

        async def run_replay(command: list[str], _: ReplayRequest) -> tuple[bytes, bytes]:
            commands.append(command)
            return out, err

        monkeypatch.setattr(app, "_run_replay", run_replay)
        return commands

    return install


def test_an_edit_becomes_options_and_its_result_a_trajectory(
    run: Run, replay_returns: Callable[..., list[list[str]]]
) -> None:
    """No shell sees the options; the result has segments as recorded trajectories have them."""
    commands = replay_returns(replay_output(run))
    client = TestClient(create_app(Runs([run])))
    text = "--json\n; $(boom) <x>"
    answer = client.post("/api/replay", json={**KEY, "turn": 2, "text": text, "gradient": True})
    assert commands == [[str(run.folder), f"--rollouts={run.rollouts}", "--trajectory=1:0",
                         "--turn=2", f"--text={text}", "--gradient", "--json"]]  # fmt: skip
    found = answer.json()
    assert found["verdict"] == "Other." and "row" not in found
    last = found["segments"][-1]
    assert last["text"] == runs.HOSTILE and last["columns"]["log_probs"] == [None, -1.0]
    assert found["calls"][0]["documents"][0]["title"] == "Italy"


def test_an_error_of_the_command_is_one_line(
    run: Run, replay_returns: Callable[..., list[list[str]]]
) -> None:
    """It is the last line, after output of libraries."""
    replay_returns(b"", b"a warning\n--turn: got 9, expected one of the 3; fix: --turn 3\n")
    answer = TestClient(create_app(Runs([run]))).post("/api/replay", json=KEY)
    assert answer.status_code == 422
    assert answer.json()["detail"] == "--turn: got 9, expected one of the 3; fix: --turn 3"


@pytest.mark.parametrize("body", [
    {}, {"step": -1, "line": 0}, {"step": 1, "line": "x"}, {**KEY, "turn": 0},
    {**KEY, "text": "a\0b"}, {**KEY, "query": "x" * 100_001}, {**KEY, "documents": [{}]},
    {**KEY, "documents": [[{"title": "no text"}]]}, {**KEY, "run": 7}, [], "x",
    {**KEY, "txt": "a"}, {**KEY, "documents": [[{"text": "a", "titel": "b"}]]},
])  # fmt: skip
def test_a_bad_request_starts_nothing(
    run: Run, replay_returns: Callable[..., list[list[str]]], body: object
) -> None:
    """The status is a client error."""
    commands = replay_returns(b"")
    answer = TestClient(create_app(Runs([run]))).post("/api/replay", json=body)
    assert answer.status_code in (404, 422) and commands == []


def test_no_other_site_can_request_a_replay(
    run: Run, replay_returns: Callable[..., list[list[str]]]
) -> None:
    """Requests that another site's form or script can send, or without a token, are refused."""
    commands, body = replay_returns(b""), json.dumps(KEY)
    client = TestClient(create_app(Runs([run])))
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = client.post("/api/replay", content=body, headers={"Content-Type": kind})
        assert answer.status_code in (415, 422), kind
    closed = TestClient(create_app(Runs([run]), "secret"))
    assert closed.post("/api/replay", json=KEY).status_code == 401
    assert client.get("/api/replay").status_code == 405 and commands == []


def test_one_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second replay is refused with status 409; other requests are answered meanwhile."""
    started, finished = threading.Event(), threading.Event()

    async def run_replay(command: list[str], _: ReplayRequest) -> tuple[bytes, bytes]:
        started.set()
        while not finished.is_set():
            await asyncio.sleep(0.005)
        return replay_output(run), b""

    monkeypatch.setattr(app, "_run_replay", run_replay)
    with TestClient(create_app(Runs([run]))) as client:
        statuses: list[int] = []
        first = threading.Thread(
            target=lambda: statuses.append(client.post("/api/replay", json=KEY).status_code)
        )
        first.start()
        assert started.wait(10)
        assert client.post("/api/replay", json=KEY).status_code == 409
        assert client.get("/api/trajectory?kind=train&step=1&line=0").status_code == 200
        finished.set()
        first.join()
    assert statuses == [200]


@pytest.mark.slow  # seconds of imports
def test_the_real_command_is_run(folder: Path, open_run: Callable[[Path], Run]) -> None:
    """It reports in its own process that this run's options name no question files."""
    found = TestClient(create_app(Runs([open_run(folder)]))).post(
        "/api/replay", json={**KEY, "documents": [[{"title": "T", "text": "x"}]]}
    )
    assert found.status_code == 422 and "fix: " in found.json()["detail"]
