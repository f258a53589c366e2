"""verifiers' environments as agents: what users get wrong, and what is read of an episode."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from search_r1.agent.generation import AGENTS, agent_kind
from search_r1.environments import verifiers_server
from search_r1.gateway.verifiers import Assembly, EnvironmentAddress, EpisodeFailed
from tests.environments.refusal import check_refusal
from verl.ports import free_port

TASK = {"task": '{"prompt": "who?"}'}


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:1", "http://a:1", "tcp://a", "tcp://a:x", "PORT"]
)
def test_a_server_that_is_none_is_refused_within_two_seconds(address: str) -> None:
    """The error names the option, what it expects, and a fix."""
    agent = "verifiers:" + address.replace("PORT", f"tcp://127.0.0.1:{free_port()}")
    assert agent_kind(agent) in AGENTS
    check_refusal(agent)


def test_the_package_is_needed_for_its_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the command that installs it."""
    monkeypatch.setattr(sys, "argv", ["verifiers_server", "gsm8k"])
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(SystemExit):
        verifiers_server.main()
    assert "fix: pip install verifiers==" in " ".join(capsys.readouterr().err.split())


REWARDS = {"right": {"score": 1.0, "weight": 2.0}, "short": {"score": -0.5}}
OPEN: dict[str, Any] = {"trace": "a", "open": {}, "set": {"rewards": {"right": None}}}
DONE: dict[str, Any] = {"trace": "a", "set": {"rewards": REWARDS}}
OK = {"success": True, "head": {"ok": True, "errors": []}}
FAULT = {"success": True, "head": {"ok": False, "errors": [{"type": "E", "message": "m"}]}}


@pytest.mark.parametrize(("deltas", "reply", "expected"), [
    ([OPEN, DONE, {"trace": "a", "nodes": []}], OK, 1.5),
    ([{"trace": "a"}], OK, 0.0),
    ([DONE, {"trace": "b", "set": {}}, {"trace": "b", "discard": True}], OK, 1.5),
    ([OPEN], OK, "did not compute its reward right"),
    ([DONE, {"trace": "b"}], OK, "2 traces"),
    ([], OK, "0 traces"),
    ([DONE], FAULT, "E: m"),
    ([DONE], {"success": False, "error": "no such task"}, "no such task"),
])  # fmt: skip
def test_an_episode_has_the_weighted_sum_of_its_rewards(
    deltas: list[Any], reply: Any, expected: float | str
) -> None:
    """What did not end well is a failure, never a reward of zero."""
    assembly = Assembly(reply=reply)
    for delta in deltas:
        assembly.add(delta)
    if isinstance(expected, float):
        assert assembly.reward() == expected
    else:
        with pytest.raises(EpisodeFailed, match=expected):
            assembly.reward()


class Server(threading.Thread):
    """Answers as verifiers' server does: runs of `who?` with a reward, others never."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.url = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.requests: list[tuple[bytes, Any]] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            if not self.socket.poll(50):
                continue
            client, key, method, payload = self.socket.recv_multipart()
            content = msgpack.unpackb(payload)
            self.requests.append((method, content))
            if method == b"run" and content["task_data"]["prompt"] != "who?":
                continue
            answers = [(b"delta", OPEN), (b"delta", DONE)] if method == b"run" else []
            for kind, answer in [*answers, (b"reply", OK)]:
                self.socket.send_multipart([client, key, kind, msgpack.packb(answer)])
        self.socket.close(linger=0)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.is_over.set()
    server.join()


def test_episodes_are_asked_for_side_by_side(server: Server) -> None:
    """Each request has the task and the gateway's address; a cancelled one is cancelled there."""
    address = EnvironmentAddress(server.url)
    address.check()

    async def play() -> list[float]:
        asked = [address.play(f"http://127.0.0.1:1/{n}/v1", TASK) for n in range(3)]
        rewards = await asyncio.gather(*asked)
        endless = asyncio.ensure_future(address.play("http://x/v1", {"task": '{"prompt": "?"}'}))
        await asyncio.sleep(0.1)
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)
        await asyncio.sleep(0.2)
        assert endless.cancelled() and not address.waiting
        return rewards

    assert asyncio.run(play()) == [1.5] * 3
    runs = [content for method, content in server.requests if method == b"run"]
    assert {r["client"]["base_url"] for r in runs} == {
        "http://x/v1", *(f"http://127.0.0.1:1/{n}/v1" for n in range(3))
    }  # fmt: skip
    assert [method for method, _ in server.requests].count(b"cancel") == 1
    with pytest.raises(EpisodeFailed, match=r"extra_info\.task"):
        asyncio.run(address.play("http://x/v1", {}))


def test_a_server_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of an episode."""
    monkeypatch.setattr("search_r1.gateway.verifiers.BEAT_S", 0.05)
    monkeypatch.setattr("search_r1.gateway.verifiers.SILENCE_S", 0.1)
    address = EnvironmentAddress(f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(EpisodeFailed, match="has not answered"):
        asyncio.run(address.play("http://x/v1", TASK))
