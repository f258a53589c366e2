"""Measure how much search time `retriever.speculate` hides: `python -m benchmarks.speculation`.

The same dialogues run without and with speculation on a real server. Its latency is log-normal with
a median of 0.5 s and a 99th percentile of 5 s; a query has the same latency in both passes. The
policy recites scripted turns at 25 ms per token; with `--model FOLDER` it is that model in vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from search_r1.agent.search import SearchTool
from search_r1.agent.tags import TEMPLATES
from search_r1.inference.model import load_agent, running_engine
from search_r1.inference.opening import run_config
from search_r1.inference.options import AgentOptions
from search_r1.search.backends.registry import build_retriever
from search_r1.search.client import RetrievalClient
from search_r1.search.index_builder import BuildConfig, build_index
from search_r1.search.server.app import create_app
from search_r1.search.settings import RetrieverConfig, ServiceConfig
from tests.apps import running
from tests.fakes import ByteTokenizer, RecitingEngine
from tests.search.server.fake_backends import SlowBackend
from verl.agent.dialogue import DialogueAgent, Limits, derived_seed
from verl.agent.environment import Environment
from verl.config.agent import ServerConfig
from verl.data import load_prompts
from verl.engine import RolloutEngine
from verl.trainer.metrics import rollout_metrics
from verl.types import Prompt, Sampling, Trajectory, start_trajectory

ROOT = Path(__file__).resolve().parents[1]
CORPUS, QUESTIONS = ROOT / "example" / "corpus.jsonl", ROOT / "example" / "data" / "train.parquet"
MEDIAN_S, P99_S = 0.5, 5.0
SIGMA = math.log(P99_S / MEDIAN_S) / 2.3263
"""Standard deviation of the logarithm: the 99th percentile is 2.3263 of them above the median."""
TOKEN_S = 0.025
NUM_GROUPS, NUM_SAMPLES, NUM_SEARCHES, NUM_WORDS = 10, 5, 3, 30
CASES = {
    "no repeated query": (0.0, 0.0),
    "half of the queries repeat another sample's": (0.5, 0.0),
    "and a quarter of the first queries are the question": (0.5, 0.25),
}
"""Shares of the queries that are one of three of their group, and of the first queries that are the
group's question."""

console = Console(soft_wrap=True, highlight=False)
BuildAgent = Callable[[Environment], DialogueAgent]


@dataclass(frozen=True)
class Pass:
    """The dialogues of one pass, their times, and the searches of the server."""

    trajectories: list[Trajectory]
    seconds: list[float]
    """Seconds of each dialogue."""
    num_searches: int
    """Queries that reached the backend; simultaneous equal queries count once."""


def latency(query: str) -> float:
    """Return the seconds that the service takes for a query."""
    return random.Random(f"latency of {query}").lognormvariate(math.log(MEDIAN_S), SIGMA)


async def run_pass(
    build_agent: BuildAgent, engine: RolloutEngine, starts: Sequence[Trajectory],
    backend: SlowBackend, url: str, topk: int, speculate: bool,
) -> Pass:  # fmt: skip
    """Run all dialogues concurrently."""
    before = len(backend.queries)
    async with RetrievalClient(url, topk) as client:
        tool = SearchTool(client, ServerConfig(url, speculate=speculate))
        agent = build_agent(Environment((tool,)))

        async def run(start: Trajectory) -> tuple[Trajectory, float]:
            began = time.monotonic()
            return await agent.run(start, engine, Sampling(1)), time.monotonic() - began

        timed = await asyncio.gather(*map(run, starts))
    trajectories = [trajectory for trajectory, _ in timed]
    assert not any(trajectory.error for trajectory in trajectories)
    seconds = [seconds for _, seconds in timed]
    return Pass(trajectories, seconds, len(backend.queries) - before)


