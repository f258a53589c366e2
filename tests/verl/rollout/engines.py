"""Helpers for engines with a tiny model, which the tests of a session share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from example.model import load_tokenizer
from example.tiny import tiny_llama
from verl.config import Config
from verl.rollout.interface import RolloutEngine
from verl.types import Completion, Sampling

MAX_PROMPT = 512


def tiny_config(model: Path, name: str = "vllm") -> Config:
    """Return a configuration for float32 on CPU with budgets of a few hundred tokens."""
    config = Config(max_turns=2)
    config.actor_rollout_ref.model.path = str(model)
    config.actor_rollout_ref.rollout.name = name
    config.actor_rollout_ref.rollout.dtype = "float32"
    config.actor_rollout_ref.rollout.cpu_kv_cache_gib = 1
    config.trainer.device, config.trainer.trace = "cpu", True
    config.data.max_prompt_length = MAX_PROMPT
    config.data.max_response_length = 16
    return config


def save_model(folder: Path, seed: int) -> PreTrainedTokenizerBase:
    """Write a random model with heads of 32, the minimum of vLLM's CPU attention."""
    tokenizer = load_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_llama(eos_token_id=tokenizer.eos_token_id, seed=seed).save_pretrained(folder)
    return tokenizer


@dataclass
class Running:
    """A started engine, with its event loop and tokenizer."""

    loop: asyncio.AbstractEventLoop
    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    """Folder of the original model."""

    def generate(self, ids: Sequence[int], **options: object) -> Completion:
        sampling = replace(Sampling(max_tokens=8), **options)
        return self.loop.run_until_complete(self.engine.generate(ids, sampling))

    def update(self, folder: Path, version: int) -> None:
        self.loop.run_until_complete(self.engine.update_weights(str(folder), version))

    def reset(self) -> None:
        """Load the original weights again, as version 0."""
        self.update(self.folder, 0)


def model_in(folder: Path) -> LlamaForCausalLM:
    """Load the model of a folder with transformers."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def exact_log_probs(model: torch.nn.Module, ids: Sequence[int], start: int) -> list[float]:
    """Return the log-probs of `ids[start:]`, each given all ids before it, by transformers."""
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(rows[position - 1, ids[position]]) for position in range(start, len(ids))]
