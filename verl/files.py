"""Files that appear whole or not at all, grow by whole lines, or have one writer at a time; and
whose fault an error is."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from verl.errors import ConfigError, explain

MAX_CHARS = 2**30
"""Characters that are read of a file which must be in memory at once."""
PIPE_PREFIXES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Where a process finds the pipes that whoever started it gave it: the only ones read."""
LOCK_NAME = ".lock"
"""The file in a folder that its writer locks for as long as it lives."""
ASIDE_NAME = "set_aside"
"""The folder in a run's for what an earlier run left there."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def is_file_error(error: OSError) -> bool:
    """Whether a file or its disk is at fault, which a user can mend, and not a connection."""
    return error.filename is not None or error.errno in DISK_ERRORS


def regular_file(path: str | Path) -> Path:
    """The path of a file with an end. Raises OSError for a device, a named pipe or a folder."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(path)


def read_text(path: str | Path, most: int = MAX_CHARS) -> str:
    """The text of a file, or of a pipe that was given, in UTF-8.

    Raises ValueError for bytes that are no text, OSError also for over `most` characters.
    """
    if not str(path).startswith(PIPE_PREFIXES):
        regular_file(path)
    with open(path, encoding="utf-8-sig") as file:
        found = file.read(most + 1)
    if "\0" in found:
        raise ValueError("a NUL character, which no text has")
    if len(found) > most:
        raise OSError(errno.EFBIG, f"more than {most} characters", str(path))
    return found


class LineWriter:
    """A file that grows by whole lines; each is the system's to keep once it was appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)  # what a buffer holds would be lost, or come late

    def append(self, line: str) -> None:
        """Add a line. Raises OSError, which names the file; no part of the line is left then."""
        self.append_bytes(f"{line}\n".encode(errors="backslashreplace"))

    def append_bytes(self, data: bytes) -> None:
        """Add what is as whole as a line, in the same way."""
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        self._file.close()


@contextmanager
def atomic_write(path: Path, *, is_durable: bool = False) -> Iterator[Path]:
    """A path beside `path` to write to; the file takes its place when the body has succeeded.

    `is_durable`: it is on the disk before that, so that it is whole after a power cut too.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # who else writes it has another
    try:
        yield part
        if is_durable:
            fsync(part)
        os.replace(part, path)
        if is_durable:
            fsync(path.parent)
    except BaseException as error:
        with suppress(OSError):  # it may not be there, or the disk be read-only
            part.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(*paths: Path) -> None:
    """Wait until the bytes of files, and the names in folders, are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def move_aside(root: Path, paths: Sequence[Path]) -> Path:
    """Move what an earlier run left in `root` into a new folder below it, which is returned."""
    place = root / ASIDE_NAME / uuid.uuid4().hex[:8]
    place.mkdir(parents=True)
    for path in paths:
        os.replace(path, place / path.name)
    return place


@contextmanager
def exclusive_lock(path: Path, option: str, lock: Path | None = None) -> Iterator[None]:
    """Hold the path which `option` named while the body lasts. Raises ConfigError.

    It is a folder, unless `lock` says which file is locked: one beside it, or the path itself. The
    lock goes with the process, however that ends. Where files cannot be locked there is none, nor
    for a device or pipe, which many may write to.
    """
    what = "file" if lock == path else "folder"
    lock = lock or path / LOCK_NAME
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
