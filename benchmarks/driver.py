"""Measure the driver's processor time in each part of a step: `python -m benchmarks.driver`.

Random trajectories pass through the trainer's own code: from two Ray actors in place of replicas to
the driver, through its batch, advantages and mini-batches, to two actors in place of ranks, which
respond at once. No model runs. The figures are processor seconds of the driver's process, including
its Ray threads; the elapsed seconds are reported as well.
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

from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.errors import RankLost, ReplicaLost
from verl.ext.steady import one_thread, steady_memory
from verl.monitor.performance import Timings
from verl.packing import split_groups
from verl.rewards.interface import Reward
from verl.single_controller.actors import ActorHost, RayWorkerGroup
from verl.trainer.collect import Samples, complete_groups, trajectory_seed
from verl.trainer.learn import Learner, add_advantages, assemble
from verl.trainer.metrics import (
    advantage_metrics,
    reward_metrics,
    rollout_metrics,
)
from verl.trainer.ranks import TrainerRanks
from verl.types import (
    Origin,
    Prompt,
    Sampling,
    Segment,
    Status,
    Timeline,
    Trajectory,
    TurnTimes,
    start_trajectory,
)

GROUP_SIZE, NUM_TURNS = 5, 3
PROMPT_TOKENS, TURN_TOKENS, OBSERVATION_TOKENS = 250, 100, 375
"""Token counts: 1,300 per trajectory. Those of turns and observations vary by up to a fifth."""
PARTS = ("ask", "fetch", "metrics", "batch", "passes", "advantages", "updates", "collect")

console = Console(soft_wrap=True)


class FakeReplica:
    """A replica that finishes trajectories with random tokens."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def rollout(self, starts: Sequence[Trajectory], _: Sampling) -> list[Trajectory]:
        """Finish every trajectory with three turns and two observations."""
        return [self.finish(start) for start in starts]

    def finish(self, start: Trajectory) -> Trajectory:
        """Finish one trajectory."""
        for turn in range(NUM_TURNS):
            ids = self.draw_ids(TURN_TOKENS)
            log_probs = tuple((-self.random.random(len(ids))).tolist())
            start.segments.append(Segment(Origin.POLICY, ids, "word " * len(ids), log_probs))
            if turn + 1 < NUM_TURNS:
                ids = self.draw_ids(OBSERVATION_TOKENS)
                start.segments.append(Segment(Origin.OBSERVATION, ids, "word " * len(ids)))
        start.status = Status.ANSWERED
        start.stats = {"turns": 3.0, "valid_actions": 3.0, "answered": 1.0, "malformed_turns": 0.0}
        times = [TurnTimes(t, t, t + 1.0, turn=int(t)) for t in range(NUM_TURNS)]
        start.timeline = Timeline(turns=times)
        return start

    def draw_ids(self, mean_count: int) -> tuple[int, ...]:
        """Draw random token ids, as many as `mean_count` with a deviation of up to a fifth."""
        count = int(mean_count * self.random.uniform(0.8, 1.2))
        return tuple(self.random.integers(0, 150_000, count).tolist())


class FakeRank:
    """A rank that responds without computing."""

    def __init__(self) -> None:
        self.actor = self.reference = self

    def log_probs(self, shard: TokenBatch) -> Tensor:
        """Return 0 for each token."""
        return torch.zeros(shard.num_tokens)

    def update(self, shard: TokenBatch) -> dict[str, float]:
        """Return no metrics."""
        return {}


@dataclass
class PartTimes:
    """Processor and elapsed seconds of the driver in each part of a step."""

    cpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    clock: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of the context's body to the part `name`."""
        began_cpu, began = time.process_time(), time.perf_counter()
        yield
        self.cpu[name] += time.process_time() - began_cpu
        self.clock[name] += time.perf_counter() - began


def build_config(folder: str, num_trajectories: int) -> Config:
    """Return a GRPO configuration with KL loss, mini-batches of 256, and Qwen2.5-3B's shape.

    The model's config.json is written to `folder`.
    """
    Qwen2Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
        num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    config = Config()
    config.actor_rollout_ref.model.path = folder
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.actor_rollout_ref.rollout.n_agent = GROUP_SIZE
    config.algorithm.adv_estimator, config.algorithm.kl_ctrl.kl_coef = "grpo", 0.0
    config.data.train_batch_size = num_trajectories // GROUP_SIZE
    return config


