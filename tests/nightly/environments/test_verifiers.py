"""verifiers both ways, with its own server and its own loop in an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from search_r1.gateway.agent import REWARD
from search_r1.gateway.loops import UserLoop
from search_r1.gateway.verifiers import EnvironmentAddress
from search_r1.retrieval.schema import Hit
from search_r1.retrieval.server import create_app
from tests.apps import running
from tests.gateway import episodes
from tests.gateway.episodes import (
    LIMITS,
    StreamedEngine,
    loop_agent,
    native_agent,
    play_all,
    scripts,
)
from tests.nightly.environments.packages import python_with
from verl.data.rows import load_rows
from verl.errors import ConfigError
from verl.ports import free_port
from verl.types import Status

PACKAGES = ("verifiers==0.4.0", "orjson", "pyarrow", "omegaconf")
ROOT = Path(__file__).resolve().parents[3]
NUM_DIALOGUES = int(os.environ.get("NUM_DIALOGUES", 1000))


class Served:
    """The documents of the episodes, as an engine of our server."""

    name, num_threads, num_documents = "memory", 1, len(episodes.DOCUMENTS)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        return [[Hit(d, 1.0) for d in asyncio.run(episodes.RETRIEVAL.search(q))] for q in queries]

    def info(self) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python with verifiers, whose packages come before ours: `VERIFIERS_PYTHON`, or a new one."""
    return python_with(PACKAGES, "VERIFIERS_PYTHON", tmp_path_factory)


@pytest.fixture(scope="module")
def environment(python: str) -> dict[str, str]:
    """The environment of verifiers' processes."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "search_r1" / "compat")])
    return {**os.environ, "PYTHONPATH": path, "VERIFIERS_PYTHON": python}


@pytest.fixture(scope="module")
def retriever() -> Iterator[str]:
    with running(create_app(Served())) as url:
        yield url


@pytest.fixture(scope="module")
def address(python: str, environment: dict[str, str], retriever: str) -> Iterator[str]:
    """The address of our task, served by verifiers."""
    address = f"tcp://127.0.0.1:{free_port()}"
    found = json.dumps({"retriever_url": retriever})
    command = [python, "-m", "search_r1.environments.verifiers_server", "search_r1_task",
               "--address", address, "--harness-options", found]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        try:
            wait_for(address, process)
            yield address
        finally:
            process.terminate()


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(200):
        assert process.poll() is None, "the server ended"
        try:
            return EnvironmentAddress(address).check()
        except ConfigError:
            time.sleep(0.5)
    raise AssertionError(f"{address} does not answer")


def verifiers_agent(address: str) -> Any:
    """The gateway's agent over the server; tasks have the question alone as their prompt."""
    server = EnvironmentAddress(address)

    async def play(base_url: str, extra_info: dict[str, Any]) -> float:
        question = extra_info["question"]
        task = {"prompt": question, "question": question, "answers": ["oslo"]}
        return await server.play(base_url, {"task": json.dumps(task)})

    loop = UserLoop("verifiers:test", play, ("base_url", "extra_info"))
    return replace(loop_agent(play), loop=loop)


def test_both_ways_have_the_same_tokens(address: str) -> None:
    """Dialogues of the task in verifiers have the ids, log-probs and status of the native agent."""
    dialogues = scripts(NUM_DIALOGUES)
    limits = replace(LIMITS, max_prompt_length=1300)  # which some of them exceed
    expected = asyncio.run(play_all(native_agent(limits), dialogues))
    agent = verifiers_agent(address)
    agent.policy = replace(agent.policy, limits=limits)
    began = time.monotonic()
    played = asyncio.run(play_all(agent, dialogues, StreamedEngine))
    print(f"{NUM_DIALOGUES} dialogues in {time.monotonic() - began:.0f} s")  # noqa: T201
    for ours, theirs in zip(expected, played, strict=True):
        assert theirs.error == ""
        is_equal = theirs.segments == ours.segments  # a comparison of pytest's takes minutes
        assert is_equal, (ours.text, theirs.text)
        assert theirs.status is ours.status
        is_right = ours.status is Status.ANSWERED and "<answer>oslo</answer>" in ours.text[-40:]
        assert theirs.stats.get(REWARD, 0.0) == is_right
    assert {t.status for t in played} == {*Status} - {Status.FAILED}


def test_the_rows_of_a_taskset_are_training_data(
    python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Each has the task that the server plays; our reader takes them."""
    file = tmp_path / "rows.jsonl"
    command = [python, "-m", "search_r1.environments.verifiers_server", "search_r1_task",
               "--taskset-options", '{"data": "example/data/val.parquet"}',
               "--rows", str(file), "--limit", "5"]  # fmt: skip
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    rows, source = load_rows(str(file)), load_rows("example/data/val.parquet")
    assert len(rows) == 5
    for row, ours in zip(rows, source, strict=False):
        task = json.loads(row.extra_info["task"])
        assert row.ground_truth == tuple(task["answers"]) == ours.ground_truth
        assert [task["prompt"]] == [message["content"] for message in row.prompt]


LOOP = """
import asyncio, json, sys
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

async def main():
    options, base_url = json.loads(sys.argv[1]), sys.argv[2]
    agent = {"harness": {"id": "search_r1_task", **options}, "runtime": {"type": "subprocess"}}
    data = {"id": "search_r1_task", "data": "example/data/val.parquet"}
    env = load_environment(resolve_env_config({"taskset": data, "agent": agent}))
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="NONE")
    context = vf.ModelContext(client=client, model="m", sampling=vf.SamplingConfig())
    async with env.serving():
        for task in env.taskset.take(2):
            [slot] = env.slots(task)
            episode = await env.run_slot(slot, context)
            print(json.dumps([episode.ok, episode.traces[0].reward]))

asyncio.run(main())
"""


def test_verifiers_own_loop_plays_our_task(
    python: str, environment: dict[str, str], retriever: str
) -> None:
    """With a model at any address: here one that searches once and then knows the answer."""
    turns = [episodes.call("oslo"), "<answer>no</answer>"]
    asked: list[Any] = []

    async def complete(request: Request) -> JSONResponse:
        asked.append(await request.json())
        turn = turns[sum(m["role"] == "assistant" for m in asked[-1]["messages"])]
        message: dict[str, Any] = {"role": "assistant", "content": turn}
        if "tool_call" in turn:
            function = {"name": "search", "arguments": json.dumps({"query": "oslo"})}
            message = {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": function}]}  # fmt: skip
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"id": "1", "object": "chat.completion", "created": 0, "model": "m",
                             "choices": [choice]})  # fmt: skip

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    with running(app) as url:
        command = [python, "-c", LOOP, json.dumps({"retriever_url": retriever}), f"{url}/v1"]
        out = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert [json.loads(line) for line in out.stdout.splitlines()] == [[True, 0.0]] * 2
    assert [m["role"] for m in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1]["messages"][2]["content"].startswith("Doc 1(Title: ")
