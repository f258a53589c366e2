"""Loops through the gateway: the native agent's tokens, forks, and what ends an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError

from search_r1.agent.generation import build_environment
from search_r1.gateway.agent import FAILED, REWARD
from tests.fakes import ids_of, texts
from tests.gateway.episodes import (
    END,
    LIMITS,
    StreamedEngine,
    call,
    loop_agent,
    native_agent,
    play,
    play_all,
    scripts,
    search_loop,
    streamed_loop,
    threaded_loop,
)
from verl.batch import ROW_STARTS, TokenBatch
from verl.config import Config
from verl.engine import EngineDied
from verl.errors import ConfigError, PluginError
from verl.plugins import absolute
from verl.types import Origin, Status

USER = {"role": "user", "content": "who?"}


def check_equality(loop: Callable[..., Any], num: int) -> None:
    """Ids, origins, log-probs, status and statistics are those of the built-in loop."""
    dialogues = scripts(num)
    limits = replace(LIMITS, max_prompt_length=1300)  # which some of them exceed
    expected = asyncio.run(play_all(native_agent(limits), dialogues))
    played = asyncio.run(play_all(loop_agent(loop, limits), dialogues, StreamedEngine))
    for ours, theirs in zip(expected, played, strict=True):
        assert theirs.error == ""
        is_equal = theirs.segments == ours.segments  # a comparison of pytest's takes minutes
        assert is_equal, (ours.text, theirs.text)
        assert theirs.status is ours.status
        searched = {n: v for n, v in ours.stats.items() if not n.endswith("_result_share")}
        assert theirs.stats == {**searched, "rows": 1}
    assert {t.status for t in played} == {*Status} - {Status.FAILED}
    assert sum(t.stats["valid_searches"] for t in played) > num / 2


@pytest.mark.parametrize("loop", [search_loop, streamed_loop, threaded_loop])
def test_a_loop_has_the_tokens_of_the_native_agent(loop: Callable[..., Any]) -> None:
    """Also streamed, and in a thread."""
    check_equality(loop, 40)


async def ask(client: AsyncOpenAI, *messages: Any, **options: Any) -> Any:
    reply = await client.chat.completions.create(model="m", messages=messages, **options)
    return reply.choices[0].message


async def edited(client: AsyncOpenAI) -> str:
    """Continue once, then with a summary in place of the history, then where it was left."""
    first = await ask(client, USER)
    more = {"role": "user", "content": "more"}
    second = await ask(client, USER, first, more)
    await ask(client, {"role": "user", "content": f"In short: {second.content}"})
    await ask(client, USER, first, {"role": "user", "content": "else?"})
    return "x"


def test_an_edited_history_forks_into_rows() -> None:
    """Each turn is trained in one row, and belongs to the prompt of the others that it begins."""
    script = ["one", "two", "three", f"four{END}"]
    agent = loop_agent(edited)
    done = asyncio.run(play(agent, script))
    assert (done.stats["turns"], done.stats["rows"]) == (4, 3)
    assert done.status is Status.ANSWERED
    assert texts(done, Origin.POLICY) == ["one", "two", "three", f"four{END}", "<answer>x</answer>"]
    assert done.segments[-1].ids == ()
    batch = TokenBatch.from_trajectories([done, done])
    starts = batch.tokens[ROW_STARTS].nonzero()[:, 0]
    assert len(batch) == 2 and len(starts) == 4
    prompts = [segment.ids[:3] for segment in done.segments if segment.origin is Origin.PROMPT]
    assert all(tuple(batch.tokens["input_ids"][i : i + 3].tolist()) in prompts for i in starts)


def test_rows_have_every_turn_once() -> None:
    """What a row repeats of another has no log-probs, and the ids that were sampled."""
    rows: list[Any] = []

    agent = loop_agent(edited)
    original = agent._play

    async def play_and_keep(episode: Any, start: Any) -> Any:
        returned = await original(episode, start)
        rows.extend(episode.history.rows())
        return returned

    agent._play = play_and_keep  # type: ignore[method-assign]
    asyncio.run(play(agent, ["one", "two", "three", "four"]))
    sampled = [[s.text for s in row if s.origin is Origin.POLICY] for row in rows]
    assert sampled == [["one", "two"], ["three"], ["four"]]
    assert ids_of(rows[2])[: len(rows[0][0].ids) + 3] == ids_of(rows[0][:2])
    assert [segment.origin for segment in rows[2]] == [
        Origin.PROMPT, Origin.PROMPT, Origin.OBSERVATION, Origin.POLICY
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": 0.2}, "temperature"), ({"top_p": 0.5}, "top_p"), ({"seed": 1}, "seed"),
        ({"n": 2}, "n"), ({"logprobs": True}, "logprobs"), ({"tool_choice": "none"}, "tool_choice"),
        ({"extra_body": {"top_k": 3}}, "top_k"), ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
    ],
)  # fmt: skip
def test_what_a_run_cannot_do_ends_it(options: Any, field: str) -> None:
    """No parameter is ignored; the error names it and the line of the loop."""

    async def loop(client: AsyncOpenAI) -> None:
        await ask(client, USER, **options)

    with pytest.raises(PluginError, match=rf"^loop:test: got {field}: .*; fix: "):
        asyncio.run(play(loop_agent(loop), ["x"]))


def test_what_changes_nothing_is_accepted() -> None:
    """The run's own temperature, defaults, and names of the caller; stop strings are followed."""
    options = {
        "temperature": 1.0,
        "top_p": 1,
        "n": 1,
        "user": "me",
        "stop": "</a>",
        "max_tokens": 8,
    }

    async def loop(client: AsyncOpenAI) -> float:
        message = await ask(client, USER, **options)
        assert message.content == "<a>b"
        assert (await client.models.list()).data[0].id == "policy"
        assert (await ask(client, USER, message, USER, **options)).content == "0123"
        return 0.5

    done = asyncio.run(play(loop_agent(loop), ["<a>b</a>c", "0123456789"[:4]]))
    assert (done.error, done.stats["rows"], done.stats[REWARD]) == ("", 1, 0.5)
    assert texts(done, Origin.POLICY) == ["<a>b</a>", "0123"]


