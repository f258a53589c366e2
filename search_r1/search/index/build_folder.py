"""The hidden folder in which an index is made: one builder at a time, kept until it is complete.

The work for `<dir>/e5_Flat.index` lies in `<dir>/.e5_Flat.index.partial/` together with a key of
what decides it; the same build goes on there, another one starts anew. The finished index is
renamed into its place, so that no reader ever sees a half of it.
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

from search_r1.search import checksums
from search_r1.search.errors import CorpusError, SetupError
from search_r1.search.memory import size
from verl.files import atomic_write, fsync

logger = logging.getLogger(__name__)

KEY_NAME = "key.json"
READY_NAME = "ready"
"""Where the finished index lies inside the work folder before it is renamed."""


@contextmanager
def work_folder(target: Path, key: Mapping[str, Any]) -> Iterator[Path]:
    """The folder with what earlier runs of this build left; raises SetupError if it is in use."""
    work = target.with_name(f".{target.name}.partial")
    with _locked(target):
        shutil.rmtree(f"{work}.trash", ignore_errors=True)  # of versions before 2026-11-24
        _resume_or_start(work, json.loads(json.dumps(key)))
        try:
            yield work
        except CorpusError:
            shutil.rmtree(work)  # a corpus that is put right is another corpus
            raise
        shutil.rmtree(work)  # half of it, after a kill, is work that is done again


def publish(work: Path, target: Path) -> None:
    """Put the complete index, with checksums, in place of an older one, which readers keep."""
    ready = work / READY_NAME
    checksums.add(ready)
    fsync(*ready.rglob("*"), ready)
    outdated = work / "outdated"
    shutil.rmtree(outdated, ignore_errors=True)
    if target.exists():
        target.rename(outdated)
    ready.rename(target)
    fsync(target.parent)


def fresh_folder(folder: Path) -> Path:
    """`folder`, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def check_disk(folder: Path, need: int, parts: str) -> None:
    """Say what the build needs and raise SetupError if the disk has less; bytes."""
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(existing).free
    logger.info("disk: %s needed in %s (%s), %s free", size(need), folder, parts, size(free))
    if need > free:
        raise SetupError(
            f"{folder} has {size(free)} free, but the build needs {size(need)} ({parts}); expected "
            "room for all of it: free some, or give a --save_dir on another disk"
        )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Exclude other builders of `target`; the lock goes with the process, however it ends."""
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
                f"another builder is making {target}; expected one at a time: wait for it, end "
                "it, or give another --save_dir"
            ) from error
        if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)  # its owner finished and removed it while this one was opening it
    try:
        yield
    finally:
        path.unlink()
        os.close(handle)


def _resume_or_start(work: Path, key: dict[str, Any]) -> None:
    """Keep the work folder if it is of the same build, else empty it and say so."""
    try:
        found: dict[str, Any] = json.loads((work / KEY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    differing = [name for name in key if not _same(found.get(name), key[name])]
    if not differing:
        logger.info("going on with the work in %s", work)
        return
    if work.exists():
        reason = f"was of another {', '.join(differing)}" if found else "has no key"
        logger.warning("the work in %s %s: starting over", work, reason)
    fresh_folder(work)
    with atomic_write(work / KEY_NAME, is_durable=True) as part:
        part.write_text(json.dumps(key, indent=2))


def _same(found: Any, wanted: Any) -> bool:
    """Equal, or lists of nearly equal numbers: another device rounds a probe otherwise."""
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return all(abs(a - b) < 0.005 for a, b in zip(found, wanted, strict=True))
    return bool(found == wanted)
