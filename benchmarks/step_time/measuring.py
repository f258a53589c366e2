"""The parts of a real step: dialogues with searches over HTTP, and the trainer's passes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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
MINI = 32
"""Trajectories of an optimizer step."""
LIMIT = 2000
REPEATS = 2
"""Of training, the least of which counts: others on this machine take the core's caches."""


def rank(folder: str) -> TrainerWorker:
    """A training rank with a tiny policy."""
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
    """The address of a server with the case's times."""
    words = [str(case.search_p50), str(case.search_p99), str(case.letters)]
    command = [sys.executable, "-m", "benchmarks.step_time.retriever", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        finally:
            process.kill()


def starts(case: Case, seed: int) -> list[Trajectory]:
    """Prompts that share no block, each `group` times."""
    found = []
    for number in range(case.prompts):
        text = f"{seed} {number} ".ljust(case.prompt, "q")
        prompt = Prompt(f"f#{number}", tuple(text.encode()), "nq", ("x",), text=text)
        for sample in range(case.group):
            own = (seed * 1000 + number) * 1000 + sample
            found.append(start_trajectory(prompt, str(number), sample, own))
    return found


async def play(case: Case, url: str, seed: int) -> list[Trajectory]:
    """As replicas do it: groups divided over engines, a coroutine for each trajectory."""
    limits = Limits(case.max_turns, LIMIT, LIMIT, 20 * LIMIT)
    async with RetrievalClient(url, 1) as client:
        agent = search_agent(client, cast(Tokenizer, ByteTokenizer()), limits)
        begun = starts(case, seed)
        engines = [PacedEngine(case.pace) for _ in range(case.engines)]
        parts = split_groups([one.group for one in begun], case.engines)
        return await asyncio.gather(
            *(
                agent.run(begun[i], engine, Sampling(LIMIT))
                for engine, part in zip(engines, parts, strict=True)
                for i in part
            )
        )


def dialogue(trajectory: Trajectory) -> Dialogue:
    """Its token counts."""
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
    """Wall seconds of a rollout, and its dialogues."""
    with retriever(case) as url:
        begin = time.perf_counter()
        trajectories = asyncio.run(play(case, url, seed=1))
        rollout_s = time.perf_counter() - begin
    played = [dialogue(one) for one in trajectories]
    counts = [
        [d.prompt_tokens, [[t.tokens, t.observation_tokens] for t in d.turns]] for d in played
    ]
    return {"rollout_s": rollout_s, "dialogues": counts}


def batch_of(dialogues: Sequence[Dialogue]) -> TokenBatch:
    """What the trainer learns from, with any ids: dialogues of such lengths."""
    trajectories = []
    for number, one in enumerate(dialogues):
        segments = [Segment(Origin.PROMPT, (1,) * one.prompt_tokens)]
        for turn in one.turns:
            segments.append(Segment(Origin.POLICY, (2,) * turn.tokens, "", (0.0,) * turn.tokens))
            segments.append(Segment(Origin.OBSERVATION, (3,) * turn.observation_tokens))
        prompt = Prompt(f"f#{number}", (1,) * one.prompt_tokens, "nq", ("x",))
        trajectories.append(Trajectory(prompt, segments))
    batch = TokenBatch.from_trajectories(trajectories)
    mask = batch.tokens["policy_mask"]
    batch.tokens |= {"loss_mask": mask, "advantages": torch.randn(batch.num_tokens) * mask}
    return batch


def train_s(worker: TrainerWorker, dialogues: Sequence[Dialogue]) -> float:
    """Old log-probs and the updates of one step, as the trainer asks for them; seconds of CPU.

    One thread computes: these are the wall seconds of a core that nobody else uses.
    """
    batch, seconds = batch_of(dialogues), []
    for _ in range(REPEATS):
        start = time.process_time()
        batch.tokens["old_log_probs"] = worker.actor.log_probs(batch)
        for first in range(0, len(batch), MINI):
            mini = batch.select(range(first, min(first + MINI, len(batch))))
            mini.tokens["loss_weights"] = loss_weights(
                mini.tokens["loss_mask"], mini.offsets, "token-mean", 1.0
            )
            worker.actor.update(mini)
        seconds.append(time.process_time() - start)
    return min(seconds)


@contextmanager
def running_rank() -> Iterator[TrainerWorker]:
    """A rank that has computed before."""
    with tempfile.TemporaryDirectory() as folder:
        worker = rank(str(Path(folder)))
        try:
            yield worker
        finally:
            worker.shutdown()
