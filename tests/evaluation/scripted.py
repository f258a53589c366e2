"""Questions, documents and a scripted policy for tests of evaluations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from search_r1.agent.generation import search_agent
from search_r1.agent.tags import TEMPLATES
from search_r1.evaluation.methods import METHODS, method_agent
from search_r1.evaluation.runner import Runner, Task
from search_r1.evaluation.samples import Sample, SampleSearch
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.protocol import Retrieval
from search_r1.retrieval.schema import Document
from tests.fakes import ByteTokenizer, cut_at_stop
from verl.agent.dialogue import Limits
from verl.data.rows import Row
from verl.types import Completion, Sampling

TEMPLATE = TEMPLATES["short"]
SAMPLING = Sampling(max_tokens=500, temperature=0.0)


def row(number: int, source: str = "nq", answer: str | None = None) -> Row:
    """Build the row of question `number`, with the answer `gold NUMBER` by default."""
    text = TEMPLATE.user_prompt(f"What is thing {number}?")
    gold = answer or f"gold {number}"
    return Row("rows.jsonl", number, ({"role": "user", "content": text},), source, (gold,))


def documents(rows: Sequence[Row]) -> dict[str, list[Document]]:
    """Return for each question a document that states its answer."""
    return {
        f"What is thing {r.number}?": [
            Document.from_title(str(r.number), "Things", f"It is {r.ground_truth[0]} .")
        ]
        for r in rows
    }


@dataclass
class Reader:
    """A policy that searches for the question, then answers with the document's statement."""

    requests: list[Sampling] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Write one turn."""
        self.requests.append(sampling)
        text = self.tokenizer.decode(list(prompt_ids))
        self.prompts.append(text)
        statement = re.search(r"It is (.+?) \.", text)
        question = re.findall(r"Question: (.*?\?)", text)[-1]
        if statement:
            turn = f"<answer> {statement[1]} </answer>"
        elif "<search>" in text and "</information>" not in text:
            turn = f"<search> {question} </search>"
        else:
            turn = "<answer> nothing </answer>"
        text, reason = cut_at_stop(turn, sampling.stop)
        ids = self.tokenizer.encode(text)
        return Completion(tuple(ids), (-0.5,) * len(ids), text, reason)


def runner(retrieval: Retrieval, method: str = "agent", **more: Any) -> Runner:
    """Build a runner with the byte tokenizer."""
    tokenizer = ByteTokenizer()
    agent = search_agent(retrieval, tokenizer, Limits(max_turns=1), TEMPLATE)
    agent = method_agent(agent, METHODS[method])
    return Runner(agent, METHODS[method], tokenizer, SAMPLING, max_turns=1, **more)


def finder(rows: Sequence[Row]) -> InMemoryRetrieval:
    """Build a retriever that finds the document of each question."""
    return InMemoryRetrieval(documents(rows))


def tasks(rows: Sequence[Row], n: int = 1) -> list[Task]:
    """Return `n` tasks for each row."""
    return [Task(row, sample) for row in rows for sample in range(n)]


def sample(
    uid: str = "rows.jsonl#0", em: float = 0.0, *, source: str = "nq", number: int = 0, **more: Any
) -> Sample:
    """Build a scored dialogue with default values."""
    defaults: dict[str, Any] = {
        "question": "What is thing 0?", "ground_truth": ("gold",), "status": "answered",
        "answer": "x", "f1": em, "cover_em": em, "searches": (), "turns": 2, "invalid_actions": 0,
        "truncated_turns": 0, "prompt_tokens": 10, "policy_tokens": 20, "observation_tokens": 30,
        "dialogue": (("prompt", "p"), ("policy", "<answer> x </answer>")),
    }  # fmt: skip
    return Sample(uid=uid, sample=number, data_source=source, em=em, **defaults | more)


def search(query: str, *, has_answer: bool = False) -> SampleSearch:
    """Build a search with one document."""
    return SampleSearch(query, ("1",), has_answer)
