"""The first turn of the reading phase, beside the demonstrations."""

from __future__ import annotations

import asyncio
import random

from example.smollm2.dialogues import FIRST_THOUGHTS, KEY_WORDS_SHARE, make_dialogue, whole_query
from example.smollm2.reading import Reading
from search_r1.agent.generation import search_agent
from search_r1.agent.tags import TEMPLATES
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.schema import Document
from tests.fakes import ByteTokenizer, ScriptedEngine
from verl.agent.dialogue import Limits
from verl.config import Config
from verl.data.rows import Row
from verl.types import Origin, Prompt, Sampling, start_trajectory

QUESTION = "Which river flows through the old city of Basel?"
PAGE = Document.from_title("1", "Basel", "Basel is a city. The river Rhine flows through the city.")


class Fixed(random.Random):
    """Chooses the question as the query, and the first of all wordings."""

    def random(self) -> float:
        """Return a number beyond the share of key words."""
        return KEY_WORDS_SHARE

    def choice(self, seq):  # type: ignore[no-untyped-def]
        """Return the first."""
        return seq[0]


def test_the_policy_meets_what_a_demonstration_begins_with() -> None:
    """Call and documents before the first sampled token are those of the cold start."""
    tokenizer, template = ByteTokenizer(), TEMPLATES["short"]
    found = {query: [PAGE] for query in (QUESTION, whole_query(QUESTION))}
    limits = Limits(max_obs_length=500)
    agent = search_agent(InMemoryRetrieval(found), tokenizer, limits, template)
    text = f"Question: {QUESTION}\n"
    row = Row("test", 0, ({"role": "user", "content": text},), "test", ("Rhine",))
    made = asyncio.run(make_dialogue(row, agent, Fixed(), {}))
    assert made is not None
    (_, call), (_, documents), _ = made.segments
    prompt = Prompt("test#0", tuple(tokenizer.encode(text)), "test", ("Rhine",), text=text)
    start = start_trajectory(prompt, group="g", sample=0, seed=1)
    script = ScriptedEngine(["<answer> Rhine </answer>"])
    done = asyncio.run(Reading.over(agent, Config()).run(start, script, Sampling(1)))
    assert done.segments[1].origin is Origin.OBSERVATION
    assert done.segments[1].text == call + documents and FIRST_THOUGHTS[0] in call
