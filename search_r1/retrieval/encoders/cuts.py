"""Counts the texts that a model's input limit cuts: in a log line, and in the server's metrics."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = 8
"""More than any tokenizer adds to a text or a pair."""


@dataclass
class Cuts:
    """How many texts of one kind were encoded, and how many of them were cut."""

    what: str
    """Plural of the kind: queries, passages, pairs."""
    limit: int = 0
    """Tokens that are kept."""
    option: str = ""
    """The option that sets the limit, unless the model's own is lower; if given, the first text
    that is cut is logged."""
    num_texts: int = 0
    num_cut: int = 0

    def add(self, num_texts: int, num_cut: int) -> None:
        """Count some texts; log the first that was cut."""
        if self.option and num_cut and not self.num_cut:
            logger.warning(
                "%s of more than %d tokens are cut (%s, or the model's own limit): here %d of %d; "
                "/metrics counts all",
                self.what,
                self.limit,
                self.option,
                num_cut,
                num_texts,
            )
        self.num_texts += num_texts
        self.num_cut += num_cut


def count_cut(encoded: Any, limit: int) -> int:
    """Return how many rows of a tokenizer's result with `truncation=True` were cut.

    A tokenizer in Python keeps no rest, so its rows of `limit` tokens count.
    """
    if encoded.encodings is None:
        return sum(len(ids) >= limit for ids in encoded["input_ids"])
    return sum(bool(row.overflowing) for row in encoded.encodings)


def count_longer(tokenizer: Any, rows: Sequence[tuple[str, ...]], limit: int) -> int:
    """Return how many texts, or pairs of texts, have more than `limit` tokens.

    For models that tokenize by themselves; texts with fewer bytes than tokens are not tokenized.
    """
    sizes = [sum(len(text.encode(errors="replace")) for text in row) for row in rows]
    long = [r for r, size in zip(rows, sizes, strict=True) if size > limit - SPECIAL_TOKENS]
    if not long:
        return 0
    columns = [list(column) for column in zip(*long, strict=True)]
    return count_cut(tokenizer(*columns, truncation=True, max_length=limit), limit)
