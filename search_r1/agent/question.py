"""Finds the question in the prompt of a data set."""

import re

QUESTION_MARK = re.compile("Question:|问题：")
"""Text before the question in the prompts of this project's and the original's data sets."""


def question_in(prompt: str) -> str | None:
    """Return the text behind the last mark of a question in a prompt; None without a mark."""
    parts = QUESTION_MARK.split(prompt)
    return parts[-1] if len(parts) > 1 else None
