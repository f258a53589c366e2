"""The normalisation of answers by which SQuAD compares them, and comparisons built on it."""

import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation, then articles, then extra white space.

    Source: Rajpurkar et al. 2016. Example: ``"The  U.S.A.!"`` gives ``"usa"``, ``"The The"`` gives
    ``""``.
    """
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def matches_exactly(answer: str, accepted: Sequence[str]) -> bool:
    """Tell whether the answer equals an accepted one; what normalises to nothing equals nothing."""
    normalized = normalize_answer(answer)
    return bool(normalized) and any(normalized == normalize_answer(a) for a in accepted)


def covers(text: str, accepted: Sequence[str]) -> bool:
    """Tell whether an accepted answer that is not empty occurs in the text, both normalised."""
    normalized = normalize_answer(text)
    return any(gold and gold in normalized for gold in map(normalize_answer, accepted))
