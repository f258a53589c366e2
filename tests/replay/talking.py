"""An engine whose every turn follows from all it was given, and dialogues that it recorded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from search_r1.agent.generation import search_agent
from search_r1.agent.tags import TEMPLATES
from search_r1.replay.playing import turns_of
from search_r1.search.client import InMemoryRetrieval, Retrieval
from search_r1.search.schema import Document
from tests.fakes import ByteTokenizer, cut_at_stop
from verl.agent.dialogue import DialogueAgent, Limits
from verl.rollout.interface import RolloutEngine
from verl.types import Completion, Prompt, Sampling, Trajectory, start_trajectory

TOKENIZER = ByteTokenizer()
SAMPLING = Sampling(200)
OSLO = Document.from_title("1", "Oslo", "Oslo is a city in Norway.")
BERGEN = Document.from_title("2", "Bergen", "Bergen lies by the sea.")
FOUND = {"oslo": [OSLO], "both": [OSLO, BERGEN], "sea": [BERGEN]}
SAID = (
    "<think> hm </think><search> oslo </search>", "<search> both </search>",
    "<think> what now </think>", "<answer> Norway </answer>",
)  # fmt: skip


@dataclass
class TalkingEngine(RolloutEngine):
    """Says one of `SAID`, by context and seed; so do its log-probs."""

    requests: list[tuple[tuple[int, ...], Sampling]] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.requests.append((tuple(prompt_ids), sampling))
        draw = random.Random(repr((tuple(prompt_ids), sampling.seed)))
        text, _ = cut_at_stop(draw.choice(SAID), sampling.stop)
        ids = TOKENIZER.encode(text)[: sampling.max_tokens]
        log_probs = tuple(-draw.random() for _ in ids)
        return Completion(tuple(ids), log_probs, TOKENIZER.decode(ids), "stop", 4)


def agent_of(retrieval: Retrieval | None = None, **limits: int) -> DialogueAgent:
    """Two searches and an answer, over three queries that are known."""
    own = Limits(
        **{"max_turns": 3, "max_response_length": 200, "max_prompt_length": 2000, **limits}
    )
    return search_agent(retrieval or InMemoryRetrieval(FOUND), TOKENIZER, own, TEMPLATES["short"])


def record(seed: int, agent: DialogueAgent | None = None) -> Trajectory:
    """A dialogue of a question of its own."""
    prompt = Prompt("f#1", tuple(TOKENIZER.encode(f"Where {seed}? ")), "nq", ("Norway",))
    start = start_trajectory(prompt, group="1/0", sample=seed, seed=seed)
    return asyncio.run((agent or agent_of()).run(start, TalkingEngine(), SAMPLING))


def searching(turn: int = 1, least: int = 3) -> Trajectory:
    """One that searches for oslo in a turn and goes on."""
    for seed in range(1000):
        found = record(seed)
        turns = turns_of(found)
        if len(turns) >= least and turns[turn - 1][0].text == SAID[0]:
            return found
    raise AssertionError("no such dialogue")
