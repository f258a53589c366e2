"""`python -m benchmarks.claims MODEL`: groups claimed by replicas with room, against a split.

Two replicas with a vLLM and a core each, in a real Ray, finish the same dialogues both ways in
turns: groups whose lengths are skewed (log-normal; all of a group are as long, as dialogues about
one question are alike), with more of them than the engines decode at once. The split is the one
that a repeated schedule uses.
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

PROMPT, TURN = 64, 32
"""Tokens of a prompt, and of a turn at most."""

console = Console(soft_wrap=True, highlight=False)


class LongAgent:
    """Samples as many tokens as the prompt says, turn by turn."""

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        """One dialogue; an end of sequence ends a turn, and no more."""
        left = start.prompt.extra_info["tokens"]
        while left:
            asked = Sampling(min(left, TURN), seed=(start.seed or 0) + left)
            completion = await engine.generate(start.ids, asked)
            start.segments.append(Segment(Origin.POLICY, completion.ids, "", completion.log_probs))
            left -= len(completion.ids)
        start.status = Status.ANSWERED
        return start


class PinnedReplica(RolloutReplica):
    """A replica that has one core to itself, with whatever it starts."""

    def __init__(self, config: Config, number: int) -> None:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
        super().__init__(config, lambda _: LongAgent(), number)


def lengths(number: int, center: float, spread: float, most: int, seed: int) -> list[int]:
    """Of each group its dialogues' tokens, log-normal and in random order."""
    draw = random.Random(seed)
    found = [math.exp(draw.gauss(math.log(center), spread)) for _ in range(number)]
    return [max(4, min(most, round(one))) for one in found]


def requested(tokens: Sequence[int], size: int, seed: int) -> list[Trajectory]:
    """A group for each length."""
    draw, found = random.Random(seed), []
    for number, count in enumerate(tokens):
        ids = tuple(draw.randrange(100, 20_000) for _ in range(PROMPT))
        prompt = Prompt(f"file#{number}", ids, "nq", ("x",), {"tokens": count})
        found += [start_trajectory(prompt, f"{seed}/{number}", n, seed=n) for n in range(size)]
    return found


def options(given: argparse.Namespace) -> Config:
    """Of an engine with few slots."""
    config = Config()
    rollout = config.actor_rollout_ref.rollout
    config.actor_rollout_ref.model.path = str(given.model)
    rollout.max_num_seqs, rollout.cpu_kv_cache_gib, rollout.dtype = given.slots, 1, "bfloat16"
    config.trainer.device = "cpu"
    config.data.max_prompt_length, config.data.max_response_length = PROMPT, given.most
    return config


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each round: seconds both ways, and how uneven the halves of the split are."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    actor: Any = ActorHost.options(num_cpus=1, runtime_env={"env_vars": cpu_env()})
    group = RayWorkerGroup([actor] * 2, "replica", ReplicaLost)
    arguments = [(options(given), number) for number in range(2)]
    group.gather(group.start_build(PinnedReplica, arguments))
    group.call("engine.start")
    ways = {name: RolloutReplicas(group, arguments, Restarts(0), is_divided=name == "split")
            for name in ("split", "claims")}  # fmt: skip
    sampling, rows = Sampling(given.most), list[dict[str, Any]]()
    for number in range(given.rounds + 1):
        tokens = lengths(given.groups, given.center, given.spread, given.most, seed=number)
        row: dict[str, Any] = {"tokens": sum(tokens) * given.group}
        for way in sorted(ways, reverse=bool(number % 2)):
            starts = requested(tokens, given.group, seed=number * 2 + (way == "claims"))
            begin = time.perf_counter()
            ended = ways[way].generate(starts, sampling)
            row[way] = time.perf_counter() - begin
            halves = [sum(one.num_policy_tokens for one in ended if one.replica == r)
                      for r in range(2)]  # fmt: skip
            row[f"{way}_uneven"] = max(halves) / sum(halves) * 2
        console.print(f"{number or 'warm-up'}: {json.dumps(row)}")
        rows.append(row)
    group.shutdown()
    ray.shutdown()
    return rows[1:]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.claims", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--center", type=float, default=40.0, help="median tokens of a dialogue")
    parser.add_argument("--spread", type=float, default=1.2, help="deviation of their logarithm")
    parser.add_argument("--most", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    rows = measure(given)
    ratios = [row["split"] / row["claims"] for row in rows]
    half = NormalDist().inv_cdf(0.975) * stdev(ratios) / math.sqrt(len(ratios))
    console.print_json(json.dumps({
        "ratio": mean(ratios), "half_interval": half, "median": median(ratios), "ratios": ratios,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
