"""The answer in a reply without tags: how a model that was never taught them is judged fairly."""

from __future__ import annotations

import re

from search_r1.agent.grammar import Grammar, tag_pattern

_CONTROL = re.compile(r"<\|[^|<>]*\|>")
"""What ends a message, and the like."""
_LEAD = re.compile(r".*\banswer\b[^.\n]*?(?:\bis\b|:)\s*:?\s*(?=\S)", re.IGNORECASE | re.DOTALL)
"""Up to the last "the answer is", "answer:", "the answer to this question is:"."""


def read_answer(reply: str, tags: Grammar) -> str:
    """What the reply says the answer is, else the whole reply; its thinking is left out.

    *Example*: "So the answer to this is: Oslo." gives "Oslo."
    """
    opening, closing = map(re.escape, (tags.think.opening, tags.think.closing))
    spoken = re.sub(f"{opening}.*?{closing}", " ", reply, flags=re.DOTALL)
    spoken = _CONTROL.sub(" ", tag_pattern(tags).sub(" ", spoken)).strip()
    lead = _LEAD.match(spoken)
    return spoken[lead.end() :].partition("\n")[0].strip() if lead else spoken
