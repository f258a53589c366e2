"""A complete run in this process: one real rank, transformers engines, the real trainer.

Nothing runs in parallel: random delays from a seed decide the order of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.memory_tracker import MemoryTracker
from tests.verl.rollout.local_group import LocalGroup
from tests.verl.trainer.test_ranks import ranks_of
from verl.config import Config, cli
from verl.core_algos.kl import FixedKLController
from verl.ext.engines.context_cache import sequence_log_probs
from verl.ext.engines.transformers import TransformersEngine
from verl.ext.restart import Restarts
from verl.monitor.tracking import Tracking
from verl.ports import free_port
from verl.preflight.undecided import fill_undecided
from verl.rewards.interface import Reward
from verl.rollout.interface import RolloutEngine
from verl.single_controller.actors import ActorLocation
from verl.trainer.build import Inputs, Parts, replica_class, replicas_class, transfer_weights
from verl.trainer.loop import Transfer
from verl.trainer.ranks import TrainerRanks
from verl.training.worker import TrainerWorker
from verl.types import Completion, Origin, Prompt, Sampling, Segment, Status, Trajectory
from verl.weights.files import Files

PROMPTS = [Prompt(f"nq#{i}", (5 + i, 20 + i, 11), "nq", ("gold",)) for i in range(6)]


class Killed(BaseException):
    """Simulates SIGKILL: no handler of the trainer catches it."""


class LocalRanks:
    """Replaces a group of Ray actors by one rank in this process."""

    name = "rank"

    def __init__(self, worker: TrainerWorker) -> None:
        self.worker = worker

    def __len__(self) -> int:
        return 1

    def run(self, function: Callable[..., Any], *arguments: Any, on: Any = None) -> list[Any]:
        return [function(*arguments)]

    def locations(self) -> list[ActorLocation]:
        return [ActorLocation("here", "localhost", ())]

    def scatter(self, method: str, shards: Sequence[Any], *more: Any) -> list[Any]:
        return [attrgetter(method)(self.worker)(shard, *more) for shard in shards]

    def begin_scatter(self, method: str, shards: Sequence[Any]) -> Callable[[], list[Any]]:
        results = self.scatter(method, shards)
        return lambda: results

    def call(self, method: str, *arguments: Any) -> list[Any]:
        result = attrgetter(method)(self.worker)(*arguments)
        return [asyncio.run(result) if asyncio.iscoroutine(result) else result]

    def begin(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        results = self.call(method, *arguments)
        return lambda: results


async def pause(random: Random, max_ticks: int) -> None:
    """Wait for a random number of iterations of the event loop."""
    for _ in range(random.randrange(max_ticks)):
        await asyncio.sleep(0)


class Letters:
    """Decodes every id as one letter."""

    eos_token_id = 2

    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)


class InlineEngine(TransformersEngine):
    """Computes in the event loop, after a delay."""

    random: Random

    async def start(self) -> None:
        self.model, self.tokenizer = self._load(self.path), Letters()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await pause(self.random, 5)
        request = self._request(prompt_ids, sampling)
        while request.reason is None:
            self._step([request])
        return request.completion(self.weight_version)

    async def update_weights(self, folder: str, version: int) -> None:
        await pause(self.random, 5)
        self._context.reset()
        self.model, self.weight_version = self._load(folder), version

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        return sequence_log_probs(self.model, list(ids))


class TalkingAgent:
    """An agent of one to four turns, with a tool between them that answers after a delay."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        assert start.seed is not None
        done = replace(start, segments=list(start.segments), status=Status.ANSWERED)
        for turn in range(1 + start.seed % 4):
            turn_sampling = replace(sampling, max_tokens=4, seed=start.seed + turn)
            completion = await engine.generate(done.ids, turn_sampling)
            policy = Segment(Origin.POLICY, completion.ids, completion.text, completion.log_probs,
                             completion.weight_version)  # fmt: skip
            await pause(self._random, 200)
            observation = Segment(Origin.OBSERVATION, (30 + completion.ids[-1] % 5, 12))
            done.segments += [policy, observation]
            done.stats["turns"] = turn + 1.0
        return done


def score(trajectory: Trajectory) -> Reward:
    """Score by the sum of the policy's token ids."""
    policy_ids = (s.ids for s in trajectory.segments if s.origin is Origin.POLICY)
    value = sum(map(sum, policy_ids)) % 4 / 3
    return Reward(value, {"em": value})


def run_config(model: str, out: Path, *options: str) -> Config:
    """Return options of two updates per step on four trajectories, as from a command line."""
    actor = "actor_rollout_ref.actor"
    return fill_undecided(cli.compose([
        "data.train_files=none.parquet", "data.val_files=none.parquet", "data.train_batch_size=2",
        "data.max_response_length=16", "actor_rollout_ref.rollout.n_agent=2",
        f"{actor}.ppo_mini_batch_size=2", f"{actor}.optim.lr=1e-2",
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=transformers",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "critic.model.enable_gradient_checkpointing=false", "trainer.deterministic=true",
        "trainer.device=cpu", "trainer.compute_dtype=float32", "trainer.n_gpus_per_node=1",
        "trainer.save_freq=0", "trainer.test_freq=0", "trainer.val_before_train=false",
        "trainer.guard.action=off", "trainer.canary=false",
        f"trainer.default_local_dir={out}", *options,
    ]))  # fmt: skip


@contextmanager
def local_ranks(config: Config, num_steps: int) -> Iterator[TrainerRanks]:
    """Yield one rank; afterwards the process is in its previous state."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")
        updates = num_steps * config.updates_per_step
        worker = TrainerWorker(config, 0, 1, "127.0.0.1", free_port(), updates)
        torch.set_num_threads(1)  # more threads would only wait for each other on tiny models
        try:
            yield ranks_of(LocalRanks(worker))
        finally:
            worker.shutdown()
            torch.use_deterministic_algorithms(False)


def start_engine(
    config: Config, random: Random, number: int = 0, engine_class: type[InlineEngine] = InlineEngine
) -> InlineEngine:
    """Build and start an engine."""
    engine = engine_class.from_config(config, number)
    engine.random = random
    asyncio.run(engine.start())
    return engine


def train(
    config: Config, num_steps: int, delays: int, num_replicas: int = 1, killed_in: int = 0,
    engine_class: type[InlineEngine] = InlineEngine, transfer: Transfer = transfer_weights,
) -> list[dict[str, float]]:  # fmt: skip
    """Run the real trainer, optionally killed in a step; returns the metrics of its steps."""
    random, tracker, hosts = Random(delays), MemoryTracker(), []
    for number in range(num_replicas):
        hosts.append(replica_class(config)(config, lambda _: TalkingAgent(random), number))
        hosts[-1].engine = start_engine(config, random, number, engine_class)

    def reward(trajectory: Trajectory) -> Reward:
        if trajectory.group.startswith(f"{killed_in}/"):
            raise Killed
        return score(trajectory)

    group: Any = LocalGroup(hosts, random)
    replicas = Restarts(0).of(replicas_class(config)(group, Files(config)))
    prompts, rollouts = (PROMPTS, replicas) if config.samples_rollouts else ([], None)
    with local_ranks(config, num_steps) as ranks:
        trainer = Parts(
            Inputs(config, prompts, prompts, num_steps), ranks, rollouts, reward,
            FixedKLController(0.01),
            Tracking("p", "e", [tracker], config.trainer.default_local_dir), transfer=transfer,
        ).build()  # fmt: skip
        try:
            trainer.fit()
        except Killed:
            assert killed_in
        finally:
            group.close()
    return [row for step, row in tracker.records if step > 0]
