"""Makes search dialogues for the cold start from training questions that passages can answer.

`python -m example.smollm2.dialogues --data OUT/data --model BASE --url URL` reads train.parquet and
writes dialogues.jsonl, answerable.parquet (the rows with a dialogue) and statistics to
dialogues.json.

The dialogues follow rules, without a model. The first query is the question or its key words. If
its passages do not contain the answer, the second query is a name that one of them mentions, if the
page of that name has the answer, or else is built from the title of one of them. A question that
compares two things (also one for yes or no) needs a page of each: a second query looks for the one
that is missing. Observations are the retriever's passages, truncated as by the agent. Questions
whose answer is not found are skipped.
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

from example.smollm2.evidence import Evidence, Words, find_evidence, key_words
from example.smollm2.facts import compared
from example.smollm2.names import mentioned, named_pages, names_in
from search_r1.agent.generation import search_agent
from search_r1.agent.question import question_of
from search_r1.agent.tags import TEMPLATES
from search_r1.datasets.evidence import Kind, Titles, kind_of, titles_by_answer
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.schema import Document
from search_r1.rewards.normalize import normalize_answer
from verl.agent.dialogue import DialogueAgent, Limits
from verl.agent.interface import ToolCall
from verl.data.rows import Row, load_rows
from verl.errors import explain
from verl.ext.sft.demonstrations import load_demonstrations

KEY_WORDS_SHARE = 0.3
"""Fraction of first queries that are the key words of the question instead of the question."""
MIN_SUPPORT = 2
"""Minimum number of key words near an answer; fewer mean a chance match."""
NUM_TITLES = 3
"""Number of titles that are tried in second queries."""
NUM_NAMES = 4
"""Number of names in passages, or in the question, that are tried in second queries."""
NUM_COMPARED = 2
"""Number of pages that a comparison needs."""
MAX_CONCURRENT = 64
"""Maximum number of questions that are processed concurrently."""

FIRST_THOUGHTS = ("I need to look this up.", "Let me search for it.", "I should find a document.",
                  "I do not know this yet.")  # fmt: skip
SECOND_THOUGHTS = ("{title} may help. I need to search again.", "Not said yet. I look up {title}.",
                   "The next step is {title}.")  # fmt: skip
LAST_THOUGHTS = ("Now I know.", "I have read the answer.", "The documents say it.")
COMPARING = "I compare {} with {}."


@dataclass(frozen=True)
class Search:
    """A query and its results."""

    thought: str
    query: str
    documents: Sequence[Document]
    """The documents that are complete in the observation."""
    observation: str


@dataclass(frozen=True)
class Dialogue:
    """The searches for a question and the answer that the last one found."""

    row: Row
    searches: Sequence[Search]
    answer: str
    conclusion: str
    """The thought of the last turn."""

    @property
    def kind(self) -> Kind:
        """What the question asks for."""
        return kind_of(question_of(self.row), self.row.ground_truth, normalize_answer)

    @property
    def is_new(self) -> bool:
        """Whether it compares, or searches twice; all others answer from the first documents."""
        return self.kind is not Kind.SPAN or len(self.searches) > 1

    @property
    def segments(self) -> Iterator[tuple[str, str]]:
        """Origin and text of the segments after the prompt."""
        for s in self.searches:
            yield "policy", f"<think> {s.thought} </think> <search> {s.query} </search>"
            yield "observation", s.observation
        yield "policy", f"<think> {self.conclusion} </think> <answer> {self.answer} </answer>"

    def record(self) -> dict[str, object]:
        """Return the row for `verl.ext.sft.demonstrations`, with its source."""
        return {
            "prompt": list(self.row.prompt),
            "segments": [{"origin": origin, "text": text} for origin, text in self.segments],
            "data_source": self.row.data_source,
            "number": self.row.number,
            "num_searches": len(self.searches),
        }


async def make_dialogues(
    rows: Sequence[Row], agent: DialogueAgent, seed: int, titles: Titles
) -> list[Dialogue]:
    """Return dialogues for the rows that the rules can answer; each depends on row and seed.

    `titles` are the pages that contain each answer.
    """
    semaphore = asyncio.Semaphore(MAX_CONCURRENT)

    async def process(row: Row) -> Dialogue | None:
        async with semaphore:
            return await make_dialogue(row, agent, random.Random(f"{seed}/{row.uid}"), titles)

    results = await asyncio.gather(*map(process, rows))
    return [dialogue for dialogue in results if dialogue is not None]


async def make_dialogue(
    row: Row, agent: DialogueAgent, rng: random.Random, titles: Titles
) -> Dialogue | None:
    """Return a dialogue of one or two searches, or None if they do not find the answer."""
    question = question_of(row)
    kind = kind_of(question, row.ground_truth, normalize_answer)
    first = await search(first_query(question, rng), rng.choice(FIRST_THOUGHTS), agent)
    conclusion, thought = rng.choice(LAST_THOUGHTS), rng.choice(SECOND_THOUGHTS)
    if kind is not Kind.SPAN:
        dialogue = await _compare(row, first, thought, agent)
        if dialogue is not None or kind is Kind.YES_NO:
            return dialogue
    evidence = supported(question, first, row)
    if evidence is not None:
        return Dialogue(row, (first,), evidence.answer, conclusion)
    if agent.limits.max_turns < NUM_COMPARED:
        return None
    for name, query in _second_queries(question, first.documents, row, titles):
        second = await search(query, thought.format(title=name), agent)
        evidence = supported(f"{question} {query}", second, row)
        if evidence is not None and is_plain(second.thought + query):
            return Dialogue(row, (first, second), evidence.answer, conclusion)
    return None


async def _compare(row: Row, first: Search, thought: str, agent: DialogueAgent) -> Dialogue | None:
    """Return the dialogue of a question about two things, if a page of each is found."""
    question, searches = question_of(row), (first,)
    pages = named_pages(question, first.documents)
    if len(pages) < NUM_COMPARED <= agent.limits.max_turns:
        known = normalize_answer(" ".join(document.contents for document in pages.values()))
        missing = [name for name in names_in(question) if normalize_answer(name) not in known]
        for name in missing[:NUM_NAMES]:
            second = await search(name, thought.format(title=name), agent)
            pages = named_pages(question, [*first.documents, *second.documents])
            if len(pages) >= NUM_COMPARED:
                searches = (first, second)
                break
    spans = [Words.of(question).slice(*span) for a in row.ground_truth
             for span in Words.of(question).find(a)]  # fmt: skip
    kind = kind_of(question, row.ground_truth, normalize_answer)
    answers = list(row.ground_truth) if kind is Kind.YES_NO else spans
    texts = [text for s in searches for text in (s.thought, s.query)]
    if len(pages) < NUM_COMPARED or not answers or not is_plain("".join([*texts, *pages])):
        return None
    conclusion = compared(question, pages, row.ground_truth) or COMPARING.format(*pages)
    return Dialogue(row, searches, answers[0].strip("\"'“”‘’`.,;:!?"), conclusion)


def _second_queries(
    question: str, documents: Sequence[Document], row: Row, titles: Titles
) -> Iterator[tuple[str, str]]:
    """Yield names with the query for each: linked pages with an answer, then titles."""
    found = [titles[a] for a in map(normalize_answer, row.ground_truth) if a in titles]
    asked = normalize_answer(question)
    answers = [*map(normalize_answer, row.ground_truth)]
    pages = {p for of_answer in found for p in of_answer if p not in asked and p not in answers}
    names = [name for document in documents for name in mentioned(document.contents, pages)]
    for name in list(dict.fromkeys(names))[:NUM_NAMES]:
        yield name, name
        yield name, second_query(question, name)
    for title in dict.fromkeys(document.title for document in documents[:NUM_TITLES]):
        yield title, second_query(question, title)


async def search(query: str, thought: str, agent: DialogueAgent) -> Search:
    """Search with the agent's tool, which truncates the observation as in a dialogue."""
    result, observation = await agent.consult(ToolCall("search", query))
    documents = [item.source for item in result.items if isinstance(item.source, Document)]
    complete = [document for document in documents if document.text.strip() in observation]
    return Search(thought, query, complete, observation)


