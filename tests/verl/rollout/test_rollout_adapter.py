"""A real vLLM replica with adapters: each version has the log-probs of base + B A."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedTokenizerBase

from example.model import load_tokenizer
from example.tiny import tiny_llama
from search_r1.agent.generation import search_agent
from search_r1.retrieval.protocol import EmptyRetrieval
from tests.verl.rollout.conftest import PLAIN
from verl.agent.interface import Agent
from verl.config import Config
from verl.ext.lora.adapter import Adapter
from verl.rollout.replica import RolloutReplica
from verl.types import Completion, Sampling

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.slow]

TOLERANCE = 1e-3
RANK = 6  # not one of vLLM's ranks, of which the next is 8


@dataclass
class Running:
    """A started replica whose engine takes adapters."""

    loop: asyncio.AbstractEventLoop
    replica: RolloutReplica
    tokenizer: PreTrainedTokenizerBase

    def generate(self, prompts: list[list[int]]) -> list[Completion]:
        """Return a seeded completion of each prompt; the requests are concurrent."""

        async def together() -> list[Completion]:
            requests = [Sampling(max_tokens=8, seed=n) for n in range(len(prompts))]
            return await asyncio.gather(*map(self.replica.engine.generate, prompts, requests))

        return self.loop.run_until_complete(together())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """An engine for all tests of this file, since starting it is slow."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_llama(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    config = Config()
    config.actor_rollout_ref.model.path = str(folder)
    config.actor_rollout_ref.model.lora_rank = RANK
    config.actor_rollout_ref.rollout.dtype = "float32"
    config.actor_rollout_ref.rollout.merge_adapter = False
    config.actor_rollout_ref.rollout.cpu_kv_cache_gib = 1
    config.trainer.device = "cpu"
    config.data.max_prompt_length, config.data.max_response_length = 512, 16
    agent = search_agent(EmptyRetrieval(), tokenizer)

    def build(config: Config) -> Agent:
        return agent

    loop = asyncio.new_event_loop()
    replica = RolloutReplica(config, build, replica=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*PLAIN)
        loop.run_until_complete(replica.engine.start())
    yield Running(loop, replica, tokenizer)
    loop.run_until_complete(replica.engine.shutdown())
    loop.close()


def random_adapter(seed: int, targets: list[str]) -> PeftModel:
    """Return the engine's base model with a random adapter, in transformers."""
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets)
    model = get_peft_model(tiny_llama(), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model


def write(model: PeftModel, folder: Path) -> str:
    """Write the adapter as the trainer does."""
    parameters = {
        name.removeprefix("base_model.model."): x
        for name, x in model.named_parameters()
        if "lora_" in name
    }
    Adapter.of_parameters(model.peft_config["default"], parameters, "default").write(folder)
    return str(folder)


def exact(model: torch.nn.Module, prompt: list[int], got: Completion) -> list[float]:
    """Return the log-probs of the completion's ids by transformers."""
    ids = [*prompt, *got.ids]
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(rows[n - 1, ids[n]]) for n in range(len(prompt), len(ids))]


def test_line_14_each_adapter_is_used_with_no_old_cache(running: Running, tmp_path: Path) -> None:
    """For the same long prompts, each version in the folder gives its adapter's log-probs."""
    text = "The same long prompt again and again. "
    prompts = [running.tokenizer.encode(text * n) for n in (40, 3, 1)]
    assert len(prompts[0]) > 256  # several cache blocks
    before = running.generate(prompts)
    for prompt, got in zip(prompts, before, strict=True):
        assert got.log_probs == pytest.approx(exact(tiny_llama(), prompt, got), abs=TOLERANCE)
    targets = (["q_proj", "down_proj"], ["k_proj", "gate_proj", "up_proj"], ["o_proj", "v_proj"])
    for version, names in enumerate(targets, start=1):
        model = random_adapter(version, names)
        update = running.replica.engine.update_weights(write(model, tmp_path), version)
        running.loop.run_until_complete(update)
        for prompt, got in zip(prompts, running.generate(prompts), strict=True):
            assert got.weight_version == version
            assert got.log_probs == pytest.approx(exact(model, prompt, got), abs=TOLERANCE)
            plain = exact(tiny_llama(), prompt, got)
            assert max(abs(a - b) for a, b in zip(got.log_probs, plain, strict=True)) > 0.05


def test_line_29_ids_are_scored_with_the_adapter(running: Running, tmp_path: Path) -> None:
    """An adapter that is not applied would give the scores of the base model."""
    model, ids = random_adapter(7, ["q_proj", "down_proj"]), list(range(100, 132))
    folder = write(model, tmp_path)
    update = running.replica.update_weights(folder, 7, scored_ids=ids)
    score = running.loop.run_until_complete(update)
    assert score is not None and score.version == 7 and score.log_probs is not None
    for lm, differs in ((model, False), (tiny_llama(), True)):
        with torch.no_grad():
            rows = lm(torch.tensor([ids])).logits[0].log_softmax(-1)
        exact_ones = [float(rows[n - 1, ids[n]]) for n in range(1, len(ids))]
        assert (score.log_probs != pytest.approx(exact_ones, abs=TOLERANCE)) is differs
