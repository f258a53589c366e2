"""What families of encoders expect: prefixes, pooling, and whether vectors have unit length.

A family is known by the model's name; what the model folder itself declares comes first.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from search_r1.search.errors import SetupError


@dataclass(frozen=True)
class Family:
    """How the encoders of one family were trained to be used."""

    name: str
    pattern: str
    """A regular expression that the lower-case name of a model has as a word."""
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: str | None = None
    """Pooling of a folder that declares none."""
    normalizes: bool = True
    """Whether the vectors of a folder that declares no modules have unit length."""


E5_TASK = "Given a web search query, retrieve relevant passages that answer the query"
FAMILIES = (
    Family("e5-instruct", r"e5[a-z0-9_-]*instruct", f"Instruct: {E5_TASK}\nQuery: ", "", "mean"),
    Family("e5", "e5", "query: ", "passage: ", "mean"),
    Family(
        "bge-en",
        "bge-(?:small|base|large)-en",
        "Represent this sentence for searching relevant passages: ",
        pooling="cls",
    ),
    Family("bge", "bge", pooling="cls"),
    Family("dpr", "dpr", pooling="cls", normalizes=False),
    Family("contriever", "contriever", pooling="mean", normalizes=False),
)
"""Looked through in this order."""
OTHER = Family("other", "")
NAMES = (*(family.name for family in FAMILIES), OTHER.name)


def model_name(model_path: str) -> str:
    """The name of a model folder or hub name, also inside the hub's cache."""
    path = Path(model_path)
    if path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def family_of(name: str, wanted: str | None = None) -> Family:
    """The family called `wanted`, or the one that the model's name tells; raises SetupError."""
    if wanted is None:
        return next((family for family in FAMILIES if _has_word(name, family.pattern)), OTHER)
    if wanted not in NAMES:
        raise SetupError(f"--encoder_family {wanted}; expected {', '.join(NAMES)}")
    return next(family for family in (*FAMILIES, OTHER) if family.name == wanted)


def _has_word(name: str, pattern: str) -> bool:
    """Whether the name has the pattern with neither letter nor digit around it."""
    return re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", name.lower()) is not None
