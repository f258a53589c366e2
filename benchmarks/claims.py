"""Compare groups claimed by free replicas with a fixed split: `python -m benchmarks.claims MODEL`.

Two replicas, each with vLLM and one core, in a real Ray cluster, finish the same groups of
dialogues alternately in both modes. There are more dialogues than the engines decode at once.
Their lengths are log-normal and equal within a group, because dialogues about one question are
similar. The fixed split is the one of a replayed schedule.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, mean, median, stdev
from typing import Any

import ray
from rich.console import Console

from verl.config import Config
from verl.errors import ReplicaLost
from verl.rollout.interface import RolloutEngine
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.single_controller.actors import ActorHost, RayWorkerGroup, Restarts
from verl.trainer.groups import cpu_env
from verl.types import Origin, Prompt, Sampling, Segment, Status, Trajectory, start_trajectory

PROMPT_TOKENS, MAX_TURN_TOKENS = 64, 32

console = Console(soft_wrap=True, highlight=False)


class FixedLengthAgent:
    """An agent that samples turns until the dialogue has the number of tokens its prompt states."""

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        """Finish one dialogue; an end-of-sequence token ends only the turn."""
        num_left = start.prompt.extra_info["tokens"]
        while num_left:
            max_tokens = min(num_left, MAX_TURN_TOKENS)
            turn_sampling = Sampling(max_tokens, seed=(start.seed or 0) + num_left)
            completion = await engine.generate(start.ids, turn_sampling)
            start.segments.append(Segment(Origin.POLICY, completion.ids, "", completion.log_probs))
            num_left -= len(completion.ids)
        start.status = Status.ANSWERED
        return start


class PinnedReplica(RolloutReplica):
    """A replica that runs on one core, together with the processes that it starts."""

    def __init__(self, config: Config, number: int) -> None:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
        super().__init__(config, lambda _: FixedLengthAgent(), number)


def draw_lengths(
    num_groups: int, center: float, spread: float, max_tokens: int, seed: int
) -> list[int]:
    """Draw the number of tokens of each group's dialogues from a log-normal distribution."""
    draw = random.Random(seed)
    lengths = [math.exp(draw.gauss(math.log(center), spread)) for _ in range(num_groups)]
    return [max(4, min(max_tokens, round(length))) for length in lengths]


def start_groups(lengths: Sequence[int], size: int, seed: int) -> list[Trajectory]:
    """Start one group of `size` trajectories for each length, with random prompts."""
    draw = random.Random(seed)
    trajectories = []
    for number, length in enumerate(lengths):
        ids = tuple(draw.randrange(100, 20_000) for _ in range(PROMPT_TOKENS))
        prompt = Prompt(f"file#{number}", ids, "nq", ("x",), {"tokens": length})
        for sample in range(size):
            trajectories.append(start_trajectory(prompt, f"{seed}/{number}", sample, seed=sample))
    return trajectories


def build_config(args: argparse.Namespace) -> Config:
    """Return the configuration of an engine with few slots."""
    config = Config()
    rollout = config.actor_rollout_ref.rollout
    config.actor_rollout_ref.model.path = str(args.model)
    rollout.max_num_seqs, rollout.cpu_kv_cache_gib, rollout.dtype = args.slots, 1, "bfloat16"
    config.trainer.device = "cpu"
    config.data.max_prompt_length, config.data.max_response_length = PROMPT_TOKENS, args.most
    return config


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each round the seconds of both modes and their imbalance between the replicas.

    The imbalance is the tokens of the busier replica over the mean of the two.
    """
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    actor: Any = ActorHost.options(num_cpus=1, runtime_env={"env_vars": cpu_env()})
    group = RayWorkerGroup([actor] * 2, "replica", ReplicaLost)
    arguments = [(build_config(args), number) for number in range(2)]
    group.gather(group.start_build(PinnedReplica, arguments))
    group.call("engine.start")
    modes = {name: RolloutReplicas(group, arguments, Restarts(0), is_divided=name == "split")
             for name in ("split", "claims")}  # fmt: skip
    sampling, rows = Sampling(args.most), list[dict[str, Any]]()
    for number in range(args.rounds + 1):
        lengths = draw_lengths(args.groups, args.center, args.spread, args.most, seed=number)
        row: dict[str, Any] = {"tokens": sum(lengths) * args.group}
        for mode in sorted(modes, reverse=bool(number % 2)):
            starts = start_groups(lengths, args.group, seed=number * 2 + (mode == "claims"))
            began = time.perf_counter()
            trajectories = modes[mode].generate(starts, sampling)
            row[mode] = time.perf_counter() - began
            tokens = [0, 0]
            for trajectory in trajectories:
                tokens[trajectory.replica] += trajectory.num_policy_tokens
            row[f"{mode}_uneven"] = max(tokens) / sum(tokens) * 2
        console.print(f"{number or 'warm-up'}: {json.dumps(row)}")
        rows.append(row)
    group.shutdown()
    ray.shutdown()
    return rows[1:]


def main() -> None:
    """Measure, and print the mean ratio with its 95 % interval."""
    parser = argparse.ArgumentParser(prog="benchmarks.claims", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--groups", type=int, default=12, help="number of groups in a round")
    parser.add_argument("--group", type=int, default=4, help="dialogues of a group")
    parser.add_argument("--slots", type=int, default=4, help="max_num_seqs of each engine")
    parser.add_argument("--center", type=float, default=40.0, help="median tokens of a dialogue")
    parser.add_argument("--spread", type=float, default=1.2, help="deviation of their logarithm")
    parser.add_argument("--most", type=int, default=400, help="maximum tokens of a dialogue")
    parser.add_argument("--rounds", type=int, default=8)
    console.print_json(json.dumps(summary(measure(parser.parse_args()))))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of the seconds of both modes, with half of the mean's 95 % interval.

    One round has no interval: `half_interval` is None.
    """
    ratios = [row["split"] / row["claims"] for row in rows]
    half = None
    if len(ratios) > 1:
        half = NormalDist().inv_cdf(0.975) * stdev(ratios) / math.sqrt(len(ratios))
    return {
        "ratio": mean(ratios), "half_interval": half, "median": median(ratios), "ratios": ratios,
    }  # fmt: skip


if __name__ == "__main__":
    main()