def first_query(question: str, rng: random.Random) -> str:
    """Return the question as a query, or its key words."""
    text = whole_query(question)
    return _key_phrase(text) if rng.random() < KEY_WORDS_SHARE else text


def whole_query(question: str) -> str:
    """Return the question without its question mark."""
    return question.strip().rstrip("?").strip()


def second_query(question: str, title: str) -> str:
    """Return the title and the key words of the question that are not in it."""
    return f"{title} {_key_phrase(question, without=title)}".strip()


def _key_phrase(text: str, without: str = "") -> str:
    """Return the key words of `text`, as they are written there, that are not in `without`."""
    excluded = set(key_words(without))
    words = [word.strip("?!.,;:\"'()") for word in text.split()]
    return " ".join(word for word in words if set(key_words(word)) - excluded)


def supported(question: str, search: Search, row: Row) -> Evidence | None:
    """Return evidence for an answer if it is more than a chance match and a plain text."""
    evidence = find_evidence(question, search.documents, row.ground_truth)
    if evidence is None or evidence.support < MIN_SUPPORT:
        return None
    return evidence if is_plain(evidence.answer + search.query) else None


def is_plain(text: str) -> bool:
    """Return whether a text has no tags and no line breaks, so that a policy may write it."""
    return not re.search(r"[<>\n|]", text)


