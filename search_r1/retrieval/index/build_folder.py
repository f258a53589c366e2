"""The hidden work folder of an index build: used by one builder at a time, kept until complete.

The work for `<dir>/e5_Flat.index` is in `<dir>/.e5_Flat.index.partial/`, with a key of all that
affects the result: a build with the same key continues there, any other starts over. The finished
index is moved to its final path by a rename, so that no reader sees an incomplete one.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from search_r1.retrieval.errors import CorpusError, SetupError
from verl.files import atomic_write, fsync, read_text
from verl.machine import format_bytes

logger = logging.getLogger(__name__)

KEY_NAME = "key.json"
KEY_READER = TypeAdapter(dict[str, Any])
READY_NAME = "ready"
"""Folder of the finished index inside the work folder, before it is renamed."""


@contextmanager
def work_folder(target: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    """Lock and yield the work folder, which is removed when the body succeeds.

    It has the files of earlier runs of this build. Raises SetupError if another builder uses it.
    """
    work = target.with_name(f".{target.name}.partial")
    with _locked(target):
        _resume_or_start(work, json.loads(json.dumps(key)))
        try:
            yield work
        except CorpusError:
            shutil.rmtree(work)  # useless: a corrected corpus has another key
            raise
        shutil.rmtree(work)  # if killed midway, the next build redoes what is missing


def publish(work: Path, target: Path) -> None:
    """Replace `target` by the finished index; readers keep the older files open."""
    ready = work / READY_NAME
    fsync(*ready.rglob("*"), ready)
    outdated = work / "outdated"
    shutil.rmtree(outdated, ignore_errors=True)
    if target.exists():
        target.rename(outdated)
    ready.rename(target)
    fsync(target.parent)


def fresh_folder(folder: Path) -> Path:
    """Empty or create `folder` and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def check_disk(folder: Path, need: int, parts: str) -> None:
    """Log the `need` of the build in bytes; raises SetupError if the disk has less."""
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(existing).free
    needed, available = format_bytes(need), format_bytes(free)
    logger.info("disk: %s needed in %s (%s), %s free", needed, folder, parts, available)
    if need > free:
        raise SetupError(
            f"{folder} has {available} free, but the build needs {needed} ({parts}); expected "
            "enough free space: free some, or give a --save_dir on another disk"
        )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Exclude other builders of `target` by a file lock, which ends with the process.

    File systems without locks, as some clusters have, only get a warning.
    """
    path = target.with_name(f".{target.name}.lock")
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SetupError(
                f"cannot write an index into {path.parent} ({error}); expected a writable folder: "
                "build it elsewhere with index_builder --save_dir, and give that as --index_path"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise SetupError(
                f"another builder is making {target}; expected one builder at a time: wait for it, "
                "stop it, or give another --save_dir"
            ) from error
        except OSError as error:
            logger.warning("%s cannot be locked (%s): start no other builder of it", target, error)
        if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)  # the owner of this lock finished and removed the file in the meantime
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _resume_or_start(work: Path, key: dict[str, Any]) -> None:
    """Keep the work folder if its key is equal, else log why and empty it."""
    try:
        old_key = KEY_READER.validate_json(read_text(work / KEY_NAME))
    except (OSError, ValueError):
        old_key = {}
    differing = [name for name in key if not _is_close(old_key.get(name), key[name])]
    if not differing:
        logger.info("resuming the work in %s", work)
        return
    if work.exists():
        reason = f"has another {', '.join(differing)}" if old_key else "has no key"
        logger.warning("the work in %s %s: starting over", work, reason)
    fresh_folder(work)
    with atomic_write(work / KEY_NAME, is_durable=True) as part:
        part.write_text(json.dumps(key, indent=2))


def _is_close(first: Any, second: Any) -> bool:
    """Return whether entries of keys match; devices round the embedding of a probe differently."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return all(_is_near(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def _is_near(first: Any, second: Any) -> bool:
    is_number = isinstance(first, int | float) and isinstance(second, int | float)
    return abs(first - second) < 0.005 if is_number else bool(first == second)
