"""`python -m benchmarks.rollout_speed MODEL`: dialogues with searches against vLLM's offline rate.

A replica plays groups of dialogues as in training, over a real BM25 server. Then vLLM's own `LLM`,
with the same settings and all requests given at once, samples as many tokens from the same
prefixes: every turn as a request of its own, which waits for no search and no turn before it. Last
the same with the blocks of cached prefixes that vLLM has by itself. All have a process of their own
and a warm-up of as much, and take turns.
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

from benchmarks.algorithms.runner import ROOT
from benchmarks.algorithms.variants import COMMON
from example.geography import CORPUS, DATA
from search_r1.agent.generation import build_agent
from search_r1.search.local_server import LocalServer
from verl.config import Config, cli
from verl.data import load_prompts
from verl.model_files import load_tokenizer
from verl.rollout.replica import RolloutReplica
from verl.rollout.vllm_engine import VllmSettings
from verl.types import Origin, Sampling, Trajectory, start_trajectory

console = Console(soft_wrap=True, highlight=False)
PARTS = ("replica", "offline", "offline_own_blocks")
Turn = tuple[list[int], int]
"""The tokens before it, and how many it has."""


def options(model: Path, url: str, extra: Sequence[str]) -> Config:
    """Those of the algorithm benchmarks."""
    named = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={DATA / 'train.parquet'}",
        f"data.val_files={DATA / 'val.parquet'}",
        f"retriever.url={url}",
        *COMMON,
        *extra,
    ]
    return cli.compose(named)


def starts(config: Config, first: int, prompts: int, group: int) -> list[Trajectory]:
    """Some prompts, each `group` times."""
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    rows = load_prompts(config, config.data.train_files, None, tokenizer)
    return [
        start_trajectory(rows[row % len(rows)], str(row), sample, row * group + sample)
        for row in range(first, first + prompts)
        for sample in range(group)
    ]


def turns(trajectories: Sequence[Trajectory]) -> list[Turn]:
    """Of all dialogues: first turns first, so that a later one finds its prefix cached."""
    found: list[tuple[int, Turn]] = []
    for one in trajectories:
        before: list[int] = []
        for number, segment in enumerate(one.segments):
            if segment.origin is Origin.POLICY:
                found.append((number, (list(before), len(segment.ids))))
            before += segment.ids
    return [turn for _, turn in sorted(found, key=lambda pair: pair[0])]


async def play(config: Config, prompts: int, group: int) -> dict[str, Any]:
    """Seconds of the replica, and what it sampled."""
    rollout = config.actor_rollout_ref.rollout
    sampling = Sampling(config.data.max_response_length, rollout.temperature, rollout.top_p)
    replica = RolloutReplica(config, build_agent, 0)
    await replica.engine.start()
    await replica.rollout(starts(config, prompts, prompts, group), sampling)
    begun = starts(config, 0, prompts, group)
    begin = time.perf_counter()
    ended = await replica.rollout(begun, sampling)
    seconds = time.perf_counter() - begin
    await replica.engine.shutdown()
    return {"seconds": seconds, "turns": turns(list(ended.values()))}


def offline(config: Config, played: Sequence[Turn], own_blocks: bool) -> dict[str, Any]:
    """Seconds of vLLM for the same numbers of tokens, with its `own_blocks` of cached prefixes or
    with ours."""
    settings = VllmSettings(config)
    os.environ.update(settings.environment())
    from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415 - after its variables

    without = {"block_size"} if own_blocks else set[str]()
    llm = LLM(**{key: x for key, x in settings.arguments().items() if key not in without})
    rollout = config.actor_rollout_ref.rollout

    def sample(given: Sequence[Turn]) -> float:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in given]
        parameters = [
            SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False,
                           temperature=rollout.temperature, top_p=rollout.top_p)
            for _, count in given
        ]  # fmt: skip
        begin = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - begin

    sample([([1, *ids], count) for ids, count in played])  # whatever it compiles, for any batch
    return {"seconds": sample(played)}


def child(part: str, arguments: Sequence[str], out: Path) -> dict[str, Any]:
    """What one part in a process of its own answers."""
    command = [sys.executable, "-m", "benchmarks.rollout_speed", *arguments, "--part", part]
    subprocess.run([*command, "--out", str(out)], cwd=ROOT, check=True)
    answer: dict[str, Any] = json.loads((out / f"{part}.json").read_text())
    return answer


def compare(arguments: Sequence[str], rounds: int) -> dict[str, Any]:
    """All parts in turn; the medians of their rates and of the ratios."""
    rates: dict[str, list[float]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            ours = child("replica", arguments, Path(folder))
            tokens = sum(count for _, count in ours["turns"])
            rates["replica"].append(tokens / ours["seconds"])
            for part in PARTS[1:]:
                theirs = child(part, arguments, Path(folder))
                rates[part].append(tokens / theirs["seconds"])
            row = [f"{name} {found[-1]:.0f}" for name, found in rates.items()]
            console.print(f"round {number}: {tokens} tokens, tokens/s: {', '.join(row)}")
    answer: dict[str, Any] = {"turns": len(ours["turns"]), "tokens": tokens}
    for part in PARTS[1:]:
        pairs = zip(rates["replica"], rates[part], strict=True)
        ratios = [replica / theirs for replica, theirs in pairs]
        answer[part] = {"ratio": median(ratios), "ratios": ratios}
    return answer | {f"{part}_tokens_per_s": median(found) for part, found in rates.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.rollout_speed", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="of a running retriever; the example's when not given")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("extra", nargs="*", help="further options of the run, key=value")
    given = parser.parse_args()
    if given.part is None:
        with LocalServer(["--retriever_name", "bm25", "--corpus_path", str(CORPUS)]) as server:
            own = [*sys.argv[1:], "--url", given.url or f"{server.url}/retrieve"]
            console.print_json(json.dumps(compare(own, given.rounds)))
        return
    config = options(given.model, given.url, given.extra)
    if given.part == "replica":
        answer = asyncio.run(play(config, given.prompts, given.group))
    else:
        played = json.loads((given.out / "replica.json").read_text())["turns"]
        answer = offline(config, played, own_blocks=given.part == PARTS[2])
    (given.out / f"{given.part}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
