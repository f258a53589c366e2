"""OpenEnv environments as agents: what users get wrong, and what a policy reads."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from search_r1.agent.generation import AGENTS, agent_kind
from search_r1.environments import openenv_server
from search_r1.environments.openenv import (
    FAILED,
    FULL,
    EnvironmentServer,
    EpisodeOver,
    Session,
    described_action,
    items_of,
    readable,
    reset_values,
)
from tests.environments.refusal import check_refusal
from verl.config.agent import AgentConfig, ServerConfig
from verl.config.option import Limits
from verl.errors import ToolError
from verl.ports import free_port
from verl.types import Prompt, start_trajectory


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "ftp://a", "http://", "PORT"])
def test_a_server_that_is_none_is_refused_within_two_seconds(address: str) -> None:
    """The error names the option, what it expects, and a fix."""
    check_refusal("openenv:" + address.replace("PORT", f"http://127.0.0.1:{free_port()}"))


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server says what to install; the agent does not need it."""
    monkeypatch.setattr(sys, "argv", ["openenv_server"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        openenv_server.main()
    assert "fix: pip install openenv==" in " ".join(capsys.readouterr().err.split())


def test_only_names_of_a_kind_are_that_kind() -> None:
    """`openenv:ADDRESS` is an agent; a misspelt kind is none."""
    limits: Limits = AgentConfig.__dataclass_fields__["name"].metadata["limits"]
    allowed = ("dialogue", "openenv:http://a:1", "mine.py:Agent")
    assert [limits.allows(name) for name in (*allowed, "openenv", "open:x")] == [True] * 3 + [
        False
    ] * 2
    assert set(limits.allowed_words) == set(AGENTS)
    assert [agent_kind(name) for name in allowed] == ["dialogue", "openenv:URL", "mine.py:Agent"]


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        ({"tool_name": "t", "result": [{"text": "a", "title": "b", "id": "1"}, {"text": "c"}]},
         [("a", "b", "1"), ("c", None, None)]),
        ({"tool_name": "t", "result": {"data": 7, "content": []}}, [("7", None, None)]),
        ({"tool_name": "t", "result": None}, []),
        ({"tool_name": "t", "result": []}, []),
        ({"tool_name": "t", "result": [{"text": 1}]}, [('[{"text": 1}]', None, None)]),
        ({"message": "hot", "hint": ""}, [("hot", None, None)]),
        ({"board": [0, 1], "left": 2}, [('{"board": [0, 1], "left": 2}', None, None)]),
    ],
)  # fmt: skip
def test_observations_become_items(observation: Any, expected: Any) -> None:
    """Passages stay apart, a single text stands alone, and everything else is JSON."""
    assert [(i.text, i.title, i.id) for i in items_of(observation)] == expected


def test_nothing_is_shown_of_an_empty_observation() -> None:
    """An environment that shows nothing at its reset adds no token."""
    assert [readable(value) for value in ({}, None, {"a": None}, "x")] == ["", "", "", "x"]


def test_an_action_is_a_tool_without_its_metadata() -> None:
    """Its description and arguments come from the schema."""
    text = {"type": "string"}
    schema = {"description": " Guess. ", "properties": {"word": text, "metadata": {}}}
    described = described_action(schema)
    assert described["description"] == "Guess."
    assert described["input_schema"]["properties"] == {"word": text}


def test_all_samples_of_a_row_are_the_same_episode() -> None:
    """The seed depends on the row only, and `extra_info.reset` adds to it."""

    def values(sample: int, uid: str) -> dict[str, Any]:
        own = {"question": "who?", "reset": {"level": 2, "other": None}}
        prompt = Prompt(uid, (1,), "test", ("x",), extra_info=own)
        return reset_values(start_trajectory(prompt, group="g", sample=sample, seed=sample))

    assert values(0, "a#0") == values(1, "a#0")
    assert values(0, "a#0")["seed"] != values(0, "a#1")["seed"]
    assert values(0, "a#0").keys() == {"seed", "question", "ground_truth", "level"}


def reward_of(value: object) -> str:
    data = {"observation": {}, "reward": value, "done": True}
    return json.dumps({"type": "observation", "data": data})


@pytest.mark.parametrize("kind", ["reset", "step"])
@pytest.mark.parametrize("reply", ["<html>", "[]", "{}", '{"type": "observation"}', '{"data": {}}'])
def test_a_reply_of_another_form_is_a_failure(kind: str, reply: str) -> None:
    check_failure(kind, reply, "got")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1.0", [1]])
def test_a_reward_that_is_no_number_is_a_failure(reward: object) -> None:
    check_failure("step", reward_of(reward), "reward")


def test_a_dialogue_waits_for_a_session() -> None:
    """A full server closes at once, more often than a failing one would be asked again."""
    options = ServerConfig(max_retries=1)
    asked = 0

    async def answer(socket: ServerConnection) -> None:
        nonlocal asked
        asked += 1
        if asked <= options.max_retries + 3:
            return await socket.send(json.dumps({"type": "error", "data": {"code": FULL}}))
        async for _ in socket:
            await socket.send(reward_of(None))
        return None

    play(answer, options)
    assert asked == options.max_retries + 4


def check_failure(kind: str, reply: str, message: str) -> None:
    """A dialogue whose server sends `reply` to messages of a kind is a failed one."""

    async def answer(socket: ServerConnection) -> None:
        async for text in socket:
            if (sent := json.loads(text)["type"]) != "close":
                await socket.send(reply if sent == kind else reward_of(None))

    with pytest.raises(ToolError, match=message) as raised:
        play(answer, ServerConfig())
    assert raised.value.faults == {FAILED: 1}


def play(answer: Callable[[ServerConnection], Awaitable[None]], options: ServerConfig) -> None:
    """Open an episode with a server, and take a step, which ends it."""

    async def episode() -> None:
        async with serve(answer, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            address = EnvironmentServer(f"http://127.0.0.1:{port}", options)
            prompt = Prompt("q", (1,), "test", ("x",))
            start = start_trajectory(prompt, group="g", sample=0, seed=0)
            session = Session(address, start)
            try:
                await session.open()
                with contextlib.suppress(EpisodeOver):
                    await session.step({})
            finally:
                await session.aclose()

    asyncio.run(episode())
