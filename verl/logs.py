"""Logging of commands to standard error, without secrets of URLs, and their exit status."""

import logging
import os
import select
import sys
from collections.abc import Callable

from verl.errors import UserError, redact
from verl.files import is_file_error
from verl.proxies import bypass_loopback


class MaskedFormatter(logging.Formatter):
    """A `logging.Formatter` that hides the secrets of URLs, whichever package logged them."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def start_logging(level: int) -> None:
    """Log to standard error, unless logging is already configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(MaskedFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def exit_status(
    work: Callable[[], int | None], stopped: str = "stopped", shown: Callable[[str], str] = str
) -> int:
    """Run a command's `work` and return its exit status, which is 0 if `work` returns None.

    An error that the user can fix (an option or a file) is printed as its message, formatted by
    `shown`. Ctrl-C prints `stopped`. If the reader of standard output has gone (`… | head`), the
    rest of the output is dropped and the status is 141, as in a shell. Servers on this machine are
    asked without a proxy, also by libraries and child processes.
    """
    try:
        try:
            bypass_loopback()
            return work() or 0
        finally:
            sys.stdout.flush()
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _drop_unread_output():
            return 141
        if isinstance(error, OSError) and not is_file_error(error):
            raise
        sys.stderr.write(shown(f"{error}\n"))
        return error.exit_code if isinstance(error, UserError) else 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{stopped}\n")
        return 130


def _drop_unread_output() -> bool:
    """Whether standard output is a pipe without a reader; then drop the rest of the output."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return True
