"""`python -m benchmarks.driver`: what a step costs the driver apart from waiting, by its parts.

Scripted trajectories go through the trainer's own code: from two Ray actors in the place of the
replicas to the driver, its batch, advantages and mini-batches, and to two in the place of the
ranks, which answer at once. No model is there. Processor seconds of the driver's process count (its
threads for Ray included), the clock's stand beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from rich.console import Console
from torch import Tensor
from transformers import Qwen2Config

from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.errors import RankLost, ReplicaLost
from verl.monitor.performance import Timings
from verl.packing import split_groups
from verl.rewards.interface import Reward
from verl.rollout.pool import complete_groups
from verl.single_controller.actors import ActorHost, RayWorkerGroup
from verl.steady import one_thread, steady_memory
from verl.trainer.collection import Samples
from verl.trainer.learning import Learner, add_advantages, assemble
from verl.trainer.metrics import (
    advantage_metrics,
    reward_metrics,
    rollout_metrics,
    staleness_metrics,
)
from verl.trainer.ranks import TrainerRanks
from verl.trainer.validation import trajectory_seed
from verl.types import (
    Origin,
    Prompt,
    Sampling,
    Segment,
    Status,
    TokenBatch,
    Trajectory,
    TurnTimes,
    start_trajectory,
)

GROUP, PROMPT, SAID, SEEN, TURNS = 5, 250, 100, 375, 3
"""Of a trajectory: its group's size, and tokens; 1,300 in all, a fifth more or less."""
PARTS = ("ask", "fetch", "metrics", "batch", "passes", "advantages", "updates", "collect")

console = Console(soft_wrap=True)


class Player:
    """In the place of a replica: what it says is random."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def rollout(self, starts: Sequence[Trajectory], _: Sampling) -> list[Trajectory]:
        """Each start with three turns and two documents."""
        return [self.finished(start) for start in starts]

    def finished(self, start: Trajectory) -> Trajectory:
        """One of them."""
        for turn in range(TURNS):
            ids = self.ids(SAID * self.random.uniform(0.8, 1.2))
            log_probs = tuple((-self.random.random(len(ids))).tolist())
            start.segments.append(Segment(Origin.POLICY, ids, "said " * len(ids), log_probs))
            if turn + 1 < TURNS:
                seen = self.ids(SEEN * self.random.uniform(0.8, 1.2))
                start.segments.append(Segment(Origin.OBSERVATION, seen, "seen " * len(seen)))
        start.status = Status.ANSWERED
        start.stats = {"turns": 3.0, "valid_actions": 3.0, "answered": 1.0, "malformed_turns": 0.0}
        start.turn_times = [TurnTimes(t, t, t + 1.0, turn=int(t)) for t in range(TURNS)]
        return start

    def ids(self, number: float) -> tuple[int, ...]:
        """Of tokens, as an engine gives them."""
        return tuple(self.random.integers(0, 150_000, int(number)).tolist())


class Sink:
    """In the place of a rank: takes its shards, and has nothing to say of them."""

    def __init__(self) -> None:
        self.actor = self.reference = self

    def log_probs(self, shard: TokenBatch) -> Tensor:
        """Of each token 0."""
        return torch.zeros(shard.num_tokens)

    def update(self, shard: TokenBatch) -> dict[str, float]:
        """No metrics."""
        return {}


@dataclass
class Costs:
    """Seconds of the driver, by part."""

    cpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    clock: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the body."""
        used, began = time.process_time(), time.perf_counter()
        yield
        self.cpu[name] += time.process_time() - used
        self.clock[name] += time.perf_counter() - began


def options(folder: str, num_trajectories: int) -> Config:
    """GRPO with a KL loss in mini-batches of 256, of a model of the shape of Qwen2.5-3B."""
    Qwen2Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    config = Config()
    config.actor_rollout_ref.model.path = folder
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.actor_rollout_ref.rollout.n_agent = GROUP
    config.algorithm.adv_estimator, config.algorithm.kl_ctrl.kl_coef = "grpo", 0.0
    config.data.train_batch_size = num_trajectories // GROUP
    return config


