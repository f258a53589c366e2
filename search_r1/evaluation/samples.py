"""Scored dialogues as plain data, as stored in the lines of `samples.jsonl`; no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

FAILED = "failed"
"""Status of a dialogue that an infrastructure failure ended; a restart runs it again."""


@dataclass(frozen=True)
class SampleSearch:
    """One search that was carried out."""

    query: str
    documents: tuple[str, ...]
    """Ids of the documents it found, best first."""
    has_answer: bool
    """Whether the documents contain an accepted answer."""


@dataclass(frozen=True)
class Sample:
    """One dialogue with its scores."""

    uid: str
    sample: int
    """Number of this sample of the question, from 0."""
    data_source: str
    question: str
    ground_truth: tuple[str, ...]
    status: str
    """A value of `verl.types.Status`."""
    answer: str | None
    em: float
    f1: float
    cover_em: float
    searches: tuple[SampleSearch, ...]
    turns: int
    invalid_actions: int
    """Number of turns without a valid search or answer."""
    truncated_turns: int
    """Number of turns that were cut off at the token limit."""
    prompt_tokens: int
    policy_tokens: int
    observation_tokens: int
    dialogue: tuple[tuple[str, str], ...]
    """The whole dialogue including the prompt, as (origin, text)."""
    judge: float | None = None
    """The judge's score; None without a judge or verdict."""
    error: str = ""
    seconds: float | None = field(default=None, compare=False)
    """Wall time of the dialogue, without the judge; None in older evaluations."""

    @property
    def key(self) -> tuple[str, int]:
        return self.uid, self.sample

    @property
    def has_answer_in_documents(self) -> bool:
        """Whether any search found an accepted answer."""
        return any(search.has_answer for search in self.searches)

    @property
    def tokens(self) -> int:
        """All tokens of the dialogue: those of its prompts, sampled, and of documents."""
        return self.prompt_tokens + self.policy_tokens + self.observation_tokens

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Sample:
        """Parse a line. Raises ValueError, KeyError or TypeError if it is not a sample."""
        values: dict[str, Any] = json.loads(line)
        searches = tuple(
            SampleSearch(s["query"], tuple(s["documents"]), s["has_answer"])
            for s in values["searches"]
        )
        dialogue = tuple((origin, text) for origin, text in values["dialogue"])
        truth = tuple(values["ground_truth"])
        for name in values.keys() & _FIELD_TYPES.keys():
            if not isinstance(values[name], _FIELD_TYPES[name]):
                raise TypeError(f"{name}={values[name]!r}")
        for name in ("em", "f1", "cover_em"):
            if not 0 <= values[name] <= 1:
                raise ValueError(f"{name}={values[name]}")
        return cls(**values | {"searches": searches, "dialogue": dialogue, "ground_truth": truth})


_TYPES: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "None": type(None)}
_FIELD_TYPES = {
    each.name: tuple(_TYPES[name] for name in str(each.type).split(" | "))
    for each in fields(Sample)
    if not str(each.type).startswith("tuple")
}
"""Types of the fields of a sample that are not tuples, for `isinstance`."""
