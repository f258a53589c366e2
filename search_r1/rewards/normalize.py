"""SQuAD's normalisation of answers, and comparisons of normalised answers."""

import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case the text, then drop ASCII punctuation, articles and extra white space.

    Source: Rajpurkar et al. 2016. Example: ``"The  U.S.A.!"`` gives ``"usa"``, ``"The The"`` gives
    ``""``.
    """
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def matches_exactly(answer: str, accepted: Sequence[str]) -> bool:
    """Whether the answer equals an accepted one; an empty normalised answer equals none."""
    normalized = normalize_answer(answer)
    return bool(normalized) and any(normalized == normalize_answer(a) for a in accepted)


def covers(text: str, accepted: Sequence[str]) -> bool:
    """Whether the text contains a non-empty accepted answer, both normalised."""
    normalized = normalize_answer(text)
    return any(gold and gold in normalized for gold in map(normalize_answer, accepted))
