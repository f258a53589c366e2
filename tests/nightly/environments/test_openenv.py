"""OpenEnv both ways, with its own server and client, and TRL's loop, beside our packages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from example import geography
from search_r1.agent.generation import build_environment, search_agent
from search_r1.agent.search import ANSWER_SHARE, BLANK_SHARE, EMPTY_SHARE
from search_r1.agent.tags import TEMPLATES
from search_r1.environments.openenv import OpenEnvAgent, over
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.server import create_app
from search_r1.retrieval.settings import RetrieverConfig
from tests.apps import running
from tests.core.agent.chat_templates import QWEN, ChatTokenizer
from tests.fakes import ByteTokenizer, ScriptedEngine
from tests.nightly.environments.packages import python_with
from tests.nightly.environments.task import WORDS, retrieval
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.native import NativeFormat
from verl.agent.tags import plain_format
from verl.config import Config
from verl.ports import free_port
from verl.types import Origin, Prompt, Sampling, Status, Trajectory, start_trajectory

PACKAGES = ("openenv==0.10.0", "trl==1.16.0")
ROOT = Path(__file__).resolve().parents[3]
NUM_DIALOGUES = int(os.environ.get("NUM_DIALOGUES", 1000))
TOKENIZER = ByteTokenizer()
OF_OUR_TOOL = (EMPTY_SHARE, BLANK_SHARE, ANSWER_SHARE)
"""Statistics that our own search tool has in addition."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python with both, whose packages come before ours: `OPENENV_PYTHON`, or a new one."""
    return python_with(PACKAGES, "OPENENV_PYTHON", tmp_path_factory)


