"""A folder for Unix sockets, whose paths have at most 107 bytes; a job's TMPDIR may be longer."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from verl.errors import ResourceError, explain

logger = logging.getLogger(__name__)

MAX_PATH_BYTES = 107
"""Maximum size of the path of a Unix socket on Linux, without the closing zero."""


def socket_folder(*variables: str, room: int) -> str:
    """Return the folder that the first set variable names, or a shorter one if it is too long.

    `room` is the number of bytes that a process appends to the folder for its sockets. Without
    variables, the system's folder for temporary files is meant. Raises ResourceError naming the
    variable if its folder cannot be written.
    """
    name = next((name for name in variables if os.environ.get(name)), None)
    folder = os.environ[name] if name else "/tmp"
    if name:
        check_writable(name, folder)
    if _fits(folder, room):
        return folder
    others = ("/tmp", os.environ.get("XDG_RUNTIME_DIR", ""))
    short = next((o for o in others if o and _fits(o, room) and _is_writable(o)), None)
    if short is None:
        got = f"{folder} ({len(os.fsencode(folder))} bytes)"
        expected = f"a folder of at most {MAX_PATH_BYTES - room} bytes, for Unix sockets"
        raise ResourceError(explain(str(name), got, expected, f"export {name}=/short/folder"))
    logger.warning("sockets are in %s: the path of %s (%s) is too long", short, name, folder)
    return short


def check_writable(name: str, folder: str) -> None:
    """Raise ResourceError if no file can be made in the folder that a variable names."""
    if not _is_writable(folder):
        kind = "a folder that cannot be written" if Path(folder).is_dir() else "no folder"
        fix = f"mkdir -p {folder}, or unset {name}"
        expected = "a folder that exists and can be written"
        raise ResourceError(explain(name, f"{folder} ({kind})", expected, fix))


def _fits(folder: str, room: int) -> bool:
    return len(os.fsencode(os.path.abspath(folder))) + room <= MAX_PATH_BYTES


def _is_writable(folder: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
