"""Cold start: search dialogues out of training questions whose passages hold the answer.

`python -m example.smollm2.dialogues --data OUT/data --model BASE --url URL` reads train.parquet and
writes dialogues.jsonl, answerable.parquet (the rows that have one) and counts in dialogues.json.

By rule, without a model: the query is the question or its key words; where that does not bring the
answer, a second query is built from the title of a passage that the first one brought. Observations
are what the retriever returned, cut as the agent cuts them. Questions without a hit are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import AutoTokenizer

from example.smollm2.evidence import Evidence, find_evidence, key_words
from search_r1.agent.generation import search_agent
from search_r1.agent.tags import TEMPLATES
from search_r1.inference.dialogue import question_of
from search_r1.search.client import RetrievalClient
from search_r1.search.schema import Document
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.interface import ToolCall
from verl.data.rows import Row, load_rows
from verl.errors import explain
from verl.sft.demonstrations import load_demonstrations

KEY_WORDS_SHARE = 0.3
"""Of first queries that are the question's key words; the others are the question itself."""
MIN_SUPPORT = 2
"""Key words of the question that must stand near an answer: less is a chance match."""
NUM_TITLES = 3
"""Titles that may lead a second query."""
AT_ONCE = 64
"""Questions that are worked on at a time."""

FIRST_THOUGHTS = ("I need to look this up.", "Let me search for it.", "I should find a document.",
                  "I do not know this yet.")  # fmt: skip
SECOND_THOUGHTS = ("{title} may help. I need to search again.", "Not said yet. I look up {title}.",
                   "The next step is {title}.")  # fmt: skip
LAST_THOUGHTS = ("Now I know.", "I have read the answer.", "The documents say it.")


@dataclass(frozen=True)
class Search:
    """One query and what came of it."""

    thought: str
    query: str
    documents: Sequence[Document]
    """Those that the policy is shown whole."""
    observation: str


@dataclass(frozen=True)
class Dialogue:
    """A question's searches and the evidence that the last one brought."""

    row: Row
    searches: Sequence[Search]
    evidence: Evidence
    conclusion: str
    """The thought of the last turn."""

    @property
    def segments(self) -> Iterator[tuple[str, str]]:
        """Who writes what after the prompt."""
        for search in self.searches:
            thought, query = search.thought, search.query
            text = f"<think> {thought} </think> <search> {query} </search>"
            yield "policy", text
            yield "observation", search.observation
        thought, answer = self.conclusion, self.evidence.answer
        text = f"<think> {thought} </think> <answer> {answer} </answer>"
        yield "policy", text

    def record(self) -> dict[str, object]:
        """The row of `verl.sft.demonstrations`, and where it comes from."""
        return {
            "prompt": list(self.row.prompt),
            "segments": [{"origin": origin, "text": text} for origin, text in self.segments],
            "data_source": self.row.data_source,
            "number": self.row.number,
            "num_searches": len(self.searches),
        }


async def make_dialogues(rows: Sequence[Row], agent: DialogueAgent, seed: int) -> list[Dialogue]:
    """A dialogue for each row that a rule can solve, in their order; depends on the seed alone."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(row: Row) -> Dialogue | None:
        async with gate:
            return await make_dialogue(row, agent, random.Random(f"{seed}/{row.uid}"))

    return [made for made in await asyncio.gather(*map(one, rows)) if made is not None]


async def make_dialogue(row: Row, agent: DialogueAgent, rng: random.Random) -> Dialogue | None:
    """One or two searches and the answer copied from a passage; None where none of them hits."""
    question = question_of(row)
    first = await search(first_query(question, rng), rng.choice(FIRST_THOUGHTS), agent)
    conclusion = rng.choice(LAST_THOUGHTS)
    evidence = supported(question, first, row)
    if evidence is not None:
        return Dialogue(row, (first,), evidence, conclusion)
    if agent.limits.max_turns < 2:
        return None
    thought = rng.choice(SECOND_THOUGHTS)
    for title in dict.fromkeys(document.title for document in first.documents[:NUM_TITLES]):
        query = second_query(question, title)
        second = await search(query, thought.format(title=title), agent)
        evidence = supported(question, second, row)
        if evidence is not None and is_plain(second.thought + query):
            return Dialogue(row, (first, second), evidence, conclusion)
    return None


async def search(query: str, thought: str, agent: DialogueAgent) -> Search:
    """Ask the agent's retriever, and cut what comes as the agent does."""
    brought, observation = await agent.consult(ToolCall("search", query))
    found = [item.source for item in brought.items if isinstance(item.source, Document)]
    shown = [document for document in found if document.text.strip() in observation]
    return Search(thought, query, shown, observation)


