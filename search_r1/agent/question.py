"""Finds the question in the prompt of a data set."""

import re

from verl.data.rows import Row

QUESTION_MARK = re.compile("Question:|问题：")
"""Text before the question in the prompts of this project's and the original's data sets."""
_MESSAGE_END = r"<[|｜]|</s>|<end_of_turn>|\[/INST\]"
"""What ends a message, and the question in it, in a prompt that a chat template wrote."""


def question_in(prompt: str) -> str | None:
    """Return the text behind the last mark of a question in a prompt; None without a mark."""
    parts = QUESTION_MARK.split(prompt)
    return parts[-1] if len(parts) > 1 else None


def question_line(prompt: str) -> str:
    """Return the rest of the line behind the mark of a question in a prompt; empty without one."""
    return re.split(rf"\n|</|{_MESSAGE_END}", question_in(prompt) or "", maxsplit=1)[0].strip()


def question_of(row: Row) -> str:
    """Return `extra_info.question`, or the text after `Question:` in the last message, or ''.

    In a prompt that is text, which may be a rendered chat, the end of its message ends it too.
    """
    question = row.extra_info.get("question")
    if isinstance(question, str) and question.strip():
        return question.strip()
    if isinstance(row.prompt, str):
        return re.split(_MESSAGE_END, question_in(row.prompt) or "", maxsplit=1)[0].strip()
    return (question_in(row.prompt[-1]["content"]) or "").strip()
