"""The vLLM replica, for real: log-probs, seeds, stops, weight updates, and its end."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from example.model import load_tokenizer
from example.tiny import tiny_llama
from search_r1.agent.generation import search_agent
from search_r1.search.client import EmptyRetrieval
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.interface import Agent
from verl.config import Config
from verl.rollout import RolloutReplica, vllm_engine
from verl.types import (
    Completion,
    Engine,
    Prompt,
    Sampling,
    Trajectory,
    start_trajectory,
)

pytestmark = pytest.mark.vllm_cpu

TOLERANCE = 1e-3
MAX_PROMPT = 512


@dataclass
class RecordingAgent:
    """The search agent, keeping every request its engine gets."""

    agent: DialogueAgent
    requests: list[tuple[tuple[int, ...], Sampling]] = field(default_factory=list)

    async def run(self, start: Trajectory, engine: Engine, sampling: Sampling) -> Trajectory:
        return await self.agent.run(start, _Recorder(engine, self.requests), sampling)


@dataclass
class _Recorder:
    engine: Engine
    requests: list[tuple[tuple[int, ...], Sampling]]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.requests.append((tuple(prompt_ids), sampling))
        return await self.engine.generate(prompt_ids, sampling)


@dataclass
class Running:
    """A started replica and what it takes to use it."""

    loop: asyncio.AbstractEventLoop
    replica: RolloutReplica
    agent: RecordingAgent
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    def rollout(self, starts: list[Trajectory], temperature: float = 1.0) -> list[Trajectory]:
        sampling = Sampling(max_tokens=8, temperature=temperature)
        return self.loop.run_until_complete(self.replica.rollout(starts, sampling))

    def generate(self, ids: Sequence[int], **options: object) -> Completion:
        sampling = replace(Sampling(max_tokens=8), **options)
        return self.loop.run_until_complete(self.replica.engine.generate(ids, sampling))

    def prompt(self, text: str) -> Prompt:
        return Prompt("test#0", tuple(self.tokenizer.encode(text)), "test", ("x",))


def tiny_config(model: Path) -> Config:
    """float32 on CPU, with budgets of a few hundred tokens."""
    config = Config(max_turns=2)
    config.actor_rollout_ref.model.path = str(model)
    config.actor_rollout_ref.rollout.dtype = "float32"
    config.actor_rollout_ref.rollout.cpu_kv_cache_gib = 1
    config.trainer.device = "cpu"
    config.data.max_prompt_length = MAX_PROMPT
    config.data.max_response_length = 16
    return config


def random_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """Two layers with heads of 32, the smallest that vLLM's CPU attention takes."""
    return tiny_llama(hidden_size=128, eos_token_id=tokenizer.eos_token_id, seed=seed)


def children() -> set[int]:
    """Processes below this one, the resource tracker's apart."""
    found = psutil.Process().children(recursive=True)
    return {p.pid for p in found if "resource_tracker" not in " ".join(p.cmdline())}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One engine for all tests of this file: starting it takes the longest."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(folder)
    random_model(tokenizer, seed=0).save_pretrained(folder)
    limits = Limits(max_turns=2, max_response_length=16, max_prompt_length=MAX_PROMPT)
    agent = RecordingAgent(search_agent(EmptyRetrieval(), tokenizer, limits))

    def build(config: Config) -> Agent:
        return agent

    loop = asyncio.new_event_loop()
    before = children()
    replica = RolloutReplica(tiny_config(folder), build, replica=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "WORKER_EXTENSION", "tests.verl.rollout.forgetting.Forgetting")
        loop.run_until_complete(replica.start())
    yield Running(loop, replica, agent, tokenizer, folder)
    loop.run_until_complete(replica.shutdown())
    loop.close()
    assert children() <= before, "the engine left processes behind"


def exact_log_probs(model: LlamaForCausalLM, ids: Sequence[int], start: int) -> list[float]:
    """The log-probs of `ids[start:]`, each given all before it, by transformers."""
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(rows[position - 1, ids[position]]) for position in range(start, len(ids))]


def assert_log_probs_match(model: LlamaForCausalLM, prompt: Sequence[int], got: Completion) -> None:
    """The engine's log-probs are those of `model`."""
    expected = exact_log_probs(model, [*prompt, *got.ids], len(prompt))
    assert got.log_probs == pytest.approx(expected, abs=TOLERANCE)


def test_line_01_engine_log_probs_are_those_of_the_model(running: Running) -> None:
    """Ids come back as sampled, with the log-probs that transformers computes for them."""
    model = LlamaForCausalLM.from_pretrained(running.folder, dtype=torch.float32)
    prompt = running.tokenizer.encode("The capital of France is")
    for seed in range(3):
        got = running.generate(prompt, seed=seed)
        assert len(got.ids) == len(got.log_probs) > 0
        assert_log_probs_match(model, prompt, got)


def test_line_01_trained_log_probs_match_over_a_whole_trajectory(running: Running) -> None:
    """Over turns and feedback, every policy token's log-prob is that of the joined sequence."""
    model = LlamaForCausalLM.from_pretrained(running.folder, dtype=torch.float32)
    (done,) = running.rollout([start_trajectory(running.prompt("Who?"), seed=5)])
    position = 0
    for segment in done.segments:
        end = position + len(segment.ids)
        if segment.log_probs:
            expected = exact_log_probs(model, done.ids[:end], position)
            assert segment.log_probs == pytest.approx(expected, abs=TOLERANCE)
        position = end
    assert done.stats["turns"] == 3
    assert done.prompt == running.prompt("Who?")


