"""How encoders of known families were trained to be used: prefixes, pooling, length of vectors."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from search_r1.search.errors import SetupError

Vectors = npt.NDArray[np.float32]


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
    """The family `wanted`, or whose pattern is a word of the model's name; raises SetupError."""
    if wanted is not None and wanted not in NAMES:
        raise SetupError(f"--encoder_family {wanted}; expected {', '.join(NAMES)}")
    for family in FAMILIES:
        word = rf"(?<![a-z0-9])(?:{family.pattern})(?![a-z0-9])"
        if wanted == family.name or (wanted is None and re.search(word, name.lower())):
            return family
    return OTHER