def start_groups(num_trajectories: int) -> list[Trajectory]:
    """Start groups of trajectories, each with a random prompt."""
    random = np.random.default_rng(0)
    trajectories = []
    for group in range(num_trajectories // GROUP_SIZE):
        ids = tuple(random.integers(0, 150_000, PROMPT_TOKENS).tolist())
        prompt = Prompt(f"file#{group}", ids, "nq", ("gold",), {}, "question " * 50)
        for sample in range(GROUP_SIZE):
            seed = trajectory_seed(0, 1, group, sample)
            trajectories.append(start_trajectory(prompt, f"1/{group}", sample, seed))
    return trajectories


def step(config: Config, replicas: RayWorkerGroup, ranks: TrainerRanks) -> PartTimes:
    """Run one step, from starting its trajectories to the last update."""
    times, learner, timings = PartTimes(), Learner(config, ranks, FixedKLController(0.0)), Timings()
    with times.part("ask"):
        starts = start_groups(config.data.train_batch_size * GROUP_SIZE)
        parts = split_groups([start.group for start in starts], len(replicas))
        calls = [
            replicas.submit(i, "rollout", [starts[k] for k in part], Sampling(100))
            for i, part in enumerate(parts)
        ]
    ray.wait(calls, num_returns=len(calls), fetch_local=False)
    with times.part("fetch"):
        finished: dict[int, Trajectory] = {}
        for part, trajectories in zip(parts, replicas.gather(calls), strict=True):
            finished |= dict(zip(part, trajectories, strict=True))
        trajectories = complete_groups([finished[i] for i in range(len(starts))], [], "step", 0.02)
    rewards = [Reward(float(i % 3 == 0)) for i in range(len(starts))]
    with times.part("metrics"):
        rollout_metrics(trajectories)
        reward_metrics(rewards)
    with times.part("batch"):
        batch = assemble(Samples(trajectories, rewards), config)
    with times.part("passes"):
        learner.prepare(batch, timings)
    with times.part("advantages"):
        add_advantages(batch, config, FixedKLController(0.0))
        advantage_metrics(batch)
    with times.part("updates"):
        learner.update(batch, 1, timings)
    return times


def step_and_collect(config: Config, replicas: RayWorkerGroup, ranks: TrainerRanks) -> PartTimes:
    """Run one step, then collect garbage, after the step's objects are no longer referenced."""
    times = step(config, replicas, ranks)
    with times.part("collect"):
        gc.collect()
    return times


def measure(sizes: Sequence[int], rounds: int, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yield for each size the seconds of each part, as medians over the rounds."""
    ray.init(num_cpus=2 + num_ranks, include_dashboard=False, log_to_driver=False)
    actor: Any = ActorHost
    replicas = RayWorkerGroup([actor.options(num_cpus=1)] * 2, "replica", ReplicaLost)
    rank_actors = RayWorkerGroup([actor.options(num_cpus=1)] * num_ranks, "rank", RankLost)
    replicas.gather(replicas.start_build(FakeReplica, [(0,), (1,)]))
    rank_actors.gather(rank_actors.start_build(FakeRank, [()] * num_ranks))
    ranks = TrainerRanks(dict.fromkeys(("actor", "reference", "critic"), rank_actors))
    with tempfile.TemporaryDirectory() as folder, steady_memory(), one_thread():
        step(build_config(folder, sizes[0]), replicas, ranks)  # warm-up: imports in all processes
        for size in sizes:
            size -= size % GROUP_SIZE
            config = build_config(folder, size)
            steps = [step_and_collect(config, replicas, ranks) for _ in range(rounds)]
            cpu = {part: median(times.cpu[part] for times in steps) for part in PARTS}
            clock = median(sum(times.clock.values()) for times in steps)
            yield {"size": size, "cpu": cpu, "clock": clock}
    ray.shutdown()


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table, and a line fitted to the totals."""
    console.print(f"| trajectories | {' | '.join(PARTS)} | total | µs each | clock |")
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
        error = np.abs(totals - (base + slope * sizes)).max()
        console.print(
            f"fit: {base:.3f} s + {1e6 * slope:.0f} µs per trajectory, largest error {error:.3f} s"
        )


def main() -> None:
    """Measure, print the table, and write the rows to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 2560, 20000],
                        help="trajectories per step")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for one JSON line per size")
    args = parser.parse_args()
    rows = list(measure(args.sizes, args.rounds, args.ranks))
    report(rows)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
