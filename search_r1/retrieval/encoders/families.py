"""How to use the encoders of known families: prefixes, pooling and normalisation."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from search_r1.retrieval.errors import SetupError

Vectors = npt.NDArray[np.float32]
MAX_INPUT_LENGTH = 1 << 20
"""Upper bound of input lengths; tokenizers without a limit report a much larger number."""


@dataclass(frozen=True)
class Family:
    """How to use the encoders of one family, according to their training."""

    name: str
    pattern: str
    """Regular expression that matches a whole word in a model's name, lower-case and with `-`."""
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: str | None = None
    """Pooling for model folders that declare none."""
    normalizes: bool = True
    """Whether to normalise the vectors of model folders that declare no modules."""


E5_TASK = "Given a web search query, retrieve relevant passages that answer the query"
FAMILIES = (
    Family("e5-instruct", r"e5[a-z0-9-]*instruct", f"Instruct: {E5_TASK}\nQuery: ", "", "mean"),
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
"""The first family that matches is used."""
OTHER = Family("other", "")
NAMES = (*(family.name for family in FAMILIES), OTHER.name)


def model_name(model_path: str) -> str:
    """Return the model name of a hub name, a model folder, or a folder of the hub's cache."""
    path = Path(model_path)
    if path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def model_folder(file: Path) -> Path:
    """Return the model folder of an ONNX file, which lies there or in a folder inside."""
    inside, around = file.absolute().parents[:2]
    is_whole = (inside / "tokenizer.json").exists() and not (around / "modules.json").exists()
    return inside if is_whole else around


def family_of(name: str, family_name: str | None = None) -> Family:
    """Return family `family_name`, or else the one that matches model `name`; raises SetupError.

    `_` and `.` count as `-`: local copies are often named so.
    """
    if family_name is not None and family_name not in NAMES:
        raise SetupError(f"--encoder_family {family_name}; expected {', '.join(NAMES)}")
    plain = re.sub("[_.]", "-", name.lower())
    for family in FAMILIES:
        word = rf"(?<![a-z0-9])(?:{family.pattern})(?![a-z0-9])"
        if family_name == family.name or (family_name is None and re.search(word, plain)):
            return family
    return OTHER


def input_limit(
    limit: int, positions: int | None, model_type: str, pad_token_id: int | None
) -> int:
    """Return the maximum number of input tokens, special tokens included.

    `limit` is the tokenizer's; `positions`: the model's number of position embeddings, if any.
    """
    limit = min(limit, MAX_INPUT_LENGTH)
    if not positions:
        return limit
    if model_type not in {"roberta", "xlm-roberta", "camembert", "mpnet"}:
        return min(limit, positions)
    # These models number positions from pad_token_id + 1, so the first entries are never used.
    if pad_token_id is None:
        raise ValueError(f"a config.json of {model_type} without pad_token_id")
    return min(limit, positions - (pad_token_id + 1))