def test_line_12_seeds_differ_in_a_group_and_reproduce_it(running: Running) -> None:
    """Samples of one prompt are distinct, and the same seeds give the same samples."""
    starts = [start_trajectory(running.prompt("Who?"), "1/0", n, seed=n) for n in range(6)]
    first, second = running.rollout(starts), running.rollout(starts)
    assert len({tuple(t.ids) for t in first}) == len(starts)
    assert [t.ids for t in first] == [t.ids for t in second]
    assert [t.sample for t in first] == list(range(6))


def test_line_13_greedy_is_greedy_on_every_turn(running: Running) -> None:
    """Temperature 0 reaches each request, and the tokens are the most likely ones."""
    running.agent.requests.clear()
    (done,) = running.rollout([start_trajectory(running.prompt("Why?"), seed=3)], temperature=0.0)
    assert [sampling.temperature for _, sampling in running.agent.requests] == [0.0] * 3
    model = LlamaForCausalLM.from_pretrained(running.folder, dtype=torch.float32)
    first = done.segments[1].ids
    with torch.no_grad():
        rows = model(torch.tensor([[*done.prompt.ids, *first]])).logits[0]
    assert list(first) == rows[len(done.prompt.ids) - 1 : -1].argmax(-1).tolist()


def test_line_05_each_request_is_a_prefix_of_the_trajectory(running: Running) -> None:
    """The engine is given exactly the context that is trained on."""
    running.agent.requests.clear()
    (done,) = running.rollout([start_trajectory(running.prompt("When?"), seed=1)])
    for ids, _ in running.agent.requests:
        assert tuple(done.ids[: len(ids)]) == ids


def test_line_02_generation_stops_at_the_stop_string_and_keeps_its_token(running: Running) -> None:
    """A stop string that ends inside a token keeps that token whole, and nothing after it."""
    prompt = running.tokenizer.encode("Tell me")
    free = running.generate(prompt, seed=4, max_tokens=12)
    words = [running.tokenizer.decode([i]) for i in free.ids]
    turn = next(n for n, word in enumerate(words) if n > 1 and len(word.strip()) > 2)
    tag = words[turn][:-1]  # ends before the token does
    stopped = running.generate(prompt, seed=4, max_tokens=12, stop=(tag,))
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: len(stopped.ids)]
    assert len(stopped.ids) == len(stopped.log_probs) <= turn + 1
    assert stopped.text.endswith(tag)


def test_line_02_a_sampled_end_of_sequence_is_kept(running: Running, tmp_path: Path) -> None:
    """The end-of-sequence token is among the ids, with its log-prob, and in the text."""
    eos = running.tokenizer.eos_token_id
    model = LlamaForCausalLM.from_pretrained(running.folder, dtype=torch.float32)
    prompt = running.tokenizer.encode("The end")
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        model.lm_head.weight[eos] = hidden * (30 / hidden.norm())
    update(running, model, tmp_path, version=1)
    got = running.generate(prompt, temperature=0.0)
    assert got.ids == (eos,)
    assert got.finish_reason == "stop"
    assert got.text == running.tokenizer.eos_token
    assert len(got.log_probs) == 1


def update(running: Running, model: LlamaForCausalLM, folder: Path, version: int) -> None:
    """Bring `model` into the engine as the trainer does it."""
    model.save_pretrained(folder)
    running.loop.run_until_complete(running.replica.update_weights(str(folder), version))


def test_line_14_updated_weights_are_used_with_no_old_cache(
    running: Running, tmp_path: Path
) -> None:
    """After an update the same prompt has the new model's log-probs, and the new version."""
    prompt = running.tokenizer.encode("The same long prompt again and again. " * 40)
    assert len(prompt) > 256  # several cache blocks
    for version in (7, 8):
        model = random_model(running.tokenizer, seed=version)
        update(running, model, tmp_path / str(version), version)
        got = running.generate(prompt, seed=1)
        assert got.weight_version == version
        assert_log_probs_match(model, prompt, got)


def test_weights_that_sleep_dropped_come_whole_with_the_next_folder(
    running: Running, tmp_path: Path
) -> None:
    """Sleep of level 2 keeps buffers alone: a folder of weights must bring all the rest."""
    forgetting = running.replica.engine._llm.collective_rpc("forget_weights")
    (forgotten,) = running.loop.run_until_complete(forgetting)
    assert forgotten > 10
    model = random_model(running.tokenizer, seed=9)
    update(running, model, tmp_path, version=9)
    prompt = running.tokenizer.encode("The capital of France is")
    assert_log_probs_match(model, prompt, running.generate(prompt, seed=2))


def test_long_seeded_prompts_at_once_are_never_prefilled_in_chunks(running: Running) -> None:
    """More prompt tokens than one step holds still work with seeds on CPU."""
    length = MAX_PROMPT
    prompts = [[(7 * n + i) % 40000 + 100 for i in range(length)] for n in range(40)]
    assert length * len(prompts) > 2 * 8192

    async def together() -> list[Completion]:
        requests = [Sampling(max_tokens=2, seed=n) for n in range(len(prompts))]
        engine = running.replica.engine
        return await asyncio.gather(*map(engine.generate, prompts, requests))

    answers = running.loop.run_until_complete(together())
    assert all(len(answer.ids) >= 1 for answer in answers)
    assert all(math.isfinite(p) for answer in answers for p in answer.log_probs)


def test_the_engine_process_is_one_and_quiet(running: Running) -> None:
    """The engine core runs in a single process of its own."""
    assert len(children()) >= 1
    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert running.replica.dtype() == "float32"