@pytest.fixture(params=["search"])
def url(python: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of the environment that the test names, served by openenv."""
    port = free_port()
    with served(
        [python, "-m", "tests.nightly.environments.servers", request.param, str(port)], port
    ) as url:
        yield url


@contextlib.contextmanager
def served(command: list[str], port: int) -> Iterator[str]:
    """Run a server until the body ends; yield its address once it answers there."""
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=path) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(1200):
                assert process.poll() is None, "the server ended"
                try:
                    httpx.get(f"{url}/health", trust_env=False)
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def agents(url: str, is_native: bool) -> tuple[DialogueAgent, OpenEnvAgent]:
    """Build the same agent twice: over our retriever, and over the environment."""
    config = Config()
    config.agent.name = f"openenv:{url}"
    limits = Limits(max_turns=3, max_response_length=300, max_obs_length=700)
    native = search_agent(retrieval(), TOKENIZER, limits, TEMPLATES["short"])
    if is_native:
        tokenizer = ChatTokenizer(QWEN)
        format = NativeFormat(tokenizer, native.environment.tools)
        native = replace(native, format=format, tokenizer=tokenizer, reserved=None)
    other = replace(native, environment=build_environment(config))
    if is_native:
        other = replace(other, format=NativeFormat(tokenizer, other.environment.tools))
    return native, over(other)


def scripts(is_native: bool) -> list[list[str]]:
    """Return random dialogues: searches, mistakes of form, answers, and none at all."""
    choices = random.Random(5)
    call = '<tool_call>\n{{"name": "search", "arguments": {{"query": {}}}}}\n</tool_call>'

    def turn() -> str:
        query = " ".join(choices.choices(WORDS[:-1], k=choices.randint(1, 3)))
        asked = call.format(json.dumps(query)) if is_native else f"<search>{query}</search>"
        return choices.choices(
            [asked, "<think>nothing", "<search>", f"<answer>{query}</answer>", asked * 2],
            weights=[6, 1, 1, 2, 1],
        )[0]

    return [[turn() for _ in range(4)] for _ in range(NUM_DIALOGUES)]


async def play_all(agent: DialogueAgent, dialogues: list[list[str]]) -> list[Trajectory]:
    """Play all dialogues, eight at a time: twice as many as the server has sessions."""
    gate = asyncio.Semaphore(8)

    async def play(number: int, script: list[str]) -> Trajectory:
        prompt = Prompt(f"t#{number}", tuple(TOKENIZER.encode("Question: who? ")), "t", ("x",))
        start = start_trajectory(prompt, group=str(number), sample=0, seed=number)
        async with gate:
            return await agent.run(start, ScriptedEngine(script), Sampling(1))

    return await asyncio.gather(*(play(n, script) for n, script in enumerate(dialogues)))


@pytest.mark.parametrize("is_native", [False, True])
def test_both_ways_have_the_same_tokens(url: str, is_native: bool) -> None:
    """A thousand dialogues of the task have the ids, log-probs and status of the native agent."""
    native, other = agents(url, is_native)
    assert [t.schema for t in other.environment.tools] == [
        t.schema for t in native.environment.tools
    ]
    dialogues = scripts(is_native)
    expected = asyncio.run(play_all(native, dialogues))
    played = asyncio.run(play_all(other, dialogues))
    for ours, theirs in zip(expected, played, strict=True):
        assert theirs.error == ""
        assert theirs.segments == ours.segments
        assert theirs.status is ours.status
        expected_stats = {name: n for name, n in ours.stats.items() if name not in OF_OUR_TOOL}
        assert theirs.stats == {**expected_stats, "environment_reward": 0}
    assert {t.status for t in played} >= {Status.ANSWERED, Status.OUT_OF_TURNS}
    assert sum(t.stats["valid_searches"] for t in played) > NUM_DIALOGUES


@pytest.mark.parametrize("url", ["game"], indirect=True)
def test_an_environment_with_its_own_action_ends_the_dialogue(url: str) -> None:
    """Its reset is shown first, its rewards are summed, and its end ends the dialogue."""
    config = Config()
    config.agent.name = f"openenv:{url}"
    environment = build_environment(config)
    format = plain_format(environment.tools)
    agent = over(DialogueAgent(Limits(max_turns=4), format, environment, TOKENIZER))
    prompt = Prompt("t#0", (1, 2), "t", ("x",), extra_info={"reset": {"secret": 7}})
    start = start_trajectory(prompt, group="g", sample=0, seed=1)
    script = ["<act>3</act>", "<act>nine</act>", "<act>9</act>", "<act>7</act>"]
    done = asyncio.run(agent.run(start, ScriptedEngine(script), Sampling(1)))
    seen = [s.text for s in done.segments if s.origin is Origin.OBSERVATION]
    marks = ("Guess a number.", "higher", "Error: ", "lower")
    assert [mark for mark, text in zip(marks, seen, strict=True) if mark in text] == [*marks]
    assert (done.status, done.stats["environment_reward"]) == (Status.ANSWERED, 0.5)
    assert done.segments[-1].origin is Origin.POLICY


CLIENT = """
import asyncio, json, sys
from openenv import GenericEnvClient
async def main():
    async with GenericEnvClient(base_url=sys.argv[1]) as env:
        await env.reset(question="who?", ground_truth=["Oslo"])
        call = lambda name, **a: env.step({"type": "call_tool", "tool_name": name, "arguments": a})
        found = (await call("search", query="oslo fjord")).observation["result"]
        wrong = (await call("find", query="x")).observation["error"]["error_type"]
        end = await call("answer", answer="the oslo")
        print(json.dumps([found, wrong, end.reward, end.done]))
asyncio.run(main())
"""


def test_openenvs_own_client_plays_our_task(python: str, url: str) -> None:
    """It searches, is told of a wrong call, and gets the reward of exact match at the end."""
    command = [python, "-c", CLIENT, url]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found, wrong, reward, done = json.loads(output)
    expected = asyncio.run(retrieval().search("oslo fjord"))
    assert [(d["id"], d["title"], d["text"]) for d in found] == [
        (d.id, d.title, d.text) for d in expected
    ]
    assert (wrong, reward, done) == ("invalid_args", 1.0, True)


def test_trls_own_loop_trains_on_our_task(python: str) -> None:
    """A step of GRPO searches in our environment, which gives the rewards of the answers."""
    port = free_port()
    retriever = build_retriever(RetrieverConfig("bm25", str(geography.CORPUS)))
    with running(create_app(retriever)) as found:
        command = [python, "-m", "search_r1.environments.openenv_server", "--topk", "1",
                   "--retriever-url", f"{found}/retrieve", "--port", str(port)]  # fmt: skip
        with served(command, port) as url:
            program = [python, "-m", "tests.nightly.environments.trl_loop", url]
            path = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(program, check=True, capture_output=True, cwd=ROOT, env=path)
    step = json.loads(done.stdout.splitlines()[-1])
    assert step["searches"] > step["episodes"] / 2
    assert 0 < sum(step["rewards"]) < step["episodes"] == len(step["rewards"])
    assert step["reward"] == pytest.approx(sum(step["rewards"]) / step["episodes"])
    assert 0 < step["grad_norm"] < 100
