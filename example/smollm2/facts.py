"""Facts by which a question compares two pages: a year or a nationality in each.

They are for thoughts of demonstrations, and only if they lead to the accepted answer, as in
`Kluge: German. Salkow: American.` for "Are they of the same nationality?" with the answer no.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from search_r1.retrieval.schema import Document
from search_r1.rewards.normalize import matches_exactly

_YEAR = re.compile(r"\b(1[0-9]{3}|20[0-2][0-9])\b")
_NATION = re.compile(
    r"\b(American|Argentine|Australian|Austrian|Belgian|Brazilian|British|Bulgarian|Canadian|Chinese|"
    r"Croatian|Czech|Danish|Dutch|Egyptian|English|Finnish|French|German|Greek|Hungarian|Indian|"
    r"Iranian|Irish|Israeli|Italian|Japanese|Korean|Mexican|Norwegian|Pakistani|Polish|Portuguese|"
    r"Romanian|Russian|Scottish|Serbian|Soviet|Spanish|Swedish|Swiss|Turkish|Welsh)\b"
)
_EARLIER = re.compile(r"\b(first|earlier|older|oldest|before|longer ago)\b")
_LATER = re.compile(r"\b(later|younger|youngest|more recently|newer)\b")
_SAME = re.compile(r"\bsame (nationality|country)\b|\bnationality\b|\bfrom the same\b")


def compared(question: str, pages: Mapping[str, Document], answers: Sequence[str]) -> str | None:
    """Return a thought with one fact of each of two pages, or None if none leads to an answer."""
    if len(pages) != 2:
        return None
    words = question.lower()
    (first, one), (second, other) = pages.items()
    if _EARLIER.search(words) or _LATER.search(words):
        facts = [_YEAR.search(document.text) for document in (one, other)]
        if facts[0] is None or facts[1] is None or facts[0][0] == facts[1][0]:
            return None
        is_first = (facts[0][0] < facts[1][0]) == (_LATER.search(words) is None)
        leads = matches_exactly(first if is_first else second, answers)
    elif _SAME.search(words):
        facts = [_NATION.search(document.text) for document in (one, other)]
        if facts[0] is None or facts[1] is None:
            return None
        leads = matches_exactly("yes" if facts[0][0] == facts[1][0] else "no", answers)
    else:
        return None
    return f"{first}: {facts[0][0]}. {second}: {facts[1][0]}." if leads else None