def first_query(question: str, rng: random.Random) -> str:
    """The question without its mark, or its key words."""
    bare = question.strip().rstrip("?").strip()
    return _key_phrase(bare) if rng.random() < KEY_WORDS_SHARE else bare


def second_query(question: str, title: str) -> str:
    """The title, and the question's key words that are not in it."""
    return f"{title} {_key_phrase(question, without=title)}".strip()


def _key_phrase(text: str, without: str = "") -> str:
    """The words of the text that BM25 compares, as they are written there."""
    known = set(key_words(without))
    words = [word.strip("?!.,;:\"'()") for word in text.split()]
    return " ".join(word for word in words if set(key_words(word)) - known)


def supported(question: str, search: Search, row: Row) -> Evidence | None:
    """Evidence that is more than a chance match, and that the policy may write."""
    evidence = find_evidence(question, search.documents, row.ground_truth)
    if evidence is None or evidence.support < MIN_SUPPORT:
        return None
    return evidence if is_plain(evidence.answer + search.query) else None


def is_plain(text: str) -> bool:
    """Whether a policy may write it: no tags, no line breaks."""
    return not re.search(r"[<>\n|]", text)


def report(num_rows: int, made: Sequence[Dialogue], file: Path, tokenizer: Any) -> dict[str, Any]:
    """How many questions had a dialogue, and how long these are in tokens."""
    trajectories = load_demonstrations(str(file), tokenizer, 1 << 30)
    return {
        "questions": num_rows,
        "dialogues": len(made),
        "by_set": dict(sorted(Counter(d.row.data_source for d in made).items())),
        "by_searches": dict(sorted(Counter(len(d.searches) for d in made).items())),
        "tokens": _spread([trajectory.num_tokens for trajectory in trajectories]),
        "policy_tokens": _spread([trajectory.num_policy_tokens for trajectory in trajectories]),
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    names = {"median": 50, "p90": 90, "max": 100}
    spread = {name: float(np.percentile(values, at)) for name, at in names.items()}
    return {"mean": round(float(np.mean(values)), 1), **spread}


async def _ask(given: argparse.Namespace, tokenizer: Any, rows: Sequence[Row]) -> list[Dialogue]:
    """The dialogues, by an agent with the budgets of training."""
    limits = Limits(max_turns=given.max_turns, max_obs_length=given.max_obs_length)
    async with RetrievalClient(given.url, given.topk) as retrieval:
        agent = search_agent(retrieval, tokenizer, limits, TEMPLATES[given.template])
        return await make_dialogues(rows, agent, given.seed)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--model", required=True, help="whose tokenizer counts")
    add("--url", required=True, help="of the retriever")
    add("--template", required=True)
    for name in ("--max-turns", "--topk", "--max-obs-length", "--seed"):
        add(name, type=int, required=True)
    given = parser.parse_args()
    rows = load_rows(str(given.data / "train.parquet"))
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    made = asyncio.run(_ask(given, tokenizer, rows))
    if not made:
        fix = "give questions whose answers the corpus holds"
        sys.stderr.write(explain("dialogues", "none", "a question with a hit", fix) + "\n")
        return 2
    file = given.data / "dialogues.jsonl"
    lines = (json.dumps(one.record(), ensure_ascii=False) + "\n" for one in made)
    file.write_text("".join(lines), encoding="utf-8")
    frame = pd.read_parquet(given.data / "train.parquet").iloc[[one.row.number for one in made]]
    frame.to_parquet(given.data / "answerable.parquet", index=False)
    found = json.dumps(report(len(rows), made, file, tokenizer), indent=1) + "\n"
    (given.data / "dialogues.json").write_text(found)
    sys.stdout.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
