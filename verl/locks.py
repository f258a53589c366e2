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
    """Hold the folder `path`, which `option` named, while the body lasts. Raises ConfigError.

    `lock` is the file to lock where that cannot be one in the folder. The lock goes with the
    process, however that ends. Where files cannot be locked there is none.
    """
    lock = lock or path / LOCK
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        got, expected = f"{path} ({error})", "a folder that can be written"
        raise ConfigError(explain(option, got, expected, "name another folder")) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                got = f"{path}, which another run is writing to"
                fix = "wait until it has ended, or name another folder"
                raise ConfigError(explain(option, got, "a folder of this run", fix)) from error
        yield
