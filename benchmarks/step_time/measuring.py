"""Measures the parts of a real step: dialogues that search over HTTP, and the trainer's passes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.step_time.cases import Case
from benchmarks.step_time.paced import PacedEngine
from search_r1.agent.generation import search_agent
from search_r1.plan.workload import Dialogue, Turn
from search_r1.search.client import RetrievalClient
from tests.fakes import ByteTokenizer
from verl.agent.dialogue import Limits, Tokenizer
from verl.config import Config
from verl.core_algos.losses import loss_weights
from verl.packing import split_groups
from verl.ports import free_port
from verl.preflight.memory.check import fill_undecided
from verl.training.worker import TrainerWorker
from verl.types import (
    Origin,
    Prompt,
    Sampling,
    Segment,
    TokenBatch,
    Trajectory,
    start_trajectory,
)

TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 258,
        "tie_word_embeddings": True}  # fmt: skip
MINI_BATCH = 32
"""Trajectories of an optimizer step."""
MAX_TOKENS = 2000
"""Limit of the tokens of a turn and of an observation."""
REPEATS = 2
"""Measurements of training; the fastest counts, since other processes use the core's caches."""


def start_rank(folder: str) -> TrainerWorker:
    """Start a training rank with a tiny policy, which is saved in `folder`."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    model.save_pretrained(folder)
    config = Config()
    config.actor_rollout_ref.model.path = folder
    config.algorithm.adv_estimator = "grpo"
    config.actor_rollout_ref.model.enable_gradient_checkpointing = False
    config.trainer.n_gpus_per_node, config.trainer.device = 1, "cpu"
    return TrainerWorker(fill_undecided(config), 0, 1, "127.0.0.1", free_port(), 10_000)


@contextmanager
def retriever(case: Case) -> Iterator[str]:
    """Run a server with the case's search times; yields its URL."""
    arguments = [str(case.search_p50), str(case.search_p99), str(case.letters)]
    command = [sys.executable, "-m", "benchmarks.step_time.retriever", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        finally:
            process.kill()


def start_all(case: Case, seed: int) -> list[Trajectory]:
    """Start `group` trajectories for each prompt. Prompts share no block of the prefix cache."""
    trajectories = []
    for number in range(case.prompts):
        text = f"{seed} {number} ".ljust(case.prompt, "q")
        prompt = Prompt(f"f#{number}", tuple(text.encode()), "nq", ("x",), text=text)
        for sample in range(case.group):
            trajectory_seed = (seed * 1000 + number) * 1000 + sample
            trajectories.append(start_trajectory(prompt, str(number), sample, trajectory_seed))
    return trajectories


async def rollout(case: Case, url: str, seed: int) -> list[Trajectory]:
    """Finish the trajectories as replicas do: groups divided over engines, all concurrently."""
    limits = Limits(case.max_turns, MAX_TOKENS, MAX_TOKENS, 20 * MAX_TOKENS)
    async with RetrievalClient(url, 1) as client:
        agent = search_agent(client, cast(Tokenizer, ByteTokenizer()), limits)
        starts = start_all(case, seed)
        engines = [PacedEngine(case.pace) for _ in range(case.engines)]
        parts = split_groups([start.group for start in starts], case.engines)
        return await asyncio.gather(
            *(
                agent.run(starts[i], engine, Sampling(MAX_TOKENS))
                for engine, part in zip(engines, parts, strict=True)
                for i in part
            )
        )


def dialogue_of(trajectory: Trajectory) -> Dialogue:
    """Count the tokens of a trajectory."""
    prompt, turns = 0, list[Turn]()
    for segment in trajectory.segments:
        if segment.origin is Origin.PROMPT:
            prompt += len(segment.ids)
        elif segment.origin is Origin.POLICY:
            turns.append(Turn(len(segment.ids)))
        else:
            turns[-1] = Turn(turns[-1].tokens, len(segment.ids))
    return Dialogue(prompt, tuple(turns))


def measure(case: Case) -> dict[str, Any]:
    """Measure the wall-clock seconds of a rollout; returns them and the dialogues' token counts."""
    with retriever(case) as url:
        began = time.perf_counter()
        trajectories = asyncio.run(rollout(case, url, seed=1))
        rollout_s = time.perf_counter() - began
    dialogues = [dialogue_of(trajectory) for trajectory in trajectories]
    counts = [
        [d.prompt_tokens, [[t.tokens, t.observation_tokens] for t in d.turns]] for d in dialogues
    ]
    return {"rollout_s": rollout_s, "dialogues": counts}


def batch_of(dialogues: Sequence[Dialogue]) -> TokenBatch:
    """Return a training batch of dialogues with these lengths, with arbitrary token ids."""
    trajectories = []
    for number, dialogue in enumerate(dialogues):
        segments = [Segment(Origin.PROMPT, (1,) * dialogue.prompt_tokens)]
        for turn in dialogue.turns:
            segments.append(Segment(Origin.POLICY, (2,) * turn.tokens, "", (0.0,) * turn.tokens))
            segments.append(Segment(Origin.OBSERVATION, (3,) * turn.observation_tokens))
        prompt = Prompt(f"f#{number}", (1,) * dialogue.prompt_tokens, "nq", ("x",))
        trajectories.append(Trajectory(prompt, segments))
    batch = TokenBatch.from_trajectories(trajectories)
    mask = batch.tokens["policy_mask"]
    batch.tokens |= {"loss_mask": mask, "advantages": torch.randn(batch.num_tokens) * mask}
    return batch


def train_s(worker: TrainerWorker, dialogues: Sequence[Dialogue]) -> float:
    """Compute the old log-probs and the updates of one step; returns the CPU seconds.

    One thread computes, so these are the wall-clock seconds on a core without other load.
    """
    batch, seconds = batch_of(dialogues), []
    for _ in range(REPEATS):
        began = time.process_time()
        batch.tokens["old_log_probs"] = worker.actor.log_probs(batch)
        for first in range(0, len(batch), MINI_BATCH):
            mini = batch.select(range(first, min(first + MINI_BATCH, len(batch))))
            mini.tokens["loss_weights"] = loss_weights(
                mini.tokens["loss_mask"], mini.offsets, "token-mean", 1.0
            )
            worker.actor.update(mini)
        seconds.append(time.process_time() - began)
    return min(seconds)


@contextmanager
def running_rank() -> Iterator[TrainerWorker]:
    """Run a training rank."""
    with tempfile.TemporaryDirectory() as folder:
        worker = start_rank(folder)
        try:
            yield worker
        finally:
            worker.shutdown()
