"""An engine whose turns are a function of context and seed, and dialogues recorded with it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from search_r1.agent.generation import search_agent
from search_r1.agent.tags import TEMPLATES
from search_r1.experimental.replay.playing import turns_of
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.protocol import Retrieval
from search_r1.retrieval.schema import Document
from tests.fakes import ByteTokenizer, cut_at_stop
from verl.agent.dialogue import DialogueAgent, Limits
from verl.rollout.interface import RolloutEngine
from verl.types import Completion, Prompt, Sampling, Trajectory, start_trajectory

TOKENIZER = ByteTokenizer()
SAMPLING = Sampling(200)
OSLO = Document.from_title("1", "Oslo", "Oslo is a city in Norway.")
BERGEN = Document.from_title("2", "Bergen", "Bergen lies by the sea.")
RESULTS = {"oslo": [OSLO], "both": [OSLO, BERGEN], "sea": [BERGEN]}
TURNS = (
    "<think> hm </think><search> oslo </search>", "<search> both </search>",
    "<think> what now </think>", "<answer> Norway </answer>",
)  # fmt: skip


@dataclass
class ScriptedEngine(RolloutEngine):
    """Returns one of `TURNS`; context and seed determine the turn and its log-probs."""

    requests: list[tuple[tuple[int, ...], Sampling]] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.requests.append((tuple(prompt_ids), sampling))
        draw = random.Random(repr((tuple(prompt_ids), sampling.seed)))
        text, _ = cut_at_stop(draw.choice(TURNS), sampling.stop)
        ids = TOKENIZER.encode(text)[: sampling.max_tokens]
        log_probs = tuple(-draw.random() for _ in ids)
        return Completion(tuple(ids), log_probs, TOKENIZER.decode(ids), "stop", 4)


def agent_of(retrieval: Retrieval | None = None, **limits: int) -> DialogueAgent:
    """Return an agent over the documents in `RESULTS`, with changes to its limits."""
    all_limits = Limits(
        **{"max_turns": 3, "max_response_length": 200, "max_prompt_length": 2000, **limits}
    )
    retrieval = retrieval or InMemoryRetrieval(RESULTS)
    return search_agent(retrieval, TOKENIZER, all_limits, TEMPLATES["short"])


def record(seed: int, agent: DialogueAgent | None = None) -> Trajectory:
    """Return a dialogue about a question that depends on the seed."""
    prompt = Prompt("f#1", tuple(TOKENIZER.encode(f"Where {seed}? ")), "nq", ("Norway",))
    start = start_trajectory(prompt, group="1/0", sample=seed, seed=seed)
    return asyncio.run((agent or agent_of()).run(start, ScriptedEngine(), SAMPLING))


def record_with_search(turn: int = 1, min_turns: int = 3) -> Trajectory:
    """Return a dialogue of at least `min_turns` turns that searches for oslo in the given turn."""
    for seed in range(1000):
        trajectory = record(seed)
        turns = turns_of(trajectory)
        if len(turns) >= min_turns and turns[turn - 1][0].text == TURNS[0]:
            return trajectory
    raise AssertionError("no such dialogue")
