"""Compare a replica's rate with vLLM's offline rate: `python -m benchmarks.rollout_speed MODEL`.

A replica finishes groups of dialogues as in training, with searches on a real BM25 server. Then
vLLM's own `LLM`, with the same settings, samples as many tokens from the same prefixes. It gets all
turns at once as separate requests, so none waits for a search or for an earlier turn. The third
part is the same with vLLM's default block size of the prefix cache. Each part runs in a separate
process after a warm-up of the same size, and the parts alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.algorithms.runner import ROOT, retriever
from benchmarks.algorithms.variants import COMMON
from example.geography import DATA
from search_r1.agent.generation import build_agent
from verl.config import Config, cli
from verl.data.prompts import load_prompts
from verl.model_files import load_tokenizer
from verl.rollout.replica import RolloutReplica
from verl.rollout.vllm_settings import VllmSettings
from verl.types import Origin, Sampling, Trajectory, start_trajectory

console = Console(soft_wrap=True, highlight=False)
PARTS = ("replica", "offline", "offline_own_blocks")
Turn = tuple[list[int], int]
"""The token ids before a turn, and the number of its tokens."""


def build_config(model: Path, url: str, extra: Sequence[str]) -> Config:
    """Return the configuration of the algorithm benchmarks, changed by the options `extra`."""
    options = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={DATA / 'train.parquet'}",
        f"data.val_files={DATA / 'val.parquet'}",
        f"retriever.url={url}",
        *COMMON,
        *extra,
    ]
    return cli.compose(options)


def start_groups(config: Config, first: int, prompts: int, group: int) -> list[Trajectory]:
    """Start `group` trajectories for each of `prompts` prompts, from row `first`."""
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    rows = load_prompts(config, config.data.train_files, None, tokenizer)
    return [
        start_trajectory(rows[row % len(rows)], str(row), sample, row * group + sample)
        for row in range(first, first + prompts)
        for sample in range(group)
    ]


def sampled_turns(trajectories: Sequence[Trajectory]) -> list[Turn]:
    """Return the turns of all dialogues, first turns first, so that later prefixes are cached."""
    numbered: list[tuple[int, Turn]] = []
    for trajectory in trajectories:
        before: list[int] = []
        for number, segment in enumerate(trajectory.segments):
            if segment.origin is Origin.POLICY:
                numbered.append((number, (list(before), len(segment.ids))))
            before += segment.ids
    return [turn for _, turn in sorted(numbered, key=lambda pair: pair[0])]


async def run_replica(config: Config, prompts: int, group: int) -> dict[str, Any]:
    """Measure the replica's seconds; returns them and the sampled turns."""
    rollout = config.actor_rollout_ref.rollout
    sampling = Sampling(config.data.max_response_length, rollout.temperature, rollout.top_p)
    replica = RolloutReplica(config, build_agent, 0)
    await replica.engine.start()
    await replica.rollout(start_groups(config, prompts, prompts, group), sampling)  # warm-up
    starts = start_groups(config, 0, prompts, group)
    began = time.perf_counter()
    trajectories = await replica.rollout(starts, sampling)
    seconds = time.perf_counter() - began
    await replica.engine.shutdown()
    return {"seconds": seconds, "turns": sampled_turns(trajectories)}


def run_offline(config: Config, turns: Sequence[Turn], own_blocks: bool) -> dict[str, Any]:
    """Measure vLLM's seconds for the same turns, with our or its own (`own_blocks`) block size."""
    settings = VllmSettings(config)
    os.environ.update(settings.environment())
    from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415 - after its variables

    engine_arguments = settings.arguments()
    if own_blocks:
        engine_arguments.pop("block_size", None)
    llm = LLM(**engine_arguments)
    rollout = config.actor_rollout_ref.rollout

    def sample(turns: Sequence[Turn]) -> float:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in turns]
        parameters = [
            SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False,
                           temperature=rollout.temperature, top_p=rollout.top_p)
            for _, count in turns
        ]  # fmt: skip
        began = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - began

    # The warm-up compiles; other first tokens keep its prefixes out of the measurement's cache.
    sample([([1, *ids], count) for ids, count in turns])
    return {"seconds": sample(turns)}


def run_part(part: str, arguments: Sequence[str], out: Path) -> dict[str, Any]:
    """Run one part in a separate process and return its result."""
    command = [sys.executable, "-m", "benchmarks.rollout_speed", *arguments, "--part", part]
    subprocess.run([*command, "--out", str(out)], cwd=ROOT, check=True)
    result: dict[str, Any] = json.loads((out / f"{part}.json").read_text())
    return result


def compare(arguments: Sequence[str], rounds: int) -> dict[str, Any]:
    """Run all parts alternately; returns the medians of their rates and of the ratios."""
    rates: dict[str, list[float]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            replica = run_part("replica", arguments, Path(folder))
            tokens = sum(count for _, count in replica["turns"])
            rates["replica"].append(tokens / replica["seconds"])
            for part in PARTS[1:]:
                seconds = run_part(part, arguments, Path(folder))["seconds"]
                rates[part].append(tokens / seconds)
            row = [f"{part} {values[-1]:.0f}" for part, values in rates.items()]
            console.print(f"round {number}: {tokens} tokens, tokens/s: {', '.join(row)}")
    result: dict[str, Any] = {"turns": len(replica["turns"]), "tokens": tokens}
    for part in PARTS[1:]:
        ratios = [ours / vllm for ours, vllm in zip(rates["replica"], rates[part], strict=True)]
        result[part] = {"ratio": median(ratios), "ratios": ratios}
    return result | {f"{part}_tokens_per_s": median(values) for part, values in rates.items()}


def main() -> None:
    """Run the benchmark, or one part of it in a child process (`--part`)."""
    parser = argparse.ArgumentParser(prog="benchmarks.rollout_speed", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="a running retriever's /retrieve; one is started if left out")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("extra", nargs="*", help="further options of the run, key=value")
    args = parser.parse_args()
    if args.part is None:
        with retriever(args.url) as url:
            arguments = [*sys.argv[1:], "--url", url]
            console.print_json(json.dumps(compare(arguments, args.rounds)))
        return
    config = build_config(args.model, args.url, args.extra)
    if args.part == "replica":
        result = asyncio.run(run_replica(config, args.prompts, args.group))
    else:
        turns = json.loads((args.out / "replica.json").read_text())["turns"]
        result = run_offline(config, turns, own_blocks=args.part == "offline_own_blocks")
    (args.out / f"{args.part}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
