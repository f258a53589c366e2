"""Words of others on a terminal and in logs: their control characters are shown, not obeyed.

A title could otherwise clear the screen, write into the clipboard, or pass for a line of the log.
"""

import json
import logging
import re
from typing import Any

from verl.errors import redact

CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # all but tab and line end
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # order of writing, other line ends
    "\ud800-\udfff]"  # halves of characters, which no output takes
)


def escape_controls(text: str) -> str:
    r"""`text` with its control characters written out. *Example*: an escape becomes `\x1b`."""
    return CONTROLS.sub(lambda one: ascii(one[0])[1:-1], text.replace("\r\n", "\n"))


def json_line(value: Any) -> str:
    """`value` as JSON in one line, readable, with every control character escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return CONTROLS.sub(lambda one: f"\\u{ord(one[0]):04x}", text) + "\n"


class PlainFormatter(logging.Formatter):
    """Hides passwords, and indents further lines, so that none passes for another message."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return redact(escape_controls(super().format(record))).replace("\n", "\n  ")


def configure_logging(level: int, form: str) -> None:
    """Let this process log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
