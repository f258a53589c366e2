"""Folders and files that one process at a time may write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

from verl.errors import ConfigError, explain

LOCK = ".lock"
"""The file in a folder that its writer locks for as long as it lives."""


@contextlib.contextmanager
def exclusive(path: Path, option: str, lock: Path | None = None) -> Iterator[None]:
    """Hold the path which `option` named while the body lasts. Raises ConfigError.

    It is a folder, unless `lock` says which file is locked: one beside it, or the path itself. The
    lock goes with the process, however that ends. Where files cannot be locked there is none, nor
    for a device or pipe, which many may write to.
    """
    what = "file" if lock == path else "folder"
    lock = lock or path / LOCK
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        got, expected = f"{path} ({error})", f"a {what} that can be written"
        raise ConfigError(explain(option, got, expected, f"name another {what}")) from error
    with file:
        try:
            if lock.is_file():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                got = f"{path}, which another run is writing to"
                fix = f"wait until it has ended, or name another {what}"
                raise ConfigError(explain(option, got, f"a {what} of this run", fix)) from error
        yield