def script(shares: tuple[float, float]) -> tuple[dict[str, list[str]], list[Trajectory]]:
    """Write the turns of all dialogues; `shares` as in CASES.

    Returns the turns by the first line of the prompt, and the started dialogues.
    """
    words = CORPUS.read_text(encoding="utf-8")[:100_000].replace('"', " ").split()
    scripts, starts, tokenizer = {}, [], ByteTokenizer()
    for group in range(NUM_GROUPS):
        draw = random.Random(f"{group} {shares}")
        question, *group_queries = (" ".join(draw.choices(words, k=6)) for _ in range(4))
        for sample in range(NUM_SAMPLES):
            name, turns = f"{group}/{sample}", []
            for number in range(NUM_SEARCHES):
                query = " ".join(draw.choices(words, k=6))
                query = draw.choice(group_queries) if draw.random() < shares[0] else query
                is_question = number == 0 and draw.random() < shares[1]
                thought = " ".join(draw.choices(words, k=draw.randint(NUM_WORDS // 2, NUM_WORDS)))
                query = question if is_question else query
                turns.append(f"<think> {thought} </think> <search> {query} </search>")
            scripts[name] = [*turns, "<answer> so </answer>"]
            ids = tuple(tokenizer.encode(f"{name}\n{question}"))
            prompt = Prompt(name, ids, "bench", (), {"question": question})
            starts.append(start_trajectory(prompt, group=str(group), sample=sample))
    return scripts, starts


def build_scripted_agent(environment: Environment) -> DialogueAgent:
    """Return the agent of the scripted dialogues."""
    limits = Limits(NUM_SEARCHES, 1 << 14, 1 << 14, 1 << 20)
    tokenizer: Any = ByteTokenizer()
    return DialogueAgent(limits, TEMPLATES["short"], environment, tokenizer)


def count_identical(first: Pass, second: Pass) -> str:
    """Count the dialogues that have the same segments (ids and log-probs) and status."""
    pairs = zip(first.trajectories, second.trajectories, strict=True)
    equal = [a.segments == b.segments and a.status is b.status for a, b in pairs]
    return f"{sum(equal)}/{len(equal)}"


def row(case: str, off: Pass, on: Pass) -> str:
    """Return the row of a case in the table, from its passes without and with speculation."""
    metrics = rollout_metrics(on.trajectories)
    cells = (
        case,
        f"{metrics['rollout/search_wait_hidden_share']:.3f}",
        f"{fmean(off.seconds) / fmean(on.seconds):.3f}",
        f"{max(off.seconds) / max(on.seconds):.3f}",
        f"{on.num_searches / off.num_searches:.3f}",
        f"{metrics['env/searches_ahead']:.2f}",
        f"{metrics['env/searches_ahead_used']:.2f}",
        f"{metrics['env/searches_shared']:.2f}",
        count_identical(off, on),
    )
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| case | hidden waiting | mean dialogue, off/on | slowest, off/on | server's searches, on/off "
    "| predicted | used | shared | identical dialogues |\n|" + " --- |" * 9
)


@contextlib.asynccontextmanager
async def slow_server() -> AsyncIterator[tuple[SlowBackend, str]]:
    """Serve the example's corpus by BM25 with the latency of a service, unbatched and uncached.

    Yields the backend and the server's URL.
    """
    with tempfile.TemporaryDirectory() as folder:
        build_index(BuildConfig("bm25", str(CORPUS), folder))
        backend = SlowBackend(
            build_retriever(RetrieverConfig("bm25", str(CORPUS), folder)), latency
        )
        with running(create_app(backend, ServiceConfig(max_batch=1, cache_entries=0))) as url:
            yield backend, url


async def run_scripted() -> None:
    """Run every case of `CASES` with scripted dialogues."""
    console.print(HEAD)
    async with slow_server() as (backend, url):
        for case, shares in CASES.items():
            turns, starts = script(shares)
            passes = []
            for speculate in (False, True):
                engine = RecitingEngine(turns, TOKEN_S)
                passes.append(
                    await run_pass(build_scripted_agent, engine, starts, backend, url, 3, speculate)
                )
            console.print(row(case, *passes))


async def run_model(folder: str) -> None:
    """Run the example's questions with a model in vLLM: without, with, and again without."""
    config = run_config(AgentOptions(model=folder, device="cpu", seed=0), folder)
    agent = load_agent(config)
    tokenizer: Any = agent.tokenizer
    prompts = load_prompts(config, str(QUESTIONS), NUM_GROUPS, tokenizer)
    starts = [
        start_trajectory(prompt, group=prompt.uid, sample=sample, seed=derived_seed(n, sample))
        for n, prompt in enumerate(prompts)
        for sample in range(NUM_SAMPLES)
    ]

    def build_agent(environment: Environment) -> DialogueAgent:
        return replace(agent, environment=environment)

    async with slow_server() as (backend, url), running_engine(config) as engine:
        topk = config.retriever.topk
        passes = [
            await run_pass(build_agent, engine, starts, backend, url, topk, speculate)
            for speculate in (False, True, False)
        ]
    console.print(HEAD)
    console.print(row(f"{Path(folder).name} in vLLM", *passes[:2]))
    identical = count_identical(passes[0], passes[2])
    console.print(f"identical dialogues of the two passes without speculation: {identical}")


def main() -> None:
    """Run the scripted cases, or the dialogues of a model."""
    parser = argparse.ArgumentParser(description="Search time that retriever.speculate hides.")
    parser.add_argument("--model", help="folder of a model for vLLM, instead of scripted turns")
    args = parser.parse_args()
    asyncio.run(run_scripted() if args.model is None else run_model(args.model))


if __name__ == "__main__":
    main()
