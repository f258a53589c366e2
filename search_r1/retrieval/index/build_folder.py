"""The hidden work folder of an index build: used by one builder at a time, kept until complete.

The work for `<dir>/e5_Flat.index` is in `<dir>/.e5_Flat.index.partial/`, with a key of all that
affects the result: a build with the same key continues there, any other starts over. The finished
index is moved to its final path by a rename, so that no reader sees an incomplete one.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from search_r1.retrieval.errors import CorpusError, SetupError
from verl.files import atomic_write, exclusive_lock, fsync, read_text
from verl.machine import format_bytes

logger = logging.getLogger(__name__)

KEY_NAME = "key.json"
KEY_READER = TypeAdapter(dict[str, Any])
READY_NAME = "ready"
"""Folder of the finished index inside the work folder, before it is renamed."""


@contextmanager
def work_folder(target: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    """Lock and yield the work folder, which is removed when the body succeeds.

    It has the files of earlier runs of this build. Raises ConfigError if another builder uses it,
    or if the folder cannot be written.
    """
    work, lock = (target.with_name(f".{target.name}.{suffix}") for suffix in ("partial", "lock"))
    with exclusive_lock(target, "--save_dir", lock=lock):
        try:
            _resume_or_start(work, json.loads(json.dumps(key)))
            try:
                yield work
            except CorpusError:
                shutil.rmtree(work)  # useless: a corrected corpus has another key
                raise
            shutil.rmtree(work)  # if killed midway, the next build redoes what is missing
        finally:
            lock.unlink()


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
    if not (isinstance(first, list) and isinstance(second, list) and len(first) == len(second)):
        return bool(first == second)
    try:
        return bool(np.allclose(first, second, rtol=0, atol=0.005))
    except (TypeError, ValueError):  # a damaged file
        return False


def utc_now() -> str:
    """Return the current UTC time, for a manifest's `created`."""
    return datetime.now(UTC).isoformat(timespec="seconds")
