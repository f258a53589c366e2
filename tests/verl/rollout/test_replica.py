"""A real vLLM replica: log-probs, seeds, stop strings and weight updates."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from example.tiny import tiny_llama
from search_r1.agent.generation import search_agent
from search_r1.retrieval.protocol import EmptyRetrieval
from tests.verl.rollout.conftest import children
from tests.verl.rollout.engines import MAX_PROMPT, Running, exact_log_probs, model_in, tiny_config
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.interface import Agent
from verl.config import Config
from verl.ext.transports.ipc import send
from verl.rollout.interface import RolloutEngine
from verl.rollout.replica import RolloutReplica
from verl.training.devices import device_id
from verl.types import Completion, Prompt, Sampling, Trajectory, start_trajectory

pytestmark = pytest.mark.vllm_cpu

TOLERANCE = 1e-3


@dataclass
class RecordingAgent:
    """The search agent; records every request to its engine."""

    agent: DialogueAgent
    requests: list[tuple[tuple[int, ...], Sampling]] = field(default_factory=list)

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        return await self.agent.run(start, _Recorder(engine, self.requests), sampling)


@dataclass
class _Recorder:
    engine: RolloutEngine
    requests: list[tuple[tuple[int, ...], Sampling]]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.requests.append((tuple(prompt_ids), sampling))
        return await self.engine.generate(prompt_ids, sampling)


@dataclass
class Replica:
    """The session's engine in a replica with a recording agent."""

    running: Running
    replica: RolloutReplica
    agent: RecordingAgent

    def rollout(self, starts: list[Trajectory], temperature: float = 1.0) -> list[Trajectory]:
        sampling = Sampling(max_tokens=8, temperature=temperature)
        return self.running.loop.run_until_complete(self.replica.rollout(starts, sampling))

    def prompt(self, text: str) -> Prompt:
        return Prompt("test#0", tuple(self.running.tokenizer.encode(text)), "test", ("x",))


@pytest.fixture
def replica(vllm: Running) -> Replica:
    """A replica for dialogues of two turns with tools."""
    limits = Limits(max_turns=2, max_response_length=16, max_prompt_length=MAX_PROMPT)
    agent = RecordingAgent(search_agent(EmptyRetrieval(), vllm.tokenizer, limits))

    def build(config: Config) -> Agent:
        return agent

    replica = RolloutReplica(tiny_config(vllm.folder), build, replica=0)
    replica.engine = vllm.engine
    return Replica(vllm, replica, agent)


def assert_log_probs_match(model: LlamaForCausalLM, prompt: Sequence[int], got: Completion) -> None:
    """Assert that the engine's log-probs are those of `model`."""
    expected = exact_log_probs(model, [*prompt, *got.ids], len(prompt))
    assert got.log_probs == pytest.approx(expected, abs=TOLERANCE)


def test_line_01_trained_log_probs_match_over_a_whole_trajectory(replica: Replica) -> None:
    """Over several turns, every policy token's log-prob is that of the whole sequence."""
    model = model_in(replica.running.folder)
    (done,) = replica.rollout([start_trajectory(replica.prompt("Who?"), seed=5)])
    position = 0
    for segment in done.segments:
        end = position + len(segment.ids)
        if segment.log_probs:
            expected = exact_log_probs(model, done.ids[:end], position)
            assert segment.log_probs == pytest.approx(expected, abs=TOLERANCE)
        position = end
    assert done.stats["turns"] == 3
    assert done.prompt == replica.prompt("Who?")


def test_line_13_greedy_is_greedy_on_every_turn(replica: Replica) -> None:
    """Every request has temperature 0, and the tokens are the most likely ones."""
    replica.agent.requests.clear()
    (done,) = replica.rollout([start_trajectory(replica.prompt("Why?"), seed=3)], temperature=0.0)
    assert [sampling.temperature for _, sampling in replica.agent.requests] == [0.0] * 3
    model = model_in(replica.running.folder)
    first = done.segments[1].ids
    with torch.no_grad():
        rows = model(torch.tensor([[*done.prompt.ids, *first]])).logits[0]
    assert list(first) == rows[len(done.prompt.ids) - 1 : -1].argmax(-1).tolist()


def test_line_02_a_sampled_end_of_sequence_is_kept(vllm: Running, tmp_path: Path) -> None:
    """The end-of-sequence token is in the ids, with its log-prob, and in the text."""
    eos = vllm.tokenizer.eos_token_id
    model = model_in(vllm.folder)
    prompt = vllm.tokenizer.encode("The end")
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        model.lm_head.weight[eos] = hidden * (30 / hidden.norm())
    update(vllm, model, tmp_path, version=1)
    got = vllm.generate(prompt, temperature=0.0)
    assert got.ids == (eos,)
    assert got.finish_reason == "stop"
    assert got.text == vllm.tokenizer.eos_token
    assert len(got.log_probs) == 1


def update(vllm: Running, model: LlamaForCausalLM, folder: Path, version: int) -> None:
    """Load `model` into the engine as the trainer does, from a folder."""
    model.save_pretrained(folder)
    vllm.update(folder, version)


def stream(vllm: Running, model: LlamaForCausalLM, version: int) -> None:
    """Send `model` to the engine as a rank on its device does, without files."""
    name, engine, cpu = secrets.token_hex(4), vllm.engine, torch.device("cpu")
    assert vllm.loop.run_until_complete(engine.devices()) == [device_id(cpu)]
    named = [
        (name, weight) for name, weight in model.named_parameters() if name != "lm_head.weight"
    ]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, named, name, cpu, 1, torch.float32)
        vllm.loop.run_until_complete(engine.update_weights(f"ipc://{name}", version))
        assert sent.result().seconds > 0


@pytest.mark.parametrize("is_streamed", [False, True], ids=["folder", "stream"])
def test_weights_that_were_dropped_by_sleep_are_loaded_completely(
    vllm: Running, tmp_path: Path, is_streamed: bool
) -> None:
    """After sleep level 2, which keeps only buffers, a folder or a stream must have all weights.

    A tied head is one of them. Cached prefixes of older weights are dropped.
    """
    dropping = vllm.engine._llm.collective_rpc("forget_weights")
    (num_dropped,) = vllm.loop.run_until_complete(dropping)
    assert num_dropped > 10
    model = tiny_llama(eos_token_id=vllm.tokenizer.eos_token_id, seed=9)
    if is_streamed:
        stream(vllm, model, version=9)
    else:
        update(vllm, model, tmp_path, version=9)
    prompt = vllm.tokenizer.encode("The capital of France is")
    got = vllm.generate(prompt, seed=2)
    assert got.weight_version == 9
    assert_log_probs_match(model, prompt, got)


def test_concurrent_long_seeded_prompts_are_not_prefilled_in_chunks(vllm: Running) -> None:
    """More prompt tokens than one step can process still work with seeds on the CPU."""
    length = MAX_PROMPT
    prompts = [[(7 * n + i) % 40000 + 100 for i in range(length)] for n in range(40)]
    assert length * len(prompts) > 2 * 8192

    async def together() -> list[Completion]:
        requests = [Sampling(max_tokens=2, seed=n) for n in range(len(prompts))]
        engine = vllm.engine
        return await asyncio.gather(*map(engine.generate, prompts, requests))

    answers = vllm.loop.run_until_complete(together())
    assert all(len(answer.ids) >= 1 for answer in answers)
    assert all(math.isfinite(p) for answer in answers for p in answer.log_probs)


def test_the_engine_process_is_one_and_quiet(vllm: Running) -> None:
    """The engine core runs in a single separate process."""
    assert len(children()) >= 1
    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
