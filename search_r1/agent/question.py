"""Finds the question in the prompt of a data set."""

import re

from verl.data.rows import Row

QUESTION_MARK = re.compile("Question:|问题：")
"""Text before the question in the prompts of this project's and the original's data sets."""


def question_in(prompt: str) -> str | None:
    """Return the text behind the last mark of a question in a prompt; None without a mark."""
    parts = QUESTION_MARK.split(prompt)
    return parts[-1] if len(parts) > 1 else None


def question_line(prompt: str) -> str:
    """Return the rest of the line behind the mark of a question in a prompt; empty without one.

    The text of a chat has control tokens such as <|im_end|>, which end the question too.
    """
    return re.split(r"\n|<[|/]", question_in(prompt) or "", maxsplit=1)[0].strip()


def question_of(row: Row) -> str:
    """Return `extra_info.question`, or the text after `Question:` in the last message, or ''."""
    question = row.extra_info.get("question")
    if isinstance(question, str) and question.strip():
        return question.strip()
    text = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
    return (question_in(text) or "").strip()
