"""The question itself, out of a row whose prompt words it for a model."""

from __future__ import annotations

from verl.data.rows import Row

MARK = "Question:"
"""What precedes the question in the prompts of our data sets, and of the original's."""


def question_of(row: Row) -> str:
    """The question itself: `extra_info.question`, else what follows the last `Question:`, else ''.

    Only the last message of a prompt is looked at.
    """
    named = row.extra_info.get("question")
    if isinstance(named, str) and named.strip():
        return named.strip()
    text = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
    return text.rpartition(MARK)[2].strip() if MARK in text else ""
