"""Safe output of untrusted text on terminals and in logs, with control characters escaped.

Otherwise a document's title could clear the screen, write to the clipboard or forge a log line.
"""

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from verl.errors import redact

CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # all but tab and newline
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # text direction, other line separators
    "\ud800-\udfff]"  # lone surrogates, which cannot be encoded
)


def escape_controls(text: str) -> str:
    r"""Return `text` with its control characters escaped, for example ESC as `\x1b`."""
    return CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text.replace("\r\n", "\n"))


def json_line(value: Any) -> str:
    """Return `value` as one line of JSON; of non-ASCII text only control characters are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


class PlainFormatter(logging.Formatter):
    """Log formatter that hides passwords, escapes control characters and indents further lines."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(escape_controls(super().format(record))).replace("\n", "\n  ")


def configure_logging(level: int, log_format: str) -> None:
    """Log to standard error through a PlainFormatter."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter(log_format))
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # tells which builds it tries


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; vertical bars within cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    escaped = ([text.replace("|", "\\|") for text in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"