def report(
    num_rows: int, dialogues: Sequence[Dialogue], file: Path, tokenizer: Any
) -> dict[str, Any]:
    """Return the number of questions and dialogues, and statistics of their length in tokens."""
    trajectories = load_demonstrations(str(file), tokenizer, 1 << 30)
    return {
        "questions": num_rows,
        "dialogues": len(dialogues),
        "by_set": dict(sorted(Counter(d.row.data_source for d in dialogues).items())),
        "by_kind": dict(sorted(Counter(str(d.kind) for d in dialogues).items())),
        "by_searches": dict(sorted(Counter(len(d.searches) for d in dialogues).items())),
        "tokens": _statistics([trajectory.num_tokens for trajectory in trajectories]),
        "policy_tokens": _statistics([trajectory.num_policy_tokens for trajectory in trajectories]),
    }


def _statistics(values: Sequence[int]) -> dict[str, float]:
    percents = {"median": 50, "p90": 90, "max": 100}
    percentiles = {name: float(np.percentile(values, p)) for name, p in percents.items()}
    return {"mean": round(float(np.mean(values)), 1), **percentiles}


async def _make_all(
    options: argparse.Namespace, tokenizer: Any, rows: Sequence[Row]
) -> list[Dialogue]:
    """Make the dialogues with an agent that has the same limits as in training."""
    limits = Limits(max_turns=options.max_turns, max_obs_length=options.max_obs_length)
    async with RetrievalClient(options.url, options.topk) as retrieval:
        agent = search_agent(retrieval, tokenizer, limits, TEMPLATES[options.template])
        return await make_dialogues(rows, agent, options.seed, answer_pages(rows, options.corpus))


def load_lengths(dialogues: Sequence[Dialogue], tokenizer: Any) -> list[int]:
    """Return about how many tokens each dialogue has, without the tags of the chat template."""
    texts = (
        str(d.row.prompt[-1]["content"]) + "".join(t for _, t in d.segments) for d in dialogues
    )
    return [len(tokenizer.encode(text)) for text in texts]


def answer_pages(rows: Sequence[Row], path: Path) -> Titles:
    """Scan the corpus for the pages that contain each answer."""
    answers = {normalize_answer(answer) for row in rows for answer in row.ground_truth}
    return titles_by_answer(Corpus.open(path), answers - {"yes", "no"}, "squad", 1, lambda _: None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--model", required=True, help="model with the tokenizer that counts")
    add("--url", required=True, help="address of the retriever")
    add("--corpus", type=Path, required=True, help="passages that it serves")
    add("--template", required=True)
    add("--plain-share", type=float, default=1.0, help="share of the others than is_new to keep")
    for name in ("--max-turns", "--topk", "--max-obs-length", "--max-tokens", "--seed"):
        add(name, type=int, required=True)
    options = parser.parse_args()
    rows = load_rows(str(options.data / "train.parquet"))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dialogues = asyncio.run(_make_all(options, tokenizer, rows))
    lengths = load_lengths(dialogues, tokenizer)
    dialogues = [
        dialogue for dialogue, length in zip(dialogues, lengths, strict=True)
        if length <= options.max_tokens and (
            dialogue.is_new
            or random.Random(f"plain/{dialogue.row.uid}").random() < options.plain_share
        )
    ]  # fmt: skip
    if not dialogues:
        fix = "give questions whose answers are in the corpus"
        sys.stderr.write(explain("dialogues", "none", "a question with a hit", fix) + "\n")
        return 2
    file = options.data / "dialogues.jsonl"
    lines = (json.dumps(dialogue.record(), ensure_ascii=False) + "\n" for dialogue in dialogues)
    file.write_text("".join(lines), encoding="utf-8")
    numbers = [dialogue.row.number for dialogue in dialogues]
    frame = pd.read_parquet(options.data / "train.parquet").iloc[numbers]
    frame.to_parquet(options.data / "answerable.parquet", index=False)
    statistics = json.dumps(report(len(rows), dialogues, file, tokenizer), indent=1) + "\n"
    (options.data / "dialogues.json").write_text(statistics)
    sys.stdout.write(statistics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
