"""Atomic file writes, append-only line files, file locks, and bounded reads of user files."""

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
"""Maximum characters read from a file that must fit in memory at once."""
PIPE_PREFIXES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Path prefixes of pipes inherited from the parent process, the only pipes that are read."""
LOCK_NAME = ".lock"
"""Name of the file in a folder that its writer keeps locked."""
ASIDE_NAME = "set_aside"
"""Name of the folder, inside a run's folder, for files of an earlier run."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Error numbers that a full, read-only or broken disk causes."""


def is_file_error(error: OSError) -> bool:
    """Whether the cause is a file or disk, which a user can fix, rather than a connection."""
    return error.filename is not None or error.errno in DISK_ERRORS


def regular_file(path: str | Path) -> Path:
    """Return the path of a regular file. Raises OSError for a device, a named pipe or a folder."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(path)


def read_text(path: str | Path, max_chars: int = MAX_CHARS) -> str:
    """Return the UTF-8 text of a regular file or an inherited pipe.

    Raises ValueError if it is not text, OSError for another kind of file or over `max_chars`.
    """
    if not str(path).startswith(PIPE_PREFIXES):
        regular_file(path)
    with open(path, encoding="utf-8-sig") as file:
        text = file.read(max_chars + 1)
    if "\0" in text:
        raise ValueError("a NUL character, which no text has")
    if len(text) > max_chars:
        raise OSError(errno.EFBIG, f"more than {max_chars} characters", str(path))
    return text


class LineWriter:
    """Appends whole lines to a file. An appended line survives a crash of this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered: a crash would lose buffered lines, and readers would see them late.
        self._file = path.open("ab", buffering=0)

    def append(self, line: str) -> None:
        """Append a line. Raises OSError with the file's name, leaving no part of the line."""
        self.append_bytes(f"{line}\n".encode(errors="backslashreplace"))

    def append_bytes(self, data: bytes) -> None:
        """Append bytes that form whole lines, in the same way as `append`."""
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
    """Yield a temporary path to write to; rename it to `path` when the body has succeeded.

    `is_durable` flushes the file to disk first, so that it is complete even after a power cut.
    """
    # With the process id, so that concurrent writers use different temporary files.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        if is_durable:
            fsync(part)
        os.replace(part, path)
        if is_durable:
            fsync(path.parent)
    except BaseException as error:
        with suppress(OSError):  # the file may be missing, or the disk read-only
            part.unlink()
        # Errors of a full disk have no file name. Others may come from a connection of the body.
        if isinstance(error, OSError) and error.filename is None and error.errno in DISK_ERRORS:
            error.filename = str(path)
        raise


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(*paths: Path) -> None:
    """Flush the contents of files, and the entries of folders, to disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def move_aside(root: Path, paths: Sequence[Path]) -> Path:
    """Move files of an earlier run into a new folder below `root`, and return that folder."""
    folder = root / ASIDE_NAME / uuid.uuid4().hex[:8]
    folder.mkdir(parents=True)
    for path in paths:
        os.replace(path, folder / path.name)
    return folder


@contextmanager
def exclusive_lock(path: Path, option: str, lock: Path | None = None) -> Iterator[None]:
    """Lock the output `path`, which the user named by `option`, for the duration of the body.

    By default `path` is a folder and a file inside it is locked; `lock` names another file to lock,
    which may be `path` itself. The lock ends with the process, however that ends. Devices and
    pipes, and file systems without locks, are not locked. Raises ConfigError if another process
    holds the lock, or if the lock file cannot be opened.
    """
    kind = "file" if lock == path else "folder"
    lock = lock or path / LOCK_NAME
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        got, expected = f"{path} ({error})", f"a {kind} that can be written"
        raise ConfigError(explain(option, got, expected, f"name another {kind}")) from error
    with file:
        try:
            if lock.is_file():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                got = f"{path}, which another run is writing to"
                fix = f"wait until that run has ended, or name another {kind}"
                raise ConfigError(explain(option, got, f"a {kind} of this run", fix)) from error
        yield
