"""Control tokens in the texts of question files, which come from outside.

The contents of messages are neutralised whole. A prompt that is a plain string may have been
rendered before, with control tokens that are meant; of it only the question, as the row's
`extra_info.question` has it, is known to come from outside.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.agent.control import ControlStrings, break_strings, control_strings
from verl.agent.grammar import Grammar
from verl.data.rows import Row

logger = logging.getLogger(__name__)


def strings_of_rows(tokenizer: Any, tags: Grammar) -> ControlStrings:
    """Return the control tokens that a row may not contain.

    A row may explain the tags of its own dialogue format, which some tokenizers have as tokens:
    Qwen3 has `<think>`.
    """
    own = {text for tag in tags.tags for text in (tag.opening, tag.closing)}
    return control_strings(tokenizer).without(own)


def neutral_row(row: Row, strings: Sequence[str]) -> Row:
    """Return the row with a space in each of `strings` in its texts."""
    if not isinstance(row.prompt, str):
        return replace(row, prompt=tuple(_neutral(message, strings) for message in row.prompt))
    question = str(row.extra_info.get("question") or "").strip()
    if not question or question in strings:
        return row
    safe = break_strings(question, strings)
    return replace(row, prompt=row.prompt.replace(question, safe))


def _neutral(value: Any, strings: Sequence[str]) -> Any:
    """Return a part of a message, such as an earlier tool call, with its texts neutralised."""
    if isinstance(value, str):
        return break_strings(value, strings)
    if isinstance(value, Mapping):
        return {name: _neutral(part, strings) for name, part in value.items()}
    return [_neutral(part, strings) for part in value] if isinstance(value, list) else value


def neutral_rows(rows: Sequence[Row], strings: Sequence[str]) -> list[Row]:
    """Return the rows neutralised; the log says how many contained control tokens."""
    neutral = [neutral_row(row, strings) for row in rows]
    changed = [old.uid for old, new in zip(rows, neutral, strict=True) if old.prompt != new.prompt]
    if changed:
        logger.warning(
            "%d of %d rows contain control tokens of the tokenizer, each broken up by a space, "
            "such as %s", len(changed), len(rows), changed[0],
        )  # fmt: skip
    return neutral
