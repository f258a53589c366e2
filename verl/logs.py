"""The log of a command on standard error; passwords of addresses are not in it."""

from __future__ import annotations

import logging

from verl.errors import masked


class MaskedFormatter(logging.Formatter):
    """Formats a record as `logging.Formatter` does, whoever logged it, and hides its secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def start_logging(level: int, pattern: str = "%(levelname)s %(name)s: %(message)s") -> None:
    """Log to standard error from now on, unless somebody has set logging up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(MaskedFormatter(pattern))
    logging.basicConfig(level=level, handlers=[handler])
