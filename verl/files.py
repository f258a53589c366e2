"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path, *, is_lasting: bool = False) -> Iterator[Path]:
    """A path beside `path` to write to; the file takes its place when the body has succeeded.

    `is_lasting`: it is on the disk before that, so that it is whole after a power cut too.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # who else writes it has another
    try:
        yield part
        if is_lasting:
            flush(part)
        os.replace(part, path)
        if is_lasting:
            flush(path.parent)
    except BaseException:
        with suppress(OSError):  # it may not be there, or the disk be read-only
            part.unlink()
        raise


def flush(*paths: Path) -> None:
    """Wait until the bytes of files, and the names in folders, are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