def test_an_overflow_is_answered_as_openai_does() -> None:
    """A loop that does not catch it ends out of budget; one that shortens its history goes on."""

    async def loop(client: AsyncOpenAI, extra_info: Any) -> str:
        message = await ask(client, USER)
        try:
            await ask(client, USER, message, {"role": "user", "content": "x" * 200})
        except BadRequestError as error:
            assert error.code == "context_length_exceeded"
            if not extra_info["question"].endswith("7?"):
                raise
        return (await ask(client, USER)).content

    agent = loop_agent(loop, replace(LIMITS, max_prompt_length=150))
    ended, went_on = (asyncio.run(play(agent, ["one", "two"], n)) for n in (1, 7))
    assert (ended.status, ended.stats["turns"]) == (Status.OUT_OF_BUDGET, 1)
    assert (went_on.status, went_on.stats["rows"]) == (Status.ANSWERED, 2)


def test_an_endless_loop_is_ended() -> None:
    """After its last turn it gets errors, and then no more time."""

    async def loop(client: AsyncOpenAI) -> None:
        while True:
            try:
                await ask(client, USER)
            except APIStatusError as error:
                assert error.code == "max_turns_exceeded"

    done = asyncio.run(play(loop_agent(loop), ["again"] * 4))
    assert (done.status, done.stats["turns"]) == (Status.OUT_OF_TURNS, 4)


async def asks_nothing(client: AsyncOpenAI) -> str:
    return "Oslo"


async def breaks(client: AsyncOpenAI) -> None:
    await ask(client, USER)
    raise KeyError("nothing here")


@pytest.mark.parametrize(("loop", "message"), [
    (asks_nothing, "without a sampled turn"), (breaks, "KeyError: 'nothing here'"),
])  # fmt: skip
def test_a_loop_that_fails_is_a_failed_row(loop: Callable[..., Any], message: str) -> None:
    """It is counted, says why, and is never trained."""
    done = asyncio.run(play(loop_agent(loop), ["x"]))
    assert (done.status, done.faults) == (Status.FAILED, {FAILED: 1})
    assert message in done.error


def test_a_result_of_another_kind_ends_the_run() -> None:
    """A message in place of its text is a mistake in every episode."""

    async def loop(client: AsyncOpenAI) -> Any:
        return await ask(client, USER)

    with pytest.raises(PluginError, match=r"^agent.name: got ChatCompletionMessage.*fix: "):
        asyncio.run(play(loop_agent(loop), ["x"]))


def test_a_lost_engine_is_no_failure_of_the_loop() -> None:
    """The replica gets the engine's error, even if the loop would have caught the server's."""

    class Lost(StreamedEngine):
        async def generate(self, *arguments: Any) -> Any:
            raise EngineDied("gone")

    with pytest.raises(EngineDied, match="gone"):
        asyncio.run(play(loop_agent(search_loop), [], engine=Lost))


BROKEN = [
    ([{"role": "assistant", "content": "x"}], "last message"),
    ([{"role": "tool", "tool_call_id": "1", "content": ""}], "preceding tool_calls"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "image_url",
    ),
    ([{"role": "user", "content": "a", "thinking": "b"}], "thinking"),
]


@pytest.mark.parametrize(("messages", "problem"), BROKEN)
def test_messages_in_no_order_are_refused(messages: Any, problem: str) -> None:
    """As OpenAI refuses them; nothing of a message is dropped."""

    async def loop(client: AsyncOpenAI) -> str:
        with pytest.raises(BadRequestError, match=problem):
            await ask(client, *messages)
        return (await ask(client, USER)).content

    assert asyncio.run(play(loop_agent(loop), ["x"])).error == ""


FILE = """
async def good(client, question): ...
def other(client, qestion): ...
def neither(question): ...
thing = 3
"""


@pytest.mark.parametrize(("name", "problem"), [
    ("other", "call it question"), ("neither", "neither client nor base_url"),
    ("thing", "no function"), ("missing", "a name in"),
])  # fmt: skip
def test_a_loop_that_cannot_work_is_refused_at_the_start(
    tmp_path: Path, name: str, problem: str
) -> None:
    """The error names the option and the fix."""
    file, config = tmp_path / "loop.py", Config()
    file.write_text(FILE)
    config.agent.name = f"loop:{file}:good"
    assert build_environment(config).tools == ()
    config.agent.name = f"loop:{file}:{name}"
    with pytest.raises(ConfigError, match=rf"^agent.name: .*{problem}.*"):
        build_environment(config)


def test_the_path_of_a_loop_becomes_absolute() -> None:
    """Replicas have another working directory."""
    assert absolute("loop:a/b.py:run") == f"loop:{Path.cwd()}/a/b.py:run"


def test_closed_thinking_stands_before_each_turn() -> None:
    """As in the native agent."""
    limits = replace(LIMITS, no_think_rl=True)
    script = [call("oslo") + END, f"<answer>x</answer>{END}"]
    ours = asyncio.run(play(native_agent(limits), script))
    assert asyncio.run(play(loop_agent(search_loop, limits), script)).segments == ours.segments