def started(num_trajectories: int) -> list[Trajectory]:
    """Groups behind prompts of their own."""
    random, found = np.random.default_rng(0), []
    for group in range(num_trajectories // GROUP):
        ids = tuple(random.integers(0, 150_000, PROMPT).tolist())
        prompt = Prompt(f"file#{group}", ids, "nq", ("gold",), {}, "question " * 50)
        seeds = [trajectory_seed(0, 1, group, n) for n in range(GROUP)]
        found += [start_trajectory(prompt, f"1/{group}", n, seed) for n, seed in enumerate(seeds)]
    return found


def step(config: Config, players: RayWorkerGroup, ranks: TrainerRanks) -> Costs:
    """One step's trajectories, from the start of their sampling to their last update."""
    costs, learner, timings = Costs(), Learner(config, ranks), Timings()
    with costs.part("ask"):
        starts = started(config.data.train_batch_size * GROUP)
        parts = split_groups([start.group for start in starts], len(players))
        calls = [
            players.submit(i, "rollout", [starts[k] for k in part], Sampling(100))
            for i, part in enumerate(parts)
        ]
    ray.wait(calls, num_returns=len(calls), fetch_local=False)
    with costs.part("fetch"):
        finished: dict[int, Trajectory] = {}
        for part, found in zip(parts, players.gather(calls), strict=True):
            finished |= dict(zip(part, found, strict=True))
        trajectories = complete_groups([finished[i] for i in range(len(starts))], [], "step", 0.02)
    rewards = [Reward(float(i % 3 == 0)) for i in range(len(starts))]
    with costs.part("metrics"):
        rollout_metrics(trajectories)
        reward_metrics(rewards)
    with costs.part("batch"):
        batch = assemble(Samples(trajectories, rewards), config)
    with costs.part("passes"):
        learner.compute_log_probs_and_values(batch, timings)
    with costs.part("advantages"):
        add_advantages(batch, config, FixedKLController(0.0))
        advantage_metrics(batch)
        staleness_metrics(batch, 1)
    with costs.part("updates"):
        learner.update(batch, 1, timings)
    return costs


def whole_step(config: Config, players: RayWorkerGroup, ranks: TrainerRanks) -> Costs:
    """A step, and the collection of garbage after it."""
    costs = step(config, players, ranks)
    with costs.part("collect"):
        gc.collect()
    return costs


def measure(sizes: Sequence[int], rounds: int, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Of each size, the parts' seconds in the middle one of the rounds."""
    ray.init(num_cpus=2 + num_ranks, include_dashboard=False, log_to_driver=False)
    actor: Any = ActorHost
    players = RayWorkerGroup([actor.options(num_cpus=1)] * 2, "replica", ReplicaLost)
    sinks = RayWorkerGroup([actor.options(num_cpus=1)] * num_ranks, "rank", RankLost)
    players.gather(players.start_build(Player, [(0,), (1,)]))
    sinks.gather(sinks.start_build(Sink, [()] * num_ranks))
    ranks = TrainerRanks(sinks)
    with tempfile.TemporaryDirectory() as folder, steady_memory(), one_thread():
        step(options(folder, sizes[0]), players, ranks)  # imports in all processes
        for size in sizes:
            size -= size % GROUP
            config = options(folder, size)
            found = [whole_step(config, players, ranks) for _ in range(rounds)]
            cpu = {part: median(one.cpu[part] for one in found) for part in PARTS}
            clock = median(sum(one.clock.values()) for one in found)
            yield {"size": size, "cpu": cpu, "clock": clock}
    ray.shutdown()


def report(rows: Sequence[dict[str, Any]]) -> None:
    """A table, and the line through the totals."""
    console.print(f"| trajectories | {' | '.join(PARTS)} | all | µs each | clock |")
    console.print("| --- " * (len(PARTS) + 4) + "|")
    for row in rows:
        total = sum(row["cpu"].values())
        cells = [f"{row['cpu'][part]:.3f}" for part in PARTS]
        each = f"{1e6 * total / row['size']:.0f}"
        console.print(f"| {row['size']:,} | {' | '.join(cells)} | {total:.2f} | {each} | "
                      f"{row['clock']:.2f} |")  # fmt: skip
    sizes = np.array([row["size"] for row in rows], dtype=float)
    totals = np.array([sum(row["cpu"].values()) for row in rows])
    if len(rows) > 1:
        slope, base = np.polyfit(sizes, totals, 1)
        apart = np.abs(totals - (base + slope * sizes)).max()
        console.print(
            f"{base:.3f} s + {1e6 * slope:.0f} µs a trajectory, at most {apart:.3f} s off"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 2560, 20000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON line a size goes there too")
    given = parser.parse_args()
    rows = list(measure(given.sizes, given.rounds, given.ranks))
    report(rows)
    if given.out is not None:
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
