"""What a command tells on standard error: its log, without passwords of addresses, and its end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from verl.errors import UserError, redact
from verl.files import is_file_error


class MaskedFormatter(logging.Formatter):
    """Formats a record as `logging.Formatter` does, whoever logged it, and hides its secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def start_logging(level: int) -> None:
    """Log to standard error from now on, unless somebody has set logging up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(MaskedFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def exit_status(
    work: Callable[[], int | None], stopped: str = "stopped", shown: Callable[[str], str] = str
) -> int:
    """The exit status of a command that does `work`; 0 where that gives none.

    What its user can mend, an option or a file, is told in one message, as `shown` writes it;
    `stopped` at Ctrl-C.
    """
    try:
        return work() or 0
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and not is_file_error(error):
            raise
        sys.stderr.write(shown(f"{error}\n"))
        return error.exit_code if isinstance(error, UserError) else 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{stopped}\n")
        return 130
