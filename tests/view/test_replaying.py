"""Replays by the page's application: what is asked of the command, and how it answers."""

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
from search_r1.view.app import Asked, Runs, create_app
from search_r1.view.run import Run
from tests.view import runs

PLACE = {"step": 1, "line": 0}


def replayed(run: Run, **changes: Any) -> bytes:
    """What the command prints of the first trajectory, replayed with another answer."""
    path = run.folder / "rollouts" / "step_00000001.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    row["segments"][-1] = {**row["segments"][-1], "text": runs.HOSTILE, "ids": [1, 2],
                           "log_probs": [None, -1.0]}  # fmt: skip
    found = {"verdict": "Other.", "notes": [], "identical": False, "differs_at": [5, 0],
             "score": {"recorded": 0.0, "replayed": 1.0}, "row": row}  # fmt: skip
    return json.dumps(found | changes).encode()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Has the command say something; gives the list of what it was asked."""

    def install(out: bytes, err: bytes = b"") -> list[list[str]]:
        asked: list[list[str]] = []

        async def said(command: list[str], _: Asked) -> tuple[bytes, bytes]:
            asked.append(command)
            return out, err

        monkeypatch.setattr(app, "_said", said)
        return asked

    return install


def test_an_edit_is_the_commands_and_its_outcome_is_shown_as_a_trajectory(
    run: Run, says: Callable[..., list[list[str]]]
) -> None:
    """The options by name, never through a shell; segments as the page shows recorded ones."""
    asked = says(replayed(run))
    client = TestClient(create_app(Runs([run])))
    text = "--json\n; $(boom) <x>"
    answer = client.post("/api/replay", json={**PLACE, "turn": 2, "text": text, "gradient": True})
    assert asked == [[str(run.folder), f"--rollouts={run.rollouts}", "--trajectory=1:0", "--turn=2",
                      f"--text={text}", "--gradient", "--json"]]  # fmt: skip
    found = answer.json()
    assert found["verdict"] == "Other." and "row" not in found
    last = found["segments"][-1]
    assert last["text"] == runs.HOSTILE and last["columns"]["log_probs"] == [None, -1.0]
    assert found["calls"][0]["documents"][0]["title"] == "Italy"


def test_what_the_command_refuses_is_one_line(
    run: Run, says: Callable[..., list[list[str]]]
) -> None:
    """Its last, after whatever libraries wrote."""
    says(b"", b"a warning\n--turn: got 9, expected one of the 3; fix: --turn 3\n")
    answer = TestClient(create_app(Runs([run]))).post("/api/replay", json=PLACE)
    assert answer.status_code == 422
    assert answer.json()["detail"] == "--turn: got 9, expected one of the 3; fix: --turn 3"


@pytest.mark.parametrize("body", [
    {}, {"step": -1, "line": 0}, {"step": 1, "line": "x"}, {**PLACE, "turn": 0},
    {**PLACE, "text": "a\0b"}, {**PLACE, "query": "x" * 100_001}, {**PLACE, "documents": [{}]},
    {**PLACE, "documents": [[{"title": "no text"}]]}, {**PLACE, "run": 7}, [], "x",
])  # fmt: skip
def test_a_bad_request_starts_nothing(
    run: Run, says: Callable[..., list[list[str]]], body: object
) -> None:
    """It is refused by a status of the client's."""
    asked = says(b"")
    answer = TestClient(create_app(Runs([run]))).post("/api/replay", json=body)
    assert answer.status_code in (404, 422) and asked == []


def test_no_other_site_can_ask(run: Run, says: Callable[..., list[list[str]]]) -> None:
    """A form's or a script's plain request is refused, as is one without the token."""
    asked, body = says(b""), json.dumps(PLACE)
    client = TestClient(create_app(Runs([run])))
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = client.post("/api/replay", content=body, headers={"Content-Type": kind})
        assert answer.status_code in (415, 422), kind
    closed = TestClient(create_app(Runs([run]), "secret"))
    assert closed.post("/api/replay", json=PLACE).status_code == 401
    assert client.get("/api/replay").status_code == 405 and asked == []


def test_one_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second is told to wait; other pages are answered meanwhile."""
    begun, over = threading.Event(), threading.Event()

    async def said(command: list[str], _: Asked) -> tuple[bytes, bytes]:
        begun.set()
        while not over.is_set():
            await asyncio.sleep(0.005)
        return replayed(run), b""

    monkeypatch.setattr(app, "_said", said)
    with TestClient(create_app(Runs([run]))) as client:
        statuses: list[int] = []
        first = threading.Thread(
            target=lambda: statuses.append(client.post("/api/replay", json=PLACE).status_code)
        )
        first.start()
        assert begun.wait(10)
        assert client.post("/api/replay", json=PLACE).status_code == 409
        assert client.get("/api/trajectory?kind=train&step=1&line=0").status_code == 200
        over.set()
        first.join()
    assert statuses == [200]


@pytest.mark.slow  # seconds of imports
def test_the_real_command_is_asked(folder: Path, open_run: Callable[[Path], Run]) -> None:
    """In a process of its own; this run's options name no questions, which it says."""
    found = TestClient(create_app(Runs([open_run(folder)]))).post(
        "/api/replay", json={**PLACE, "documents": [[{"title": "T", "text": "x"}]]}
    )
    assert found.status_code == 422 and "fix: " in found.json()["detail"]
