"""One scored dialogue as plain data: what a line of `samples.jsonl` holds. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

FAILED = "failed"
"""The status of a dialogue that infrastructure broke; it is played again on a restart."""


@dataclass(frozen=True)
class Search:
    """One search that was carried out."""

    query: str
    documents: tuple[str, ...]
    """Ids of what was found, best first."""
    has_answer: bool
    """An accepted answer stands in what was found."""


@dataclass(frozen=True)
class Sample:
    """One dialogue about one question, and its scores."""

    uid: str
    sample: int
    """Which of the question's samples this is, from 0."""
    data_source: str
    question: str
    ground_truth: tuple[str, ...]
    status: str
    """A value of `verl.types.Status`."""
    answer: str | None
    em: float
    f1: float
    cover_em: float
    searches: tuple[Search, ...]
    turns: int
    invalid_actions: int
    """Turns without a search that was carried out or an answer."""
    truncated_turns: int
    """Turns that were cut at their token limit."""
    prompt_tokens: int
    policy_tokens: int
    observation_tokens: int
    dialogue: tuple[tuple[str, str], ...]
    """The whole dialogue: (origin, text), prompt included."""
    judge: float | None = None
    """What the judge gave, if one was asked."""
    error: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return self.uid, self.sample

    @property
    def has_answer_in_documents(self) -> bool:
        """Any of its searches brought an accepted answer."""
        return any(search.has_answer for search in self.searches)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Sample:
        """The sample of one line; raises ValueError, KeyError or TypeError for any other text."""
        found: dict[str, Any] = json.loads(line)
        searches = tuple(
            Search(s["query"], tuple(s["documents"]), s["has_answer"]) for s in found["searches"]
        )
        dialogue = tuple((origin, text) for origin, text in found["dialogue"])
        truth = tuple(found["ground_truth"])
        for name in found.keys() & _KINDS.keys():
            if not isinstance(found[name], _KINDS[name]):
                raise TypeError(f"{name}={found[name]!r}")
        for name in ("em", "f1", "cover_em"):
            if not 0 <= found[name] <= 1:
                raise ValueError(f"{name}={found[name]}")
        return cls(**found | {"searches": searches, "dialogue": dialogue, "ground_truth": truth})


_WORDS: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "None": type(None)}
_KINDS = {
    one.name: tuple(_WORDS[word] for word in str(one.type).split(" | "))
    for one in fields(Sample)
    if not str(one.type).startswith("tuple")
}
"""What a sample's fields are, but for lists, as `isinstance` takes it."""
