"""`python -m benchmarks.speculation`: how much waiting for searches `retriever.speculate` hides.

The same dialogues are played without it and with it over a real server on a port, whose latency is
log-normal with a median of 0.5 s and a 99th percentile of 5 s, of each query the same in both. The
policy recites turns at 25 ms a token; with `--model FOLDER` it is that model in vLLM.
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
"""Of the logarithm: the 99th percentile lies 2.3263 of them above the median."""
TOKEN_S = 0.025
NUM_GROUPS, NUM_SAMPLES, NUM_SEARCHES, NUM_WORDS = 10, 5, 3, 30
CASES = {
    "no repeated query": (0.0, 0.0),
    "half of the queries repeat another sample's": (0.5, 0.0),
    "and a quarter of the first queries are the question": (0.5, 0.25),
}
"""Shares of queries that are one of the group's three, and of first ones that are the question."""

console = Console(soft_wrap=True, highlight=False)
Make = Callable[[Environment], DialogueAgent]


@dataclass(frozen=True)
class Played:
    """The dialogues of one pass, and what they took."""

    trajectories: list[Trajectory]
    seconds: list[float]
    """Of each dialogue."""
    num_searches: int
    """What the server looked up: of equal queries at the same time it looks up one."""


def latency(query: str) -> float:
    """Seconds that the service takes for a query."""
    return random.Random(f"latency of {query}").lognormvariate(math.log(MEDIAN_S), SIGMA)


async def play(
    make: Make, engine: RolloutEngine, starts: Sequence[Trajectory], backend: SlowBackend, url: str,
    topk: int, speculate: bool,
) -> Played:  # fmt: skip
    """All dialogues at once."""
    before = len(backend.queries)
    async with RetrievalClient(url, topk) as client:
        tool = SearchTool(client, ServerConfig(url, speculate=speculate))
        agent = make(Environment((tool,)))

        async def one(start: Trajectory) -> tuple[Trajectory, float]:
            begun = time.monotonic()
            return await agent.run(start, engine, Sampling(1)), time.monotonic() - begun

        done = await asyncio.gather(*map(one, starts))
    trajectories = [trajectory for trajectory, _ in done]
    assert not any(trajectory.error for trajectory in trajectories)
    return Played(trajectories, [s for _, s in done], len(backend.queries) - before)


def script(shares: tuple[float, float]) -> tuple[dict[str, list[str]], list[Trajectory]]:
    """Turns by the first line of the prompt, and the dialogues that they belong to."""
    words = CORPUS.read_text(encoding="utf-8")[:100_000].replace('"', " ").split()
    turns, starts, tokenizer = {}, [], ByteTokenizer()
    for group in range(NUM_GROUPS):
        dice = random.Random(f"{group} {shares}")
        question, *known = (" ".join(dice.choices(words, k=6)) for _ in range(4))
        for sample in range(NUM_SAMPLES):
            name, told = f"{group}/{sample}", []
            for number in range(NUM_SEARCHES):
                query = " ".join(dice.choices(words, k=6))
                query = dice.choice(known) if dice.random() < shares[0] else query
                is_question = number == 0 and dice.random() < shares[1]
                thought = " ".join(dice.choices(words, k=dice.randint(NUM_WORDS // 2, NUM_WORDS)))
                asked = question if is_question else query
                told.append(f"<think> {thought} </think> <search> {asked} </search>")
            turns[name] = [*told, "<answer> so </answer>"]
            ids = tuple(tokenizer.encode(f"{name}\n{question}"))
            prompt = Prompt(name, ids, "bench", (), {"question": question})
            starts.append(start_trajectory(prompt, group=str(group), sample=sample))
    return turns, starts


def reciting(environment: Environment) -> DialogueAgent:
    """The agent of scripted dialogues."""
    limits = Limits(NUM_SEARCHES, 1 << 14, 1 << 14, 1 << 20)
    tokenizer: Any = ByteTokenizer()
    return DialogueAgent(limits, TEMPLATES["short"], environment, tokenizer)


def same(one: Played, other: Played) -> str:
    """How many dialogues have the same ids, log-probs and end."""
    pairs = zip(one.trajectories, other.trajectories, strict=True)
    equal = [a.segments == b.segments and a.status is b.status for a, b in pairs]
    return f"{sum(equal)}/{len(equal)}"


def row(case: str, plain: Played, ahead: Played) -> str:
    """One line of the table."""
    metrics = rollout_metrics(ahead.trajectories)
    cells = (
        case,
        f"{metrics['rollout/search_wait_hidden_share']:.3f}",
        f"{fmean(plain.seconds) / fmean(ahead.seconds):.3f}",
        f"{max(plain.seconds) / max(ahead.seconds):.3f}",
        f"{ahead.num_searches / plain.num_searches:.3f}",
        f"{metrics['env/searches_ahead']:.2f}",
        f"{metrics['env/searches_ahead_used']:.2f}",
        f"{metrics['env/searches_shared']:.2f}",
        same(plain, ahead),
    )
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| case | hidden waiting | mean dialogue, off/on | slowest, off/on | server's searches, on/off "
    "| predicted | used | shared | identical dialogues |\n|" + " --- |" * 9
)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[SlowBackend, str]]:
    """BM25 over the example's corpus, as slow as a service; each query by itself, no cache."""
    with tempfile.TemporaryDirectory() as folder:
        build_index(BuildConfig("bm25", str(CORPUS), folder))
        backend = SlowBackend(
            build_retriever(RetrieverConfig("bm25", str(CORPUS), folder)), latency
        )
        with running(create_app(backend, ServiceConfig(max_batch=1, cache_entries=0))) as url:
            yield backend, url


async def scripted() -> None:
    """Every case of `CASES`."""
    console.print(HEAD)
    async with served() as (backend, url):
        for case, shares in CASES.items():
            turns, starts = script(shares)
            plain, ahead = [
                await play(reciting, RecitingEngine(turns, TOKEN_S), starts, backend, url, 3, on)
                for on in (False, True)
            ]
            console.print(row(case, plain, ahead))


async def with_model(folder: str) -> None:
    """The example's questions, sampled by a model in vLLM: off, on, and off again."""
    config = run_config(AgentOptions(model=folder, device="cpu", seed=0), folder)
    agent = load_agent(config)
    tokenizer: Any = agent.tokenizer
    prompts = load_prompts(config, str(QUESTIONS), NUM_GROUPS, tokenizer)
    starts = [
        start_trajectory(prompt, group=prompt.uid, sample=sample, seed=derived_seed(n, sample))
        for n, prompt in enumerate(prompts)
        for sample in range(NUM_SAMPLES)
    ]

    def make(environment: Environment) -> DialogueAgent:
        return replace(agent, environment=environment)

    async with served() as (backend, url), running_engine(config) as engine:
        passes = [
            await play(make, engine, starts, backend, url, config.retriever.topk, on)
            for on in (False, True, False)
        ]
    console.print(HEAD)
    console.print(row(f"{Path(folder).name} in vLLM", *passes[:2]))
    console.print(f"the same without it twice: {same(passes[0], passes[2])}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Waiting that retriever.speculate hides.")
    parser.add_argument("--model", help="a model's folder, sampled by vLLM, instead of scripts")
    given = parser.parse_args()
    asyncio.run(scripted() if given.model is None else with_model(given.model))


if __name__ == "__main__":
    main()
